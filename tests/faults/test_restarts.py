"""What is restarted in order costs no client an error, whatever it was doing."""

from __future__ import annotations

from functools import partial

import pytest

from tests.conftest import WaitUntil
from tests.deployment import Deployment
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
