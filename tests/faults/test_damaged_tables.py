"""Inner tables of a SQLite file that disagree with its jobs, as after `.recover`: what a shard does
about them, and what operators are told."""

from __future__ import annotations

import os
import signal
import sqlite3
from contextlib import closing

import pytest

from tests.deployment import Deployment, claim, frozen

pytestmark = pytest.mark.service

AGAIN_SECONDS = 10  # a busy machine may take some until what is claimed again is acked
CURE = "pinlater-admin shard check 1 --repair"


def damage(deployment: Deployment) -> None:
    """While the shard is killed, and before it is started again."""
    shard = deployment.pid_of("shard-1")
    with frozen(deployment.supervisord_pid()):
        os.kill(shard, signal.SIGKILL)
        file = deployment.folder / "data/shard-1.sqlite"
        with closing(sqlite3.connect(file, isolation_level=None, timeout=20)) as hand:
            hand.execute("DELETE FROM runs WHERE state = 0")


def test_a_damaged_file_is_counted_anew_told_of_and_repaired(new_deployment, wait_until):
    deployment: Deployment = new_deployment(
        1, queues={"mail": {"job_claimed_timeout_seconds": 600}}
    )
    deployment.up()

    def in_progress() -> object:
        return deployment.stats()["gauges"].get("mail_in_progress")

    def warnings() -> str:
        return "".join(deployment.status()["warnings"])

    with deployment.client() as client:
        client.create_queue("mail")
        client.enqueue("mail", [b"running"])
        [running] = claim(client, "mail")
        [lost] = client.enqueue("mail", [b"lost"])
        damage(deployment)
        deployment.wait_until_serving()

        wait_until(lambda: CURE in warnings() and in_progress() == 1)
        assert CURE in deployment.admin("status")
        deployment.write("queues", {"mail": {"job_claimed_timeout_seconds": AGAIN_SECONDS}})
        again = claim(client, "mail")
        assert [job.descriptor for job in again] == [running.descriptor]
        assert client.dequeue("mail", limit=2, succeeded=again) == []

        deployment.supervisorctl("stop", "shard-1")
        assert "jobs in no state, which are never handed out (repaired)" in deployment.admin(
            *("shard", "check", "1", "--repair")
        )
        deployment.supervisorctl("start", "shard-1")
        deployment.wait_until_serving()
        found = claim(client, "mail")
        assert [job.descriptor for job in found] == [lost]
        assert client.dequeue("mail", limit=2, succeeded=found) == []
        wait_until(lambda: CURE not in warnings())
