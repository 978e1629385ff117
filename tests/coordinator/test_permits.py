"""Permits over shards: never more jobs in progress than the limit, and none waits for long.

The allocator and the shards' ends are the real ones. Messages wait until they are delivered, or
are lost.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence

import pytest

from pinlaterd.coordinator.permits import TURN_SECONDS, NotedPermits, PermitAllocator, proportional
from pinlaterd.model import JobState
from pinlaterd.shard.permits import Permits
from pinlaterd.wire.control import PermitGrant, PermitReport
from tests.clocks import FakeClock

QUEUE = "mail"


class Store:
    """What is in a shard's store."""

    def __init__(self) -> None:
        self.ready = self.used = 0


class Owner:
    """A process that owns a shard's store."""

    def __init__(self, world: World, shard: str) -> None:
        self.world, self.shard = world, shard
        self.pid = world.new_id()
        self.store = world.stores[shard]
        self.reports: deque[PermitReport] = deque()
        self.grants: deque[PermitGrant] = deque()
        self.permits = Permits(
            world.state, lambda _queue, _state: self.store.used, world.clock.monotonic
        )
        self.permits.follow([QUEUE])
        self.permits.begin()
        self.look()

    def look(self) -> None:
        """Count what is ready, and report what is due."""
        # Enqueues wait for room one by one.
        ready = self.store.ready if self.world.state is JobState.IN_PROGRESS else 1
        self.permits.look(QUEUE, waiting=min(ready, self.store.ready))
        held = self.permits.report()
        if held:
            self.reports.append(
                PermitReport(self.shard, self.pid, self.pid, self.world.state, held)
            )

    def claim(self) -> bool:
        if not self.store.ready or not self.permits.free(QUEUE):
            return False
        self.store.ready -= 1
        self.store.used += 1
        self.look()
        return True

    def ack(self) -> None:
        if self.store.used:
            self.store.used -= 1
            self.look()

    def hear(self) -> None:
        grant = self.grants.popleft()
        assert grant.incarnation == self.pid
        self.permits.grant(grant.queues)
        self.look()


class World:
    def __init__(
        self, limit: int, shards: Sequence[str] = "abc", state: JobState = JobState.IN_PROGRESS
    ) -> None:
        self.clock = FakeClock()
        self.state = state
        self.limit = self.allowed = limit
        self._ids = 0
        self.note: Sequence[NotedPermits] = ()
        self.stores = {shard: Store() for shard in shards}
        self.owners: dict[str, Owner] = {}
        self.coordinator: PermitAllocator | None = None
        self.start_coordinator()
        for shard in shards:
            self.start(shard)
        self.calm()

    def new_id(self) -> int:
        self._ids += 1
        return self._ids

    def running(self) -> int:
        return sum(store.used for store in self.stores.values())

    def is_running(self, pid: int) -> bool:
        return any(owner.pid == pid for owner in self.owners.values())

    def set_limit(self, limit: int) -> None:
        self.limit = limit
        self.allowed = max(self.allowed, limit)
        if self.coordinator is not None:
            self.coordinator.configure({QUEUE: limit}, [*self.stores])

    def start(self, shard: str) -> None:
        self.owners[shard] = Owner(self, shard)

    def start_coordinator(self) -> None:
        number = self.clock.now_ms()
        self.coordinator = PermitAllocator(
            self.clock, self.is_running, self.note, number, self.state
        )
        self.coordinator.configure({QUEUE: self.limit}, [*self.stores])
        for owner in self.owners.values():
            owner.reports.clear()
            owner.permits.report_all()
            owner.look()

    def act(self) -> None:
        if self.coordinator is None:
            return
        grants = self.coordinator.due_grants()
        if self.coordinator.note_due:
            self.note = self.coordinator.holdings()
        for peer, grant in grants:
            for owner in self.owners.values():
                if owner.pid == int(peer):
                    owner.grants.append(grant)

    def deliver(self, owner: Owner) -> bool:
        """Deliver one message, if there is any on its way."""
        if self.coordinator is not None and owner.reports:
            self.coordinator.heard(b"%d" % owner.pid, owner.reports.popleft())
            self.act()
        elif owner.grants:
            owner.hear()
        else:
            return False
        return True

    def calm(self) -> None:
        """Deliver all that is on its way."""
        while sum(self.deliver(owner) for owner in self.owners.values()):
            pass

    def may_run(self) -> int:
        """Count the jobs that may be in progress until the coordinator hears of anything."""
        most = {shard: store.used for shard, store in self.stores.items()}
        for shard, owner in self.owners.items():
            granted = [grant.queues[QUEUE].permits for grant in owner.grants]
            most[shard] = max(most[shard], owner.permits.held(QUEUE), *granted)
        return sum(most.values())

    def check(self) -> None:
        """Check that no more may run than the limit allows, but what did when it was lowered."""
        found = self.may_run()
        assert found <= self.allowed
        self.allowed = max(self.limit, found)

    def wait(self, seconds: float, *, ack: Callable[[], bool] = lambda: False) -> None:
        """Let time pass, in which all is heard and jobs are claimed; `ack`: whether one ends."""
        for _ in range(round(seconds / 0.01)):
            self.clock.advance(0.01)
            if self.coordinator is not None:
                for owner in self.owners.values():
                    self.coordinator.heartbeat(b"%d" % owner.pid)
            for owner in self.owners.values():
                owner.look()
                while owner.claim():
                    self.check()
                if ack():
                    owner.ack()
            self.calm()
            self.act()
            self.check()


