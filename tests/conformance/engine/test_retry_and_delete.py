"""retryFailedJobs and deleteJobs, as the engine sees them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pinlaterd.clock import FakeClock
from pinlaterd.engines.base import Requeued
from pinlaterd.model import Job, JobKey, JobState
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
