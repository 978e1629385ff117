"""The calls that `pinlater` loads a service with, and measures: enqueues, dequeues with acks, whole
lives of jobs. A Caller makes those of one connection.

Made-up bodies, `pinlater-load RUN SEQUENCE CRC32 xxxx…`, can be checked: RUN names one run of
`pinlater enqueue`, SEQUENCE counts its jobs from 0, CRC32 (8 hex digits) covers all the rest, the
filling included. All jobs of `pinlater bench` have one body, by which it tells them from others.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
import re
import secrets
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto
from typing import NamedTuple

import click

from pinlaterd.cli import command
from pinlaterd.client import Client
from pinlaterd.config.schema import ServerSettings
from pinlaterd.errors import ConnectionFailed, ErrorCode, OutcomeUnknown, PinLaterError, how_many
from pinlaterd.model import QUEUE_DEFAULT, CheckpointInfo, ClaimedJob, Job, JobOptions, JobState

MIN_BODY_BYTES = 64
_MAGIC = b"pinlater-load"
_BENCH_MAGIC = b"pinlater-bench "
# An empty queue is asked again only with a wait, so that nobody polls it at full speed.
_EMPTY_QUEUE_WAIT_MS = 1000
# Enough to find what stands in line for the next dequeues, and few enough for one answer.
_LOOKED_AT_JOBS = 100
_UNDIVIDED_JOBS = ServerSettings().enqueue_split_jobs
_MAX_EXAMPLES = 10
_LINE_END = re.compile(rb"\r?\n\Z")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The options of a load; those that a command lacks have their defaults here.

    Jobs are for `run_after_ms`, or `delay` seconds after they are made; `attempts` and `status` are
    theirs, and the milliseconds that `expires_at` gives. `success_percent` of them, chosen at
    random, succeed; the others fail. Without `all_jobs`, jobs that the bench did not make are
    released, at no attempt's cost, and end the run. `rate`: calls a second, in an open loop.
    """

    queue: str
    num_queries: int | None
    batch_size: int
    concurrency: int
    progress: bool | None
    priority: int | None = None
    body_bytes: int = MIN_BODY_BYTES
    delay: float | None = None
    run_after_ms: int | None = None
    expires_at: Callable[[], int] | None = None
    attempts: int = QUEUE_DEFAULT
    status: str = ""
    success_percent: int = 100
    all_jobs: bool = True
    create: bool = False
    warm_up_seconds: float = 0.0
    seconds: float = math.inf
    rate: float | None = None
    slow_ms: float = math.inf

    @property
    def tell(self) -> Callable[[str], None] | None:
        """Shows a line of progress, if that is wanted."""
        wanted = self.progress if self.progress is not None else sys.stderr.isatty()
        return functools.partial(click.echo, err=True) if wanted else None

    @property
    def calls(self) -> int | None:
        """Return how many calls to measure; None: as many as the time allows."""
        return None if self.num_queries == -1 else self.num_queries

    def job(self, body: bytes) -> Job:
        run_after_ms = self.run_after_ms
        if self.delay is not None:
            run_after_ms = round((time.time() + self.delay) * 1000)
        options = None
        if self.expires_at is not None:
            options = JobOptions(expires_at_ms=self.expires_at())
        given = (run_after_ms, self.attempts, self.status, options)
        return Job(body, self.priority or QUEUE_DEFAULT, *given)


# --- bodies -----------------------------------------------------------------------------------


class Stamp(NamedTuple):
    """The content of a stamped body."""

    run: str
    sequence: int


class BodyDamaged(Exception):
    """The body bears our stamp, but is not what was enqueued."""


def new_run() -> str:
    return secrets.token_hex(4)


def stamped_body(stamp: Stamp, size_bytes: int) -> bytes:
    """Make a body of `size_bytes` (at least MIN_BODY_BYTES), with a stamp."""
    head = f"{stamp.run} {stamp.sequence}".encode()
    filling = b"x" * (size_bytes - len(_MAGIC) - len(head) - len("  00000000 "))
    return b" ".join((_MAGIC, head, _checksum(head, filling), filling))


