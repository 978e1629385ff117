"""Rates over several servers: the limit holds whatever is lost, cut, killed or expelled."""

from __future__ import annotations

import random
from collections.abc import Mapping

import pytest

from pinlaterd.clock import Clock
from pinlaterd.coordinator.allocator import RateAllocator
from pinlaterd.coordinator.rates import RateControl
from pinlaterd.coordinator.server_rates import Leading, ServerRates
from pinlaterd.router.rate_limits import RateLimits
from pinlaterd.wire.control import RateGrant
from tests.coordinator.rates_world import LIMIT, QUEUE, Note, Router, World

SEEDS = 60
STEPS = 150
# A variant that takes more seeds than this to be caught is as good as not caught.
SEED_BUDGET = 250

WEIGHTS = {
    "session_ends": 2,
    "cut_off_from_zookeeper": 1,
    "cut_from_another": 1,
    "reconnect": 2,
    "kill_coordinator": 1,
    "start_coordinator": 3,
    "kill_router": 1,
    "start_routers": 3,
    "off": 1,
    "want": 6,
    "look": 6,
    "shards_hear": 4,
    "router_hears": 4,
    "coordinator_hears": 8,
    "lose": 1,
    "lose_grants": 2,
    "overtake": 2,
    "assign": 3,
    "take": 4,
    "deliver": 8,
    "calm": 3,
    "time_passes": 6,
}


class Step:
    """One thing that happens to a server of `world`."""

    def __init__(self, world: World, rng: random.Random) -> None:
        self.world, self.rng = world, rng
        self.host = world.hosts[rng.choice("abc")]
        getattr(self, rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0])()

    def session_ends(self) -> None:
        """Of one that is off, hangs, or is cut from ZooKeeper."""
        self.world.zookeeper.pop(self.host.node, None)

    def cut_off_from_zookeeper(self) -> None:
        self.world.cut_off.add(self.host.name)

    def cut_from_another(self) -> None:
        ends = self.host.name, self.rng.choice("abc")
        self.world.cuts |= {ends, ends[::-1]}

    def reconnect(self) -> None:
        self.world.cut_off.discard(self.host.name)
        self.world.cuts = {cut for cut in self.world.cuts if self.host.name not in cut}

    def kill_coordinator(self) -> None:
        self.host.coordinator = None

    def start_coordinator(self) -> None:
        if self.host.coordinator is None:
            self.host.start_coordinator()

    def kill_router(self) -> None:
        self.host.routers.pop(self.rng.choice(self.host.names), None)

    def start_routers(self) -> None:
        for name in self.host.names:
            if name not in self.host.routers:
                self.host.start_router(name)

    def off(self) -> None:
        self.host.off()

    def want(self) -> None:
        self.world.demand(self.host.name, self.rng.choice([0, 1, 5, 100]))

    def look(self) -> None:
        if self.host.coordinator is not None:
            self.host.coordinator.look()

    def shards_hear(self) -> None:
        if self.host.shards.inbox:
            self.host.shards.snapshot = self.host.shards.inbox.popleft()

    def router_hears(self) -> None:
        router = self.host.routers.get(self.rng.choice(self.host.names))
        if router is not None and router.inbox:
            router.hear()

    def coordinator_hears(self) -> None:
        coordinator = self.host.coordinator
        if coordinator is not None and coordinator.up:
            coordinator.server_rates.heard_report(*coordinator.up.popleft())
            coordinator.act()
        if coordinator is not None and coordinator.down:
            coordinator.server_rates.heard_grant(*coordinator.down.popleft())
            coordinator.act()

    def lose(self) -> None:
        if self.host.coordinator is not None:
            self.host.coordinator.up.clear()
            self.host.coordinator.down.clear()

    def lose_grants(self) -> None:
        """Of a router that reads too late."""
        router = self.host.routers.get(self.rng.choice(self.host.names))
        if router is not None:
            kept = [message for message in router.inbox if not isinstance(message, RateGrant)]
            router.inbox.clear()
            router.inbox.extend(kept)

    def overtake(self) -> None:
        """What a connection brought before it broke may be read after what the next one brings."""
        if self.host.coordinator is not None:
            self.host.coordinator.up.rotate(1)
            self.host.coordinator.down.rotate(1)

    def assign(self) -> None:
        self.world.assign(self.rng)

    def take(self) -> None:
        self.world.take(self.rng.choice(list(self.world.assignment)))

    def deliver(self) -> None:
        self.world.deliver(self.host)

    def calm(self) -> None:
        self.world.calm(self.rng, 1)

    def time_passes(self) -> None:
        """A new router reports within that time: see the allocator's invariant."""
        self.world.clock.advance(self.rng.choice([0.1, 1.1, 4.0]))
        self.world.heartbeats()
        for host in self.world.hosts.values():
            if host.coordinator is not None:
                self.world.report(host)


