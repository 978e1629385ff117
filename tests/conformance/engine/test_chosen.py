"""Retries and deletes of jobs that were found, or named, before."""

from __future__ import annotations

import pytest

from pinlaterd.engines.base import LATEST_MS, NO_BOUND
from pinlaterd.model import Job, JobKey, JobOptions, JobState, PendingKey
from tests.clocks import FakeClock
from tests.conformance.engine.harness import QUEUE, EngineHarness

FAILED, PENDING = JobState.FAILED, JobState.PENDING


def _retry(store: EngineHarness, run_afters: dict[JobKey, int], **options: int):
    options = {"attempts": 3, "ended_before_ms": LATEST_MS, **options}
    return store.engine.retry_found(QUEUE, run_afters, now_ms=store.now_ms, **options)


def test_each_job_is_retried_from_its_own_time_on(store: EngineHarness):
    keys = store.failed(*[Job(b"%d" % n, attempts_allowed=1) for n in range(5)])
    later_ms = store.now_ms + 5_000
    run_afters = {keys[3]: store.now_ms, keys[0]: later_ms, keys[1]: later_ms}

    retried = _retry(store, run_afters)

    assert sorted(retried) == sorted(
        (1, (at_ms, key.local_id)) for key, at_ms in run_afters.items()
    )
    assert store.states(keys) == [PENDING, PENDING, FAILED, PENDING, FAILED]
    assert store.depths() == {(1, PENDING): 3, (1, FAILED): 2}
    job = store.job(keys[1])
    assert (job.attempts_allowed, job.attempts_remaining, job.run_after_ms) == (3, 3, later_ms)
    assert job.claim_descriptor is None
    assert store.ready() == [keys[3]]
    assert [claimed.body for claimed in store.claim()] == [b"3"]
    store.reopen()
    assert store.engine.read_pending(QUEUE, 1, after=None, until_ms=later_ms, limit=9) == [
        PendingKey(later_ms, key.local_id) for key in keys[:2]
    ]


@pytest.mark.parametrize("change", ["retry", "delete"])
def test_later_failures_stay(store: EngineHarness, clock: FakeClock, change: str):
    [first, *_] = keys = store.failed(*[Job(b"", attempts_allowed=1)] * 2)
    clock.advance(1)
    cut_off_ms = store.now_ms
    _retry(store, {first: store.now_ms}, attempts=1)
    store.claim()
    clock.advance(2)
    store.fail(first)

    if change == "retry":
        _retry(store, dict.fromkeys(keys, store.now_ms), ended_before_ms=cut_off_ms)
    else:
        deleted = store.engine.delete_found(QUEUE, FAILED, keys, ended_before_ms=cut_off_ms)
        assert deleted == keys[1:]

    assert store.states(keys) == [FAILED, PENDING if change == "retry" else None]


def test_jobs_in_other_states_places_and_queues_are_left_alone(store: EngineHarness):
    [failed] = store.failed(Job(b"", attempts_allowed=1))
    [running] = store.in_progress(b"")
    pending = store.enqueue(Job(b"", priority=2))
    elsewhere = JobKey(2, failed.local_id)
    missing = JobKey(1, failed.local_id + 10**6)
    named = [failed, running.key, *pending, elsewhere, missing]
    store.engine.create_queue("other", store.now_ms)

    assert not store.engine.retry_found(
        "other", dict.fromkeys(named, 0), attempts=1, ended_before_ms=NO_BOUND, now_ms=store.now_ms
    )
    assert [job.key.local_id for job in _retry(store, dict.fromkeys(named, 0))] == [failed.local_id]
    assert store.states([running.key, *pending]) == [JobState.IN_PROGRESS, PENDING]
    assert not _retry(store, {})


def test_pending_jobs_are_deleted_whatever_their_time(store: EngineHarness):
    keys = store.enqueue(b"a", b"b")

    assert store.engine.delete_found(QUEUE, PENDING, keys[:1], ended_before_ms=1) == keys[:1]


def test_a_job_that_expires_is_looked_at_again(store: EngineHarness, clock: FakeClock):
    [key] = store.enqueue_keyed(
        Job(b"", options=JobOptions("k", expires_at_ms=store.now_ms + 1_000))
    )
    clock.advance(2)
    store.engine.expire_jobs(QUEUE, limit=9, now_ms=store.now_ms)
    assert store.states([key]) == [FAILED]

    _retry(store, {key: store.now_ms})

    assert store.job(key).end_reason is None
    assert store.engine.expire_jobs(QUEUE, limit=9, now_ms=store.now_ms).failed == [key]
