"""SPEC section 3: lookupJobs and getJobCount.

Counts by body: test_api_body_search.py.
"""

from __future__ import annotations

import time

import pytest

from tests.conformance.api import (
    COUNT_LIMIT,
    FAILED,
    IN_PROGRESS,
    PENDING,
    STATES,
    SUCCEEDED,
    Client,
    Refused,
    one_engine,
)

pytestmark = pytest.mark.service


def test_lookup_over_queues_and_shards(client: Client, new_queue):
    first, second = new_queue(), new_queue()
    by_shard = [client.enqueue_on_every_shard(queue) for queue in (first, second)]
    descriptors = [d for shards in by_shard for on_shard in shards.values() for d in on_shard]

    found = client.lookup(*descriptors)

    assert {d: info.jobDescriptor for d, info in found.items()} == {d: d for d in descriptors}


def test_lookup_leaves_out_what_is_unknown(client: Client, queue):
    (descriptor,) = client.enqueue(queue, b"job")
    shard = descriptor.split(":")[1]
    unknown = [
        f"{queue}:{shard}:p1:999999999999",
        f"{queue}:{shard}:p2:{descriptor.split(':')[3]}",
        f"{queue}:{shard}:p9:1",
        f"{queue}:s99:p1:1",
        f"nowhere:{shard}:p1:1",
        "nonsense",
        "",
    ]

    assert client.lookup(*unknown, descriptor, *unknown).keys() == {descriptor}
    assert client.lookup(*unknown) == {}
    for one in unknown:
        assert client.lookup(one) == {}


@one_engine
def test_lookup_of_nothing(client: Client):
    assert client.lookup() == {}


def test_lookup_with_and_without_body(client: Client, queue):
    (descriptor,) = client.enqueue(queue, b"body")

    assert client.info(descriptor).body is None
    assert client.info(descriptor, body=True).body == b"body"


def test_lookup_of_one_job_twice(client: Client, queue):
    (descriptor,) = client.enqueue(queue, b"body")

    assert client.lookup(descriptor, descriptor).keys() == {descriptor}


def test_lookup_in_every_state(client: Client, queue):
    client.enqueue(queue, *[client.job(b"job", numAttemptsAllowed=1)] * 3)
    _, succeeded, failed = client.dequeue(queue, 3)
    client.ack(queue, [succeeded], [failed])
    (pending,) = client.enqueue(queue, b"job")
    (in_progress,) = client.lookup(*client.dequeue(queue))
    (pending,) = client.enqueue(queue, b"job")

    states = [client.info(d).jobState for d in (pending, in_progress, succeeded, failed)]
    assert states == list(STATES)


@one_engine
def test_count_by_state(client: Client, queue):
    client.enqueue_on_every_shard(queue, lambda _: client.job(b"", numAttemptsAllowed=1), each=4)
    taken = list(client.dequeue(queue, 7))
    client.ack(queue, succeeded=taken[:2], failed=taken[2:5])
    pending = len(client.dequeue(queue, 1000, dryRun=True))

    counts = {state: client.count(queue, state) for state in STATES}

    assert counts == {PENDING: pending, IN_PROGRESS: 2, SUCCEEDED: 2, FAILED: 3}


@one_engine
def test_count_by_priority(client: Client, queue):
    for priority, jobs in ((1, 3), (2, 5)):
        for _ in range(jobs):
            client.enqueue(queue, client.job(b"", priority=priority))

    assert [client.count(queue, priority=p) for p in (1, 2, 3)] == [3, 5, 0]
    assert client.count(queue) == 8


@one_engine
@pytest.mark.parametrize("priority", [0, 4, -1])
def test_count_of_a_priority_outside_the_levels(client: Client, queue, priority):
    with pytest.raises(Refused, match=r"^PRIORITY_NOT_SUPPORTED: "):
        client.count(queue, priority=priority)


@one_engine
def test_count_of_future_jobs(client: Client, queue):
    far_ms = int(time.time() * 1000) + 1_000_000
    client.enqueue_on_every_shard(queue, each=2)
    ready = client.count(queue)
    client.enqueue(queue, *[client.job(b"", runAfterTimestampMillis=far_ms)] * 4)

    assert client.count(queue) == ready
    assert client.count(queue, countFutureJobs=True) == 4


def test_count_is_capped_for_each_shard_and_priority(client: Client, queue):
    many = COUNT_LIMIT + 10
    jobs = [client.job(b"", priority=priority) for priority in (1, 2) for _ in range(many)]
    client.enqueue(queue, *jobs)

    assert client.count(queue, priority=1) == COUNT_LIMIT
    assert client.count(queue) == 2 * COUNT_LIMIT

    client.enqueue_on_every_shard(queue, lambda _: client.job(b"", priority=3))
    assert client.count(queue) == 2 * COUNT_LIMIT + client.count(queue, priority=3)
