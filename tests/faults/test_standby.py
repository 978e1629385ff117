"""Two processes for one shard: one owns the store, the other stands by and takes over."""

from __future__ import annotations

import os
import signal
from functools import partial

import pytest

from tests.deployment import Deployment, frozen
from tests.faults.load import Load

pytestmark = pytest.mark.service


def test_a_standby_takes_over_when_the_owner_is_killed(
    deployment: Deployment, load: Load, wait_until
):
    owner = deployment.pid_of("shard-1")
    states = partial(deployment.states_of, "shard-1")
    standby = deployment.start_process("shard", "1")
    try:
        wait_until(lambda: states().get(standby.pid) == "standby")
        wait_until(lambda: states().get(owner) == "serving")

        with load.running():
            with frozen(deployment.supervisord_pid()):
                os.kill(owner, signal.SIGKILL)
                wait_until(lambda: states().get(standby.pid) == "serving")
                deployment.wait_until_serving()
                load.advance()
            # supervisord starts its own again, which now stands by
            wait_until(lambda: deployment.pids().get("shard-1", owner) != owner)
            wait_until(lambda: states().get(deployment.pids().get("shard-1", 0)) == "standby")
            wait_until(lambda: states().get(standby.pid) == "serving")
        load.check(claims_may_be_lost=True)
    finally:
        standby.terminate()
        standby.wait()

    deployment.wait_until_serving()
    wait_until(lambda: states().get(deployment.pid_of("shard-1")) == "serving")
