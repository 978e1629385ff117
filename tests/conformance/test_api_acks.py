"""SPEC section 3: ackDequeuedJobs.

Unknown queue: test_api_queues.py; acks of a shard that is down: test_api_shard_down.py.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.conformance.api import (
    FAILED,
    IN_PROGRESS,
    PENDING,
    SUCCEEDED,
    Backend,
    Client,
    Deployment,
    Refused,
    one_engine,
)
from tests.conftest import WaitUntil

pytestmark = pytest.mark.service

OTHER_CLAIM = "conformance:9010:1700000000000:conformance:host1:1"


@pytest.fixture
def descriptor(client: Client, queue) -> str:
    """Of a job that is IN_PROGRESS, with two attempts."""
    (made,) = client.enqueue(queue, client.job(b"job", customStatus="new"))
    assert client.dequeue(queue).keys() == {made}
    return made


def test_succeeded(client: Client, queue, descriptor):
    claim = client.info(descriptor).claimDescriptor

    client.ack(queue, succeeded=[descriptor])

    info = client.info(descriptor)
    assert info.jobState == SUCCEEDED
    assert info.claimDescriptor == claim
    assert (info.attemptsAllowed, info.attemptsRemaining, info.customStatus) == (2, 2, "new")
    assert info.updatedAtTimestampMillis >= info.createdAtTimestampMillis


def test_failed_with_attempts_left(client: Client, queue, descriptor):
    before = int(time.time() * 1000)

    client.ack(queue, failed=[client.ack_info(descriptor, retryDelayMillis=100_000)])

    after = int(time.time() * 1000) + 1
    info = client.info(descriptor)
    assert info.jobState == PENDING
    assert (info.attemptsAllowed, info.attemptsRemaining) == (2, 1)
    assert info.claimDescriptor is None
    assert before + 100_000 <= info.runAfterTimestampMillis <= after + 100_000
    assert client.dequeue(queue) == {}


def test_failed_for_good(client: Client, queue, descriptor):
    client.ack(queue, failed=[descriptor])
    (last,) = client.dequeue(queue).values()

    client.ack(queue, failed=[client.ack_info(descriptor, retryDelayMillis=1)])

    info = client.info(descriptor)
    assert info.jobState == FAILED
    assert (info.attemptsAllowed, info.attemptsRemaining) == (2, 0)
    assert info.claimDescriptor == last.claim
    assert client.dequeue(queue) == {}


def test_custom_status_is_appended_to(client: Client, queue, descriptor, backend: Backend):
    client.ack(queue, failed=[client.ack_info(descriptor, appendCustomStatus=" once")])
    once = client.info(descriptor).customStatus
    client.dequeue(queue)
    client.ack(queue, succeeded=[client.ack_info(descriptor, appendCustomStatus=" done")])

    done = client.info(descriptor).customStatus

    expected = (" once", " done") if backend.ack_replaces_status else ("new once", "new once done")
    assert (once, done) == expected


@pytest.mark.parametrize("character", ["x", "é", "字", "🚀"])
def test_custom_status_is_cut_by_characters(
    client: Client, queue, descriptor, backend: Backend, character
):
    longest = backend.status_characters
    addition = character * (longest + 1)

    client.ack(queue, succeeded=[client.ack_info(descriptor, appendCustomStatus=addition)])

    whole = addition if backend.ack_replaces_status else "new" + addition
    assert client.info(descriptor).customStatus == whole[:longest]


def test_repeated_acks_change_nothing_and_are_counted(
    service: Deployment, client: Client, queue, descriptor, wait_until: WaitUntil
):
    client.ack(queue, succeeded=[client.ack_info(descriptor, appendCustomStatus="!")])
    first = client.info(descriptor)

    client.ack(queue, succeeded=[client.ack_info(descriptor, appendCustomStatus="!")])
    client.ack(queue, failed=[client.ack_info(descriptor, appendCustomStatus="?")])

    assert client.info(descriptor) == first
    wait_until(lambda: service.counter(f"{queue}_ack_noop") == 2)


def test_one_job_twice_in_a_call_is_acked_once(client: Client, queue, descriptor):
    client.ack(queue, failed=[descriptor, descriptor])
    assert client.info(descriptor).attemptsRemaining == 1
    client.dequeue(queue)

    client.ack(queue, succeeded=[descriptor], failed=[descriptor])

    assert client.info(descriptor).jobState == SUCCEEDED


def test_acks_of_jobs_that_are_not_in_progress(
    service: Deployment, client: Client, queue, wait_until: WaitUntil
):
    (pending,) = client.enqueue(queue, b"job")
    unknown = pending.rpartition(":")[0] + ":999999999999"
    before = client.info(pending)

    client.ack(queue, succeeded=[pending, unknown], failed=[pending, unknown])

    assert client.info(pending) == before
    assert client.lookup(unknown) == {}
    wait_until(lambda: service.counter(f"{queue}_ack_noop") == 4)


@pytest.mark.parametrize("outcome", ["succeeded", "failed"])
def test_given_claim_that_holds(client: Client, queue, descriptor, outcome):
    claim = client.info(descriptor).claimDescriptor
    info = client.ack_info(descriptor, claimDescriptor=claim)

    client.ack(queue, **{outcome: [info]})

    assert client.info(descriptor).jobState == (SUCCEEDED if outcome == "succeeded" else PENDING)


@pytest.mark.parametrize("outcome", ["succeeded", "failed"])
def test_given_claim_that_holds_no_longer(
    service: Deployment, client: Client, queue, descriptor, wait_until: WaitUntil, outcome
):
    lost = client.info(descriptor).claimDescriptor
    client.checkpoint(queue, client.checkpoint_of(descriptor, moveToPending=True))
    client.dequeue(queue)
    before = client.info(descriptor)

    for claim in (lost, OTHER_CLAIM, ""):
        client.ack(queue, **{outcome: [client.ack_info(descriptor, claimDescriptor=claim)]})

    assert before.jobState == IN_PROGRESS
    assert client.info(descriptor) == before
    wait_until(lambda: service.counter(f"{queue}_ack_noop") == 3)


def test_several_shards(client: Client, queue):
    by_shard = client.enqueue_on_every_shard(queue, each=4)
    taken = list(client.dequeue(queue, 1000))

    client.ack(queue, succeeded=taken[::2], failed=taken[1::2])

    infos = client.lookup(*taken)
    assert len(infos) == sum(map(len, by_shard.values()))
    assert [infos[d].jobState for d in taken[::2]] == [SUCCEEDED] * len(taken[::2])
    assert [infos[d].attemptsRemaining for d in taken[1::2]] == [1] * len(taken[1::2])


@one_engine
@pytest.mark.parametrize(
    "bad",
    [
        "",
        "nonsense",
        "other_queue:s1:p1:1",
        "{queue}:s99:p1:1",
        "{queue}:s1:p1",
        "{queue}:s1:p1:",
        "{queue}:s1:p1:1:2",
        "{queue}:1:1:1",
        "{queue}:s1:p1:-1",
        "{queue}:s1:px:1",
        "{queue}:s1:p1:1 OR 1=1",
    ],
)
def test_bad_descriptors_fail_alone(client: Client, queue, bad):
    bad = bad.format(queue=queue)
    by_shard = client.enqueue_on_every_shard(queue)
    taken = list(client.dequeue(queue, 1000))

    with pytest.raises(Refused) as refused:
        client.ack(queue, succeeded=[bad, *taken[1:]], failed=[taken[0], bad])

    assert refused.value.code == "UNKNOWN"
    assert refused.value.message.startswith("invalid request: ")
    assert repr(bad) in refused.value.message
    assert client.info(taken[0]).attemptsRemaining == 1
    assert {info.jobState for info in client.lookup(*taken[1:]).values()} == {SUCCEEDED}
    assert len(taken) == sum(map(len, by_shard.values()))


@one_engine
@pytest.mark.parametrize(("length", "named"), [(9, 100), (300, 80)])
def test_bad_descriptors_are_named_as_far_as_a_message_holds(client: Client, queue, length, named):
    bad = [f"{number:03}".ljust(length, "x") for number in range(100)]

    with pytest.raises(Refused) as refused:
        client.ack(queue, bad)

    message = refused.value.message
    assert [name for name in bad if repr(name[:200]) in message] == bad[:named]
    assert (f" and {100 - named} more; " in message) == (named < 100)
    assert len(message) < 17_000


def test_one_that_is_no_number_fails_alone_among_others_of_its_length(client: Client, queue):
    (good,) = client.enqueue(queue, b"x")
    client.dequeue(queue, 1)
    head, _, number = good.rpartition(":")
    bad = f"{head}:{'x' * len(number)}"

    with pytest.raises(Refused, match=f"invalid request: .*{bad}"):
        client.ack(queue, succeeded=[good, bad])

    assert client.info(good).jobState == SUCCEEDED


@one_engine
def test_bad_retry_delay_fails_alone(client: Client, queue):
    good, bad = client.enqueue(queue, b"good", b"bad")
    client.dequeue(queue, 2)

    with pytest.raises(Refused, match=r"^UNKNOWN: invalid request: .*retryDelayMillis"):
        client.ack(queue, failed=[good, client.ack_info(bad, retryDelayMillis=-1)])

    assert client.info(good).jobState == PENDING
    assert client.info(bad).jobState == IN_PROGRESS


@one_engine
def test_empty_ack(client: Client, queue):
    client.ack(queue)


# --- ackJobs: the same, and what became of each ---------------------------------------------


def test_outcomes_come_in_the_order_of_the_acks(client: Client, queue):
    made = [descriptor for n in range(6) for descriptor in client.enqueue(queue, b"%d" % n)]
    claims = {name: job.claim for name, job in client.dequeue(queue, 6).items()}
    client.ack(queue, succeeded=made[1:2], failed=made[4:5])

    succeeded, failed = client.ack_jobs(
        queue,
        [client.ack_info(one, claimDescriptor=claims[one]) for one in made[:3]],
        [
            client.ack_info(made[3], claimDescriptor=OTHER_CLAIM),
            client.ack_info(made[4], claimDescriptor=claims[made[4]]),
            client.ack_info(made[5]),
        ],
    )

    assert (succeeded, failed) == ([True, False, True], [False, False, True])
    states = [client.info(one).jobState for one in made]
    assert states == [SUCCEEDED, SUCCEEDED, SUCCEEDED, IN_PROGRESS, PENDING, PENDING]


def test_a_failure_that_is_not_retryable_is_for_good(client: Client, queue, descriptor):
    _, failed = client.ack_jobs(
        queue, failed=[client.ack_info(descriptor, appendCustomStatus="no", retryable=False)]
    )

    info = client.info(descriptor)
    assert failed == [True]
    assert (info.jobState, info.attemptsAllowed, info.attemptsRemaining) == (FAILED, 2, 0)
    assert info.customStatus.endswith("no")


@one_engine
def test_a_job_is_named_once(client: Client, queue, descriptor):
    with pytest.raises(Refused, match="invalid request: ackJobs names a job twice"):
        client.ack_jobs(queue, [descriptor], [descriptor])

    assert client.info(descriptor).jobState == IN_PROGRESS


def test_callers_who_end_one_job_see_one_success(service: Deployment, queue, descriptor):
    with ThreadPoolExecutor(8) as pool:
        outcomes = list(pool.map(lambda _: _ack_once(service, queue, descriptor), range(8)))

    assert sorted(outcomes) == [False] * 7 + [True]


def _ack_once(service: Deployment, queue: str, descriptor: str) -> bool:
    with service.client() as own:
        [[outcome], _] = own.ack_jobs(queue, [descriptor])
    return bool(outcome)


@one_engine
def test_bad_descriptors_fail_behind_the_others(client: Client, queue, descriptor):
    with pytest.raises(Refused, match=r"nonsense.*rubbish"):
        client.ack_jobs(queue, [descriptor, "nonsense", "rubbish"])

    assert client.info(descriptor).jobState == SUCCEEDED