def test_idle_shards_have_the_permits_evenly():
    world = World(8)

    assert [owner.permits.free(QUEUE) for owner in world.owners.values()] == [3, 3, 2]


def test_permits_go_where_jobs_are():
    world = World(8)
    world.stores["b"].ready = 100

    world.wait(0.1)

    assert world.stores["b"].used == 8


def test_permits_are_divided_in_proportion_to_what_is_ready():
    world = World(100)
    for shard, jobs in {"a": 700, "b": 200, "c": 100}.items():
        world.stores[shard].ready = jobs

    world.wait(1, ack=lambda: True)

    used = {shard: store.used for shard, store in world.stores.items()}
    assert 60 <= used["a"] <= 85
    assert 10 <= used["b"] <= 30
    assert sum(used.values()) >= 95


def test_a_single_permit_goes_round():
    world = World(1)
    for store in world.stores.values():
        store.ready = 1000
    before = 1000 * len(world.stores)

    world.wait(6 * TURN_SECONDS, ack=lambda: True)

    done = [1000 - store.ready for store in world.stores.values()]
    assert all(done)
    assert sum(done) >= 0.6 * before - before + 0.6 * 6 * TURN_SECONDS / 0.01


def test_a_permit_moves_within_100_ms_of_the_demand():
    world = World(1)
    world.stores["a"].ready = 10_000
    world.wait(1, ack=lambda: True)

    world.stores["b"].ready = 1
    world.wait(0.1, ack=lambda: True)

    assert world.stores["b"].ready == 0


def test_a_dead_shard_keeps_its_jobs_and_permits_and_gets_no_more():
    world = World(3)
    world.stores["a"].ready = 1
    world.wait(0.1)
    del world.owners["a"]
    world.stores["b"].ready = 10
    world.wait(0.5)

    assert world.stores["a"].used == 1
    running = world.running()
    world.start("a")
    world.wait(0.5)
    assert (running, world.running()) in {(2, 3), (3, 3)}


def test_nothing_is_granted_before_all_shards_are_known():
    world = World(3)
    world.stores["a"].ready = world.stores["b"].ready = 3
    world.wait(0.2)
    del world.owners["a"]
    world.note = ()  # the file is gone
    world.start_coordinator()
    for _ in range(3):
        world.owners["b"].ack()
    world.wait(0.5)
    assert world.running() == world.stores["a"].used + world.stores["b"].used <= 3
    assert world.coordinator is not None
    assert world.coordinator.unknown() == ["a"]

    world.start("a")
    world.wait(0.5)
    assert world.coordinator.unknown() == []
    assert world.running() == 3


