"""SPEC sections 1 and 3: dequeueJobs, and what a claim is.

Rate limits are section 5. Unknown queues: test_api_queues.py; maxWaitMillis, and claims that can't
be delivered: test_api_waiting.py; with a shard down: test_api_shard_down.py.
"""

from __future__ import annotations

import math
import re
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.conformance.api import (
    FAILED,
    IN_PROGRESS,
    KIB,
    MAX_RESPONSE_BYTES,
    PAUSED_QUEUE,
    PENDING,
    SHARDS,
    SUCCEEDED,
    Client,
    Deployment,
    Refused,
    one_engine,
    priority_of,
    shard_of,
)
from tests.conftest import WaitUntil

pytestmark = pytest.mark.service


def test_claimed_jobs(client: Client, queue):
    (descriptor,) = client.enqueue(queue, client.job(b"body", priority=2, numAttemptsAllowed=5))

    ((claimed_descriptor, claimed),) = client.dequeue(queue, 10).items()

    assert claimed_descriptor == descriptor
    assert (claimed.body, claimed.allowed, claimed.remaining) == (b"body", 5, 5)
    assert claimed.timeout_seconds == 600
    info = client.info(descriptor)
    assert info.jobState == IN_PROGRESS
    assert info.claimDescriptor == claimed.claim
    assert info.attemptsRemaining == 5
    assert client.dequeue(queue, 10) == {}


@pytest.mark.parametrize("limit", [1, 4, 9, 1000])
def test_limit(client: Client, queue, limit):
    for _ in range(3):
        client.enqueue(queue, *[b"job"] * 3)

    assert len(client.dequeue(queue, limit)) == min(limit, 9)


def test_claim_descriptors(service: Deployment, client: Client, queue):
    client.enqueue_on_every_shard(queue, each=3)
    with service.client(source="mailer:web7") as worker:
        claims = [job.claim for job in worker.dequeue(queue, 1000).values()]
    (again,) = client.enqueue(queue, b"claimed twice")
    for _ in range(2):
        claims.append(client.dequeue(queue)[again].claim)
        client.checkpoint(queue, client.checkpoint_of(again, moveToPending=True))

    form = rf"conformance:{service.port}:([0-9]{{13}}):(mailer:web7|conformance:host1):[0-9]+"
    for claim in claims:
        match = re.fullmatch(form, claim)
        assert match, claim
        assert int(match[1]) <= time.time() * 1000
    assert len(set(claims)) == len(claims)


