"""A store on virtual time: a StorageEngine over dictionaries, which a crash leaves as committed.

`Disk` is what outlives processes: jobs, ids, the owner. `ModelStore` is one process's engine on
it. A commit takes time, in which its process may be killed before or after the jobs are on the
disk; and the disk's faults may have it fail, beyond doubt or so that nobody knows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from pinlaterd.engines.base import (
    NO_TIME_MS,
    AckOp,
    AckResult,
    Acks,
    Batch,
    BatchResult,
    CheckpointOp,
    CheckpointResult,
    ClaimOp,
    Durability,
    EnqueueOp,
    Expired,
    Finding,
    Limits,
    Ownership,
    ReleaseOp,
    Requeued,
    SearcherFactory,
    StoredJob,
    TableLimits,
    first_local_id,
)
from pinlaterd.errors import ShardOwned, StorageError, StorageNotCommitted
from pinlaterd.model import JobKey, JobState, Payload, PendingKey, claim_source
from tests.simulation.world import Process

LIMITS = Limits(
    queue_name_chars=64, body_bytes=1 << 20, run_after_ms=1 << 62, custom_status_chars=80
)
_OPEN_SECONDS = 0.01


class Fault(Enum):
    """What may become of a commit."""

    NONE = "none"
    REFUSED = "not committed"
    LOST_BEFORE = "fails before the commit; the outcome is unknown"
    LOST_AFTER = "fails after the commit; the outcome is unknown"


@dataclass
class StoredRow:
    """One job on the disk."""

    priority: int
    local_id: int
    body: bytes
    attempts_allowed: int
    attempts_remaining: int
    custom_status: str
    created_at_ms: int
    run_after_ms: int
    updated_at_ms: int
    state: JobState = JobState.PENDING
    claim: str | None = None

    @property
    def key(self) -> JobKey:
        return JobKey(self.priority, self.local_id)

    @property
    def requeued(self) -> Requeued:
        return Requeued(self.priority, PendingKey(self.run_after_ms, self.local_id))

    def become(self, state: JobState, now_ms: int) -> None:
        self.state = state
        self.updated_at_ms = now_ms
        if state is JobState.PENDING:
            self.claim = None

    def end_attempt(self, retry_at_ms: int, now_ms: int) -> Requeued | None:
        """A failed attempt, or a claim that timed out: what is pending again, None if it FAILED."""
        if self.attempts_remaining <= 1:
            self.attempts_remaining = 0
            self.become(JobState.FAILED, now_ms)
            return None
        self.attempts_remaining -= 1
        self.run_after_ms = retry_at_ms
        self.become(JobState.PENDING, now_ms)
        return self.requeued


@dataclass
class Disk:
    """What a shard's store holds, whichever process owns it. `jobs`: by queue, then key."""

    draw_fault: Callable[[], Fault]
    commit_seconds: Callable[[], float]
    jobs: dict[str, dict[JobKey, StoredRow]] = field(default_factory=dict)
    next_ids: dict[tuple[str, int], int] = field(default_factory=dict)
    owner: ModelStore | None = None
    clean: bool = True
    start_ms: int = 0
    first_id: int = 1


