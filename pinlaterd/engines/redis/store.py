"""Ownership of a shard's keys, and the names of its queues.

An owner holds a lease, which others respect, and a token, which is the proof: every script that
writes compares it with the record of the last owner, and renews the lease once half of it is over.
A successor takes over once the lease ran out, or if its holder is a process of this machine that
has ended, and writes another token there; from then on the former owner can write nothing more,
frozen or cut off for however long. After a fault of the connection the store refuses everything
until it is opened again, where the shard's server is then.

The name of an owner is the last part of its token:

    process PID on HOST (PLACE/STARTED/SECRET)

PLACE is the machine's boot and the name space that PID counts in, STARTED when the process started,
in ticks of that boot. A name that has them and is of this very place belongs to a process that can
be looked for; of any other nothing is known, and its lease has to be waited for.

Where several servers share the shards, the record bears the last owner's term, too: the lease of an
owner of an earlier term is not waited for, and an earlier term can't take over any more.

To be wrong costs no job: a token that was replaced writes nothing (common.lua).
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pinlaterd.engines.base import SINGLE, Durability, Term
from pinlaterd.engines.redis import scripts
from pinlaterd.engines.redis.connection import Argument, RedisClient, Server, is_full, refusal_words
from pinlaterd.engines.redis.scripts import LEAN_MARK, Script, is_lean
from pinlaterd.engines.redis.servers import (
    Locator,
    read_durability,
    refuse_cluster,
    refuse_replica,
)
from pinlaterd.errors import (
    QueueNotFound,
    ShardOwned,
    StorageError,
    StorageFull,
    StorageNotCommitted,
    Superseded,
    address_of,
)
from pinlaterd.lifecycle import process_place
from pinlaterd.model import QUEUE_NAME, JobState

log = logging.getLogger(__name__)

# How long the owner before may take to close the store, in a planned move.
_PLANNED_WAIT_SECONDS, _POLL_SECONDS = 5.0, 0.05


class ShardKeys(NamedTuple):
    """A shard: its name is in all of its keys."""

    name: str
    server: Server

    def __str__(self) -> str:
        return f"{self.server}, shard {self.name}"

    def set_key(self, stored_queue: str, priority: int, state: JobState) -> str:
        return f"plq_{self.name}_{stored_queue}.p{priority}_s{int(state)}"


class DamagedKey(StorageNotCommitted):
    """Something else lies under a key than belongs there; nothing was written."""

    def __init__(self, shard: ShardKeys, key: bytes, found: bytes, wanted: bytes) -> None:
        super().__init__(
            f"{shard}: key {key.decode()} holds {found.decode()}, expected {wanted.decode()};"
            " somebody else wrote it: see what it is, then RENAME or DEL it"
        )


class Store:
    """One shard's keys, open for their owner: what of the StorageEngine contract has to do with
    ownership and the names of queues."""

    def __init__(
        self,
        name: str,
        locator: Locator,
        *,
        priority_levels: int,
        lean: bool = True,
        lease_seconds: float,
        answer_seconds: float,
    ) -> None:
        """`lean`: the layout of queues that are created. `answer_seconds`: a server that takes
        longer for an answer is given up."""
        self._name = name
        self._locator = locator
        self._priorities = range(1, priority_levels + 1)
        self._shard: ShardKeys | None = None  # where it was opened last
        self.stored: dict[str, str] = {}  # queues by name: theirs in keys, which tells the layout
        self.expiring_queues: set[str] = set()  # that may have jobs with an expiry
        self._lean = lean  # the layout of queues that are created
        self._durability = Durability("not opened yet")
        self._lease_ms = round(lease_seconds * 1000)
        self._answer_seconds = answer_seconds
        self._who = own_name()
        self._token = b""
        self._fence = 0
        self._connection: RedisClient | None = None

    # --- ownership ---------------------------------------------------------------------------

    @property
    def shard(self) -> ShardKeys:
        if self._shard is None:
            raise StorageError(f"shard {self._name} is not open")
        return self._shard

    def address(self) -> str:
        """Return the address of the server; "" before it was found for the first time."""
        if self._shard is None:
            return ""
        return address_of(self._shard.server.host, self._shard.server.port)

    def open(self, now_ms: int, term: Term = SINGLE) -> int:
        if self._connection is not None:
            raise StorageError(f"{self.shard} is open already; close it first")
        self._shard = ShardKeys(self._name, self._locator.find())
        connection = RedisClient(self._shard.server, self._answer_seconds)
        if term.epoch:
            connection.notice_cuts()
        try:
            refuse_cluster(connection)
            refuse_replica(connection)
            self._durability = read_durability(connection)
            # Last: a later term that comes meanwhile is met by this, not by the first write.
            start_ms = self._take_over(connection, now_ms, term)
        except BaseException:
            connection.close()
            raise
        self._connection = connection
        return start_ms

    def _take_over(self, connection: RedisClient, now_ms: int, term: Term) -> int:
        instead_of = b""  # the token of an owner whose lease need not be waited for
        deadline = time.monotonic() + (_PLANNED_WAIT_SECONDS if term.planned else 0)
        while True:
            waits = time.monotonic() < deadline
            who = (self._who, instead_of, term.server, term.epoch, int(waits))
            status, *answer = connection.run(
                scripts.OPEN, (self._name, now_ms, self._lease_ms, *who)
            )
            if status != b"OWNED" or instead_of:
                break
            if has_ended(_name_in(answer[0])):
                instead_of = answer[0]
            elif waits:
                time.sleep(_POLL_SECONDS)
            else:
                break
        if status == b"SUPERSEDED":
            server, epoch = answer[0].decode(errors="replace"), answer[1]
            raise Superseded(
                f"{self.shard}: server {server} has owned it in epoch {epoch}; this is "
                f"{term.server} in epoch {term.epoch}",
                server,
                epoch,
            )
        if status == b"REFUSED":
            raise StorageError(f"{self.shard.server} {refusal_words(answer[0].decode())}")
        if status == b"DAMAGED":
            raise StorageError(DamagedKey(self.shard, *answer).message)
        if status == b"OWNED":
            owner, left_ms = answer
            raise ShardOwned(
                f"{self.shard} is owned by {_who(owner)}, for {max(0, left_ms) / 1000:.1f} s more"
                " if it does not renew its lease"
            )
        self._token, start_ms, queues, placement, may_expire = answer
        self._fence = max(self._fence, placement)
        names = [queue.decode(errors="replace") for queue in queues]
        self.stored = self._named(names)
        expiring = {name for name, expires in zip(names, may_expire, strict=True) if expires}
        self.expiring_queues = {
            queue for queue, stored in self.stored.items() if stored in expiring
        }
        return int(start_ms)

    def _named(self, stored: Sequence[str]) -> dict[str, str]:
        """Return the queues that are served; one beside a lean one of ours is not."""
        plain = {name: name for name in stored if QUEUE_NAME.match(name)}
        lean = {name[1:]: name for name in stored if is_lean(name) and QUEUE_NAME.match(name[1:])}
        for queue in plain.keys() & lean.keys():
            log.warning(
                "%s: somebody else created queue %s, too; ours is served", self.shard, queue
            )
        return plain | lean

    def durability(self) -> Durability:
        return self._durability

    def close(self) -> None:
        """Close the store. Safe to repeat."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        with contextlib.suppress(StorageError):
            connection.run(scripts.CLOSE, (self._name, self._token))
            self._token = b""
        connection.close()

    # --- reading and writing -----------------------------------------------------------------

    @property
    def failure(self) -> str:
        """Say why the store must be opened again; "" while it need not be."""
        return "" if self._connection is None else self._connection.failure

    @property
    def connection(self) -> RedisClient:
        if self._connection is None:
            raise StorageError(f"{self.shard} is not open")
        return self._connection

    def read(self, script: Script, *arguments: Argument) -> list[Any]:
        """Run a script that only reads; return its result after the OK."""
        status, *answer = self.connection.run(script, (self._name, *arguments))
        if status == b"DAMAGED":
            raise DamagedKey(self.shard, *answer)
        return list(answer)

    def write(self, script: Script, *arguments: Argument) -> list[Any]:
        """Run a script that writes, entirely or not at all; return its result after the OK."""
        connection = self.connection
        ours = (self._name, self._token, self._lease_ms)
        status, *answer = connection.run(script, (*ours, *arguments))
        if status == b"REFUSED":
            text = answer[0].decode()
            kind = StorageFull if is_full(text) else StorageNotCommitted
            raise kind(f"{self.shard.server} {refusal_words(text)}")
        if status == b"DAMAGED":
            raise DamagedKey(self.shard, *answer)
        if status == b"DEPOSED":
            owner = _who(answer[0]) if answer[0] else "nobody: its record is gone"
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

    @property
    def fence(self) -> int:
        return self._fence

    def raise_fence(self, number: int) -> None:
        if number > self._fence:
            self.write(scripts.RAISE_FENCE, number)
            self._fence = number

    def try_enqueue(self, _queue: str) -> None:
        self.write(scripts.TRY_ENQUEUE)

    # --- queues ------------------------------------------------------------------------------

    def queues(self) -> frozenset[str]:
        return frozenset(self.stored)

    def known(self, queue: str) -> str:
        """Return the name in keys of a queue that exists."""
        try:
            return self.stored[queue]
        except KeyError:
            raise QueueNotFound(queue) from None

    def create_queue(self, queue: str, now_ms: int) -> None:
        if queue not in self.stored:
            stored = LEAN_MARK + queue if self._lean else queue
            self.write(scripts.CREATE_QUEUE, stored, now_ms)
            self.stored[queue] = stored

    def delete_queue(self, queue: str) -> None:
        """Delete the queue in both layouts, since another writer may have created the one we don't
        serve. That one goes first, so an interrupted call can be repeated."""
        if queue in self.stored:
            for stored in sorted({queue, LEAN_MARK + queue}, key=self.stored[queue].__eq__):
                self.write(scripts.DELETE_QUEUE, stored)
            del self.stored[queue]
            self.expiring_queues.discard(queue)


