"""Who may spend how much: that the limit holds whatever is lost, late or killed, and that what
there is gets to those who want it.

Messages, processes and the note in run/rates.json are modelled; the allocator is the real one, and
so is what a router adopts when it starts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
)

from pinlaterd.coordinator.allocator import KEPT_SECONDS, SETTLE_SECONDS, RateAllocator
from pinlaterd.coordinator.processes import SILENT_SECONDS
from pinlaterd.router.rate_limits import shares_at_start
from pinlaterd.wire.control import Holding, RateGrant, RateReport, RouterId
from tests.clocks import FakeClock

QUEUE = "mail"
LIMIT = 12.0
NAMES = ("router-1", "router-2")


@dataclass
class Router:
    """A router process, and what is on its way to and from it."""

    id: RouterId
    peer: bytes
    shares: dict[str, float]
    followed: int = 0
    demand: float = 0.0
    cut_off: bool = False
    spoke: bool = False
    grants: deque[RateGrant] = field(default_factory=deque)
    reports: deque[RateReport] = field(default_factory=deque)

    def report(self) -> None:
        demands = {QUEUE: self.demand} if self.demand else {}
        self.reports.append(RateReport(self.id, self.followed, dict(self.shares), demands, {}))

    def hear(self) -> None:
        grant = self.grants.popleft()
        if grant.number > self.followed:
            self.followed, self.shares = grant.number, dict(grant.shares)
            self.report()


class Server:
    """One server's routers and its coordinator, which may be away."""

    def __init__(self, limit: float = LIMIT, names: Sequence[str] = NAMES) -> None:
        self.clock = FakeClock()
        self.limit = limit
        self.names = names
        self.routers: dict[str, Router] = {}
        self.note: Sequence[Holding] = ()
        self.allocator: RateAllocator | None = None
        self._pids = 0
        self._by_peer: dict[bytes, Router] = {}
        self.start_coordinator()

    # --- processes -------------------------------------------------------------------------

    def is_running(self, pid: int) -> bool:
        return any(router.id.pid == pid for router in self.routers.values())

    def start(self, name: str) -> Router:
        self._pids += 1
        identity = RouterId(name, self._pids, self.clock.now_ms() + self._pids)
        shares = shares_at_start(name, [QUEUE], self.note, self.is_running)
        router = Router(identity, b"%d" % self._pids, dict(shares))
        self.join(router)
        return router

    def join(self, router: Router) -> None:
        self.routers[router.id.process] = self._by_peer[router.peer] = router
        router.report()

    def kill(self, name: str) -> None:
        # what it had sent may still arrive
        self.routers.pop(name)

    def start_coordinator(self) -> None:
        self.allocator = RateAllocator(self.clock, self.is_running, self.note, self.names)
        self.allocator.set_limits({QUEUE: self.limit})
        for router in self.routers.values():
            router.report()

    def kill_coordinator(self) -> None:
        self.allocator = None
        for router in self._by_peer.values():
            router.reports.clear()

    # --- messages --------------------------------------------------------------------------

    def deliver_report(self, router: Router) -> None:
        if not router.reports:
            return
        report = router.reports.popleft()
        if self.allocator is not None:
            router.spoke = True
            self.allocator.heard(router.peer, report)
            self.act()

    def heartbeats(self) -> None:
        for router in self.routers.values():
            if self.allocator is not None and not router.cut_off:
                self.allocator.heartbeat(router.peer)
        self.act()

    def act(self) -> None:
        if self.allocator is None:
            return
        grants = self.allocator.due_grants()
        if self.allocator.note_due:
            self.note = self.allocator.holdings()
        for peer, grant in grants:
            self._by_peer[peer].grants.append(grant)

    def exchange(self) -> None:
        """Everything that is on its way arrives, and all that follows from it."""
        for _ in range(100):
            moving = [r for r in self.routers.values() if not r.cut_off and (r.grants or r.reports)]
            for router in moving:
                while router.grants:
                    router.hear()
                while router.reports:
                    self.deliver_report(router)
            if not moving:
                return
        raise AssertionError("they never come to an end")

    def settle(self, seconds: float = 0.0) -> None:
        """A while in which all is well."""
        self.clock.advance(seconds)
        for router in self.routers.values():
            if not router.cut_off:
                router.report()
        self.exchange()
        self.clock.advance(1.1)  # grants that got lost are sent again
        self.heartbeats()
        self.exchange()

    def spent(self) -> float:
        return sum(router.shares.get(QUEUE, 0.0) for router in self.routers.values())

    def share(self, name: str) -> float:
        return self.routers[name].shares[QUEUE]


