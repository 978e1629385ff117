"""`pinlater-admin shard failover` without a service: the configuration, and going on with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pinlaterd.cli.failover import FailoverBroken, ShardFailover
from pinlaterd.config.layout import lock
from pinlaterd.config.load import load_config
from pinlaterd.config.schema import Address
from pinlaterd.errors import ConfigError
from tests.cli.program import Program
from tests.servers.redis import HOST
from tests.servers.redis_replicas import RedisPair, redis_pair, redis_program, replication

__all__ = ["redis_pair", "redis_program"]

admin = Program("admin")


@pytest.fixture
def deployment(tmp_path: Path, redis_pair: RedisPair) -> Path:
    """Written, and never started. In the form that PinLater's server was given."""
    master = {"host": HOST, "port": redis_pair.master.port}
    slave = {"host": HOST, "port": redis_pair.replica.port}
    shards = [
        {"name": name, "shardConfig": {"master": master, "slave": slave, "dequeueOnly": False}}
        for name in ("1", "2")
    ]
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/shards.yaml").write_text(json.dumps({"shards": shards}, indent=2))
    return tmp_path


def masters(deployment: Path) -> list[Address | None]:
    return [shard.master for shard in load_config(deployment / "etc").shards.values()]


def test_without_a_service_servers_and_file_are_changed(deployment, redis_pair):
    assert "no service runs here" in admin.output("shard failover 2 --yes --dir", deployment)
    assert masters(deployment) == [Address(HOST, redis_pair.replica.port)] * 2
    assert replication(redis_pair.master)["role"] == "slave"
    assert list((deployment / "run").glob("failover-*.json")) == []


def test_nobody_is_asked_in_a_pipe(deployment, redis_pair):
    assert "--yes" in admin.error("shard failover 1 --dir", deployment, code=2)
    assert replication(redis_pair.master)["role"] == "master"


def test_what_is_broken_off_behind_the_promotion_is_gone_on_with(deployment, redis_pair):
    """As by a crash: another command has nothing but the journal."""
    shards_file = deployment / "etc/shards.yaml"
    good = shards_file.read_text()
    (deployment / "run").mkdir()
    broken = ShardFailover(deployment, "1", catch_up_seconds=60.0)
    broken.plan()
    shards_file.write_text("{")
    with pytest.raises(FailoverBroken, match="it goes on from there"):
        broken.carry_out(lambda _: None)
    broken.close()
    shards_file.write_text(good)
    other = admin.error(f"shard failover 2 --yes --to {HOST}:1 --dir", deployment)

    done = admin.output("shard failover 2 --yes --dir", deployment)

    assert "go on with that first" in other
    assert "broken off" in done
    assert masters(deployment) == [Address(HOST, redis_pair.replica.port)] * 2


def test_only_one_failover_at_a_time(deployment):
    (deployment / "run").mkdir()
    with lock(deployment / "run/failover.lock", patient=False):
        refused = admin.error("shard failover 1 --yes --dir", deployment)

    assert "refused: another failover runs in this deployment" in refused


def test_a_journal_that_can_t_be_read_is_not_passed_over(deployment, redis_pair):
    (deployment / "run").mkdir()
    (deployment / "run/failover-1.json").write_text('{"shards": ["1"]}')

    with pytest.raises(ConfigError, match="put them in order by hand"):
        ShardFailover(deployment, "1", catch_up_seconds=60.0)

    assert replication(redis_pair.master)["role"] == "master"


def test_a_password_without_its_user_is_wrong_usage(deployment):
    done = admin.error("shard failover 1 --passwd-file /dev/null --dir", deployment, code=2)

    assert "Give --user, too" in done


def test_a_file_has_no_replica(tmp_path):
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/shards.yaml").write_text("shards: {1: {}}")

    assert "has no replica" in admin.error("shard failover 1 --yes --dir", tmp_path)
