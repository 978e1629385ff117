"""Calls of one client, each recorded with what became of it.

Every claim has a source of its own, the number of its call, so that a stored claim names the very
dequeue that made it. A client can die with an answer unread or half read.
"""

from __future__ import annotations

import itertools
import re
import socket
import struct
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from pinlaterd.client import calls
from pinlaterd.client.calls import EnqueuedJob, PreparedCall
from pinlaterd.config.schema import Address
from pinlaterd.errors import EnqueuedInPart, ErrorCode, OutcomeUnknown, PinLaterError
from pinlaterd.model import (
    AckInfo,
    CallContext,
    CheckpointInfo,
    ClaimedJob,
    Job,
    JobOptions,
    JobRecord,
    JobState,
)
from tests.checker.history import FAIL, OK, UNKNOWN, History, Record

HOST = "127.0.0.1"
_CONNECT_SECONDS = 1.0
_HALF_AN_HOUR_MS = 1_800_000
_LENGTH = struct.Struct(">I")
_SHOWN_BYTES = 60
_MOST_PAGES = 40
_SEARCH_SECONDS = 15.0  # and its last page: less than a client gets at the end of a run
# Errors that promise that nothing was done, by operation.
_REFUSALS = {
    "enqueue": {
        ErrorCode.ENQUEUE_REJECTED,
        ErrorCode.NO_HEALTHY_SHARDS,
        ErrorCode.QUEUE_NOT_FOUND,
    },
    "dequeue": {ErrorCode.QUEUE_NOT_FOUND},
    "ack": {ErrorCode.QUEUE_NOT_FOUND},
    "checkpoint": {ErrorCode.QUEUE_NOT_FOUND},
}

T = TypeVar("T")


class NotSentError(OSError):
    """The server has not got the whole call."""


class ClientDiedError(ConnectionAbortedError):
    """The client read only the beginning of the answer."""

    def __init__(self, beginning: bytes) -> None:
        super().__init__("the client died")
        self.beginning = beginning
        self.answer_bytes = int.from_bytes(beginning[:4], "big") if len(beginning) >= 4 else 0


class Claim(NamedTuple):
    """A job in a client's hand."""

    queue: str
    descriptor: str
    body: str
    attempts_remaining: int
    claim: str
    source: str


@dataclass(frozen=True)
class Target:
    """Where the calls go, and how long their answers may take."""

    port: int
    patience_seconds: float
    receive_bytes: int = 0  # of the socket's buffer; 0: the system's choice
    host: str = HOST


