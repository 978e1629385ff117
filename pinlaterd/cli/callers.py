"""The calls that `pinlater` loads a service with, and measures: enqueues, dequeues with acks, whole
lives of jobs.

A caller makes those of one connection. What it has claimed and not acknowledged when a run ends,
its `finish` does. With `bench_jobs_only`, jobs that the bench did not make are released, at no
attempt's cost, and end the run.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from pinlaterd.cli.audit import Stamp, is_bench_body, new_run, stamped_body
from pinlaterd.cli.load import Answered, Kind, LoadStopped, OutOfJobs
from pinlaterd.cli.rendering import printable
from pinlaterd.client.client import Client
from pinlaterd.config.schema import ServerSettings
from pinlaterd.errors import ConnectionFailed, ErrorCode, OutcomeUnknown, PinLaterError
from pinlaterd.model import CheckpointInfo, ClaimedJob, Job, JobState

# An empty queue is asked again only with a wait, so that nobody polls it at full speed.
EMPTY_QUEUE_WAIT_MS = 1000
# Enough to find what stands in line for the next dequeues, and few enough for one answer.
_LOOKED_AT_JOBS = 100
_UNDIVIDED_JOBS = ServerSettings().enqueue_split_jobs


# --- enqueues -------------------------------------------------------------------------------


class Batch(NamedTuple):
    """Jobs for one call; `first` is the number of the first of them."""

    first: int
    jobs: list[Job]


class Batches:
    """One source of batches for all connections."""

    def __init__(self, batches: Iterable[Batch]) -> None:
        self._lock = threading.Lock()
        self._batches = iter(batches)

    def take(self) -> Batch | None:
        with self._lock:
            return next(self._batches, None)


def stamped_batches(*, batch_size: int, body_bytes: int, priority: int) -> Iterator[Batch]:
    """Batches without end whose bodies `check-dequeue` can check."""
    run = new_run()
    for first in itertools.count(0, batch_size):
        yield Batch(
            first,
            [
                Job(stamped_body(Stamp(run, sequence), body_bytes), priority=priority)
                for sequence in range(first, first + batch_size)
            ],
        )


def alike_batches(job: Job, *, batch_size: int) -> Iterator[Batch]:
    """The same jobs without end: making them up takes no time between calls."""
    jobs = [job] * batch_size
    return (Batch(first, jobs) for first in itertools.count(0, batch_size))


def line_batches(lines: Iterable[bytes], *, batch_size: int, priority: int) -> Iterator[Batch]:
    """A job of each line, without its line end. Lines are counted from 1."""
    numbered = enumerate(lines, start=1)
    while batch := list(itertools.islice(numbered, batch_size)):
        jobs = [Job(line.removesuffix(b"\n"), priority=priority) for _, line in batch]
        yield Batch(batch[0][0], jobs)


class LinesNotStored(LoadStopped):
    """A batch of lines failed; the lines before it may be among those stored."""

    def __init__(self, batch: Batch, cause: PinLaterError | ConnectionFailed) -> None:
        last = batch.first + len(batch.jobs) - 1
        lines = f"line {last}, which was"
        if last > batch.first:
            lines = f"lines {batch.first} to {last}, which were"
        is_unsure = isinstance(cause, OutcomeUnknown) or (
            isinstance(cause, PinLaterError)
            # Of a call that is divided over shards one part may fail alone.
            and (
                cause.code is ErrorCode.SHARD_CONNECTION_FAILED or len(batch.jobs) > _UNDIVIDED_JOBS
            )
        )
        stored = "not stored for sure" if is_unsure else "not stored"
        super().__init__(f"stopped at {lines} {stored}: {cause}")


class EnqueueCaller:
    """Enqueues the next batch; with `all_or_stop`, a batch that fails ends the run."""

    kind = Kind.ENQUEUE

    def __init__(
        self, client: Client, queue: str, batches: Batches, *, all_or_stop: bool = False
    ) -> None:
        self._client = client
        self._queue = queue
        self._batches = batches
        self._all_or_stop = all_or_stop

    def call(self) -> Answered | None:
        batch = self._batches.take()
        if batch is None:
            return None
        try:
            self._client.enqueue(self._queue, batch.jobs)
        except (PinLaterError, ConnectionFailed) as error:
            if self._all_or_stop:
                raise LinesNotStored(batch, error) from error
            raise
        return Answered(len(batch.jobs))

    def finish(self) -> None:
        pass


# --- dequeues and acks ----------------------------------------------------------------------


@dataclass(frozen=True)
class Taking:
    """What dequeues take, and how the jobs are acknowledged.

    `success_percent` of the jobs, chosen at random, succeed; the others fail. `inspect` sees each.
    """

    queue: str
    batch_size: int
    success_percent: int
    bench_jobs_only: bool = False
    inspect: Callable[[ClaimedJob], None] | None = None


class ForeignJobFound(LoadStopped):
    """The queue holds a job that the bench did not make."""

    def __init__(self, queue: str, descriptor: str, taken_so_far: str) -> None:
        super().__init__(
            f"queue {printable(queue)!r} holds jobs that the bench did not make, as "
            f"{descriptor}, and it would acknowledge them; {taken_so_far}. Give it a queue of its "
            "own (--create makes it), or --all-jobs if these may go"
        )


def check_for_foreign_jobs(client: Client, queue: str) -> None:
    """Look at the jobs that dequeues would bring first, and take none. Raises ForeignJobFound."""
    for job in client.dequeue(queue, limit=_LOOKED_AT_JOBS, dry_run=True):
        if not is_bench_body(job.body):
            raise ForeignJobFound(queue, job.descriptor, "nothing was done")


class _Claims:
    """The jobs that a connection has claimed and not yet acknowledged."""

    def __init__(self, client: Client, taking: Taking) -> None:
        self._client = client
        self._taking = taking
        self._succeeded: list[ClaimedJob] = []
        self._failed: list[ClaimedJob] = []
        self._foreign: list[ClaimedJob] = []

    def dequeue(self, *, wait_ms: int = 0) -> int:
        """Acknowledge, and claim the next jobs, in one call."""
        jobs = self._client.dequeue(
            self._taking.queue,
            limit=self._taking.batch_size,
            succeeded=self._succeeded,
            failed=self._failed,
            max_wait_ms=wait_ms,
        )
        self._succeeded, self._failed = [], []
        for job in jobs:
            if self._taking.inspect is not None:
                self._taking.inspect(job)
            self._end_of(job).append(job)
        if self._foreign:
            raise ForeignJobFound(
                self._taking.queue,
                self._foreign[0].descriptor,
                "what it had claimed of them is given back, at no attempt's cost "
                "(by time-out, should the service be away by now)",
            )
        return len(jobs)

    def acknowledge(self) -> int:
        acknowledged = len(self._succeeded) + len(self._failed)
        if acknowledged:
            self._client.ack(self._taking.queue, succeeded=self._succeeded, failed=self._failed)
        self._succeeded, self._failed = [], []
        return acknowledged

    def end(self) -> None:
        """Acknowledge our jobs, release those of others."""
        self.acknowledge()
        if self._foreign:
            self._client.checkpoint(
                self._taking.queue,
                [
                    CheckpointInfo(
                        job.descriptor,
                        move_to_pending=True,
                        claim_descriptor=job.claim_descriptor,
                    )
                    for job in self._foreign
                ],
            )
        self._foreign = []

    def _end_of(self, job: ClaimedJob) -> list[ClaimedJob]:
        if self._taking.bench_jobs_only and not is_bench_body(job.body):
            return self._foreign
        succeeds = random.random() * 100 < self._taking.success_percent
        return self._succeeded if succeeds else self._failed


class DequeueCaller:
    """Dequeues, and acknowledges the jobs of the call before in the same call.

    An empty queue is waited at; with `until_empty` the caller has nothing left to do when a wait
    brought no job."""

    kind = Kind.DEQUEUE

    def __init__(self, client: Client, taking: Taking, *, until_empty: bool = False) -> None:
        self._claims = _Claims(client, taking)
        self._until_empty = until_empty
        self._was_empty = False

    def call(self) -> Answered | None:
        wait_ms = EMPTY_QUEUE_WAIT_MS if self._was_empty else 0
        claimed = self._claims.dequeue(wait_ms=wait_ms)
        self._was_empty = not claimed
        if self._until_empty and wait_ms and not claimed:
            return None
        return Answered(claimed, waited=wait_ms > 0)

    def finish(self) -> None:
        self._claims.end()


class BenchDequeueCaller:
    """As DequeueCaller, without a wait: the run ends when the queue has run empty."""

    kind = Kind.DEQUEUE

    def __init__(self, client: Client, taking: Taking) -> None:
        self._client = client
        self._queue = taking.queue
        self._claims = _Claims(client, taking)

    def call(self) -> Answered:
        claimed = self._claims.dequeue()
        # A dequeue may find none while the router has not yet heard of jobs just enqueued.
        if not claimed and self._client.count(self._queue, JobState.PENDING) == 0:
            raise OutOfJobs
        return Answered(claimed)

    def finish(self) -> None:
        self._claims.end()


class CycleCaller:
    """A job's whole life in three calls: enqueue, dequeue, ack. One that fails is made again."""

    def __init__(self, client: Client, taking: Taking, batches: Batches) -> None:
        self._enqueues = EnqueueCaller(client, taking.queue, batches)
        self._claims = _Claims(client, taking)
        self.kind = Kind.ENQUEUE

    def call(self) -> Answered | None:
        if self.kind is Kind.ENQUEUE:
            answer = self._enqueues.call()
            self.kind = Kind.DEQUEUE
            return answer
        if self.kind is Kind.DEQUEUE:
            claimed = self._claims.dequeue()
            self.kind = Kind.ACK if claimed else Kind.ENQUEUE
            return Answered(claimed)
        acknowledged = self._claims.acknowledge()
        self.kind = Kind.ENQUEUE
        return Answered(acknowledged)

    def finish(self) -> None:
        self._claims.end()
