"""retryFailedJobs and deleteJobs, as the engine sees them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pinlaterd.clock import FakeClock
from pinlaterd.engines.base import Requeued
from pinlaterd.model import Job, JobKey, JobState, PendingKey
from tests.conformance.engine.harness import EngineHarness


def _retry(
    store: EngineHarness, *, priority: int = 1, attempts: int = 1, limit: int = 100
) -> Sequence[Requeued]:
    return store.engine.retry_failed(
        "mail",
        priority,
        attempts=attempts,
        run_after_ms=store.now_ms + 50,
        limit=limit,
        now_ms=store.now_ms,
    )


def test_a_failed_job_is_pending_again(store: EngineHarness, clock: FakeClock):
    [key] = store.failed(Job(b"a", attempts_allowed=3, custom_status="s"))
    clock.advance(9)

    requeued = _retry(store, attempts=2)

    assert requeued == [(1, PendingKey(store.now_ms + 50, key.local_id))]
    job = store.job(key)
    assert job.state is JobState.PENDING
    assert (job.attempts_allowed, job.attempts_remaining) == (3, 2)
    assert job.run_after_ms == store.now_ms + 50
    assert job.updated_at_ms == store.now_ms
    assert job.claim_descriptor is None
    assert (job.body, job.custom_status) == (b"a", "s")
    assert store.depths() == {(1, JobState.PENDING): 1}
    clock.advance(0.05)
    assert [claimed.body for claimed in store.claim()] == [b"a"]


def test_attempts_allowed_are_raised_to_match(store: EngineHarness):
    [key] = store.failed(Job(b"a", attempts_allowed=1))

    _retry(store, attempts=4)

    assert store.job(key)[2:4] == (4, 4)


def test_the_longest_failed_go_first(store: EngineHarness, clock: FakeClock):
    first, second, third = (
        claimed.key for claimed in store.in_progress(*[Job(b"x", attempts_allowed=1)] * 3)
    )
    store.fail(third)
    clock.advance(1)
    store.fail(second, first)

    assert store.engine.oldest_failed("mail", 1, limit=2) == [store.now_ms - 1000, store.now_ms]
    assert [job.key.local_id for job in _retry(store, limit=2)] == [
        third.local_id,
        first.local_id,
    ]
    assert store.states([first, second, third]) == [
        JobState.PENDING,
        JobState.FAILED,
        JobState.PENDING,
    ]
    assert len(_retry(store)) == 1
    assert list(_retry(store)) == []
    assert list(store.engine.oldest_failed("mail", 1, limit=2)) == []


def test_only_failed_jobs_of_that_priority_are_retried(store: EngineHarness):
    [low] = store.failed(Job(b"a", priority=2))
    [done] = store.in_progress(b"b")
    store.succeed(done.key)

    assert list(_retry(store, priority=1)) == []
    assert list(store.engine.oldest_failed("mail", 1, limit=9)) == []
    assert store.states([low, done.key]) == [JobState.FAILED, JobState.SUCCEEDED]


# --- delete ---------------------------------------------------------------------------------


def _one_of_each(store: EngineHarness, priority: int = 1) -> dict[JobState, JobKey]:
    job = Job(b"x", priority=priority, attempts_allowed=1)
    keys = [claimed.key for claimed in store.in_progress(job, job, job)]
    store.succeed(keys[1])
    store.fail(keys[2])
    [pending] = store.enqueue(job)
    return {
        JobState.PENDING: pending,
        JobState.IN_PROGRESS: keys[0],
        JobState.SUCCEEDED: keys[1],
        JobState.FAILED: keys[2],
    }


@pytest.mark.parametrize("state", list(JobState))
def test_jobs_of_one_state_and_priority_are_deleted(store: EngineHarness, state: JobState):
    jobs = _one_of_each(store)
    others = _one_of_each(store, priority=2)

    deleted = store.engine.delete_jobs("mail", state, 1, limit=10)

    assert list(deleted) == [jobs[state]]
    assert store.states(jobs.values()) == [None if each is state else each for each in jobs]
    assert store.states(others.values()) == list(others)
    assert (1, state) not in store.depths()
    assert sum(store.depths().values()) == 7


@pytest.mark.parametrize("state", list(JobState))
def test_a_deleted_job_is_gone_for_everything(store: EngineHarness, state: JobState):
    key = _one_of_each(store)[state]
    store.engine.delete_jobs("mail", state, 1, limit=10)

    assert store.succeed(key).noop == 1
    assert store.fail(key).noop == 1
    assert key not in store.ready()
    assert list(store.engine.payloads("mail", 1, [key.local_id], most_bytes=1000)) == [None]


def test_deletes_stop_at_their_limit(store: EngineHarness):
    keys = store.enqueue(*[b"x"] * 5)

    assert len(store.engine.delete_jobs("mail", JobState.PENDING, 1, limit=3)) == 3
    assert len(store.engine.delete_jobs("mail", JobState.PENDING, 1, limit=3)) == 2
    assert list(store.engine.delete_jobs("mail", JobState.PENDING, 1, limit=3)) == []
    assert store.states(keys) == [None] * 5


@pytest.mark.parametrize("state", list(JobState))
def test_keys_are_deleted_only_while_in_that_state(store: EngineHarness, state: JobState):
    jobs = _one_of_each(store)
    wrong = [
        jobs[state]._replace(priority=2),
        JobKey(1, 1 << 40),
        JobKey(1, 9_999_999_999_999_999_999),
    ]

    deleted = store.engine.delete_keys("mail", state, [*wrong, *jobs.values(), jobs[state]])

    assert list(deleted) == [jobs[state]]
    assert store.states(jobs.values()) == [None if each is state else each for each in jobs]
