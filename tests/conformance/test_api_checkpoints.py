"""SPEC section 3: checkpointJobs."""

from __future__ import annotations

import time

import pytest

from tests.conformance.api import (
    FAILED,
    IN_PROGRESS,
    MIB,
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

# Who claims, and who is not the same.
OTHER_SOURCES = [
    ("web2", "web"),
    ("web", "web2"),
    ("web", "eb"),
    ("web", "w_b"),
    ("web", "%"),
    ("web", "WEB"),
    ("web:host1", "web"),
    ("web:host1", "host1"),
    ("web:host1", "web:host"),
    ("web", ""),
]
OTHER_CLAIM = "conformance:9010:1700000000000:conformance:host1:1"


@pytest.fixture
def descriptor(client: Client, queue) -> str:
    """Of a job that is IN_PROGRESS, claimed by `client`."""
    (made,) = client.enqueue(queue, client.job(b"job", customStatus="old"))
    assert client.dequeue(queue).keys() == {made}
    return made


def test_nothing_given(client: Client, queue, descriptor):
    before = client.info(descriptor, body=True)
    earliest = int(time.time() * 1000)

    client.checkpoint(queue, client.checkpoint_of(descriptor))

    after = client.info(descriptor, body=True)
    assert earliest <= after.runAfterTimestampMillis <= int(time.time() * 1000) + 1
    for name in (
        "jobState", "attemptsAllowed", "attemptsRemaining", "customStatus", "claimDescriptor",
        "createdAtTimestampMillis", "body",
    ):  # fmt: skip
        assert getattr(after, name) == getattr(before, name), name


def test_run_after(client: Client, queue, descriptor):
    run_after_ms = int(time.time() * 1000) + 1_000_000

    client.checkpoint(queue, client.checkpoint_of(descriptor, runAfterTimestampMillis=run_after_ms))

    info = client.info(descriptor)
    assert (info.jobState, info.runAfterTimestampMillis) == (IN_PROGRESS, run_after_ms)


def test_new_body(client: Client, queue, descriptor):
    client.checkpoint(queue, client.checkpoint_of(descriptor, newBody="half done"))
    assert client.info(descriptor, body=True).body == b"half done"

    client.ack(queue, failed=[descriptor])

    assert client.dequeue(queue)[descriptor].body == b"half done"


def test_empty_new_body(client: Client, queue, descriptor):
    client.checkpoint(queue, client.checkpoint_of(descriptor, newBody=""))

    assert client.info(descriptor, body=True).body == b""


def test_attempts(client: Client, queue, descriptor):
    client.checkpoint(queue, client.checkpoint_of(descriptor, numOfAttemptsAllowed=7))

    info = client.info(descriptor)
    assert (info.attemptsAllowed, info.attemptsRemaining) == (7, 7)


def test_back_to_pending(client: Client, queue, descriptor):
    client.checkpoint(
        queue, client.checkpoint_of(descriptor, moveToPending=True, newBody="second part")
    )

    info = client.info(descriptor)
    assert info.jobState == PENDING
    assert info.claimDescriptor is None
    assert info.attemptsRemaining == 2
    assert client.dequeue(queue)[descriptor].body == b"second part"


def test_back_to_pending_for_later(client: Client, queue, descriptor):
    later_ms = int(time.time() * 1000) + 1_000_000

    client.checkpoint(
        queue,
        client.checkpoint_of(descriptor, moveToPending=True, runAfterTimestampMillis=later_ms),
    )

    assert client.info(descriptor).runAfterTimestampMillis == later_ms
    assert client.dequeue(queue) == {}
    assert client.count(queue, PENDING, countFutureJobs=True) == 1


def test_custom_status_is_put_in_front(client: Client, queue, descriptor):
    for text in ("one ", "two "):
        client.checkpoint(queue, client.checkpoint_of(descriptor, prependCustomStatus=text))

    assert client.info(descriptor).customStatus == "two one old"


@pytest.mark.parametrize("character", ["x", "é", "字", "🚀"])
def test_custom_status_is_cut_at_the_end(
    client: Client, queue, descriptor, backend: Backend, character
):
    longest = backend.status_characters
    for length in (longest - 2, longest + 1):
        text = character * length
        before = client.info(descriptor).customStatus
        client.checkpoint(queue, client.checkpoint_of(descriptor, prependCustomStatus=text))

        assert client.info(descriptor).customStatus == (text + before)[:longest]


def test_other_source_changes_nothing(
    service: Deployment, client: Client, queue, wait_until: WaitUntil
):
    for claimer, other in OTHER_SOURCES:
        (descriptor,) = client.enqueue(queue, b"job")
        with service.client(source=claimer) as worker, service.client(source=other) as stranger:
            worker.dequeue(queue)
            before = client.info(descriptor, body=True)

            stranger.checkpoint(
                queue, client.checkpoint_of(descriptor, newBody="stolen", moveToPending=True)
            )

        assert client.info(descriptor, body=True) == before, (claimer, other)
    wait_until(lambda: service.counter(f"{queue}_checkpoint_noop") == len(OTHER_SOURCES))


@pytest.mark.parametrize("source", ["web", "web:host1", "a:b:c:d:e", "größe", "50%_o'ff", ""])
def test_same_source_from_another_connection(service: Deployment, client: Client, queue, source):
    (descriptor,) = client.enqueue(queue, b"job")
    with service.client(source=source) as worker:
        worker.dequeue(queue)
    with service.client(source=source) as same:
        same.checkpoint(queue, client.checkpoint_of(descriptor, newBody="mine"))

    assert client.info(descriptor, body=True).body == b"mine"


def test_given_claim_that_holds(service: Deployment, client: Client, queue, descriptor):
    claim = client.info(descriptor).claimDescriptor
    with service.client(source="another") as other:
        other.checkpoint(
            queue, client.checkpoint_of(descriptor, newBody="new", claimDescriptor=claim)
        )

    assert client.info(descriptor, body=True).body == b"new"


def test_given_claim_that_holds_no_longer(
    service: Deployment, client: Client, queue, descriptor, wait_until: WaitUntil
):
    lost = client.info(descriptor).claimDescriptor
    client.checkpoint(queue, client.checkpoint_of(descriptor, moveToPending=True))
    client.dequeue(queue)
    before = client.info(descriptor, body=True)

    for claim in (lost, OTHER_CLAIM, ""):
        client.checkpoint(
            queue, client.checkpoint_of(descriptor, newBody="late", claimDescriptor=claim)
        )

    assert client.info(descriptor, body=True) == before
    wait_until(lambda: service.counter(f"{queue}_checkpoint_noop") == 3)


def test_jobs_that_are_not_in_progress(
    service: Deployment, client: Client, queue, descriptor, wait_until: WaitUntil
):
    client.ack(queue, succeeded=[descriptor])
    (pending,) = client.enqueue(queue, b"pending")
    unknown = pending.rpartition(":")[0] + ":999999999999"
    before = client.lookup(descriptor, pending, body=True)

    client.checkpoint(
        queue,
        *(client.checkpoint_of(d, newBody="new") for d in (descriptor, pending, unknown)),
    )

    assert client.lookup(descriptor, pending, unknown, body=True) == before
    wait_until(lambda: service.counter(f"{queue}_checkpoint_noop") == 3)


def test_several_shards(client: Client, queue):
    client.enqueue_on_every_shard(queue, each=2)
    taken = client.dequeue(queue, 1000)

    client.checkpoint(queue, *(client.checkpoint_of(d, newBody=d) for d in taken))

    infos = client.lookup(*taken, body=True)
    assert {d: info.body.decode() for d, info in infos.items()} == {d: d for d in taken}


@one_engine
@pytest.mark.parametrize(
    "bad", ["", "nonsense", "other_queue:s1:p1:1", "{queue}:s99:p1:1", "{queue}:s1:p1:x"]
)
def test_bad_descriptors_fail_alone(client: Client, queue, bad):
    bad = bad.format(queue=queue)
    client.enqueue_on_every_shard(queue)
    taken = list(client.dequeue(queue, 1000))

    with pytest.raises(Refused) as refused:
        client.checkpoint(
            queue, *(client.checkpoint_of(d, newBody="new") for d in [taken[0], bad, *taken[1:]])
        )

    assert refused.value.code == "UNKNOWN"
    assert refused.value.message.startswith("invalid request: ")
    assert repr(bad) in refused.value.message
    assert {info.body for info in client.lookup(*taken, body=True).values()} == {b"new"}


@one_engine
@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"numOfAttemptsAllowed": 0}, "numOfAttemptsAllowed"),
        ({"runAfterTimestampMillis": -1}, "runAfterTimestampMillis"),
        ({"newBody": "x" * (MIB + 1)}, "newBody"),
    ],
)
def test_mistakes(client: Client, queue, descriptor, fields, says):
    with pytest.raises(Refused, match=f"^UNKNOWN: invalid request: .*{says}"):
        client.checkpoint(queue, client.checkpoint_of(descriptor, **fields))

    client.ack(queue, succeeded=[descriptor])
    assert client.info(descriptor, body=True).body == b"job"
    assert client.info(descriptor).jobState == SUCCEEDED


