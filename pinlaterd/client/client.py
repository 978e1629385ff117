"""The twelve operations as methods that block: the plain way to use the service.

    client = Client("queue.example.com", source="mailer:host7")
    client.create_queue("mail")
    [descriptor] = client.enqueue("mail", [Job(b"to: ada", priority=2, attempts_allowed=5)])

    for job in client.dequeue("mail", limit=10, max_wait_ms=5000):
        send(job.body)
        client.ack("mail", succeeded=[job])

    print(client.lookup([descriptor])[descriptor].state.name)      # SUCCEEDED

Errors. What the service answers is raised as the class of pinlaterd.errors for its code
(QueueNotFound, EnqueueRejected, …, all of them PinLaterError). A service that can't be reached
is ConnectionFailed: nothing was done. A connection that broke after the call was sent, or an
answer that did not come in time, is OutcomeUnknown (a ConnectionFailed too): the call may have
been carried out. A call is sent again by itself, to another server if there are several, only
where that can't do anything twice: if it never left whole, or, once, for what only reads (lookup,
count, queue_names, scan, dry runs).
"""

from __future__ import annotations

import functools
import itertools
import socket
import ssl
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, cast

from pinlaterd.client.addresses import Address, parse_addresses
from pinlaterd.client.connection import CannotConnect, NotSent
from pinlaterd.client.pool import ConnectionPool
from pinlaterd.config.schema import ServerSettings
from pinlaterd.errors import ConnectionFailed, OutcomeUnknown, ProtocolError
from pinlaterd.model import (
    CONTINUATION_END,
    CONTINUATION_START,
    AckInfo,
    AckRequest,
    CallContext,
    CheckpointInfo,
    CheckpointRequest,
    ClaimedJob,
    CountRequest,
    CreateQueueRequest,
    DeleteJobsRequest,
    DeleteQueueRequest,
    DequeueRequest,
    DequeueResult,
    EnqueueRequest,
    Job,
    JobRecord,
    JobState,
    LookupRequest,
    Method,
    QueueNamesRequest,
    Request,
    Result,
    RetryFailedRequest,
    ScanRequest,
    ScanResult,
)
from pinlaterd.rpc import codec

_SERVER_DEFAULTS = ServerSettings()
_MAX_SOURCE_BYTES = 120