@pytest.fixture
def server() -> Server:
    """Two routers that share the limit, and want nothing yet."""
    made = Server(names=NAMES)
    for name in made.names:
        made.start(name)
    made.exchange()
    assert made.spent() == pytest.approx(LIMIT)
    return made


def demand(server: Server, **jobs_per_second: float) -> None:
    for name, wanted in jobs_per_second.items():
        router = server.routers[name.replace("_", "-")]
        router.demand = wanted
        router.report()
    server.exchange()


class Cluster(RuleBasedStateMachine):
    """Anything may happen at any time, but that a limit is lowered."""

    def __init__(self) -> None:
        super().__init__()
        self.server = Server()
        for name in NAMES:
            self.server.start(name)
        self.server.exchange()

    name = st.sampled_from(NAMES)

    @rule(name=name)
    def start_router(self, name: str) -> None:
        if name not in self.server.routers:
            self.server.start(name)

    @rule(name=name)
    def kill_router(self, name: str) -> None:
        if name in self.server.routers:
            self.server.kill(name)

    @rule(name=name, wanted=st.sampled_from([0.0, 1.0, 5.0, 100.0]), heard=st.booleans())
    def want(self, name: str, wanted: float, *, heard: bool) -> None:
        router = self.server.routers.get(name)
        if router is not None:
            router.demand = wanted
            router.report()
            while heard and router.reports and not router.cut_off:
                self.server.deliver_report(router)

    @rule(name=name)
    def deliver_report(self, name: str) -> None:
        router = self.server.routers.get(name)
        if router is not None and not router.cut_off:
            self.server.deliver_report(router)

    @rule(name=name)
    def deliver_grant(self, name: str) -> None:
        router = self.server.routers.get(name)
        if router is not None and not router.cut_off and router.grants:
            router.hear()

    @rule()
    def all_is_well_for_a_moment(self) -> None:
        self.server.exchange()

    @rule(name=name)
    def lose_messages(self, name: str) -> None:
        router = self.server.routers.get(name)
        if router is not None and router.spoke:
            router.grants.clear()
            router.reports.clear()

    @rule(name=name)
    def cut_off(self, name: str) -> None:
        router = self.server.routers.get(name)
        if router is not None and router.spoke:
            router.cut_off = True

    @rule(name=name)
    def reconnect(self, name: str) -> None:
        router = self.server.routers.get(name)
        if router is not None and router.cut_off:
            router.cut_off = False
            router.report()

    @precondition(lambda self: self.server.allocator is not None)
    @rule()
    def kill_coordinator(self) -> None:
        self.server.kill_coordinator()

    @precondition(lambda self: self.server.allocator is None)
    @rule()
    def start_coordinator(self) -> None:
        self.server.start_coordinator()

    @rule(seconds=st.sampled_from([0.1, 1.1, SILENT_SECONDS + 1, KEPT_SECONDS + 1]))
    def time_passes(self, seconds: float) -> None:
        """A new router reports within that time: see the allocator's invariant."""
        for router in list(self.server.routers.values()):
            if not router.spoke:
                self.server.deliver_report(router)
        self.server.clock.advance(seconds)
        self.server.heartbeats()

    @invariant()
    def the_limit_holds(self) -> None:
        assert self.server.spent() <= LIMIT * (1 + 1e-9)

    def teardown(self) -> None:
        """Once all is well again nothing is wasted."""
        server = self.server
        if server.allocator is None:
            server.start_coordinator()
        for name in NAMES:
            if name not in server.routers:
                server.start(name)
            server.routers[name].cut_off = False
        server.settle(KEPT_SECONDS + 1)
        server.settle()
        self.the_limit_holds()
        assert server.spent() >= LIMIT * 0.995


