"""Several servers on virtual time: real decisions, on a fake ZooKeeper, with fake stores.

    python -m tests.simulation.cluster --seeds 2000

A seed decides servers, shards, faults and all delays. Whatever awaits `Sleep` may be frozen there,
and goes on later with what it knew. `BROKEN` names what can be left out, to prove that this is
found. `Session` stands in for that of `pinlaterd.coordinator.zookeeper`.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache, partial
from itertools import count
from random import Random
from typing import Any
from unittest import mock

import msgspec

from pinlaterd.config.schema import ServerSettings, ShardSettings
from pinlaterd.coordinator.cluster import Cluster
from pinlaterd.coordinator.placement import Assigned, Assignment, Member, Placement, ShardState
from pinlaterd.coordinator.zookeeper import Conflict, Node, NotConnected, View
from tests.simulation.world import World

BROKEN = (
    "no claim",
    "no second look",
    "ZooKeeper's word",
    "no server name",
    "unchecked write",
    "foreign node",
    "wall-clock incarnation",
    "no second reading",
)
_SESSION_SECONDS = 4.0
_REREAD_SECONDS = 10.0
_LEASE_SECONDS = 5.0  # for which a store keeps the connection of a client that is not heard
_SILENT_SECONDS = 3.0  # after which a coordinator takes a process for gone
_HOUR_MS = 3_600_000
_MANY = 20  # faults
_BEGIN = 1_000.0  # what virtual time starts with
# For which a shard may not be served because of one fault, though a server could: docs/clusters.md.
_AWAY_SECONDS = {"cut off stores": 13.0, "freeze shard": 16.0, "stop leader": 21.0}
_MOST_AWAY_SECONDS = 7.0
_STALLS_SECONDS = 8.0  # more, where stores are slow
_START_SECONDS = 8.0  # in which the shards of a cluster that starts are spread
# After several: servers are tried ever more slowly.
_CALM_SECONDS = 60.0


class Lost(Exception):
    """The connection with a store."""


class Sleep:
    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __await__(self) -> Generator[float, None, None]:
        yield self._seconds


class Task:
    """A process, or a thread of one: on a server, which may be frozen or killed, as may it."""

    def __init__(self, server: Server, steps: Coroutine[Any, Any, None]) -> None:
        self.server = server
        self.alive = True
        self.thawed_at = self.ran_at = 0.0
        self._steps = steps
        server.world.after(0, self._go)

    @property
    def frozen(self) -> bool:
        return max(self.thawed_at, self.server.thawed_at) > self.server.world.now

    def kill(self) -> None:
        self.alive = False
        self._steps.close()

    def _go(self) -> None:
        if not self.alive:
            return
        world = self.server.world
        if self.frozen:
            world.at(max(self.thawed_at, self.server.thawed_at), self._go)
            return
        self.ran_at = world.now
        try:
            seconds = self._steps.send(None)
        except StopIteration:
            self.alive = False
        else:
            world.after(seconds, self._go)


# --- ZooKeeper ------------------------------------------------------------------------------


class ZooKeeper:
    def __init__(self, simulation: Simulation) -> None:
        self.available = True
        self.members: dict[str, tuple[int, bytes]] = {}  # with the session
        self.assignment = Node(b"{}", 0)
        self.servers: dict[str, Node] = {}
        self.heard: dict[int, float] = {}  # when, by session
        self.sessions: list[Session] = []
        self.numbers = count(1)
        self._simulation = simulation

    def look(self) -> None:
        """End the sessions that were not heard."""
        world = self._simulation.world
        if not self.available:
            self.heard = dict.fromkeys(self.heard, world.now)  # they begin anew
        for session, at in list(self.heard.items()):
            if world.now - at > _SESSION_SECONDS:
                del self.heard[session]
                kept = {n: member for n, member in self.members.items() if member[0] != session}
                self.members = kept
                self.changed()

    def enrol(self, session: Session) -> str:
        """The session's member node; "" while another has the server's name."""
        server = session.server.name
        name = _node_of(server, self.members, session.number)
        foreign = _node_of(server, self.members, None)
        if session.simulation.is_broken("foreign node"):
            name = session.own or foreign
            if name and name not in self.members:
                return name
        elif name == "" and foreign:
            return ""
        if name == "":
            name = f"m-{next(self.numbers):010}"
        member = (session.number, session.data)
        if name in self.members:
            member = (self.members[name][0], session.data)
        if self.members.get(name) != member:
            self.members[name] = member
            self.changed()
        return name

    def write(self, data: bytes, version: int, member: str) -> int:
        judge = self._simulation
        if not judge.is_broken("unchecked write") and (
            version != self.assignment.version or member not in self.members
        ):
            raise Conflict
        judge.assigned(_assignment(self.assignment.data), _assignment(data))
        self.assignment = Node(data, self.assignment.version + 1)
        self.changed()
        return self.assignment.version

    def changed(self) -> None:
        world = self._simulation.world
        for session in self.sessions:
            world.after(world.rng.random() * 0.05, session.poke)


def _node_of(server: str, members: Mapping[str, tuple[int, bytes]], session: int | None) -> str:
    for name, (number, data) in members.items():
        if number == session or (session is None and _server_of(data) == server):
            return name
    return ""


class Session:
    """A coordinator's thread that speaks to ZooKeeper."""

    def __init__(self, server: Server, *arguments: Any, **_: Any) -> None:
        self.server, self.simulation = server, server.simulation
        self.data = b""
        self.own = ""
        self._zookeeper = server.simulation.zookeeper
        self._on_view: Callable[[View], None] = arguments[4]
        self._poked = self._watches = True
        self._zookeeper.sessions.append(self)

    @property
    def number(self) -> int:
        """Of the session, which a coordinator that is restarted takes up again."""
        return self.server.session

    @property
    def reachable(self) -> bool:
        return self._zookeeper.available and not self.server.cut_off

    def start(self, data: bytes) -> None:
        self.data = data
        self.server.coordinator.append(Task(self.server, self._run()))

    def describe(self, data: bytes) -> None:
        self.data = data

    def poke(self) -> None:
        rereads = not self.simulation.is_broken("no second reading")
        self._watches &= rereads or self.reachable
        self._poked |= self._watches

    async def write(self, path: str, data: bytes, version: int, *, as_leader: bool) -> int:
        assert (path, as_leader) == ("assignment", True)
        number, own = self.number, self.own
        self.simulation.about_to_write(self.server)
        await Sleep(self.simulation.delay())
        lost = number not in self._zookeeper.heard
        if self.simulation.is_broken("unchecked write"):
            lost = False  # it is repeated in the next session
        if lost or not self.reachable:
            raise NotConnected
        version = self._zookeeper.write(data, version, own)
        await Sleep(self.simulation.delay())
        if not self.reachable:
            raise NotConnected
        return version

    async def _run(self) -> None:
        zookeeper, world = self._zookeeper, self.server.world
        read_at, view = 0.0, View()
        rereads = not self.simulation.is_broken("no second reading")
        while True:
            if self.reachable:
                if self.number not in zookeeper.heard:
                    self.server.session = next(zookeeper.numbers)
                    self.own, self._poked = "", True
                zookeeper.heard[self.number] = world.now
                self.own = zookeeper.enrol(self)
                if self._poked or (rereads and world.now - read_at > _REREAD_SECONDS):
                    self._poked, read_at = False, world.now
                    view = View(
                        members={name: data for name, (_, data) in zookeeper.members.items()},
                        servers=dict(zookeeper.servers),
                        nodes={"assignment": zookeeper.assignment},
                        own=self.own,
                        connected=True,
                    )
                    await Sleep(self.simulation.delay() + world.rng.random() * self.server.lag)
                    self._on_view(view)
            elif view.connected:
                view = View(view.members, view.servers, view.nodes, view.own, connected=False)
                self._on_view(view)
                self._poked = rereads
            await Sleep(0.2)


