"""Any order of operations leaves an engine where the model engine is.

After every step all jobs, the depths and the order of what is pending are compared. Each engine is
walked by a test in a file of its own, so that they run side by side.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
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

from pinlaterd.engines.base import (
    Batch,
    Checkpoint,
    CheckpointOp,
    EnqueueOp,
    EnqueueWithOptionsOp,
    Finish,
    FinishOp,
    Release,
    ReleaseOp,
)
from pinlaterd.model import Job, JobKey, JobState
from tests.clocks import FakeClock
from tests.conformance.engine.engines import EngineMaker, maker
from tests.conformance.engine.harness import (
    END_OF_TIME_MS,
    QUEUE,
    Ack,
    Claim,
    EngineHarness,
    ack_op,
    claim_op,
    keyed,
)
from tests.engines.model import ModelEngine

PRIORITIES = (1, 2)
NO_CLAIM = "host:9010:1:web:0"
# What no store holds, and no number of an engine.
NO_JOBS = [
    JobKey(3, 1),
    JobKey(1, 1 << 40),
    JobKey(1, 1 << 63),
    JobKey(2, 9_999_999_999_999_999_999),
]

priorities = st.sampled_from(PRIORITIES)
KEYS = ["k", "K", "k ", "é🦆\0"]
keys = st.sampled_from(KEYS)
delays_ms = st.integers(-3_000, 1_000)
texts = st.sampled_from(["", "", "x", "é🦆\0", "quote ' \" \\ %s", "y" * 3_000])
bodies = st.binary(max_size=40)
limits = st.integers(1, 6)


class Model(ModelEngine):
    """Gives jobs the ids that the engine has given."""

    ids: Iterator[int]

    def new_id(self, queue: str, priority: int) -> int:
        return next(self.ids)


class QueueMachine(RuleBasedStateMachine):
    new_maker: Callable[[Path], EngineMaker]  # of a new store, in an empty folder

    @initialize()
    def start(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="pinlaterd-model-"))
        self.clock = FakeClock()
        self.store = EngineHarness(self.new_maker(self.folder), self.clock)
        self.model = Model(self.store.engine.limits, {})
        for engine in (self.store.engine, self.model):
            engine.create_queue(QUEUE, self.now_ms)
        self.gone: list[JobKey] = []
        self.claims: list[Release] = []  # every claim ever made, most of them stale

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.engine.close()
            shutil.rmtree(self.folder)

    @property
    def now_ms(self) -> int:
        return self.clock.now_ms()

    @property
    def jobs(self) -> list[JobKey]:
        return list(self.model.jobs[QUEUE])

    def apply(self, batch: Batch) -> None:
        found = self.store.engine.apply(batch, self.now_ms)
        stored = [
            holder.local_id
            for of_op in found.with_options
            for holder in of_op
            if not holder.existed
        ]
        self.model.ids = iter([*(i for of_op in found.enqueues for i in of_op), *stored])
        expected = self.model.apply(batch, self.now_ms)
        for one, other in zip(found.acks, expected.acks, strict=True):
            assert one[:3] == other[:3]
            assert sorted(one.requeued) == sorted(other.requeued)
        for name in ("checkpoints", "releases", "with_options", "claims", "finishes"):
            of_ops = [list(map(_plain, getattr(each, name))) for each in (found, expected)]
            assert of_ops[0] == of_ops[1]

    def delete(self, state: JobState, keys: list[JobKey]) -> None:
        """What the engine has deleted."""
        assert list(self.model.delete_found(QUEUE, state, keys)) == keys
        self.gone += keys

    def draw_keys(self, data: st.DataObject, state: JobState) -> list[JobKey]:
        """Keys of any kind: in any state, but most in this one, deleted, of another priority or of
        none; some twice."""
        known = 3 * [row.key for row in self.model.rows(QUEUE, state)]
        known += [*self.jobs, *self.gone[-3:], data.draw(st.sampled_from(NO_JOBS))]
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
        jobs = [
            Job(body, priority, None if delay is None else self.now_ms + delay, attempts, text)
            for body, priority, delay, attempts, text in specs
        ]
        self.apply(Batch(enqueues=[EnqueueOp(QUEUE, jobs[:3]), EnqueueOp(QUEUE, jobs[3:])]))
        assert not set(self.jobs) & set(self.gone)

    @rule(specs=st.lists(st.tuples(keys, priorities, st.none() | delays_ms), max_size=6))
    def enqueue_keyed(self, specs: list[tuple[str, int, int | None]]) -> None:
        jobs = [
            keyed(key, priority=at, run_after_ms=None if delay is None else self.now_ms + delay)
            for key, at, delay in specs
        ]
        ops = [EnqueueWithOptionsOp(QUEUE, jobs[:2]), EnqueueWithOptionsOp(QUEUE, jobs[2:])]
        self.apply(Batch(with_options=ops))
        assert not set(self.jobs) & set(self.gone)

    @rule(priority=priorities, limit=limits, source=st.sampled_from(["web", "web2:h"]))
    def claim(self, priority: int, limit: int, source: str) -> None:
        found, expected = [
            engine.read_pending(QUEUE, priority, after=None, until_ms=self.now_ms, limit=limit)
            for engine in (self.store.engine, self.model)
        ]
        assert list(found) == expected
        self.make(self.store.wanted(priority=priority, limit=limit, source=source))

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def claim_what_may_not_be_there(self, data: st.DataObject) -> None:
        claims = [self.store.claim_on(key) for key in self.draw_keys(data, JobState.PENDING)]
        middle = data.draw(st.integers(0, len(claims)))
        self.make(claims[:middle], claims[middle:])

    def make(self, *ops: list[Claim]) -> None:
        self.apply(Batch(claims=[claim_op(QUEUE, claims) for claims in ops]))
        claims = [claim for of_op in ops for claim in of_op]
        held = {row.claim for row in self.model.rows(QUEUE, JobState.IN_PROGRESS)}
        made = [claim for claim in claims if claim.claim_descriptor in held]
        self.claims += [Release(claim.key, claim.claim_descriptor) for claim in made]

    @precondition(lambda self: self.jobs)
    @rule(data=st.data())
    def ack(self, data: st.DataObject) -> None:
        acks = [
            Ack(
                key,
                data.draw(texts),
                data.draw(st.integers(0, 2_000)),
                self.draw_claim(data, key),
                data.draw(st.booleans()),
            )
            for key in self.draw_keys(data, JobState.IN_PROGRESS)
        ]
        middle = data.draw(st.integers(0, len(acks)))
        self.apply(Batch(acks=[ack_op(QUEUE, acks[:middle], acks[middle:])]))

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
            for key in self.draw_keys(data, JobState.IN_PROGRESS)
        ]
        self.apply(Batch(checkpoints=[CheckpointOp(QUEUE, source, checkpoints)]))

    @precondition(lambda self: self.jobs)
    @rule(data=st.data(), state=st.sampled_from([JobState.PENDING, JobState.IN_PROGRESS]))
    def finish(self, data: st.DataObject, state: JobState) -> None:
        finishes = [
            Finish(
                key,
                data.draw(st.sampled_from([state for state in JobState if state != 1])),
                data.draw(st.integers(1, 3)),
                data.draw(st.none() | st.integers(0, 3)),
                compares_pending=data.draw(st.booleans()),
                retry_delay_ms=data.draw(st.integers(0, 2_000)),
                append_custom_status=data.draw(texts),
            )
            for key in dict.fromkeys(self.draw_keys(data, state))
        ]
        middle = data.draw(st.integers(0, len(finishes)))
        ops = [FinishOp(QUEUE, finishes[:middle]), FinishOp(QUEUE, finishes[middle:])]
        self.apply(Batch(finishes=[*ops, FinishOp(QUEUE, finishes[:1])]))

    @precondition(lambda self: self.claims)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        releases = data.draw(st.lists(st.sampled_from(self.claims[-8:]), max_size=5))
        self.apply(Batch(releases=[ReleaseOp(QUEUE, releases)]))

    @rule(age_ms=st.integers(0, 4_000))
    def release_expired(self, age_ms: int) -> None:
        found, expected = [
            engine.release_expired(
                QUEUE, claimed_before_ms=self.now_ms - age_ms, limit=1_000, now_ms=self.now_ms
            )
            for engine in (self.store.engine, self.model)
        ]
        assert found.failed == expected.failed
        assert sorted(found.retried) == sorted(expected.retried)

    @rule(priority=priorities, attempts=st.integers(1, 4), delay_ms=delays_ms, limit=limits)
    def retry_failed(self, priority: int, attempts: int, delay_ms: int, limit: int) -> None:
        found, expected = [
            [
                *engine.oldest_failed(QUEUE, priority, limit=limit),
                *engine.retry_failed(
                    QUEUE,
                    priority,
                    attempts=attempts,
                    run_after_ms=self.now_ms + delay_ms,
                    limit=limit,
                    now_ms=self.now_ms,
                ),
            ]
            for engine in (self.store.engine, self.model)
        ]
        assert found == expected

    @rule(state=st.sampled_from(JobState), priority=priorities, limit=limits)
    def delete_jobs(self, state: JobState, priority: int, limit: int) -> None:
        there = len(self.model.rows(QUEUE, state, priority))

        deleted = self.store.engine.delete_jobs(QUEUE, state, priority, limit=limit)

        assert len(deleted) == min(limit, there)
        assert {key.priority for key in deleted} <= {priority}
        self.delete(state, list(deleted))

    @precondition(lambda self: self.jobs)
    @rule(data=st.data(), attempts=st.integers(1, 4), age_ms=st.integers(0, 3_000))
    def retry_found(self, data: st.DataObject, attempts: int, age_ms: int) -> None:
        keys = self.draw_keys(data, JobState.FAILED)
        run_afters = {key: self.now_ms + data.draw(delays_ms) for key in keys}

        found, expected = [
            engine.retry_found(
                QUEUE,
                run_afters,
                attempts=attempts,
                ended_before_ms=self.now_ms - age_ms,
                now_ms=self.now_ms,
            )
            for engine in (self.store.engine, self.model)
        ]

        assert sorted(found) == sorted(expected)

    @precondition(lambda self: self.jobs)
    @rule(data=st.data(), state=st.sampled_from(JobState))
    def delete_found(self, data: st.DataObject, state: JobState) -> None:
        keys = self.draw_keys(data, state)

        deleted = self.store.engine.delete_found(QUEUE, state, keys)

        there = {row.key for row in self.model.rows(QUEUE, state)}
        assert sorted(deleted) == sorted(there & set(keys))
        self.delete(state, list(deleted))

    @rule(
        state=st.sampled_from([JobState.SUCCEEDED, JobState.FAILED]),
        age_ms=st.integers(0, 3_000),
        limit=limits,
    )
    def collect_garbage(self, state: JobState, age_ms: int, limit: int) -> None:
        before_ms = self.now_ms - age_ms
        old = self.model.ended_before(QUEUE, state, before_ms)

        deleted = self.store.engine.collect_garbage(
            QUEUE, state, updated_before_ms=before_ms, limit=limit
        )

        left = self.store.states(old)
        gone = [key for key, found in zip(old, left, strict=True) if found is None]
        assert deleted == len(gone) == min(limit, len(old))
        self.delete(state, gone)

    @rule(seconds=st.floats(0.001, 3))
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule()
    def restart(self) -> None:
        self.store.reopen()

    @precondition(lambda self: len(self.jobs) > 12)
    @rule()
    def delete_the_queue(self) -> None:
        self.gone += self.jobs
        for engine in (self.store.engine, self.model):
            engine.delete_queue(QUEUE)
            engine.create_queue(QUEUE, self.now_ms)

    @rule(limit=limits)
    def vacuum(self, limit: int) -> None:
        self.store.engine.vacuum(limit=limit)

    # --- what always holds -------------------------------------------------------------------

    @invariant()
    def jobs_are_as_in_the_model(self) -> None:
        keys = [*self.jobs, *self.gone, *NO_JOBS]
        found, expected = [
            {job.key: job for job in engine.lookup(QUEUE, keys, include_body=True)}
            for engine in (self.store.engine, self.model)
        ]
        assert found == expected

    @invariant()
    def keys_are_held_as_in_the_model(self) -> None:
        found, expected = [
            engine.find_keys(QUEUE, KEYS) for engine in (self.store.engine, self.model)
        ]
        assert found == expected

    @invariant()
    def depths_are_as_in_the_model(self) -> None:
        assert self.store.depths() == self.model.depths()[QUEUE]

    @invariant()
    def pending_jobs_are_in_order(self) -> None:
        for priority in PRIORITIES:
            found, expected = [
                list(
                    engine.read_pending(
                        QUEUE, priority, after=None, until_ms=END_OF_TIME_MS, limit=1_000
                    )
                )
                for engine in (self.store.engine, self.model)
            ]
            assert found == expected


def _plain(result: Any) -> Any:
    """Sequences of any kind as lists, so that they compare."""
    return list(map(_plain, result)) if isinstance(result, list | tuple) else result


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