Cluster.TestCase.settings = settings(max_examples=400, stateful_step_count=30, deadline=None)
TestCluster = Cluster.TestCase


def test_a_pid_that_another_router_has_by_now_is_no_sign_of_life(server):
    """As after a container was restarted: the same pids, and no process of before."""
    for name, router in list(server.routers.items()):
        server.kill(name)
        successor = Router(
            router.id._replace(started_at_ms=router.id.started_at_ms + 1000),
            b"new " + router.peer,
            {QUEUE: 0.0},
        )
        server.join(successor)
    server.settle(KEPT_SECONDS + 1)

    assert server.spent() == pytest.approx(LIMIT)


def test_shares_follow_demand_at_once(server):
    demand(server, router_1=1000, router_2=0)
    assert server.share("router-1") == pytest.approx(LIMIT * 0.995)

    demand(server, router_1=1000, router_2=1000)
    assert server.share("router-1") == pytest.approx(LIMIT / 2)
    assert server.share("router-2") == pytest.approx(LIMIT / 2)


def test_while_everybody_has_enough_nothing_is_sent(server):
    demand(server, router_1=2, router_2=3)
    before = [router.followed for router in server.routers.values()]

    demand(server, router_1=3, router_2=2.5)

    assert [router.followed for router in server.routers.values()] == before


def test_a_raise_waits_until_the_cut_that_pays_for_it_is_confirmed(server):
    one, two = server.routers.values()
    for wanted in (1000, 5, 1000):
        one.demand = wanted
        one.report()
        server.deliver_report(one)
    assert not one.grants
    assert two.grants

    server.exchange()

    assert one.shares[QUEUE] == pytest.approx(LIMIT * 0.995)


def test_what_a_router_said_before_it_heard_of_a_cut_confirms_nothing(server):
    one, two = server.routers.values()
    one.demand = 1000
    one.report()
    server.deliver_report(one)
    assert two.grants  # the cut
    two.demand = 5
    two.report()
    server.deliver_report(two)

    while one.grants:
        one.hear()

    assert server.spent() <= LIMIT * (1 + 1e-9)


def test_tokens_that_a_cut_leaves_over_go_to_who_wants_more(server):
    one, two = server.routers.values()
    demand(server, router_1=1000)
    one.demand, two.demand = 0, 1000
    one.report()
    two.report()
    for router in (one, two):
        server.deliver_report(router)
    grant = one.grants.popleft()
    one.followed, one.shares = grant.number, dict(grant.shares)

    one.reports.append(RateReport(one.id, one.followed, one.shares, {}, {QUEUE: 7.0}))
    server.deliver_report(one)

    assert two.grants.pop().credits == {QUEUE: pytest.approx(7.0)}


def test_one_that_is_cut_off_keeps_its_share_for_ever(server):
    demand(server, router_1=1000, router_2=1000)
    server.routers["router-1"].cut_off = True
    server.settle(3600)

    assert server.share("router-1") == pytest.approx(LIMIT / 2)
    assert server.share("router-2") == pytest.approx(LIMIT / 2)

    server.routers["router-1"].cut_off = False
    demand(server, router_1=0)
    assert server.share("router-2") == pytest.approx(LIMIT * 0.995)


def test_a_limit_that_is_lowered_counts_what_one_that_is_cut_off_still_spends(server):
    demand(server, router_1=1000, router_2=1000)
    server.routers["router-1"].cut_off = True
    server.settle(SILENT_SECONDS + 1)

    server.allocator.set_limits({QUEUE: LIMIT / 2})
    server.act()
    server.exchange()

    assert server.spent() == pytest.approx(LIMIT / 2)


