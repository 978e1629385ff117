"""SPEC section 3: scanJobs.

Scans by body: test_api_body_search.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.conformance.api import (
    FAILED,
    IN_PROGRESS,
    PENDING,
    STATES,
    SUCCEEDED,
    Client,
    Refused,
    one_engine,
    priority_of,
)

pytestmark = pytest.mark.service

START, END = "0", "-1"


def pages(client: Client, queue: str, limit: int, **fields: Any) -> Iterator[list[Any]]:
    """The answers of a whole scan."""
    continuation = START
    while continuation != END:
        answer = client.scan(queue, limit=limit, continuation=continuation, **fields)
        assert len(answer.scannedJobs) <= limit
        yield answer.scannedJobs
        continuation = answer.continuation


def descriptors_of(infos: list[Any]) -> list[str]:
    return [info.jobDescriptor for info in infos]


def flat(by_shard: dict[str, list[str]]) -> list[str]:
    return [descriptor for on_shard in by_shard.values() for descriptor in on_shard]


@pytest.fixture
def spread(client: Client, queue) -> list[str]:
    """Jobs on every shard with different run-after times, the most recent first."""
    now_ms = int(time.time() * 1000)
    offsets = [5, 3, 8, 1, 9, 2, 7, 4, 6, 0]
    by_shard = client.enqueue_on_every_shard(
        queue,
        lambda n: client.job(
            b"", runAfterTimestampMillis=now_ms - 10_000 * (offsets[n % 10] + 1) - n
        ),
        each=5,
    )
    infos = client.lookup(*flat(by_shard))
    return sorted(infos, key=lambda d: -infos[d].runAfterTimestampMillis)


@one_engine
def test_order(client: Client, queue, spread):
    assert descriptors_of(client.scan(queue, limit=1000).scannedJobs) == spread


@pytest.mark.parametrize("limit", [1, 4, 1000])
def test_continuation(client: Client, queue, spread, limit):
    scanned = list(pages(client, queue, limit))

    assert [d for page in scanned for d in descriptors_of(page)] == spread
    assert all(len(page) == limit for page in scanned[:-1])


@one_engine
def test_continuation_among_equal_times(client: Client, queue):
    same_ms = int(time.time() * 1000) - 1000
    by_shard = client.enqueue_on_every_shard(
        queue,
        lambda n: client.job(b"", priority=1 + n % 3, runAfterTimestampMillis=same_ms),
        each=5,
    )

    for limit in (1, 3):
        seen = [d for page in pages(client, queue, limit) for d in descriptors_of(page)]
        assert len(seen) == len(set(seen))
        assert set(seen) == set(flat(by_shard))


def test_continuation_while_jobs_come_and_go(client: Client, queue, spread):
    """What was there throughout is met once, in order, whatever joins or leaves around it."""
    seen: list[str] = []
    gone: set[str] = set()
    for page in pages(client, queue, 3):
        seen += descriptors_of(page)
        # The last one met leaves, and so does one that is still to come; others join at both ends.
        for descriptor in client.dequeue(queue):
            gone.add(descriptor)
        client.enqueue(
            queue, b"now", client.job(b"old", priority=3, runAfterTimestampMillis=1000 + len(seen))
        )
        if len(gone) > 20:
            break

    stayed = [descriptor for descriptor in spread if descriptor not in gone]
    assert len(seen) == len(set(seen))
    assert [descriptor for descriptor in seen if descriptor in stayed] == stayed


def test_continuation_from_a_job_that_is_gone(client: Client, queue, spread):
    answer = client.scan(queue, limit=3)
    assert client.delete_jobs(queue, PENDING) == len(spread)
    (left,) = client.enqueue(queue, client.job(b"", runAfterTimestampMillis=1))

    rest = client.scan(queue, limit=1000, continuation=answer.continuation)

    assert descriptors_of(rest.scannedJobs) == [left]


@one_engine
def test_end(client: Client, queue, spread):
    assert client.scan(queue, limit=len(spread)).continuation == END
    assert client.scan(queue, limit=len(spread) + 1).continuation == END
    nothing = client.scan(queue, SUCCEEDED)
    assert (nothing.scannedJobs, nothing.continuation) == ([], END)


@one_engine
def test_default_limit(client: Client, queue):
    client.enqueue(queue, *[b""] * 150)

    answer = client.scan(queue)

    assert len(answer.scannedJobs) == 100
    rest = client.scan(queue, continuation=answer.continuation)
    assert len(rest.scannedJobs) == 50


@one_engine
def test_what_is_shown(client: Client, queue):
    (descriptor,) = client.enqueue(queue, client.job(b"body", priority=2, customStatus="new"))
    client.dequeue(queue)

    (info,) = client.scan(queue, IN_PROGRESS).scannedJobs

    assert info.body is None
    assert info == client.info(descriptor)


@one_engine
def test_by_state(client: Client, queue):
    client.enqueue(queue, *[client.job(b"", numAttemptsAllowed=1)] * 3)
    running, succeeded, failed = client.dequeue(queue, 3)
    client.ack(queue, [succeeded], [failed])
    (pending,) = client.enqueue(queue, b"")

    scanned = {state: descriptors_of(client.scan(queue, state).scannedJobs) for state in STATES}

    assert scanned == {0: [pending], 1: [running], 2: [succeeded], 3: [failed]}


@one_engine
def test_by_priority(client: Client, queue):
    jobs = client.enqueue_on_every_shard(
        queue, lambda n: client.job(b"", priority=1 + n % 3), each=3
    )
    by_priority: dict[int, list[str]] = {1: [], 2: [], 3: []}
    for descriptor in flat(jobs):
        by_priority[priority_of(descriptor)].append(descriptor)

    for priority, descriptors in by_priority.items():
        found = client.scan(queue, priority=priority).scannedJobs
        assert sorted(descriptors_of(found)) == sorted(descriptors)


@one_engine
def test_future_jobs(client: Client, queue):
    far_ms = int(time.time() * 1000) + 1_000_000
    (now,) = client.enqueue(queue, b"")
    later, latest = client.enqueue(
        queue,
        *(client.job(b"", runAfterTimestampMillis=far_ms + extra) for extra in (0, 1000)),
    )

    assert descriptors_of(client.scan(queue).scannedJobs) == [now]
    assert descriptors_of(client.scan(queue, scanFutureJobs=True).scannedJobs) == [latest, later]


@one_engine
@pytest.mark.parametrize(
    "continuation", ["", "1", "nonsense", "0 OR 1=1", "v1:1:2:3", "v1:x:1:1:1", "🚀", "9" * 1000]
)
def test_bad_continuation(client: Client, queue, continuation):
    with pytest.raises(Refused, match=r"^CONTINUATION_INVALID: "):
        client.scan(queue, continuation=continuation)


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
    with pytest.raises(Refused, match=f"^{error}"):
        client.scan(queue, **fields)


# --- by the time of the end ------------------------------------------------------------------


def test_jobs_that_have_ended_are_scanned_by_their_ends_over_all_shards(client: Client, queue):
    by_shard = client.enqueue_on_every_shard(queue, lambda n: client.job(b"%d" % n), each=3)
    ended = flat(by_shard)[::-1]
    for descriptor in ended:
        client.finish(queue, client.finish_of(descriptor, SUCCEEDED, 1))

    found = [
        info
        for page in pages(client, queue, 2, state=SUCCEEDED, newestEndFirst=True)
        for info in page
    ]

    assert set(descriptors_of(found)) == set(ended)
    times = [info.updatedAtTimestampMillis for info in found]
    assert times == sorted(times, reverse=True)


@one_engine
def test_jobs_that_have_not_ended_have_no_such_order(client: Client, queue):
    with pytest.raises(Refused, match="newestEndFirst is for jobs that have ended"):
        client.scan(queue, PENDING, newestEndFirst=True)


# --- choices, progress, and parts ------------------------------------------------------------


@pytest.fixture
def failed(client: Client, queue) -> list[str]:
    """Jobs that failed one after the other on all shards, the last one first."""
    by_shard = client.enqueue_on_every_shard(
        queue, lambda n: client.job(b"%d" % n, numAttemptsAllowed=1), each=3
    )
    ended = flat(by_shard)
    for number, descriptor in enumerate(ended):
        status = f"KeyError: {number} (a.py:{number % 2} in f)"
        finish = client.finish_of(descriptor, FAILED, 0, appendCustomStatus=status)
        client.finish(queue, finish)
        time.sleep(0.002)  # so that no two end in the same millisecond
    return ended[::-1]


def test_failed_jobs_are_chosen_by_time_status_message_and_place(client: Client, queue, failed):
    infos = client.lookup(*failed)
    ends = [infos[descriptor].updatedAtTimestampMillis for descriptor in failed]

    def found(**choice: Any) -> list[int]:
        scanned = pages(client, queue, 4, state=FAILED, newestEndFirst=True, **choice)
        return [failed.index(info.jobDescriptor) for page in scanned for info in page]

    every = list(range(len(failed)))
    assert found(endedBeforeMillis=ends[2], endedSinceMillis=ends[6]) == [3, 4, 5, 6]
    assert found(statusRegexToMatch="KeyError: [0-2] ") == every[-3:]
    assert found(message="KeyError: #") == every
    assert found(message="KeyError: 1") == []
    assert found(place="a.py:0 in f") == [at for at in every if (len(failed) - 1 - at) % 2 == 0]
    assert found(worker="nobody") == []


def test_an_answer_says_at_how_many_jobs_it_has_looked(client: Client, queue, failed):
    answer = client.scan(queue, FAILED, newestEndFirst=True, statusRegexToMatch="nothing")

    assert (answer.scannedJobs, answer.continuation) == ([], END)
    assert (answer.lookedAt, answer.inState) == (len(failed), len(failed))
    few = client.scan(queue, FAILED, newestEndFirst=True, limit=1)
    assert few.lookedAt < len(failed)


@one_engine
@pytest.mark.parametrize(
    ("state", "fields", "says"),
    [
        (FAILED, {"statusRegexToMatch": "("}, "statusRegexToMatch is no RE2 pattern"),
        (FAILED, {"maxMillis": 0}, "maxMillis is 0"),
        (PENDING, {"endedSinceMillis": 1}, "endedSinceMillis is for jobs that have ended"),
        (PENDING, {"endedBeforeMillis": 1}, "endedBeforeMillis is for jobs that have ended"),
    ],
)
def test_mistakes_in_a_choice(client: Client, queue, state, fields, says):
    with pytest.raises(Refused, match=f"^UNKNOWN: invalid request: {says}"):
        client.scan(queue, state, **fields)
