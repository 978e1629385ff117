"""Processes that hang instead of dying: SIGSTOP, then SIGCONT."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from pinlaterd.client import Client, EnqueuedInPart, JobState, PinLaterError
from pinlaterd.errors import Overloaded
from tests.deployment import Deployment, frozen, serving
from tests.faults.conftest import SETTINGS
from tests.faults.load import Load, shards_of

pytestmark = pytest.mark.service

FROZEN_SECONDS = 5.0
# Soon, so that what a frozen process costs is seen; longer than a busy machine holds the others up.
REQUEST_MS = 6_000
# The same, and what a busy machine adds; the client itself would wait for longer.
ANSWERED_SECONDS = 30.0
BACK_SECONDS = 120.0  # two on a quiet machine
MANY = 6_000  # more than enqueue_split_jobs, so that each shard gets some
NOT_STORED, MAY_BE_STORED = EnqueuedInPart.NOT_STORED, EnqueuedInPart.MAY_BE_STORED


@pytest.fixture(scope="module")
def shared_deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    settings = SETTINGS | {"request_timeout_ms": REQUEST_MS}
    with serving(tmp_path_factory.mktemp("d"), shards=3, settings=settings) as deployment:
        yield deployment


def test_a_frozen_shard_costs_its_own_jobs_only(
    deployment: Deployment, load: Load, queue: str, wait_until
):
    aside = f"{queue}_aside"
    with load.running(), deployment.client() as client:
        client.create_queue(aside)
        wait_until(lambda: "3" in shards_of(load.acknowledged))
        held_up = next(job for job in list(load.acknowledged) if shards_of([job]) == {"3"})

        with frozen(deployment.pid_of("shard-3")):
            frozen_at = time.monotonic()
            with pytest.raises(PinLaterError):
                client.lookup([held_up])
            assert time.monotonic() - frozen_at < ANSWERED_SECONDS
            descriptors: list[str] = []
            enough = frozen_at + FROZEN_SECONDS
            while time.monotonic() < enough or len(shards_of(descriptors)) < 2:
                descriptors += client.enqueue(aside, [b"x"])
            assert shards_of(descriptors) == {"1", "2"}
            load.advance()

        deployment.wait_until_serving(seconds=BACK_SECONDS)

    load.check(claims_may_be_lost=True)


def test_a_frozen_router_loses_nothing(deployment: Deployment, load: Load, wait_until):
    with load.running():
        with frozen(deployment.pid_of("router")):
            frozen_at = time.monotonic()
            wait_until(lambda: time.monotonic() > frozen_at + FROZEN_SECONDS)

        deployment.wait_until_serving(seconds=BACK_SECONDS)

    load.check(claims_may_be_lost=True)


def test_an_enqueue_of_which_a_frozen_shard_has_a_part_says_what_is_stored(
    deployment: Deployment, queue: str
):
    bodies = [b"%d" % number for number in range(MANY)]
    with deployment.client() as client:
        told = _enqueue_beside_a_frozen_shard(deployment, client, queue, bodies)
        stored: list[bytes] = []
        deadline = time.monotonic() + BACK_SECONDS
        while client.count(queue, JobState.PENDING):
            assert time.monotonic() < deadline, f"{len(stored)} jobs came"
            jobs = client.dequeue(queue, limit=MANY)
            assert all(told[job.body] in (job.descriptor, MAY_BE_STORED) for job in jobs)
            stored += [job.body for job in jobs]

    assert len(stored) == len({*stored})
    sure = {body for body, said in told.items() if said not in (NOT_STORED, MAY_BE_STORED)}
    assert sure
    assert sure <= {*stored}


def _enqueue_beside_a_frozen_shard(
    deployment: Deployment, client: Client, queue: str, bodies: list[bytes]
) -> dict[bytes, str]:
    """What is said of each job."""
    while True:
        try:
            with frozen(deployment.pid_of("shard-3")), pytest.raises(EnqueuedInPart) as caught:
                client.enqueue(queue, bodies)
        except Overloaded:
            # A disk held up the other two for the whole time of the call: nothing is stored.
            continue
        finally:
            deployment.wait_until_serving(seconds=BACK_SECONDS)
        return dict(zip(bodies, caught.value.descriptors, strict=True))


def test_a_call_that_its_shard_never_saw_is_dropped_at_its_deadline(
    deployment: Deployment, queue: str, wait_until
):
    """All shards frozen: the caller is told within its time, and nobody stores it afterwards."""
    pids = [deployment.pid_of(f"shard-{n}") for n in (1, 2, 3)]
    with deployment.client() as client:
        with frozen(pids[0]), frozen(pids[1]), frozen(pids[2]):
            began = time.monotonic()
            with pytest.raises(PinLaterError):
                client.enqueue(queue, [b"too late"])
            assert time.monotonic() - began < ANSWERED_SECONDS

        deployment.wait_until_serving(seconds=BACK_SECONDS)
        assert client.dequeue(queue, limit=10) == []