def test_a_coordinator_that_begins_goes_on_with_what_is_noted():
    """Also while a shard is down, whose jobs count."""
    world = World(4)
    world.stores["a"].ready = world.stores["b"].ready = 10
    world.wait(0.2)
    del world.owners["a"]
    world.start_coordinator()
    world.wait(0.5, ack=lambda: True)

    assert world.stores["b"].ready == 0
    assert world.running() == world.stores["a"].used


def test_lowered_below_what_runs_nothing_new_begins():
    world = World(9)
    for store in world.stores.values():
        store.ready = 10
    world.wait(0.2)
    assert world.running() == 9

    world.set_limit(2)
    world.wait(0.2)
    for owner in world.owners.values():
        owner.ack()
    world.wait(0.2)
    assert world.running() == 6
    world.wait(0.5, ack=lambda: True)
    assert all(store.ready == 0 for store in world.stores.values())


def something_befalls_the_service(world: World, rng: random.Random) -> None:
    match rng.randrange(6):
        case 0:
            world.stores[rng.choice("abc")].ready += rng.choice([1, 1, 30])
        case 1:
            for shard in world.stores.keys() - world.owners.keys():
                world.start(shard)
        case 2 if rng.random() < 0.2:
            world.coordinator = None
        case 3 if world.coordinator is None:
            world.start_coordinator()
        case 4 if rng.random() < 0.2:
            world.set_limit(rng.choice([0, 1, 2, 5, 40]))
        case 5:
            world.clock.advance(rng.choice([0.001, 0.02, 0.06, 1.1, 4]))
            world.act()


def something_befalls(owner: Owner, world: World, rng: random.Random) -> None:
    match rng.randrange(10):
        case 0 if rng.random() < 0.3:
            del world.owners[owner.shard]
        case 1 if rng.random() < 0.3:
            (owner.grants or owner.reports or [None]).pop()
        case 2 | 3:
            owner.ack()
        case 4 | 5:
            owner.look()
            owner.claim()
        case _:
            world.deliver(owner)


@pytest.mark.parametrize("seed", range(100))
def test_whatever_is_lost_or_killed_no_more_run_than_the_limit(seed):
    rng = random.Random(seed)
    state = rng.choice([JobState.IN_PROGRESS, JobState.PENDING])
    world = World(rng.choice([1, 2, 3, 7, 40]), state=state)
    for _ in range(400):
        if world.owners and rng.random() < 0.6:
            something_befalls(rng.choice([*world.owners.values()]), world, rng)
        else:
            something_befalls_the_service(world, rng)
        world.check()
    if world.coordinator is None or world.note == ():
        world.start_coordinator()
    for shard in world.stores.keys() - world.owners.keys():
        world.start(shard)
    world.set_limit(max(1, world.limit))
    jobs = sum(store.ready + store.used for store in world.stores.values())
    world.wait(3 + jobs * 0.02, ack=lambda: True)
    assert sum(store.ready + store.used for store in world.stores.values()) == 0


def test_a_permit_reaches_all_while_two_shards_have_a_job_at_a_time():
    world = World(1)
    world.stores["c"].ready = 1
    for _ in range(30):
        for shard in "ab":
            world.stores[shard].ready = 1
        world.wait(0.01, ack=lambda: True)

    assert world.stores["c"].ready == 0


def test_room_is_spread_evenly_and_goes_where_an_enqueue_waits():
    world = World(90, state=JobState.PENDING)
    for _ in range(40):
        world.stores["a"].ready += 1
        world.wait(0.01)
    world.stores["b"].ready = 50
    world.wait(0.1)

    assert [store.used for store in world.stores.values()] == [40, 50, 0]
    world.stores["c"].ready = 1
    world.wait(0.1)
    assert all(owner.permits.is_contested(QUEUE) for owner in world.owners.values())


def test_proportional_parts_add_up():
    assert proportional(10, {"a": 1, "b": 1, "c": 1}) == {"a": 4, "b": 3, "c": 3}
    assert proportional(3, {"a": 900, "b": 1}) == {"a": 3, "b": 0}
    assert proportional(3, {"a": 0}) == {}
