"""A deployment of two routers whose queues have rates."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import pytest

from tests.deployment import PATIENT, Deployment
from tests.rates.puller import Puller

RATES = {
    "steady": 20,
    "slow": 0.5,
    "broken": 20,
    "paused": 0,
}
JOBS = 10_000  # enough for all windows that tests look at

NewDeployment = Callable[..., Deployment]


@pytest.fixture(scope="module")
def new_deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NewDeployment]:
    """Starts a deployment of one shard; every queue in `rates` (jobs/s) is full of jobs."""
    made: list[Deployment] = []

    def start(*, rates: Mapping[str, float], **settings: object) -> Deployment:
        deployment = Deployment(tmp_path_factory.mktemp("d"))
        made.append(deployment)
        deployment.init(settings={**PATIENT, **settings})
        write_rates(deployment, rates)
        deployment.up()
        with deployment.client() as client:
            for queue in rates:
                client.create_queue(queue)
                client.enqueue(queue, [b"job"] * JOBS)
        return deployment

    yield start
    for deployment in made:
        deployment.destroy()


@pytest.fixture(scope="module")
def deployment(new_deployment: NewDeployment) -> Deployment:
    return new_deployment(rates=RATES, routers=2)


@pytest.fixture
def pull() -> Iterator[Callable[..., Puller]]:
    """Starts pullers, and stops them at the end of the test."""
    made: list[Puller] = []

    def start(
        deployment: Deployment,
        router: str,
        queue: str,
        *,
        limit: int = 10,
        wait_ms: int = 500,
        pause: float = 0,
    ) -> Puller:
        pid = deployment.pid_of(router)
        made.append(Puller(deployment.port, pid, queue, limit=limit, wait_ms=wait_ms, pause=pause))
        made[-1].start()
        return made[-1]

    yield start
    for puller in made:
        puller.stop()


def write_rates(deployment: Deployment, rates: Mapping[str, float]) -> None:
    deployment.write(
        "queues", {queue: {"max_jobs_per_second": rate} for queue, rate in rates.items()}
    )
