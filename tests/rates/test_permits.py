"""`max_in_progress` over shards, routers and faults, as workers see it."""

from __future__ import annotations

import re
from contextlib import suppress

import pytest

from pinlaterd.client import Client, JobState, PinLaterError
from pinlaterd.errors import Overloaded
from tests.conftest import WaitUntil
from tests.deployment import PATIENT, Deployment, claim, serving
from tests.rates.limited_workers import LimitedWorkers

LIMIT = 3
BULK = 5_000  # more than are claimed until a limit is followed


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory):
    queues = {
        "mail": {"max_in_progress": LIMIT, "job_claimed_timeout_seconds": 5},
        "bulk": {},
        "single": {"max_pending": 500},
        "hundred": {"max_pending": 2000},
    }
    settings = {**PATIENT, "routers": 2, "monitor_interval_seconds": 1}
    folder = tmp_path_factory.mktemp("d")
    with serving(folder, shards=3, settings=settings, queues=queues) as deployment:
        with deployment.client() as client:
            for queue in queues:
                client.create_queue(queue)
        yield deployment


def fill(client: Client, queue: str, jobs: int) -> None:
    for _ in range(jobs):
        client.enqueue(queue, [b"job"])


def test_no_more_run_than_the_limit_whatever_is_killed(limited: Deployment, wait_until: WaitUntil):
    with limited.client() as client, LimitedWorkers([limited.port], "mail", each=8) as workers:
        for program in ("shard-2", "coordinator", "router-1", "shard-1", "coordinator"):
            before = workers.done
            fill(client, "mail", 60)
            wait_until(lambda: workers.done >= before + 10)  # noqa: B023 - before it changes
            limited.kill(program)
            limited.wait_until_serving()
        wait_until(lambda: client.count("mail", JobState.PENDING) == 0)

    assert workers.most == LIMIT


def enqueue_until_rejected(client: Client, queue: str, jobs: int) -> tuple[int, str]:
    """Return how many jobs were stored, and why no more were."""
    stored = 0
    while True:
        try:
            stored += len(client.enqueue(queue, [b"job"] * jobs))
        except Overloaded as error:
            return stored, error.message


@pytest.mark.parametrize(("queue", "jobs", "limit"), [("single", 1, 500), ("hundred", 100, 2000)])
def test_enqueues_are_rejected_once_as_many_are_pending_as_may_be(
    limited: Deployment, wait_until: WaitUntil, queue: str, jobs: int, limit: int
):
    def is_full() -> bool:
        """Enqueue until rejected; return whether the queue is full. A shard that has just started
        has no permits yet."""
        more, why = enqueue_until_rejected(client, queue, jobs)
        assert re.match(r"overloaded: .*retry after [0-9]+ ms", why)
        stored.append(more)
        return sum(stored) > limit - 100

    def are_replaced() -> bool:
        with suppress(PinLaterError):
            while len(replaced) < jobs:
                replaced.extend(client.enqueue(queue, [b"job"]))
        return len(replaced) == jobs

    stored, replaced = list[int](), list[str]()
    with limited.client() as client:
        wait_until(is_full)
        assert sum(stored) <= limit

        claim(client, queue, jobs)
        wait_until(are_replaced)
        assert client.count(queue, JobState.PENDING) <= limit


def shows(deployment: Deployment, *, limit: int, running: int, held: int) -> bool:
    """Return whether figures and `status` show that `bulk` is held by its limit."""
    gauges = deployment.stats()["gauges"]
    figures = {"in_progress_limit": limit, "in_progress": running, "held_by_limit": held}
    facts = [process["facts"] for process in deployment.status()["processes"]]
    return all(gauges.get(f"bulk_{name}") == figure for name, figure in figures.items()) and any(
        "bulk" in of.get("held by max_in_progress", "") for of in facts
    )


def test_a_limit_that_is_set_raised_and_removed_acts_live(
    limited: Deployment, wait_until: WaitUntil
):
    with limited.client() as client:
        client.enqueue("bulk", [b"job"] * BULK)

        def claim_five() -> int:
            return len(client.dequeue("bulk", limit=5))

        def running() -> int:
            return client.count("bulk", JobState.IN_PROGRESS)

        wait_until(lambda: claim_five() == 5)
        limited.write("queues", {"bulk": {"max_in_progress": 3}})  # less than run already
        wait_until(lambda: claim_five() == 0)
        most = running() + 7
        limited.write("queues", {"bulk": {"max_in_progress": most}})
        wait_until(lambda: claim_five() == 0 and running() == most)
        wait_until(lambda: shows(limited, limit=most, running=most, held=BULK - most))
        limited.write("queues", {})
        wait_until(lambda: claim_five() == 5)
