"""This server's part in its cluster: which shards have a process here; and, where it leads, which
server owns which.

ZooKeeper suggests who owns a shard, by an epoch that only grows; the shard's store decides. Each
coordinator keeps its member node up to date, which says how the shard processes here are. The
oldest member leads: it reads that and writes the assignment, which all follow. Without ZooKeeper
all stays as it was, also for a coordinator that is restarted: it has the last snapshot. An
assignment older than the one that is followed is ignored.

Knows no processes and no sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from pinlaterd import __version__
from pinlaterd.clock import Clock
from pinlaterd.config.active import ActiveConfig
from pinlaterd.config.layout import CLUSTER_KEY_FILE, ETC, ZOOKEEPER_SESSION
from pinlaterd.config.schema import Config, ServerSettings, ShardSettings
from pinlaterd.coordinator.placement import Assigned, Assignment, Member, Placement, ShardState
from pinlaterd.coordinator.reload import Activate
from pinlaterd.coordinator.shared_config import Ask, SharedConfig
from pinlaterd.coordinator.zookeeper import (
    SESSION_SECONDS,
    Conflict,
    Node,
    NotConnected,
    Session,
    View,
    endpoint_of,
)
from pinlaterd.stats import natural
from pinlaterd.status import STOPPED, ServerStatus, ShardStatus, Status
from pinlaterd.wire.control import ProcessState, ShardEntry, Snapshot
from pinlaterd.wire.curve import ClusterKey
from pinlaterd.wire.key_placement import KeyPlacement

log = logging.getLogger(__name__)

T = TypeVar("T")

_NO_VERSION = -1


class Place(NamedTuple):
    """This server's place in the cluster, by the snapshot."""

    server: str
    member: str
    members: tuple[str, ...]


