"""What the load generator sends without encoding is what a client would have encoded."""

from __future__ import annotations

import pytest

from benchmarks import frames
from pinlaterd.errors import QueueNotFound
from pinlaterd.model import (
    AckInfo,
    AckRequest,
    ClaimedJob,
    DequeueRequest,
    DequeueResult,
    EnqueueRequest,
    Job,
)
from pinlaterd.rpc import codec

CLAIM = "host:9010:1700000000000:bench:load:7"


def request_in(frame):
    assert int.from_bytes(frame[:4]) == len(frame) - 4
    return codec.decode_call(frame[4:]).request


def reply_to(frame, result):
    head = codec.peek(frame[4:]).head
    encode = codec.encode_error if isinstance(result, Exception) else codec.encode_reply
    return frames.framed(encode(head, result))


def claimed(descriptors):
    return DequeueResult([ClaimedJob(d, frames.body(), 2, 2, CLAIM, 600) for d in descriptors])


@pytest.mark.parametrize("jobs", [1, 10, 100])
def test_an_enqueue_carries_so_many_jobs_of_200_bytes(jobs):
    script = frames.enqueue("bench", jobs)

    request = request_in(script.first())

    assert request == EnqueueRequest("bench", [Job(frames.body())] * jobs)
    assert len(request.jobs[0].body) == 200


@pytest.mark.parametrize("count", [1, 2, 100])
def test_a_dequeue_acks_exactly_the_jobs_of_the_last_reply(count):
    script = frames.DequeueWithAcks("bench", 100)
    descriptors = [f"bench:s{n % 2}:p1:{9 * 10**n % 10**15 + n}" for n in range(count)]
    reply = reply_to(script.first(), claimed(descriptors))

    jobs, request = script.jobs(reply), request_in(script.following(reply))

    assert jobs == count
    acks = AckRequest("bench", [AckInfo(descriptor) for descriptor in descriptors], [])
    assert request == DequeueRequest("bench", 100, acks)


def test_after_an_empty_reply_nothing_is_acked():
    script = frames.DequeueWithAcks("bench", 100)
    reply = reply_to(script.first(), claimed([]))

    assert script.jobs(reply) == 0
    assert request_in(script.following(reply)) == DequeueRequest("bench", 100)


def test_a_cycle_enqueues_then_dequeues_with_the_acks_of_the_dequeue_before():
    script = frames.Cycle("bench", 2)
    requests, jobs, frame = [], [], script.first()
    for descriptors in (["bench:s1:p1:7", "bench:s1:p1:8"], ["bench:s1:p1:9"]):
        for result in (descriptors, claimed(descriptors)):
            requests.append(request_in(frame))
            reply = reply_to(frame, result)
            jobs.append(script.jobs(reply))
            frame = script.following(reply)

    enqueue = EnqueueRequest("bench", [Job(frames.body())] * 2)
    acks = AckRequest("bench", [AckInfo(f"bench:s1:p1:{number}") for number in (7, 8)], [])
    dequeues = [DequeueRequest("bench", 2), DequeueRequest("bench", 2, acks)]
    assert requests == [enqueue, dequeues[0], enqueue, dequeues[1]]
    assert jobs == [0, 2, 0, 1]


@pytest.mark.parametrize(
    "script",
    [
        frames.enqueue("bench", 1),
        frames.DequeueWithAcks("bench", 100),
        frames.Cycle("bench", 100),
    ],
)
def test_an_error_is_not_taken_for_an_answer(script):
    assert script.jobs(reply_to(script.first(), QueueNotFound("bench"))) == -1
