"""Jobs with keys: enqueued as often as one likes, they are there once."""

from __future__ import annotations

import pytest

from tests.conformance.api import (
    FAILED,
    PENDING,
    STATES,
    SUCCEEDED,
    Client,
    Refused,
    one_engine,
    shard_of,
)

pytestmark = pytest.mark.service

MANY = 60


@pytest.mark.parametrize("state", STATES)
def test_a_job_that_is_enqueued_again_is_there_once(client: Client, queue, state):
    job = client.job(b"once", key="k", numAttemptsAllowed=1)
    (first,), existed = client.enqueue_keyed(queue, job)
    if state != PENDING:
        client.dequeue(queue)
    if state in (SUCCEEDED, FAILED):
        client.ack(queue, [first] * (state == SUCCEEDED), [first] * (state == FAILED))

    again = client.enqueue_keyed(queue, client.job(b"again", key="k"))

    assert existed == [False]
    assert again == ([first], [True])
    assert client.info(first, body=True).body == b"once"
    assert client.info(first).jobState == state
    assert sum(client.count(queue, each) for each in STATES) == 1
    assert not client.dequeue(queue) or state == PENDING


def test_the_jobs_of_a_call_go_where_their_keys_are_and_their_order_stays(client: Client, queue):
    keys = [f"order-{number}" for number in range(MANY)]
    jobs = [client.job(key.encode(), key=key) for key in keys]
    half, _ = client.enqueue_keyed(queue, *jobs[::2])
    plain = client.job(b"plain")

    descriptors, existed = client.enqueue_keyed(queue, *jobs, plain, jobs[0])

    assert existed == [*[True, False] * (MANY // 2), False, True]
    assert descriptors[:MANY:2] == half
    assert descriptors[-1] == descriptors[0]
    assert len({shard_of(d) for d in descriptors}) == 3
    found = client.lookup(*descriptors, body=True)
    assert [found[d].body for d in descriptors[:-1]] == [*[k.encode() for k in keys], b"plain"]
    assert [found[d].key for d in descriptors[:MANY]] == keys
    assert client.count(queue) == MANY + 1


def test_jobs_are_found_by_their_keys(client: Client, queue, new_queue):
    other = new_queue()
    jobs = [client.job(b"%d" % number, key=f"k{number}") for number in range(20)]
    descriptors, _ = client.enqueue_keyed(queue, *jobs)
    (others,), existed = client.enqueue_keyed(other, client.job(b"other", key="k3"))

    found = client.lookup_keys(queue, "k3", "k17", "none", "k3", body=True)

    assert existed == [False]
    assert {key: (info.jobDescriptor, info.body) for key, info in found.items()} == {
        "k3": (descriptors[3], b"3"),
        "k17": (descriptors[17], b"17"),
    }
    assert client.lookup_keys(other, "k3")["k3"].jobDescriptor == others
    assert client.lookup_keys("nowhere", "k3") == {}


@one_engine
@pytest.mark.parametrize(("key", "size"), [("", 0), ("x" * 201, 201), ("é" * 101, 202)])
def test_a_key_that_is_none_is_refused_and_nothing_is_stored(client: Client, queue, key, size):
    jobs = [client.job(b"x", key=f"k{number}") for number in range(20)]

    with pytest.raises(Refused) as refused:
        client.enqueue(queue, *jobs, client.job(b"y", key=key))

    assert refused.value.code == "ENQUEUE_REJECTED"
    assert f"jobs[20].key has {size} bytes; a key has 1 to 200" in refused.value.message
    assert client.count(queue) == 0


@one_engine
def test_a_long_call_in_which_only_an_early_job_has_a_key(client: Client, queue):
    jobs = [client.job(b"first", key="k"), *[client.job(b"x" * 300) for _ in range(1500)]]

    descriptors, existed = client.enqueue_keyed(queue, *jobs)

    assert existed == [False] * 1501
    assert client.lookup_keys(queue, "k")["k"].jobDescriptor == descriptors[0]
    assert client.enqueue_keyed(queue, jobs[0], jobs[1])[1] == [True, False]


def test_a_key_of_all_queues_is_held_by_one_job_of_the_service(client: Client, queue, new_queue):
    other = new_queue()
    keys = [f"job-{number}" for number in range(20)]
    jobs = [client.job(key.encode(), key=key, keyOfAllQueues=True) for key in keys]
    mine, existed = client.enqueue_keyed(queue, *jobs[:10], client.job(b"own", key="job-0"))

    others, existed_there = client.enqueue_keyed(other, *jobs, client.job(b"own", key="job-0"))

    assert existed == [False] * 11
    assert existed_there == [*[True] * 10, *[False] * 11]
    assert others[:10] == mine[:10]
    found = client.lookup_keys("", *keys, "none", body=True)
    assert {key: (info.jobDescriptor, info.body) for key, info in found.items()} == {
        key: (others[number], key.encode()) for number, key in enumerate(keys)
    }
    assert all(info.keyOfAllQueues for info in found.values())
    assert client.lookup_keys(queue, "job-0", "job-1").keys() == {"job-0"}
    assert (client.count(queue), client.count(other)) == (11, 11)