@lru_cache(1000)
def _server_of(data: bytes) -> str:
    return msgspec.json.decode(data, type=Member).server


@lru_cache(1000)
def _assignment(data: bytes) -> Assignment:
    return msgspec.json.decode(data, type=Assignment)


# --- a store --------------------------------------------------------------------------------


class Connection:
    def __init__(self, server: Server) -> None:
        self.server = server
        self.alive = True
        self.heard = server.world.now


class Store:
    """One shard's, as MySQL: a record, a lock that a connection has, connections that can be
    ended. It also judges who writes."""

    def __init__(self, name: str, simulation: Simulation) -> None:
        self.name = name
        self.record = (0, "")
        self.incarnation = 0
        self.holder: Connection | None = None
        self._simulation = simulation
        self._connections: list[Connection] = []
        self._served = (0, "")
        self._writers: list[Connection] = []

    def look(self) -> None:
        """End the connections that were not heard."""
        world = self._simulation.world
        for connection in self._connections:
            if world.now - connection.heard > _LEASE_SECONDS:
                self.end(connection)
        self._connections = [c for c in self._connections if c.alive]

    def connect(self, server: Server) -> Connection:
        if server.no_stores:
            raise Lost
        connection = Connection(server)
        self._connections.append(connection)
        return connection

    def end(self, connection: Connection) -> None:
        connection.alive = False
        if self.holder is connection:
            self.holder = None

    async def ask(self, connection: Connection) -> None:
        """Each request; what follows it is done at once, in the store."""
        await Sleep(self._simulation.delay(stalls=True))
        gives_up_at = self._simulation.world.now + _LEASE_SECONDS
        while connection.server.no_stores:
            if self._simulation.world.now > gives_up_at:
                raise Lost
            await Sleep(0.2)
        if not connection.alive:
            raise Lost
        connection.heard = self._simulation.world.now

    def begin(self, connection: Connection, epoch: int, now_ms: int) -> None:
        server, simulation = connection.server.name, self._simulation
        incarnation = max(now_ms, self.incarnation + 1)
        if simulation.is_broken("wall-clock incarnation"):
            incarnation = now_ms
        if incarnation <= self.incarnation:
            simulation.found(f"{self.name}: incarnation {incarnation} after {self.incarnation}")
        self.incarnation = incarnation
        self._check(server, epoch)
        self._served = max(self._served, (epoch, server))

    def write(self, connection: Connection, epoch: int) -> None:
        self._check(connection.server.name, epoch)
        if connection not in self._writers[-1:]:
            if connection in self._writers:
                self._simulation.found(f"{self.name}: {connection.server.name} writes again")
            self._writers.append(connection)

    def _check(self, server: str, epoch: int) -> None:
        same_epoch = epoch == self._served[0] and server != self._served[1]
        if epoch < self._served[0] or same_epoch:
            text = f"{self.name}: {server} serves with {epoch} after {self._served}"
            self._simulation.found(text)


