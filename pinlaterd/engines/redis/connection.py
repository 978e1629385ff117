"""One connection to a Redis server, made once and never silently made anew.

redis-py's pools and clients connect again whenever they find a connection closed. An owner must
not: a server that was away may have come back with older data. So once a connection has failed
it refuses everything, and who opens another one begins with an empty memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from redis.backoff import NoBackoff
from redis.connection import Connection as DriverConnection
from redis.retry import Retry

from pinlaterd.engines.redis.faults import (
    CONNECTION_FAULTS,
    PACKING_FAULTS,
    is_answer,
    is_full,
    is_refusal,
    is_unknown_script,
    words,
)
from pinlaterd.engines.redis.scripts import Script
from pinlaterd.errors import StorageError, StorageFull, StorageNotCommitted

Argument = bytes | str | int

CONNECT_SECONDS = 3.0


@dataclass(frozen=True)
class Server:
    """Where a Redis server is, and how to be let in."""

    host: str
    port: int
    user: str = ""
    passwd: str = field(default="", repr=False)

    def __str__(self) -> str:
        return f"Redis at {self.host}:{self.port}"

    def find(self) -> Server:
        """Itself: a server whose address is known."""
        return self


class Connection:
    """Blocking; `answer_seconds` is how long the server may take for one answer."""

    def __init__(
        self, server: Server, answer_seconds: float, *, connect_seconds: float = CONNECT_SECONDS
    ) -> None:
        """Connect. Raises StorageError."""
        self.server = server
        self.trouble = ""  # why it must be opened anew
        self._driver = DriverConnection(
            host=server.host,
            port=server.port,
            username=server.user or None,
            password=server.passwd or None,
            socket_timeout=answer_seconds,
            socket_connect_timeout=connect_seconds,
            socket_keepalive=True,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
        )
        try:
            self._driver.connect()
        except CONNECTION_FAULTS as fault:
            self.close()
            raise StorageError(f"{server} {words(fault)}") from fault

    def close(self) -> None:
        """Safe to repeat."""
        self.trouble = self.trouble or "its connection is closed"
        with contextlib.suppress(*CONNECTION_FAULTS):
            self._driver.disconnect()

    def fail(self, trouble: str) -> None:
        """Refuse everything from now on."""
        self.trouble = trouble
        self.close()

    def run(self, script: Script, arguments: Sequence[Argument]) -> Any:
        """What a script returns. Raises StorageNotCommitted where it has changed nothing."""
        try:
            return self._call(("EVALSHA", script.sha, 0, *arguments), writes=script.writes)
        except _UnknownScript:
            self._call(("SCRIPT LOAD", script.text), writes=False)
        return self._call(("EVALSHA", script.sha, 0, *arguments), writes=script.writes)

    def read(self, *command: Argument) -> Any:
        """What a command that changes nothing answers."""
        return self._call(command, writes=False)

    def administer(self, *command: Argument) -> Any:
        """What a command answers that changes the server's part in replication, and no data. If
        the connection is lost, nobody knows whether it was done: StorageError."""
        try:
            return self._call(command, writes=False)
        except StorageNotCommitted as error:
            if self.trouble:
                raise StorageError(error.message) from error
            raise

    def _call(self, command: Sequence[Argument], *, writes: bool) -> Any:
        if self.trouble:
            raise StorageNotCommitted(f"{self.server} must be opened anew: {self.trouble}")
        try:
            packed = self._driver.pack_command(*command)
        except PACKING_FAULTS as fault:
            raise StorageNotCommitted(f"{self.server} can't be sent a value: {fault}") from fault
        try:
            self._driver.send_packed_command(packed)
            return self._driver.read_response()
        except CONNECTION_FAULTS as fault:
            raise self._error(fault, writes=writes) from fault
        except BaseException:
            self.fail("a call was broken off")  # its answer may come yet
            raise

    def _error(self, fault: Exception, *, writes: bool) -> StorageError:
        if is_unknown_script(fault):
            return _UnknownScript(str(fault))
        message = f"{self.server} {words(fault)}"
        if is_refusal(fault) and is_full(fault):
            return StorageFull(message)
        if is_refusal(fault) or (is_answer(fault) and not writes):
            return StorageNotCommitted(message)
        self.fail("its connection failed" if not is_answer(fault) else "a script failed")
        if not writes:
            return StorageNotCommitted(message)
        return StorageError(f"{message}; whether the last batch was kept is not known")


class _UnknownScript(StorageNotCommitted):
    """The server has been restarted, or has forgotten its scripts."""
