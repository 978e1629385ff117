"""Which server owns which shard of a cluster.

What ZooKeeper holds of it, as JSON: each member's data, and the assignment. Pure: no clock, no
sockets, no files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec


class ShardState(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a member says of a shard's process that it runs.

    starting; standby: prepared, waits to become the owner; serving: with `epoch`; superseded: the
    store's record bears `epoch`, which is greater, or another server's.
    """

    state: str
    epoch: int = 0


class Member(msgspec.Struct, frozen=True, omit_defaults=True):
    """A server's coordinator, as it describes itself in its member node."""

    server: str
    host: str
    peer: str  # HOST:PORT, for other coordinators
    shard_ports: int  # a shard listens on this one plus its slot
    thrift: str  # HOST:PORT
    version: str
    formats: tuple[int, int] = (1, 1)  # the lowest and the highest that it can read
    weight: float = 1.0
    shards: Mapping[str, ShardState] = {}
    unreached: Sequence[str] = ()  # shards that its routers can't reach
    leaving: bool = False  # it is about to go: as if in maintenance


class Assigned(msgspec.Struct, frozen=True, omit_defaults=True):
    """Who is to own a shard, and where it listens for other servers."""

    server: str
    epoch: int
    endpoint: str  # of ZeroMQ
    slot: int
    next: str = ""  # a server that prepares to become the owner
    planned: bool = False  # whether the owner before lived when this one was chosen


class Assignment(msgspec.Struct, frozen=True, omit_defaults=True):
    shards: Mapping[str, Assigned] = {}
