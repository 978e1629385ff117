"""Any order of operations leaves an engine where a plain model of a queue is.

The model is a dictionary of jobs and knows nothing of tables, indexes or commits. After every step
all jobs, the depths and the order of what is pending are compared. Each engine is walked by a test
in a file of its own, so that they run side by side.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from pinlaterd.clock import FakeClock
from pinlaterd.engines.base import (
    Batch,
    Checkpoint,
    CheckpointOp,
    EnqueueOp,
    Limits,
    Release,
    Requeued,
    StoredJob,
)
from pinlaterd.model import Job, JobKey, JobState, PendingKey, claim_source
from tests.conformance.engine.engines import EngineMaker, maker
from tests.conformance.engine.harness import (
    END_OF_TIME_MS,
    QUEUE,
    Ack,
    Claim,
    EngineHarness,
    ack_op,
    claim_op,
)

PRIORITIES = (1, 2)
NO_CLAIM = "host:9010:1:web:0"

priorities = st.sampled_from(PRIORITIES)
delays_ms = st.integers(-3_000, 1_000)
texts = st.sampled_from(["", "", "x", "é🦆\0", "y" * 3_000])
bodies = st.binary(max_size=40)
limits = st.integers(1, 6)


@dataclass
class ModelJob:
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
    claim_descriptor: str | None = None

    def stored(self) -> StoredJob:
        return StoredJob(
            self.key,
            self.state,
            self.attempts_allowed,
            self.attempts_remaining,
            self.custom_status,
            self.created_at_ms,
            self.run_after_ms,
            self.updated_at_ms,
            self.claim_descriptor,
            self.body,
        )

    def become(self, state: JobState, now_ms: int) -> None:
        self.state = state
        self.updated_at_ms = now_ms
        if state is JobState.PENDING:
            self.pending_since_ms = now_ms
            self.claim_descriptor = None

    def end_attempt(self, retry_at_ms: int, now_ms: int) -> Requeued | None:
        if self.attempts_remaining <= 1:
            self.attempts_remaining = 0
            self.become(JobState.FAILED, now_ms)
            return None
        self.attempts_remaining -= 1
        self.run_after_ms = retry_at_ms
        self.become(JobState.PENDING, now_ms)
        return self.requeued()

    def requeued(self) -> Requeued:
        return Requeued(self.key.priority, PendingKey(self.run_after_ms, self.key.local_id))

    def append(self, text: str, limits: Limits) -> None:
        before = "" if text and limits.acks_replace_status else self.custom_status
        self.custom_status = (before + text)[: limits.custom_status_chars]

    def prepend(self, text: str, limits: Limits) -> None:
        self.custom_status = (text + self.custom_status)[: limits.custom_status_chars]


class QueueMachine(RuleBasedStateMachine):
    new_maker: Callable[[Path], EngineMaker]  # of a new store, in an empty folder

    @initialize()
    def start(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="pinlaterd-model-"))
        self.clock = FakeClock()
        self.store = EngineHarness(self.new_maker(self.folder), self.clock)
        self.store.engine.create_queue(QUEUE, self.now_ms)
        self.jobs: dict[JobKey, ModelJob] = {}
        self.gone: list[JobKey] = []
        self.claims: list[Release] = []  # every claim ever made, most of them stale

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.engine.close()
            shutil.rmtree(self.folder)

    @property
    def now_ms(self) -> int:
        return self.clock.now_ms()

    def pending(self, priority: int) -> list[ModelJob]:
        """In the order in which they are to be handed out."""
        return sorted(
            (job for job in self.of(JobState.PENDING, priority)),
            key=lambda job: (job.run_after_ms, job.key.local_id),
        )

    def of(self, state: JobState, priority: int) -> list[ModelJob]:
        return [
            job for job in self.jobs.values() if job.state is state and job.key.priority == priority
        ]

    def remove(self, key: JobKey) -> None:
        del self.jobs[key]
        self.gone.append(key)

    def draw_keys(self, data: st.DataObject) -> list[JobKey]:
        """Keys of any kind: in any state, deleted, or of another priority; some twice."""
        known = [*self.jobs, *self.gone[-3:]]
        known += [key._replace(priority=3 - key.priority) for key in known[:1]]
        return data.draw(st.lists(st.sampled_from(known), min_size=1, max_size=8))

    def draw_claim(self, data: st.DataObject, key: JobKey) -> str | None:
        """No claim, or one that was made on that job, perhaps long ago, or on none."""
        made = [release.claim_descriptor for release in self.claims if release.key == key]
        return data.draw(st.sampled_from([None, *made[-2:], NO_CLAIM]))

    # --- rules -------------------------------------------------------------------------------

    @rule(
        specs=st.lists(
            st.tuples(bodies, priorities, st.none() | delays_ms, st.integers(1, 3), texts),
            max_size=8,
        )
    )
    def enqueue(self, specs: list[tuple[bytes, int, int | None, int, str]]) -> None:
        now_ms = self.now_ms
        jobs = [
            Job(body, priority, None if delay is None else now_ms + delay, attempts, text)
            for body, priority, delay, attempts, text in specs
        ]
        batch = Batch(enqueues=[EnqueueOp(QUEUE, jobs[:3]), EnqueueOp(QUEUE, jobs[3:])])
        first, second = self.store.engine.apply(batch, now_ms).enqueues
        for job, local_id in zip(jobs, [*first, *second], strict=True):
            key = JobKey(job.priority, local_id)
            assert key not in self.jobs
            assert key not in self.gone
            self.jobs[key] = ModelJob(
                key=key,
                body=job.body,
                attempts_allowed=job.attempts_allowed,
                attempts_remaining=job.attempts_allowed,
                custom_status=job.custom_status,
                created_at_ms=now_ms,
                run_after_ms=now_ms if job.run_after_ms is None else job.run_after_ms,
                updated_at_ms=now_ms,
                pending_since_ms=now_ms,
            )

    @rule(priority=priorities, limit=limits, source=st.sampled_from(["web", "web2:h"]))
    def claim(self, priority: int, limit: int, source: str) -> None:
        ready = [job for job in self.pending(priority) if job.run_after_ms <= self.now_ms]

        claimed = self.store.claim(priority=priority, limit=limit, source=source)

        assert [one.key for one in claimed] == [job.key for job in ready[:limit]]
        for one in claimed:
            self._claimed(one.key, one.claim_descriptor)
            job = self.jobs[one.key]
            assert one.payload == (job.body, job.attempts_allowed, job.attempts_remaining)

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def claim_what_may_not_be_there(self, data: st.DataObject) -> None:
        claims = []
        for key in self.draw_keys(data):
            job = self.jobs.get(key)
            at = PendingKey(self.now_ms if job is None else job.run_after_ms, key.local_id)
            claims.append(self.store.claim_on(key, at))

        [payloads] = self.store.engine.apply(
            Batch(claims=[claim_op(QUEUE, claims)]), self.now_ms
        ).claims

        for claim, payload in zip(claims, payloads, strict=True):
            assert (payload is not None) == self._is_pending(claim)
            if payload is not None:
                self._claimed(claim.key, claim.claim_descriptor)

    def _is_pending(self, claim: Claim) -> bool:
        job = self.jobs.get(claim.key)
        return job is not None and job.state is JobState.PENDING

    def _claimed(self, key: JobKey, claim_descriptor: str) -> None:
        self.jobs[key].become(JobState.IN_PROGRESS, self.now_ms)
        self.jobs[key].claim_descriptor = claim_descriptor
        self.claims.append(Release(key, claim_descriptor))

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def ack(self, data: st.DataObject) -> None:
        acks = [
            Ack(
                key,
                data.draw(texts),
                data.draw(st.integers(0, 2_000)),
                self.draw_claim(data, key),
            )
            for key in self.draw_keys(data)
        ]
        middle = data.draw(st.integers(0, len(acks)))
        op = ack_op(QUEUE, acks[:middle], acks[middle:])

        [result] = self.store.engine.apply(Batch(acks=[op]), self.now_ms).acks

        succeeded = [ack for ack in acks[:middle] if self._ack_one(ack, self._succeed)]
        requeued: list[Requeued] = []
        failed = [
            ack
            for ack in acks[middle:]
            if self._ack_one(ack, lambda ack: requeued.extend(self._fail(ack)))
        ]
        assert (result.succeeded, result.failed) == (len(succeeded), len(failed))
        assert result.noop == len(acks) - len(succeeded) - len(failed)
        assert sorted(result.requeued) == sorted(requeued)

    def _ack_one(self, ack: Ack, carry_out: Callable[[Ack], object]) -> bool:
        job = self.jobs.get(ack.key)
        applies = (
            job is not None
            and job.state is JobState.IN_PROGRESS
            and ack.claim_descriptor in (None, job.claim_descriptor)
        )
        if applies:
            carry_out(ack)
        return applies

    def _succeed(self, ack: Ack) -> None:
        self.jobs[ack.key].append(ack.append_custom_status, self.store.engine.limits)
        self.jobs[ack.key].become(JobState.SUCCEEDED, self.now_ms)

    def _fail(self, ack: Ack) -> list[Requeued]:
        self.jobs[ack.key].append(ack.append_custom_status, self.store.engine.limits)
        requeued = self.jobs[ack.key].end_attempt(self.now_ms + ack.retry_delay_ms, self.now_ms)
        return [] if requeued is None else [requeued]

    @precondition(lambda self: self.jobs)
    @rule(data=st.data(), source=st.sampled_from(["web", "web2:h"]))
    def checkpoint(self, data: st.DataObject, source: str) -> None:
        checkpoints = [
            Checkpoint(
                key,
                run_after_ms=data.draw(st.none() | delays_ms.map(lambda d: self.now_ms + d)),
                new_body=data.draw(st.none() | bodies),
                move_to_pending=data.draw(st.booleans()),
                attempts=data.draw(st.none() | st.integers(1, 3)),
                prepend_custom_status=data.draw(st.none() | texts),
                claim_descriptor=self.draw_claim(data, key),
            )
            for key in self.draw_keys(data)
        ]
        batch = Batch(checkpoints=[CheckpointOp(QUEUE, source, checkpoints)])
        [result] = self.store.engine.apply(batch, self.now_ms).checkpoints

        done = [one for one in checkpoints if self._checkpoint_one(one, source)]
        assert (result.done, result.noop) == (len(done), len(checkpoints) - len(done))
        moved = [self.jobs[one.key].requeued() for one in done if one.move_to_pending]
        assert list(result.requeued) == moved

    def _checkpoint_one(self, checkpoint: Checkpoint, source: str) -> bool:
        job = self.jobs.get(checkpoint.key)
        if job is None or job.state is not JobState.IN_PROGRESS:
            return False
        assert job.claim_descriptor is not None
        if checkpoint.claim_descriptor is None:
            mine = claim_source(job.claim_descriptor) == source
        else:
            mine = checkpoint.claim_descriptor == job.claim_descriptor
        if not mine:
            return False
        at_ms = checkpoint.run_after_ms
        job.run_after_ms = self.now_ms if at_ms is None else at_ms
        if checkpoint.new_body is not None:
            job.body = checkpoint.new_body
        if checkpoint.attempts is not None:
            job.attempts_allowed = job.attempts_remaining = checkpoint.attempts
        job.prepend(checkpoint.prepend_custom_status or "", self.store.engine.limits)
        job.become(
            JobState.PENDING if checkpoint.move_to_pending else JobState.IN_PROGRESS, self.now_ms
        )
        if not checkpoint.move_to_pending:
            job.pending_since_ms = self.now_ms
        return True

    @precondition(lambda self: self.claims)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        releases = data.draw(st.lists(st.sampled_from(self.claims[-8:]), max_size=5))

        requeued = self.store.release(*releases)

        expected = []
        for key, claim_descriptor in releases:
            job = self.jobs.get(key)
            if (
                job is not None
                and job.state is JobState.IN_PROGRESS
                and job.claim_descriptor == claim_descriptor
            ):
                job.become(JobState.PENDING, job.pending_since_ms)
                expected.append(job.requeued())
        assert list(requeued) == expected

    @rule(age_ms=st.integers(0, 4_000))
    def release_expired(self, age_ms: int) -> None:
        before_ms = self.now_ms - age_ms
        old = [
            job
            for priority in PRIORITIES
            for job in self.of(JobState.IN_PROGRESS, priority)
            if job.updated_at_ms < before_ms
        ]

        expired = self.store.engine.release_expired(
            QUEUE, claimed_before_ms=before_ms, limit=1_000, now_ms=self.now_ms
        )

        ends = [job.end_attempt(self.now_ms, self.now_ms) for job in old]
        assert sorted(expired.retried) == sorted(end for end in ends if end is not None)
        assert expired.failed == ends.count(None)

    @rule(priority=priorities, attempts=st.integers(1, 4), delay_ms=delays_ms, limit=limits)
    def retry_failed(self, priority: int, attempts: int, delay_ms: int, limit: int) -> None:
        failed = sorted(
            self.of(JobState.FAILED, priority),
            key=lambda job: (job.updated_at_ms, job.key.local_id),
        )[:limit]
        oldest = self.store.engine.oldest_failed(QUEUE, priority, limit=limit)
        assert list(oldest) == [job.updated_at_ms for job in failed]

        requeued = self.store.engine.retry_failed(
            QUEUE,
            priority,
            attempts=attempts,
            run_after_ms=self.now_ms + delay_ms,
            limit=limit,
            now_ms=self.now_ms,
        )

        for job in failed:
            job.attempts_allowed = max(job.attempts_allowed, attempts)
            job.attempts_remaining = attempts
            job.run_after_ms = self.now_ms + delay_ms
            job.become(JobState.PENDING, self.now_ms)
        assert list(requeued) == [job.requeued() for job in failed]

    @rule(state=st.sampled_from(JobState), priority=priorities, limit=limits)
    def delete_jobs(self, state: JobState, priority: int, limit: int) -> None:
        there = {job.key for job in self.of(state, priority)}

        deleted = self.store.engine.delete_jobs(QUEUE, state, priority, limit=limit)

        assert set(deleted) <= there
        assert len(set(deleted)) == len(deleted) == min(limit, len(there))
        for key in deleted:
            self.remove(key)

    @precondition(lambda self: self.jobs)
    @rule(data=st.data(), state=st.sampled_from(JobState))
    def delete_keys(self, data: st.DataObject, state: JobState) -> None:
        keys = self.draw_keys(data)

        deleted = self.store.engine.delete_keys(QUEUE, state, keys)

        there = {key for key in keys if key in self.jobs and self.jobs[key].state is state}
        assert sorted(deleted) == sorted(there)
        for key in there:
            self.remove(key)

    @rule(
        state=st.sampled_from([JobState.SUCCEEDED, JobState.FAILED]),
        age_ms=st.integers(0, 3_000),
        limit=limits,
    )
    def collect_garbage(self, state: JobState, age_ms: int, limit: int) -> None:
        before_ms = self.now_ms - age_ms
        old = [
            job.key
            for priority in PRIORITIES
            for job in self.of(state, priority)
            if job.updated_at_ms < before_ms
        ]

        deleted = self.store.engine.collect_garbage(
            QUEUE, state, updated_before_ms=before_ms, limit=limit
        )

        assert deleted == min(limit, len(old))
        left = self.store.states(old)
        gone = [key for key, found in zip(old, left, strict=True) if found is None]
        assert len(gone) == deleted
        for key in gone:
            self.remove(key)

    @rule(seconds=st.floats(0.001, 3))
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule()
    def restart(self) -> None:
        assert self.store.reopen().clean

    @precondition(lambda self: len(self.jobs) > 12)
    @rule()
    def delete_the_queue(self) -> None:
        self.store.engine.delete_queue(QUEUE)
        self.store.engine.create_queue(QUEUE, self.now_ms)
        for key in list(self.jobs):
            self.remove(key)

    @rule(limit=limits)
    def vacuum(self, limit: int) -> None:
        self.store.engine.vacuum(limit=limit)

    # --- what always holds -------------------------------------------------------------------

    @invariant()
    def jobs_are_as_in_the_model(self) -> None:
        keys = [*self.jobs, *self.gone]
        found = self.store.engine.lookup(QUEUE, keys, include_body=True)
        assert {job.key: job for job in found} == {
            key: job.stored() for key, job in self.jobs.items()
        }

    @invariant()
    def depths_are_as_in_the_model(self) -> None:
        counts: dict[tuple[int, JobState], int] = {}
        for job in self.jobs.values():
            place = (job.key.priority, job.state)
            counts[place] = counts.get(place, 0) + 1
        assert self.store.depths() == counts

    @invariant()
    def pending_jobs_are_in_order(self) -> None:
        for priority in PRIORITIES:
            keys = self.store.engine.read_pending(
                QUEUE, priority, after=None, until_ms=END_OF_TIME_MS, limit=1_000
            )
            assert list(keys) == [
                PendingKey(job.run_after_ms, job.key.local_id) for job in self.pending(priority)
            ]


def check_engine(engine: str, request: pytest.FixtureRequest, *, examples: int) -> None:
    """Walk `examples` orders of operations on new stores of an engine."""
    new_maker = partial(maker, engine, request)
    machine: Any = type("Machine", (QueueMachine,), {"new_maker": staticmethod(new_maker)})

    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=40,
            deadline=None,
            report_multiple_bugs=False,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )
