"""A service that pushes to a downstream, which the tests of a process share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest

from pinlaterd.client import Client
from tests.deployment import PATIENT, serving
from tests.push.downstream import Downstream, Received, downstream

SETTINGS = {**PATIENT, "monitor_interval_seconds": 0.1, "push_hosts": "127.0.0.1"}
_QUEUES = tuple(f"mail_{number}" for number in range(1, 41))
_unused = iter(_QUEUES)


class Pushed(NamedTuple):
    """A client of a service, which pushes the jobs of `queue` to `there`."""

    client: Client
    there: Downstream
    queue: str

    def received(self) -> list[Received]:
        """What the downstream was sent of this queue."""
        return [one for one in self.there.received if one.path == f"/{self.queue}"]


@pytest.fixture(scope="session")
def pushing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Client, Downstream]]:
    with downstream() as there:
        queues = {queue: {"push": {"url": f"{there.url}/{queue}"}} for queue in _QUEUES}
        folder = tmp_path_factory.mktemp("push")
        with (
            serving(folder / "d", settings=SETTINGS, queues=queues) as deployment,
            deployment.client() as client,
        ):
            yield client, there


@pytest.fixture
def pushed(pushing: tuple[Client, Downstream]) -> Pushed:
    client, there = pushing
    there.received.clear()
    there.act = lambda _: None
    queue = next(_unused)
    client.create_queue(queue)
    return Pushed(client, there, queue)
