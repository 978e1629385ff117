"""SPEC section 4: what each shard does to its own jobs.

Nothing here waits for a time to pass: conditions are waited for, on queues of short times. Two
processes on one store: test_api_shard_down.py.
"""

from __future__ import annotations

import time

import pytest

from tests.conformance.api import (
    FAILED,
    IN_PROGRESS,
    MONITOR_BATCH_SIZE,
    PENDING,
    SUCCEEDED,
    Client,
    Deployment,
)
from tests.conftest import WaitUntil

pytestmark = pytest.mark.service

HELD_UP_SECONDS = 0.5  # half of what claims of "claims_renewed" have


def test_claim_times_out(service: Deployment, client: Client, wait_until: WaitUntil):
    queue = "claims_retried"
    client.create(queue)
    by_shard = client.enqueue_on_every_shard(
        queue, lambda _: client.job(b"", numAttemptsAllowed=3, runAfterTimestampMillis=1)
    )
    jobs = sum(map(len, by_shard.values()))
    before = int(time.time() * 1000)
    assert len(client.dequeue(queue, 1000)) == jobs

    wait_until(lambda: client.count(queue, PENDING) == jobs)

    for on_shard in by_shard.values():
        for info in client.lookup(*on_shard).values():
            assert (info.attemptsAllowed, info.attemptsRemaining) == (3, 2)
            assert info.claimDescriptor is None
            assert before + 300 <= info.runAfterTimestampMillis <= int(time.time() * 1000) + 1
    assert {job.remaining for job in client.dequeue(queue, 1000).values()} == {2}
    wait_until(lambda: service.counter(f"{queue}_timeout_retry") >= jobs)


def test_claim_times_out_at_the_last_attempt(
    service: Deployment, client: Client, wait_until: WaitUntil
):
    queue = "claims_failed"
    client.create(queue)
    (descriptor,) = client.enqueue(queue, client.job(b"", numAttemptsAllowed=1))
    (claimed,) = client.dequeue(queue).values()

    wait_until(lambda: client.info(descriptor).jobState == FAILED)

    info = client.info(descriptor)
    assert (info.attemptsAllowed, info.attemptsRemaining) == (1, 0)
    assert info.claimDescriptor == claimed.claim
    assert client.dequeue(queue) == {}
    wait_until(lambda: service.counter(f"{queue}_timeout_done") == 1)
    assert service.counter(f"{queue}_timeout_retry") == 0


def test_more_than_a_batch(service: Deployment, client: Client, wait_until: WaitUntil):
    queue = "claims_batched"
    jobs = 2 * MONITOR_BATCH_SIZE + 1
    client.create(queue)
    client.enqueue(queue, *[client.job(b"", numAttemptsAllowed=1)] * jobs)
    assert len(client.dequeue(queue, jobs)) == jobs

    wait_until(lambda: client.count(queue, FAILED) == jobs)

    wait_until(lambda: service.counter(f"{queue}_timeout_done") == jobs)


def test_checkpoint_renews_a_claim(client: Client, wait_until: WaitUntil):
    queue = "claims_renewed"
    client.create(queue)

    def outlives_one_that_is_forgotten() -> bool:
        """False if we were held up, so that its claim had timed out before it could be renewed."""
        renewed, forgotten = client.enqueue(queue, b"renewed", b"forgotten")
        claim = client.dequeue(queue, 100)[renewed].claim
        longest, before = 0.0, time.monotonic()
        while client.info(forgotten).jobState != PENDING:
            client.checkpoint(queue, client.checkpoint_of(renewed))
            now = time.monotonic()
            longest, before = max(longest, now - before), now
        info = client.info(renewed)
        held = (info.jobState, info.claimDescriptor) == (IN_PROGRESS, claim)
        assert held or longest > HELD_UP_SECONDS
        wait_until(lambda: client.info(renewed).jobState == PENDING)
        return held

    wait_until(outlives_one_that_is_forgotten)


@pytest.mark.parametrize(
    ("queue", "outcome", "state", "counter"),
    [
        ("success_forgotten", "succeeded", SUCCEEDED, "succeeded_gc"),
        ("failure_forgotten", "failed", FAILED, "failed_gc"),
    ],
)
def test_old_jobs_are_deleted(
    service: Deployment, client: Client, wait_until: WaitUntil, queue, outcome, state, counter
):
    client.create(queue)
    jobs = 2 * MONITOR_BATCH_SIZE + 1
    descriptors = client.enqueue(queue, *[client.job(b"", numAttemptsAllowed=1)] * jobs)
    taken = list(client.dequeue(queue, jobs))
    client.ack(queue, **{outcome: taken})
    client.enqueue(queue, b"", b"")
    (running,) = client.dequeue(queue)

    wait_until(lambda: client.lookup(*descriptors) == {})

    assert client.count(queue, state) == 0
    assert client.info(running).jobState == IN_PROGRESS
    assert client.count(queue, PENDING) == 1
    wait_until(lambda: service.counter(f"{queue}_{counter}") == jobs)


def test_other_queues_keep_the_settings_of_the_server(client: Client, queue, wait_until: WaitUntil):
    """While a job of a queue with short times comes and goes, these stay."""
    client.enqueue(queue, *[client.job(b"", numAttemptsAllowed=1)] * 3)
    running, succeeded, failed = client.dequeue(queue, 3)
    client.ack(queue, [succeeded], [failed])
    brief = "success_forgotten"
    client.create(brief)
    (gone,) = client.enqueue(brief, b"")
    client.ack(brief, succeeded=list(client.dequeue(brief, 1000)))

    wait_until(lambda: client.lookup(gone) == {})

    states = [client.info(d).jobState for d in (running, succeeded, failed)]
    assert states == [IN_PROGRESS, SUCCEEDED, FAILED]
