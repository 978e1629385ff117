"""A shard's store as a test speaks to it: one queue at a time, with the time taken from a clock.

It does what a shard does and no more: claims what `read_pending` shows, gives every claim a
descriptor of its own, and lets each call be one batch.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from pinlaterd.engines.base import (
    NO_BOUND,
    SINGLE,
    AckOp,
    AckResult,
    Acks,
    Batch,
    Checkpoint,
    CheckpointOp,
    CheckpointResult,
    ClaimOp,
    Claims,
    EnqueueOp,
    EnqueueWithOptionsOp,
    Finish,
    Finished,
    FinishOp,
    KeyHolder,
    Release,
    ReleaseOp,
    Requeued,
    StorageEngine,
    StoredJob,
    Term,
)
from pinlaterd.errors import ShardOwned
from pinlaterd.model import Job, JobKey, JobOptions, JobState, Payload
from tests.clocks import FakeClock
from tests.conformance.engine.engines import EngineMaker
from tests.conftest import POLL_SECONDS

QUEUE = "mail"
END_OF_TIME_MS = 2**62
_LEASE_END_SECONDS = 90.0
_COUNT_SECONDS = 60.0


def keyed(key: str, body: bytes | None = None, **fields: Any) -> Job:
    """Return a job with a key, which is its body, too, unless one is given."""
    body = key.encode() if body is None else body
    return Job(body, options=JobOptions(key), **fields)


class Ack(NamedTuple):
    """Of one job."""

    key: JobKey
    append_custom_status: str = ""
    retry_delay_ms: int = 0
    claim_descriptor: str | None = None
    retryable: bool = True


def ack_op(queue: str, succeeded: Iterable[Ack | JobKey], failed: Iterable[Ack | JobKey]) -> AckOp:
    return AckOp(queue, _alike(succeeded), _alike(failed))


def _alike(acks: Iterable[Ack | JobKey]) -> list[Acks]:
    """As a shard puts them together: those that follow one another and have much in common."""
    each = [ack if isinstance(ack, Ack) else Ack(ack) for ack in acks]
    return [
        Acks(priority, [ack.key.local_id for ack in run], *rest)
        for (priority, *rest), run in groupby(each, lambda ack: (ack.key.priority, *ack[1:]))
    ]


class Claim(NamedTuple):
    """Of one job."""

    key: JobKey
    claim_descriptor: str
    payload: Payload | None = None

    @property
    def named(self) -> tuple[str, int]:
        claimer, colon, number = self.claim_descriptor.rpartition(":")
        return claimer + colon, int(number)


def claim_op(
    queue: str, claims: Iterable[Claim], most_bytes: int = NO_BOUND, *, at_least_one: bool = True
) -> ClaimOp:
    """As a shard puts them together: in columns of those whose claims count up."""
    columns: list[tuple[int, list[int], list[Payload | None], str, int]] = []
    for claim in claims:
        priority, (claimer, number) = claim.key.priority, claim.named
        last = columns[-1] if columns else (0, [], [], "", 0)
        if (priority, claimer, number) != (last[0], last[3], last[4] + len(last[1])):
            last = (priority, [], [], claimer, number)
            columns.append(last)
        last[1].append(claim.key.local_id)
        last[2].append(claim.payload)
    made = [Claims(*column) for column in columns]
    return ClaimOp(queue, made, most_bytes, at_least_one)


class Claimed(NamedTuple):
    """What a worker holds."""

    key: JobKey
    claim_descriptor: str
    payload: Payload

    @property
    def body(self) -> bytes:
        return self.payload[0]


def open_when_free(engine: StorageEngine, now_ms: int, term: Term = SINGLE) -> int:
    """Own the store, once the lease of an owner that was killed is over, where there is one."""
    deadline = time.monotonic() + _LEASE_END_SECONDS
    while True:
        try:
            return engine.open(now_ms, term)
        except ShardOwned:
            if time.monotonic() > deadline:
                raise
            time.sleep(POLL_SECONDS)


def counted(engine: StorageEngine) -> Mapping[str, Mapping[tuple[int, JobState], int]]:
    """The depths of all queues, once they are known."""
    deadline = time.monotonic() + _COUNT_SECONDS
    while True:
        depths = engine.depths()
        known = {queue: of_queue for queue, of_queue in depths.items() if of_queue is not None}
        if len(known) == len(depths):
            return known
        assert time.monotonic() < deadline
        time.sleep(POLL_SECONDS)


class EngineHarness:
    def __init__(self, make: EngineMaker, clock: FakeClock, term: Term = SINGLE) -> None:
        self.make = make
        self.clock = clock
        self.engine: StorageEngine = make()
        self.start_ms = open_when_free(self.engine, clock.now_ms(), term)
        self._claims = 0
        counted(self.engine)

    @property
    def now_ms(self) -> int:
        return self.clock.now_ms()

    def reopen(self) -> int:
        """What a restart in order does."""
        self.engine.close()
        self.engine = self.make()
        self.start_ms = open_when_free(self.engine, self.now_ms)
        counted(self.engine)
        return self.start_ms

    # --- one batch each ----------------------------------------------------------------------

    def enqueue(self, *jobs: Job | bytes, queue: str = QUEUE) -> list[JobKey]:
        whole = [job if isinstance(job, Job) else Job(job) for job in jobs]
        batch = Batch(enqueues=[EnqueueOp(queue, whole)])
        [local_ids] = self.engine.apply(batch, self.now_ms).enqueues
        return [JobKey(job.priority, i) for job, i in zip(whole, local_ids, strict=True)]

    def keyed(self, *jobs: Job, queue: str = QUEUE) -> list[KeyHolder]:
        batch = Batch(with_options=[EnqueueWithOptionsOp(queue, jobs)])
        [holders] = self.engine.apply(batch, self.now_ms).with_options
        return list(holders)

    def enqueue_keyed(self, *jobs: Job) -> list[JobKey]:
        """Enqueue jobs whose keys nobody holds."""
        holders = self.keyed(*jobs)
        assert not any(holder.existed for holder in holders)
        return [JobKey(holder.priority, holder.local_id) for holder in holders]

    def ready(self, *, queue: str = QUEUE, priority: int = 1, limit: int = 1000) -> list[JobKey]:
        """What is due now, in the order in which it is to be handed out."""
        keys = self.engine.read_pending(
            queue, priority, after=None, until_ms=self.now_ms, limit=limit
        )
        return [JobKey(priority, key.local_id) for key in keys]

    def wanted(
        self, *, queue: str = QUEUE, priority: int = 1, limit: int = 1000, source: str = "worker"
    ) -> list[Claim]:
        """Claims on what is due now, not yet made."""
        keys = self.engine.read_pending(
            queue, priority, after=None, until_ms=self.now_ms, limit=limit
        )
        return [self.claim_on(JobKey(priority, key.local_id), source=source) for key in keys]

    def claim_on(self, key: JobKey, *, source: str = "worker") -> Claim:
        self._claims += 1
        start_ms = self.start_ms
        return Claim(key, f"host:9010:{start_ms}:{source}:{self._claims}")

    def claim(
        self, *, queue: str = QUEUE, priority: int = 1, limit: int = 1000, source: str = "worker"
    ) -> list[Claimed]:
        claims = self.wanted(queue=queue, priority=priority, limit=limit, source=source)
        batch = Batch(claims=[claim_op(queue, claims)])
        [payloads] = self.engine.apply(batch, self.now_ms).claims
        return [
            Claimed(claim.key, claim.claim_descriptor, payload)
            for claim, payload in zip(claims, payloads, strict=True)
            if payload is not None
        ]

    def succeed(self, *acks: Ack | JobKey, queue: str = QUEUE) -> AckResult:
        return self._ack(ack_op(queue, acks, ()))

    def fail(self, *acks: Ack | JobKey, queue: str = QUEUE) -> AckResult:
        return self._ack(ack_op(queue, (), acks))

    def _ack(self, op: AckOp) -> AckResult:
        [result] = self.engine.apply(Batch(acks=[op]), self.now_ms).acks
        return result

    def checkpoint(
        self, *checkpoints: Checkpoint, queue: str = QUEUE, source: str = "worker"
    ) -> CheckpointResult:
        batch = Batch(checkpoints=[CheckpointOp(queue, source, checkpoints)])
        [result] = self.engine.apply(batch, self.now_ms).checkpoints
        return result

    def release(self, *releases: Release, queue: str = QUEUE) -> Sequence[Requeued]:
        batch = Batch(releases=[ReleaseOp(queue, releases)])
        [requeued] = self.engine.apply(batch, self.now_ms).releases
        return requeued

    def finish(self, *finishes: Finish, queue: str = QUEUE) -> Finished:
        batch = Batch(finishes=[FinishOp(queue, finishes)])
        [finished] = self.engine.apply(batch, self.now_ms).finishes
        return finished

    # --- what became of it -------------------------------------------------------------------

    def job(self, key: JobKey, *, queue: str = QUEUE) -> StoredJob:
        [stored] = self.engine.lookup(queue, [key], include_body=True)
        return stored

    def states(self, keys: Iterable[JobKey], *, queue: str = QUEUE) -> list[JobState | None]:
        wanted = list(keys)
        found = {
            job.key: job.state for job in self.engine.lookup(queue, wanted, include_body=False)
        }
        return [found.get(key) for key in wanted]

    def depths(self, queue: str = QUEUE) -> dict[tuple[int, JobState], int]:
        return dict(counted(self.engine)[queue])

    # --- shortcuts to a state ----------------------------------------------------------------

    def in_progress(self, *jobs: Job | bytes, source: str = "worker") -> list[Claimed]:
        """Enqueue, and claim all that is ready at the first job's priority."""
        keys = self.enqueue(*jobs)
        return self.claim(priority=keys[0].priority, source=source)

    def failed(self, *jobs: Job | bytes) -> list[JobKey]:
        keys = [claimed.key for claimed in self.in_progress(*jobs)]
        while waiting := [key for key in keys if self.job(key).state is not JobState.FAILED]:
            self.fail(*waiting)
            self.claim(priority=keys[0].priority)
        return keys
