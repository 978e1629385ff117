"""Killed and stopped in the middle of work: each job's state and attempts are exactly what they
must be.

Claims outlive all that happens here, but where the test shortens their time-out, so that no outcome
depends on how fast this machine is.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from pinlaterd.client import Client, ConnectionFailed, PinLaterError, RunningJob, Worker
from pinlaterd.client.in_flight import FETCHERS
from tests.client.working import books, handlers_of, have_ended, running
from tests.deployment import MOST_PATIENT, Deployment, serving

pytestmark = pytest.mark.service

JOBS = 1500
RUN_SECONDS = 0.002
CONCURRENCY = 8
# What the dequeues under way may ask for: what begins within ahead_ms (100), and free places.
MOST_UNANSWERED = FETCHERS * round(CONCURRENCY * (0.1 / RUN_SECONDS + 1))


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    settings = {"monitor_interval_seconds": 0.1, **MOST_PATIENT}
    with serving(tmp_path_factory.mktemp("w") / "d", settings=settings) as deployment:
        yield deployment


@pytest.fixture
def client(deployment: Deployment) -> Iterator[Client]:
    with deployment.client() as client:
        yield client


def shorten_claims(deployment: Deployment, queue: str) -> None:
    """Claims that were made before time out, too."""
    deployment.write("queues", {queue: {"job_claimed_timeout_seconds": 8}})


@pytest.mark.parametrize("killed", ["router", "shard-1"])
def test_a_process_of_the_service_is_killed_in_the_middle(
    deployment, client, queue, wait_until, killed
):
    runs: list[bytes] = []

    def handle(job: RunningJob) -> str:
        runs.append(job.body)
        time.sleep(RUN_SECONDS)
        return "done"

    descriptors = client.enqueue(queue, [b"%d" % n for n in range(JOBS)])
    worker = Worker(client, handlers_of(queue, handle, concurrency=CONCURRENCY), max_wait_ms=100)

    def all_settled() -> bool:
        """No job waits, and the service knows how all ended that were begun."""
        try:
            found = books(client, descriptors)
        except (PinLaterError, ConnectionFailed):
            return False
        held = sum(each.waiting + each.running for each in worker.queue_figures())
        return not held and found["PENDING", 2] == 0 and found["SUCCEEDED", 2] == len(runs)

    with running(worker):
        wait_until(lambda: len(runs) > JOBS // 5)
        deployment.kill(killed)
        wait_until(all_settled)
        first_runs = len(runs)
        assert first_runs == len(set(runs))
        # What was claimed for an answer that died with the process comes back by time-out only.
        unanswered = JOBS - first_runs
        assert unanswered <= MOST_UNANSWERED
        assert books(client, descriptors) == without_zeros(
            {("SUCCEEDED", 2): first_runs, ("IN_PROGRESS", 2): unanswered}
        )
        shorten_claims(deployment, queue)
        wait_until(lambda: have_ended(client, descriptors))

    assert len(runs) == len(set(runs)) == JOBS
    assert books(client, descriptors) == without_zeros(
        {("SUCCEEDED", 2): first_runs, ("SUCCEEDED", 1): unanswered}
    )


def test_a_stop_in_the_middle_finishes_what_was_begun_and_leaves_the_rest_pending(
    client, queue, wait_until
):
    runs: list[bytes] = []

    def handle(job: RunningJob) -> None:
        runs.append(job.body)
        time.sleep(0.001)

    descriptors = client.enqueue(queue, [b"%d" % n for n in range(5000)])
    with running(Worker(client, handlers_of(queue, handle, concurrency=4), max_wait_ms=200)):
        wait_until(lambda: len(runs) > 300)

    assert books(client, descriptors) == without_zeros(
        {("SUCCEEDED", 2): len(runs), ("PENDING", 2): 5000 - len(runs)}
    )


def without_zeros(facts: dict[tuple[str, int], int]) -> dict[tuple[str, int], int]:
    return {key: number for key, number in facts.items() if number}
