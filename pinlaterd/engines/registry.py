"""Engines, and their failovers, by the name that shards.yaml gives. Each is loaded only when a
shard needs it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from pinlaterd.clock import SystemClock
from pinlaterd.config.schema import SentinelSettings, ServerSettings, ShardSettings
from pinlaterd.engines.base import StorageEngine
from pinlaterd.engines.failover import Account, Failover, Handover, Notes, Pair

if TYPE_CHECKING:
    from pinlaterd.engines.redis.sentinel import Locator, Sentinels

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
        most_body_bytes=server.max_job_body_bytes,
        lease_seconds=server.owner_lease_seconds,
        answer_seconds=server.store_answer_seconds,
    )


def _redis(shard: ShardSettings, server: ServerSettings) -> StorageEngine:
    from pinlaterd.engines.redis.connection import Server  # noqa: PLC0415
    from pinlaterd.engines.redis.engine import RedisEngine  # noqa: PLC0415

    locator: Locator
    if shard.sentinel is not None:
        locator = _sentinels(shard.sentinel, shard.user, shard.passwd)
    else:
        assert shard.master is not None, "shards.yaml is checked for it"
        locator = Server(*shard.master, shard.user, shard.passwd)
    return RedisEngine(
        shard.name,
        locator,
        priority_levels=server.num_priority_levels,
        lease_seconds=server.owner_lease_seconds,
        answer_seconds=server.store_answer_seconds,
        lean=server.redis_layout == "lean",
    )


def _sentinels(settings: SentinelSettings, user: str, passwd: str) -> Sentinels:
    """`user`, `passwd`: at the master, not at the Sentinels."""
    from pinlaterd.engines.redis.connection import Server  # noqa: PLC0415
    from pinlaterd.engines.redis.sentinel import Sentinels  # noqa: PLC0415

    return Sentinels(
        settings.service,
        tuple(Server(*place, settings.user, settings.passwd) for place in settings.addresses),
        Server("", 0, user, passwd),
    )


ENGINES: dict[str, EngineFactory] = {"sqlite": _sqlite, "mysql": _mysql, "redis": _redis}


def make_engine(shard: ShardSettings, server: ServerSettings | None = None) -> StorageEngine:
    """The engine that `shard` names, not opened yet."""
    return ENGINES[shard.engine](shard, server or ServerSettings())


def make_failover(
    shard: ShardSettings, pair: Pair | None, handover: Handover, notes: Notes
) -> Failover:
    """That of the shard's server; `has_failover` is true. `pair`: None where Sentinels choose."""
    if shard.sentinel is not None:
        return _sentinel_failover(shard.sentinel, handover.administrator, handover)
    assert pair is not None, "only Sentinels know the servers themselves"
    return _FAILOVERS[shard.engine](pair, handover, notes)


def has_failover(shard: ShardSettings) -> bool:
    """Whether another server can take the place of the shard's."""
    return shard.engine in _FAILOVERS


def _mysql_failover(pair: Pair, handover: Handover, notes: Notes) -> Failover:
    from pinlaterd.engines.mysql.failover import MysqlFailover  # noqa: PLC0415

    return MysqlFailover(pair, handover, notes, SystemClock())


def _redis_failover(pair: Pair, handover: Handover, notes: Notes) -> Failover:
    from pinlaterd.engines.redis.failover import RedisFailover  # noqa: PLC0415

    return RedisFailover(pair, handover, notes, SystemClock())


def _sentinel_failover(
    settings: SentinelSettings, account: Account, handover: Handover
) -> Failover:
    from pinlaterd.engines.redis.failover import SentinelFailover  # noqa: PLC0415

    sentinels = _sentinels(settings, account.user, account.passwd)
    return SentinelFailover(sentinels, handover, SystemClock())


_FAILOVERS: dict[str, FailoverFactory] = {"mysql": _mysql_failover, "redis": _redis_failover}
