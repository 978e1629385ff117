"""A StorageEngine over dictionaries: what each engine has to do, in plain code.

It knows nothing of tables, indexes or commits. The properties compare engines with it, and the
simulation's store is one with faults and a clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pinlaterd.engines.base import (
    LATEST_MS,
    NO_TIME_MS,
    AckOp,
    AckResult,
    Acks,
    Batch,
    BatchResult,
    CheckpointOp,
    CheckpointResult,
    ClaimOp,
    EnqueueOp,
    EnqueueWithOptionsOp,
    Expired,
    ExpiredJobs,
    Finished,
    FinishOp,
    KeyHolder,
    Limits,
    ReleaseOp,
    Requeued,
    StoredJob,
)
from pinlaterd.engines.batches import keys_of, retry_at
from pinlaterd.model import (
    ALL_QUEUES,
    FinishOutcome,
    Job,
    JobKey,
    JobOptions,
    JobState,
    Payload,
    PendingKey,
    QueueKey,
    claim_source,
    key_of,
)


@dataclass
class Row:
    """One job."""

    key: JobKey
    body: bytes
    attempts_allowed: int
    attempts_remaining: int
    custom_status: str
    created_at_ms: int
    run_after_ms: int
    updated_at_ms: int
    pending_since_ms: int
    state: JobState = JobState.PENDING
    claim: str | None = None
    options: JobOptions | None = None

    @property
    def requeued(self) -> Requeued:
        return Requeued(self.key.priority, PendingKey(self.run_after_ms, self.key.local_id))

    @property
    def payload(self) -> Payload:
        return Payload(self.body, self.attempts_allowed, self.attempts_remaining)

    def stored(self, *, include_body: bool) -> StoredJob:
        return StoredJob(
            self.key,
            self.state,
            self.attempts_allowed,
            self.attempts_remaining,
            self.custom_status,
            self.created_at_ms,
            self.run_after_ms,
            self.updated_at_ms,
            self.claim,
            self.body if include_body else None,
            self.options,
        )

    def become(self, state: JobState, now_ms: int, claim: str | None = None) -> None:
        self.state, self.updated_at_ms = state, now_ms
        self.claim = claim or self.claim
        if state is JobState.PENDING:
            self.pending_since_ms, self.claim = now_ms, None

    def end_attempt(self, retry_at_ms: int, now_ms: int) -> list[Requeued]:
        """A failed attempt, or a claim that timed out: what is PENDING again, nothing if FAILED."""
        if self.attempts_remaining <= 1:
            self.attempts_remaining = 0
            self.become(JobState.FAILED, now_ms)
            return []
        self.attempts_remaining -= 1
        self.run_after_ms = retry_at_ms
        self.become(JobState.PENDING, now_ms)
        return [self.requeued]


class ModelEngine:
    """The part of `StorageEngine` that changes and reads jobs. `jobs`: by queue, then key."""

    fence = 0

    def __init__(self, limits: Limits, jobs: dict[str, dict[JobKey, Row]]) -> None:
        self.limits = limits
        self.jobs = jobs

    def new_id(self, queue: str, priority: int) -> int:
        """Never given out before."""
        raise NotImplementedError

    def apply(self, batch: Batch, now_ms: int) -> BatchResult:
        return BatchResult(
            [self._ack(op, now_ms) for op in batch.acks],
            [self._checkpoint(op, now_ms) for op in batch.checkpoints],
            [self._release(op) for op in batch.releases],
            [self._enqueue(op, now_ms) for op in batch.enqueues],
            with_options=[self._enqueue_keyed(op, now_ms) for op in batch.with_options],
            claims=[self._claim(op, now_ms) for op in batch.claims],
            finishes=[self._finish(op, now_ms) for op in batch.finishes],
        )

    def _held(self, queue: str, key: JobKey, claim: str | None) -> Row | None:
        """The job, if it is IN_PROGRESS under `claim`, or under any if that is None."""
        row = self.jobs[queue].get(key)
        if row is None or row.state is not JobState.IN_PROGRESS:
            return None
        return row if claim in (None, row.claim) else None

    def _ack(self, op: AckOp, now_ms: int) -> AckResult:
        succeeded = failed = 0
        requeued: list[Requeued] = []
        missed = set(keys_of(op))
        for row, _ in self._acked(op.queue, op.succeeded):
            row.become(JobState.SUCCEEDED, now_ms)
            missed.discard(row.key)
            succeeded += 1
        for row, acks in self._acked(op.queue, op.failed):
            if not acks.retryable:
                row.attempts_remaining = 1
            requeued += row.end_attempt(now_ms + acks.retry_delay_ms, now_ms)
            missed.discard(row.key)
            failed += 1
        return AckResult(succeeded, failed, op.jobs - succeeded - failed, requeued, missed)

    def _acked(self, queue: str, acks: Iterable[Acks]) -> Iterator[tuple[Row, Acks]]:
        """One by one: the jobs that the acks apply to, and those acks."""
        for alike in acks:
            for local_id in alike.local_ids:
                row = self._held(queue, JobKey(alike.priority, local_id), alike.claim_descriptor)
                if row is not None:
                    text = alike.append_custom_status
                    before = "" if text and self.limits.acks_replace_status else row.custom_status
                    row.custom_status = self._cut(before + text)
                    yield row, alike

    def _cut(self, text: str) -> str:
        return text[: self.limits.custom_status_chars]

    def _checkpoint(self, op: CheckpointOp, now_ms: int) -> CheckpointResult:
        requeued: list[Requeued] = []
        missed = set()
        done = 0
        for one in op.checkpoints:
            row = self._held(op.queue, one.key, one.claim_descriptor)
            if row is None or (
                one.claim_descriptor is None and claim_source(row.claim or "") != op.source
            ):
                missed.add(one.key)
                continue
            done += 1
            row.run_after_ms = now_ms if one.run_after_ms is None else one.run_after_ms
            row.body = row.body if one.new_body is None else one.new_body
            if one.attempts is not None:
                row.attempts_allowed = row.attempts_remaining = one.attempts
            row.custom_status = self._cut((one.prepend_custom_status or "") + row.custom_status)
            row.become(JobState.PENDING if one.move_to_pending else row.state, now_ms)
            row.pending_since_ms = now_ms
            requeued += [row.requeued] if one.move_to_pending else []
        return CheckpointResult(done, len(op.checkpoints) - done, requeued, missed)

    def _finish(self, op: FinishOp, now_ms: int) -> Finished:
        finished = Finished([], [], [])
        for one in op.finishes:
            row = self.jobs[op.queue].get(one.key)
            state, left = (row.state, row.attempts_remaining) if row else (None, 0)
            outcome = one.judge(state, left)
            finished.outcomes.append(outcome)
            if row is None or outcome is not FinishOutcome.DONE:
                continue
            finished.left_pending.extend([one.key] if state is JobState.PENDING else [])
            text = one.append_custom_status
            before = "" if text and self.limits.acks_replace_status else row.custom_status
            row.custom_status = self._cut(before + text)
            row.attempts_remaining = one.attempts_remaining
            if one.state is JobState.PENDING:
                row.run_after_ms = now_ms + one.retry_delay_ms
            row.become(one.state, now_ms)
            finished.requeued.extend([row.requeued] if one.state is JobState.PENDING else [])
        return finished

    def _release(self, op: ReleaseOp) -> list[Requeued]:
        requeued = []
        for key, claim in op.releases:
            row = self._held(op.queue, key, claim)
            if row is not None:
                row.become(JobState.PENDING, row.pending_since_ms)
                requeued.append(row.requeued)
        return requeued

    def _enqueue(self, op: EnqueueOp, now_ms: int) -> list[int]:
        return [self._store(op.queue, job, now_ms) for job in op.jobs]

    def _enqueue_keyed(self, op: EnqueueWithOptionsOp, now_ms: int) -> list[KeyHolder]:
        holders = []
        for job in op.jobs:
            wanted = key_of(op.queue, job.options)
            holder = self._holders().get(wanted) if wanted else None
            if holder is None:
                local_id = self._store(op.queue, job, now_ms)
                holder = KeyHolder(job.priority, local_id, existed=False)
            holders.append(holder)
        return holders

    def _holders(self) -> Mapping[QueueKey | None, KeyHolder]:
        return {
            wanted: KeyHolder(*row.key, True, queue if wanted.queue == ALL_QUEUES else "")
            for queue, rows in self.jobs.items()
            for row in rows.values()
            if (wanted := key_of(queue, row.options))
        }

    def find_keys(self, queue: str, keys: Sequence[str]) -> Mapping[str, JobKey]:
        held = self._holders()
        found = {key: held.get(QueueKey(queue, key)) for key in keys}
        return {key: JobKey(*one[:2]) for key, one in found.items() if one}

    def find_keys_of_all(self, keys: Sequence[str]) -> Mapping[str, KeyHolder]:
        held = self._holders()
        return {key: held[named] for key in keys if (named := QueueKey(ALL_QUEUES, key)) in held}

    def _store(self, queue: str, job: Job, now_ms: int) -> int:
        key = JobKey(job.priority, self.new_id(queue, job.priority))
        assert key not in self.jobs[queue]
        self.jobs[queue][key] = Row(
            key,
            job.body,
            job.attempts_allowed,
            job.attempts_allowed,
            job.custom_status,
            created_at_ms=now_ms,
            run_after_ms=now_ms if job.run_after_ms is None else job.run_after_ms,
            updated_at_ms=now_ms,
            pending_since_ms=now_ms,
            options=job.options,
        )
        return key.local_id

    def _claim(self, op: ClaimOp, now_ms: int) -> list[Payload | None]:
        found: list[Payload | None] = []
        for claims in op.claims:
            for local_id, claim in zip(claims.local_ids, claims.descriptors, strict=True):
                row = self.jobs[op.queue].get(JobKey(claims.priority, local_id))
                is_pending = row is not None and row.state is JobState.PENDING
                if row is not None and is_pending:
                    row.become(JobState.IN_PROGRESS, now_ms, claim)
                found.append(row.payload if row is not None and is_pending else None)
        return found

    # --- queues and reads ----------------------------------------------------------------------

    def queues(self) -> frozenset[str]:
        return frozenset(self.jobs)

    def create_queue(self, queue: str, now_ms: int) -> None:
        self.jobs.setdefault(queue, {})

    def delete_queue(self, queue: str) -> None:
        self.jobs.pop(queue, None)

    def rows(self, queue: str, state: JobState, priority: int | None = None) -> list[Row]:
        """Those of one priority, or of all."""
        rows = self.jobs.get(queue, {}).values()
        return [r for r in rows if r.state is state and priority in (None, r.key.priority)]

    def read_pending(
        self, queue: str, priority: int, *, after: PendingKey | None, until_ms: int, limit: int
    ) -> Sequence[PendingKey]:
        keys = sorted(row.requeued.key for row in self.rows(queue, JobState.PENDING, priority))
        behind = [key for key in keys if after is None or key > after]
        return [key for key in behind if key.run_after_ms <= until_ms][:limit]

    def payloads(
        self, queue: str, priority: int, local_ids: Sequence[int], *, most_bytes: int
    ) -> Sequence[Payload | None]:
        rows = [self.jobs[queue].get(JobKey(priority, number)) for number in local_ids]
        return [None if row is None else row.payload for row in rows]

    def lookup(
        self, queue: str, keys: Sequence[JobKey], *, include_body: bool
    ) -> Sequence[StoredJob]:
        rows = [self.jobs[queue].get(key) for key in keys]
        return [row.stored(include_body=include_body) for row in rows if row is not None]

    def depths(
        self, queues: Collection[str] | None = None
    ) -> Mapping[str, Mapping[tuple[int, JobState], int]]:
        return {
            queue: Counter((row.key.priority, row.state) for row in rows.values())
            for queue, rows in self.jobs.items()
        }

    def raise_fence(self, number: int) -> None:
        self.fence = max(self.fence, number)

    # --- maintenance ---------------------------------------------------------------------------

    def _longest_failed(self, queue: str, priority: int, limit: int) -> list[Row]:
        failed = self.rows(queue, JobState.FAILED, priority)
        return sorted(failed, key=lambda row: (row.updated_at_ms, row.key.local_id))[:limit]

    def oldest_failed(self, queue: str, priority: int, *, limit: int) -> Sequence[int]:
        return [row.updated_at_ms for row in self._longest_failed(queue, priority, limit)]

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
        failed = self._longest_failed(queue, priority, limit)
        return [self._retry(row, attempts, run_after_ms, now_ms) for row in failed]

    def retry_found(
        self,
        queue: str,
        run_afters: Mapping[JobKey, int],
        *,
        attempts: int,
        ended_before_ms: int,
        now_ms: int,
    ) -> Sequence[Requeued]:
        return [
            self._retry(row, attempts, run_afters[row.key], now_ms)
            for row in self.rows(queue, JobState.FAILED)
            if row.key in run_afters and row.updated_at_ms < ended_before_ms
        ]

    def _retry(self, row: Row, attempts: int, run_after_ms: int, now_ms: int) -> Requeued:
        row.attempts_allowed = max(row.attempts_allowed, attempts)
        row.attempts_remaining, row.run_after_ms = attempts, run_after_ms
        row.become(JobState.PENDING, now_ms)
        return row.requeued

    def delete_jobs(
        self, queue: str, state: JobState, priority: int, *, limit: int
    ) -> Sequence[JobKey]:
        keys = [row.key for row in self.rows(queue, state, priority)]
        return self.delete_found(queue, state, keys[:limit])

    def delete_found(
        self,
        queue: str,
        state: JobState,
        keys: Sequence[JobKey],
        *,
        ended_before_ms: int = LATEST_MS,
    ) -> Sequence[JobKey]:
        has_ended = state in (JobState.SUCCEEDED, JobState.FAILED)
        there = {
            row.key
            for row in self.rows(queue, state)
            if not has_ended or row.updated_at_ms < ended_before_ms
        }
        found = [key for key in dict.fromkeys(keys) if key in there]
        for key in found:
            del self.jobs[queue][key]
        return found

    def release_expired(
        self,
        queue: str,
        *,
        claimed_before_ms: int,
        limit: int,
        now_ms: int,
        claimed_after_ms: int = NO_TIME_MS,
        backoff_attempts: int = 0,
    ) -> Expired:
        expired = [
            row
            for row in self.rows(queue, JobState.IN_PROGRESS)
            if claimed_after_ms < row.updated_at_ms < claimed_before_ms
        ][:limit]
        retried = [
            requeued
            for row in expired
            for requeued in row.end_attempt(
                now_ms, retry_at(now_ms, backoff_attempts, row.attempts_remaining)
            )
        ]
        return Expired(retried, len(expired) - len(retried))

    @property
    def expiring(self) -> Collection[str]:
        return ()

    def expire_jobs(self, queue: str, *, limit: int, now_ms: int) -> ExpiredJobs:
        return ExpiredJobs((), 0)

    def ended_before(self, queue: str, state: JobState, before_ms: int) -> list[JobKey]:
        return [row.key for row in self.rows(queue, state) if row.updated_at_ms < before_ms]

    def collect_garbage(
        self, queue: str, state: JobState, *, updated_before_ms: int, limit: int
    ) -> int:
        old = self.ended_before(queue, state, updated_before_ms)[:limit]
        return len(self.delete_found(queue, state, old))
