"""Jobs with an expiry: from then on they are not handed out any more."""

from __future__ import annotations

import pytest

from pinlaterd.engines.base import CHECK_AGAIN_MS, Batch, ExpiredJobs, Search
from pinlaterd.model import EXPIRED, Job, JobKey, JobOptions, JobState
from tests.clocks import FakeClock
from tests.conformance.engine.harness import QUEUE, EngineHarness, claim_op


def _expiring(at_ms: int, body: bytes = b"x", key: str | None = None, **fields) -> Job:
    return Job(body, options=JobOptions(key, at_ms), **fields)


def _expire(store: EngineHarness, limit: int = 100) -> ExpiredJobs:
    return store.engine.expire_jobs(QUEUE, limit=limit, now_ms=store.now_ms)


def _assert_expired(store: EngineHarness, key: JobKey, status: str = "") -> None:
    job = store.job(key)
    assert (job.state, job.end_reason) == (JobState.FAILED, EXPIRED)
    assert job.custom_status == f"{status} expired".lstrip()
    assert job.claim_descriptor is None
    assert job.updated_at_ms == store.now_ms


def test_an_expiry_is_kept_with_the_job(store: EngineHarness, clock: FakeClock):
    later_ms = store.now_ms + 60_000
    jobs = [_expiring(later_ms), _expiring(later_ms, key="k"), Job(b"y", options=JobOptions("l"))]

    keys = store.enqueue_keyed(*jobs)
    store.reopen()

    assert [store.job(key).options for key in keys] == [job.options for job in jobs]
    assert list(store.engine.expiring) == [QUEUE]
    assert len(store.claim()) == 3
    searcher = store.engine.searcher()()
    found = searcher.scan(Search(QUEUE, JobState.IN_PROGRESS))
    assert {job.options for job in found} == {job.options for job in jobs}
    searcher.close()


def test_times_in_microseconds_are_kept_with_the_job(store: EngineHarness):
    later_us = 1000 * store.now_ms + 60_000_123
    exact = [
        JobOptions("k", later_us // 1000, run_after_us=later_us, expires_at_us=later_us + 1),
        JobOptions("l", key_of_all_queues=True, run_after_us=later_us),
        JobOptions(run_after_us=0, expires_at_us=later_us),
        JobOptions(None, later_us // 1000, expires_at_us=later_us),
        JobOptions("m"),
    ]

    keys = store.enqueue_keyed(*[Job(b"x", options=options) for options in exact])
    store.reopen()

    assert [store.job(key).options for key in keys] == exact
    store.succeed(*[one.key for one in store.claim()])
    assert [store.job(key).options for key in keys] == exact
    searcher = store.engine.searcher()()
    found = searcher.scan(Search(QUEUE, JobState.SUCCEEDED))
    assert {job.options for job in found} == {*exact}
    searcher.close()


def test_jobs_without_a_key_are_stored_each_time(store: EngineHarness):
    later_ms = store.now_ms + 60_000

    first, again = store.enqueue_keyed(_expiring(later_ms), _expiring(later_ms))

    assert first != again
    assert store.depths() == {(1, JobState.PENDING): 2}


def test_a_claim_finds_what_has_expired(store: EngineHarness, clock: FakeClock):
    soon, later = store.now_ms + 1_000, store.now_ms + 60_000
    jobs = [_expiring(soon, custom_status="sent"), _expiring(later), Job(b"z")]
    gone, *stay = [*store.enqueue_keyed(*jobs[:2]), *store.enqueue(jobs[2])]
    claims = store.wanted()

    clock.advance(1)
    result = store.engine.apply(Batch(claims=[claim_op(QUEUE, claims)]), store.now_ms)

    handed_out = zip(claims, result.claims[0], strict=True)
    assert [claim.key for claim, payload in handed_out if payload] == stay
    assert result.expired == [1]
    _assert_expired(store, gone, "sent")
    assert store.depths() == {(1, JobState.FAILED): 1, (1, JobState.IN_PROGRESS): 2}


def test_maintenance_finds_what_has_expired(store: EngineHarness, clock: FakeClock):
    jobs = [_expiring(store.now_ms + at_ms, priority=1 + at_ms % 2) for at_ms in range(1, 7)]
    keys = store.enqueue_keyed(*jobs)
    [later] = store.enqueue_keyed(_expiring(store.now_ms + 60_000))

    assert _expire(store) == ExpiredJobs([], 0)
    clock.advance(1)
    slices = [_expire(store, limit=4) for _ in range(3)]

    assert [part.looked_at for part in slices] == [4, 2, 0]
    assert {key for part in slices for key in part.failed} == set(keys)
    for key in keys:
        _assert_expired(store, key)
    assert [claimed.key for claimed in store.claim()] == [later]


def test_a_job_in_progress_ends_as_its_worker_says(store: EngineHarness, clock: FakeClock):
    soon = store.now_ms + 1_000
    done, failed = store.enqueue_keyed(_expiring(soon), _expiring(soon))
    store.claim()
    clock.advance(1)

    assert _expire(store) == ExpiredJobs([], 2)
    store.succeed(done)
    store.fail(failed)

    assert store.states([done, failed]) == [JobState.SUCCEEDED, JobState.PENDING]
    assert store.job(done).end_reason is None
    clock.advance(CHECK_AGAIN_MS / 1000)
    assert _expire(store) == ExpiredJobs([failed], 2)
    _assert_expired(store, failed)
    assert _expire(store).looked_at == 0


def test_a_retry_by_hand_meets_the_expiry_again(store: EngineHarness, clock: FakeClock):
    [key] = store.enqueue_keyed(_expiring(store.now_ms + 1_000))
    clock.advance(1)
    _expire(store)
    store.reopen()

    [retried] = store.engine.retry_failed(
        QUEUE, 1, attempts=1, run_after_ms=store.now_ms, limit=9, now_ms=store.now_ms
    )

    assert retried.key.local_id == key.local_id
    assert store.job(key).end_reason is None
    assert _expire(store).failed == [key]


def test_an_expiry_goes_with_its_job(store: EngineHarness, clock: FakeClock):
    store.enqueue_keyed(_expiring(store.now_ms + 1_000, key="k"))
    store.engine.delete_jobs(QUEUE, JobState.PENDING, 1, limit=1)
    clock.advance(1)

    assert _expire(store).failed == []
    assert store.engine.find_keys(QUEUE, ["k"]) == {}


@pytest.mark.parametrize("status", ["", "x" * 10_000, "ä"])
def test_a_custom_status_ends_in_expired(store: EngineHarness, clock: FakeClock, status: str):
    most = store.engine.limits.custom_status_chars
    [key] = store.enqueue_keyed(_expiring(store.now_ms, custom_status=status[:most]))

    _expire(store)

    assert store.job(key).custom_status.endswith(EXPIRED)
    assert len(store.job(key).custom_status) <= most


def test_plain_queues_have_no_expiry(store: EngineHarness):
    store.enqueue_keyed(Job(b"x", options=JobOptions("k")))
    store.enqueue(b"plain")

    assert list(store.engine.expiring) == []
    assert not store.engine.apply(Batch(claims=[claim_op(QUEUE, store.wanted())]), 0).expired
