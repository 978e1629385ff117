"""What the engine says of how well a server keeps what it has acknowledged."""

from __future__ import annotations

import pytest

from pinlaterd.errors import StorageError
from tests.engines.redis.conftest import NewServer
from tests.servers.redis import HOST, RedisServer, redis_engine


def _durability(server: RedisServer) -> tuple[str, str]:
    engine = redis_engine(server.address, "1")
    engine.open(1)
    try:
        return engine.durability()
    finally:
        engine.close()


def test_what_is_acknowledged_is_kept(new_server: NewServer):
    assert _durability(new_server("--appendfsync", "always")) == (
        "appendonly yes, appendfsync always, save ''",
        "",
    )


@pytest.mark.parametrize(
    ("settings", "shown", "warning"),
    [
        (["--appendfsync", "everysec"], "appendfsync everysec", "jobs of the last second"),
        (["--appendfsync", "no"], "appendfsync no", "jobs of the last half minute"),
        (["--appendonly", "no"], "appendonly no", "nothing is persisted"),
        (
            ["--appendonly", "no", "--save", "3600 1"],
            "save 3600 1",
            "loses the jobs since its last snapshot",
        ),
        (
            ["--appendfsync", "always", "--maxmemory-policy", "allkeys-lru"],
            "appendfsync always",
            "maxmemory-policy allkeys-lru may evict jobs; set maxmemory-policy noeviction",
        ),
    ],
)
def test_what_may_be_lost_is_warned_of(
    new_server: NewServer, settings: list[str], shown: str, warning: str
):
    setting, said = _durability(new_server(*settings))

    assert shown in setting
    assert warning in said


def test_a_replica_is_refused_even_where_it_takes_writes(new_server: NewServer):
    master = new_server("--appendfsync", "always")
    replica = new_server(
        *("--appendfsync", "always", "--replica-read-only", "no"),
        *("--replicaof", f"{HOST} {master.port}"),
    )

    with pytest.raises(StorageError, match="is a replica"):
        redis_engine(replica.address, "s").open(1_000)
