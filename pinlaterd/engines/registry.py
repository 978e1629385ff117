"""Engines, and their failovers, by the name that shards.yaml gives. Each is loaded only when a
shard needs it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pinlaterd.clock import SystemClock
from pinlaterd.config.schema import ServerSettings, ShardSettings
from pinlaterd.engines.base import StorageEngine
from pinlaterd.engines.failover import Failover, Handover, Notes, Pair

EngineFactory = Callable[[ShardSettings, ServerSettings], StorageEngine]
FailoverFactory = Callable[[Pair, Handover, Notes], Failover]


def _sqlite(shard: ShardSettings, _server: ServerSettings) -> StorageEngine:
    from pinlaterd.engines.sqlite.engine import SqliteEngine  # noqa: PLC0415

    return SqliteEngine(Path(shard.file))


def _mysql(shard: ShardSettings, server: ServerSettings) -> StorageEngine:
    from pinlaterd.engines.mysql.connection import Server  # noqa: PLC0415
    from pinlaterd.engines.mysql.engine import MysqlEngine  # noqa: PLC0415

    assert shard.master is not None  # mysql shards need one: config.shards_file
    return MysqlEngine(
        shard.name,
        Server(shard.master.host, shard.master.port, shard.user, shard.passwd),
        levels=server.num_priority_levels,
        lease_seconds=server.owner_lease_seconds,
    )


def _redis(shard: ShardSettings, server: ServerSettings) -> StorageEngine:
    from pinlaterd.engines.redis.connection import Server  # noqa: PLC0415
    from pinlaterd.engines.redis.engine import RedisEngine  # noqa: PLC0415

    assert shard.master is not None, "shards.yaml is checked for it"
    return RedisEngine(
        shard.name,
        Server(*shard.master, shard.user, shard.passwd),
        priority_levels=server.num_priority_levels,
        lease_seconds=server.owner_lease_seconds,
    )


ENGINES: dict[str, EngineFactory] = {"sqlite": _sqlite, "mysql": _mysql, "redis": _redis}


def make_engine(shard: ShardSettings, server: ServerSettings | None = None) -> StorageEngine:
    """The engine that `shard` names, not opened yet."""
    return ENGINES[shard.engine](shard, server or ServerSettings())


def _mysql_failover(pair: Pair, handover: Handover, notes: Notes) -> Failover:
    from pinlaterd.engines.mysql.failover import MysqlFailover  # noqa: PLC0415

    return MysqlFailover(pair, handover, notes, SystemClock())


def _redis_failover(pair: Pair, handover: Handover, notes: Notes) -> Failover:
    from pinlaterd.engines.redis.failover import RedisFailover  # noqa: PLC0415

    return RedisFailover(pair, handover, notes, SystemClock())


# Of the engines whose servers replicate.
FAILOVERS: dict[str, FailoverFactory] = {"mysql": _mysql_failover, "redis": _redis_failover}
