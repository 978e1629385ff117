"""Ownership of a shard's keys, and the names of its queues.

An owner holds a lease, which others respect, and a token, which is the proof: every script that
writes compares it with the record of the last owner, and renews the lease. Whoever takes over,
because the lease ran out, writes another token there; from then on the former owner can write
nothing more, frozen or cut off for however long. After a fault of the connection the store refuses
everything until it is opened anew, where the shard's server is then.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Sequence
from typing import Any, NamedTuple

from pinlaterd.engines.base import Durability, Ownership
from pinlaterd.engines.redis import scripts
from pinlaterd.engines.redis.connection import Argument, Connection, Server
from pinlaterd.engines.redis.faults import refusal_words
from pinlaterd.engines.redis.scripts import Script
from pinlaterd.engines.redis.sentinel import Locator
from pinlaterd.engines.redis.server_facts import read_durability, refuse_cluster, refuse_replica
from pinlaterd.errors import QueueNotFound, ShardOwned, StorageError, StorageNotCommitted

# After an unclean end, the last second of an append-only file may be lost, or an older copy of it
# may stand in for it: ids that were given out then lie far below where the next owner begins.
_IDS_SKIPPED = 1_000_000
# A server that hangs is given up in time to open it anew within a lease.
_MOST_ANSWER_SECONDS = 5.0
_MOST_PRIORITIES = 127  # that any configuration may have had


class ShardKeys(NamedTuple):
    """A shard: its name is in all of its keys."""

    name: str
    server: Server

    def __str__(self) -> str:
        return f"{self.server}, shard {self.name}"


class Store:
    """One shard's keys, open for their owner."""

    def __init__(self, name: str, locator: Locator, lease_seconds: float) -> None:
        self._name = name
        self._locator = locator
        self._shard: ShardKeys | None = None  # where it was opened last
        self.queues: set[str] = set()
        self.durability = Durability("not opened yet")
        self._lease_ms = round(lease_seconds * 1000)
        self._answer_seconds = min(_MOST_ANSWER_SECONDS, lease_seconds / 2)
        host = socket.gethostname().replace(":", "-")
        self._who = f"process {os.getpid()} on {host} ({secrets.token_hex(8)})"
        self._token = b""
        self._connection: Connection | None = None

    # --- ownership ---------------------------------------------------------------------------

    @property
    def shard(self) -> ShardKeys:
        if self._shard is None:
            raise StorageError(f"shard {self._name} is not open")
        return self._shard

    def address(self) -> str:
        """Of the server; "" before it was found for the first time."""
        if self._shard is None:
            return ""
        return f"{self._shard.server.host}:{self._shard.server.port}"

    def open(self, now_ms: int) -> Ownership:
        if self._connection is not None:
            raise StorageError(f"{self.shard} is open already; close it first")
        self._shard = ShardKeys(self._name, self._locator.find())
        connection = Connection(self._shard.server, self._answer_seconds)
        try:
            refuse_cluster(connection)
            refuse_replica(connection)
            ownership = self._take_over(connection, now_ms)
            self.durability = read_durability(connection)
        except BaseException:
            connection.close()
            raise
        self._connection = connection
        return ownership

    def _take_over(self, connection: Connection, now_ms: int) -> Ownership:
        ended_badly = "1" if self._token else "0"
        status, *answer = connection.run(
            scripts.OPEN,
            (self._name, now_ms, self._lease_ms, self._who, _IDS_SKIPPED, ended_badly),
        )
        if status == b"REFUSED":
            raise StorageError(f"{self.shard.server} {refusal_words(answer[0].decode())}")
        if status == b"OWNED":
            owner, left_ms = answer
            raise ShardOwned(
                f"{self.shard} is owned by {_who(owner)}, for {max(0, left_ms) / 1000:.1f} s more"
                " if it does not renew its lease"
            )
        self._token, start_ms, clean, queues = answer
        self.queues = {queue.decode() for queue in queues}
        return Ownership(start_ms, bool(clean))

    def close(self) -> None:
        """Safe to repeat. An end that can't be noted counts as unclean: ids are skipped."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        with contextlib.suppress(StorageError):
            connection.run(scripts.CLOSE, (self._name, self._token))
            self._token = b""
        connection.close()

    # --- reading and writing -----------------------------------------------------------------

    @property
    def connection(self) -> Connection:
        if self._connection is None:
            raise StorageError(f"{self.shard} is not open")
        return self._connection

    def read(self, script: Script, *arguments: Argument) -> list[Any]:
        """What a script that only reads returns, behind its OK."""
        answer: list[Any] = self.connection.run(script, (self._name, *arguments))
        return answer[1:]

    def write(self, script: Script, arguments: Sequence[Argument] = ()) -> list[Any]:
        """What a script that writes returns, behind its OK. All of it is done, or nothing."""
        connection = self.connection
        status, *answer = connection.run(
            script, (self._name, self._token, self._lease_ms, *arguments)
        )
        if status == b"REFUSED":
            raise StorageNotCommitted(f"{self.shard.server} {refusal_words(answer[0].decode())}")
        if status == b"DEPOSED":
            owner = _who(answer[0]) if answer[0] else "nobody, by its record"
            message = f"{self.shard} is not ours any more, but owned by {owner}"
            connection.fail(message)
            raise StorageError(f"{message}; nothing was written")
        return list(answer)

    def heartbeat(self) -> None:
        """Renew the lease. A server that takes no writes keeps no owner."""
        try:
            self.write(scripts.HEARTBEAT)
        except StorageNotCommitted as error:
            raise StorageError(error.message) from error

    # --- queues ------------------------------------------------------------------------------

    def known(self, queue: str) -> str:
        """The name of a queue that exists."""
        if queue not in self.queues:
            raise QueueNotFound(queue)
        return queue

    def create_queue(self, queue: str, now_ms: int) -> None:
        if queue not in self.queues:
            self.write(scripts.CREATE_QUEUE, (queue, now_ms, _IDS_SKIPPED))
            self.queues.add(queue)

    def delete_queue(self, queue: str) -> None:
        if queue in self.queues:
            self.write(scripts.DELETE_QUEUE, (queue, _MOST_PRIORITIES))
            self.queues.remove(queue)


def _who(token: bytes) -> str:
    """Of a token FENCE:START_MS:WHO."""
    return token.decode(errors="replace").split(":", 2)[-1]
