"""The rate allocator: how much of each queue's rate each router, or each server, may spend.

One in each coordinator divides its server's share over the routers there. In a cluster the leading
coordinator has another one, which divides the rates over the servers (coordinator/server_rates.py);
to that one a "router" below is a server, which holds what its routers may be spending.

The invariant: what all routers may be spending of a queue, together, is never raised above its
limit, whatever is lost, late or killed. For this, each router's entry says the *most* that it
may be spending (`held`), and not what it was told last:

- A share that is raised counts from before the grant is sent; one that is cut counts in full
  until the router has confirmed the grant. So a raise is paid out of what others have confirmed
  to have given up, never out of what they were asked for. A server confirms a cut with what its
  routers still hold, and reports the rest as they confirm it.
- A router that lives but is not heard spends its last share for ever: it stays counted.
- A router that died spends nothing; but its successor, when it starts without being able to
  ask, takes over its share. So that stays counted until a router of that name has said what it
  holds, or no router of that name is expected, or for KEPT_SECONDS, within which it would report.
- A coordinator that starts reads the entries that its predecessor noted (each grant, before it
  was sent), and counts what routers report or what was noted, the larger, until
  they confirm its own first grant. Where no note is left, it does not know of all routers. Until
  all expected ones have reported, or for SETTLE_SECONDS, those that it has not heard count as if
  they held all of the limit that the others did not report.
- Only a limit that is lowered may leave more held than allowed, until the cuts are confirmed: a
  few milliseconds for routers that are heard.

A server that is gone is not forgotten by time, and a new leader has no notes: both times the caller
knows when nobody else can hold anything (`expect`).

No tokens are lost in a transfer either: what a bucket can't hold any more after a cut comes back
with the confirmation, and goes along with the raise that the cut pays for.

A division is max-min fair: a router that wants little gets all of it, and the others an equal part
of the rest. Its shares always add up to the rate. Every router keeps a floor, so that one whose
demand has just begun is not without a token until the next division.

Without sockets and files; time and processes are asked through what is passed in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeVar

from pinlaterd.clock import Clock
from pinlaterd.coordinator.processes import SILENT_SECONDS
from pinlaterd.wire.control import Holding, RateGrant, RateReport, RouterId

Sharer = TypeVar("Sharer", bound=Hashable)

# Of the rate, for all together. It is lost while those that have it want nothing, so both together
# stay well below the 2 % by which a queue may miss its rate.
FLOOR_FRACTION = 0.01
SERVER_FLOOR_FRACTION = 0.002

SETTLE_SECONDS = 3.0
KEPT_SECONDS = 10.0
_LOOK_SECONDS = 1.0  # how often routers are looked at while nothing changes
_CONFIRM_SECONDS = 1.0  # after which a grant is held for lost, and another is sent
_WORTH_TELLING = 0.001  # of a limit: smaller changes are not sent


@dataclass(slots=True)
class _Entry:
    """A router process, as far as rates go. Figures by queue."""

    router: RouterId
    held: dict[str, float]  # jobs/s: the most that it may be spending
    number: int  # of the last grant that was sent to it, or that it follows
    sent: dict[str, float] = field(default_factory=dict)  # jobs/s: that grant
    demands: Mapping[str, float] = field(default_factory=dict)
    peer: bytes = b""  # the connection that it reports through; empty: known from notes only
    heard_at: float = -math.inf
    confirmed: bool = False
    sent_at: float = -math.inf
    died_at: float | None = None

    @property
    def was_granted(self) -> bool:
        """Whether we sent it anything, and not only a coordinator before us."""
        return self.sent_at > -math.inf


class RateAllocator:
    """Takes what routers report, gives the grants to send. Times are monotonic seconds."""

    def __init__(
        self,
        clock: Clock,
        is_running: Callable[[int], bool],
        noted: Sequence[Holding],
        expected: Iterable[str],
        *,
        floor: float = FLOOR_FRACTION,
        by_time: bool = True,
        on_surplus: Callable[[str, float], None] = lambda _queue, _tokens: None,
    ) -> None:
        """`is_running`: whether there is a process of that pid. `noted`: by the coordinator
        before. `expected`: the names of the routers that there should be. `by_time`: whether the
        dead are forgotten, and those unheard taken for absent, after some time. `on_surplus` is
        told of tokens that were given up and that nobody here wants, by queue."""
        self._clock = clock
        self._is_running = is_running
        self._floor = floor
        self._by_time = by_time
        self._on_surplus = on_surplus
        self._limits: dict[str, float] = {}
        self._expected = frozenset(expected)
        self._complete = by_time  # whether nobody but those expected can hold anything
        self._entries = {
            note.router: _Entry(note.router, dict(note.shares), note.number) for note in noted
        }
        self._by_peer: dict[bytes, _Entry] = {}
        # What was known of each when it was first known: those unheard held the rest, at most, of
        # the limits that there were at the beginning.
        self._first: dict[str, float] = {}
        self._first_limits: Mapping[str, float] | None = None
        for note in noted:
            self._count_first(note.shares)
        self._number = max([clock.now_ms(), *(note.number for note in noted)])
        self._started = clock.monotonic()
        self.settled = False  # whether all that anybody may hold is in the entries
        self._spare: dict[str, float] = {}  # tokens given up by some, for others
        self._changed = True
        self._look_due = 0.0
        self._note_due = False

    # --- what is heard -------------------------------------------------------------------------

    def set_limits(self, limits: Mapping[str, float]) -> None:
        """Set the rate of each limited queue that is to be divided, in jobs/s."""
        self._changed |= self._limits != limits
        self._limits = dict(limits)
        if self._first_limits is None:
            self._first_limits = self._limits
        self._spare = {queue: self._spare[queue] for queue in limits if queue in self._spare}

    def expect(self, names: Iterable[str], *, complete: bool) -> None:
        """Expect these names from now on; `complete`: nobody else holds anything."""
        self._expected, self._complete = frozenset(names), complete

    def add_spare(self, tokens: Mapping[str, float]) -> None:
        """Add tokens for those that want more than their share, by queue."""
        for queue, added in tokens.items():
            self._spare[queue] = self._spare.get(queue, 0.0) + added
            self._changed = True

    def heard(
        self, peer: bytes, report: RateReport, held: Mapping[str, float] = MappingProxyType({})
    ) -> None:
        """Note a report. `held`: of a server, what its routers may be spending; more than its
        share, until they have confirmed a cut."""
        entry = self._entries.get(report.router)
        if entry is None:
            self._end_namesakes(report.router)
            entry = _Entry(report.router, {}, 0)
            self._entries[report.router] = entry
            self._count_first(report.shares)
        if entry.peer != peer:
            self._by_peer.pop(entry.peer, None)
            self._by_peer[peer] = entry
            entry.confirmed = False
        if not entry.peer:
            # what it says counts, and what was noted: an older grant may still be on its way
            for holding in (report.shares, held):
                for queue, share in holding.items():
                    entry.held[queue] = max(share, entry.held.get(queue, 0.0))
            entry.sent = dict(report.shares)
            self._number = max(self._number, report.grant)
            self._changed = True
        elif report.grant == entry.number and entry.was_granted:
            self._changed |= not entry.confirmed
            entry.confirmed = True
            # what one that died meanwhile held may have been taken over, as it was noted
            if self._is_running(report.router.pid):
                now_held = {q: max(share, held.get(q, 0.0)) for q, share in entry.sent.items()}
                self._note_due |= entry.held != now_held
                self._changed |= entry.held != now_held
                entry.held = now_held
        self.add_spare(report.returned)
        self._changed |= entry.demands != report.demands
        entry.peer, entry.demands = peer, report.demands
        self._note_heard(entry)

    def lost(self, pid: int) -> None:
        """Grant nothing to the one of that pid, which may go on spending what it holds."""
        for entry in self._entries.values():
            if entry.router.pid == pid:
                entry.heard_at = -math.inf
                self._changed = True

    def heartbeat(self, peer: bytes) -> None:
        """Note that a router lives that has nothing to say of rates."""
        entry = self._by_peer.get(peer)
        if entry is not None:
            self._note_heard(entry)

    def _note_heard(self, entry: _Entry) -> None:
        self._changed |= not self._is_heard(entry)  # it may have missed what the others got
        entry.heard_at = self._clock.monotonic()

    # --- what follows from it ------------------------------------------------------------------

    def due_grants(self) -> Sequence[tuple[bytes, RateGrant]]:
        """Return the grants to send now, after `holdings` has been noted if `note_due`."""
        self._look_for_the_dead()
        self._settle()
        now = self._clock.monotonic()
        live = [entry for entry in self._entries.values() if self._is_heard(entry)]
        late = any(not e.confirmed and now - e.sent_at > _CONFIRM_SECONDS for e in live)
        if not self._changed and not late:
            return ()
        self._changed = False
        # A router that has not confirmed is left as it is: its next report brings us here again.
        open_to_change = [
            entry for entry in live if entry.confirmed or now - entry.sent_at > _CONFIRM_SECONDS
        ]
        wanted = {entry.router: dict(entry.sent) for entry in open_to_change}
        credits_: dict[RouterId, dict[str, float]] = {entry.router: {} for entry in open_to_change}
        for queue, limit in self._limits.items():
            self._allocate(queue, limit, live, wanted)
            self._pass_on_spare(queue, live, wanted, credits_)
        return [
            (entry.peer, grant)
            for entry in open_to_change
            if (grant := self._grant(entry, wanted[entry.router], credits_[entry.router]))
        ]

    def held(self) -> dict[str, float]:
        """Return the most that all together may be spending, jobs/s by queue."""
        return _sum(entry.held for entry in self._entries.values())

    def demands(self) -> dict[str, float]:
        """Sum the demands of all routers that are heard, in jobs/s by queue."""
        return _sum(entry.demands for entry in self._entries.values() if self._is_heard(entry))

    @property
    def note_due(self) -> bool:
        """Whether what routers may hold has changed since `holdings` was asked for."""
        return self._note_due

    def holdings(self) -> Sequence[Holding]:
        """List what each router may hold."""
        self._note_due = False
        return [
            Holding(entry.router, entry.number, dict(entry.held))
            for entry in self._entries.values()
        ]

    def _allocate(
        self,
        queue: str,
        limit: float,
        live: Sequence[_Entry],
        wanted: Mapping[RouterId, dict[str, float]],
    ) -> None:
        """Put into `wanted` what each router is to have of `queue` now."""
        sharers = {entry.router: entry for entry in live}
        held = {router: entry.held.get(queue, 0.0) for router, entry in self._entries.items()}
        unknown = 0.0 if self.settled else self._unknown(queue)
        out_of_reach = math.fsum(held[router] for router in held if router not in sharers)
        rest = max(0.0, limit - unknown - out_of_reach)
        demands = {
            router: min(rest, entry.demands.get(queue, 0.0)) for router, entry in sharers.items()
        }
        sent = {router: entry.sent.get(queue, 0.0) for router, entry in sharers.items()}
        floor = rest * self._floor / max(1, len(sent))
        if _is_good(sent, demands, rest, floor) and all(queue in entry.sent for entry in live):
            return
        targets = divide(rest, demands, self._floor)
        free = max(0.0, limit - unknown - math.fsum(held.values()))
        missing = {
            router: targets[router] - held[router]
            for router in wanted
            if targets[router] > held[router]
        }
        total_missing = math.fsum(missing.values())
        portion = min(1.0, free / total_missing) if total_missing else 0.0
        for router, shares in wanted.items():
            if router in missing:
                target = held[router] + missing[router] * portion
            else:
                target = targets[router]
            shares[queue] = target

    def _pass_on_spare(
        self,
        queue: str,
        live: Sequence[_Entry],
        wanted: Mapping[RouterId, Mapping[str, float]],
        credits_: Mapping[RouterId, dict[str, float]],
    ) -> None:
        """Give tokens that some routers gave up to those that want more than their share."""
        tokens = self._spare.pop(queue, 0.0)
        if not tokens:
            return
        unmet = {
            entry.router: max(0.0, entry.demands.get(queue, 0.0) - entry.sent.get(queue, 0.0))
            for entry in live
        }
        reached = math.fsum(unmet[router] for router in wanted)
        if reached:
            for router in wanted:
                if unmet[router]:
                    credits_[router][queue] = tokens * unmet[router] / reached
        elif any(unmet.values()):
            self._spare[queue] = tokens  # those that want it are about to confirm
        else:
            self._on_surplus(queue, tokens)

    def _grant(
        self, entry: _Entry, shares: Mapping[str, float], credits_: Mapping[str, float]
    ) -> RateGrant | None:
        """Enter `shares`, and the grant that says so; None if the router need not be told."""
        shares = {queue: shares.get(queue, 0.0) for queue in self._limits}
        is_lost = not entry.confirmed
        same_queues = shares.keys() == entry.sent.keys()
        if (
            not credits_
            and not is_lost
            and same_queues
            and not self._is_worth_telling(entry, shares)
        ):
            return None
        self._number += 1
        entry.number, entry.sent, entry.confirmed = self._number, dict(shares), False
        entry.sent_at = self._clock.monotonic()
        for queue, share in shares.items():
            entry.held[queue] = max(share, entry.held.get(queue, 0.0))
        # Cuts, too, for their numbers: a successor's grants must have greater ones, whatever the
        # clock says by then, or a router would take one of ours, which comes late, for its.
        self._note_due = True
        return RateGrant(self._number, shares, credits_)

    def _is_worth_telling(self, entry: _Entry, shares: Mapping[str, float]) -> bool:
        return any(
            abs(share - entry.sent[queue]) > self._limits[queue] * _WORTH_TELLING
            or (share == 0) != (entry.sent[queue] == 0)
            for queue, share in shares.items()
        )

    # --- routers that live ---------------------------------------------------------------------

    def _is_heard(self, entry: _Entry) -> bool:
        silent_seconds = self._clock.monotonic() - entry.heard_at
        return bool(entry.peer) and entry.died_at is None and silent_seconds <= SILENT_SECONDS

    def _count_first(self, shares: Mapping[str, float]) -> None:
        for queue, share in shares.items():
            self._first[queue] = self._first.get(queue, 0.0) + share

    def _unknown(self, queue: str) -> float:
        """Return the rate that routers may hold of which this coordinator has not heard."""
        limit = (self._first_limits or {}).get(queue, 0.0)
        return max(0.0, limit - self._first.get(queue, 0.0))

    def _settle(self) -> None:
        if self.settled:
            return
        reported = {entry.router.process for entry in self._entries.values() if entry.peer}
        seconds = self._clock.monotonic() - self._started
        late = self._by_time and seconds > SETTLE_SECONDS
        if (self._complete and self._expected <= reported) or late:
            self.settled = self._changed = True

    def _look_for_the_dead(self) -> None:
        now = self._clock.monotonic()
        if not self._changed and now < self._look_due:
            return
        self._look_due = now + _LOOK_SECONDS
        for entry in list(self._entries.values()):
            if entry.died_at is None:
                if self._is_running(entry.router.pid):
                    continue
                entry.died_at = now
                self._changed = True
            late = self._by_time and now - entry.died_at > KEPT_SECONDS
            if self._is_succeeded(entry) or late:
                del self._entries[entry.router]
                self._note_due = True
                self._by_peer.pop(entry.peer, None)
                self._changed = True

    def _end_namesakes(self, router: RouterId) -> None:
        """Note that another router that had this pid has ended."""
        for entry in self._entries.values():
            if entry.router.pid == router.pid and entry.died_at is None:
                entry.died_at = self._clock.monotonic()
                self._changed = True

    def _is_succeeded(self, dead: _Entry) -> bool:
        """Tell whether no successor can take over its share any more without our knowing."""
        name = dead.router.process
        return name not in self._expected or any(
            other.router.process == name and other.died_at is None and other.peer
            for other in self._entries.values()
        )


def _sum(figures: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for by_queue in figures:
        for queue, figure in by_queue.items():
            total[queue] = total.get(queue, 0.0) + figure
    return total


def _is_good(
    sent: Mapping[RouterId, float], demands: Mapping[RouterId, float], rest: float, floor: float
) -> bool:
    """Tell whether every router has what it wants, and all is given out."""
    tolerance = rest * _WORTH_TELLING
    return abs(math.fsum(sent.values()) - rest) <= tolerance and all(
        share >= max(floor - tolerance, demands[router]) for router, share in sent.items()
    )


# --- shares ------------------------------------------------------------------------------------


def divide(
    rate: float, demands: Mapping[Sharer, float], floor_fraction: float = FLOOR_FRACTION
) -> dict[Sharer, float]:
    """Divide `rate` over the sharers in `demands`, which want so much each (same unit, 0 or more).

    What none wants is divided evenly: it is there for demand that grows."""
    if not demands:
        return {}
    floor = rate * floor_fraction / len(demands)
    wanted = {sharer: max(0.0, demand - floor) for sharer, demand in demands.items()}
    left = rate - floor * len(demands)
    shares = dict.fromkeys(demands, floor)
    hungry = sorted(wanted, key=lambda sharer: wanted[sharer])
    for index, sharer in enumerate(hungry):
        part = min(wanted[sharer], left / (len(hungry) - index))
        shares[sharer] += part
        left -= part
    return {sharer: share + left / len(demands) for sharer, share in shares.items()}
