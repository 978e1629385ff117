"""A deployment of three shards that the tests of one module break, each on a queue of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import pytest

from tests.deployment import MOST_PATIENT, Deployment, serving
from tests.faults.load import Load
from tests.faults.small_disk import small_disk

__all__ = ["small_disk"]

QUEUE_NAME_CHARS = 40
# Claims outlive every test.
SETTINGS = {
    "monitor_interval_seconds": 0.5,
    "job_claimed_timeout_seconds": 600,
    **MOST_PATIENT,
}


@pytest.fixture(scope="package")
def shared_deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with serving(tmp_path_factory.mktemp("d"), shards=3, settings=SETTINGS) as deployment:
        yield deployment


@pytest.fixture
def deployment(shared_deployment: Deployment) -> Deployment:
    """All of it serves, whatever the test before did."""
    shared_deployment.wait_until_serving()
    return shared_deployment


@pytest.fixture
def new_deployment(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[..., Deployment]]:
    """Writes a deployment of the test's own; it is not started."""
    made: list[Deployment] = []

    def make(
        shards: int | Mapping[str, object], *, queues: Mapping[str, object] | None = None
    ) -> Deployment:
        made.append(Deployment(tmp_path_factory.mktemp("d")))
        made[-1].init(shards=shards, settings=SETTINGS, queues=queues)
        return made[-1]

    yield make
    for deployment in made:
        deployment.destroy()


@pytest.fixture
def queue(deployment: Deployment, request: pytest.FixtureRequest) -> str:
    """A queue named after the test, as far as MySQL's names allow."""
    name = "".join(c if c.isalnum() else "_" for c in request.node.name)[-QUEUE_NAME_CHARS:]
    with deployment.client() as client:
        client.create_queue(name)
    return name


@pytest.fixture
def load(deployment: Deployment, queue: str) -> Load:
    return Load(deployment, queue)