class Shard:
    """A shard's process."""

    def __init__(self, server: Server, store: Store) -> None:
        self.state = ShardState("starting")
        self.connection: Connection | None = None
        self._server, self._store = server, store
        self.task = Task(server, self._run())

    @property
    def serves(self) -> bool:
        store, connection = self._store, self.connection
        alive = self.task.alive and not self.task.frozen and not self._server.no_stores
        return alive and connection is not None and store.holder is connection

    @property
    def is_silent(self) -> bool:
        return self.task.frozen and self._server.world.now - self.task.ran_at > _SILENT_SECONDS

    def kill(self) -> None:
        self.task.kill()
        if self.connection is not None and not self._server.is_off:
            self._store.end(self.connection)

    async def _run(self) -> None:
        server, name = self._server, self._store.name
        await Sleep(server.world.rng.uniform(0.4, 1.2))
        while (entry := server.snapshot.get(name)) is not None:
            if entry.server == server.name:
                await self._hold(entry)
            elif entry.next == server.name:
                self.state = ShardState("standby")
            else:
                break
            await Sleep(0.05)
        del server.processes[name]

    async def _hold(self, entry: Assigned) -> None:
        self.state = ShardState("starting")
        try:
            self.connection = connection = self._store.connect(self._server)
            if await self._take(connection, entry):
                await self._serve(connection, entry)
            else:
                self.state = ShardState("superseded", self._store.record[0])
            self._store.end(connection)
        except Lost:
            self.state = ShardState("starting")
        self.connection = None
        await Sleep(0.5)

    def _is_mine(self, entry: Assigned) -> bool:
        epoch, server = self._store.record
        named = server == entry.server or self._server.simulation.is_broken("no server name")
        return self._server.simulation.is_broken("no claim") or (epoch == entry.epoch and named)

    async def _take(self, connection: Connection, entry: Assigned) -> bool:
        """Ownership, in four steps: ../../docs/architecture.md."""
        store, simulation, world = self._store, self._server.simulation, self._server.world
        await store.ask(connection)
        if entry.epoch <= store.record[0] and not self._is_mine(entry):
            return False
        if not simulation.is_broken("no claim"):
            store.record = (entry.epoch, entry.server)
            await Sleep(simulation.claimed(self._server))
        patient_until = world.now + 5 if entry.planned else 0.0
        while True:
            await store.ask(connection)
            if store.holder is None:
                store.holder = connection
                break
            if simulation.is_broken("ZooKeeper's word"):
                return True
            if world.now < patient_until:
                await Sleep(0.05)
            elif self._is_mine(entry):
                store.end(store.holder)
            else:
                return False
        await store.ask(connection)
        return self._is_mine(entry) or simulation.is_broken("no second look")

    async def _serve(self, connection: Connection, entry: Assigned) -> None:
        server, world = self._server, self._server.world
        self._store.begin(connection, entry.epoch, server.now_ms())
        self.state = ShardState("serving", entry.epoch)
        while True:
            now = server.snapshot.get(self._store.name)
            if now is None or (now.server, now.epoch) != (entry.server, entry.epoch):
                return
            await self._store.ask(connection)
            self._store.write(connection, entry.epoch)
            await Sleep(world.rng.uniform(0.1, 0.4))


