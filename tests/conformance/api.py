"""A running service, and clients of another make to talk to it.

`Deployment` is what an operator would start: `pinlaterd init`, `up` and `down`, real processes
under supervisord, on free ports in a temporary folder. `Client` speaks to it through Apache
Thrift's own Python library with code that the Thrift compiler generated from the interface
file; `Wire` sends what no well-behaved library can be made to send. Neither relies on pinlaterd's
own code, so that a mistake there cannot hide itself.

The suite runs once for every engine in BACKENDS, but for what is marked `one_engine`; a line joins
one.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import select
import socket
import struct
import subprocess
import sys
import time
import xmlrpc.client
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import pytest
import yaml
from supervisor.xmlrpc import SupervisorTransport
from thrift.protocol.TBinaryProtocol import TBinaryProtocol
from thrift.protocol.TCompactProtocol import TCompactProtocol
from thrift.Thrift import TApplicationException, TMessageType
from thrift.transport import TSocket, TTransport

from tests import deployment

REPOSITORY = Path(__file__).parents[2]
INTERFACE_FILE = REPOSITORY / "thrift" / "pinlater.thrift"
PINLATERD = (sys.executable, "-m", "pinlaterd.cli.pinlaterd")
ADMIN_PASSWORD = "correct horse"
SOURCE = "conformance:host1"
HOST = "127.0.0.1"
SHARDS = 3
ANSWER_SECONDS = 60.0
KIB = 1024
MIB = 1024 * KIB

# How the shared service is set up (conftest.py): small limits, so that tests reach them.
MAX_FRAME_BYTES = 4 * MIB
MAX_RESPONSE_BYTES = 2 * MIB
MAX_DEQUEUE_WAIT_MS = 8000
MAX_CALLS_PER_CONNECTION = 100
COUNT_LIMIT = 50
MONITOR_BATCH_SIZE = 20

# The service that tests mistreat. What is down is down for good there: nothing is gained by
# waiting for it.
REQUEST_TIMEOUT_MS = 5000
GRACE_MS = 100

# Short enough for a test to wait for, in hours: 0.36 s.
BRIEF_TTL_HOURS = 0.0001

PAUSED_QUEUE = "paused"
# Settings by queue: what upkeep does is tested on queues that it does it to soon.
QUEUES: Mapping[str, Mapping[str, object]] = {
    "claims_retried": {"job_claimed_timeout_seconds": 0.3},
    "claims_failed": {"job_claimed_timeout_seconds": 0.3},
    "claims_batched": {"job_claimed_timeout_seconds": 0.3},
    "claims_awaited": {"job_claimed_timeout_seconds": 0.5},
    "claims_renewed": {"job_claimed_timeout_seconds": 1.0},
    "success_forgotten": {"job_succeeded_ttl_hours": BRIEF_TTL_HOURS},
    "failure_forgotten": {"job_failed_ttl_hours": BRIEF_TTL_HOURS},
    PAUSED_QUEUE: {"max_jobs_per_second": 0},
    "two_in_progress": {"max_in_progress": 2},
    "ended_in_progress": {"max_in_progress": 1, "job_claimed_timeout_seconds": 0.3},
    "other_defaults": {"default_attempts": 5, "default_priority": 2},
}

PENDING, IN_PROGRESS, SUCCEEDED, FAILED = range(4)
STATES = (PENDING, IN_PROGRESS, SUCCEEDED, FAILED)


class Backend(NamedTuple):
    """An engine that the suite runs on, and where engines may differ."""

    engine: str
    queue_name_characters: int
    status_characters: int
    ack_replaces_status: bool = False


BACKENDS = (
    # A database's name holds 64 characters, and begins with plq_1_.
    Backend("mysql", queue_name_characters=58, status_characters=5000),
    Backend("redis", queue_name_characters=64, status_characters=3000, ack_replaces_status=True),
    Backend("sqlite", queue_name_characters=64, status_characters=5000),
)


# What routers and shards decide before they ask a store, or do alike whatever it is.
one_engine = pytest.mark.one_engine


class Refused(Exception):
    """A PinLaterException, as `CODE: message`."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message