def test_one_that_was_silent_while_a_limit_was_lowered_is_cut_once_it_is_heard(server):
    demand(server, router_1=1000, router_2=1000)
    server.clock.advance(SILENT_SECONDS + 1)
    server.allocator.set_limits({QUEUE: LIMIT / 2})
    server.act()

    server.settle()

    assert server.spent() == pytest.approx(LIMIT / 2)


@pytest.mark.parametrize(("running", "share"), [((), 6.0), ((1,), 0.0)])
def test_one_that_starts_takes_over_what_a_dead_one_of_its_name_held(running, share):
    held = [
        Holding(RouterId("router-1", 1, 0), 7, {QUEUE: 6.0}),
        Holding(RouterId("router-2", 2, 0), 8, {QUEUE: 4.0}),
    ]

    assert shares_at_start("router-1", [QUEUE], held, running.__contains__) == {QUEUE: share}


def test_a_dead_ones_share_is_kept_for_its_successor_but_not_for_ever(server):
    demand(server, router_1=1000, router_2=1000)
    server.kill("router-1")
    server.settle()
    assert server.share("router-2") == pytest.approx(LIMIT / 2)

    server.settle(KEPT_SECONDS)
    assert server.share("router-2") == pytest.approx(LIMIT)


def test_a_successor_starts_with_the_share_that_was_kept_also_without_a_coordinator(server):
    demand(server, router_1=1000, router_2=1000)
    server.kill_coordinator()
    server.kill("router-1")

    server.start("router-1")
    assert server.share("router-1") == pytest.approx(LIMIT / 2)

    server.start_coordinator()
    server.exchange()
    assert server.spent() == pytest.approx(LIMIT)


def test_a_new_coordinator_raises_nothing_before_all_have_reported(server):
    demand(server, router_1=1000, router_2=1000)
    server.kill_coordinator()
    server.note = ()  # run/ was cleared
    server.routers["router-2"].cut_off = True
    server.start_coordinator()
    server.exchange()
    assert server.share("router-1") == pytest.approx(LIMIT / 2)

    server.settle(SETTLE_SECONDS)
    assert server.share("router-1") == pytest.approx(LIMIT)


@pytest.mark.parametrize("limit", [0.0, 0.5, 3.0, 40.0])
def test_another_limit_acts_once_it_is_heard(server, limit):
    demand(server, router_1=1000, router_2=4)
    server.allocator.set_limits({QUEUE: limit})
    server.act()
    server.exchange()

    assert server.spent() == pytest.approx(limit)


def test_a_limit_that_is_removed_is_gone_everywhere(server):
    server.allocator.set_limits({})
    server.act()
    server.exchange()

    assert [router.shares for router in server.routers.values()] == [{}, {}]


def test_what_is_noted_follows_cuts_too(server):
    server.allocator.set_limits({QUEUE: 3.0})
    server.act()
    server.exchange()

    assert sum(holding.shares[QUEUE] for holding in server.note) == pytest.approx(3)


def test_what_a_dead_one_confirmed_is_not_given_away_while_a_successor_may_hold_more(server):
    one, two = server.routers.values()
    one.demand = 1000
    one.report()
    server.deliver_report(one)
    two.hear()
    server.kill("router-2")
    server.start("router-2")  # it holds what was noted, before the cut

    while two.reports:
        server.deliver_report(two)
    while one.grants:
        one.hear()

    assert server.spent() <= LIMIT * (1 + 1e-9)


def test_a_grant_of_the_coordinator_before_may_still_be_on_its_way(server):
    one, two = server.routers.values()
    one.demand = 1000
    one.report()
    server.deliver_report(one)
    two.hear()
    server.deliver_report(two)
    assert one.grants  # the raise
    server.kill_coordinator()
    server.start_coordinator()
    two.demand = 1000
    two.report()
    for router in (one, two):
        server.deliver_report(router)
    server.deliver_report(two)
    while two.grants:
        two.hear()

    one.hear()

    assert server.spent() <= LIMIT * (1 + 1e-9)