def read_stamp(body: bytes) -> Stamp | None:
    """Read the stamp of a body; None if it never had one. Raises BodyDamaged if it is not whole."""
    if not body.startswith(_MAGIC + b" "):
        return None
    fields = body.split(b" ", 4)
    if len(fields) == 5:
        _, run, sequence, checksum, filling = fields
        if _checksum(run + b" " + sequence, filling) == checksum:
            return Stamp(run.decode(), int(sequence))
    raise BodyDamaged


def _checksum(head: bytes, filling: bytes) -> bytes:
    return b"%08x" % zlib.crc32(filling, zlib.crc32(head))


def bench_body(size_bytes: int) -> bytes:
    """Make a body of `size_bytes` (at least MIN_BODY_BYTES)."""
    return _BENCH_MAGIC.ljust(size_bytes, b"x")


def _is_bench_job(job: ClaimedJob) -> bool:
    return job.body.startswith(_BENCH_MAGIC)


# --- the audit of check-dequeue -------------------------------------------------------------
# A job may rightly come out again after it failed or its claim timed out: with one attempt less.
# Everything else that comes twice is a fault: the same body in another job (stored twice), or the
# same attempt of a job (claimed twice). What is missing shows in the gaps: each run of `enqueue`
# counts its jobs from 0.


@dataclass
class Verdict:
    """The result of an audit; `examples` are a few of the faults, in words."""

    distinct: int = 0
    redelivered: int = 0
    unstamped: int = 0
    damaged: int = 0
    duplicates: int = 0
    missing: int = 0
    runs: int = 0
    examples: list[str] = field(default_factory=list)

    @property
    def faults(self) -> int:
        return self.damaged + self.duplicates + self.missing


class DeliveryAudit:
    """The deliveries of a load: which jobs came out, which twice, and which did not. Filled by many
    threads; takes about 200 bytes of memory for each job it has seen."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._verdict = Verdict()
        # run -> sequence -> (descriptor, attempts that it had left when it came out last)
        self._seen: dict[str, dict[int, tuple[str, int]]] = {}

    def enter(self, job: ClaimedJob) -> None:
        with self._lock:
            try:
                stamp = read_stamp(job.body)
            except BodyDamaged:
                self._verdict.damaged += 1
                self._example(f"{job.descriptor}: the body is damaged")
                return
            if stamp is None:
                self._verdict.unstamped += 1
                return
            seen = self._seen.setdefault(stamp.run, {})
            before = seen.get(stamp.sequence)
            seen[stamp.sequence] = (job.descriptor, job.attempts_remaining)
            if before is None:
                self._verdict.distinct += 1
                return
            descriptor, attempts_remaining = before
            if descriptor == job.descriptor and job.attempts_remaining < attempts_remaining:
                self._verdict.redelivered += 1
                return
            self._verdict.duplicates += 1
            self._example(f"{job.descriptor}: came out before, as {descriptor}")

    def verdict(self) -> Verdict:
        """Return the faults so far; what is missing is known once the queue has run empty."""
        with self._lock:
            self._verdict.runs = len(self._seen)
            self._verdict.missing = 0
            for run, seen in self._seen.items():
                gaps = max(seen) + 1 - len(seen)
                self._verdict.missing += gaps
                if gaps:
                    first = next(n for n in range(max(seen)) if n not in seen)
                    missing = how_many(gaps, "job")
                    self._example(f"run {run}: {missing} missing, the first is number {first}")
            return self._verdict

    def _example(self, fault: str) -> None:
        if len(self._verdict.examples) < _MAX_EXAMPLES:
            self._verdict.examples.append(fault)


# --- what is enqueued -----------------------------------------------------------------------


class JobBatch(NamedTuple):
    """Jobs for one call; `first` is the number of the first of them."""

    first: int
    jobs: list[Job]


class JobBatches:
    """One source of batches for all connections."""

    def __init__(self, batches: Iterable[JobBatch]) -> None:
        self._lock = threading.Lock()
        self._batches = iter(batches)

    def take(self) -> JobBatch | None:
        with self._lock:
            return next(self._batches, None)


def stamped_batches(plan: Plan) -> Iterator[JobBatch]:
    """Yield batches without end whose bodies `check-dequeue` can check."""
    run = new_run()
    for first in itertools.count(0, plan.batch_size):
        stamps = (Stamp(run, sequence) for sequence in range(first, first + plan.batch_size))
        yield JobBatch(first, [plan.job(stamped_body(stamp, plan.body_bytes)) for stamp in stamps])


def alike_batches(plan: Plan, body: bytes) -> Iterator[JobBatch]:
    """Yield batches without end of jobs that are alike: making one up takes next to no time."""
    while True:
        yield JobBatch(0, [plan.job(body)] * plan.batch_size)


def line_batches(plan: Plan, lines: Iterable[bytes]) -> Iterator[JobBatch]:
    """Yield batches of a job for each line, without its line end. Count lines from 1."""
    numbered = enumerate(lines, start=1)
    while batch := list(itertools.islice(numbered, plan.batch_size)):
        yield JobBatch(batch[0][0], [plan.job(_LINE_END.sub(b"", line)) for _, line in batch])


# --- the calls ------------------------------------------------------------------------------


class Kind(StrEnum):
    """A kind of call that is measured by itself."""

    ENQUEUE = "enqueue"
    DEQUEUE = "dequeue"
    ACK = "ack"


class AtEmpty(Enum):
    """The ways in which a caller meets an empty queue."""

    GO_ON = auto()
    WAIT = auto()
    WAIT_AND_END = auto()  # it has nothing left to do when a wait brought no job
    END = auto()  # it has nothing left to do when nothing is pending


class Answered(NamedTuple):
    """One call's result: jobs moved, and whether it waited for them to come."""

    jobs: int
    waited: bool = False


