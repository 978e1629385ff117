"""A full disk: errors while it lasts, nothing acknowledged lost, back once there is room."""

from __future__ import annotations

import json
from collections.abc import Callable
from http import HTTPStatus
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from pinlaterd.errors import Overloaded
from tests.conftest import WaitUntil
from tests.deployment import Deployment
from tests.faults.load import Load
from tests.faults.small_disk import SmallDisk, fill

pytestmark = pytest.mark.service

DISK_BYTES = 12 * 1024 * 1024
BODY = bytes(100_000)
SHARDS = 2


@pytest.fixture
def deployment(small_disk: SmallDisk, new_deployment: Callable[[int], Deployment]) -> Deployment:
    """Of two shards, whose data lies on a file system of a few MB."""
    deployment = new_deployment(SHARDS)
    small_disk(deployment.folder / "data", DISK_BYTES)
    deployment.up()
    return deployment


def test_a_full_disk_loses_nothing_and_is_got_over(
    deployment: Deployment, load: Load, wait_until: WaitUntil
):
    filler = deployment.folder / "data/filler"
    with load.running():
        fill(filler)
        wait_until(lambda: len(load.errors) >= 10)
        # Who enqueues is told what, where and how to mend it.
        wait_until(lambda: any(_says_so(error) for error in load.errors))
        filler.unlink()

        deployment.wait_until_serving()

    load.check(claims_may_be_lost=True)


def test_shards_without_room_are_degraded_until_there_is_some(
    deployment: Deployment, wait_until: WaitUntil
):
    """Without a client that writes meanwhile."""
    filler = deployment.folder / "data/filler"

    def degraded() -> list[str]:
        return [shard["degraded"] for shard in deployment.status()["shards"] if shard["degraded"]]

    with deployment.client() as client:
        client.create_queue("mail")
        fill(filler)
        for _ in range(SHARDS):  # each refuses those that it is asked
            with pytest.raises(Overloaded):
                client.enqueue("mail", [BODY])
        wait_until(lambda: len(degraded()) == len(deployment.status()["problems"]) == SHARDS)

        status = deployment.status()
        assert all("the store is full" in text and "make room" in text for text in degraded())
        with pytest.raises(HTTPError) as unavailable:
            urlopen(f"http://{status['stats']}/health")
        assert unavailable.value.code == HTTPStatus.SERVICE_UNAVAILABLE
        assert len(json.loads(unavailable.value.read())["degraded"]) == len(degraded())
        wait_until(lambda: deployment.stats()["gauges"]["shard_degraded"] == len(degraded()))
        filler.unlink()
        wait_until(lambda: not degraded() and deployment.status()["healthy"])

        assert client.enqueue("mail", [BODY])


def _says_so(error: BaseException) -> bool:
    text = str(error)
    return isinstance(error, Overloaded) and "store is full" in text and "make room" in text
