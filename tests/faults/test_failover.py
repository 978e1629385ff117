"""`pinlater-admin shard failover` on a running service with load: nothing acknowledged is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from pinlaterd.client import Job, JobState
from pinlaterd.model import JobDescriptor
from tests.conftest import FreePort, WaitUntil
from tests.deployment import COMMAND_SECONDS, MOST_PATIENT, Deployment
from tests.faults.load import Load, shards_of
from tests.servers.mariadb import HOST, PASSWD, USER
from tests.servers.mariadb_pair import (
    MariaDBPair,
    cursor_of,
    fresh,
    is_read_only,
    mariadb_servers,
    replica_status,
)
from tests.servers.redis_replicas import RedisPair, Watched, redis_program

__all__ = ["mariadb_servers", "redis_program"]

pytestmark = pytest.mark.service

LEASE_SECONDS = 6
BACK_SECONDS = 120.0
ADMIN = [sys.executable, "-m", "pinlaterd.cli.admin"]


class Cluster:
    """A service of two shards on MariaDB, one on Redis and one that Sentinels watch."""

    def __init__(self, deployment: Deployment, mysql: MariaDBPair, redis: RedisPair) -> None:
        self.deployment = deployment
        self.mysql = mysql
        self.redis = redis
        self.watched: Watched | None = None

    def command(self, *arguments: str) -> list[str]:
        """`pinlater-admin ARGUMENTS`."""
        return [*ADMIN, *arguments, "--dir", str(self.deployment.folder)]

    def admin(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=COMMAND_SECONDS,
        )

    def failover(self, shard: str, *arguments: str) -> dict[str, Any]:
        done = self.admin("shard", "failover", shard, "--yes", "--json", *arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def masters(self) -> dict[str, str]:
        """By shard, as `status` shows them."""
        return {
            process["name"].removeprefix("shard-"): process["facts"].get("master", "")
            for process in self.deployment.status()["processes"]
            if process["kind"] == "shard"
        }

    def shards_yaml(self) -> str:
        return (self.deployment.folder / "etc/shards.yaml").read_text()


def _mysql_shard(pair: MariaDBPair) -> str:
    return (
        f"    engine: mysql\n"
        f"    master: {{host: {HOST}, port: {pair.primary.port}}}  # the large machine\n"
        f"    slave: {{host: {HOST}, port: {pair.replica.port}}}\n"
        f"    user: {USER}\n"
        f"    passwd: {json.dumps(PASSWD)}\n"
    )


def _write_shards(deployment: Deployment, mysql: MariaDBPair, redis: RedisPair, w: Watched) -> None:
    (deployment.folder / "etc/shards.yaml").write_text(
        "# Ours, since 2014.\nshards:\n"
        f"  m1:\n{_mysql_shard(mysql)}"
        f"  m2:\n{_mysql_shard(mysql)}"
        "  r:\n    engine: redis\n"
        f"    master: {{host: {HOST}, port: {redis.master.port}}}\n"
        f"    slave: {{host: {HOST}, port: {redis.replica.port}}}\n"
        "  s:\n    engine: redis\n"
        f"    sentinel: {w.shard_yaml}\n"
    )


@pytest.fixture(scope="module")
def cluster(
    mariadb_servers: MariaDBPair,
    redis_program: str,
    free_port: FreePort,
    tmp_path_factory: pytest.TempPathFactory,
    wait_until: WaitUntil,
) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("c")
    pair = RedisPair(redis_program, folder / "pair", free_port)
    watched = Watched(redis_program, folder / "watched", free_port)
    deployment = Deployment(tmp_path_factory.mktemp("d"))
    cluster = Cluster(deployment, fresh(mariadb_servers, wait_until, gtid=True), pair)
    cluster.watched = watched
    try:
        pair.wait_until_in_step(wait_until)
        watched.wait_until_watched(wait_until)
        deployment.init(
            shards=1,
            settings={
                **MOST_PATIENT,
                "owner_lease_seconds": LEASE_SECONDS,
                "job_claimed_timeout_seconds": 600,
            },
        )
        _write_shards(deployment, mariadb_servers, pair, watched)
        deployment.up()
        yield cluster
    finally:
        deployment.destroy()
        pair.stop()
        watched.stop()


@pytest.fixture
def deployment(cluster: Cluster) -> Deployment:
    """All of it serves, whatever the test before did."""
    cluster.deployment.wait_until_serving(seconds=BACK_SECONDS)
    return cluster.deployment


@contextmanager
def loaded(load: Load) -> Iterator[None]:
    """Load before, during and after the block, all of it serving at the end."""
    with load.running():
        yield
        load.deployment.wait_until_serving(seconds=BACK_SECONDS)


def newest_id(cluster: Cluster, queue: str, shard: str) -> int:
    """Of a job enqueued now."""
    with cluster.deployment.client() as client:
        while True:
            descriptor = JobDescriptor.parse(client.enqueue(queue, [b"x"])[0])
            assert descriptor is not None
            if descriptor.shard == shard:
                return descriptor.local_id


def test_mysql_shards_fail_over_under_load_and_back(cluster, load, queue, wait_until):
    old, new = (f"{HOST}:{one.port}" for one in (cluster.mysql.primary, cluster.mysql.replica))
    with cluster.deployment.client() as client:
        client.create_queue("ids")
    before = newest_id(cluster, "ids", "m1")

    with loaded(load):
        done = cluster.failover("m1")

    load.check(claims_may_be_lost=True)
    assert done["shards"] == ["m1", "m2"]
    wait_until(lambda: {"m1": new, "m2": new}.items() <= cluster.masters().items())
    assert cluster.shards_yaml().startswith("# Ours, since 2014.\n")
    assert cluster.shards_yaml().count("# the large machine") == 2
    assert newest_id(cluster, "ids", "m1") > before
    assert is_read_only(cluster.mysql.primary)
    assert replica_status(cluster.mysql.primary)["Slave_SQL_Running"] == "Yes"
    assert {"m1", "m2"} <= shards_of(load.acknowledged)

    back = cluster.failover("m2")

    assert back["master"] == old
    cluster.deployment.wait_until_serving(seconds=BACK_SECONDS)
    wait_until(lambda: cluster.masters().get("m1") == old)


def test_redis_shards_fail_over_under_load(cluster, load, wait_until):
    new = f"{HOST}:{cluster.redis.replica.port}"

    with loaded(load):
        cluster.failover("r")

    load.check(claims_may_be_lost=True)
    wait_until(lambda: cluster.masters().get("r") == new)
    assert "r" in shards_of(load.acknowledged)


def test_sentinels_are_asked_for_a_failover_under_load(cluster, load, wait_until):
    watched = cluster.watched
    before = cluster.masters()["s"]

    with loaded(load):
        done = cluster.failover("s")

    load.check(claims_may_be_lost=True)
    assert done["master"] == f"{HOST}:{watched.named_master()}" != before
    wait_until(lambda: cluster.masters().get("s") == done["master"])
    assert "s" in shards_of(load.acknowledged)


def test_sentinels_replace_a_killed_master_without_a_hand(cluster, deployment, queue, wait_until):
    watched = cluster.watched
    watched.wait_until_watched(wait_until)
    killed = watched.server_at(watched.named_master())
    with deployment.client() as client:
        descriptors = client.enqueue(queue, [Job(b"x")] * 50)
        while "s" not in shards_of(descriptors):
            descriptors = client.enqueue(queue, [Job(b"x")] * 50)
        wait_until(lambda: watched.has_all(killed))

        killed.kill()

        gone = ("", f"{HOST}:{killed.port}")
        wait_until(lambda: cluster.masters().get("s", "") not in gone, seconds=BACK_SECONDS)
        deployment.wait_until_serving(seconds=BACK_SECONDS)
        assert client.lookup(descriptors).keys() == set(descriptors)
        assert all(
            record.state is JobState.PENDING for record in client.lookup(descriptors).values()
        )


# --- refused, and broken off ------------------------------------------------------------------


def test_what_could_lose_jobs_is_refused_and_changes_nothing(cluster, deployment):
    with cursor_of(cluster.mysql.replica) as cursor:
        cursor.execute("STOP SLAVE SQL_THREAD")
    before = cluster.shards_yaml()
    try:
        done = cluster.admin("shard", "failover", "m1", "--yes")
    finally:
        with cursor_of(cluster.mysql.replica) as cursor:
            cursor.execute("START SLAVE SQL_THREAD")

    assert done.returncode == 1
    assert "does not apply what it receives" in done.stderr
    assert "--accept-loss" in done.stderr
    assert cluster.shards_yaml() == before
    assert not is_read_only(cluster.mysql.primary)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nope",), "there is no shard 'nope'; there are: m1, m2, r, s"),
        (("m1", "--to", "127.0.0.1:1"), "nothing listens there"),
        (("s", "--to", "127.0.0.1:1"), "leave out --to"),
    ],
)
def test_what_makes_no_sense_is_refused(cluster, deployment, arguments, words):
    done = cluster.admin("shard", "failover", "--yes", *arguments)

    assert done.returncode == 1
    assert words in done.stderr


def test_a_check_says_what_would_be_done(cluster, deployment):
    done = cluster.admin("shard", "failover", "m2", "--check")

    assert done.returncode == 0, done.stderr
    assert "Failover of shard m1, m2" in done.stdout
    assert "stop writes on" in done.stdout


def test_a_command_killed_in_its_midst_is_gone_on_with(cluster, load, queue, wait_until):
    """Killed while it waits for a replica that can't go on: writes are stopped by then."""
    old, new = cluster.mysql.primary, cluster.mysql.replica
    wait_until(lambda: replica_status(new)["Slave_IO_Running"] == "Yes")
    with loaded(load):
        with cursor_of(new) as blocker:
            blocker.execute("FLUSH TABLES WITH READ LOCK")
            command = subprocess.Popen(
                cluster.command("shard", "failover", "m1", "--yes"), stdout=subprocess.DEVNULL
            )
            wait_until(lambda: is_read_only(old))
            os.kill(command.pid, signal.SIGKILL)
            command.wait()

        cluster.failover("m1")

    load.check(claims_may_be_lost=True)
    wait_until(lambda: cluster.masters().get("m1") == f"{HOST}:{new.port}")
    assert list((cluster.deployment.folder / "run").glob("failover-*.json")) == []


def test_a_dead_master_needs_loss_to_be_accepted(cluster, deployment, queue, wait_until):
    """The last of this module: afterwards m1 and m2 have no replica any more."""
    master = cluster.mysql.replica  # since the test before
    wait_until(lambda: replica_status(cluster.mysql.primary)["Slave_IO_Running"] == "Yes")
    master.kill()

    refused = cluster.admin("shard", "failover", "m1", "--yes")
    done = cluster.failover("m1", "--accept-loss")

    assert refused.returncode == 1
    assert "can't prove" in refused.stderr
    assert "may have jobs" in done["done"][-1]
    deployment.wait_until_serving(seconds=BACK_SECONDS)
    wait_until(lambda: cluster.masters().get("m1") == f"{HOST}:{cluster.mysql.primary.port}")