# --- a server -------------------------------------------------------------------------------


class Server:
    def __init__(self, name: str, simulation: Simulation) -> None:
        self.name, self.simulation, self.world = name, simulation, simulation.world
        self.session = 0
        self.snapshot: Mapping[str, Assigned] = {}  # as on disk
        self.processes: dict[str, Shard] = {}
        self.is_off = self.cut_off = self.no_stores = False
        self.thawed_at = self.lag = 0.0
        self.step_ms = 0
        self.coordinator: list[Task] = []

    def monotonic(self) -> float:
        return self.world.now

    def now_ms(self) -> int:
        return self.world.now_ms() + self.step_ms

    def can_serve(self, shard: str) -> bool:
        process = self.processes.get(shard)
        tasks = [*self.coordinator, *([] if process is None else [process.task])]
        is_up = all(task.alive and not task.frozen for task in tasks)
        return is_up and not (self.is_off or self.cut_off or self.no_stores or self.lag)

    def start(self) -> None:
        if self.is_off or any(task.alive for task in self.coordinator):
            return
        settings = ServerSettings(server=self.name, peer_host=f"host-{self.name}")
        with mock.patch.multiple(
            "pinlaterd.coordinator.cluster",
            Session=partial(Session, self),
            ClusterKey=mock.Mock(),
            asyncio=mock.Mock(),
        ):
            cluster = Cluster(settings, None, self, lambda view: self._follow(cluster, view))  # type: ignore[arg-type]
        cluster.assigned = self.snapshot
        self.coordinator = []
        self.coordinator.append(Task(self, self._coordinate(cluster)))

    async def _coordinate(self, cluster: Cluster) -> None:
        self.follow(self.snapshot)
        cluster.start()
        while True:
            told = {n: shard.state for n, shard in self.processes.items() if not shard.is_silent}
            cluster.describe(told, ())
            await cluster.lead(self.simulation.shards)
            self.follow(self.snapshot)
            await Sleep(0.3)

    def _follow(self, cluster: Cluster, view: View) -> None:
        if cluster.follow(view):
            self.follow(cluster.assigned)

    def follow(self, assigned: Mapping[str, Assigned]) -> None:
        self.snapshot = assigned
        for name, entry in assigned.items():
            if self.name in {entry.server, entry.next} and name not in self.processes:
                self.processes[name] = Shard(self, self.simulation.stores[name])

    def kill_coordinator(self) -> None:
        for task in self.coordinator:
            task.kill()
        sessions = self.simulation.zookeeper.sessions
        sessions[:] = [session for session in sessions if session.server is not self]

    def kill_process(self, name: str) -> None:
        self.processes.pop(name).kill()
        self.world.after(self.world.rng.uniform(0.5, 1.5), self._restart)

    def _restart(self) -> None:
        if not self.is_off:
            self.follow(self.snapshot)

    def switch_off(self) -> None:
        self.is_off = True
        self.kill_coordinator()
        for process in self.processes.values():
            process.kill()
        self.processes.clear()

    def switch_on(self) -> None:
        self.is_off, self.session = False, 0  # the session was another machine's, for all it knows
        self.start()