# --- applyCheckpoints: the same, and what became of each ------------------------------------


def test_outcomes_come_in_the_order_of_the_checkpoints(client: Client, queue):
    made = [one for n in range(5) for one in client.enqueue(queue, b"%d" % n)]
    claims = {name: job.claim for name, job in client.dequeue(queue, 5).items()}
    client.ack(queue, succeeded=made[1:2], failed=made[4:])

    applied = client.apply_checkpoints(
        queue,
        client.checkpoint_of(made[0], claimDescriptor=claims[made[0]], newBody="half"),
        client.checkpoint_of(made[1], claimDescriptor=claims[made[1]], newBody="late"),
        client.checkpoint_of(made[2], claimDescriptor=OTHER_CLAIM, newBody="not mine"),
        client.checkpoint_of(made[3], newBody="by source"),
        client.checkpoint_of(made[4], newBody="not claimed"),
    )

    assert applied == [True, False, False, True, False]
    bodies = [client.info(one, body=True).body for one in made]
    assert bodies == [b"half", b"1", b"2", b"by source", b"4"]


@one_engine
def test_a_job_is_checkpointed_once_a_call(client: Client, queue, descriptor):
    twice = [client.checkpoint_of(descriptor)] * 2

    with pytest.raises(Refused, match="invalid request: applyCheckpoints names a job twice"):
        client.apply_checkpoints(queue, *twice)


@one_engine
def test_bad_descriptors_of_checkpoints_fail_behind_the_others(client: Client, queue, descriptor):
    good = client.checkpoint_of(descriptor, newBody="half")
    bad = [client.checkpoint_of(name) for name in ("nonsense", "other nonsense")]

    with pytest.raises(Refused, match="other nonsense"):
        client.apply_checkpoints(queue, good, *bad)

    assert client.info(descriptor, body=True).body == b"half"


@one_engine
def test_jobs_that_can_not_be_there_are_not_the_same(client: Client, queue, descriptor):
    ids = [(1 << 63) + number for number in range(2)]
    absent = [f"{queue}:s1:p1:{local_id}" for local_id in ids]

    finishes = [client.finish_of(name, FAILED, 0) for name in absent]
    assert client.finish(queue, *finishes) == [1] * 2
    assert client.ack_jobs(queue, absent) == ([False] * 2, [])
    assert client.apply_checkpoints(queue, *map(client.checkpoint_of, absent)) == [False] * 2
