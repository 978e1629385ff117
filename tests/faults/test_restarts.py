"""What is restarted in order costs no client an error, whatever it was doing."""

from __future__ import annotations

import json
from functools import partial

import pytest

from tests.conftest import WaitUntil
from tests.deployment import Deployment
from tests.faults.callers import Callers
from tests.faults.load import Load

pytestmark = pytest.mark.service


def _restart_shards(
    deployment: Deployment, load: Load, names: tuple[str, ...], wait_until: WaitUntil
) -> None:
    with load.running():
        for name in names:
            wait_until(partial(load.has_progressed, since=load.progress()))
            deployment.supervisorctl("restart", f"shard-{name}")
        wait_until(partial(load.has_progressed, since=load.progress()))

    load.check()
    assert load.errors == []


def test_each_shard_in_turn(deployment: Deployment, load: Load, wait_until):
    _restart_shards(deployment, load, ("1", "2", "3"), wait_until)


def test_the_only_shard(new_deployment, wait_until):
    deployment = new_deployment(1)
    deployment.up()
    with deployment.client() as client:
        client.create_queue("q")

    _restart_shards(deployment, Load(deployment, "q"), ("1", "1"), wait_until)


def test_routers_that_clients_connect_to_all_the_time(new_deployment, wait_until):
    deployment: Deployment = new_deployment(1, routers=2)
    deployment.up()
    with deployment.client() as client:
        client.create_queue("q")
    before = deployment.pids()
    load, callers = Load(deployment, "q"), Callers(deployment.port)

    with load.running(), callers.running():
        wait_until(partial(load.has_progressed, since=0))
        done = json.loads(deployment.admin("restart", "router", "--json"))
        wait_until(partial(load.has_progressed, since=load.progress()))

    load.check()
    assert load.errors == []
    assert callers.errors == []
    assert callers.answered() > 100
    after = deployment.pids()
    assert {one["program"]: one["pid"] for one in done} == {
        name: after[name] for name in ("router-1", "router-2")
    }
    assert after.keys() == before.keys()
    assert {name for name in after if after[name] != before[name]} == {"router-1", "router-2"}
    assert deployment.status()["healthy"]
