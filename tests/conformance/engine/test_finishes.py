"""Finishes: jobs end, or are to be tried again, claimed or not."""

from __future__ import annotations

import pytest

from pinlaterd.engines.base import Batch, Finish, FinishOp
from pinlaterd.model import FinishOutcome, Job, JobKey, JobState
from tests.conformance.engine.harness import EngineHarness, claim_op

PENDING, IN_PROGRESS, SUCCEEDED, FAILED = JobState
DONE, NO_SUCH_JOB, ENDED_BEFORE, OTHER_ATTEMPTS = FinishOutcome


@pytest.fixture(params=["pending", "scheduled", "in progress"])
def key(store: EngineHarness, request: pytest.FixtureRequest) -> JobKey:
    """A job with five attempts, between others."""
    wanted = Job(b"x", attempts_allowed=5)
    if request.param == "scheduled":
        wanted = wanted._replace(run_after_ms=store.now_ms + 60_000)
    _, key, _ = store.enqueue(b"a", wanted, b"b")
    if request.param == "in progress":
        store.claim()
    return key


@pytest.mark.parametrize("state", [SUCCEEDED, FAILED])
def test_a_job_ends_whoever_holds_it(store: EngineHarness, key: JobKey, state: JobState):
    before = store.depths()
    was = store.job(key).state
    store.clock.advance(1)

    finished = store.finish(Finish(key, state, 3, append_custom_status="over"))

    job = store.job(key)
    assert finished.outcomes == [DONE]
    assert finished.left_pending == ([key] if was is PENDING else [])
    assert (job.state, job.attempts_allowed, job.attempts_remaining) == (state, 5, 3)
    assert (job.custom_status, job.updated_at_ms, job.body) == ("over", store.now_ms, b"x")
    assert store.depths()[1, state] == 1
    assert store.depths().get((1, was), 0) == before[1, was] - 1
    assert store.finish(Finish(key, state, 3)).outcomes == [ENDED_BEFORE]
    assert store.engine.check(repair=False) == []


def test_a_job_is_tried_again_once_its_delay_is_over(store: EngineHarness, key: JobKey):
    was = store.job(key).state

    finished = store.finish(Finish(key, PENDING, 4, expected_attempts=5, retry_delay_ms=8000))

    job = store.job(key)
    assert (job.state, job.attempts_remaining, job.claim_descriptor) == (PENDING, 4, None)
    assert job.run_after_ms == store.now_ms + 8000
    [requeued] = finished.requeued
    assert (requeued.key.run_after_ms, requeued.key.local_id) == (job.run_after_ms, key.local_id)
    assert finished.left_pending == ([key] if was is PENDING else [])
    assert key not in store.ready()
    store.clock.advance(8)
    assert key in store.ready()
    assert store.engine.check(repair=False) == []


def test_of_equal_finishes_one_is_done(store: EngineHarness, key: JobKey):
    again = Finish(key, PENDING, 4, expected_attempts=5, retry_delay_ms=2000)
    ops = [FinishOp("mail", [again]) for _ in range(3)]

    finishes = store.engine.apply(Batch(finishes=ops), store.now_ms).finishes

    assert [finished.outcomes for finished in finishes] == [[DONE], *[[OTHER_ATTEMPTS]] * 2]
    assert store.job(key).attempts_remaining == 4


def test_attempts_that_are_not_as_expected_change_nothing(store: EngineHarness, key: JobKey):
    before = store.job(key)
    stale = Finish(key, FAILED, 0, expected_attempts=4)
    finished = store.finish(stale)
    unless_held = store.finish(stale._replace(compares_pending=False))

    assert finished.outcomes == [OTHER_ATTEMPTS]
    assert (finished.left_pending, finished.requeued) == ([], [])
    if before.state is IN_PROGRESS:
        assert unless_held.outcomes == [OTHER_ATTEMPTS]
        assert store.job(key) == before
    else:
        assert unless_held.outcomes == [DONE]


def test_jobs_that_are_not_there_are_told_apart(store: EngineHarness):
    [ended] = store.failed(b"x")
    [there] = store.enqueue(b"y")
    unknown = [JobKey(1, 2**63 - 1), JobKey(2, there.local_id), JobKey(1, 0)]

    keys = [*unknown, ended, there]
    finished = store.finish(*[Finish(key, SUCCEEDED, 1) for key in keys])

    assert finished.outcomes == [*[NO_SUCH_JOB] * 3, ENDED_BEFORE, DONE]
    assert store.states([ended, there]) == [FAILED, SUCCEEDED]


def test_a_job_that_is_claimed_in_the_same_batch_is_finished_afterwards(store: EngineHarness):
    [key] = store.enqueue(b"x")
    batch = Batch(
        claims=[claim_op("mail", store.wanted())],
        finishes=[FinishOp("mail", [Finish(key, PENDING, 1, retry_delay_ms=2000)])],
    )

    result = store.engine.apply(batch, store.now_ms)

    assert [payload.body for payload in result.claims[0] if payload] == [b"x"]
    assert result.finishes[0].outcomes == [DONE]
    assert result.finishes[0].left_pending == []
    assert (store.job(key).state, store.ready()) == (PENDING, [])


def test_many_go_together_in_any_order(store: EngineHarness):
    keys = store.enqueue(*[b"x"] * 20)
    store.claim(limit=10)

    finished = store.finish(*[Finish(key, SUCCEEDED, 2) for key in keys[5:15][::-1]])

    assert finished.outcomes == [DONE] * 10
    assert set(finished.left_pending) == set(keys[10:15])
    assert store.depths() == {(1, PENDING): 5, (1, IN_PROGRESS): 5, (1, SUCCEEDED): 10}
    assert store.reopen()
    assert store.states(keys[5:15]) == [SUCCEEDED] * 10