class Cluster:
    """Used on the event loop, which gives it each View."""

    def __init__(
        self,
        settings: ServerSettings,
        before: Snapshot | None,
        clock: Clock,
        on_view: Callable[[View], None],
    ) -> None:
        """`before`: the snapshot of the coordinator before this one. `on_view` is called on the
        event loop with all that ZooKeeper holds, when it may have changed. Raises ConfigError."""
        self.place = Place(settings.server, "", ())
        self.members: Mapping[str, Member] = {}  # that live, by node, the oldest first
        self.assigned: Mapping[str, Assigned] = {}  # by shard
        self.keys = KeyPlacement() if before is None else before.keys
        self.weight = settings.weight
        self.config = 0  # the number of what all processes here follow
        self.keys_followed = 0  # the placement of keys that all routers here follow, with that
        self.leaving = False  # whether this server is about to go: its shards go elsewhere
        if before is not None:
            self.place = Place(settings.server, before.member, before.members)
            self.assigned = {e.name: _assigned(e) for e in before.shards if e.server}
        self.key = ClusterKey.load(ETC / CLUSTER_KEY_FILE, settings.cluster)
        self._settings = settings
        self._session = Session(
            settings.zookeeper,
            settings.cluster,
            self.key.digest,
            ZOOKEEPER_SESSION,
            on_view,
            asyncio.get_running_loop(),
            server_set=settings.server_set_path,
        )
        self._clock = clock
        self._placement = Placement()
        self._view: View | None = None
        self._resting: AbstractSet[str] = frozenset()  # servers in maintenance, by the view
        self._assignment_made_ms = 0
        self._version = _NO_VERSION  # of the assignment
        self._written = _NO_VERSION  # of the assignment that this server wrote last
        self._described = self._member({}, ())

    def shared_config(
        self, etc: Path, active: ActiveConfig, activate: Activate, ask: Ask
    ) -> SharedConfig:
        write = self._session.write
        return SharedConfig(
            etc,
            active,
            activate,
            self.place.server,
            lambda data, version, leads: write("config", data, version, as_leader=leads),
            ask,
        )

    def start(self) -> None:
        """Become a member; goes on trying if ZooKeeper can't be reached, or refuses (`problem`)."""
        self._session.start(msgspec.json.encode(self._described))

    async def register(self) -> None:
        """Belong to the cluster, also after ZooKeeper has lost its data."""
        server, view = self.place.server, self._view
        if view is not None and self.connected and server not in view.servers:
            with contextlib.suppress(Conflict, NotConnected):
                await self._session.write(f"servers/{server}", b"{}", None, as_leader=False)

    def stop(self) -> None:
        """End the session if this server leaves; else it goes on for a successor."""
        self._session.stop(leave=self.leaving)

    # --- what is followed ------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        """Whether ZooKeeper answers, and this server is a member."""
        return self._view is not None and self._view.connected and bool(self._view.own)

    @property
    def problem(self) -> str:
        """Say why this server can't be a member, and the cure; "" if it can."""
        return "" if self._view is None else self._view.problem

    def here(self, config: Config) -> Config:
        """Return `config` with those shards only that have a process on this server."""
        server, assigned = self.place.server, self.assigned.items()
        return config.only({name for name, to in assigned if server in (to.server, to.next)})

    def owned(self, config: Config) -> Config:
        """Return `config` with those shards only that this server is to own."""
        server = self.place.server
        return config.only({name for name, to in self.assigned.items() if to.server == server})

    def entry(self, shard: ShardSettings, *, joining: bool) -> ShardEntry:
        """Make the snapshot's entry of a shard."""
        found = self.assigned.get(shard.name, _NOWHERE)
        where = (found.server, found.epoch, found.endpoint, found.next, found.planned, found.slot)
        return ShardEntry(shard.name, shard.dequeue_only, *where, joining)

    def state_of(self, shard: str) -> str:
        """Return the shard's state as its owner's server reports it; "" if it reports none."""
        owner = self.assigned.get(shard, _NOWHERE).server
        states = [
            member.shards.get(shard) for member in self.members.values() if member.server == owner
        ]
        return next((found.state for found in states if found is not None), "")

    def follow(self, view: View) -> bool:
        """Follow a view; return whether that changes the snapshot of this server or of shards."""
        before = (self.place, self.assigned, self.keys)
        self._view = view
        self._resting = {name for name, node in view.servers.items() if _rests(node)}
        if view.connected and view.own:
            found = {node: _decode(data, Member, node) for node, data in view.members.items()}
            self.members = {node: member for node, member in found.items() if member is not None}
            self.place = Place(self.place.server, view.own, tuple(view.members))
        node = view.nodes.get("assignment")
        if node is not None and node.created_ms != self._assignment_made_ms:
            # The first that is seen, or made again after a loss of ZooKeeper's data.
            self._assignment_made_ms = node.created_ms
            self._version = self._written = _NO_VERSION
        if node is not None and node.version > self._version:
            assignment = _decode(node.data, Assignment, "assignment")
            if assignment is not None:
                self.assigned, self._version = assignment.shards, node.version
        if (keys := view.nodes.get("keys")) is not None:
            placement = _decode(keys.data, KeyPlacement, "keys")
            if placement is not None and placement.number > self.keys.number:
                self.keys = placement
        return (self.place, self.assigned, self.keys) != before

    def serves(self, shards: Iterable[str]) -> bool:
        """Tell whether live members are all servers that there are, or say that they serve all
        `shards`, in the epochs assigned: so that no other server serves any."""
        servers = {member.server for member in self.members.values()}
        known = set() if self._view is None else self._view.servers.keys()
        return (bool(known) and known <= servers) or all(
            any(
                member.server == found.server
                and member.shards.get(shard) == ShardState(ProcessState.SERVING, found.epoch)
                for member in self.members.values()
            )
            for shard in shards
            for found in [self.assigned.get(shard, _NOWHERE)]
        )

    # --- what is told ----------------------------------------------------------------------------

    def describe(self, shards: Mapping[str, ShardState], unreached: Sequence[str]) -> None:
        """Describe in our member node our shards, and those that no router here reaches."""
        self._described = self._member(shards, unreached)
        self._session.describe(msgspec.json.encode(self._described))

    def announce(self, *, serving: bool) -> None:
        """Have clients find this server while it serves and does not rest."""
        settings, rests = self._settings, self.place.server in self._in_maintenance()
        endpoint = endpoint_of(settings.advertised_host, settings.port, settings.stats_port)
        self._session.announce(endpoint if serving and not rests else None)

    def _member(self, shards: Mapping[str, ShardState], unreached: Sequence[str]) -> Member:
        settings = self._settings
        return Member(
            settings.server,
            settings.peer_host,
            f"{settings.peer_host}:{settings.peer_port}",
            settings.shard_ports,
            f"{settings.advertised_host}:{settings.port}",
            __version__,
            weight=self.weight,
            config=self.config,
            keys=self.keys_followed,
            shards=shards,
            unreached=unreached,
            leaving=self.leaving,
        )

    # --- what the leader decides -----------------------------------------------------------------

    async def lead(self, shards: Mapping[str, ShardSettings]) -> None:
        """Write the assignment that follows from what is known, if this server leads."""
        view = self._view
        if view is None or not (view.connected and view.leads):
            self._placement = Placement()  # what it saw is old by the time we lead again
            return
        # ZooKeeper may have lost its data: what was assigned stays.
        assignment, version = Assignment(self.assigned), None
        node = view.nodes.get("assignment")
        if node is not None:
            found, version = _decode(node.data, Assignment, "assignment"), node.version
            if found is None or version < self._written:
                return  # a later release's; or what we wrote is still to be seen
            assignment = found
        pins = {name: shard.server for name, shard in shards.items()}
        times = (self._clock.monotonic(), self._clock.now_ms())
        wanted = self._placement.decide(
            *times, pins, self.members, self._in_maintenance(), assignment
        )
        if wanted == assignment and node is not None:
            return
        data = msgspec.json.encode(wanted)
        try:
            self._written = await self._session.write("assignment", data, version, as_leader=True)
        except (Conflict, NotConnected) as error:
            log.warning("the assignment can't be written: %s; trying again", error)
            return
        for name, to in wanted.shards.items():
            if to != assignment.shards.get(name):
                log.info("shard-%s: %s", name, to)

    async def place_keys(self, takers: Mapping[str, bool], kept_ms: float) -> None:
        """Write the placement of keys that follows from `takers` (KeyPlacement.followed_by), if
        this server leads. All follow it once they see it."""
        view = self._view
        if view is None or not (view.connected and view.leads):
            return
        node = view.nodes.get("keys")
        wanted = self.keys.followed_by(takers, self._clock.now_ms(), kept_ms)
        if node is not None and (
            wanted is self.keys or _decode(node.data, KeyPlacement, "keys") is None
        ):
            return
        data, version = msgspec.json.encode(wanted), None if node is None else node.version
        try:
            await self._session.write("keys", data, version, as_leader=True)
        except (Conflict, NotConnected) as error:
            log.warning("the placement of keys can't be written: %s; trying again", error)

    def _in_maintenance(self) -> AbstractSet[str]:
        """List the servers that own no shards if others can."""
        return self._resting | {one.server for one in self.members.values() if one.leaving}

    # --- status ----------------------------------------------------------------------------------

    def add_to(self, found: Status, config: Config) -> Status:
        """Add to this server's status what it knows of other servers and their shards."""
        mine = {shard["name"]: shard for shard in found["shards"]}
        shards = [mine.get(name) or self._shard(shard) for name, shard in config.shards.items()]
        for shard in shards:
            shard["server"] = self.assigned.get(shard["name"], _NOWHERE).server
        away = [
            f"shard-{s['name']} is not served: server {s['server'] or 'none'}, {s['state']}"
            for s in shards
            if s["state"] != ProcessState.SERVING and s["name"] not in mine
        ]
        missed = self._described.unreached
        away += [f"no router here reaches shard-{name}" for name in missed]
        problems = [*found["problems"]]
        if config.shards.keys() <= {*missed}:
            problems.append("no router here reaches any shard: clients need another server")
        if not self.connected:
            away.append(
                f"ZooKeeper ({self._settings.zookeeper}) does not answer: what runs goes on, but no"
                " shard moves, and no change of the configuration acts"
            )
        if self._session.server_set_problem:
            away.append(self._session.server_set_problem)
        if self._session.negotiated_seconds > SESSION_SECONDS:
            away.append(
                f"ZooKeeper takes {self._session.negotiated_seconds:g} s to find that a server is "
                f"gone; set its tickTime to 1000, its minSessionTimeout to {SESSION_SECONDS:g} s "
                "or less"
            )
        servers, server = self._servers(), self.place.server
        others = self.connected and any(
            other["state"] == "alive" and not other["maintenance"] and other["name"] != server
            for other in servers
        )
        here = self.here(config).shards.values() if others else ()
        mobile = [shard.name for shard in here if not shard.server]
        return {
            **found,
            "healthy": not problems,
            "problems": problems,
            "shards": shards,
            "servers": servers,
            "shards_to_leave": mobile,
            "warnings": [*found["warnings"], *away],
        }

    def figures(self, config: Config) -> Mapping[str, int]:
        """Return the gauges; each is worth an alarm while it is not 0."""
        unserved = {
            *(name for name in config.shards if self.state_of(name) != ProcessState.SERVING),
            *self._described.unreached,
        }
        gone = [server for server in self._servers() if server["state"] == "gone"]
        return {
            "cluster_zookeeper_away": int(not self.connected),
            "cluster_servers_gone": len(gone),
            "cluster_shards_not_served": len(unserved),
        }

    def _shard(self, shard: ShardSettings) -> ShardStatus:
        """Return the status of a shard that has no process here."""
        state = self.state_of(shard.name)
        return {
            "name": shard.name,
            "engine": shard.engine,
            "state": state or STOPPED,
            "healthy": state == ProcessState.SERVING,
            "dequeue_only": shard.dequeue_only,
            "degraded": "",
            "takes_jobs": state == ProcessState.SERVING and not shard.dequeue_only,
            "warnings": [],
            "server": "",
        }

    def _servers(self) -> Sequence[ServerStatus]:
        alive = {member.server: member for member in self.members.values()}
        nodes = {} if self._view is None else self._view.servers
        leader = next((member.server for member in self.members.values()), "")
        resting = self._in_maintenance()
        return [
            {
                "name": name,
                "state": "alive" if name in alive else "gone",
                "leads": name == leader,
                "maintenance": name in resting,
                "thrift": alive[name].thrift if name in alive else "",
                "version": alive[name].version if name in alive else "",
                "config": alive[name].config if name in alive else 0,
                "shards": [shard for shard, of in self.assigned.items() if of.server == name],
            }
            for name in sorted({*alive, *nodes}, key=natural)
        ]


_NOWHERE = Assigned("", 0, "", 0)


def _assigned(entry: ShardEntry) -> Assigned:
    where = (entry.server, entry.epoch, entry.endpoint, entry.slot)
    return Assigned(*where, entry.next, entry.planned)


def _rests(node: Node) -> bool:
    try:
        return bool(json.loads(node.data).get("maintenance"))
    except (ValueError, AttributeError):
        return False


def _decode(data: bytes, kind: type[T], node: str) -> T | None:
    """Decode the data of a node; None if no version up to this one writes such."""
    try:
        return msgspec.json.decode(data, type=kind)
    except ValueError as error:
        log.error("ZooKeeper's node %s can't be read: %s", node, error)
        return None
