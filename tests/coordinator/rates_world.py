"""Servers of a cluster, as far as rates go: their routers, coordinators, shards, and ZooKeeper.

The allocators and ServerRates are the real ones. Messages wait until they are delivered or lost.
Whoever may be wrong in reality may be here: views are as old as the last look, a process follows
the last snapshot that reached it, one that lost its node in ZooKeeper goes on until it sees that.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, cast

from pinlaterd.config.kinds import numbered
from pinlaterd.config.schema import Config, ServerSettings, default_queue_settings
from pinlaterd.coordinator.peers import Peers
from pinlaterd.coordinator.rates import RateControl
from pinlaterd.coordinator.server_rates import ClusterView, ServerRates
from pinlaterd.router.rate_limits import shares_at_start
from pinlaterd.stats import Stats
from pinlaterd.wire.control import (
    ControlServer,
    Holding,
    RateGrant,
    RateReport,
    RouterId,
    ServerGrant,
    ServerReport,
)
from tests.clocks import FakeClock

QUEUE = "mail"
LIMIT = 12.0
SHARDS = ("1", "2")


class Owner(NamedTuple):
    """Of a shard. As assigned, or as the shard's store has it."""

    server: str
    epoch: int


class Snapshot(NamedTuple):
    """What a server's processes follow."""

    member: str
    members: frozenset[str]
    assignment: Mapping[str, Owner]


@dataclass
class Router:
    id: RouterId
    shares: dict[str, float]
    snapshot: Snapshot
    followed: int = 0
    demand: float = 0.0
    inbox: deque[RateGrant | Snapshot] = field(default_factory=deque)
    reports: deque[RateReport] = field(default_factory=deque)
    on_grant: Callable[[RateGrant], Mapping[str, float]] = lambda _grant: {}  # gives tokens up

    def report(self, returned: Mapping[str, float] | None = None) -> None:
        demands = {QUEUE: self.demand} if self.demand else {}
        self.reports.append(
            RateReport(self.id, self.followed, dict(self.shares), demands, returned or {})
        )

    def hear(self) -> None:
        message = self.inbox.popleft()
        if isinstance(message, Snapshot):
            self.snapshot = message
        elif message.number > self.followed:
            self.followed, self.shares = message.number, dict(message.shares)
            self.report(self.on_grant(message))


@dataclass
class ShardProcesses:
    """A server's, which all follow the same snapshot."""

    snapshot: Snapshot
    inbox: deque[Snapshot] = field(default_factory=deque)


class Coordinator:
    """A coordinator's process. It is the Peers of its ServerRates, too."""

    def __init__(self, world: World, host: Host) -> None:
        self.world, self.host = world, host
        self.id = world.new_id()
        self.view: frozenset[str] | None = None  # as looked at last
        self.up: deque[tuple[bytes, ServerReport]] = deque()
        self.down: deque[tuple[str, ServerGrant]] = deque()
        server = ServerSettings(cluster="c", server=host.name, routers=len(host.names))
        limited = replace(default_queue_settings(server), max_jobs_per_second=LIMIT)
        config = Config(server, queues={QUEUE: limited})
        Note.current = host
        self.rates = RateControl(config, world.clock, Stats(), host.is_running)
        self.server_rates = ServerRates(
            host.name,
            host.snapshot.member,
            {QUEUE: LIMIT},
            world.clock,
            self.rates,
            cast("Peers", self),
        )

    # --- the lines -------------------------------------------------------------------------

    def tell(self, member: str, message: ServerReport) -> bool:
        host = self.world.host_of(member)
        if host.coordinator is not None and (self.host.name, host.name) not in self.world.cuts:
            host.coordinator.up.append((f"{self.id} {member}".encode(), message))
        return True  # as far as it knows

    def reply(self, peer: bytes, message: ServerGrant) -> None:
        ident, member = peer.decode().split()
        for host in self.world.hosts.values():
            if host.coordinator is not None and host.coordinator.id == int(ident):
                host.coordinator.down.append((member, message))

    def send(self, peer: bytes, grant: RateGrant) -> None:
        for router in self.host.routers.values():
            if router.id.pid == int(peer):
                router.inbox.append(grant)

    # --- what it does ----------------------------------------------------------------------

    def hear(self, router: Router) -> bool:
        """What a router reported; whether there was anything."""
        found = bool(router.reports)
        while router.reports:
            self.rates.allocator.heard(b"%d" % router.id.pid, router.reports.popleft())
        return found

    def look(self) -> None:
        """At ZooKeeper."""
        zookeeper = self.world.zookeeper
        if self.host.name in self.world.cut_off:
            return
        if self.host.node not in zookeeper:
            self.world.join(self.host.name)
        self.view = frozenset(zookeeper)
        self.assignment = dict(self.world.assignment)
        self.serving = dict(self.world.serving)
        self.follow()
        self.publish()

    def follow(self) -> None:
        if self.view is None:
            return
        members = {node: self.world.servers[node] for node in sorted(self.view)}
        own = max((node for node, name in members.items() if name == self.host.name), default="")
        admitted = self.host.shards.snapshot.members | {
            node for snapshot in self.host.shards.inbox for node in snapshot.members
        }
        served = {*members.values()} == {*self.world.hosts} or all(
            self.serving.get(shard) == owner and owner.server in members.values()
            for shard, owner in self.assignment.items()
        )
        self.server_rates.follow(ClusterView(members, own, frozenset(admitted), served))

    def publish(self) -> None:
        if self.view is None:
            return
        snapshot = Snapshot(self.server_rates.member, self.view, self.assignment)
        if snapshot != self.host.snapshot:
            self.host.snapshot = snapshot
            self.host.shards.inbox.append(snapshot)
            for router in self.host.routers.values():
                router.inbox.append(snapshot)

    def act(self) -> None:
        self.follow()
        Note.current = self.host
        self.rates.act(cast("ControlServer", self))
        if self.server_rates.step():
            self.publish()


