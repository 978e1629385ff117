"""Claims that time out, and garbage."""

from __future__ import annotations

import pytest

from pinlaterd.engines.base import Batch
from pinlaterd.model import Job, JobState, PendingKey
from tests.clocks import FakeClock
from tests.conformance.engine.harness import EngineHarness, claim_op


def _expire(store: EngineHarness, *, older_than_seconds: float, limit: int = 100):
    return store.engine.release_expired(
        "mail",
        claimed_before_ms=store.now_ms - round(older_than_seconds * 1000),
        limit=limit,
        now_ms=store.now_ms,
    )


def test_claims_that_bear_times_still_to_come(store: EngineHarness, clock: FakeClock):
    """As after a clock that was ahead was set back."""
    keys = store.enqueue(*[Job(b"", attempts_allowed=2)] * 3)
    latest_ms = store.engine.limits.run_after_ms
    for key, at_ms in zip(keys, (store.now_ms, store.now_ms + 3_600_000, latest_ms), strict=True):
        claims = [store.claim_on(key)]
        store.engine.apply(Batch(claims=[claim_op("mail", claims)]), at_ms)

    expired = store.engine.release_expired(
        "mail",
        claimed_before_ms=latest_ms,
        claimed_after_ms=store.now_ms + 600_000,
        limit=100,
        now_ms=store.now_ms,
    )

    assert expired == ([(1, PendingKey(store.now_ms, keys[1].local_id))], 0)
    running = JobState.IN_PROGRESS
    assert store.states(keys) == [running, JobState.PENDING, running]


def test_the_pause_after_a_time_out_doubles(store: EngineHarness, clock: FakeClock):
    """Where jobs had four attempts at first: each pause counts from those that are left."""
    keys = store.enqueue(*[Job(b"", attempts_allowed=left) for left in (4, 2, 1, 9)])
    for key in keys:
        store.engine.apply(Batch(claims=[claim_op("mail", [store.claim_on(key)])]), store.now_ms)
    clock.advance(601)

    expired = store.engine.release_expired(
        "mail",
        claimed_before_ms=store.now_ms - 600_000,
        limit=100,
        now_ms=store.now_ms,
        backoff_attempts=4,
    )

    pauses = [(at.local_id, at.run_after_ms - store.now_ms) for _, at in sorted(expired.retried)]
    first, second, _, other = (key.local_id for key in keys)
    assert sorted(pauses) == [(first, 2000), (second, 8000), (other, 1000)]
    assert expired.failed == 1
    [record] = store.engine.lookup("mail", [keys[1]], include_body=False)
    assert record.run_after_ms == store.now_ms + 8000


def test_a_claim_of_exactly_that_age_holds(store: EngineHarness, clock: FakeClock):
    [claimed] = store.in_progress(b"a")
    clock.advance(600)

    assert _expire(store, older_than_seconds=600) == ([], 0)
    assert store.states([claimed.key]) == [JobState.IN_PROGRESS]


def test_time_outs_come_in_slices(store: EngineHarness, clock: FakeClock):
    keys = store.enqueue(*[Job(b"x", priority=1 + i % 3) for i in range(9)])
    for priority in (1, 2, 3):
        store.claim(priority=priority)
    clock.advance(601)

    sizes = [len(_expire(store, older_than_seconds=600, limit=4).retried) for _ in range(4)]

    assert sizes == [4, 4, 1, 0]
    assert store.states(keys) == [JobState.PENDING] * 9


def test_upkeep_of_one_queue_leaves_the_others_alone(store: EngineHarness, clock: FakeClock):
    store.engine.create_queue("other", store.now_ms)
    [key] = store.enqueue(b"a", queue="other")
    store.claim(queue="other")
    clock.advance(601)

    assert _expire(store, older_than_seconds=600) == ([], 0)
    assert store.states([key], queue="other") == [JobState.IN_PROGRESS]


@pytest.mark.parametrize("state", [JobState.SUCCEEDED, JobState.FAILED])
def test_old_garbage_is_deleted_by_the_time_of_its_end(
    store: EngineHarness, clock: FakeClock, state: JobState
):
    old, young = store.in_progress(Job(b"a", attempts_allowed=1), Job(b"b", attempts_allowed=1))
    finish = store.succeed if state is JobState.SUCCEEDED else store.fail
    clock.advance(100)
    finish(old.key)
    clock.advance(100)
    finish(young.key)

    deleted = store.engine.collect_garbage("mail", state, updated_before_ms=store.now_ms, limit=10)

    assert deleted == 1
    assert store.states([old.key, young.key]) == [None, state]
    assert store.depths() == {(1, state): 1}


def test_garbage_goes_in_slices_over_all_priorities(store: EngineHarness, clock: FakeClock):
    store.enqueue(*[Job(b"x", priority=1 + i % 3) for i in range(9)])
    for priority in (1, 2, 3):
        store.succeed(*[claimed.key for claimed in store.claim(priority=priority)])
    clock.advance(1)

    sizes = [
        store.engine.collect_garbage(
            "mail", JobState.SUCCEEDED, updated_before_ms=store.now_ms, limit=4
        )
        for _ in range(4)
    ]

    assert sizes == [4, 4, 1, 0]
    assert store.depths() == {}
