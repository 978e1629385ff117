"""SPEC section 3: retryFailedJobs and deleteJobs.

Deletes by body: test_api_body_search.py.
"""

from __future__ import annotations

import time
from functools import partial

import pytest

from tests.conformance.api import (
    FAILED,
    IN_PROGRESS,
    PENDING,
    STATES,
    SUCCEEDED,
    Client,
    Deployment,
    Refused,
    one_engine,
)
from tests.conftest import WaitUntil

pytestmark = pytest.mark.service


def test_retried_jobs(client: Client, queue):
    (descriptor,) = client.fail_for_good(queue, client.job(b"job", numAttemptsAllowed=3))
    before = int(time.time() * 1000)

    assert client.retry_failed(queue) == 1

    info = client.info(descriptor)
    assert info.jobState == PENDING
    assert (info.attemptsAllowed, info.attemptsRemaining) == (3, 1)
    assert info.claimDescriptor is None
    assert before <= info.runAfterTimestampMillis <= int(time.time() * 1000) + 1
    assert client.dequeue(queue)[descriptor].body == b"job"
    assert client.retry_failed(queue) == 0


def test_attempts_allowed_are_raised_to_match(client: Client, queue):
    few, many = client.fail_for_good(
        queue, *(client.job(b"", numAttemptsAllowed=attempts) for attempts in (1, 3))
    )

    assert client.retry_failed(queue, attemptsToAllow=2) == 2

    infos = [client.info(few), client.info(many)]
    assert [(info.attemptsAllowed, info.attemptsRemaining) for info in infos] == [(2, 2), (3, 2)]


def test_retry_for_later(client: Client, queue):
    (descriptor,) = client.fail_for_good(queue, b"job")
    later_ms = int(time.time() * 1000) + 1_000_000

    assert client.retry_failed(queue, runAfterTimestampMillis=later_ms) == 1

    assert client.info(descriptor).runAfterTimestampMillis == later_ms
    assert client.dequeue(queue) == {}


def is_past(time_ms: int) -> bool:
    return time.time() * 1000 > time_ms


def test_oldest_are_retried_first(client: Client, queue, wait_until: WaitUntil):
    client.enqueue_on_every_shard(queue, lambda _: client.job(b"", numAttemptsAllowed=1), each=3)
    in_order = []
    for descriptor in client.dequeue(queue, 1000):
        client.ack(queue, failed=[descriptor])
        in_order.append(descriptor)
        wait_until(partial(is_past, client.info(descriptor).updatedAtTimestampMillis + 1))

    retried: list[str] = []
    for limit in (1, 4, 2):
        assert client.retry_failed(queue, limit=limit) == limit
        retried += sorted(client.dequeue(queue, 1000), key=in_order.index)

    assert retried == in_order[:7]
    assert client.count(queue, FAILED) == len(in_order) - 7
    assert client.retry_failed(queue) == len(in_order) - 7


def test_retry_of_a_priority(client: Client, queue):
    client.fail_for_good(queue, *(client.job(b"", priority=p) for p in (1, 2, 2, 3, 3, 3)))

    assert client.retry_failed(queue, priority=2) == 2
    assert client.retry_failed(queue) == 1
    assert [client.count(queue, FAILED, priority=p) for p in (1, 2, 3)] == [0, 0, 3]


def test_retry_leaves_other_states(client: Client, queue):
    client.enqueue(queue, b"", b"")
    running, done = client.dequeue(queue, 2)
    client.ack(queue, succeeded=[done])
    client.enqueue(queue, b"")

    assert client.retry_failed(queue) == 0
    assert [client.count(queue, state) for state in STATES] == [1, 1, 1, 0]
    assert client.info(running).jobState == IN_PROGRESS


@pytest.mark.parametrize("state", STATES)
def test_delete_of_a_state(client: Client, queue, state):
    client.enqueue_on_every_shard(queue, lambda _: client.job(b"", numAttemptsAllowed=1), each=2)
    _, succeeded, failed = client.dequeue(queue, 3)
    client.ack(queue, [succeeded], [failed])
    expected = [client.count(queue, one) for one in STATES]

    assert client.delete_jobs(queue, state) == expected[state]

    expected[state] = 0
    assert [client.count(queue, one) for one in STATES] == expected


