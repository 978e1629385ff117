"""SPEC sections 1 and 3: enqueueJobs.

Durability of what was answered, and shards that fail: test_api_shard_down.py; ENQUEUE_REJECTED
because all are dequeue-only: test_api_shards_changed.py.
"""

from __future__ import annotations

import re
import time
from collections import Counter

import pytest

from tests.conformance.api import (
    MIB,
    PENDING,
    Backend,
    Client,
    Deployment,
    Interface,
    Refused,
    one_engine,
    shard_of,
)

pytestmark = pytest.mark.service

SPLIT_JOBS = 1000
YEAR_2100_MS = 4_102_444_800_000


def test_descriptors(client: Client, queue):
    jobs = [client.job(b"%d" % n, priority=1 + n % 3) for n in range(12)]

    descriptors = client.enqueue(queue, *jobs)

    for number, descriptor in enumerate(descriptors):
        assert re.fullmatch(rf"{queue}:s[123]:p{1 + number % 3}:[1-9][0-9]*", descriptor)
        assert client.info(descriptor, body=True).body == b"%d" % number
    assert len(set(descriptors)) == 12


@one_engine
def test_request_goes_into_one_shard(client: Client, queue):
    for _ in range(5):
        descriptors = client.enqueue(queue, *[b"job"] * SPLIT_JOBS)

        assert len(set(descriptors)) == SPLIT_JOBS
        assert len({shard_of(d) for d in descriptors}) == 1


@one_engine
def test_large_request_is_split(client: Client, queue):
    bodies = [b"%d" % n for n in range(2500)]

    descriptors = client.enqueue(queue, *bodies)

    found = client.lookup(*descriptors, body=True)
    assert [found[d].body for d in descriptors] == bodies
    by_shard = Counter(map(shard_of, descriptors))
    assert len(by_shard) == 3
    assert max(by_shard.values()) <= SPLIT_JOBS


@one_engine
def test_shards_share_the_load_evenly(service: Deployment, api: Interface, client: Client, queue):
    calls = 300
    message = api.message("enqueueJobs", client.enqueue_request(queue, b"job"))
    with service.wire() as wire:
        wire.send(*[message] * calls)
        by_shard = Counter(shard_of(wire.receive().value.jobDescriptors[0]) for _ in range(calls))

    # Were the choice made by chance alone, this would fail once in 10,000,000 runs.
    assert min(by_shard[shard] for shard in ("1", "2", "3")) >= 60


@one_engine
@pytest.mark.parametrize("priority", [0, 4, -1, 127])
def test_priority_outside_the_levels(client: Client, queue, priority):
    with pytest.raises(Refused, match=rf"^PRIORITY_NOT_SUPPORTED: .*{priority}.* 1 to 3"):
        client.enqueue(queue, b"good", client.job(b"bad", priority=priority))

    assert client.count(queue) == 0


@one_engine
@pytest.mark.parametrize(
    ("body", "fields", "says"),
    [
        (b"", {"numAttemptsAllowed": 0}, "numAttemptsAllowed"),
        (b"", {"numAttemptsAllowed": -5}, "numAttemptsAllowed"),
        (b"x" * (MIB + 1), {}, "body"),
        (b"", {"runAfterTimestampMillis": -1}, "runAfterTimestampMillis"),
    ],
)
def test_rejected(client: Client, queue, body, fields, says):
    bad = client.job(body, **fields)

    with pytest.raises(Refused, match=rf"^ENQUEUE_REJECTED: invalid request: jobs\[1\].*{says}"):
        client.enqueue(queue, b"good", bad, b"good")

    assert client.count(queue) == 0


@one_engine
@pytest.mark.parametrize("source", ["s" * 121, "ü" * 61])
def test_source_too_long(service: Deployment, client: Client, queue, source):
    with (
        service.client(source=source) as talkative,
        pytest.raises(Refused, match=r"^ENQUEUE_REJECTED: invalid request: .*source.*120"),
    ):
        talkative.enqueue(queue, b"job")

    assert client.count(queue) == 0


@one_engine
@pytest.mark.parametrize(
    ("fields", "code"),
    [({"priority": 4}, "PRIORITY_NOT_SUPPORTED"), ({"numAttemptsAllowed": 0}, "ENQUEUE_REJECTED")],
)
def test_nothing_of_a_large_request_is_stored_if_a_job_is_bad(client: Client, queue, fields, code):
    jobs = [client.job(b"job") for _ in range(2 * SPLIT_JOBS)]

    with pytest.raises(Refused, match=f"^{code}: "):
        client.enqueue(queue, *jobs, client.job(b"bad", **fields))

    assert client.count(queue) == 0