@pytest.fixture(autouse=True)
def notes(monkeypatch):
    monkeypatch.setattr("pinlaterd.coordinator.rates.HOLDINGS", Note)


def walks(seeds: int) -> None:
    for seed in range(seeds):
        walk(seed)


def walk(seed: int) -> None:
    """Anything may happen at any time, but that the limit is lowered."""
    rng = random.Random(seed)
    world = World(pinned=bool(seed % 2))
    world.heal(rng, 8)
    assert world.spent() == pytest.approx(LIMIT)
    for _ in range(STEPS):
        Step(world, rng)
        world.check()
    world.heal(rng)
    assert world.spent() >= LIMIT * 0.99, seed


def test_what_routers_may_spend_never_exceeds_the_limit_and_is_all_of_it_in_the_end():
    walks(SEEDS)


def freed_at_expiry(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Leading, "_may_spend", lambda self, number: number in self._live)


def owners_not_awaited(patch: pytest.MonkeyPatch) -> None:
    """What shards of servers that are gone still serve is not considered."""
    honest = Leading._may_spend

    def may_spend(self: Leading, number: int) -> bool:
        self._view = self._view._replace(served=True)
        return honest(self, number)

    patch.setattr(Leading, "_may_spend", may_spend)


def unheard_not_counted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RateAllocator, "_unknown", lambda _self, _queue: 0.0)


def share_kept_for_the_next_node(patch: pytest.MonkeyPatch) -> None:
    honest = RateControl.follow

    def follow(self: RateControl, share: Mapping[str, float]) -> None:
        if share:
            honest(self, share)

    patch.setattr(RateControl, "follow", follow)
    patch.setattr(ServerRates, "_holds_nothing", lambda _self: True)


@pytest.mark.parametrize(
    "variant",
    [
        freed_at_expiry,
        owners_not_awaited,
        unheard_not_counted,
        share_kept_for_the_next_node,
    ],
)
def test_a_broken_variant_is_caught(variant, monkeypatch):
    variant(monkeypatch)

    with pytest.raises(AssertionError):
        walks(SEED_BUDGET)


@pytest.fixture
def rng():
    return random.Random(0)


@pytest.fixture
def world(rng) -> World:
    made = World()
    made.heal(rng, 8)
    return made


def test_shares_follow_demand(world, rng):
    world.demand("a", 1000)
    world.run(rng, 1)
    assert world.share("a") == pytest.approx(LIMIT * (1 - 0.002 * 2 / 3))

    world.demand("c", 1000)
    world.run(rng, 1)
    assert world.share("a") == pytest.approx(world.share("c"))
    assert world.share("c") == pytest.approx(LIMIT / 2, rel=0.01)


def test_a_cut_is_confirmed_by_a_server_as_its_routers_confirm_it(world, rng):
    world.demand("c", 1000)
    world.run(rng, 1)
    [stuck, other] = world.hosts["c"].routers.values()
    world.demand("c", 0)
    world.demand("a", 1000)
    for _ in range(20):
        world.clock.advance(0.1)
        for host in world.hosts.values():
            grants, inbox = stuck.inbox, stuck.inbox.__class__()
            stuck.inbox = inbox  # it does not read them now
            world.deliver(host)
            grants.extend(inbox)
            stuck.inbox = grants
        world.check()
    assert other.shares[QUEUE] < LIMIT / 100
    assert stuck.shares[QUEUE] == pytest.approx(LIMIT / 2, rel=0.01)
    assert world.share("a") == pytest.approx(LIMIT / 2, rel=0.01)

    world.run(rng, 1)
    assert world.share("a") == pytest.approx(LIMIT, rel=0.01)