def test_delete_up_to_a_limit_over_all_shards(client: Client, queue):
    by_shard = client.enqueue_on_every_shard(queue, each=3)
    jobs = sum(map(len, by_shard.values()))

    assert client.delete_jobs(queue, PENDING, limit=7) == 7
    assert client.count(queue) == jobs - 7
    assert client.delete_jobs(queue, PENDING) == jobs - 7
    assert client.delete_jobs(queue, PENDING) == 0
    assert client.dequeue(queue) == {}


def test_delete_of_a_priority(client: Client, queue):
    client.enqueue(queue, *(client.job(b"", priority=p) for p in (1, 2, 2, 3)))

    assert client.delete_jobs(queue, PENDING, priority=2) == 2
    assert client.delete_jobs(queue, PENDING) == 1
    assert client.count(queue, priority=3) == 1


def test_delete_of_future_jobs(client: Client, queue):
    far_ms = int(time.time() * 1000) + 1_000_000
    client.enqueue(queue, client.job(b"", runAfterTimestampMillis=far_ms))

    assert client.delete_jobs(queue, PENDING) == 1
    assert client.count(queue, countFutureJobs=True) == 0


def test_delete_of_many_in_slices(client: Client, queue):
    descriptors = client.enqueue(queue, *[b""] * 1200)

    assert client.delete_jobs(queue, PENDING, limit=1100) == 1100
    assert len(client.lookup(*descriptors)) == 100


def test_delete_ends_a_claim(client: Client, queue):
    (descriptor,) = client.enqueue(queue, b"job")
    client.dequeue(queue)
    assert client.delete_jobs(queue, IN_PROGRESS) == 1

    client.ack(queue, succeeded=[descriptor])
    client.checkpoint(queue, client.checkpoint_of(descriptor, moveToPending=True))

    assert client.lookup(descriptor) == {}
    assert client.count(queue, SUCCEEDED) == 0


def test_effects_are_visible_on_every_connection(service: Deployment, client: Client, queue):
    for number in range(10):
        (descriptor,) = client.fail_for_good(queue, client.job(b"job", numAttemptsAllowed=1))
        with service.client() as other:
            assert other.retry_failed(queue) == 1
        with service.client() as other:
            assert other.count(queue, FAILED) == 0
            assert other.dequeue(queue, 10).keys() == {descriptor}
        with service.client() as other:
            other.checkpoint(queue, other.checkpoint_of(descriptor, newBody=f"new {number}"))
        with service.client() as other:
            assert other.info(descriptor, body=True).body == b"new %d" % number
            assert other.delete_jobs(queue, IN_PROGRESS) == 1
        with service.client() as other:
            assert other.lookup(descriptor) == {}
            assert other.count(queue, IN_PROGRESS) == 0


@one_engine
@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"limit": 0}, "UNKNOWN: invalid request: .*limit"),
        ({"limit": -1}, "UNKNOWN: invalid request: .*limit"),
        ({"priority": 0}, "PRIORITY_NOT_SUPPORTED: "),
        ({"priority": 4}, "PRIORITY_NOT_SUPPORTED: "),
    ],
)
def test_mistakes(client: Client, queue, fields, error):
    client.fail_for_good(queue, b"job")

    with pytest.raises(Refused, match=f"^{error}"):
        client.retry_failed(queue, **fields)
    with pytest.raises(Refused, match=f"^{error}"):
        client.delete_jobs(queue, FAILED, **fields)

    assert client.count(queue, FAILED) == 1


@one_engine
@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"attemptsToAllow": 0}, "attemptsToAllow"),
        ({"runAfterTimestampMillis": -1}, "runAfterTimestampMillis"),
    ],
)
def test_mistakes_of_a_retry(client: Client, queue, fields, says):
    client.fail_for_good(queue, b"job")

    with pytest.raises(Refused, match=f"^UNKNOWN: invalid request: .*{says}"):
        client.retry_failed(queue, **fields)

    assert client.count(queue, FAILED) == 1
