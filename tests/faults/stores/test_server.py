"""The server of a shard is killed, or hangs: its jobs wait, and the other shards do not notice."""

from __future__ import annotations

import time
from collections.abc import Mapping

import pytest

from tests.conftest import WaitUntil
from tests.deployment import Deployment
from tests.faults.load import Load
from tests.faults.stores.store import (
    BACK_SECONDS,
    HANGING_SECONDS,
    Store,
    check_calls,
    check_others_serve,
    check_work_goes_elsewhere,
)

pytestmark = pytest.mark.service


def test_a_killed_server(
    deployment: Deployment,
    load: Load,
    store: Store,
    wait_until: WaitUntil,
):
    with load.running():
        store.server.kill()
        wait_until(lambda: store.shard in _in_trouble(deployment))
        load.advance()
        check_others_serve(deployment, f"{load.queue}_aside", without=[store])

        store.server.start()
        deployment.wait_until_serving(seconds=BACK_SECONDS)

    load.check(claims_may_be_lost=True)
    check_calls(load, disturbed=[store])


def test_servers_that_hang(
    deployment: Deployment,
    queue: str,
    stores: Mapping[str, Store],
    wait_until: WaitUntil,
):
    """Both at once: the wait is the same."""
    shards = {name: deployment.pid_of(f"shard-{name}") for name in stores}
    aside = f"{queue}_aside"
    load = Load(deployment, queue, rest_seconds=0.1)
    with load.running():
        with stores["mysql"].frozen(), stores["redis"].frozen():
            frozen_until = time.monotonic() + HANGING_SECONDS
            wait_until(lambda: _in_trouble(deployment) == shards.keys())
            check_others_serve(deployment, aside, without=stores.values())
            while time.monotonic() < frozen_until:
                check_work_goes_elsewhere(deployment, aside, without=stores.values())
            load.advance()

        deployment.wait_until_serving(seconds=BACK_SECONDS)

    load.check(claims_may_be_lost=True)
    check_calls(load, disturbed=stores.values())
    assert {name: deployment.pid_of(f"shard-{name}") for name in stores} == shards


def _in_trouble(deployment: Deployment) -> set[str]:
    """The shards whose processes say that they cannot reach their stores."""
    return {
        process["name"].removeprefix("shard-")
        for process in deployment.status()["processes"]
        if process.get("facts", {}).get("store warning")
    }
