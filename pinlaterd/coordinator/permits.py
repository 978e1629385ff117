"""The permits for jobs of limited queues: how many of them each shard may have in one state.

The invariant: what all shards may have of a queue, together, is never raised above its limit,
whatever is lost, late or killed. For this, each shard's entry says the *most* jobs that may be
there (`held`): its permits or, if these were cut below, the jobs that it has.

- Permits that are raised count from before the grant is sent; those that are cut, or handed back,
  until the shard has said so. So a raise is paid out of what others have given up for sure.
- What a shard holds lies in its store. While it is down that stays counted; an owner that begins
  has no permits, and its jobs are what it reports.
- A coordinator that starts reads the entries that its predecessor noted (each raise, before it was
  sent). Of a shard that is not noted, nothing is known until it has confirmed a grant of ours: one
  of an earlier coordinator may have been on its way before. Until all are known, nothing is raised.
- Only a limit that is lowered may leave more held than allowed: then nothing new begins.

While jobs wait for permits, these are divided in proportion to the jobs that are in the state or
ready to be; each shard with such jobs has one at least. Where there are fewer permits than such
shards, they go round: the one that had none for the longest time is next. What nobody needs is
spread evenly, for jobs to come. Nothing is cut while no job waits. Room for PENDING jobs
(`max_pending`) is divided in the same way, but evenly: enqueues go to any shard.

Without sockets and files; time is asked through what is passed in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from pinlaterd.clock import Clock
from pinlaterd.coordinator.processes import SILENT_SECONDS
from pinlaterd.model import JobState
from pinlaterd.wire.control import (
    GrantedPermits,
    HeldPermits,
    PermitGrant,
    PermitReport,
)

# How long permits stay where they are while jobs wait elsewhere.
TURN_SECONDS = 0.03
_CONFIRM_SECONDS = 1.0  # after which a grant is held for lost, and another is sent


class NotedPermits(NamedTuple):
    """The most jobs of a queue that may be on a shard."""

    state: JobState
    queue: str
    shard: str
    held: int


class _Holder:
    """A shard, as far as one queue goes. `held`: the most jobs that may be there; `reported`: its
    last report; `sent`: the last grant; `known`: whether `held` is sure."""

    __slots__ = (
        "confirmed",
        "held",
        "incarnation",
        "known",
        "reported",
        "sent",
        "sent_at",
        "served_at",
    )

    def __init__(self, held: int = 0, *, known: bool = False) -> None:
        self.held = held
        self.known = known
        self.reported = HeldPermits(0, 0, 0, 0)
        self.sent = GrantedPermits(0, 0, contested=False)
        self.sent_at = self.served_at = -math.inf
        self.confirmed = False
        self.incarnation = 0


class _Shard(NamedTuple):
    """The process that owns a shard's store, as it reported last."""

    peer: bytes
    pid: int  # 0: on another server
    incarnation: int
    heard_at: float


class _Limited:
    """A queue whose jobs are limited in one state. `order`: who is served first until `turn_ends`,
    while there are fewer permits than shards that want one."""

    # Permits move if a shard has less than this part of what it is to have.
    worth_moving = 0.9

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.holders: dict[str, _Holder] = {}
        self.order: Sequence[str] = ()
        self.turn_ends = -math.inf

    def begin_turn(self, live: Mapping[str, _Holder], now: float) -> None:
        """Let those be first that got permits the longest time ago."""
        self.order = sorted(live, key=lambda shard: live[shard].served_at)
        self.turn_ends = now + TURN_SECONDS

    def is_contested(self, live: Mapping[str, _Holder], _rest: int) -> bool:
        """Return whether shards are to return what they do not need."""
        return len(live) > 1 and any(one.reported.waits for one in live.values())

    def is_told(self, holder: _Holder, permits: int, *, contested: bool) -> bool:
        """Return whether a shard need not hear that permits are `contested`."""
        return holder.sent.contested or not contested or not permits

    def targets(
        self, live: Mapping[str, _Holder], rest: int, *, contested: bool
    ) -> Mapping[str, int]:
        """Divide `rest` permits over the live shards; if `contested`, only among jobs that are
        there: a shard would hand others back at once."""
        last = len(self.order)
        places = {shard: place for place, shard in enumerate(self.order)}
        demands = {shard: one.reported.used + one.reported.ready for shard, one in live.items()}
        wanting = sorted(
            [shard for shard, demand in demands.items() if demand],
            key=lambda shard: places.get(shard, last),
        )[:rest]
        more = {shard: demands[shard] - 1 for shard in wanting}
        by_demand = min(rest - len(wanting), sum(more.values()))
        parts = [dict.fromkeys(wanting, 1), proportional(by_demand, more)]
        spare = 0 if contested else rest - len(wanting) - by_demand
        parts.append(proportional(spare, dict.fromkeys(sorted(live), 1)))
        return {shard: sum(part.get(shard, 0) for part in parts) for shard in live}

    def starves(self, live: Mapping[str, _Holder], targets: Mapping[str, int]) -> bool:
        """Return whether jobs wait on a shard that is to have more permits."""
        return any(
            one.reported.waits and one.reported.permits < self.worth_moving * targets[shard]
            for shard, one in live.items()
            if one.confirmed
        )


