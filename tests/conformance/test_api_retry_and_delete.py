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


# --- jobs that are chosen ---------------------------------------------------------------------


def test_chosen_jobs_are_retried_and_deleted_whatever_their_shard_and_priority(client, queue):
    by_shard = client.enqueue_on_every_shard(
        queue, lambda n: client.job(b"", priority=1 + n % 3, numAttemptsAllowed=1), each=2
    )
    descriptors = [descriptor for each in by_shard.values() for descriptor in each]
    client.ack(queue, failed=list(client.dequeue(queue, 1000)))
    running, *chosen = descriptors
    client.retry_failed(queue, jobDescriptors=[running], priority=0)
    client.dequeue(queue)
    chosen, left = chosen[::2], [running, *chosen[1::2]]

    for dry_run in (True, False):
        named = {"jobDescriptors": [*chosen, running], "priority": 0, "dryRun": dry_run}
        assert client.retry_failed(queue, **named) == len(chosen)
        assert client.count(queue) == (0 if dry_run else len(chosen))
    for dry_run in (True, False):
        named = {"jobDescriptors": descriptors, "priority": 0, "dryRun": dry_run}
        assert client.delete_jobs(queue, PENDING, **named) == len(chosen)
        assert client.lookup(*descriptors).keys() == set(descriptors if dry_run else left)
    assert client.dequeue(queue, 1000) == {}


def test_what_fails_meanwhile_stays(client: Client, queue, wait_until: WaitUntil):
    early, late = client.fail_for_good(queue, *[client.job(b"", numAttemptsAllowed=1)] * 2)
    wait_until(partial(is_past, client.info(late).updatedAtTimestampMillis + 1))
    cut_off_ms = int(time.time() * 1000)
    client.retry_failed(queue, jobDescriptors=[late])
    client.ack(queue, failed=list(client.dequeue(queue)))

    for named in ({}, {"jobDescriptors": [early, late]}):
        fields = {"endedBeforeMillis": cut_off_ms, "dryRun": True, **named}
        assert client.retry_failed(queue, **fields) == 1
    assert client.retry_failed(queue, endedBeforeMillis=cut_off_ms) == 1
    assert client.delete_jobs(queue, FAILED, endedBeforeMillis=cut_off_ms) == 0
    assert client.info(late).jobState == FAILED


def test_jobs_are_chosen_by_what_their_status_says(client: Client, queue):
    client.enqueue_on_every_shard(queue, lambda _: client.job(b"", numAttemptsAllowed=1), each=3)
    failed = list(client.dequeue(queue, 1000))
    for number, job in enumerate(failed):
        says = f"Timeout: smtp{number} is away" if number % 2 else "KeyError: 'a' (a.py:12 in f)"
        client.ack(queue, failed=[client.ack_info(job, appendCustomStatus=says)])
    away = len(failed) // 2

    chosen = {"message": "Timeout: smtp# is away", "priority": 0}
    assert client.retry_failed(queue, limit=2, dryRun=True, **chosen) == 2
    assert client.retry_failed(queue, limit=2, **chosen) == 2
    assert client.retry_failed(queue, **chosen) == away - 2
    assert client.count(queue) == away
    assert client.delete_jobs(queue, FAILED, statusRegexToMatch="^Timeout") == 0
    assert client.delete_jobs(queue, FAILED, place="a.py:12 in f", worker="nobody") == 0
    assert client.delete_jobs(queue, FAILED, place="a.py:12 in f") == len(failed) - away
    assert client.count(queue, FAILED) == 0


def test_retries_are_spread(client: Client, queue):
    client.enqueue_on_every_shard(queue, lambda _: client.job(b"", numAttemptsAllowed=1), each=3)
    failed = list(client.dequeue(queue, 1000))
    client.ack(queue, failed=failed)
    begin_ms = int(time.time() * 1000) + 100_000

    assert client.retry_failed(
        queue, jobDescriptors=failed, runAfterTimestampMillis=begin_ms, spreadMillis=60_000
    ) == len(failed)

    times = [info.runAfterTimestampMillis - begin_ms for info in client.lookup(*failed).values()]
    assert min(times) == 0
    # Each shard spreads its own over the whole time.
    assert 40_000 <= max(times) < 60_000
    assert len({*times}) >= 3


@one_engine
@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"jobDescriptors": ["nonsense"]}, "nonsense"),
        ({"jobDescriptors": ["elsewhere:s1:p1:1"]}, "elsewhere"),
        ({"endedBeforeMillis": 1, "priority": 4}, "PRIORITY_NOT_SUPPORTED"),
        ({"jobDescriptors": [], "bodyRegexToMatch": "x"}, "jobDescriptors excludes"),
        ({"bodyRegexToMatch": "("}, "RE2"),
    ],
)
def test_mistakes_of_a_choice_change_nothing(client: Client, queue, fields, says):
    [job] = client.fail_for_good(queue, b"job")
    named = fields.get("jobDescriptors")
    if named is not None:
        fields = {**fields, "jobDescriptors": [job, *named]}

    with pytest.raises(Refused, match=says):
        client.retry_failed(queue, **fields)
    with pytest.raises(Refused, match=says):
        client.delete_jobs(queue, FAILED, **fields)

    assert client.count(queue, FAILED) == 1


@one_engine
def test_only_jobs_that_have_ended_have_a_time_of_their_end(client: Client, queue):
    with pytest.raises(Refused, match="endedBeforeMillis"):
        client.delete_jobs(queue, PENDING, endedBeforeMillis=1)


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
