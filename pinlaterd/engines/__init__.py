"""Storage: the contract, what engines share, and each engine by its package's name.

    base        the StorageEngine contract
    batches     the order of acks, keys, how many claims fit
    counts      how many jobs each queue holds, in memory, counted beside the owner
    searching   the search that all engines share
    failover    how a replica becomes the master of its shards
    sqlite, mysql, redis
                the engines

That name is what shards.yaml says. The module `engine` of such a package has `make_engine`; where
another server can take the place of a shard's, the module `failover` has `make_failover`. Each is
loaded only when a shard needs it.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec

from pinlaterd.config.schema import ServerSettings, ShardSettings
from pinlaterd.engines.base import StorageEngine
from pinlaterd.engines.failover import Failover, Handover, Notes, Pair


def make_engine(shard: ShardSettings, server: ServerSettings | None = None) -> StorageEngine:
    """Make the engine that `shard` names; it is not open yet."""
    module = import_module(f"{__package__}.{shard.engine}.engine")
    engine: StorageEngine = module.make_engine(shard, server or ServerSettings())
    return engine


def has_failover(shard: ShardSettings) -> bool:
    """Tell whether another server can take the place of the shard's."""
    return find_spec(f"{__package__}.{shard.engine}.failover") is not None


def make_failover(
    shard: ShardSettings, pair: Pair | None, handover: Handover, notes: Notes
) -> Failover:
    """Make the failover of a shard that `has_failover`. `pair`: None where Sentinels choose."""
    module = import_module(f"{__package__}.{shard.engine}.failover")
    failover: Failover = module.make_failover(shard, pair, handover, notes)
    return failover
