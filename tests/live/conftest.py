"""A running service whose configuration the tests change, each on a queue of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from pinlaterd.client import Client
from pinlaterd.config.layout import ConfigFiles
from tests.conftest import POLL_SECONDS
from tests.deployment import MOST_PATIENT, Deployment, serving
from tests.faults.load import Load

SETTINGS = {"monitor_interval_seconds": 0.2, **MOST_PATIENT}
# Whatever the machine has to do beside; on a quiet one it is under two.
IN_FORCE_SECONDS = 60.0
BASE = "shards:\n  1: {}\n  2: {}\n"


class Live:
    """A deployment of the shards 1 and 2, and the files in its etc/."""

    def __init__(self, deployment: Deployment) -> None:
        self.deployment = deployment
        self.etc = deployment.folder / "etc"

    def write(self, name: str, text: str) -> None:
        """As editors do: a new file takes the old one's place."""
        beside = self.etc / f".{name}.swp"
        beside.write_text(text)
        beside.replace(self.etc / name)

    def shards(self, text: str) -> None:
        self.write("shards.yaml", text)

    def settings(self, **changed: object) -> None:
        """Settings of pinlaterd.yaml, in the place of those that it has."""
        path = self.etc / "pinlaterd.yaml"
        kept = [
            line
            for line in path.read_text().splitlines(keepends=True)
            if line.partition(":")[0] not in changed
        ]
        new = [f"{key}: {value}\n" for key, value in changed.items()]
        self.write("pinlaterd.yaml", "".join(kept + new))

    def wait_until_changed(self) -> int:
        """Until what is in the files is carried out, and followed; the version then."""
        digest = ConfigFiles(self.etc).digest
        self.wait_until_followed(lambda status: status["config_judged"] == digest)
        return int(self.deployment.status()["config_version"])

    def wait_until(self, condition: Callable[[Mapping[str, Any]], object]) -> float:
        """Until `condition` holds of the status; how long it took, in seconds."""
        began = time.monotonic()
        while not condition(status := self.deployment.status()):
            waited = time.monotonic() - began
            assert waited < IN_FORCE_SECONDS, f"not within {waited:.1f} s: {status}"
            time.sleep(POLL_SECONDS)
        return time.monotonic() - began

    def wait_until_followed(self, condition: Callable[[Mapping[str, Any]], object]) -> float:
        """The same, and that every process follows what is in force by then."""

        def followed(status: Mapping[str, Any]) -> bool:
            versions = {process["config_version"] for process in status["processes"]}
            return bool(condition(status)) and versions == {status["config_version"]}

        return self.wait_until(followed)


def is_dequeue_only(status: Mapping[str, Any], *names: str) -> bool:
    """Whether just those shards are."""
    return {one["name"] for one in status["shards"] if one["dequeue_only"]} == set(names)


def serves(status: Mapping[str, Any], *names: str) -> bool:
    """Whether just those shards are there, and all of them serve."""
    shards = {one["name"]: one["healthy"] for one in status["shards"]}
    return shards == dict.fromkeys(names, True) and status["healthy"]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    with serving(tmp_path_factory.mktemp("d"), shards=2, settings=SETTINGS) as deployment:
        yield Live(deployment)


@pytest.fixture
def live(running: Live) -> Iterator[Live]:
    """Shards 1 and 2 serve; what the test changes is changed back."""
    before = {path: path.read_text() for path in running.etc.glob("*.yaml")}
    yield running
    for path, text in before.items():
        running.write(path.name, text)
    names = {one["name"] for one in running.deployment.status()["shards"]} - {"1", "2"}
    running.shards(f"{BASE}abandon: [{', '.join(names)}]\n")
    running.wait_until_followed(
        lambda status: (
            serves(status, "1", "2") and is_dequeue_only(status) and not status["config_problems"]
        )
    )


@pytest.fixture
def client(live: Live) -> Iterator[Client]:
    with live.deployment.client() as made:
        yield made


@pytest.fixture
def queue(client: Client, request: pytest.FixtureRequest) -> str:
    name = "".join(c if c.isalnum() else "_" for c in request.node.name)[:60]
    client.create_queue(name)
    return name


@pytest.fixture
def load(live: Live, queue: str) -> Load:
    return Load(live.deployment, queue)
