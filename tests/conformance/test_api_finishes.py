"""finishJobs: ends of jobs, or further attempts, claimed or not."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.conformance.api import (
    FAILED,
    IN_PROGRESS,
    PENDING,
    SUCCEEDED,
    Client,
    Deployment,
    Refused,
    one_engine,
)
from tests.conftest import WaitUntil

DONE, NO_SUCH_JOB, ENDED_BEFORE, OTHER_ATTEMPTS = range(4)


@pytest.fixture
def descriptor(client: Client, queue: str) -> str:
    """A job that runs."""
    [descriptor] = client.enqueue(queue, b"x")
    client.dequeue(queue)
    return descriptor


def test_a_job_that_nobody_holds_ends_and_is_never_handed_out(client: Client, queue):
    kept, ready, later = client.enqueue(
        queue, b"kept", b"ready", client.job(b"later", runAfterTimestampMillis=2**41)
    )

    outcomes = client.finish(
        queue, *[client.finish_of(one, SUCCEEDED, 2) for one in (later, ready)]
    )

    assert outcomes == [DONE, DONE]
    assert [client.info(one).jobState for one in (ready, later)] == [SUCCEEDED, SUCCEEDED]
    assert list(client.dequeue(queue, 10)) == [kept]
    assert client.finish(queue, client.finish_of(ready, FAILED, 0)) == [ENDED_BEFORE]


def test_a_job_is_tried_again_after_its_delay(client: Client, queue, wait_until: WaitUntil):
    [descriptor] = client.enqueue(queue, client.job(b"x", numAttemptsAllowed=3))
    client.dequeue(queue)
    again = client.finish_of(
        descriptor, PENDING, 2, expectedAttempts=3, retryDelayMillis=500, appendCustomStatus="late"
    )

    assert client.finish(queue, again) == [DONE]

    info = client.info(descriptor)
    assert (info.jobState, info.attemptsRemaining) == (PENDING, 2)
    assert client.finish(queue, again) == [OTHER_ATTEMPTS]
    wait_until(lambda: list(client.dequeue(queue)) == [descriptor])
    assert client.info(descriptor).customStatus == "late"


def test_a_claim_ends_with_a_finish(client: Client, queue, descriptor):
    claim = client.info(descriptor).claimDescriptor
    assert client.finish(queue, client.finish_of(descriptor, FAILED, 1)) == [DONE]

    [applied], _ = client.ack_jobs(queue, [client.ack_info(descriptor, claimDescriptor=claim)])

    info = client.info(descriptor)
    assert not applied
    assert (info.jobState, info.attemptsRemaining) == (FAILED, 1)


def test_of_parallel_finishes_one_is_done(service: Deployment, client: Client, queue, descriptor):
    def finish(_: int) -> int:
        with service.client() as own:
            again = own.finish_of(descriptor, PENDING, 1, expectedAttempts=2, retryDelayMillis=1000)
            [outcome] = own.finish(queue, again)
        return outcome

    with ThreadPoolExecutor(8) as pool:
        outcomes = list(pool.map(finish, range(8)))

    assert sorted(outcomes) == [DONE] + [OTHER_ATTEMPTS] * 7
    assert client.info(descriptor).attemptsRemaining == 1


@one_engine
def test_what_is_wrong_with_a_finish(client: Client, queue, descriptor):
    wrong = {
        "names a job twice": [client.finish_of(descriptor, FAILED, 0)] * 2,
        "jobState .* is IN_PROGRESS": [client.finish_of(descriptor, IN_PROGRESS, 1)],
        "attemptsRemaining .* is 0; it must be 1": [client.finish_of(descriptor, PENDING, 0)],
        "attemptsRemaining .* is -1": [client.finish_of(descriptor, FAILED, -1)],
        "retryDelayMillis .* is -1": [
            client.finish_of(descriptor, PENDING, 1, retryDelayMillis=-1)
        ],
        "nonsense": [client.finish_of("nonsense", FAILED, 0)],
    }
    for message, finishes in wrong.items():
        with pytest.raises(Refused, match=message):
            client.finish(queue, *finishes)
    with pytest.raises(Refused, match="does not exist"):
        client.finish("no_such_queue")

    assert client.info(descriptor).jobState == IN_PROGRESS
    assert client.finish(queue, client.finish_of(f"{queue}:s1:p1:7", FAILED, 0)) == [NO_SUCH_JOB]