@pytest.mark.parametrize("limit", [0.0, 0.5, 3.0, 40.0])
def test_another_limit_acts_at_once(world, rng, limit):
    world.demand("a", 1000)
    world.run(rng, 1)
    for host in world.hosts.values():
        host.coordinator.server_rates.configure({QUEUE: limit})
    world.calm(rng)
    world.clock.advance(0.1)
    world.calm(rng)

    assert world.spent() == pytest.approx(limit, rel=0.002)


def test_one_that_is_gone_keeps_its_share_until_every_owner_refuses_its_routers(world, rng):
    world.demand("a", 1000)
    world.demand("c", 1000)
    world.run(rng, 1)
    world.zookeeper.pop(world.hosts["c"].node)
    world.cut_off.add("c")
    world.hosts["a"].coordinator.look()
    for _ in range(3):
        world.deliver(world.hosts["a"])
        world.hosts["b"].coordinator.act()
    assert world.share("a") == pytest.approx(LIMIT / 2, rel=0.01)

    world.run(rng, 5)
    assert world.share("a") == pytest.approx(LIMIT, rel=0.01)
    assert world.share("c") == pytest.approx(LIMIT / 2, rel=0.01)  # which is of no use to it


def test_routers_show_another_node_only_once_they_hold_nothing(world, rng):
    world.demand("c", 1000)
    world.run(rng, 1)
    c = world.hosts["c"]
    before, [stuck, _] = c.node, c.routers.values()
    world.zookeeper.pop(before)
    for _ in range(10):
        c.coordinator.look()
        kept = [message for message in stuck.inbox if not isinstance(message, RateGrant)]
        stuck.inbox.clear()
        stuck.inbox.extend(kept)  # it missed the cut
        world.deliver(c)
    assert c.node != before
    world.clock.advance(11)
    assert "restart this server" in world.problems("c")[0]
    assert {router.snapshot.member for router in c.routers.values()} == {before}

    world.run(rng, 2)
    assert {router.snapshot.member for router in c.routers.values()} == {c.node}
    assert world.share("c") == pytest.approx(LIMIT, rel=0.01)


def test_one_that_shards_are_pinned_to_keeps_its_share_until_it_returns(rng):
    world = World(pinned=True)
    world.heal(rng, 8)
    world.demand("c", 1000)
    world.run(rng, 2)
    world.cut_off.add("c")
    world.zookeeper.pop(world.hosts["c"].node)
    world.demand("c", 0)
    world.demand("a", 1000)
    world.run(rng, 60)
    assert world.share("a") < LIMIT / 10
    assert "what c may be spending" in world.problems("a")[0]

    world.cut_off.clear()
    world.run(rng, 5)
    assert world.problems("a") == ()
    assert world.share("a") == pytest.approx(LIMIT, rel=0.01)


def test_once_all_servers_are_there_the_whole_rate_is_whatever_shards_are_not(world, rng):
    for host in world.hosts.values():
        host.off()
    world.zookeeper.clear()
    world.serving.clear()
    world.records["1"] = world.records["1"]._replace(epoch=99)  # so that nobody can open its store

    world.heal(rng, 10)

    assert "1" not in world.serving
    assert world.spent() == pytest.approx(LIMIT, rel=0.002)


def test_without_zookeeper_and_without_a_leader_shares_stay(world, rng):
    world.demand("b", 1000)
    world.run(rng, 1)
    world.cut_off |= set("abc")
    world.hosts["a"].coordinator = None
    before = {name: world.share(name) for name in "abc"}

    world.run(rng, 60)

    assert {name: world.share(name) for name in "abc"} == before


