"""The calls that `pinlater bench` measures: enqueues, dequeues with acks, whole lives of jobs.

A caller makes those of one connection. What it has claimed and not acknowledged when a run ends,
its `finish` does. Jobs that the bench did not make are acknowledged only if that is asked for: else
they are given back, at no attempt's cost, and end the run.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from pinlaterd.cli.audit import is_bench_body
from pinlaterd.cli.rendering import printable
from pinlaterd.client.client import Client
from pinlaterd.model import CheckpointInfo, ClaimedJob, Job, JobState

# Enough to find what stands in line for the next dequeues, and few enough for one answer.
_LOOKED_AT_JOBS = 100


class Kind(StrEnum):
    """A kind of call that is measured by itself."""

    ENQUEUE = "enqueue"
    DEQUEUE = "dequeue"
    ACK = "ack"


class OutOfJobs(Exception):
    """A dequeue brought nothing, and nothing was pending."""


class StrangerFound(Exception):
    """The queue holds a job that the bench did not make."""

    def __init__(self, queue: str, descriptor: str, taken_so_far: str) -> None:
        super().__init__(
            f"queue {printable(queue)!r} holds jobs that the bench did not make, as "
            f"{descriptor}, and it would acknowledge them; {taken_so_far}. Give it a queue of its "
            "own (--create makes it), or --all-jobs if these may go"
        )


def check_for_strangers(client: Client, queue: str) -> None:
    """Look at the jobs that dequeues would bring first, and take none. Raises StrangerFound."""
    for job in client.dequeue(queue, limit=_LOOKED_AT_JOBS, dry_run=True):
        if not is_bench_body(job.body):
            raise StrangerFound(queue, job.descriptor, "nothing was done")


@dataclass(frozen=True)
class Taking:
    """What the calls of a bench take, and how they acknowledge it.

    `success_percent` of the jobs, chosen at random, succeed; the others fail. `all_jobs`: those
    that the bench did not make, too.
    """

    queue: str
    batch_size: int
    success_percent: int
    all_jobs: bool


class Caller(Protocol):
    """The calls of one connection."""

    kind: Kind  # of the call that comes next

    def call(self) -> int:
        """Make it; the number of jobs it moved. Raises OutOfJobs, StrangerFound."""
        ...

    def finish(self) -> None:
        """End the claims that there still are; not measured."""
        ...


class EnqueueCaller:
    """The same batch again and again: making up jobs must not be what is measured."""

    kind = Kind.ENQUEUE

    def __init__(self, client: Client, queue: str, jobs: Sequence[Job]) -> None:
        self._client = client
        self._queue = queue
        self._jobs = jobs

    def call(self) -> int:
        return len(self._client.enqueue(self._queue, self._jobs))

    def finish(self) -> None:
        pass


class _Claims:
    """The jobs that a connection has claimed and not yet acknowledged."""

    def __init__(self, client: Client, taking: Taking) -> None:
        self._client = client
        self._taking = taking
        self._succeeded: list[ClaimedJob] = []
        self._failed: list[ClaimedJob] = []
        self._strangers: list[ClaimedJob] = []

    def __len__(self) -> int:
        return len(self._succeeded) + len(self._failed)

    def dequeue(self) -> int:
        """Acknowledge, and claim the next jobs, in one call."""
        jobs = self._client.dequeue(
            self._taking.queue,
            limit=self._taking.batch_size,
            succeeded=self._succeeded,
            failed=self._failed,
        )
        self._succeeded, self._failed = [], []
        for job in jobs:
            self._end_of(job).append(job)
        if self._strangers:
            raise StrangerFound(
                self._taking.queue,
                self._strangers[0].descriptor,
                "what it had claimed of them is given back, at no attempt's cost "
                "(by time-out, should the service be away by now)",
            )
        return len(jobs)

    def acknowledge(self) -> int:
        acknowledged = len(self)
        if acknowledged:
            self._client.ack(self._taking.queue, succeeded=self._succeeded, failed=self._failed)
        self._succeeded, self._failed = [], []
        return acknowledged

    def end(self) -> None:
        """Acknowledge our jobs, give back those of others."""
        self.acknowledge()
        if self._strangers:
            self._client.checkpoint(
                self._taking.queue,
                [
                    CheckpointInfo(
                        job.descriptor,
                        move_to_pending=True,
                        claim_descriptor=job.claim_descriptor,
                    )
                    for job in self._strangers
                ],
            )
        self._strangers = []

    def _end_of(self, job: ClaimedJob) -> list[ClaimedJob]:
        if not self._taking.all_jobs and not is_bench_body(job.body):
            return self._strangers
        succeeds = random.random() * 100 < self._taking.success_percent
        return self._succeeded if succeeds else self._failed


class DequeueCaller:
    """Dequeues, and acknowledges the jobs of the call before in the same call."""

    kind = Kind.DEQUEUE

    def __init__(self, client: Client, taking: Taking) -> None:
        self._client = client
        self._queue = taking.queue
        self._claims = _Claims(client, taking)

    def call(self) -> int:
        claimed = self._claims.dequeue()
        # A dequeue may find none while the router has not yet heard of jobs just enqueued.
        if not claimed and self._client.count(self._queue, JobState.PENDING) == 0:
            raise OutOfJobs
        return claimed

    def finish(self) -> None:
        self._claims.end()


class CycleCaller:
    """A job's whole life in three calls: enqueue, dequeue, ack. One that fails is made again."""

    def __init__(self, client: Client, taking: Taking, jobs: Sequence[Job]) -> None:
        self.kind = Kind.ENQUEUE
        self._client = client
        self._queue = taking.queue
        self._jobs = jobs
        self._claims = _Claims(client, taking)

    def call(self) -> int:
        if self.kind is Kind.ENQUEUE:
            self._client.enqueue(self._queue, self._jobs)
            self.kind = Kind.DEQUEUE
            return len(self._jobs)
        if self.kind is Kind.DEQUEUE:
            claimed = self._claims.dequeue()
            self.kind = Kind.ACK if claimed else Kind.ENQUEUE
            return claimed
        acknowledged = self._claims.acknowledge()
        self.kind = Kind.ENQUEUE
        return acknowledged

    def finish(self) -> None:
        self._claims.end()
