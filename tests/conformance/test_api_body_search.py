"""SPEC section 3: bodyRegexToMatch, in getJobCount, scanJobs and deleteJobs."""

from __future__ import annotations

import time

import pytest

from tests.conformance.api import KIB, PENDING, SUCCEEDED, Client, Refused, one_engine

pytestmark = pytest.mark.service

# RE2 reads this one in milliseconds; a backtracking matcher would not finish in a lifetime.
CHOKING_PATTERN = r"(x+x+)+y"
CHOKING_BODY = b"x" * 64 * KIB


@one_engine
@pytest.mark.parametrize(
    ("pattern", "matching"),
    [
        ("", {b"Mail to bob", b"mail to alice", b"push 42\nto carol", b"\xff\xfe mail\0"}),
        ("mail", {b"mail to alice", b"\xff\xfe mail\0"}),
        ("(?i)MAIL to", {b"Mail to bob", b"mail to alice"}),
        (r"^mail .*alice$", {b"mail to alice"}),
        (r"\d{2}", {b"push 42\nto carol"}),
        (r"(?m)^to carol$", {b"push 42\nto carol"}),
        (r"bob|carol", {b"Mail to bob", b"push 42\nto carol"}),
        (r"[[:upper:]]", {b"Mail to bob"}),
        (r"nobody", set()),
    ],
)
def test_pattern(client: Client, queue, pattern, matching):
    bodies = [b"Mail to bob", b"mail to alice", b"push 42\nto carol", b"\xff\xfe mail\0"]
    descriptors = [client.enqueue(queue, body)[0] for body in bodies]
    by_descriptor = dict(zip(descriptors, bodies, strict=True))

    scanned = client.scan(queue, bodyRegexToMatch=pattern).scannedJobs

    assert {by_descriptor[info.jobDescriptor] for info in scanned} == matching
    assert client.count(queue, bodyRegexToMatch=pattern) == len(matching)
    assert client.delete_jobs(queue, PENDING, bodyRegexToMatch=pattern) == len(matching)
    left = client.lookup(*descriptors, body=True)
    assert {info.body for info in left.values()} == set(bodies) - matching


@one_engine
@pytest.mark.parametrize("pattern", ["(", "[a", "a**", r"(a)\1", "(?=a)b", "(?<name>a", "x{1001}"])
def test_bad_pattern(client: Client, queue, pattern):
    client.enqueue(queue, b"aab")

    for call in (client.count, client.scan, client.delete_jobs):
        with pytest.raises(Refused, match=r"^UNKNOWN: invalid request: "):
            call(queue, PENDING, bodyRegexToMatch=pattern)

    assert client.count(queue) == 1


@one_engine
def test_pattern_that_others_choke_on(client: Client, queue):
    client.enqueue(queue, CHOKING_BODY)

    assert client.count(queue, bodyRegexToMatch=CHOKING_PATTERN) == 0
    assert client.scan(queue, bodyRegexToMatch=CHOKING_PATTERN).scannedJobs == []
    assert client.delete_jobs(queue, PENDING, bodyRegexToMatch=CHOKING_PATTERN) == 0


@pytest.mark.parametrize(
    "pattern", ["'; DROP TABLE jobs; --", '" OR 1=1 --', "%", "_", "x' OR 'x'='x", "\0"]
)
def test_pattern_is_never_code(client: Client, queue, pattern):
    client.enqueue(queue, b"body")

    assert client.count(queue, bodyRegexToMatch=pattern) == 0
    assert client.delete_jobs(queue, PENDING, bodyRegexToMatch=pattern) == 0
    assert client.count(queue) == 1


@one_engine
def test_scan_goes_on_where_the_last_match_was(client: Client, queue):
    now_ms = int(time.time() * 1000)
    client.enqueue_on_every_shard(
        queue,
        lambda n: client.job(b"even" if n % 2 == 0 else b"odd", runAfterTimestampMillis=now_ms - n),
        each=6,
    )
    expected = client.scan(queue, bodyRegexToMatch="even", limit=1000).scannedJobs

    scanned, continuation = [], "0"
    while continuation != "-1":
        answer = client.scan(queue, bodyRegexToMatch="even", limit=2, continuation=continuation)
        scanned += answer.scannedJobs
        continuation = answer.continuation

    assert scanned == expected
    assert len(expected) == client.count(queue, bodyRegexToMatch="even") >= 9


def test_delete_up_to_a_limit(client: Client, queue):
    client.enqueue_on_every_shard(queue, lambda n: b"drop" if n % 2 == 0 else b"keep", each=6)
    kept = client.count(queue, bodyRegexToMatch="keep")
    matching = client.count(queue, bodyRegexToMatch="drop")

    assert client.delete_jobs(queue, PENDING, bodyRegexToMatch="drop", limit=5) == 5
    assert client.delete_jobs(queue, PENDING, bodyRegexToMatch="drop") == matching - 5
    assert client.count(queue) == kept


def test_delete_of_a_state_and_priority(client: Client, queue):
    client.enqueue(queue, *(client.job(b"drop", priority=p) for p in (1, 1, 2)))
    (done,) = client.dequeue(queue)
    client.ack(queue, succeeded=[done])

    assert client.delete_jobs(queue, PENDING, bodyRegexToMatch="drop", priority=2) == 1
    assert client.delete_jobs(queue, SUCCEEDED, bodyRegexToMatch="drop") == 1
    assert client.count(queue) == 1