class Client:
    """A client of one service; any number of threads may share it.

    Each call takes a connection from a pool of `max_connections`, so more threads than that wait
    for each other. A child that is forked opens connections of its own.
    """

    def __init__(
        self,
        host: str | Sequence[str] = _SERVER_DEFAULTS.host,
        port: int = _SERVER_DEFAULTS.port,
        *,
        source: str | None = None,
        timeout_seconds: float = 15.0,
        connect_timeout_seconds: float = 5.0,
        max_connections: int = 16,
        ssl: ssl.SSLContext | None = None,
    ) -> None:
        """Nothing is connected yet: the first call does that.

        `host` is HOST, HOST:PORT or [IPV6]:PORT, or several of them, servers of one service (else
        AddressInvalid, a ValueError): calls take turns over those that are well, and go round those
        that are not.
        `port` is that of those named without one. `source` is who calls, as the server's claims
        name it (default: PROGRAM:HOST). `timeout_seconds` bounds every call, connecting included;
        the server answers within its request_timeout_ms (10 s), so less makes outcomes unknown
        that need not be. `connect_timeout_seconds` bounds the connecting to one server. `ssl` is
        for servers behind a TLS proxy.
        """
        self._pool = ConnectionPool(
            parse_addresses(host, port), max_connections=max_connections, tls=ssl
        )
        self._context = CallContext(source if source is not None else _default_source())
        self.max_connections = max_connections
        self._timeout_seconds = timeout_seconds
        self._connect_timeout_seconds = connect_timeout_seconds
        self._seqids = itertools.count(1)
        self._made_again = functools.partial(
            type(self),
            host,
            port,
            source=self._context.source,
            timeout_seconds=timeout_seconds,
            connect_timeout_seconds=connect_timeout_seconds,
            max_connections=max_connections,
        )
        self._has_tls = ssl is not None

    def __reduce__(self) -> tuple[Callable[[], Client], tuple[()]]:
        """Pickled as what it was made with: another process has connections of its own."""
        if self._has_tls:
            raise TypeError(
                "a Client with ssl= can't be handed to another process, as its SSLContext can't; "
                "make one there"
            )
        return self._made_again, ()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def address(self) -> str:
        """HOST:PORT, or several with commas in between, for messages."""
        return ", ".join(map(str, self._pool.addresses))

    def close(self) -> None:
        """Close the connections. Calls under way finish; later ones raise ConnectionFailed."""
        self._pool.close()

    # --- queues ---------------------------------------------------------------------------

    def create_queue(self, queue: str) -> None:
        """Make a queue; one that exists already is left as it is."""
        self._call(Method.CREATE_QUEUE, CreateQueueRequest(queue))

    def delete_queue(self, queue: str, *, password: str) -> None:
        """Drop a queue with all its jobs; `password` is the server's admin password."""
        self._call(Method.DELETE_QUEUE, DeleteQueueRequest(queue, password))

    def queue_names(self) -> frozenset[str]:
        """The names of all queues."""
        names = self._call(Method.QUEUE_NAMES, QueueNamesRequest(), reads_only=True)
        return cast("frozenset[str]", names)

    # --- the life of a job ----------------------------------------------------------------

    def enqueue(self, queue: str, jobs: Iterable[Job | bytes]) -> list[str]:
        """Store jobs (a plain body means Job(body)) and return their descriptors, in order.

            client.enqueue("mail", [b"now", Job(b"later", run_after_ms=1_900_000_000_000)])

        Up to 1,000 jobs are stored all or none. When this returns, they are durable.
        """
        request = EnqueueRequest(queue, [j if isinstance(j, Job) else Job(j) for j in jobs])
        return list(cast("list[str]", self._call(Method.ENQUEUE, request)))

    def dequeue(
        self,
        queue: str,
        *,
        limit: int,
        succeeded: Iterable[ClaimedJob | AckInfo] = (),
        failed: Iterable[ClaimedJob | AckInfo] = (),
        max_wait_ms: int = 0,
        dry_run: bool = False,
        coverage: float = 1.0,
    ) -> list[ClaimedJob]:
        """Claim up to `limit` jobs that are ready, the most urgent first.

        `succeeded` and `failed` acknowledge earlier jobs in the same call, before it claims; if
        one of them can't be carried out, nothing is claimed and its error is raised. With no job
        ready, the answer waits up to `max_wait_ms` for one. A dry run claims nothing.
        """
        acks = AckRequest(queue, _ack_infos(succeeded), _ack_infos(failed))
        has_acks = bool(acks.succeeded or acks.failed)
        request = DequeueRequest(
            queue, limit, acks if has_acks else None, dry_run, coverage, max_wait_ms
        )
        result = self._call(
            Method.DEQUEUE, request, reads_only=dry_run and not has_acks, wait_ms=max_wait_ms
        )
        return list(cast("DequeueResult", result).jobs)

    def ack(
        self,
        queue: str,
        *,
        succeeded: Iterable[ClaimedJob | AckInfo] = (),
        failed: Iterable[ClaimedJob | AckInfo] = (),
    ) -> None:
        """Say how jobs ended. A ClaimedJob is acknowledged under its claim, with no status:

            client.ack("mail", failed=[AckInfo(job.descriptor, "no such address",
                                               retry_delay_ms=60_000,
                                               claim_descriptor=job.claim_descriptor)])

        An ack that names its claim may be repeated safely: it counts only while the claim holds.
        """
        self._call(Method.ACK, AckRequest(queue, _ack_infos(succeeded), _ack_infos(failed)))

    def checkpoint(self, queue: str, checkpoints: Iterable[CheckpointInfo]) -> None:
        """Renew claims, and change what the jobs hold: body, attempts, status, run-after."""
        self._call(Method.CHECKPOINT, CheckpointRequest(queue, list(checkpoints)))

    # --- looking and mending --------------------------------------------------------------

    def lookup(
        self, descriptors: Iterable[str], *, include_body: bool = False
    ) -> dict[str, JobRecord]:
        """What is known of these jobs, by descriptor; unknown ones are left out."""
        request = LookupRequest(list(descriptors), include_body)
        records = self._call(Method.LOOKUP, request, reads_only=True)
        return dict(cast("Mapping[str, JobRecord]", records))

    def count(
        self,
        queue: str,
        state: JobState,
        *,
        priority: int | None = None,
        future: bool = False,
        body_regex: str | None = None,
    ) -> int:
        """How many jobs are in a state; `future`: those whose run-after is still to come."""
        request = CountRequest(queue, state, priority, future, body_regex)
        return cast("int", self._call(Method.COUNT, request, reads_only=True))

    def scan(
        self,
        queue: str,
        state: JobState,
        *,
        priority: int | None = None,
        future: bool = False,
        body_regex: str | None = None,
        page_size: int = 100,
    ) -> Iterator[JobRecord]:
        """All jobs in a state, the latest run-after first, fetched page by page.

        newest = next(client.scan("mail", JobState.FAILED), None)
        """
        continuation = CONTINUATION_START
        while True:
            request = ScanRequest(
                queue, state, priority, future, continuation, page_size, body_regex
            )
            page = cast("ScanResult", self._call(Method.SCAN, request, reads_only=True))
            yield from page.jobs
            continuation = page.continuation
            if continuation == CONTINUATION_END:
                return

    def retry_failed(
        self,
        queue: str,
        *,
        priority: int = 1,
        attempts_to_allow: int = 1,
        run_after_ms: int | None = None,
        limit: int = 1000,
    ) -> int:
        """Make up to `limit` FAILED jobs PENDING again, the oldest first; return how many."""
        request = RetryFailedRequest(queue, priority, attempts_to_allow, run_after_ms, limit)
        return cast("int", self._call(Method.RETRY_FAILED, request))

    def delete_jobs(
        self,
        queue: str,
        state: JobState,
        *,
        priority: int = 1,
        body_regex: str | None = None,
        limit: int = 1000,
    ) -> int:
        """Delete up to `limit` jobs of a state and priority; return how many."""
        request = DeleteJobsRequest(queue, state, priority, body_regex, limit)
        return cast("int", self._call(Method.DELETE_JOBS, request))

    # --- one call -------------------------------------------------------------------------

    def _call(
        self, method: Method, request: Request, *, reads_only: bool = False, wait_ms: int = 0
    ) -> Result:
        seqid = next(self._seqids) & 0x7FFF_FFFF
        message = codec.encode_call(method, seqid, self._context, request)
        deadline = time.monotonic() + self._timeout_seconds + wait_ms / 1000
        address, answer = self._exchange(message, deadline=deadline, repeatable=reads_only)
        try:
            return codec.decode_reply(method, answer)
        except ProtocolError as error:
            raise OutcomeUnknown(f"what {address} answered makes no sense: {error}") from error

    def _exchange(
        self, message: bytes, *, deadline: float, repeatable: bool
    ) -> tuple[Address, bytes]:
        """Send a message to one server after the other until one answers, and return both.

        One whose connection broke comes once more, as the last: it may have been restarted, and
        serve a new connection. A `repeatable` message is sent again once after it left whole.
        """
        untried = deque(self._pool.order())
        failures: dict[Address, ConnectionFailed] = {}
        while untried:
            address = untried.popleft()
            try:
                return address, self._send(message, address, len(untried), deadline=deadline)
            except (NotSent, OutcomeUnknown) as error:
                if not isinstance(error, CannotConnect) and address not in failures:
                    untried.append(address)
                failures[address] = error
                if isinstance(error, OutcomeUnknown):
                    if not repeatable:
                        break
                    repeatable = False
                if time.monotonic() >= deadline:
                    break
        raise _none_answered(list(failures.values()))

    def _send(self, message: bytes, address: Address, others: int, *, deadline: float) -> bytes:
        """Send to one server; connecting leaves as much time to each of the `others`."""
        share_seconds = (deadline - time.monotonic()) / (1 + others)
        connect_seconds = min(self._connect_timeout_seconds, share_seconds)
        with self._pool.connection(
            address, deadline=deadline, connect_seconds=connect_seconds
        ) as connection:
            return connection.call(message, deadline=deadline)


def _none_answered(failures: list[ConnectionFailed]) -> ConnectionFailed:
    """What to raise for the failures of all servers that were tried: one error that names each."""
    if len(failures) == 1:
        return failures[0]
    is_unknown = any(isinstance(failure, OutcomeUnknown) for failure in failures)
    kind = OutcomeUnknown if is_unknown else ConnectionFailed
    return kind("; ".join(map(str, failures)))


def _ack_infos(jobs: Iterable[ClaimedJob | AckInfo]) -> list[AckInfo]:
    return [
        AckInfo(job.descriptor, claim_descriptor=job.claim_descriptor or None)
        if isinstance(job, ClaimedJob)
        else job
        for job in jobs
    ]


def _default_source() -> str:
    program = Path(sys.argv[0]).stem or "python"
    source = f"{program}:{socket.gethostname()}"
    return source.encode()[:_MAX_SOURCE_BYTES].decode(errors="ignore")