class ModelStore:
    """Fulfils `StorageEngine`, for one process."""

    limits = LIMITS
    failure = ""

    def __init__(self, disk: Disk, process: Callable[[], Process]) -> None:
        self._disk = disk
        self._process = process

    # --- ownership -----------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        return self._process().alive

    def open(self, now_ms: int) -> Ownership:
        disk = self._disk
        if disk.owner is not None and disk.owner is not self and disk.owner.alive:
            raise ShardOwned("another process owns the store")
        self._process().block(_OPEN_SECONDS)
        clean, disk.clean = disk.clean, False
        disk.owner = self
        disk.start_ms = max(now_ms, disk.start_ms + 1)
        disk.first_id = max(disk.first_id, first_local_id(now_ms))
        return Ownership(disk.start_ms, clean)

    def close(self) -> None:
        if self._disk.owner is self:
            self._disk.owner = None
            self._disk.clean = True

    def heartbeat(self) -> None: ...

    def address(self) -> str:
        return ""

    def durability(self) -> Durability:
        return Durability("as the simulation says")

    # --- batches -------------------------------------------------------------------------------

    def apply(self, batch: Batch, now_ms: int) -> BatchResult:
        process, fault = self._process(), self._disk.draw_fault()
        seconds = self._disk.commit_seconds()
        part = seconds * process.world.rng.random()
        process.block(part)
        if fault is Fault.REFUSED:
            raise StorageNotCommitted("the simulation refuses this commit")
        if fault is Fault.LOST_BEFORE:
            raise StorageError("the simulation cuts the connection")
        result = BatchResult(
            [self._ack(op, now_ms) for op in batch.acks],
            [self._checkpoint(op, now_ms) for op in batch.checkpoints],
            [self._release(op, now_ms) for op in batch.releases],
            [self._enqueue(op, now_ms) for op in batch.enqueues],
            [self._claim(op, now_ms) for op in batch.claims],
        )
        process.block(seconds - part)
        if fault is Fault.LOST_AFTER:
            raise StorageError("the simulation cuts the connection")
        return result

    def _ack(self, op: AckOp, now_ms: int) -> AckResult:
        requeued: list[Requeued] = []
        succeeded = failed = noop = 0
        for row in self._acked(op.queue, op.succeeded):
            if row is None:
                noop += 1
                continue
            row.become(JobState.SUCCEEDED, now_ms)
            succeeded += 1
        for acks in op.failed:
            for row in self._acked(op.queue, [acks]):
                if row is None:
                    noop += 1
                    continue
                again = row.end_attempt(now_ms + acks.retry_delay_ms, now_ms)
                requeued += [again] if again else []
                failed += 1
        return AckResult(succeeded, failed, noop, requeued)

    def _acked(self, queue: str, acks: Iterable[Acks]) -> Iterator[StoredRow | None]:
        """One by one: the jobs that the acks apply to; None for each that does not."""
        for priority, local_ids, text, _, claim in acks:
            for local_id in local_ids:
                row = self._claimed(queue, JobKey(priority, local_id), claim)
                if row is not None:
                    row.custom_status = (row.custom_status + text)[: LIMITS.custom_status_chars]
                yield row

    def _claimed(self, queue: str, key: JobKey, claim: str | None) -> StoredRow | None:
        """The job, if it is IN_PROGRESS under `claim`, or under any if that is None."""
        row = self._disk.jobs[queue].get(key)
        if row is None or row.state is not JobState.IN_PROGRESS:
            return None
        return row if claim in (None, row.claim) else None

    def _checkpoint(self, op: CheckpointOp, now_ms: int) -> CheckpointResult:
        requeued: list[Requeued] = []
        done = 0
        for checkpoint in op.checkpoints:
            row = self._claimed(op.queue, checkpoint.key, checkpoint.claim_descriptor)
            if row is None or (
                checkpoint.claim_descriptor is None and claim_source(row.claim or "") != op.source
            ):
                continue
            done += 1
            wanted = checkpoint.run_after_ms
            row.run_after_ms = now_ms if wanted is None else wanted
            row.updated_at_ms = now_ms
            if checkpoint.new_body is not None:
                row.body = checkpoint.new_body
            if checkpoint.attempts is not None:
                row.attempts_allowed = row.attempts_remaining = checkpoint.attempts
            if checkpoint.move_to_pending:
                row.become(JobState.PENDING, now_ms)
                requeued.append(row.requeued)
        return CheckpointResult(done, len(op.checkpoints) - done, requeued)

    def _release(self, op: ReleaseOp, now_ms: int) -> list[Requeued]:
        requeued = []
        for release in op.releases:
            row = self._claimed(op.queue, release.key, release.claim_descriptor)
            if row is not None:
                row.become(JobState.PENDING, now_ms)
                requeued.append(row.requeued)
        return requeued

    def _enqueue(self, op: EnqueueOp, now_ms: int) -> list[int]:
        ids = []
        for job in op.jobs:
            place = (op.queue, job.priority)
            local_id = max(self._disk.next_ids.get(place, 1), self._disk.first_id)
            self._disk.next_ids[place] = local_id + 1
            ids.append(local_id)
            row = StoredRow(
                job.priority,
                local_id,
                job.body,
                job.attempts_allowed,
                job.attempts_allowed,
                job.custom_status,
                created_at_ms=now_ms,
                run_after_ms=now_ms if job.run_after_ms is None else job.run_after_ms,
                updated_at_ms=now_ms,
            )
            self._disk.jobs[op.queue][row.key] = row
        return ids

    def _claim(self, op: ClaimOp, now_ms: int) -> list[Payload | None]:
        found: list[Payload | None] = []
        for priority, keys, claim_descriptors, _ in op.claims:
            for key, claim_descriptor in zip(keys, claim_descriptors, strict=True):
                row = self._disk.jobs[op.queue].get(JobKey(priority, key.local_id))
                if row is None or row.state is not JobState.PENDING:
                    found.append(None)
                    continue
                row.state, row.claim = JobState.IN_PROGRESS, claim_descriptor
                row.updated_at_ms = now_ms
                found.append(self._payload(row))
        return found

    def _payload(self, row: StoredRow) -> Payload:
        return Payload(row.body, row.attempts_allowed, row.attempts_remaining)

    # --- queues --------------------------------------------------------------------------------

    def queues(self) -> frozenset[str]:
        return frozenset(self._disk.jobs)

    def narrower(self, queue: str) -> Mapping[int, TableLimits]:
        return {}

    def create_queue(self, queue: str, now_ms: int) -> None:
        self._disk.jobs.setdefault(queue, {})

    def delete_queue(self, queue: str) -> None:
        self._disk.jobs.pop(queue, None)

    # --- reads ---------------------------------------------------------------------------------

    def rows(self, queue: str, state: JobState, priority: int) -> Iterable[StoredRow]:
        rows = self._disk.jobs.get(queue, {}).values()
        return [row for row in rows if row.state is state and row.priority == priority]

    def read_pending(
        self, queue: str, priority: int, *, after: PendingKey | None, until_ms: int, limit: int
    ) -> Sequence[PendingKey]:
        keys = sorted(row.requeued.key for row in self.rows(queue, JobState.PENDING, priority))
        behind = [
            key for key in keys if (after is None or key > after) and key.run_after_ms <= until_ms
        ]
        return behind[:limit]

    def payloads(
        self, queue: str, priority: int, local_ids: Sequence[int], *, most_bytes: int
    ) -> Sequence[Payload | None]:
        rows = [self._disk.jobs[queue].get(JobKey(priority, number)) for number in local_ids]
        return [None if row is None else self._payload(row) for row in rows]

    def lookup(
        self, queue: str, keys: Sequence[JobKey], *, include_body: bool
    ) -> Sequence[StoredJob]:
        rows = [self._disk.jobs[queue].get(key) for key in keys]
        return [
            StoredJob(
                row.key,
                row.state,
                row.attempts_allowed,
                row.attempts_remaining,
                row.custom_status,
                row.created_at_ms,
                row.run_after_ms,
                row.updated_at_ms,
                row.claim,
                row.body if include_body else None,
            )
            for row in rows
            if row is not None
        ]

    def depths(
        self, queues: Collection[str] | None = None
    ) -> Mapping[str, Mapping[tuple[int, JobState], int]]:
        found: dict[str, dict[tuple[int, JobState], int]] = {}
        for queue, rows in self._disk.jobs.items():
            depths = found.setdefault(queue, {})
            for row in rows.values():
                place = (row.priority, row.state)
                depths[place] = depths.get(place, 0) + 1
        return found

    # --- maintenance ---------------------------------------------------------------------------

    def retry_failed(
        self,
        queue: str,
        priority: int,
        *,
        attempts: int,
        run_after_ms: int,
        limit: int,
        now_ms: int,
    ) -> Sequence[Requeued]:
        self._process().block(self._disk.commit_seconds())
        requeued = []
        for row in self._longest_failed(queue, priority)[:limit]:
            row.attempts_allowed = max(row.attempts_allowed, attempts)
            row.attempts_remaining = attempts
            row.run_after_ms = run_after_ms
            row.become(JobState.PENDING, now_ms)
            requeued.append(row.requeued)
        return requeued

    def _longest_failed(self, queue: str, priority: int) -> list[StoredRow]:
        return sorted(
            self.rows(queue, JobState.FAILED, priority),
            key=lambda row: (row.updated_at_ms, row.local_id),
        )

    def suspects(self) -> Collection[str]:
        return ()

    def recount(self, queue: str) -> None: ...

    @property
    def damage(self) -> str:
        return ""

    def check(self, *, repair: bool) -> Sequence[Finding]:
        return ()

    def oldest_failed(self, queue: str, priority: int, *, limit: int) -> Sequence[int]:
        return [row.updated_at_ms for row in self._longest_failed(queue, priority)[:limit]]

    def delete_jobs(
        self, queue: str, state: JobState, priority: int, *, limit: int
    ) -> Sequence[JobKey]:
        self._process().block(self._disk.commit_seconds())
        return self._delete(queue, [row.key for row in self.rows(queue, state, priority)][:limit])

    def delete_keys(self, queue: str, state: JobState, keys: Sequence[JobKey]) -> Sequence[JobKey]:
        jobs = self._disk.jobs[queue]
        return self._delete(
            queue, [key for key in keys if key in jobs and jobs[key].state is state]
        )

    def _delete(self, queue: str, keys: Sequence[JobKey]) -> Sequence[JobKey]:
        for key in keys:
            del self._disk.jobs[queue][key]
        return keys

    def release_expired(
        self,
        queue: str,
        *,
        claimed_before_ms: int,
        limit: int,
        now_ms: int,
        claimed_after_ms: int = NO_TIME_MS,
    ) -> Expired:
        expired = [
            row
            for row in self._disk.jobs[queue].values()
            if row.state is JobState.IN_PROGRESS
            and claimed_after_ms < row.updated_at_ms < claimed_before_ms
        ][:limit]
        again = [row.end_attempt(now_ms, now_ms) for row in expired]
        retried = [requeued for requeued in again if requeued is not None]
        return Expired(retried, len(again) - len(retried))

    def collect_garbage(
        self, queue: str, state: JobState, *, updated_before_ms: int, limit: int
    ) -> int:
        old = [
            row.key
            for row in self._disk.jobs[queue].values()
            if row.state is state and row.updated_at_ms < updated_before_ms
        ]
        return len(self._delete(queue, old[:limit]))

    def vacuum(self, *, limit: int) -> bool:
        return False

    def searcher(self) -> SearcherFactory:
        raise NotImplementedError("the simulation makes no searches: they run in a process")