# --- a run ----------------------------------------------------------------------------------


class Simulation:
    """A run of one seed."""

    def __init__(
        self, seed: int, broken: AbstractSet[str] = frozenset(), faults: Sequence[str] = ()
    ) -> None:
        """`faults`: the kinds to draw from, many; else what the seed decides."""
        self.world = World(seed)
        self.rng = rng = Random(seed)
        self.violations: list[str] = []
        self.history: list[str] = []
        self._broken = broken
        self._faults = rng.choice((0, 1, 1, 1, 2, 3, 4, _MANY))
        kinds = rng.sample(list(FAULTS), 3) if self._faults == _MANY else list(FAULTS)
        self._kinds = faults or kinds
        if faults:
            self._faults = _MANY
        self._slowest = rng.choice((0.01, 0.1))
        self._stalls = rng.choice((0.0, 0.02, 0.1, 0.3))
        self.stops_leader = self.stops_claimer = 0.0  # for so long, at the next write or claim
        names = "ABCD"[: rng.choice((1, 2, 3, 3, 3, 4))]
        pin = rng.choice(("", "", "A"))
        self.shards = {
            n: ShardSettings(n, server=pin * (n == "1")) for n in "1234"[: rng.choice((1, 2, 4))]
        }
        self.zookeeper = ZooKeeper(self)
        self.stores = {name: Store(name, self) for name in self.shards}
        self.servers = [Server(name, self) for name in names]
        self._changes = 0  # of the assignment
        self._changed_at = 0.0
        self._calm_at = _BEGIN + 5
        self._away_seconds = _MOST_AWAY_SECONDS
        self._served_at: dict[str, float] = {}  # or need not have been

    def run(self) -> list[str]:
        """What was found."""
        if self._faults:
            self._begin()
        else:
            self._start()
        rng, moves, end = self.rng, False, _BEGIN + 10
        for _ in range(self._faults):
            kind, seconds = rng.choice(self._kinds), rng.choice((1.0, 3.0, 8.0, 15.0, 30.0))
            begins = rng.uniform(_BEGIN + 6, _BEGIN + 20 + self._faults)
            self.world.at(begins, partial(self._hurt, kind, seconds))
            end = max(end, begins + seconds)
            moves |= kind not in _HARMLESS and not (kind in _BRIEFLY_HARMLESS and seconds == 1)
            self._away_seconds = _AWAY_SECONDS.get(kind, _MOST_AWAY_SECONDS)
        if self._faults > 1:
            self._calm_at = end + _CALM_SECONDS
        self._away_seconds += _STALLS_SECONDS if self._stalls else 0.0
        self.world.run(max(end, self._calm_at) + self._away_seconds + 1)
        if self._changes and not moves:
            self.found(f"{self._changes} changes of the assignment for nothing")
        self._compare_views()
        for server in self.servers:
            server.switch_off()
        return self.violations

    def _begin(self) -> None:
        """All servers are members, and the shards are theirs."""
        zookeeper, members = self.zookeeper, {}
        for server in self.servers:
            server.session = next(zookeeper.numbers)
            server.step_ms = self.rng.choice((0, 0, -_HOUR_MS, _HOUR_MS))
            zookeeper.heard[server.session] = self.world.now
            host, node = f"host-{server.name}", f"m-{next(zookeeper.numbers):010}"
            members[node] = Member(server.name, host, "", 9100, "", "")
            zookeeper.members[node] = (server.session, msgspec.json.encode(members[node]))
        pins = {shard.name: shard.server for shard in self.shards.values()}
        now_ms = self.world.now_ms() + self.rng.choice((0, 2 * _HOUR_MS))  # by a clock of then
        assignment = Placement().decide(0, now_ms, pins, members, set(), Assignment())
        zookeeper.assignment = Node(msgspec.json.encode(assignment), 1)
        for server in self.servers:
            server.snapshot = assignment.shards
            server.start()
        self._look()

    def _start(self) -> None:
        """The servers of a new cluster come one after another. Soon after the last one each has its
        part of the shards, and nothing moves any more."""
        self._stalls = begins = 0.0
        for server in self.rng.sample(self.servers, len(self.servers)):
            self.world.after(begins, server.start)
            begins += self.rng.uniform(0, self.rng.choice((0.5, 5, 25)))
        self._calm_at = self.world.now + begins + _START_SECONDS
        self.world.at(self._calm_at, self._check_spread)
        self._look()

    def _check_spread(self) -> None:
        owners = {
            n: e.server for n, e in _assignment(self.zookeeper.assignment.data).shards.items()
        }
        loads = [[*owners.values()].count(server.name) for server in self.servers]
        for name, owner in owners.items():
            if not self.shards[name].server and [*owners.values()].count(owner) > min(loads) + 1:
                self.found(f"{name} is still one of many shards of {owner}")
        self._changes = 0

    def _look(self) -> None:
        """Twice a second: what ZooKeeper and stores end; and whether all that can be is served."""
        self.zookeeper.look()
        now = self.world.now
        for name, store in self.stores.items():
            store.look()
            if name not in self.shards:
                self._served_at[name] = now
        for name, shard in self.shards.items():
            could = self.zookeeper.available and any(
                server.can_serve(name)
                for server in self.servers
                if shard.server in {"", server.name}
            )
            processes = [s.processes[name] for s in self.servers if name in s.processes]
            if now < self._calm_at or not could or any(process.serves for process in processes):
                self._served_at[name] = now
            elif now - self._served_at.setdefault(name, now) > self._away_seconds:
                self.found(f"{name} is not served")
                self._served_at[name] = now
        self.world.after(0.5, self._look)

    def _compare_views(self) -> None:
        """At the end all servers are members, and know who owns what."""
        enrolled = {_server_of(data) for _, data in self.zookeeper.members.values()}
        shards = _assignment(self.zookeeper.assignment.data).shards
        for server in self.servers:
            if server.name not in enrolled:
                self.found(f"{server.name} is no member")
            if server.snapshot != shards and self.world.now - self._changed_at > 3:
                self.found(f"{server.name} does not know who owns what")

    def check_empty(self, server: Server) -> None:
        for name, entry in _assignment(self.zookeeper.assignment.data).shards.items():
            if entry.server == server.name != self.shards[name].server:
                self.found(f"{server.name} rests, and owns {name}")

    # --- what is told of it ------------------------------------------------------------------

    @property
    def has_one_fault(self) -> bool:
        return self._faults == 1

    def is_broken(self, what: str) -> bool:
        return what in self._broken

    def delay(self, *, stalls: bool = False) -> float:
        rng = self.world.rng
        if stalls and self.world.now > _BEGIN + 5 and rng.random() < self._stalls:
            return rng.uniform(0.2, 4.0)
        return rng.random() * self._slowest

    def note(self, text: str) -> None:
        self.history.append(f"{self.world.now - _BEGIN:8.3f} {text}")

    def found(self, text: str) -> None:
        self.note(f"VIOLATION {text}")
        self.violations.append(text)

    def about_to_write(self, server: Server) -> None:
        seconds, self.stops_leader = self.stops_leader, 0.0
        if seconds:
            self.note(f"{server.name} stops as it writes")
            _freeze(self, server.coordinator, seconds)

    def claimed(self, server: Server) -> float:
        """For how long to stop: while the server has to give up its shards."""
        seconds, self.stops_claimer = self.stops_claimer, 0.0
        if seconds:
            self.note(f"{server.name} stops after its claim")
            _maintain(self, server, seconds)
        return seconds

    def assigned(self, before: Assignment, after: Assignment) -> None:
        self._changed_at = self.world.now
        for name, entry in after.shards.items():
            old = before.shards.get(name, entry)
            if entry != before.shards.get(name):
                self._changes += 1
                self.note(f"{name}: {entry.server} {entry.epoch} {entry.next}")
            if entry.epoch < old.epoch + (entry.server != old.server):
                self.found(f"{name}: {entry} was assigned after {old}")

    # --- faults ------------------------------------------------------------------------------

    def _hurt(self, kind: str, seconds: float) -> None:
        server = self.rng.choice(self.servers)
        self.note(f"{kind} {server.name} for {seconds} s")
        FAULTS[kind](self, server, seconds)