def test_workers_never_share_a_job(service: Deployment, client: Client, queue):
    jobs = 400
    for _ in range(8):
        client.enqueue(queue, *[b"job"] * (jobs // 8))

    def work(_: int) -> list[str]:
        taken: list[str] = []
        with service.client() as worker:
            # A shard that a busy machine keeps silent for a second is passed over.
            while (claimed := worker.dequeue(queue, 7)) or worker.count(queue, PENDING):
                taken += claimed
        return taken

    with ThreadPoolExecutor(4) as workers:
        taken = [descriptor for share in workers.map(work, range(4)) for descriptor in share]

    assert len(taken) == len(set(taken)) == jobs


def test_scheduled_job_waits_for_its_time(client: Client, queue, wait_until: WaitUntil):
    due_ms = int(time.time() * 1000) + 300
    (later,) = client.enqueue(queue, client.job(b"later", runAfterTimestampMillis=due_ms))
    (far,) = client.enqueue(queue, client.job(b"far", runAfterTimestampMillis=due_ms + 10**9))
    claimed: dict[str, int] = {}

    def dequeued() -> bool:
        for descriptor in client.dequeue(queue, 10):
            claimed[descriptor] = int(time.time() * 1000)
        return bool(claimed)

    wait_until(dequeued)

    assert claimed.keys() == {later}
    assert claimed[later] >= due_ms
    assert client.info(far).jobState == PENDING


def test_higher_priorities_first(client: Client, queue):
    client.enqueue_on_every_shard(queue, lambda n: client.job(b"", priority=3 - n % 3), each=6)

    priorities: list[int] = []
    while taken := client.dequeue(queue, 4):
        # The answer is a map; what counts is which jobs leave together.
        priorities += sorted(map(priority_of, taken))

    assert len(priorities) >= 18
    assert priorities == sorted(priorities)


def test_one_job_of_priority_1_goes_before_many_of_priority_2(client: Client, queue):
    client.enqueue_on_every_shard(queue, lambda _: client.job(b"", priority=2), each=5)
    for limit in [1, 2, 3, 4] * 5:
        urgent = client.enqueue(queue, b"urgent")

        taken = client.dequeue(queue, limit)

        assert taken.keys() >= set(urgent)
        assert len(taken) == limit
        for descriptor in taken.keys() - set(urgent):
            client.checkpoint(queue, client.checkpoint_of(descriptor, moveToPending=True))


def test_earliest_run_after_first(client: Client, queue):
    now_ms = int(time.time() * 1000)
    offsets = [5, 3, 8, 1, 9, 2, 7, 4, 6, 0]
    by_shard = client.enqueue_on_every_shard(
        queue,
        lambda n: client.job(b"", runAfterTimestampMillis=now_ms - 1000 * (offsets[n % 10] + 1)),
        each=6,
    )
    jobs = {d: client.info(d).runAfterTimestampMillis for ds in by_shard.values() for d in ds}

    order: dict[str, list[int]] = {}
    while taken := client.dequeue(queue):
        (descriptor,) = taken
        order.setdefault(shard_of(descriptor), []).append(jobs[descriptor])

    assert sum(map(len, order.values())) == len(jobs)
    for times in order.values():
        assert times == sorted(times)


@one_engine
@pytest.mark.parametrize(
    ("coverage", "shards"), [(0.0001, 1), (0.34, 1), (0.5, 2), (0.67, 2), (0.9, 3), (1.0, 3)]
)
def test_coverage(client: Client, queue, coverage, shards):
    client.enqueue_on_every_shard(queue)

    for _ in range(5):
        seen = client.dequeue(queue, 1000, coverage=coverage, dryRun=True)
        assert len({shard_of(d) for d in seen}) == shards
    taken = client.dequeue(queue, 1000, coverage=coverage)
    assert len({shard_of(d) for d in taken}) == shards


@one_engine
def test_coverage_chooses_at_random(client: Client, queue):
    client.enqueue_on_every_shard(queue)

    # Some shard would be missing once in 10,000,000 runs.
    seen = {
        shard_of(descriptor)
        for _ in range(45)
        for descriptor in client.dequeue(queue, 1000, coverage=0.1, dryRun=True)
    }
    assert len(seen) == SHARDS


def test_dry_run_claims_nothing(client: Client, queue):
    by_shard = client.enqueue_on_every_shard(queue, lambda n: client.job(b"%d" % n, priority=2))
    descriptors = {d for on_shard in by_shard.values() for d in on_shard}

    for _ in range(2):
        seen = client.dequeue(queue, 1000, dryRun=True)
        assert seen.keys() == descriptors
        assert sorted(int(job.body) for job in seen.values()) == list(range(len(descriptors)))
        assert {(job.allowed, job.remaining) for job in seen.values()} == {(2, 2)}
        assert {job.claim for job in seen.values()} == {""}

    assert {info.jobState for info in client.lookup(*descriptors).values()} == {PENDING}


def test_dry_run_shows_the_best_within_its_limit(client: Client, queue):
    client.enqueue_on_every_shard(queue, lambda _: client.job(b"", priority=2), each=2)
    urgent = client.enqueue(queue, b"urgent")

    assert client.dequeue(queue, 1, dryRun=True).keys() == set(urgent)
    assert len(client.dequeue(queue, 3, dryRun=True)) == 3
    assert client.dequeue(queue, 1, dryRun=True, coverage=1.0).keys() == set(urgent)


def test_acks_go_first(client: Client, queue):
    """A job that fails with an attempt left is there for the dequeue of the same call."""
    (done, failed) = client.enqueue(queue, b"done", b"failed")
    client.dequeue(queue, 2)

    taken = client.dequeue(queue, 2, jobAckRequest=client.ack_request(queue, [done], [failed]))

    assert taken.keys() == {failed}
    assert taken[failed].remaining == 1
    assert client.info(done).jobState == SUCCEEDED


def test_acks_of_several_shards(client: Client, queue):
    by_shard = client.enqueue_on_every_shard(queue, each=2)
    taken = list(client.dequeue(queue, 1000))
    (more,) = client.enqueue(queue, b"more")

    next_taken = client.dequeue(queue, 10, jobAckRequest=client.ack_request(queue, taken))

    assert next_taken.keys() == {more}
    for on_shard in by_shard.values():
        assert {info.jobState for info in client.lookup(*on_shard).values()} == {SUCCEEDED}


def test_acks_are_carried_out_whatever_becomes_of_the_dequeue(client: Client, queue):
    descriptors = [client.enqueue(queue, b"job")[0] for _ in range(3)]
    client.dequeue(queue, 3)
    empty, dry, short = descriptors

    assert client.dequeue(queue, 5, jobAckRequest=client.ack_request(queue, [empty])) == {}
    assert (
        client.dequeue(queue, 5, dryRun=True, jobAckRequest=client.ack_request(queue, [dry])) == {}
    )
    (last,) = client.enqueue(queue, b"last")
    assert client.dequeue(
        queue, 5, coverage=1.0, jobAckRequest=client.ack_request(queue, [short])
    ).keys() == {last}

    assert {info.jobState for info in client.lookup(*descriptors).values()} == {SUCCEEDED}


@one_engine
@pytest.mark.parametrize(
    "bad", ["nonsense", "other_queue:s1:p1:1", "{queue}:s99:p1:1", "{queue}:s1:p1:x", ""]
)
def test_failed_ack_claims_nothing(client: Client, queue, bad):
    bad = bad.format(queue=queue)
    (done, failed) = client.enqueue(queue, b"done", client.job(b"failed", numAttemptsAllowed=1))
    client.dequeue(queue, 2)
    (waiting,) = client.enqueue(queue, b"waiting")
    acks = client.ack_request(queue, succeeded=[done, bad], failed=[failed])

    with pytest.raises(Refused) as refused:
        client.dequeue(queue, 10, jobAckRequest=acks)

    assert refused.value.code == "UNKNOWN"
    assert refused.value.message.startswith("invalid request: ")
    assert repr(bad) in refused.value.message
    states = [client.info(d).jobState for d in (done, failed, waiting)]
    assert states == [SUCCEEDED, FAILED, PENDING]


def test_the_last_job_is_always_found(service: Deployment, client: Client, queue):
    for number in range(40):
        (descriptor,) = client.enqueue(queue, client.job(b"", priority=1 + number % 3))
        with service.client() as worker:
            taken = worker.dequeue(queue, 1 + number % 5)
            assert taken.keys() == {descriptor}
            assert worker.dequeue(queue) == {}


def test_answer_stops_growing(client: Client, queue):
    body_bytes = 900 * KIB
    bodies = [bytes([number]) * body_bytes for number in range(4)]
    on_one_shard = client.enqueue(queue, *bodies)
    elsewhere = [client.enqueue(queue, body)[0] for body in bodies]
    taken: dict[str, bytes] = {}

    while claimed := client.dequeue(queue, 100):
        assert len(claimed) * body_bytes <= MAX_RESPONSE_BYTES
        for descriptor, job in claimed.items():
            assert descriptor not in taken
            assert (job.allowed, job.remaining) == (2, 2)
            taken[descriptor] = job.body

    assert taken.keys() == {*on_one_shard, *elsewhere}
    assert sorted(taken.values()) == sorted(bodies * 2)


def claimed_jobs(client: Client, queue: str, shards: int) -> list[str]:
    by_shard = client.enqueue_on_every_shard(queue)
    client.dequeue(queue, 1000)
    return [descriptor for on_shard in list(by_shard.values())[:shards] for descriptor in on_shard]


@pytest.mark.parametrize("shards", [1, SHARDS])
def test_acks_may_be_of_another_queue(client: Client, queue, new_queue, shards):
    acked = claimed_jobs(client, new_queue(), shards)
    acks = client.ack_request(acked[0].split(":")[0], acked)
    (descriptor,) = client.enqueue(queue, b"job")

    assert client.dequeue(queue, jobAckRequest=acks).keys() == {descriptor}

    assert {info.jobState for info in client.lookup(*acked).values()} == {SUCCEEDED}


@one_engine
@pytest.mark.parametrize("shards", [0, 1, SHARDS])
@pytest.mark.parametrize(
    ("limit", "fields", "says"),
    [
        (0, {}, "limit"),
        (-1, {"dryRun": True}, "limit"),
        (1, {"coverage": -0.5}, "coverage"),
        (1, {"coverage": 1.01}, "coverage"),
        (1, {"coverage": math.nan}, "coverage"),
        (1, {"coverage": math.inf}, "coverage"),
        (1, {"coverage": 0.0, "dryRun": True}, "coverage"),
        (1, {"maxWaitMillis": -1}, "maxWaitMillis"),
    ],
)
def test_an_invalid_dequeue_claims_nothing_and_its_acks_are_carried_out(
    client: Client, queue, shards, limit, fields, says
):
    acked = claimed_jobs(client, queue, shards)
    (waiting,) = client.enqueue(queue, b"waiting")

    with pytest.raises(Refused, match=f"^UNKNOWN: invalid request: .*{says}"):
        client.dequeue(queue, limit, jobAckRequest=client.ack_request(queue, acked), **fields)

    assert all(info.jobState == SUCCEEDED for info in client.lookup(*acked).values())
    assert client.info(waiting).jobState == PENDING


@one_engine
@pytest.mark.parametrize("shards", [1, SHARDS])
@pytest.mark.parametrize(
    ("refusing", "code"),
    [("no_such_queue", "QUEUE_NOT_FOUND"), (PAUSED_QUEUE, "DEQUEUE_RATE_LIMITED")],
)
def test_acks_of_a_refused_dequeue_are_carried_out(client: Client, queue, shards, refusing, code):
    client.create(PAUSED_QUEUE)
    acked = claimed_jobs(client, queue, shards)

    with pytest.raises(Refused, match=f"^{code}"):
        client.dequeue(refusing, 1, jobAckRequest=client.ack_request(queue, acked))

    assert {info.jobState for info in client.lookup(*acked).values()} == {SUCCEEDED}


@one_engine
def test_acks_of_an_unknown_queue_fail_and_nothing_is_claimed(client: Client, queue):
    (descriptor,) = client.enqueue(queue, b"job")
    acks = client.ack_request("no_such_queue", ["no_such_queue:s1:p1:1"])

    with pytest.raises(Refused, match=r"^QUEUE_NOT_FOUND: .*no_such_queue"):
        client.dequeue(queue, jobAckRequest=acks)

    assert client.info(descriptor).jobState == PENDING


@pytest.mark.parametrize("fields", [{}, {"maxWaitMillis": 10}, {"coverage": 1.0, "dryRun": False}])
def test_claims_last_as_long_as_the_dequeue_says(
    client: Client, queue, fields, wait_until: WaitUntil
):
    client.enqueue_on_every_shard(queue)

    lost = client.dequeue(queue, 1000, claimTimeoutMillis=1000, **fields)

    assert len({shard_of(descriptor) for descriptor in lost}) == SHARDS
    assert {job.timeout_seconds for job in lost.values()} == {1}
    wait_until(lambda: client.count(queue, PENDING) == len(lost))
    again = client.dequeue(queue, 1000)
    assert again.keys() == lost.keys()
    assert {job.remaining for job in again.values()} == {job.remaining - 1 for job in lost.values()}


def test_checkpoints_renew_claims_of_their_own_length(client: Client, queue, wait_until: WaitUntil):
    by_shard = client.enqueue_on_every_shard(queue)
    claimed = client.dequeue(queue, 1000, claimTimeoutMillis=1500)
    renewed = {on_shard[0] for on_shard in by_shard.values()}
    renewals = [
        client.checkpoint_of(job, claimDescriptor=claimed[job].claim) for job in sorted(renewed)
    ]

    def renew() -> bool:
        client.checkpoint(queue, *renewals)
        return client.count(queue, PENDING) == len(claimed) - len(renewed)

    wait_until(renew)

    infos = client.lookup(*renewed)
    assert {info.jobState for info in infos.values()} == {IN_PROGRESS}
