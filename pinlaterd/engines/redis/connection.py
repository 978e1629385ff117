"""One connection to a Redis server, made once and never silently made again.

redis-py's pools and clients reconnect whenever they find a connection closed; an owner must not: a
server that was away may have come back with older data. So once a connection has failed it refuses
everything, and its owner opens another one with an empty memory.

An answer that is an error comes before the server has done anything, but for errors in the midst of
a script. A fault of the connection leaves open what the server did.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hiredis import pack_command
from redis.backoff import NoBackoff
from redis.connection import Connection as DriverConnection
from redis.connection import DefaultParser
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry

from pinlaterd.engines.base import CUT_SECONDS
from pinlaterd.engines.redis.scripts import Script
from pinlaterd.errors import StorageError, StorageFull, StorageNotCommitted, address_of


class ErrorAnswer(Exception):
    """An error that the server answered, in its words: the connection is still good."""


class _Parser(DefaultParser):  # type: ignore[misc, valid-type]  # chosen when it is imported
    """Errors keep their code, and are told from values by their type."""

    @classmethod
    def parse_error(cls, response: str) -> ErrorAnswer:
        return ErrorAnswer(response)


CONNECTION_FAULTS = (ErrorAnswer, RedisError, OSError)
PACKING_FAULTS = (UnicodeError, OverflowError)

CLUSTER_WORDS = (
    "is part of a Redis Cluster, which can't hold a shard; name a server that stands alone as"
    " `master` in shards.yaml"
)
_LET_IN = (
    "refuses the user or the password; correct `user` and `passwd` of the shard in shards.yaml"
)
REPLICA_WORDS = (
    "is a replica, which can't be written to; name its master as `master` in shards.yaml (Sentinels"
    " do that by themselves, once they have agreed)"
)
_TEXTS = {
    "OOM": (
        "is full (maxmemory) and takes no new jobs until there is room, while dequeues and acks"
        " go on; raise maxmemory, or let workers catch up"
    ),
    "LOADING": "is loading its data; it is asked again until it has",
    "READONLY": REPLICA_WORDS,
    "MASTERDOWN": REPLICA_WORDS,
    "MOVED": CLUSTER_WORDS,
    "ASK": CLUSTER_WORDS,
    "TRYAGAIN": CLUSTER_WORDS,
    "CLUSTERDOWN": CLUSTER_WORDS,
    "CROSSSLOT": CLUSTER_WORDS,
    "WRONGPASS": _LET_IN,
    "NOAUTH": _LET_IN,
    "NOPERM": (
        "does not let this user do that; give it the right to all commands on keys `pl*`"
        " (ACL SETUSER … ~pl* +@all)"
    ),
    "MISCONF": (
        "takes no writes because it can't write to its disk; its log says why: make room there,"
        " or mend it"
    ),
    "BUSY": (
        "is busy with a script that runs longer than its busy-reply-threshold, and answers again"
        " when that ends; SCRIPT KILL ends only a script that has written nothing"
    ),
}
# What errors that a script ends with say, of release 7 and of those before.
_WITHIN_A_SCRIPT = ("@user_script", "Error running script")
_SCRIPT_NOT_PERMITTED = "The user executing the script"  # which comes without a code

Argument = bytes | str | int

CONNECT_SECONDS = 3.0


@dataclass(frozen=True)
class Server:
    """The address of a Redis server, and the account to use there."""

    host: str
    port: int
    user: str = ""
    passwd: str = field(default="", repr=False)

    def __str__(self) -> str:
        return f"Redis at {address_of(self.host, self.port)}"

    def find(self) -> Server:
        """Return itself: a server whose address is known."""
        return self


class RedisClient:
    """Blocking; `answer_seconds` is how long the server may take for one answer."""

    def __init__(
        self, server: Server, answer_seconds: float, *, connect_seconds: float = CONNECT_SECONDS
    ) -> None:
        """Connect. Raises StorageError."""
        self.server = server
        self.failure = ""  # why it must be opened again
        self._driver = DriverConnection(
            host=server.host,
            port=server.port,
            socket_timeout=answer_seconds,
            socket_connect_timeout=connect_seconds,
            socket_keepalive=True,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
            parser_class=_Parser,
        )
        try:
            self._driver.connect()
            if server.user or server.passwd:
                account = (server.user, server.passwd) if server.user else (server.passwd,)
                sent = [text.encode(errors="surrogateescape") for text in account]
                self._exchange(pack_command(("AUTH", *sent)))  # type: ignore[arg-type]
        except CONNECTION_FAULTS as fault:
            self.close()
            if isinstance(fault, ErrorAnswer) and not is_refusal(fault):  # AUTH's, of many wordings
                text = words(ErrorAnswer(f"WRONGPASS {fault}"))
                raise StorageError(f"{server} {text}") from fault
            raise StorageError(f"{server} {words(fault)}") from fault

    def notice_cuts(self) -> None:
        """Take it for lost once the server's system has acknowledged nothing for CUT_SECONDS."""
        connected: Any = self._driver._sock  # noqa: SLF001
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(CUT_SECONDS * 1000))

    def close(self) -> None:
        """Close the connection. Safe to repeat."""
        self.failure = self.failure or "its connection is closed"
        with contextlib.suppress(*CONNECTION_FAULTS):
            self._driver.disconnect()

    def fail(self, failure: str) -> None:
        """Refuse everything from now on."""
        self.failure = failure
        self.close()

    def run(self, script: Script, arguments: Sequence[Argument]) -> Any:
        """Run a script; return its result. Raises StorageNotCommitted if it changed nothing."""
        try:
            return self._call(
                ("EVALSHA", script.sha, 0, script.name, *arguments), writes=script.writes
            )
        except _UnknownScript:
            self._call(("SCRIPT", "LOAD", script.text), writes=False)
        return self._call(("EVALSHA", script.sha, 0, script.name, *arguments), writes=script.writes)

    def read(self, *command: Argument) -> Any:
        """Run a command that changes nothing; return its answer."""
        return self._call(command, writes=False)

    def administer(self, *command: Argument) -> Any:
        """Run a command that changes the server's part in replication, and no data. Raises
        StorageError if the connection is lost, as the command may have been carried out."""
        try:
            return self._call(command, writes=False)
        except StorageNotCommitted as error:
            if self.failure:
                raise StorageError(error.message) from error
            raise

    def _call(self, command: tuple[Argument, ...], *, writes: bool) -> Any:
        if self.failure:
            raise StorageNotCommitted(f"{self.server} must be reopened: {self.failure}")
        try:
            packed = pack_command(command)  # type: ignore[arg-type]
        except PACKING_FAULTS as fault:
            raise StorageNotCommitted(f"{self.server} can't be sent a value: {fault}") from fault
        try:
            return self._exchange(packed)
        except CONNECTION_FAULTS as fault:
            raise self._error(fault, writes=writes) from fault
        except BaseException:
            self.fail("a call was broken off")  # its answer may come yet
            raise

    def _exchange(self, packed: bytes) -> Any:
        """Return the server's answer. Raises CONNECTION_FAULTS, also if that is an error."""
        self._driver.send_packed_command([packed], check_health=False)
        answer = self._driver.read_response()
        if isinstance(answer, ErrorAnswer):
            raise answer
        return answer

    def _error(self, fault: Exception, *, writes: bool) -> StorageError:
        if isinstance(fault, ErrorAnswer) and str(fault).startswith("NOSCRIPT"):
            return _UnknownScript(str(fault))
        message = f"{self.server} {words(fault)}"
        if is_refusal(fault) and is_full(str(fault)):
            return StorageFull(message)
        if is_refusal(fault) or (isinstance(fault, ErrorAnswer) and not writes):
            return StorageNotCommitted(message)
        self.fail("a script failed" if isinstance(fault, ErrorAnswer) else "its connection failed")
        if not writes:
            return StorageNotCommitted(message)
        return StorageError(f"{message}; whether the last batch was kept is not known")


