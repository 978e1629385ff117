"""Checkpoints: whose claim, what changes, and what does not."""

from __future__ import annotations

import pytest

from pinlaterd.engines.base import Checkpoint
from pinlaterd.model import Job, JobKey, JobState
from tests.conformance.engine.harness import EngineHarness


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


@pytest.mark.parametrize("size", [1, 1 << 20])
def test_a_body_may_grow_and_shrink(store: EngineHarness, size: int):
    [claimed] = store.in_progress(b"x" * (1 << 18))

    store.checkpoint(Checkpoint(claimed.key, None, new_body=b"y" * size))

    assert store.job(claimed.key).body == b"y" * size