class Host:
    """A server's machine."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.names = [f"router-{number}" for number in numbered(2)]
        self.note: Sequence[Holding] = ()
        self.snapshot = Snapshot("", frozenset(), {})  # the file, and the last that was sent
        self.shards = ShardProcesses(self.snapshot)
        self.routers: dict[str, Router] = {}
        self.coordinator: Coordinator | None = None

    @property
    def node(self) -> str:
        nodes = [node for node in self.world.zookeeper if self.world.servers[node] == self.name]
        return max(nodes, default="")

    def is_running(self, pid: int) -> bool:
        return any(router.id.pid == pid for router in self.routers.values())

    def start_router(self, name: str) -> None:
        pid = self.world.new_id()
        shares = shares_at_start(name, [QUEUE], self.note, self.is_running)
        self.routers[name] = Router(RouterId(name, pid, pid), dict(shares), self.snapshot)
        self.routers[name].report()

    def start_coordinator(self) -> None:
        self.coordinator = Coordinator(self.world, self)
        for router in self.routers.values():
            router.reports.clear()
            router.report()

    def start(self) -> None:
        self.start_coordinator()
        for name in self.names:
            self.start_router(name)

    def off(self) -> None:
        self.coordinator = None
        self.routers.clear()
        self.note = ()  # is of another boot, by then
        self.shards = ShardProcesses(self.snapshot)
        for shard, owner in self.world.stores.items():
            if owner is not None and owner.server == self.name:
                self.world.stores[shard] = None


class Note:
    """run/rates.json of the server that runs at the moment."""

    current: Host

    @classmethod
    def read(cls) -> Sequence[Holding]:
        return list(cls.current.note)

    @classmethod
    def write(cls, holdings: Sequence[Holding]) -> None:
        cls.current.note = holdings


class World:
    """Three servers, two shards that move, and one that is pinned to c if `pinned`."""

    def __init__(self, *, pinned: bool = False) -> None:
        self.clock = FakeClock()
        self.limit = LIMIT
        self._ids = self._nodes = 0
        self.servers: dict[str, str] = {}  # by member node, also of those that are gone
        self.zookeeper: dict[str, str] = {}
        self.cut_off: set[str] = set()  # from ZooKeeper
        self.cuts: set[tuple[str, str]] = set()  # from each other
        shards = (*SHARDS, "p") if pinned else SHARDS
        self.assignment = {
            shard: Owner("c" if shard == "p" else "ab"[index % 2], 1)
            for index, shard in enumerate(shards)
        }
        self.records = dict(self.assignment)  # in each shard's store
        self.stores: dict[str, Owner | None] = dict(self.assignment)  # who has it open
        self.serving = dict(self.assignment)  # as members say
        self.hosts = {name: Host(self, name) for name in "abc"}
        for host in self.hosts.values():
            host.start()

    def new_id(self) -> int:
        self._ids += 1
        return self._ids

    def join(self, server: str) -> None:
        self._nodes += 1
        node = f"m-{self._nodes:010}"
        self.servers[node] = self.zookeeper[node] = server

    def host_of(self, member: str) -> Host:
        return self.hosts[self.servers[member]]

    # --- what happens ----------------------------------------------------------------------

    def deliver(self, host: Host) -> bool:
        """Everything that is on its way within `host` and to it; whether there was anything."""
        coordinator, found = host.coordinator, False
        for router in host.routers.values():
            while router.inbox:
                router.hear()
                found = True
            if coordinator is not None and coordinator.hear(router):
                found = True
                coordinator.act()
        while host.shards.inbox:
            host.shards.snapshot = host.shards.inbox.popleft()
            found = True
        if coordinator is not None:
            while coordinator.up:
                coordinator.server_rates.heard_report(*coordinator.up.popleft())
                found = True
            while coordinator.down:
                coordinator.server_rates.heard_grant(*coordinator.down.popleft())
                found = True
            coordinator.act()
        return found

    def report(self, host: Host) -> None:
        """What its routers say gets to its coordinator, and from there to the leader."""
        assert host.coordinator is not None
        for router in host.routers.values():
            host.coordinator.hear(router)
        host.coordinator.act()

    def take(self, shard: str) -> None:
        """Whom the shard is assigned to takes it, once its process knows."""
        owner = self.assignment[shard]
        host = self.hosts[owner.server]
        if host.coordinator is None or host.shards.snapshot.assignment.get(shard) != owner:
            return
        if owner.epoch >= self.records[shard].epoch:
            self.records[shard] = self.stores[shard] = self.serving[shard] = owner

    def assign(self, rng: random.Random) -> None:
        """Shards of servers that are gone go to others."""
        live = sorted(set(self.zookeeper.values()))
        for shard, owner in self.assignment.items():
            if shard != "p" and live and owner.server not in live:
                self.assignment[shard] = Owner(rng.choice(live), owner.epoch + 1)

    def calm(self, rng: random.Random, rounds: int = 3) -> None:
        """All that can be heard is, and followed."""
        for _ in range(rounds):
            for host in self.hosts.values():
                if host.coordinator is not None:
                    host.coordinator.look()
            for _ in range(60):
                found = [self.deliver(host) for host in self.hosts.values()]
                if not any(found):
                    break
            self.assign(rng)
            for shard in self.assignment:
                self.take(shard)

    def heartbeats(self) -> None:
        for host in self.hosts.values():
            for router in host.routers.values():
                if host.coordinator is not None and not router.inbox:
                    router.report()

    def heal(self, rng: random.Random, seconds: float = 30) -> None:
        """Everything runs, and all is well for a while."""
        self.cut_off.clear()
        self.cuts.clear()
        for host in self.hosts.values():
            if host.coordinator is None:
                host.start_coordinator()
            for name in host.names:
                if name not in host.routers:
                    host.start_router(name)
        self.run(rng, seconds)

    def run(self, rng: random.Random, seconds: float) -> None:
        for _ in range(int(seconds * 2)):
            self.clock.advance(0.5)
            self.heartbeats()
            self.calm(rng, 1)
            self.check()

    # --- what must hold --------------------------------------------------------------------

    def is_served(self, host: Host, router: Router) -> bool:
        """Whether any shard serves the router: its own server's, or one that admits its member."""
        return any(
            owner is not None
            and (
                owner.server == host.name
                or router.snapshot.member in self.hosts[owner.server].shards.snapshot.members
            )
            for owner in self.stores.values()
        )

    def spent(self) -> float:
        return sum(
            router.shares.get(QUEUE, 0.0)
            for host in self.hosts.values()
            for router in host.routers.values()
            if self.is_served(host, router)
        )

    def check(self) -> None:
        assert self.spent() <= self.limit * (1 + 1e-9)

    def share(self, server: str) -> float:
        return sum(r.shares.get(QUEUE, 0.0) for r in self.hosts[server].routers.values())

    def problems(self, server: str) -> Sequence[str]:
        coordinator = self.hosts[server].coordinator
        return () if coordinator is None else coordinator.server_rates.problems()

    def demand(self, server: str, wanted: float) -> None:
        for router in self.hosts[server].routers.values():
            router.demand = wanted / len(self.hosts[server].routers)
            router.report()