def _switch(sim: Simulation, owner: object, name: str, seconds: float, *values: object) -> None:
    """To the first value, and after the seconds to the second."""
    setattr(owner, name, values[0])
    sim.world.after(seconds, lambda: setattr(owner, name, values[1]))


def _off(sim: Simulation, server: Server, seconds: float) -> None:
    server.switch_off()
    sim.world.after(seconds, server.switch_on)


def _kill_coordinator(sim: Simulation, server: Server, seconds: float) -> None:
    server.kill_coordinator()
    sim.world.after(sim.rng.uniform(0.3, 1.5), server.start)


def _kill_shard(sim: Simulation, server: Server, seconds: float) -> None:
    if server.processes and not server.is_off:
        server.kill_process(sim.rng.choice(list(server.processes)))


def _freeze(sim: Simulation, frozen: Sequence[Server | Task], seconds: float) -> None:
    for one in frozen:
        one.thawed_at = sim.world.now + seconds


def _freeze_shard(sim: Simulation, server: Server, seconds: float) -> None:
    if server.processes:
        process = sim.rng.choice(list(server.processes.values()))
        _freeze(sim, [process.task], seconds)


def _stop_leader(sim: Simulation, server: Server, seconds: float) -> None:
    """Between reading and writing, for which this server's loss is a reason."""
    sim.stops_leader = seconds
    _off(sim, server, seconds)


