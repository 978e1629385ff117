"""Rates over the servers of a cluster: this server's share, and, where it leads, everybody's.

The leader's coordinator has a RateAllocator over servers; each server's own divides the server's
share over its routers. A server reports the most that its routers may be spending; so a cut is
confirmed as they confirm theirs. What makes this safe, beyond coordinator/allocator.py:

- A share belongs to a member node. A server that got another node takes everything from its
  routers before they may show the new one (`member`): others may have been given it meanwhile.
- The share of a member that is gone stays counted until every live server has said that no shard
  there serves that member's routers, and no other server can serve a shard: so that of one that
  shards are pinned to is kept until it returns.
- A leader that begins knows nothing. Until the same is true of everybody but the live members, and
  all of these have reported, the others may hold all that these did not report.
- A grant bears the term of the leader that sent it, and reports name the term that they follow. A
  server never returns to an earlier term: so no grant of a leader before counts after a report.

Snapshots bear `member`, and no other: where `step` says that it has changed, another is to be
published. There is no timer here, and no file: what routers hold is in run/rates.json.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, NamedTuple

from pinlaterd.clock import Clock
from pinlaterd.coordinator.allocator import SERVER_FLOOR_FRACTION, RateAllocator
from pinlaterd.coordinator.rates import RateControl
from pinlaterd.wire.control import RateReport, RouterId, ServerGrant, ServerReport

if TYPE_CHECKING:
    from pinlaterd.coordinator.peers import Peers

_REPORT_SECONDS = 0.2  # between reports of what is wanted
_HEARTBEAT_SECONDS = 0.9
_QUIET_HEARTBEAT_SECONDS = 2.9  # while nobody here wants anything
_ANY = -1  # no member's number
_PATIENCE_SECONDS = 10.0  # after which what is waited for is a problem


class ClusterView(NamedTuple):
    """The members of a cluster, as a coordinator knows them."""

    members: Mapping[str, str]  # the servers of the member nodes that live, the oldest first
    own: str  # our member node; empty: none
    # Of member nodes: those whose routers a shard here may still serve; "": also others.
    admitted: frozenset[str]
    served: bool  # whether no server but those of live members can serve any shard

    @property
    def leader(self) -> str:
        return next(iter(self.members), "")


class ServerRates:
    """This server's end, and the leader's where this is it."""

    def __init__(
        self,
        server: str,
        member: str,
        limits: Mapping[str, float],
        clock: Clock,
        rates: RateControl,
        peers: Peers,
    ) -> None:
        """`member`: the member node that the last snapshot before this process bore."""
        self.member = member
        self._server = server
        self._clock = clock
        self._rates = rates
        self._peers = peers  # may lose any message
        self._limits = limits
        self._view = ClusterView({}, "", frozenset(), served=False)
        self._leading: Leading | None = None
        self._term = ""
        self._past_terms: set[str] = set()
        self._followed = 0  # number of the last grant
        self._sent_basis: tuple[object, ...] = ()
        self._sent_demands: Mapping[str, float] = {}
        self._sent_at = self._look_due = self._waiting_since = clock.monotonic()

    def configure(self, limits: Mapping[str, float]) -> None:
        """Set the rates of all servers together, jobs/s by limited queue."""
        self._limits = limits
        if self._leading is not None:
            self._leading.allocator.set_limits(limits)

    def follow(self, view: ClusterView) -> None:
        if view.own != self._view.own:
            self._waiting_since = self._clock.monotonic()
        self._view = view
        if not view.own or view.leader != view.own:
            self._leading = None
        elif self._leading is None or self._leading.member != view.own:
            self._leading = Leading(view.own, self._clock)
            self._leading.allocator.set_limits(self._limits)
        if self._leading is not None:
            self._leading.follow(view)
        if view.own and not self._joined:
            self._rates.follow({})

    def heard_report(self, peer: bytes, message: ServerReport) -> None:
        """Note a report, which came by the connection `peer`: an answer goes there."""
        if self._leading is None:
            return
        if message.term != self._leading.term:
            self._peers.reply(peer, ServerGrant(self._leading.term, ""))
        else:
            self._leading.heard(peer, message)

    def heard_grant(self, sender: str, message: ServerGrant) -> None:
        """Note a grant from the coordinator of the member node `sender`."""
        if sender != self._view.leader or message.term in self._past_terms:
            return
        if message.term != self._term:
            self._past_terms.add(self._term)
            self._term, self._followed = message.term, 0
        grant = message.grant
        if grant is None or message.member != self._joined or grant.number <= self._followed:
            return
        self._followed = grant.number
        self._rates.follow(grant.shares)
        self._rates.allocator.add_spare(grant.credits)

    def step(self) -> bool:
        """Do what is due; whether `member` has changed."""
        changed = bool(self._view.own) and not self._joined and self._holds_nothing()
        if changed:
            self.member, self._followed = self._view.own, 0
        if self._leading is not None:
            for peer, message in self._leading.due_grants():
                self._peers.reply(peer, message)
        self._report()
        return changed

    def problems(self) -> Sequence[str]:
        """List for `status` what keeps rates from being used."""
        late = self._clock.monotonic() - _PATIENCE_SECONDS
        if self._view.own and not self._joined and self._waiting_since < late:
            return ["rates: a router does not confirm that it spends nothing; restart this server"]
        return () if self._leading is None else self._leading.problems(late)

    def _holds_nothing(self) -> bool:
        """Tell whether no router spends anything; also in the eyes of the coordinator after us."""
        held = self._rates.allocator.held()
        return self._rates.allocator.settled and not self._rates.unnoted and not any(held.values())

    @property
    def _joined(self) -> str:
        """Our member node, once routers may show it."""
        return self.member if self.member == self._view.own else ""

    def _report(self) -> None:
        returned = self._rates.take_surplus()
        # A cut must be noted before it is confirmed: the coordinator after us counts by the note.
        if not self._joined or not self._rates.allocator.settled or self._rates.unnoted:
            return
        basis = (self._view, self._term, self.member, self._followed, self._rates.notes)
        now, same = self._clock.monotonic(), basis == self._sent_basis and not returned
        if same and now < self._look_due:
            return
        self._look_due = now + _REPORT_SECONDS
        share, demands = self._rates.share, self._rates.allocator.demands()
        heartbeat = _HEARTBEAT_SECONDS if demands else _QUIET_HEARTBEAT_SECONDS
        if same and demands == self._sent_demands and now - self._sent_at < heartbeat:
            return
        held = self._rates.allocator.held()
        over = {queue: rate for queue, rate in held.items() if rate > share.get(queue, 0.0)}
        router = RouterId(self._server, member_number(self.member), 0)
        report = RateReport(router, self._followed, share, demands, returned)
        message = ServerReport(self._term, report, over, tuple(sorted(self._view.admitted)))
        if self._peers.tell(self._view.leader, message):
            self._sent_basis, self._sent_demands, self._sent_at = basis, demands, now


class Leading:
    """One term of a leader."""

    def __init__(self, member: str, clock: Clock) -> None:
        self.member = member
        self._clock, self._began = clock, clock.monotonic()
        self._gone: dict[int, tuple[str, float]] = {}  # servers, and since when
        self.term = uuid.uuid4().hex
        self.allocator = RateAllocator(
            clock, self._may_spend, (), (), floor=SERVER_FLOOR_FRACTION, by_time=False
        )
        self._admitted: dict[int, AbstractSet[int]] = {}  # by live members, as they said last
        self._live: Mapping[int, str] = {}  # servers
        self._view = ClusterView({}, "", frozenset(), served=False)

    def follow(self, view: ClusterView) -> None:
        live = {member_number(member): server for member, server in view.members.items()}
        for number in self._live.keys() - live.keys():
            self._gone[number] = (self._live[number], self._clock.monotonic())
            self._admitted.pop(number, None)
            self.allocator.lost(number)
        self._live, self._view = live, view
        self._expect()

    def heard(self, peer: bytes, message: ServerReport) -> None:
        report = message.report
        if report.router.pid not in self._live:
            return  # what it holds stays counted, until nobody serves its routers
        self._admitted[report.router.pid] = {member_number(one) for one in message.admitted}
        self.allocator.heard(b"%d %b" % (report.router.pid, peer), report, message.held)
        self._expect()

    def due_grants(self) -> Sequence[tuple[bytes, ServerGrant]]:
        nodes = {member_number(member): member for member in self._view.members}
        grants = []
        for address, grant in self.allocator.due_grants():
            number, _, peer = address.partition(b" ")
            grants.append((peer, ServerGrant(self.term, nodes[int(number)], grant)))
        return grants

    def problems(self, late: float) -> Sequence[str]:
        """List problems. `late`: since when what is waited for is one."""
        kept = {s for n, (s, at) in self._gone.items() if at < late and self._may_spend(n)}
        if not kept and (self.allocator.settled or self._began > late):
            return ()
        what = f"what {', '.join(sorted(kept)) or 'others'} may be spending"
        return [f"rates: {what} is kept, until it is back or all shards are served elsewhere"]

    def _expect(self) -> None:
        servers = set(self._live.values())
        others = any(admitted - self._live.keys() for admitted in self._admitted.values())
        complete = self._view.served and self._admitted.keys() == self._live.keys() and not others
        self.allocator.expect(servers, complete=complete)

    def _may_spend(self, number: int) -> bool:
        """Tell whether the routers of a member may be served anywhere."""
        return (
            number in self._live
            or not self._view.served
            or self._admitted.keys() != self._live.keys()
            or any({number, _ANY} & admitted for admitted in self._admitted.values())
        )


def member_number(member: str) -> int:
    """Return a node's number, which ZooKeeper gives once."""
    return int(member.rpartition("-")[2]) if member else _ANY
