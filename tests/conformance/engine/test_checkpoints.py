"""Checkpoints: whose claim, what changes, and what does not."""

from __future__ import annotations

import pytest

from pinlaterd.clock import FakeClock
from pinlaterd.engines.base import Checkpoint
from pinlaterd.model import Job, JobKey, JobState, PendingKey
from tests.conformance.engine.harness import EngineHarness


def test_a_bare_checkpoint_renews_the_claim(store: EngineHarness, clock: FakeClock):
    [claimed] = store.in_progress(Job(b"a", attempts_allowed=3, custom_status="s"))
    clock.advance(60)

    result = store.checkpoint(Checkpoint(claimed.key, None))

    assert result == (1, 0, [])
    job = store.job(claimed.key)
    assert job.state is JobState.IN_PROGRESS
    assert job.claim_descriptor == claimed.claim_descriptor
    assert job.run_after_ms == job.updated_at_ms == store.now_ms
    assert (job.body, job.custom_status) == (b"a", "s")
    assert (job.attempts_allowed, job.attempts_remaining) == (3, 3)
    expired = store.engine.release_expired(
        "mail", claimed_before_ms=store.now_ms, limit=10, now_ms=store.now_ms
    )
    assert expired == ([], 0)


def test_a_checkpoint_changes_what_it_is_given(store: EngineHarness):
    [claimed] = store.in_progress(Job(b"a", custom_status="old"))

    store.checkpoint(
        Checkpoint(
            claimed.key,
            run_after_ms=store.now_ms + 777,
            new_body=b"\0new\xff",
            attempts=9,
            prepend_custom_status="neu\0;",
        )
    )

    job = store.job(claimed.key)
    assert job.state is JobState.IN_PROGRESS
    assert job.run_after_ms == store.now_ms + 777
    assert job.body == b"\0new\xff"
    assert (job.attempts_allowed, job.attempts_remaining) == (9, 9)
    assert job.custom_status == "neu\0;old"


def test_a_body_may_become_empty(store: EngineHarness):
    [claimed] = store.in_progress(b"a")

    store.checkpoint(Checkpoint(claimed.key, None, new_body=b""))

    assert store.job(claimed.key).body == b""


def test_a_checkpoint_can_send_the_job_back(store: EngineHarness, clock: FakeClock):
    [claimed] = store.in_progress(Job(b"a", attempts_allowed=3))
    clock.advance(3)
    later_ms = store.now_ms + 10_000

    result = store.checkpoint(
        Checkpoint(claimed.key, later_ms, new_body=b"b", move_to_pending=True)
    )

    assert result == (1, 0, [(1, PendingKey(later_ms, claimed.key.local_id))])
    job = store.job(claimed.key)
    assert job.state is JobState.PENDING
    assert job.claim_descriptor is None
    assert (job.attempts_allowed, job.attempts_remaining) == (3, 3)
    assert (job.run_after_ms, job.updated_at_ms) == (later_ms, store.now_ms)
    assert store.depths() == {(1, JobState.PENDING): 1}
    clock.advance(10)
    assert [again.body for again in store.claim()] == [b"b"]


def test_a_checkpoint_needs_the_very_source(store: EngineHarness):
    [claimed] = store.in_progress(b"a", source="web2:host")

    for other in ("web", "web2", "web2:hos", "2:host", "", "%"):
        assert store.checkpoint(Checkpoint(claimed.key, None), source=other).noop == 1
    assert store.checkpoint(Checkpoint(claimed.key, None), source="web2:host").done == 1


def test_a_given_claim_counts_instead_of_the_source(store: EngineHarness):
    [first] = store.in_progress(Job(b"a", attempts_allowed=5), source="web")
    store.fail(first.key)
    [second] = store.claim(source="web")

    stale = Checkpoint(first.key, None, claim_descriptor=first.claim_descriptor)
    valid = Checkpoint(first.key, None, claim_descriptor=second.claim_descriptor)

    assert store.checkpoint(stale, source="web") == (0, 1, [])
    assert store.checkpoint(valid, source="someone else") == (1, 0, [])


def test_a_checkpoint_of_a_job_that_is_not_in_progress_is_a_noop(store: EngineHarness):
    [done] = store.in_progress(b"a")
    store.succeed(done.key)
    [pending] = store.enqueue(b"b")
    keys = [done.key, pending, JobKey(1, 1 << 40), JobKey(1, 2**63), pending._replace(priority=3)]
    before = [store.job(key) for key in keys[:2]]

    result = store.checkpoint(*[Checkpoint(key, None, new_body=b"x") for key in keys])

    assert result == (0, 5, [])
    assert [store.job(key) for key in keys[:2]] == before


def test_checkpoints_of_one_job_follow_one_another(store: EngineHarness):
    [claimed] = store.in_progress(b"a")

    result = store.checkpoint(
        Checkpoint(claimed.key, None, prepend_custom_status="1;"),
        Checkpoint(claimed.key, None, new_body=b"b", prepend_custom_status="2;"),
        Checkpoint(claimed.key, store.now_ms + 5, move_to_pending=True),
        Checkpoint(claimed.key, None, new_body=b"too late"),
    )

    assert (result.done, result.noop, len(result.requeued)) == (3, 1, 1)
    job = store.job(claimed.key)
    assert (job.state, job.body, job.custom_status) == (JobState.PENDING, b"b", "2;1;")
    assert job.run_after_ms == store.now_ms + 5


def test_a_prepended_status_is_cut_at_the_end(store: EngineHarness):
    limit = store.engine.limits.custom_status_chars
    [claimed] = store.in_progress(Job(b"a", custom_status="old" * (limit // 3)))

    store.checkpoint(Checkpoint(claimed.key, None, prepend_custom_status="ñ" * (limit - 1)))

    assert store.job(claimed.key).custom_status == "ñ" * (limit - 1) + "o"


@pytest.mark.parametrize("size", [1, 1 << 20])
def test_a_body_may_grow_and_shrink(store: EngineHarness, size: int):
    [claimed] = store.in_progress(b"x" * (1 << 18))

    store.checkpoint(Checkpoint(claimed.key, None, new_body=b"y" * size))

    assert store.job(claimed.key).body == b"y" * size