class Calls:
    """One client. Its methods return None where the call failed."""

    def __init__(self, name: str, target: Target, history: History) -> None:
        self.name = name
        self._target = target
        self._history = history
        self._socket: socket.socket | None = None
        self._numbers = itertools.count(1)
        self.outcome = OK  # of the last call

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    # --- the life of a job ------------------------------------------------------------------

    def enqueue(self, queue: str, jobs: Sequence[tuple[str, int, int, int]]) -> list[str] | None:
        """Each job: body, priority, attempts, delay in ms (0: none)."""
        now_ms = time.time_ns() // 1_000_000
        prepared = calls.enqueue(
            queue,
            [
                Job(body.encode(), priority, now_ms + delay_ms if delay_ms else None, attempts)
                for body, priority, attempts, delay_ms in jobs
            ],
        )
        shown = [[shown_body(body.encode()), *rest] for body, *rest in jobs]
        return self._run("enqueue", {"queue": queue, "jobs": shown}, prepared)

    def enqueue_keyed(self, queue: str, keys: Sequence[str]) -> list[EnqueuedJob] | None:
        """Enqueue jobs of these keys and bodies that are due in half an hour."""
        due_ms = time.time_ns() // 1_000_000 + _HALF_AN_HOUR_MS
        jobs = [Job(k.encode(), run_after_ms=due_ms, options=JobOptions(k)) for k in keys]
        prepared = calls.enqueue_keyed(queue, jobs)
        return self._run("keyed", {"queue": queue, "keys": list(keys)}, prepared)

    def dequeue(
        self,
        queue: str,
        *,
        limit: int,
        wait_ms: int = 0,
        coverage: float = 1.0,
        dry_run: bool = False,
        succeeded: Sequence[Claim] = (),
        failed: Sequence[Claim] = (),
        read_bytes: int | None = None,
    ) -> list[Claim] | None:
        """`read_bytes`: the client dies when it has read so much of the answer."""
        prepared = calls.dequeue(
            queue,
            limit=limit,
            max_wait_ms=wait_ms,
            coverage=coverage,
            dry_run=dry_run,
            succeeded=[_info(claim) for claim in succeeded],
            failed=[_info(claim) for claim in failed],
        )
        arguments = {
            "queue": queue,
            "limit": limit,
            "wait_ms": wait_ms,
            "coverage": coverage,
            "dry_run": dry_run,
            **_acks(succeeded, failed),
        }
        found = self._run("dequeue", arguments, prepared, wait_ms=wait_ms, read_bytes=read_bytes)
        if found is None or dry_run:
            return None if found is None else []
        source = arguments["source"]
        return [
            Claim(
                queue,
                job.descriptor,
                shown_body(job.body),
                job.attempts_remaining,
                job.claim_descriptor,
                source,
            )
            for job in found
        ]

    def ack(
        self,
        queue: str,
        succeeded: Sequence[Claim] = (),
        failed: Sequence[Claim] = (),
        *,
        named: bool = True,
        delay_ms: int = 0,
    ) -> bool:
        """`named`: with the claims, so that it has no effect once they have ended."""
        infos = [
            [_info(claim, named=named, delay_ms=delay_ms) for claim in claims]
            for claims in (succeeded, failed)
        ]
        prepared = calls.ack(queue, succeeded=infos[0], failed=infos[1])
        arguments = {"queue": queue, **_acks(succeeded, failed, named=named, delay_ms=delay_ms)}
        return self._run("ack", arguments, _confirmed(prepared)) is True

    def checkpoint(
        self,
        claim: Claim,
        *,
        named: bool,
        new_body: str | None = None,
        move_to_pending: bool = False,
        delay_ms: int = 0,
        attempts: int | None = None,
    ) -> bool:
        run_after_ms = time.time_ns() // 1_000_000 + delay_ms if delay_ms else None
        info = CheckpointInfo(
            claim.descriptor,
            new_body=None if new_body is None else new_body.encode(),
            move_to_pending=move_to_pending,
            run_after_ms=run_after_ms,
            attempts=attempts,
            claim_descriptor=claim.claim if named else None,
        )
        held = claim.claim if named else None
        shown = None if new_body is None else shown_body(new_body.encode())
        request = [claim.descriptor, held, shown, move_to_pending, delay_ms, attempts]
        arguments = {"queue": claim.queue, "source": claim.source, "requests": [request]}
        prepared = _confirmed(calls.checkpoint(claim.queue, [info]))
        return self._run("checkpoint", arguments, prepared) is True

    # --- looking ----------------------------------------------------------------------------

    def lookup(self, descriptors: Sequence[str]) -> dict[str, JobRecord] | None:
        prepared = calls.lookup(descriptors, include_body=True)
        return self._run("lookup", {"descriptors": list(descriptors)}, prepared)

    def scan(self, queue: str, state: JobState) -> Any:
        prepared = calls.scan(queue, state, page_size=50)
        return self._run("scan", {"queue": queue, "state": int(state)}, prepared)

    def search(
        self, queue: str, state: JobState, pattern: str, *, future: bool, page_size: int
    ) -> list[str] | None:
        """Page by page, to its end if that comes soon; then the whole is a record beside those of
        its calls."""
        call = calls.scan(queue, state, future=future, body_regex=pattern, page_size=page_size)
        given = {"queue": queue, "state": int(state), "future": future, "pattern": pattern}
        begun = time.monotonic()
        found: list[str] = []
        for _ in range(_MOST_PAGES):
            page = self._run("scan", {**given, "begun": begun}, call)
            if page is None or time.monotonic() > begun + _SEARCH_SECONDS:
                return None
            found += [record.descriptor for record in page.jobs]
            following = calls.page_after(call, page)
            if following is None:
                break
            call = following
        else:
            return None
        now = time.monotonic()
        self._history.add(Record(begun, now, self.name, "searched", given, result=found))
        return found

    def count(
        self, queue: str, state: JobState, *, future: bool = False, pattern: str | None = None
    ) -> int | None:
        arguments = {"queue": queue, "state": int(state), "future": future, "pattern": pattern}
        prepared = calls.count(queue, state, future=future, body_regex=pattern)
        return self._run("count", arguments, prepared)

    def queue_names(self) -> Any:
        return self._run("queue_names", {}, calls.queue_names())

    # --- many jobs --------------------------------------------------------------------------

    def retry(self, queue: str, priority: int, attempts: int, limit: int) -> int | None:
        prepared = calls.retry_failed(
            queue, priority=priority, attempts_to_allow=attempts, limit=limit
        )
        arguments = {"attempts": attempts, "delay_ms": 0, "limit": limit}
        return self._run("retry", {"queue": queue, "priority": priority} | arguments, prepared)

    def delete(self, queue: str, state: JobState, priority: int, limit: int) -> int | None:
        prepared = calls.delete_jobs(queue, state, priority=priority, limit=limit)
        arguments = {"priority": priority, "state": int(state), "limit": limit}
        return self._run("delete", {"queue": queue} | arguments, prepared)

    def create_queue(self, queue: str) -> bool:
        prepared = _confirmed(calls.create_queue(queue))
        return self._run("create_queue", {"queue": queue}, prepared) is True

    def delete_queue(self, queue: str, password: str) -> bool:
        prepared = _confirmed(calls.delete_queue(queue, password=password))
        return self._run("delete_queue", {"queue": queue}, prepared) is True

    # --- one call -----------------------------------------------------------------------------

    def _run(
        self,
        operation: str,
        arguments: dict[str, Any],
        prepared: PreparedCall[T],
        *,
        wait_ms: int = 0,
        read_bytes: int | None = None,
    ) -> T | None:
        number = next(self._numbers)
        if operation == "dequeue":
            arguments["source"] = f"{self.name}#{number}"
        source = arguments.get("source", self.name)
        message = prepared.encode(number, CallContext(source))
        result: T | None = None
        shown: Any = None
        outcome = OK
        t0 = time.monotonic()
        try:
            answer = self._exchange(message, wait_ms / 1000, read_bytes)
            result = prepared.decode(
                number, answer, server=Address(self._target.host, self._target.port)
            )
        except NotSentError as error:
            outcome, arguments["error"] = FAIL, str(error)
        except (OSError, OutcomeUnknown) as error:
            outcome, arguments["error"] = UNKNOWN, str(error)
            arguments["abandoned"] = read_bytes is not None
            arguments["cut"] = isinstance(error, ClientDiedError) and self._is_cut(error)
            if isinstance(error, ClientDiedError):
                arguments["seen"] = _descriptors_in(error.beginning, arguments["queue"])
        except PinLaterError as error:
            outcome = self._outcome(operation, arguments, error)
            arguments["error"] = f"{error.code.name}: {error}"
            if isinstance(error, EnqueuedInPart):
                shown = [None if d == error.MAY_BE_STORED else d for d in error.descriptors]
        t1 = time.monotonic()
        if outcome == OK:
            shown = [] if arguments.get("limited") else _shown(result)
        self.outcome = outcome
        server = f"{self._target.host}:{self._target.port}"
        self._history.add(Record(t0, t1, self.name, operation, arguments, outcome, shown, server))
        return result if outcome == OK else None

    def _outcome(self, operation: str, arguments: dict[str, Any], error: PinLaterError) -> str:
        if operation == "dequeue" and error.code is ErrorCode.DEQUEUE_RATE_LIMITED:
            arguments["limited"] = True  # its acks are carried out all the same
            return OK
        return FAIL if error.code in _REFUSALS.get(operation, ()) else UNKNOWN

    def _exchange(self, message: bytes, wait_seconds: float, read_bytes: int | None) -> bytes:
        deadline = time.monotonic() + self._target.patience_seconds + wait_seconds
        try:
            if self._socket is None or _is_closed(self._socket):
                self.close()
                self._socket = self._connect()
        except OSError as error:
            self.close()
            raise NotSentError(str(error)) from error
        try:
            self._socket.settimeout(self._target.patience_seconds)
            self._socket.sendall(_LENGTH.pack(len(message)) + message)
            if read_bytes is not None:
                raise ClientDiedError(self._beginning(self._socket, read_bytes, deadline))
            (length,) = _LENGTH.unpack(self._read(self._socket, 4, deadline))
            return self._read(self._socket, length, deadline)
        except OSError:
            self.close()
            raise

    def _is_cut(self, error: ClientDiedError) -> bool:
        """Whether no buffers in between held the answer: the server was cut off while it wrote."""
        received = 2 * self._target.receive_bytes  # as the kernel counts it
        return bool(received) and error.answer_bytes > received + _most_sent_bytes()

    def _connect(self) -> socket.socket:
        connection = socket.socket()
        if self._target.receive_bytes:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._target.receive_bytes)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(_CONNECT_SECONDS)
        connection.connect((self._target.host, self._target.port))
        return connection

    def _beginning(self, connection: socket.socket, most: int, deadline: float) -> bytes:
        """Read so much of an answer, or all of it if that is less."""
        head = self._read(connection, min(most, _LENGTH.size), deadline)
        if len(head) < _LENGTH.size:
            return head
        (length,) = _LENGTH.unpack(head)
        return head + self._read(connection, min(most - len(head), length), deadline)

    @staticmethod
    def _read(connection: socket.socket, count: int, deadline: float) -> bytes:
        received = bytearray()
        while len(received) < count:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            chunk = connection.recv(count - len(received))
            if not chunk:
                raise ConnectionError("connection closed")
            received += chunk
        return bytes(received)


