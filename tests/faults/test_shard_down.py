"""A shard that is down costs its own jobs only, and everything that needs it names it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest

from pinlaterd.client import ClaimedJob, Client, JobState
from pinlaterd.errors import NoHealthyShards, OutcomeUnknown, ShardConnectionFailed
from tests.deployment import Deployment
from tests.faults.conftest import PASSWORD
from tests.faults.load import Load, shards_of

pytestmark = pytest.mark.service

SHARDS = ("1", "2", "3")
JOBS_EACH = 5


@pytest.fixture
def client(deployment: Deployment) -> Iterator[Client]:
    with deployment.client() as client:
        yield client


@pytest.fixture
def on_every_shard(client: Client, queue: str) -> dict[str, list[str]]:
    """At least JOBS_EACH pending jobs on every shard, as descriptors by shard."""
    found: dict[str, list[str]] = {name: [] for name in SHARDS}
    while min(map(len, found.values())) < JOBS_EACH:
        [descriptor] = client.enqueue(queue, [b"x"])
        (shard,) = shards_of([descriptor])
        found[shard].append(descriptor)
    return found


@pytest.fixture
def claimed_on_shard_1(
    client: Client, queue: str, on_every_shard: dict[str, list[str]]
) -> list[ClaimedJob]:
    """All jobs are claimed; these are shard 1's."""
    count = sum(map(len, on_every_shard.values()))
    jobs = client.dequeue(queue, limit=count)
    assert len(jobs) == count
    return [job for job in jobs if job.descriptor in on_every_shard["1"]]


@pytest.fixture
def shard_1_is_down(deployment: Deployment) -> Iterator[None]:
    deployment.supervisorctl("stop", "shard-1")
    yield
    if "shard-1" not in deployment.pids():
        deployment.supervisorctl("start", "shard-1")
    deployment.wait_until_serving()


def test_enqueues_go_elsewhere_and_dequeues_skip_it(
    client: Client, queue: str, on_every_shard, shard_1_is_down
):
    assert shards_of(client.enqueue(queue, [b"y"])[0] for _ in range(50)) == {"2", "3"}

    claimed = client.dequeue(queue, limit=1000)

    expected = 50 + len(on_every_shard["2"]) + len(on_every_shard["3"])
    assert len(claimed) == expected
    assert shards_of(job.descriptor for job in claimed) == {"2", "3"}


def test_acks_to_it_fail_and_can_be_repeated(
    deployment: Deployment, client: Client, queue: str, claimed_on_shard_1, shard_1_is_down
):
    descriptors = [job.descriptor for job in claimed_on_shard_1]
    with pytest.raises(ShardConnectionFailed, match="shard 1"):
        client.ack(queue, succeeded=claimed_on_shard_1)
    with pytest.raises(ShardConnectionFailed, match="shard 1"):
        client.lookup(descriptors)

    deployment.supervisorctl("start", "shard-1")
    deployment.wait_until_serving()
    client.ack(queue, succeeded=claimed_on_shard_1)
    client.ack(queue, succeeded=claimed_on_shard_1)

    states = {record.state for record in client.lookup(descriptors).values()}
    assert states == {JobState.SUCCEEDED}


def test_the_acks_of_healthy_shards_are_carried_out(
    client: Client, queue: str, on_every_shard, deployment: Deployment
):
    jobs = client.dequeue(queue, limit=1000)
    assert {job.descriptor for job in jobs} == set().union(*on_every_shard.values())
    deployment.supervisorctl("stop", "shard-1")
    try:
        with pytest.raises(ShardConnectionFailed, match="shard 1"):
            client.ack(queue, succeeded=jobs)
        healthy = on_every_shard["2"] + on_every_shard["3"]
        states = {record.state for record in client.lookup(healthy).values()}
    finally:
        deployment.supervisorctl("start", "shard-1")

    assert states == {JobState.SUCCEEDED}


def test_a_dequeue_whose_acks_fail_claims_nothing(
    client: Client, queue: str, claimed_on_shard_1, shard_1_is_down
):
    client.enqueue(queue, [b"y"])

    with pytest.raises(ShardConnectionFailed, match="shard 1"):
        client.dequeue(queue, limit=10, succeeded=claimed_on_shard_1)

    assert len(client.dequeue(queue, limit=10)) == 1


def test_calls_over_all_shards_name_it(client: Client, queue: str, shard_1_is_down):
    calls: list[Callable[[], object]] = [
        partial(client.count, queue, JobState.PENDING),
        lambda: list(client.scan(queue, JobState.PENDING)),
        partial(client.retry_failed, queue),
        partial(client.delete_jobs, queue, JobState.PENDING),
        partial(client.delete_queue, queue, password=PASSWORD),
    ]
    for call in calls:
        with pytest.raises(ShardConnectionFailed, match="shard 1"):
            call()

    assert queue in client.queue_names()


def test_a_queue_made_meanwhile_exists_there_after_its_return(
    deployment: Deployment, client: Client, queue: str, shard_1_is_down, wait_until
):
    made = f"{queue}_made"
    client.create_queue(made)
    # All answers come from the other two from here on, then from shard 1 alone.
    deployment.supervisorctl("start", "shard-1")
    deployment.wait_until_serving()
    deployment.supervisorctl("stop", "shard-2", "shard-3")
    try:
        [descriptor] = client.enqueue(made, [b"x"])
        names = client.queue_names()
    finally:
        deployment.supervisorctl("start", "shard-2", "shard-3")

    assert shards_of([descriptor]) == {"1"}
    assert made in names


def test_with_no_shard_at_all_nothing_is_stored(deployment: Deployment, client: Client, queue: str):
    everyone = ["shard-1", "shard-2", "shard-3"]
    deployment.supervisorctl("stop", *everyone)
    try:
        with pytest.raises(NoHealthyShards):
            client.enqueue(queue, [b"x"])
        with pytest.raises(NoHealthyShards):
            client.dequeue(queue, limit=1)
    finally:
        deployment.supervisorctl("start", *everyone)
    deployment.wait_until_serving()

    assert client.dequeue(queue, limit=1) == []


@pytest.mark.parametrize("program", ["shard-1", "router"])
def test_a_restart_by_supervisorctl_finishes_what_is_in_hand(
    deployment: Deployment, load: Load, program, wait_until
):
    with load.running():
        wait_until(partial(load.has_progressed, since=0))

        deployment.supervisorctl("restart", program)

        deployment.wait_until_serving()
        wait_until(partial(load.has_progressed, since=load.progress()))

    load.check()
    # A clean end leaves no call half done, nor a claim that nobody got.
    unknown = [e for e in load.errors if isinstance(e, OutcomeUnknown) or "not known" in str(e)]
    assert unknown == []
    with deployment.client() as client:
        assert client.count(load.queue, JobState.IN_PROGRESS) == 0