class _Room(_Limited):
    """A queue whose PENDING jobs are limited: enqueues go to any shard, so what is left is spread
    evenly, but for what an enqueue waits for."""

    worth_moving = 1.0

    def is_contested(self, live: Mapping[str, _Holder], rest: int) -> bool:
        """Return whether no shard has room for what waits."""
        free = rest - sum(one.reported.used for one in live.values())
        wanted = [one.reported.ready for one in live.values() if one.reported.waits]
        return bool(wanted) and free < min(wanted)

    def is_told(self, holder: _Holder, _permits: int, *, contested: bool) -> bool:
        return holder.sent.contested is contested

    def targets(
        self, live: Mapping[str, _Holder], rest: int, *, contested: bool
    ) -> Mapping[str, int]:
        """Divide room for `rest` jobs over the live shards."""
        targets = {shard: one.reported.used for shard, one in live.items()}
        free = max(0, rest - sum(targets.values()))
        for shard, one in live.items():
            if one.reported.ready <= free:
                targets[shard] += one.reported.ready
                free -= one.reported.ready
        for shard, jobs in proportional(free, dict.fromkeys(sorted(live), 1)).items():
            targets[shard] += jobs
        return targets


class PermitAllocator:
    """Takes what shards report, gives the grants to send. Times are monotonic seconds."""

    def __init__(
        self,
        clock: Clock,
        is_running: Callable[[int], bool],
        noted: Iterable[NotedPermits] = (),
        first_number: int = 0,
        state: JobState = JobState.IN_PROGRESS,
    ) -> None:
        """`state`: whose jobs are limited. `is_running`: whether there is a process of that pid.
        `noted`: by the coordinator before. Grants have numbers above `first_number`."""
        self.state = state
        self._clock = clock
        self._is_running = is_running
        self._queues: dict[str, _Limited] = {}
        self._shards: dict[str, _Shard | None] = {}  # None: it has not reported yet
        self._number = first_number
        self._noted = {(note.queue, note.shard): note.held for note in noted if note.state is state}
        self._first: Mapping[tuple[str, str], int] = dict(self._noted)
        self._changed: set[str] = set()  # queues to be looked at
        self._looks: dict[str, float] = {}  # when others are
        self.note_due = False  # whether more may be held than is noted

    # --- what is heard -------------------------------------------------------------------------

    def configure(self, limits: Mapping[str, int], shards: Collection[str]) -> None:
        """Set the limits of queues, and the shards that there are."""
        newcomers = {*shards} - self._shards.keys() if self._shards else frozenset[str]()
        self._shards = {shard: self._shards.get(shard) for shard in shards}
        for queue in self._queues.keys() - limits.keys():
            del self._queues[queue]
            self._looks.pop(queue, None)
        for queue, limit in limits.items():
            limited = self._queues.get(queue)
            if limited is None:
                kind = _Room if self.state is JobState.PENDING else _Limited
                limited = self._queues[queue] = kind(limit)
                known = {s: self._first[queue, s] for s in shards if (queue, s) in self._first}
                limited.holders = {s: _Holder(held, known=True) for s, held in known.items()}
            limited.limit = limit
            for shard in limited.holders.keys() - self._shards.keys():
                del limited.holders[shard]
            # The jobs of a shard that is added are not there before it serves.
            for shard in newcomers:
                limited.holders[shard] = _Holder(known=True)
        self._first = {}
        self._changed |= limits.keys()

    def heard(self, peer: bytes, report: PermitReport) -> None:
        """Take the report of a shard, which answers are sent to by `peer`."""
        if report.shard not in self._shards:
            return
        before = self._shards[report.shard]
        if before is not None and report.incarnation < before.incarnation:
            return  # of an owner that has been succeeded
        is_new = before is None or before.peer != peer
        now = self._clock.monotonic()
        self._shards[report.shard] = _Shard(peer, report.pid, report.incarnation, now)
        if is_new:
            self._changed |= self._queues.keys()
        for queue, reported in report.queues.items():
            limited = self._queues.get(queue)
            if limited is not None:
                holder = limited.holders.setdefault(report.shard, _Holder())
                self._take(holder, report.incarnation, reported, is_new=is_new)
                self._changed.add(queue)

    def heartbeat(self, peer: bytes) -> None:
        """Note that a process lives that has nothing to say of permits."""
        for shard, of in self._shards.items():
            if of is not None and of.peer == peer:
                self._shards[shard] = of._replace(heard_at=self._clock.monotonic())

    def _take(
        self, holder: _Holder, incarnation: int, reported: HeldPermits, *, is_new: bool
    ) -> None:
        self._number = max(self._number, reported.grant)
        if reported.grant == holder.sent.number and reported.grant:
            holder.confirmed = holder.known = True
            holder.held = reported.held
        else:
            # An older grant may still be on its way, or a raise of ours.
            holder.held, holder.confirmed = max(holder.held, reported.held), False
            if is_new or incarnation != holder.incarnation:
                holder.sent_at = -math.inf
        holder.incarnation, holder.reported = incarnation, reported

    # --- what follows from it ------------------------------------------------------------------

    def due_grants(self) -> Sequence[tuple[bytes, PermitGrant]]:
        """Return the grants to send now, after `holdings` has been noted if `note_due`."""
        now = self._clock.monotonic()
        due = {queue for queue, at in self._looks.items() if at <= now}
        looked, self._changed = due | (self._changed & self._queues.keys()), set()
        grants: dict[str, dict[str, GrantedPermits]] = {}
        for queue in looked:
            self._looks.pop(queue, None)
            for shard, granted in self._allocate(queue, now).items():
                grants.setdefault(shard, {})[queue] = granted
        return [
            (of.peer, PermitGrant(shard, of.incarnation, self.state, queues))
            for shard, queues in grants.items()
            if (of := self._shards[shard]) is not None
        ]

    @property
    def next_look(self) -> float:
        """When something is due, if nothing is heard before."""
        return min(self._looks.values(), default=math.inf)

    def holdings(self) -> Sequence[NotedPermits]:
        """List what may be held."""
        found = [
            NotedPermits(self.state, queue, shard, holder.held)
            for queue, limited in self._queues.items()
            for shard, holder in limited.holders.items()
            if holder.known
        ]
        self._noted = {(note.queue, note.shard): note.held for note in found}
        self.note_due = False
        return found

    def unknown(self) -> Sequence[str]:
        """List the shards of which it is not known what they hold."""
        return [
            shard
            for shard in self._shards
            if not all(_is_known(limited, shard) for limited in self._queues.values())
        ]

    # --- one queue -------------------------------------------------------------------------------

    def _allocate(self, queue: str, now: float) -> Mapping[str, GrantedPermits]:
        """Return the grants of a queue that are to be sent, by shard."""
        limited, holders = self._queues[queue], self._queues[queue].holders
        live = {shard: one for shard, one in holders.items() if self._is_live(shard, now)}
        held = sum(one.held for one in holders.values())
        away = sum(one.held for shard, one in holders.items() if shard not in live)
        rest = max(0, limited.limit - away)
        is_known = all(_is_known(limited, shard) for shard in self._shards)
        # Below 0 once a limit was lowered: then not even a new owner has what the one before held.
        free = limited.limit - held if is_known else min(0, limited.limit - held)
        contested = limited.is_contested(live, rest)
        if contested and now >= limited.turn_ends:
            limited.begin_turn(live, now)
        targets = limited.targets(live, rest, contested=contested)
        starves = limited.starves(live, targets)
        may_cut = held > limited.limit or starves
        out_of_turn = any(one.reported.waits and not targets[shard] for shard, one in live.items())
        if contested and (starves or (out_of_turn and rest)):
            self._look_at(queue, limited.turn_ends)
        grants = {}
        for shard, holder in live.items():
            if not holder.confirmed and now - holder.sent_at <= _CONFIRM_SECONDS:
                self._look_at(queue, holder.sent_at + _CONFIRM_SECONDS)
                continue
            target = targets[shard]
            # A cut that is not confirmed may have been followed.
            cut = holder.sent.permits if holder.sent.number else holder.held
            permits = before = (
                holder.reported.permits if holder.confirmed else min(holder.reported.permits, cut)
            )
            if target > before:
                permits = max(before, min(target, holder.held + free))
                free -= max(0, permits - holder.held)
            elif may_cut:
                permits = target
            is_told = limited.is_told(holder, permits, contested=contested)
            if holder.confirmed and permits == before and is_told:
                continue
            if permits > before:
                holder.served_at = now
            grants[shard] = self._grant(holder, permits, contested=contested, now=now)
            if holder.held > self._noted.get((queue, shard), -1):
                self.note_due = True
        return grants

    def _grant(
        self, holder: _Holder, permits: int, *, contested: bool, now: float
    ) -> GrantedPermits:
        self._number += 1
        holder.sent = GrantedPermits(self._number, permits, contested)
        holder.sent_at, holder.confirmed = now, False
        holder.held = max(holder.held, permits)
        return holder.sent

    def _look_at(self, queue: str, at: float) -> None:
        self._looks[queue] = min(at, self._looks.get(queue, math.inf))

    def _is_live(self, shard: str, now: float) -> bool:
        of = self._shards.get(shard)
        if of is None or now - of.heard_at > SILENT_SECONDS:
            return False
        return not of.pid or self._is_running(of.pid)


def _is_known(limited: _Limited, shard: str) -> bool:
    return shard in limited.holders and limited.holders[shard].known


def proportional(whole: int, weights: Mapping[str, int]) -> Mapping[str, int]:
    """Divide `whole` in proportion to `weights`: the parts are whole, and add up."""
    total = sum(weights.values())
    if not total:
        return {}
    parts = {name: whole * weight // total for name, weight in weights.items()}
    left = whole - sum(parts.values())
    rests = sorted(weights, key=lambda name: -(whole * weights[name] % total))
    for name in rests[:left]:
        parts[name] += 1
    return parts