class Claimed(NamedTuple):
    """A job as a dequeue gave it."""

    body: bytes
    allowed: int
    remaining: int
    claim: str
    timeout_seconds: int


class Answer(NamedTuple):
    """A reply off the wire. `value` may be an exception."""

    method: str
    kind: int
    seqid: int
    value: Any


class _Protocol(TBinaryProtocol):  # type: ignore[misc]
    """TBinaryProtocol that takes bytes where text is declared, so that any bytes can be sent."""

    def writeString(self, value: str | bytes) -> None:  # noqa: N802
        self.writeBinary(value if isinstance(value, bytes) else value.encode())


class Interface:
    """What the Thrift compiler makes of the interface file: types, constants, messages."""

    def __init__(self, compiler: str, folder: Path) -> None:
        subprocess.run(
            [compiler, "--gen", "py", "-out", str(folder), str(INTERFACE_FILE)],
            check=True,
            capture_output=True,
        )
        sys.path.insert(0, str(folder))
        self.service = importlib.import_module("pinlater.PinLater")
        self.types = importlib.import_module("pinlater.ttypes")

    def refused(self, error: Any) -> Refused:
        names = self.types.ErrorCode._VALUES_TO_NAMES
        return Refused(names[error.errorCode], error.message)

    def message(
        self,
        method: str,
        *arguments: object,
        seqid: int = 1,
        kind: int = TMessageType.CALL,
        source: str | bytes = SOURCE,
        strict: bool = True,
    ) -> bytes:
        """A call as bytes, without frame; of an unknown method: without arguments."""
        buffer = TTransport.TMemoryBuffer()
        protocol = _Protocol(buffer, strictWrite=strict)
        protocol.writeMessageBegin(method, kind, seqid)
        generated = getattr(self.service, f"{method}_args", None)
        if generated is None:
            protocol.writeFieldStop()
        else:
            generated(self.types.RequestContext(source), *arguments).write(protocol)
        message: bytes = buffer.getvalue()
        return message

    def read(self, message: bytes) -> Answer:
        (answer,) = self.read_all(message, 1)
        return answer

    def read_all(self, messages: bytes, count: int) -> list[Answer]:
        """So many replies, one after the other; EOFError if there are fewer."""
        protocol = _Protocol(TTransport.TMemoryBuffer(messages))
        return [self._read(protocol) for _ in range(count)]

    def _read(self, protocol: _Protocol) -> Answer:
        method, kind, seqid = protocol.readMessageBegin()
        if kind == TMessageType.EXCEPTION:
            problem = TApplicationException()
            problem.read(protocol)
            return Answer(method, kind, seqid, problem)
        result = getattr(self.service, f"{method}_result")()
        result.read(protocol)
        value = self.refused(result.e) if result.e else getattr(result, "success", None)
        return Answer(method, kind, seqid, value)


