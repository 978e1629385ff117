"""Two processes for one shard of a server: one owns it, the other stands by and takes over."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from functools import partial

import pytest

from tests.conftest import WaitUntil
from tests.deployment import Deployment, frozen
from tests.faults.load import Load
from tests.faults.stores.store import BACK_SECONDS, Store

pytestmark = pytest.mark.service


@pytest.fixture
def standby(deployment: Deployment, store: Store) -> Iterator[subprocess.Popen[bytes]]:
    process = deployment.start_process("shard", store.shard)
    yield process
    process.terminate()
    process.wait()


def test_an_owner_that_froze_cannot_write_after_another_took_over(
    deployment: Deployment,
    load: Load,
    store: Store,
    standby: subprocess.Popen[bytes],
    wait_until: WaitUntil,
):
    program = f"shard-{store.shard}"
    owner = deployment.pid_of(program)
    states = partial(deployment.states_of, program)

    wait_until(lambda: states().get(standby.pid) == "standby")
    wait_until(lambda: states().get(owner) == "serving")
    with load.running():
        with frozen(owner):
            wait_until(lambda: states().get(standby.pid) == "serving")
            load.advance()
        # It ends, and the one that supervisord starts instead stands by.
        wait_until(lambda: deployment.pids().get(program, owner) != owner)
        wait_until(lambda: states().get(deployment.pids().get(program, 0)) == "standby")
        wait_until(lambda: states().get(standby.pid) == "serving")

        # Who connects now finds the owner, too.
        deployment.kill("router")
        deployment.wait_until_serving(seconds=BACK_SECONDS)

    load.check(claims_may_be_lost=True)
    standby.terminate()
    standby.wait()
    deployment.wait_until_serving(seconds=BACK_SECONDS)
    wait_until(lambda: states().get(deployment.pid_of(program)) == "serving")


def test_an_owner_that_froze_and_owns_its_store_again_is_found_by_new_routers(
    deployment: Deployment,
    store: Store,
    standby: subprocess.Popen[bytes],
    wait_until: WaitUntil,
):
    program = f"shard-{store.shard}"
    states = partial(deployment.states_of, program)
    wait_until(lambda: states().get(standby.pid) == "standby")

    with frozen(deployment.pid_of(program)):
        wait_until(lambda: states().get(standby.pid) == "serving")
        standby.kill()
        standby.wait()
    deployment.wait_until_serving(seconds=BACK_SECONDS)

    deployment.kill("router")

    deployment.wait_until_serving(seconds=BACK_SECONDS)
