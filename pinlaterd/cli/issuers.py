"""The calls that `pinlater` loads a service with: enqueues, enqueues from a file, dequeues."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from pinlaterd.cli.audit import Stamp, new_run, stamped_body
from pinlaterd.cli.load import Answered, LoadStopped
from pinlaterd.client.client import Client
from pinlaterd.config.schema import ServerSettings
from pinlaterd.errors import ConnectionFailed, ErrorCode, OutcomeUnknown, PinLaterError
from pinlaterd.model import ClaimedJob, Job

# An empty queue is asked again only with a wait, so that nobody polls it at full speed.
EMPTY_QUEUE_WAIT_MS = 1000
_UNDIVIDED_JOBS = ServerSettings().enqueue_split_jobs


class Batch(NamedTuple):
    """Jobs for one call; `first` is the number of the first of them."""

    first: int
    jobs: list[Job]


class Batches:
    """One source of batches for all threads."""

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


def alike_batches(body: bytes, *, batch_size: int, priority: int) -> Iterator[Batch]:
    """Batches without end whose jobs all have this body."""
    jobs = [Job(body, priority=priority)] * batch_size
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


class EnqueueIssuer:
    """Enqueues the next batch; with `all_or_stop`, a batch that fails ends the run."""

    def __init__(self, client: Client, queue: str, batches: Batches, *, all_or_stop: bool) -> None:
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


class DequeueIssuer:
    """Dequeues a batch and acknowledges the one before in the same call.

    `success_percent` of the jobs, chosen at random, are acknowledged as succeeded, the others as
    failed. `inspect` sees each job. With `until_empty` it ends when a wait brought no job.
    """

    def __init__(
        self,
        client: Client,
        queue: str,
        *,
        batch_size: int,
        success_percent: int,
        inspect: Callable[[ClaimedJob], None] | None = None,
        until_empty: bool = False,
    ) -> None:
        self._client = client
        self._queue = queue
        self._batch_size = batch_size
        self._success_percent = success_percent
        self._inspect = inspect
        self._until_empty = until_empty
        self._succeeded: list[ClaimedJob] = []
        self._failed: list[ClaimedJob] = []
        self._was_empty = False

    def call(self) -> Answered | None:
        wait_ms = EMPTY_QUEUE_WAIT_MS if self._was_empty else 0
        jobs = self._client.dequeue(
            self._queue,
            limit=self._batch_size,
            succeeded=self._succeeded,
            failed=self._failed,
            max_wait_ms=wait_ms,
        )
        self._succeeded, self._failed = [], []
        self._was_empty = not jobs
        for job in jobs:
            if self._inspect is not None:
                self._inspect(job)
            succeeds = random.random() * 100 < self._success_percent
            (self._succeeded if succeeds else self._failed).append(job)
        if self._until_empty and wait_ms and not jobs:
            return None
        return Answered(len(jobs), waited=wait_ms > 0)

    def finish(self) -> None:
        if self._succeeded or self._failed:
            self._client.ack(self._queue, succeeded=self._succeeded, failed=self._failed)
