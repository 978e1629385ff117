"""The owners of a cluster's shards: what ZooKeeper holds of them, as JSON, and the leader's
decisions. Pure: no clock, no sockets, no files.

The assignment is a suggestion. A shard's store admits one owner, by the epoch: a wrong or late
decision costs a reconnect, never a second writer.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import count
from typing import Annotated

import msgspec
from msgspec import structs

# For which a shard may open its store on a server that is up, have lost it, or be missed by others
# (routers need some seconds more to say so): doubled with each try since it last served.
_PATIENCE_SECONDS, _LOST_SECONDS, _MISSED_SECONDS = 5.0, 3.0, 3.0
# The longest patience, and for how long a shard must serve in one place until a planned move of it
# that failed is forgotten.
_LONGEST_PATIENCE_SECONDS = 60.0
_TRIES_COUNT_SECONDS = 600.0
_HANDOVER_SECONDS = 5.0  # for which a planned owner may wait for the one before
_PREPARE_SECONDS = 10.0
_MOVES_AT_ONCE = 4
_SETTLE_SECONDS = 30.0  # from a join or loss to balancing
_NETWORK_SECONDS = 10.0  # for which half of the servers are awaited if they vanish together


class ShardState(msgspec.Struct, frozen=True, omit_defaults=True):
    """The state of a shard's process, as the member that runs it reports.

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
    weight: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    shards: Mapping[str, ShardState] = {}
    unreached: Sequence[str] = ()  # shards that its routers can't reach
    config: int = 0  # what its processes follow: SharedConfig.number
    keys: int = 0  # the placement of keys that all routers there follow, with that configuration
    leaving: bool = False  # it is about to go: as if in maintenance


class Assigned(msgspec.Struct, frozen=True, omit_defaults=True):
    """The server that is to own a shard, and where it listens for other servers."""

    server: str
    epoch: int
    endpoint: str  # of ZeroMQ
    slot: int
    next: str = ""  # a server that prepares to become the owner
    planned: bool = False  # whether the owner before lived when this one was chosen


class Assignment(msgspec.Struct, frozen=True, omit_defaults=True):
    shards: Mapping[str, Assigned] = {}


