"""Queues, look-ups, searches, retries and deletes on one shard."""

from __future__ import annotations

import json
import struct

import pytest

from pinlaterd.errors import (
    InvalidRequest,
    Overloaded,
    PinLaterError,
    QueueNotFound,
)
from pinlaterd.model import (
    CONTINUATION_END,
    CONTINUATION_START,
    CountRequest,
    DeleteJobsRequest,
    DeleteQueueRequest,
    DequeueRequest,
    EnqueueRequest,
    Job,
    JobState,
    LookupRequest,
    QueueNamesRequest,
    RetryFailedRequest,
    ScanKey,
    ScanRequest,
)
from pinlaterd.shard.tasks import MOST_OF_A_SOURCE
from pinlaterd.wire.envelope import SCAN_BYTES, Op, Status

PENDING, FAILED = JobState.PENDING, JobState.FAILED


def fail_all(shard, *bodies: bytes) -> list[str]:
    """Jobs that failed for good, one after the other."""
    descriptors = []
    for body in bodies:
        descriptors += shard.enqueue(Job(body, attempts_allowed=1))
        shard.dequeue()
        shard.ack(failed=descriptors[-1:])
        shard.clock.advance(1.0)
    return descriptors


def scan_all(shard, limit: int, **fields) -> list[str]:
    found: list[str] = []
    token = CONTINUATION_START
    while token != CONTINUATION_END:
        page = shard.call(ScanRequest("mail", PENDING, continuation=token, limit=limit, **fields))
        assert len(page.jobs) <= limit
        found += [job.descriptor for job in page.jobs]
        token = page.continuation
    return found


# --- queues ---------------------------------------------------------------------------------


def test_queues_that_another_shard_has_are_there_before_the_next_call(shard):
    names = json.dumps(["post", "a b", "q" * 65, 7]).encode()

    ensured, enqueued = shard.replies(
        shard.raw(names, Op.ENSURE_QUEUES), shard.entry(EnqueueRequest("post", [Job(b"a")]))
    )

    assert (ensured.status, enqueued.status) == (Status.DONE, Status.DONE)
    assert shard.call(QueueNamesRequest()) == frozenset({"mail", "post"})


def test_a_deleted_queue_takes_its_jobs_along(shard):
    (descriptor,) = shard.enqueue(b"a")
    shard.service.take_counts()

    shard.call(DeleteQueueRequest("mail", "checked by the router"))
    shard.call(DeleteQueueRequest("mail", "checked by the router"))

    assert ("mail", ()) in list(shard.service.take_counts())
    assert shard.lookup(descriptor) == {}
    with pytest.raises(QueueNotFound):
        shard.dequeue()
    shard.create()
    assert shard.dequeue() == []


def test_a_queue_deleted_in_the_midst_of_calls_on_it(shard):
    shard.enqueue(b"a", b"b")

    results = shard.results(
        EnqueueRequest("mail", [Job(b"c")]),
        DequeueRequest("mail", 1),
        DeleteQueueRequest("mail", ""),
        EnqueueRequest("mail", [Job(b"d")]),
        DequeueRequest("mail", 1),
    )

    assert [job.body for job in results[1].jobs] == [b"a"]
    assert results[2] is None
    assert [type(result) for result in results[3:]] == [QueueNotFound, QueueNotFound]


# --- look-ups -------------------------------------------------------------------------------


def test_lookups_over_shards_are_the_routers_to_divide(shard):
    (descriptor,) = shard.enqueue(b"a")

    assert shard.results(LookupRequest([descriptor, "mail:s2:p1:1"])) == [Status.FOREIGN]
    assert list(shard.lookup(descriptor, "nonsense")) == [descriptor]


def test_a_long_list_is_looked_up_in_slices(shard):
    descriptors = shard.enqueue(*[b"%d" % number for number in range(1_000)])

    found = shard.call(LookupRequest(descriptors, include_body=True))

    assert {found[descriptor].body for descriptor in descriptors} == {
        b"%d" % number for number in range(1_000)
    }


def test_an_answer_that_no_frame_can_hold(make_shard):
    shard = make_shard(max_frame_bytes=10_000)
    shard.create()
    descriptors = shard.enqueue(*[bytes(1_000)] * 10)

    assert len(shard.lookup(*descriptors[:5], body=True)) == 5
    with pytest.raises(InvalidRequest, match="look up fewer"):
        shard.lookup(*descriptors, body=True)


# --- searches -------------------------------------------------------------------------------


def test_a_scan_of_long_statuses_takes_several_answers(shard):
    statuses = [Job(b"", custom_status="\N{GRINNING FACE}" * 5_000)] * 500
    descriptors = shard.enqueue(*statuses)

    first = shard.call(ScanRequest("mail", PENDING, limit=1_000))

    assert 1 < len(first.jobs) <= SCAN_BYTES // 20_000
    assert first.continuation != CONTINUATION_END
    assert sorted(scan_all(shard, 1_000)) == sorted(descriptors)