def _stop_claimer(sim: Simulation, server: Server, seconds: float) -> None:
    sim.stops_claimer = min(seconds, _LEASE_SECONDS - 0.2)
    _kill_shard(sim, server, seconds)


def _flap(sim: Simulation, server: Server, seconds: float) -> None:
    until = sim.world.now + seconds

    def turn() -> None:
        server.cut_off = not server.cut_off and sim.world.now < until
        if sim.world.now < until:
            sim.world.after(sim.rng.uniform(0.1, 1.5), turn)

    turn()


def _maintain(sim: Simulation, server: Server, seconds: float) -> None:
    def say(rests: bool) -> None:
        sim.zookeeper.servers[server.name] = Node(msgspec.json.encode({"maintenance": rests}), 1)
        sim.zookeeper.changed()

    def end() -> None:
        if seconds >= 15 and sim.has_one_fault and len(sim.servers) > 1:
            sim.check_empty(server)
        say(False)

    say(True)
    sim.world.after(seconds, end)


def _remove_shard(sim: Simulation, server: Server, seconds: float) -> None:
    """From the configuration, and add it again: clocks may be behind its epoch then."""
    name = sim.rng.choice(list(sim.shards))
    if len(sim.shards) > 1:
        shard = sim.shards.pop(name)
        sim.world.after(seconds, lambda: sim.shards.update({name: shard}))