def test_a_coordinator_that_was_restarted_keeps_its_share(world, rng):
    world.demand("b", 1000)
    world.run(rng, 1)
    before = {name: world.share(name) for name in "abc"}
    world.cut_off |= set("abc")
    for host in world.hosts.values():
        host.start_coordinator()

    world.run(rng, 60)
    assert {name: world.share(name) for name in "abc"} == before


def test_a_new_leader_goes_on_from_what_the_others_hold(world, rng):
    world.demand("b", 1000)
    world.run(rng, 1)
    world.hosts["a"].off()
    world.zookeeper.pop(world.hosts["a"].node)

    world.run(rng, 5)

    assert world.share("b") + world.share("c") == pytest.approx(LIMIT, rel=0.002)
    assert world.share("b") == pytest.approx(LIMIT, rel=0.01)


def test_a_grant_of_a_term_that_has_ended_is_ignored(world, rng):
    """It was on its way as the leader's coordinator was restarted."""
    world.demand("b", 1000)
    a, b = world.hosts["a"], world.hosts["b"]
    while not any(grant.grant for _, grant in b.coordinator.down):
        for host in (b, a, world.hosts["c"]):
            world.clock.advance(0.1)
            world.deliver(host) if host is not b else world.report(host)
    late = b.coordinator.down.copy()
    b.coordinator.down.clear()
    a.start_coordinator()
    world.demand("b", 0)
    world.demand("c", 1000)
    world.run(rng, 2)

    b.coordinator.down.extend(late)
    world.calm(rng)

    world.check()
    assert world.share("c") == pytest.approx(LIMIT, rel=0.01)


def test_tokens_that_a_server_does_not_need_go_to_one_that_does(world, rng):
    world.demand("b", 1000)
    world.run(rng, 2)
    [router, _] = world.hosts["a"].routers.values()
    credited = []

    def on_grant(grant: RateGrant) -> Mapping[str, float]:
        credited.append(grant.credits.get(QUEUE, 0.0))
        return {}

    for other in world.hosts["b"].routers.values():
        other.on_grant = on_grant

    router.report({QUEUE: 3.0})
    world.calm(rng)

    assert sum(credited) == pytest.approx(3.0)


TICK_SECONDS = 0.01  # each message takes as long
TICKS_A_REPORT = 20
WANTED = 50  # by a dequeue


class Spender:
    """What a router does with its share."""

    def __init__(self, router: Router, clock: Clock) -> None:
        self.router = router
        self.limits = RateLimits(clock)
        self.limits.follow(router.shares, {})
        router.on_grant = lambda grant: self.limits.follow(grant.shares, grant.credits)

    def tick(self, *, busy: bool) -> int:
        """Jobs that it takes."""
        queue = self.limits.queues[QUEUE]
        taken = queue.take(WANTED) if busy else 0
        if taken:
            queue.settle(wanted=WANTED, taken=taken, used=taken)
        self.router.demand = queue.demand() + (WANTED if busy and not taken else 0)
        return taken

    def report(self) -> None:
        demand = self.router.demand
        self.router.report(self.limits.take_spilled({QUEUE: demand} if demand else {}))


@pytest.mark.parametrize("rate", [0.5, 10.0, 1000.0])
def test_demand_that_moves_every_5_seconds_gets_the_whole_rate(world, rng, rate):
    for host in world.hosts.values():
        host.coordinator.server_rates.configure({QUEUE: rate})
    world.limit = rate
    world.run(rng, 3)
    spenders = {
        name: [Spender(router, world.clock) for router in host.routers.values()]
        for name, host in world.hosts.items()
    }
    taken = 0
    for tick in range(70 * 100):
        world.clock.advance(TICK_SECONDS)
        busy = "abc"[tick // 500 % 3]
        for name, host in world.hosts.items():
            jobs = sum(spender.tick(busy=name == busy) for spender in spenders[name])
            taken += jobs if tick >= 1000 else 0
            if tick % TICKS_A_REPORT == ord(name) % TICKS_A_REPORT:
                for spender in spenders[name]:
                    spender.report()
            world.deliver(host)

    assert taken == pytest.approx(rate * 60, abs=max(2, 0.02 * rate * 60))