class LoadStopped(Exception):
    """An error after which the load can't go on."""


class ForeignJobFound(LoadStopped):
    """The queue holds a job that the bench did not make."""

    def __init__(self, queue: str, descriptor: str, taken_so_far: str) -> None:
        super().__init__(
            f"queue {command.printable(queue)!r} holds jobs that the bench did not make, as "
            f"{descriptor}, and it would acknowledge them; {taken_so_far}. Give it a queue of its "
            "own (--create makes it)"
        )


def check_for_foreign_jobs(client: Client, queue: str) -> None:
    """Look at the jobs that dequeues would bring first, and take none. Raises ForeignJobFound."""
    for job in client.dequeue(queue, limit=_LOOKED_AT_JOBS, dry_run=True):
        if not _is_bench_job(job):
            raise ForeignJobFound(queue, job.descriptor, "nothing was done")


class Caller:
    """The calls of one connection, of each of `kinds` in turn. One that fails is made again, and
    after one that moves no job, such as a dequeue that brings none, the turn begins once more.

    Without an ACK among `kinds` each dequeue acknowledges the jobs of the one before. `batches`:
    what is enqueued; with `all_or_stop` a batch that fails ends the run. `inspect` sees each job
    that is dequeued, `enqueued` the descriptors of a call.
    """

    def __init__(
        self,
        client: Client,
        plan: Plan,
        kinds: Sequence[Kind],
        *,
        batches: JobBatches | None = None,
        all_or_stop: bool = False,
        at_empty: AtEmpty = AtEmpty.GO_ON,
        inspect: Callable[[ClaimedJob], None] = lambda _job: None,
        enqueued: Callable[[Sequence[str]], object] = lambda _descriptors: None,
    ) -> None:
        self.kinds = kinds
        self.kind = kinds[0]  # of the call that comes next
        self._client = client
        self._plan = plan
        self._batches = batches
        self._all_or_stop = all_or_stop
        self._at_empty = at_empty
        self._inspect = inspect
        self._enqueued = enqueued
        self._was_empty = False
        # what is claimed and not yet acknowledged
        self._succeeded: list[ClaimedJob] = []
        self._failed: list[ClaimedJob] = []
        self._foreign: list[ClaimedJob] = []
        self._calls = {
            Kind.ENQUEUE: self._enqueue,
            Kind.DEQUEUE: self._dequeue,
            Kind.ACK: self._acknowledge,
        }

    def call(self) -> Answered | None:
        """Make it; None if nothing is left to do. Raises LoadStopped."""
        answer = self._calls[self.kind]()
        following = self.kinds.index(self.kind) + 1 if answer is not None and answer.jobs else 0
        self.kind = self.kinds[following % len(self.kinds)]
        return answer

    def finish(self) -> None:
        """Acknowledge our claims, release jobs of others; not measured."""
        self._acknowledge()
        released = [
            CheckpointInfo(
                job.descriptor, move_to_pending=True, claim_descriptor=job.claim_descriptor
            )
            for job in self._foreign
        ]
        if released:
            self._client.checkpoint(self._plan.queue, released)

    def _enqueue(self) -> Answered | None:
        assert self._batches is not None
        batch = self._batches.take()
        if batch is None:
            return None
        try:
            self._enqueued(self._client.enqueue(self._plan.queue, batch.jobs))
        except (PinLaterError, ConnectionFailed) as error:
            if self._all_or_stop:
                raise LoadStopped(_not_stored(batch, error)) from error
            raise
        return Answered(len(batch.jobs))

    def _dequeue(self) -> Answered | None:
        """Acknowledge, and claim the next jobs, in one call."""
        waits = self._was_empty and self._at_empty in (AtEmpty.WAIT, AtEmpty.WAIT_AND_END)
        jobs = self._client.dequeue(
            self._plan.queue,
            limit=self._plan.batch_size,
            succeeded=self._succeeded,
            failed=self._failed,
            max_wait_ms=_EMPTY_QUEUE_WAIT_MS if waits else 0,
        )
        self._note(jobs)
        self._was_empty = not jobs
        if not jobs and waits and self._at_empty is AtEmpty.WAIT_AND_END:
            return None
        # A dequeue may find none while the router has not yet heard of jobs just enqueued.
        if not jobs and self._at_empty is AtEmpty.END:
            pending = self._client.count(self._plan.queue, JobState.PENDING)
            return Answered(0) if pending else None
        return Answered(len(jobs), waited=waits)

    def _note(self, claimed: Sequence[ClaimedJob]) -> None:
        self._succeeded, self._failed = [], []
        for job in claimed:
            self._inspect(job)
            if not self._plan.all_jobs and not _is_bench_job(job):
                self._foreign.append(job)
            elif random.random() * 100 < self._plan.success_percent:
                self._succeeded.append(job)
            else:
                self._failed.append(job)
        if self._foreign:
            raise ForeignJobFound(
                self._plan.queue,
                self._foreign[0].descriptor,
                "what it had claimed of them is released, at no attempt's cost "
                "(by time-out, should the service be away by now)",
            )

    def _acknowledge(self) -> Answered:
        acknowledged = len(self._succeeded) + len(self._failed)
        if acknowledged:
            self._client.ack(self._plan.queue, succeeded=self._succeeded, failed=self._failed)
        self._succeeded, self._failed = [], []
        return Answered(acknowledged)


def _not_stored(batch: JobBatch, cause: PinLaterError | ConnectionFailed) -> str:
    """Describe a batch of lines that failed; the lines before it may be among those stored."""
    last = batch.first + len(batch.jobs) - 1
    lines = f"line {last}, which was"
    if last > batch.first:
        lines = f"lines {batch.first} to {last}, which were"
    # Of a call that is divided over shards one part may fail alone.
    is_unsure = isinstance(cause, OutcomeUnknown) or (
        isinstance(cause, PinLaterError)
        and (cause.code is ErrorCode.SHARD_CONNECTION_FAILED or len(batch.jobs) > _UNDIVIDED_JOBS)
    )
    stored = "not stored for sure" if is_unsure else "not stored"
    return f"stopped at {lines} {stored}: {cause}"