def _name_in(token: bytes) -> str:
    """Return the NAME in a token FENCE:START_MS:NAME."""
    return token.decode(errors="replace").split(":", 2)[-1]


def _who(token: bytes) -> str:
    """Name an owner as operators know it."""
    return _name_in(token).partition(" (")[0]


# --- names of owners ---------------------------------------------------------------------------

_PROC = Path("/proc")
_NAME = re.compile(r"process (\d+) on .* \(([^/ ]+)/(\d+)/[0-9a-f]+\)")
# Of what is behind the name of its program in /proc/PID/stat.
_STATE, _STARTED = 0, 19
_ENDED = ("Z", "X")


def own_name() -> str:
    """Make a name for one more owner in this process: no two are alike."""
    pid, host = os.getpid(), socket.gethostname().replace(":", "-")
    place, secret = process_place(), secrets.token_hex(8)
    stat = _stat(pid)
    if not place or stat is None:
        return f"process {pid} on {host} ({secret})"
    return f"process {pid} on {host} ({place}/{stat[_STARTED]}/{secret})"


def has_ended(name: str) -> bool:
    """Tell whether the process of this name runs no more, for sure."""
    match = _NAME.fullmatch(name)
    if match is None or match[2] != process_place():
        return False
    pid = int(match[1])
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass  # another user's: perhaps that of a successor to its number
    stat = _stat(pid)
    return stat is not None and (stat[_STATE] in _ENDED or stat[_STARTED] != match[3])


def _stat(pid: int) -> list[str] | None:
    """Read the fields of a process in /proc, from its state on; None if there are none."""
    try:
        text = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    return text.rpartition(")")[2].split()
