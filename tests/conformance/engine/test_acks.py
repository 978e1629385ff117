"""Acknowledgements: success, failure, retries, repeats, given claims, status texts."""

from __future__ import annotations

import pytest

from pinlaterd.engines.base import Batch
from pinlaterd.model import Job, JobKey, JobState
from tests.conformance.engine.harness import Ack, EngineHarness, ack_op


@pytest.mark.parametrize("local_id", [2**53, 2**53 + 1, 2**53 + 2, 2**63 - 1, 2**63])
def test_acks_of_ids_that_no_job_has_are_no_ops(store: EngineHarness, local_id: int):
    held = [claimed.key for claimed in store.in_progress(b"x", b"y")]
    strangers = [JobKey(1, local_id), JobKey(1, local_id + 1)]

    assert store.succeed(held[0], *strangers)[:3] == (1, 0, 2)
    assert store.fail(held[1], *strangers)[:3] == (0, 1, 2)


def test_a_retry_delay_beyond_all_times_ends_at_the_limit(store: EngineHarness):
    [claimed] = store.in_progress(b"a")

    store.fail(Ack(claimed.key, retry_delay_ms=2**63 - 1))

    assert store.job(claimed.key).run_after_ms == store.engine.limits.run_after_ms


def test_those_that_apply_are_carried_out_beside_those_that_do_not(store: EngineHarness):
    running = [claimed.key for claimed in store.in_progress(*[b"x"] * 6)]
    store.succeed(running[0])

    result = store.engine.apply(
        Batch(
            acks=[
                ack_op("mail", [Ack(key) for key in running[:2]], [Ack(running[2])]),
                ack_op("mail", [Ack(running[3])], [Ack(JobKey(1, 1 << 40)), Ack(running[4])]),
            ]
        ),
        store.now_ms,
    ).acks

    assert [(ack.succeeded, ack.failed, ack.noop) for ack in result] == [(1, 1, 1), (1, 1, 1)]
    assert [[job.key.local_id for job in ack.requeued] for ack in result] == [
        [running[2].local_id],
        [running[4].local_id],
    ]
    assert store.depths() == {
        (1, JobState.SUCCEEDED): 3,
        (1, JobState.PENDING): 2,
        (1, JobState.IN_PROGRESS): 1,
    }


def test_ops_that_name_the_same_jobs_end_as_if_one_came_after_the_other(store: EngineHarness):
    a, b = (claimed.key for claimed in store.in_progress(b"a", b"b"))

    results = store.engine.apply(
        Batch(acks=[ack_op("mail", [Ack(a)], [Ack(b)]), ack_op("mail", [Ack(b)], [Ack(a)])]),
        store.now_ms,
    ).acks

    outcome = [(ack.succeeded, ack.failed, ack.noop) for ack in results]
    assert outcome in ([(1, 1, 0), (0, 0, 2)], [(0, 0, 2), (1, 1, 0)])
    assert set(store.states([a, b])) == {JobState.PENDING, JobState.SUCCEEDED}


def test_acks_with_and_without_claims_go_together(store: EngineHarness):
    first, second, third, fourth = store.in_progress(b"1", b"2", b"3", b"4")

    result = store.succeed(
        Ack(first.key),
        Ack(second.key, claim_descriptor=second.claim_descriptor),
        Ack(third.key, "not mine", claim_descriptor=second.claim_descriptor),
        Ack(fourth.key, "done"),
    )

    assert (result.succeeded, result.noop) == (3, 1)
    assert store.states([third.key]) == [JobState.IN_PROGRESS]
    assert store.job(third.key).custom_status == ""
    assert store.job(fourth.key).custom_status == "done"


def test_acks_of_many_queues_and_priorities_in_one_batch(store: EngineHarness):
    store.engine.create_queue("other", store.now_ms)
    high, low = store.enqueue(Job(b"1"), Job(b"2", priority=2))
    [others] = store.enqueue(Job(b"3"), queue="other")
    store.claim()
    store.claim(priority=2)
    store.claim(queue="other")

    results = store.engine.apply(
        Batch(
            acks=[
                ack_op("other", [Ack(others)], ()),
                ack_op("mail", [Ack(low)], [Ack(high)]),
                ack_op("mail", (), ()),
            ]
        ),
        store.now_ms,
    ).acks

    assert [(ack.succeeded, ack.failed, ack.noop) for ack in results] == [
        (1, 0, 0),
        (1, 1, 0),
        (0, 0, 0),
    ]
    assert store.depths("other") == {(1, JobState.SUCCEEDED): 1}
    assert store.depths() == {(2, JobState.SUCCEEDED): 1, (1, JobState.PENDING): 1}


def test_a_batch_larger_than_any_statement(store: EngineHarness):
    claimed = store.in_progress(*[b"x"] * 2_500)
    keys = [one.key for one in store.claim()] + [one.key for one in claimed]
    while more := store.claim():
        keys += [one.key for one in more]

    result = store.succeed(*keys)

    assert result.succeeded == 2_500
    assert store.depths() == {(1, JobState.SUCCEEDED): 2_500}