def _descriptors_in(beginning: bytes, queue: str) -> list[str]:
    """List the descriptors of jobs that are whole in the beginning of an answer."""
    found = re.findall(rf"{queue}:s[0-9]+:p[0-9]+:[0-9]+(?![0-9]|\Z)".encode(), beginning)
    return [descriptor.decode() for descriptor in dict.fromkeys(found)]


def _most_sent_bytes() -> int:
    """How much a sending socket's buffer may grow to."""
    return int(Path("/proc/sys/net/ipv4/tcp_wmem").read_text().split()[2])


def _is_closed(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        connection.recv(1)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


def _confirmed(prepared: PreparedCall[None]) -> PreparedCall[bool]:
    """The same, with a result that is not None."""
    return PreparedCall(prepared.method, prepared.request, lambda _: True)


def shown_body(body: bytes) -> str:
    """A body in the history: whole, or its beginning with the sum of all of it."""
    text = body.decode("latin-1")
    if len(body) <= _SHOWN_BYTES:
        return text
    return f"{text[:_SHOWN_BYTES]}...{len(body)}.{zlib.crc32(body)}"


def row_of(record: JobRecord) -> list[Any]:
    body = None if record.body is None else shown_body(record.body)
    return [
        int(record.state),
        body,
        record.attempts_allowed,
        record.attempts_remaining,
        record.claim_descriptor,
        record.created_at_ms,
        record.run_after_ms,
        record.updated_at_ms,
    ]


def row_of_claim(job: ClaimedJob) -> list[Any]:
    shown = shown_body(job.body)
    allowed, remaining = job.attempts_allowed, job.attempts_remaining
    return [job.descriptor, shown, allowed, remaining, job.claim_descriptor]


def _shown(result: Any) -> Any:
    """A result as the history has it."""
    if isinstance(result, dict):
        return {descriptor: row_of(record) for descriptor, record in result.items()}
    if isinstance(result, frozenset):
        return sorted(result)
    if isinstance(result, list) and result and isinstance(result[0], ClaimedJob):
        return [row_of_claim(job) for job in result]
    if hasattr(result, "continuation"):
        return {record.descriptor: row_of(record) for record in result.jobs}
    return None if result is True else result


def _info(claim: Claim, *, named: bool = True, delay_ms: int = 0) -> AckInfo:
    return AckInfo(claim.descriptor, "", delay_ms, claim.claim if named else None)


def _acks(
    succeeded: Sequence[Claim],
    failed: Sequence[Claim],
    *,
    named: bool = True,
    delay_ms: int = 0,
) -> dict[str, Any]:
    return {
        "succeeded": [[c.descriptor, c.claim if named else None] for c in succeeded],
        "failed": [[c.descriptor, c.claim if named else None, delay_ms] for c in failed],
    }