class Client:
    """One connection: the methods, with fields named as in the interface."""

    def __init__(
        self,
        api: Interface,
        port: int,
        *,
        source: str | bytes = SOURCE,
        framed: bool = True,
        strict: bool = True,
        compact: bool = False,
    ) -> None:
        self.api = api
        self._types = api.types
        self._context = api.types.RequestContext(source)
        connection = TSocket.TSocket(HOST, port)
        connection.setTimeout(ANSWER_SECONDS * 1000)
        wrap = TTransport.TFramedTransport if framed else TTransport.TBufferedTransport
        self._transport = wrap(connection)
        self._transport.open()
        self._service = api.service.Client(
            TCompactProtocol(self._transport)
            if compact
            else _Protocol(self._transport, strictWrite=strict)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._transport.close()

    def _call(self, method: str, *arguments: object) -> Any:
        try:
            return getattr(self._service, method)(self._context, *arguments)
        except self._types.PinLaterException as error:
            raise self.api.refused(error) from None

    def job(self, body: bytes, **fields: object) -> Any:
        return self._types.PinLaterJob(body, **fields)

    def ack_info(self, descriptor: str | bytes, **fields: object) -> Any:
        return self._types.PinLaterJobAckInfo(descriptor, **fields)

    def checkpoint_of(self, descriptor: str, **fields: object) -> Any:
        return self._types.PinLaterCheckpointJobRequest(descriptor, **fields)

    def ack_request(
        self, queue: str, succeeded: Sequence[Any] = (), failed: Sequence[Any] = ()
    ) -> Any:
        """Of descriptors, or of what `ack_info` made."""

        def infos(acks: Sequence[Any]) -> list[Any]:
            return [self.ack_info(ack) if isinstance(ack, str) else ack for ack in acks]

        return self._types.PinLaterJobAckRequest(queue, infos(succeeded), infos(failed))

    def enqueue_request(self, queue: str | bytes, *jobs: Any) -> Any:
        """Of bodies, or of what `job` made."""
        made = [self.job(job) if isinstance(job, bytes) else job for job in jobs]
        return self._types.PinLaterEnqueueRequest(queue, made)

    def dequeue_request(self, queue: str, limit: int, **fields: object) -> Any:
        return self._types.PinLaterDequeueRequest(queue, limit, **fields)

    def create(self, queue: str) -> None:
        self._call("createQueue", queue)

    def delete(self, queue: str, password: str) -> None:
        self._call("deleteQueue", queue, password)

    def enqueue(self, queue: str, *jobs: Any) -> list[str]:
        answer = self._call("enqueueJobs", self.enqueue_request(queue, *jobs))
        descriptors: list[str] = answer.jobDescriptors
        return descriptors

    def enqueue_keyed(self, queue: str, *jobs: Any) -> tuple[list[str], list[bool]]:
        answer = self._call("enqueueJobs", self.enqueue_request(queue, *jobs))
        return answer.jobDescriptors, answer.existed

    def lookup_keys(self, queue: str, *keys: str, body: bool = False) -> dict[str, Any]:
        """Return the jobs that hold these keys, by key."""
        named = [self._types.PinLaterJobKey(queue, key) for key in keys]
        request = self._types.PinLaterLookupJobRequest([], includeBody=body, keys=named)
        return {info.key: info for info in self._call("lookupJobs", request).values()}

    def dequeue(self, queue: str, limit: int = 1, **fields: object) -> dict[str, Claimed]:
        """Dequeue once all shards have answered, since a silent one would be passed over."""
        with contextlib.suppress(Refused):
            self.names()
        return claimed(self._call("dequeueJobs", self.dequeue_request(queue, limit, **fields)))

    def ack(self, queue: str, succeeded: Sequence[Any] = (), failed: Sequence[Any] = ()) -> None:
        self._call("ackDequeuedJobs", self.ack_request(queue, succeeded, failed))

    def ack_jobs(
        self, queue: str, succeeded: Sequence[Any] = (), failed: Sequence[Any] = ()
    ) -> tuple[list[bool], list[bool]]:
        answer = self._call("ackJobs", self.ack_request(queue, succeeded, failed))
        return answer.succeeded, answer.failed

    def checkpoint(self, queue: str, *checkpoints: Any) -> None:
        self._call(
            "checkpointJobs", self._types.PinLaterCheckpointJobsRequest(queue, list(checkpoints))
        )

    def apply_checkpoints(self, queue: str, *checkpoints: Any) -> list[bool]:
        request = self._types.PinLaterCheckpointJobsRequest(queue, list(checkpoints))
        applied: list[bool] = self._call("applyCheckpoints", request).applied
        return applied

    def finish(self, queue: str, *finishes: Any) -> list[int]:
        request = self._types.PinLaterFinishJobsRequest(queue, list(finishes))
        outcomes: list[int] = self._call("finishJobs", request).outcomes
        return outcomes

    def finish_of(self, descriptor: str, state: int, attempts: int, **fields: object) -> Any:
        return self._types.PinLaterJobFinishInfo(descriptor, state, attempts, **fields)

    def lookup(self, *descriptors: str | bytes, body: bool = False) -> dict[str, Any]:
        request = self._types.PinLaterLookupJobRequest(list(descriptors), includeBody=body)
        found: dict[str, Any] = self._call("lookupJobs", request)
        return found

    def info(self, descriptor: str, *, body: bool = False) -> Any:
        """What is known of one job, which has to exist."""
        return self.lookup(descriptor, body=body)[descriptor]

    def count(self, queue: str, state: int = PENDING, **fields: object) -> int:
        request = self._types.PinLaterGetJobCountRequest(queue, state, **fields)
        count: int = self._call("getJobCount", request)
        return count

    def names(self) -> set[str]:
        names: set[str] = self._call("getQueueNames")
        return names

    def scan(self, queue: str, state: int = PENDING, **fields: object) -> Any:
        return self._call("scanJobs", self._types.PinLaterScanJobsRequest(queue, state, **fields))

    def retry_failed(self, queue: str, **fields: object) -> int:
        request = self._types.PinLaterRetryFailedJobsRequest(queue, **fields)
        retried: int = self._call("retryFailedJobs", request)
        return retried

    def delete_jobs(self, queue: str, state: int, **fields: object) -> int:
        request = self._types.PinLaterDeleteJobsRequest(queue, state, **fields)
        deleted: int = self._call("deleteJobs", request)
        return deleted

    # --- what many tests need first ----------------------------------------------------------

    def enqueue_on_every_shard(
        self,
        queue: str,
        make: Callable[[int], Any] = lambda number: b"%d" % number,
        each: int = 1,
        shards: int = SHARDS,
    ) -> dict[str, list[str]]:
        """One job a call, the nth made by `make(n)`, until so many shards have got `each`.

        Returns the descriptors by shard, in the order in which they were enqueued."""
        by_shard: dict[str, list[str]] = {}
        number = 0
        began = time.monotonic()
        while len(by_shard) < shards or min(map(len, by_shard.values())) < each:
            # One that is slow for a moment is left out for some seconds.
            waited = time.monotonic() - began
            assert waited < ANSWER_SECONDS, f"no shard but {sorted(by_shard)} gets jobs"
            (descriptor,) = self.enqueue(queue, make(number))
            by_shard.setdefault(shard_of(descriptor), []).append(descriptor)
            number += 1
        return by_shard

    def fail_for_good(self, queue: str, *jobs: Any) -> list[str]:
        """FAILED jobs: enqueued, dequeued and failed. The queue is empty but for them."""
        descriptors = self.enqueue(queue, *jobs)
        until = time.monotonic() + ANSWER_SECONDS
        while {info.jobState for info in self.lookup(*descriptors).values()} != {FAILED}:
            assert time.monotonic() < until, "the jobs do not fail for good"
            self.ack(queue, failed=list(self.dequeue(queue, 1000)))
        return descriptors


class Wire:
    """One connection as bytes. `api` reads and writes the messages; frames are made here."""

    def __init__(self, api: Interface, port: int) -> None:
        self._api = api
        self._socket = socket.create_connection((HOST, port), timeout=ANSWER_SECONDS)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()

    def send(self, *messages: bytes) -> None:
        """Frames, all at once."""
        self.send_bytes(b"".join(struct.pack(">i", len(m)) + m for m in messages))

    def send_bytes(self, data: bytes) -> None:
        self._socket.sendall(data)

    def receive(self) -> Answer:
        (size,) = struct.unpack(">i", self._read(4))
        return self._api.read(self._read(size))

    def read_bytes(self, size: int) -> bytes:
        """A part of what the other side sends."""
        return self._read(size)

    def read_unframed(self, count: int) -> list[Answer]:
        """So many replies, of a connection that is used without frames."""
        data = b""
        while True:
            with contextlib.suppress(EOFError):
                return self._api.read_all(data, count)
            data += self._read(1)

    def silent(self, seconds: float = 0.2) -> bool:
        """Whether nothing comes, neither bytes nor an end, for so long."""
        readable, _, _ = select.select([self._socket], [], [], seconds)
        return not readable

    def ended(self) -> bool:
        """Waits for the other side to close; False if it sends something instead."""
        try:
            return self._socket.recv(1) == b""
        except ConnectionError:
            return True

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            piece = self._socket.recv(size - len(data))
            if not piece:
                raise EOFError(f"the server closed the connection after {data!r}")
            data += piece
        return data


class Deployment(deployment.Deployment):
    """One service in a folder of its own. `store`: the settings of a shard that say where it
    keeps its jobs, beside its engine."""

    def __init__(
        self,
        api: Interface,
        backend: Backend,
        folder: Path,
        store: Mapping[str, object],
    ) -> None:
        super().__init__(folder)
        self.api = api
        self.shard_settings = {"engine": backend.engine, **store}
        self.command(
            "init", str(folder), "--engine", backend.engine, "--shards", str(SHARDS),
            "--port", str(self.port), "--stats-port", str(self.stats_port), "--http-port", "0",
            "--web-port", "0",
        )  # fmt: skip
        transport = SupervisorTransport(None, None, f"unix://{folder}/run/supervisor.sock")
        self._supervisor: Any = xmlrpc.client.ServerProxy(
            "http://127.0.0.1", transport=transport
        ).supervisor
        self.configure_shards({str(n): store for n in range(1, SHARDS + 1)})

    def configure(self, **settings: object) -> None:
        path = self.folder / "etc" / "pinlaterd.yaml"
        path.write_text(json.dumps((yaml.safe_load(path.read_text()) or {}) | settings))

    def configure_shards(self, shards: Mapping[str, Mapping[str, object]]) -> None:
        """Add shards, or change settings of those that are there."""
        path = self.folder / "etc" / "shards.yaml"
        wanted = {
            str(n): dict(s or {}) for n, s in yaml.safe_load(path.read_text())["shards"].items()
        }
        for name, settings in shards.items():
            wanted.setdefault(name, {}).update(settings)
        self.write("shards", wanted)

    def client(self, **options: Any) -> Client:  # type: ignore[override]
        return Client(self.api, self.port, **options)

    def wire(self) -> Wire:
        return Wire(self.api, self.port)

    def counter(self, name: str) -> int:
        """Of the whole server; processes report once a second."""
        return int(self.stats()["counters"].get(name, 0))

    def logs(self) -> str:
        """What the processes have logged so far."""
        paths = (self.folder / "run" / "log").glob("*.log")
        return "".join(path.read_text(errors="replace") for path in paths)

    def stop(self, program: str) -> None:
        self._supervisor.stopProcess(program)

    def start(self, program: str) -> None:
        """Not waiting until it serves."""
        self._supervisor.startProcess(program, False)


def shard_of(descriptor: str) -> str:
    return descriptor.split(":")[1].removeprefix("s")


def priority_of(descriptor: str) -> int:
    return int(descriptor.split(":")[2].removeprefix("p"))


def local_id_of(descriptor: str) -> int:
    return int(descriptor.split(":")[3])


def claimed(response: Any) -> dict[str, Claimed]:
    """The jobs of a dequeue's answer, each with its metadata."""
    jobs, metadata = response.jobs or {}, response.jobMetadata or {}
    assert jobs.keys() == metadata.keys()
    return {
        descriptor: Claimed(
            body,
            metadata[descriptor].attemptsAllowed,
            metadata[descriptor].attemptsRemaining,
            metadata[descriptor].claimDescriptor,
            metadata[descriptor].claimTimeoutSeconds,
        )
        for descriptor, body in jobs.items()
    }
