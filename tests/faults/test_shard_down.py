"""A shard that is down costs its own jobs only, and everything that needs it names it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import pytest

from pinlaterd.client import ClaimedJob, Client, JobState
from pinlaterd.errors import NoHealthyShards, OutcomeUnknown, ShardConnectionFailed
from tests.deployment import Deployment
from tests.faults.conftest import PASSWORD
from tests.faults.load import Load, shards_of

pytestmark = pytest.mark.service

SHARDS = ("1", "2", "3")
JOBS_EACH = 5


@pytest.fixture(scope="module")
def client(shared_deployment: Deployment) -> Iterator[Client]:
    shared_deployment.wait_until_serving()
    with shared_deployment.client() as client:
        yield client


def _fill(client: Client, queue: str) -> set[str]:
    """Pending jobs on every shard, JOBS_EACH at least."""
    client.create_queue(queue)
    found: dict[str, list[str]] = {name: [] for name in SHARDS}
    while min(map(len, found.values())) < JOBS_EACH:
        [descriptor] = client.enqueue(queue, [b"x"])
        (shard,) = shards_of([descriptor])
        found[shard].append(descriptor)
    return {descriptor for descriptors in found.values() for descriptor in descriptors}


def _claim_all(client: Client, queue: str) -> list[ClaimedJob]:
    stored = _fill(client, queue)
    jobs = client.dequeue(queue, limit=1000)
    assert {job.descriptor for job in jobs} == stored
    return jobs


def _states(client: Client, jobs: list[ClaimedJob]) -> set[JobState]:
    records = client.lookup(job.descriptor for job in jobs)
    assert len(records) == len(jobs)
    return {record.state for record in records.values()}


class _Before(NamedTuple):
    """What was there when shard 1 went down."""

    pending: set[str]  # in the queue "pending", on every shard
    claimed: list[ClaimedJob]  # of the queue "claimed", on every shard

    def claimed_on_1(self) -> list[ClaimedJob]:
        return [job for job in self.claimed if shards_of([job.descriptor]) == {"1"}]

    def claimed_elsewhere(self) -> list[ClaimedJob]:
        return [job for job in self.claimed if shards_of([job.descriptor]) != {"1"}]


@pytest.fixture(scope="class")
def before(shared_deployment: Deployment, client: Client) -> Iterator[_Before]:
    before = _Before(_fill(client, "pending"), _claim_all(client, "claimed"))
    shared_deployment.supervisorctl("stop", "shard-1")
    yield before
    shared_deployment.supervisorctl("start", "shard-1")
    shared_deployment.wait_until_serving()


class TestWhileItIsDown:
    def test_dequeues_skip_it(self, client: Client, before: _Before):
        claimed = {job.descriptor for job in client.dequeue("pending", limit=1000)}

        assert shards_of(before.pending - claimed) == {"1"}
        assert shards_of(claimed) == {"2", "3"}

    def test_enqueues_go_elsewhere(self, client: Client, before: _Before):
        descriptors: list[str] = []
        while len(descriptors) < 50 or len(shards_of(descriptors)) < 2:
            descriptors += client.enqueue("pending", [b"y"])
        assert shards_of(descriptors) == {"2", "3"}

    def test_its_acks_and_look_ups_fail(self, client: Client, before: _Before):
        mine = before.claimed_on_1()
        with pytest.raises(ShardConnectionFailed, match="shard 1"):
            client.ack("claimed", failed=mine)
        with pytest.raises(ShardConnectionFailed, match="shard 1"):
            client.lookup(job.descriptor for job in mine)

    def test_a_dequeue_whose_acks_fail_claims_nothing(self, client: Client, before: _Before):
        client.enqueue("claimed", [b"y"])

        with pytest.raises(ShardConnectionFailed, match="shard 1"):
            client.dequeue("claimed", limit=10, succeeded=before.claimed_on_1())

        assert len(client.dequeue("claimed", limit=10)) == 1

    def test_the_acks_of_healthy_shards_are_carried_out(self, client: Client, before: _Before):
        with pytest.raises(ShardConnectionFailed, match="shard 1"):
            client.ack("claimed", succeeded=before.claimed)

        assert _states(client, before.claimed_elsewhere()) == {JobState.SUCCEEDED}

    def test_calls_over_all_shards_name_it(self, client: Client, before: _Before):
        calls: list[Callable[[], object]] = [
            partial(client.count, "pending", JobState.PENDING),
            lambda: list(client.scan("pending", JobState.PENDING)),
            partial(client.retry_failed, "pending"),
            partial(client.delete_jobs, "pending", JobState.PENDING),
            partial(client.delete_queue, "pending", password=PASSWORD),
        ]
        for call in calls:
            with pytest.raises(ShardConnectionFailed, match="shard 1"):
                call()

        assert "pending" in client.queue_names()


@pytest.fixture(scope="class")
def acked_in_vain(shared_deployment: Deployment, client: Client) -> Iterator[list[ClaimedJob]]:
    """Shard 1 was down while these were acked, and while the queue "made" was made."""
    jobs = [job for job in _claim_all(client, "vain") if shards_of([job.descriptor]) == {"1"}]
    shared_deployment.supervisorctl("stop", "shard-1")
    with pytest.raises(ShardConnectionFailed):
        client.ack("vain", succeeded=jobs)
    client.create_queue("made")
    shared_deployment.supervisorctl("start", "shard-1")
    shared_deployment.wait_until_serving()
    yield jobs
    shared_deployment.supervisorctl("start", *(f"shard-{name}" for name in SHARDS))


class TestAfterItsReturn:
    def test_acks_can_be_repeated(self, client: Client, acked_in_vain: list[ClaimedJob]):
        assert _states(client, acked_in_vain) == {JobState.IN_PROGRESS}

        client.ack("vain", succeeded=acked_in_vain)
        client.ack("vain", succeeded=acked_in_vain)

        assert _states(client, acked_in_vain) == {JobState.SUCCEEDED}

    def test_it_has_the_queue_that_was_made_meanwhile(
        self, shared_deployment: Deployment, client: Client, acked_in_vain
    ):
        # Nobody else is there to answer.
        shared_deployment.supervisorctl("stop", "shard-2", "shard-3")

        assert shards_of(client.enqueue("made", [b"x"])) == {"1"}
        assert "made" in client.queue_names()

        # Nor now.
        shared_deployment.supervisorctl("stop", "shard-1")
        with pytest.raises(NoHealthyShards):
            client.enqueue("made", [b"y"])
        with pytest.raises(NoHealthyShards):
            client.dequeue("made", limit=1)


def test_a_router_restarted_by_supervisorctl_finishes_what_is_in_hand(
    deployment: Deployment, load: Load, wait_until
):
    with load.running():
        wait_until(partial(load.has_progressed, since=0))

        deployment.supervisorctl("restart", "router")

        deployment.wait_until_serving()
        wait_until(partial(load.has_progressed, since=load.progress()))

    load.check()
    # A clean end leaves no call half done, nor a claim that nobody got.
    unknown = [e for e in load.errors if isinstance(e, OutcomeUnknown) or "not known" in str(e)]
    assert unknown == []
    with deployment.client() as client:
        assert client.count(load.queue, JobState.IN_PROGRESS) == 0