class Placement:
    """The decisions of one term of leadership. A new leader has seen nothing yet: its timers start
    at 0, and it moves nothing for that."""

    def __init__(self) -> None:
        self._known: AbstractSet[str] | None = None  # servers that are up, or were a moment ago
        # Nothing was served when this term began, and servers still join: docs/architecture.md.
        self._starts = True
        self._live: Mapping[str, Member] = {}
        # By shard: servers that were tried in vain, in which epoch, and when.
        self._tried: defaultdict[str, dict[tuple[str, int], float]] = defaultdict(dict)
        self._served: dict[str, int] = {}  # the last epoch, by shard
        self._served_at: dict[str, float] = {}  # when each shard last served, reached by all
        self._settled_at: dict[str, float] = {}  # when each shard had served for a while
        self._before: dict[tuple[object, ...], float] = {}
        self._since: dict[tuple[object, ...], float] = {}  # what is so now, and since when

    def decide(
        self,
        now: float,
        now_ms: int,
        shards: Mapping[str, str],
        members: Mapping[str, Member],
        maintenance: AbstractSet[str],
        assignment: Assignment,
    ) -> Assignment:
        """Decide what the assignment should be; call this on each change, and a few times a second.

        `shards`: with the server that each is pinned to, or ""; `members`: by node, oldest first;
        `maintenance`: servers.
        """
        self._now, self._now_ms, self._before, self._since = now, now_ms, self._since, {}
        # A server whose session was lost may have two nodes for a while: the latest counts.
        live = {member.server: member for member in members.values()}
        stayed, self._live = self._live.keys() <= live.keys(), live
        self._entries = {name: e for name, e in assignment.shards.items() if name in shards}
        before = dict(self._entries)
        known = {e.server for e in before.values()} if self._known is None else self._known
        if self._known is None:
            states = (state for member in live.values() for state in member.shards.values())
            self._starts = all(state.state != "serving" for state in states)
        gone = {s for s in known - live.keys() if self._lasted("gone", s) < _NETWORK_SECONDS}
        self._known = live.keys() | gone
        awaited = gone if len(gone) >= max(2, len(live)) else ()
        settled = self._lasted("members", *members) >= _SETTLE_SECONDS
        self._starts = self._starts and stayed and not settled
        staying = [s for s, m in live.items() if s not in maintenance and not m.leaving]
        for name, pin in sorted(shards.items()):
            entry = before.get(name)
            pinned = [server for server in live if server == pin]
            candidates = pinned if pin else staying or list(live)
            if entry is not None and entry.server in live:
                self._look_after(name, entry, candidates)
            elif candidates and (entry is None or entry.server not in awaited):
                self._assign(name, self._choose(name, candidates))
        if self._starts or (settled and self._entries == before):
            owned = {n for n in before if not shards[n] and self._entries[n].server in live}
            self._balance(owned, staying)
        return Assignment(self._entries)

    def _lasted(self, *what: object) -> float:
        """Return for how long this has been so, in all decisions without a gap."""
        self._since[what] = self._before.get(what, self._now)
        return self._now - self._since[what]

    def _look_after(self, name: str, entry: Assigned, candidates: Sequence[str]) -> None:
        """Decide about a shard whose server is up."""
        server, tried = entry.server, self._recent_tries(name)
        endpoint = self._endpoint(server, entry.slot)  # the server may have another address now
        entry = self._entries[name] = structs.replace(entry, endpoint=endpoint)
        state = self._state(name, server)
        missed = sum(name in self._live[s].unreached for s in self._live if s != server)
        health = "unreached" if missed else "serving"
        if state != ShardState("serving", entry.epoch):
            health = "failing"
        lasted = self._lasted(name, server, entry.epoch, health)
        next_lasted = self._lasted(name, "next", entry.next)
        self._remember_service(name, entry.epoch, health, min(lasted, next_lasted))
        has_served = self._served.get(name) == entry.epoch
        seconds = _MISSED_SECONDS if health == "unreached" else _PATIENCE_SECONDS
        if health == "failing" and has_served:
            seconds = _LOST_SECONDS
        patience = _doubled(seconds, tried, self._served_at.get(name, -math.inf))
        takes_over = entry.planned and not has_served
        impatient = lasted >= patience + (_HANDOVER_SECONDS if takes_over else 0)
        others = [candidate for candidate in candidates if candidate != server]
        if state.state == "superseded" and state.epoch >= entry.epoch:
            self._assign(name, server)
        elif health == "failing" and impatient and others:
            tried.setdefault((server, entry.epoch), self._now)
            self._assign(name, self._choose(name, others))
        elif entry.next:
            self._go_on(name, entry, others, next_lasted)
        elif server not in candidates:
            pause = _doubled(_PATIENCE_SECONDS, tried, self._settled_at.get(name, -math.inf))
            is_due = pause == _PATIENCE_SECONDS or next_lasted >= pause
            if is_due and others and self._moves() < _MOVES_AT_ONCE:
                self._prepare(name, self._choose(name, others))
        elif missed and impatient and next_lasted >= patience:
            better = self._better_reached(others, missed)
            if better and self._moves() < _MOVES_AT_ONCE:
                tried.setdefault((server, entry.epoch), self._now)
                self._prepare(name, self._choose(name, better))

    def _remember_service(self, name: str, epoch: int, health: str, lasted: float) -> None:
        """Note that a shard serves, if it does, and has for `lasted` seconds without a move."""
        if health != "failing":
            self._served[name] = epoch
        if health == "serving":
            self._served_at[name] = self._now
            if lasted >= _LONGEST_PATIENCE_SECONDS:
                self._settled_at[name] = self._now

    def _go_on(self, name: str, entry: Assigned, others: Sequence[str], lasted: float) -> None:
        """Go on with a planned move."""
        if entry.next not in others:
            self._prepare(name, "")
        elif self._state(name, entry.next).state == "standby":
            self._assign(name, entry.next, planned=True)
        elif lasted >= _PREPARE_SECONDS:
            self._tried[name].setdefault((entry.next, entry.epoch), self._now)
            self._prepare(name, "")

    def _recent_tries(self, name: str) -> dict[tuple[str, int], float]:
        tried, start = self._tried[name], self._now - _TRIES_COUNT_SECONDS
        self._tried[name] = {one: at for one, at in tried.items() if at > start}
        return self._tried[name]

    def _better_reached(self, servers: Sequence[str], missed: int) -> list[str]:
        """Select servers that fewer members miss; one that misses another is missed by it, too."""
        pairs = {
            frozenset((member.server, self._entries[name].server))
            for member in self._live.values()
            for name in member.unreached
            if name in self._entries and self._entries[name].server in self._live
        }
        return [s for s in servers if sum(s in pair for pair in pairs) < missed]

    def _balance(self, names: AbstractSet[str], staying: Sequence[str]) -> None:
        """Move shards to servers that have less load with them than theirs have now: one at a time;
        while the cluster starts all at once, and those at once that do not serve yet."""
        tried = {server for name in names for server, _ in self._tried[name]}
        servers = [server for server in staying if server not in tried]
        recent = any(
            what[-1] == "failing" and self._now - since < _PATIENCE_SECONDS
            for what, since in self._since.items()
        )
        if not servers or (recent and not self._starts):
            return
        while self._moves() < (_MOVES_AT_ONCE if self._starts else 1):
            loads = self._loads()
            to = min(servers, key=lambda server: (loads(server, 1), server))
            gains = []
            for name in names:
                entry = self._entries[name]
                serves = (name, entry.server, entry.epoch, "serving") in self._since
                gain = loads(to, 1) < loads(entry.server, 0)
                if gain and not entry.next and (serves or self._starts):
                    gains.append((not serves, loads(entry.server, 0), name))
            if not gains:
                return
            waits, _, name = max(gains)
            if waits:
                self._assign(name, to, planned=True)  # in turn: it may serve by now
            else:
                self._prepare(name, to)

    def _choose(self, name: str, candidates: Sequence[str]) -> str:
        """Return the server that failed this shard least often; of equals the one that failed
        longest ago, then the least loaded."""
        tries = Counter(server for server, _ in self._tried[name])
        tried_at = {server: at for (server, _), at in self._tried[name].items()}
        prepared = self._entries[name].next if name in self._entries else ""
        loads = self._loads()

        def cost(server: str) -> tuple[bool, int, float, float, bytes]:
            rank = hashlib.sha256(f"{name}/{server}".encode()).digest()
            last = tried_at.get(server, -math.inf)
            return server != prepared, tries[server], last, loads(server, 1), rank

        return min(candidates, key=cost)

    def _loads(self) -> Callable[[str, int], float]:
        """Return a function: the load of a server with some more shards, by its weight."""
        shards = Counter(entry.next or entry.server for entry in self._entries.values())
        return lambda server, more: (shards[server] + more) / self._live[server].weight

    def _moves(self) -> int:
        return sum(bool(entry.next) for entry in self._entries.values())

    def _state(self, name: str, server: str) -> ShardState:
        return self._live[server].shards.get(name, ShardState(""))

    def _prepare(self, name: str, server: str) -> None:
        self._entries[name] = structs.replace(self._entries[name], next=server)

    def _assign(self, name: str, server: str, *, planned: bool = False) -> None:
        entry = self._entries.get(name)
        reported = (self._state(name, other).epoch + 1 for other in self._live)
        epoch = max(self._now_ms, entry.epoch + 1 if entry else 0, *reported)
        used = {other.slot for other in self._entries.values()}
        slot = entry.slot if entry else next(slot for slot in count() if slot not in used)
        endpoint = self._endpoint(server, slot)
        self._entries[name] = Assigned(server, epoch, endpoint, slot, planned=planned)

    def _endpoint(self, server: str, slot: int) -> str:
        return f"tcp://{self._live[server].host}:{self._live[server].shard_ports + slot}"


def _doubled(seconds: float, tried: Mapping[tuple[str, int], float], since: float) -> float:
    """Return `seconds`, doubled for each try since then, up to the longest patience."""
    tries = sum(at > since for at in tried.values())
    return min(seconds * float(2 ** min(tries, 9)), _LONGEST_PATIENCE_SECONDS)