def test_largest_and_smallest(service: Deployment, client: Client, queue):
    with service.client(source="ü" * 60) as talkative:
        largest, smallest = talkative.enqueue(
            queue,
            client.job(
                b"x" * MIB,
                priority=3,
                numAttemptsAllowed=2**31 - 1,
                runAfterTimestampMillis=YEAR_2100_MS,
            ),
            client.job(b"", priority=1, numAttemptsAllowed=1, runAfterTimestampMillis=0),
        )

    large, small = client.info(largest, body=True), client.info(smallest, body=True)
    assert (len(large.body), large.attemptsAllowed) == (MIB, 2**31 - 1)
    assert large.runAfterTimestampMillis == YEAR_2100_MS
    assert (small.body, small.attemptsAllowed, small.runAfterTimestampMillis) == (b"", 1, 0)


def test_bad_calls_do_not_disturb_good_ones(
    service: Deployment, api: Interface, client: Client, queue
):
    good = client.enqueue_request(queue, b"good", b"good")
    bad = [
        client.enqueue_request(queue, b"lost", client.job(b"bad", priority=9)),
        client.enqueue_request(queue, client.job(b"bad", numAttemptsAllowed=0)),
        client.enqueue_request("nowhere", b"lost"),
    ]
    requests = [request for mistake in bad for request in (good, mistake)] * 5
    with service.wire() as wire:
        wire.send(*(api.message("enqueueJobs", request) for request in requests))
        answers = [wire.receive().value for _ in requests]

    assert all(isinstance(answer, Refused) for answer in answers[1::2])
    descriptors = [d for answer in answers[::2] for d in answer.jobDescriptors]
    assert client.lookup(*descriptors).keys() == set(descriptors)
    assert client.count(queue) == len(descriptors) == 30


@one_engine
def test_empty_list(client: Client, queue):
    assert client.enqueue(queue) == []


def test_defaults(client: Client, queue):
    before = int(time.time() * 1000)
    (descriptor,) = client.enqueue(queue, client.job(b"job"))
    after = int(time.time() * 1000) + 1

    info = client.info(descriptor)
    assert info.jobDescriptor == descriptor
    assert info.jobState == PENDING
    assert ":p1:" in descriptor
    assert (info.attemptsAllowed, info.attemptsRemaining) == (2, 2)
    assert info.customStatus == ""
    assert info.claimDescriptor is None
    assert info.body is None
    for time_ms in (
        info.createdAtTimestampMillis,
        info.updatedAtTimestampMillis,
        info.runAfterTimestampMillis,
    ):
        assert before <= time_ms <= after


def test_bodies_are_kept_as_they_are(client: Client, queue):
    bodies = [b"", b"\0", bytes(range(256)), "größe 🚀".encode(), b"'; DROP TABLE jobs; --"]

    descriptors = client.enqueue(queue, *bodies)

    assert [client.info(d, body=True).body for d in descriptors] == bodies
    assert sorted(job.body for job in client.dequeue(queue, 10).values()) == sorted(bodies)


@pytest.mark.parametrize("character", ["x", "é", "字", "🚀"])
def test_custom_status_is_cut_by_characters(client: Client, queue, backend: Backend, character):
    longest = backend.status_characters
    text = "^" + character * (longest + 1000)

    (descriptor, short) = client.enqueue(
        queue, client.job(b"", customStatus=text), client.job(b"", customStatus=character)
    )

    assert client.info(descriptor).customStatus == text[:longest]
    assert client.info(short).customStatus == character


def test_visible_on_every_connection(service: Deployment, client: Client, new_queue):
    for _ in range(10):
        queue = new_queue()
        (descriptor,) = client.enqueue(queue, b"seen")
        with service.client() as other:
            assert queue in other.names()
            assert other.count(queue) == 1
            assert [info.jobDescriptor for info in other.scan(queue).scannedJobs] == [descriptor]
            assert other.lookup(descriptor).keys() == {descriptor}
            assert other.dequeue(queue, 10).keys() == {descriptor}
        with service.client() as other:
            other.ack(queue, succeeded=[descriptor])
        with service.client() as other:
            assert (other.count(queue), other.count(queue, 2)) == (0, 1)