class _UnknownScript(StorageNotCommitted):
    """The server has been restarted, or has forgotten its scripts."""


# --- faults in words ---------------------------------------------------------------------------


def is_permission_denied(fault: BaseException | None) -> bool:
    """Tell whether the user, or the host of the server, is denied a command, which is then
    unknown."""
    text = str(fault)
    return text.startswith("NOPERM") or "unknown command" in text


def is_refusal(fault: BaseException) -> bool:
    """Tell whether the server answered before it did anything: not from within a script."""
    text = str(fault)
    within_a_script = any(mark in text for mark in _WITHIN_A_SCRIPT)
    return isinstance(fault, ErrorAnswer) and _code_in(text) in _TEXTS and not within_a_script


def is_full(text: str) -> bool:
    """Tell whether an answer, or an error that a script passed on, says that there is no room."""
    return _code_in(text) == "OOM"


def words(fault: BaseException) -> str:
    """Describe a fault in words that follow the server's name in a message."""
    text = str(fault)
    if isinstance(fault, ErrorAnswer):
        return refusal_words(text)
    if isinstance(fault, TimeoutError | RedisTimeoutError):
        return f"did not answer in time ({text}); see whether it is overloaded or cut off"
    return f"can't be reached ({text}); start it, or correct `master` of the shard in shards.yaml"


def refusal_words(text: str) -> str:
    """Explain a refusal that a script met and passed on."""
    known = _TEXTS.get(_code_in(text))
    return f"answers: {text}" if known is None else f"{known} ({text})"


def _code_in(text: str) -> str:
    """Return an error's code, its first word; releases before 7 put words of their own in front."""
    if _SCRIPT_NOT_PERMITTED in text:
        return "NOPERM"
    return next((word for word in text.replace("-", " ").split() if word in _TEXTS), "")