FAULTS: Mapping[str, Callable[[Simulation, Server, float], None]] = {
    "off": _off,
    "kill coordinator": _kill_coordinator,
    "kill shard": _kill_shard,
    "freeze": lambda sim, server, s: _freeze(sim, [server], s),
    "freeze coordinator": lambda sim, server, s: _freeze(sim, server.coordinator, s),
    "freeze shard": _freeze_shard,
    "cut off": lambda sim, server, s: _switch(sim, server, "cut_off", s, True, False),
    "cut off stores": lambda sim, server, s: _switch(sim, server, "no_stores", s, True, False),
    "ZooKeeper away": lambda sim, _, s: _switch(sim, sim.zookeeper, "available", s, False, True),
    "late views": lambda sim, server, s: _switch(sim, server, "lag", s, 3.0, 0.0),
    "stop leader": _stop_leader,
    "stop claimer": _stop_claimer,
    "flap": _flap,
    "clock": lambda sim, server, s: _switch(sim, server, "step_ms", s, -_HOUR_MS, _HOUR_MS),
    "maintenance": _maintain,
    "remove shard": _remove_shard,
}
_HARMLESS = {"kill coordinator", "ZooKeeper away", "clock"}
_BRIEFLY_HARMLESS = {"freeze", "freeze coordinator", "freeze shard", "cut off", "late views"}


def simulate(
    seed: int, broken: AbstractSet[str] = frozenset(), faults: Sequence[str] = ()
) -> Simulation:
    logging.disable(logging.CRITICAL)
    try:
        simulation = Simulation(seed, broken, faults)
        simulation.run()
    finally:
        logging.disable(logging.NOTSET)
    return simulation


def _violations(seed: int, **options: Any) -> tuple[int, list[str]]:
    return seed, simulate(seed, **options).violations


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.cluster", description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="the first seed (default: 0)")
    parser.add_argument("--seeds", type=int, default=2000, help="how many (default: 2000)")
    parser.add_argument("--seed", type=int, help="only this one; prints its history")
    parser.add_argument("--fault", choices=FAULTS, action="append", default=[])
    parser.add_argument("--broken", choices=BROKEN, action="append", default=[])
    arguments = parser.parse_args()
    options = {"broken": frozenset(arguments.broken), "faults": arguments.fault}
    if arguments.seed is not None:
        simulation = simulate(arguments.seed, **options)
        print("\n".join(simulation.history))
        return 1 if simulation.violations else 0
    began, failed = time.monotonic(), 0
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for seed, found in pool.map(partial(_violations, **options), seeds, chunksize=20):
            failed += bool(found)
            if found:
                print(f"seed {seed}: {len(found)}: {found[0]}")
    print(f"{len(seeds)} seeds in {time.monotonic() - began:.1f} s: {failed} broke a promise")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