def test_of_equal_times_the_shards_come_in_the_order_of_their_names(shard):
    (descriptor,) = shard.enqueue(Job(b"", run_after_ms=1_000))

    def found_after(key: ScanKey) -> list[str]:
        request = ScanRequest("mail", PENDING, continuation=key.token())
        return [job.descriptor for job in shard.call(request).jobs]

    assert found_after(ScanKey(1_000, "a", 3, 10**17)) == [descriptor]
    assert found_after(ScanKey(1_000, "z", 1, 0)) == []
    assert found_after(ScanKey(1_000, "s1", 1, 0)) == [descriptor]
    assert found_after(ScanKey(1_000, "s1", 1, 10**17)) == []
    assert found_after(ScanKey(1_001, "z", 1, 0)) == [descriptor]


@pytest.mark.parametrize(
    "request_",
    [
        CountRequest("mail", PENDING, body_regex="("),
        ScanRequest("mail", PENDING, body_regex="a{2,1}"),
        DeleteJobsRequest("mail", PENDING, body_regex=r"\1"),
        CountRequest("mail", PENDING, body_regex="a" * 10_001),
    ],
)
def test_a_pattern_that_is_none(shard, request_):
    with pytest.raises(InvalidRequest, match="bodyRegexToMatch"):
        shard.call(request_)


def test_the_searches_of_a_source_are_bounded(shard):
    requests = [CountRequest("mail", PENDING)] * (MOST_OF_A_SOURCE + 3)

    results = shard.results(*requests)

    refused = [result for result in results if result != 0]
    assert 1 <= len(refused) <= 3
    assert all(isinstance(result, PinLaterError) for result in refused)
    assert Overloaded("32 searches of 'web:h1' run already").message in refused[0].message


# --- changes of many jobs -------------------------------------------------------------------


def test_the_ages_of_what_a_retry_would_take(shard):
    descriptors = fail_all(shard, b"a", b"b", b"c")
    entry = shard.entry(RetryFailedRequest("mail", limit=2), op=Op.OLDEST_FAILED)

    (reply,) = shard.replies(entry)

    ages = [age for (age,) in struct.iter_unpack(">q", reply.payload)]
    records = shard.lookup(*descriptors)
    assert ages == [records[descriptor].updated_at_ms for descriptor in descriptors[:2]]
    assert shard.state(descriptors[0]) is FAILED


def test_many_jobs_are_deleted_in_slices_and_calls_go_on_between_them(make_shard):
    shard = make_shard(monitor_batch_size=100)
    shard.create()
    shard.enqueue(*[b"a"] * 1_000)
    deleting = shard.entry(DeleteJobsRequest("mail", PENDING, limit=950))

    shard.submit(deleting)
    replies = shard.turn() + shard.turn()
    assert replies == []
    assert 500 < shard.counts()[0] < 1_000
    assert len(shard.dequeue(10)) == 10
    while not replies:
        replies = shard.turn()

    assert shard.decode(replies[0]) == 950
    assert shard.count(PENDING) == 40


def test_what_takes_too_long_answers_with_the_count_so_far(make_shard):
    shard = make_shard(monitor_batch_size=10)
    shard.create()
    shard.enqueue(*[b"a"] * 100)
    deleting = shard.entry(DeleteJobsRequest("mail", PENDING))

    shard.submit(deleting)
    assert shard.turn() == []
    shard.clock.advance(8.5)
    (reply,) = shard.turn()

    deleted = shard.decode(reply)
    assert 0 < deleted < 100
    assert shard.counts()[0] == 100 - deleted


def test_a_delete_that_a_stop_cuts_short_answers_with_the_count_so_far(make_shard):
    shard = make_shard(monitor_batch_size=10)
    shard.create()
    shard.enqueue(*[b"a"] * 100)
    shard.submit(shard.entry(DeleteJobsRequest("mail", PENDING)))
    assert shard.turn() == []

    shard.service.close()

    [reply] = shard.service.replies.take()[b"router"]
    assert 0 < shard.decode(reply) < 100


def test_what_has_changed_nothing_when_the_shard_stops_is_left_to_its_successor(shard):
    shard.enqueue(b"a")
    shard.submit(
        shard.entry(CountRequest("mail", PENDING, body_regex="a")),
        shard.entry(DeleteJobsRequest("mail", PENDING, body_regex="a")),
    )
    shard.service.run_batch()
    shard.service.run_slice(calls_wait=False)
    assert shard.service.replies.take() == {}  # the searcher has them; it is not heard

    shard.service.close()

    assert shard.service.replies.take() == {}
