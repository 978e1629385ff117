"""A service that pushes to a downstream, which the tests of a process share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest

from pinlaterd.client import Client
from tests.deployment import MOST_PATIENT, Deployment, serving
from tests.push.downstream import Downstream, Received, downstream

SETTINGS = {**MOST_PATIENT, "monitor_interval_seconds": 0.1, "push_hosts": "127.0.0.1"}
# Of the hasty ones a callback has to come within a second.
_QUEUES = tuple(f"mail_{number}" for number in range(1, 31))
_HASTY = tuple(f"hasty_{number}" for number in range(1, 11))
_unused, _unused_hasty = iter(_QUEUES), iter(_HASTY)


class Pushed(NamedTuple):
    """A client of a service, which pushes the jobs of `queue` to `there`."""

    client: Client
    there: Downstream
    queue: str
    deployment: Deployment

    def received(self) -> list[Received]:
        """What the downstream was sent of this queue."""
        return [one for one in self.there.received if one.path == f"/{self.queue}"]

    def figure(self, name: str) -> int:
        """A counter of this queue."""
        found = self.deployment.stats()["counters"]
        return int(found.get(f"{self.queue}_{name}", 0))


@pytest.fixture(scope="session")
def pushing(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Client, Downstream, Deployment]]:
    with downstream() as there:
        urls = {queue: {"url": f"{there.url}/{queue}"} for queue in (*_QUEUES, *_HASTY)}
        hasty = {queue: {"push": {**urls[queue], "timeout_seconds": 1}} for queue in _HASTY}
        queues = {**{queue: {"push": urls[queue]} for queue in _QUEUES}, **hasty}
        folder = tmp_path_factory.mktemp("push")
        with (
            serving(folder / "d", settings=SETTINGS, queues=queues) as deployment,
            deployment.client() as client,
        ):
            yield client, there, deployment


@pytest.fixture
def pushed(pushing: tuple[Client, Downstream, Deployment]) -> Pushed:
    return _pushed(pushing, next(_unused))


@pytest.fixture
def hastily_pushed(pushing: tuple[Client, Downstream, Deployment]) -> Pushed:
    return _pushed(pushing, next(_unused_hasty))


def _pushed(pushing: tuple[Client, Downstream, Deployment], queue: str) -> Pushed:
    client, there, deployment = pushing
    there.received.clear()
    there.act = lambda _: None
    client.create_queue(queue)
    return Pushed(client, there, queue, deployment)
