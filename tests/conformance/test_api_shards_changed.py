"""SPEC sections 1 and 3: dequeue-only shards, shards that join later, and no admin password."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest

from tests.conformance.api import (
    IN_PROGRESS,
    PENDING,
    SHARDS,
    SUCCEEDED,
    Client,
    Deployment,
    Refused,
    one_engine,
    shard_of,
)
from tests.conftest import WaitUntil

pytestmark = [pytest.mark.service, one_engine]

DEQUEUE_ONLY = {"dequeue_only": True}
PATIENT = "patient"
PATIENCE_MS = 30_000  # a busy machine gives searches what is left of it


class Grown(NamedTuple):
    """A service whose shard 1 has become dequeue-only, and that got a fourth shard."""

    deployment: Deployment
    queue: str
    by_shard: dict[str, list[str]]  # jobs from before
    states: dict[str, int]


@pytest.fixture(scope="module")
def grown(mistreated: Deployment) -> Grown:
    deployment = mistreated
    with deployment.client() as client:
        client.create(PATIENT)
        by_shard = client.enqueue_on_every_shard(PATIENT, each=3)
        taken = list(client.dequeue(PATIENT, 6))
        client.ack(PATIENT, succeeded=taken[:3])
        states = {
            descriptor: info.jobState
            for on_shard in by_shard.values()
            for descriptor, info in client.lookup(*on_shard).items()
        }
    deployment.down()
    deployment.configure(
        job_claimed_timeout_seconds=0.3,
        admin_password_hash="",
        request_timeout_ms=PATIENCE_MS,
        shard_restart_grace_ms=PATIENCE_MS,
    )
    deployment.write("queues", {PATIENT: {"job_claimed_timeout_seconds": 600}})
    deployment.configure_shards({"1": DEQUEUE_ONLY, "4": deployment.shard_settings})
    deployment.up()
    return Grown(deployment, PATIENT, by_shard, states)


@pytest.fixture
def client(grown: Grown) -> Iterator[Client]:
    with grown.deployment.client() as connected:
        yield connected


def shards_that_take_jobs(client: Client, queue: str) -> set[str]:
    """At least three do; a fourth would be missing once in 10,000,000 runs."""
    jobs = client.enqueue_on_every_shard(queue, lambda _: client.job(b"", priority=2), each=15)
    return set(jobs)


def test_its_jobs_are_served(client: Client, grown: Grown):
    every = [d for on_shard in grown.by_shard.values() for d in on_shard]
    before = {d: info.jobState for d, info in client.lookup(*every).items()}
    assert before == grown.states
    pending = {d for d in every if before[d] == PENDING}
    running_on_1 = [d for d in grown.by_shard["1"] if before[d] == IN_PROGRESS]

    taken = client.dequeue(grown.queue, len(pending))
    client.ack(grown.queue, succeeded=[*taken, *running_on_1])

    assert taken.keys() == pending
    on_1 = client.lookup(*grown.by_shard["1"]).values()
    assert {info.jobState for info in on_1} == {SUCCEEDED}


def test_enqueues_avoid_it(client: Client, grown: Grown, wait_until: WaitUntil):
    assert shards_that_take_jobs(client, grown.queue) == {"2", "3", "4"}
    shards: set[str] = set()

    def all_have_taken_some() -> bool:
        """One that is silent for a moment is left out."""
        many = client.enqueue(grown.queue, *[client.job(b"", priority=3)] * 3500)
        shards.update(map(shard_of, many))
        return len(shards) >= 3

    wait_until(all_have_taken_some)
    assert shards == {"2", "3", "4"}


def test_shard_that_joins_later_gets_every_queue(client: Client, grown: Grown):
    assert "4" in shards_that_take_jobs(client, grown.queue)


def test_new_queue_exists_there_too(client: Client):
    client.create("new")

    assert shards_that_take_jobs(client, "new") == {"2", "3", "4"}
    # Each of these needs the queue on every shard.
    assert client.count("new", priority=1) == 0
    assert client.scan("new", priority=1).scannedJobs == []
    assert len({shard_of(d) for d in client.dequeue("new", 1000, coverage=1.0)}) == SHARDS


@pytest.mark.parametrize("password", ["", "anything"])
def test_delete_without_a_password_set(client: Client, grown: Grown, password):
    with pytest.raises(Refused, match=r"^PASSWORD_INVALID: "):
        client.delete(grown.queue, password)

    assert grown.queue in client.names()


def test_time_out_of_the_server(client: Client, grown: Grown, wait_until: WaitUntil):
    client.create("brief")
    (brief,) = client.enqueue("brief", b"")
    (patient,) = client.enqueue(grown.queue, b"")
    assert patient in client.dequeue(grown.queue, 1)
    client.dequeue("brief")

    wait_until(lambda: client.info(brief).jobState == PENDING)

    assert client.info(brief).attemptsRemaining == 1
    assert client.info(patient).jobState == IN_PROGRESS


def test_all_dequeue_only(client: Client, grown: Grown, wait_until: WaitUntil):
    """The last one here: from now on the service takes no jobs."""
    client.create("probed")
    (waiting,) = client.enqueue(grown.queue, b"waiting")
    grown.deployment.configure_shards(dict.fromkeys("1234", DEQUEUE_ONLY))
    wait_until(lambda: refuses_jobs(client, "probed"))

    for jobs in (1, 1500):
        with pytest.raises(Refused, match=r"^ENQUEUE_REJECTED: .*dequeue-only"):
            client.enqueue(grown.queue, *[b"job"] * jobs)
    assert waiting in client.dequeue(grown.queue, 1)
    client.create("even_now")
    assert "even_now" in client.names()


def refuses_jobs(client: Client, queue: str) -> bool:
    try:
        client.enqueue(queue, b"job")
    except Refused:
        return True
    return False
