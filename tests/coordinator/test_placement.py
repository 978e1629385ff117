"""The leader's decisions: rule by rule, and what holds whatever happens to servers."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pinlaterd.coordinator.placement import (
    Assigned,
    Assignment,
    Member,
    Placement,
    ShardState,
)

TICK_SECONDS = 0.25


class Cluster:
    """Servers that do at once what is assigned to them, as far as they can."""

    def __init__(self, servers: str, shards: int, **pins: str) -> None:
        self.shards = {str(n): "" for n in range(1, shards + 1)} | pins
        self.up = dict.fromkeys(servers, 0)  # with the number of its session
        self.weights: dict[str, float] = {}
        self.failing: set[tuple[str, str]] = set()  # server and shard, or "*"
        self.unreached: dict[str, list[str]] = {}
        self.superseded: dict[str, int] = {}  # by what epoch, by shard
        self.opening_seconds = 0.0  # from an assignment until the shard serves
        self.maintenance: set[str] = set()
        self.leaving: set[str] = set()
        self.now = 1000.0
        self.assignment = Assignment()
        self.placement = Placement()
        self.history: list[tuple[float, str, Assigned]] = []

    def run(self, seconds: float = 0.0) -> list[tuple[float, str, Assigned]]:
        """The changes, with how long it took to each."""
        began, known = self.now, len(self.history)
        while True:
            self._decide()
            if self.now >= began + seconds:
                break
            self.now += TICK_SECONDS if seconds < 100 else 1.0
        return [(at - began, name, entry) for at, name, entry in self.history[known:]]

    def owners(self) -> dict[str, str]:
        return {name: entry.server for name, entry in sorted(self.assignment.shards.items())}

    def loads(self) -> dict[str, int]:
        owners = list(self.owners().values())
        return {server: owners.count(server) for server in self.up}

    def lose(self, server: str) -> None:
        del self.up[server]

    def _decide(self) -> None:
        members = {f"m-{session}-{s}": self._member(s) for s, session in self.up.items()}
        before = self.assignment.shards
        self.assignment = self.placement.decide(
            self.now, int(self.now * 1000), self.shards, members, self.maintenance, self.assignment
        )
        entries = self.assignment.shards
        slots = [entry.slot for entry in entries.values()]
        assert len(set(slots)) == len(slots)
        for name, entry in entries.items():
            if name in before:
                old = before[name]
                moved = entry.server != old.server
                assert entry.epoch > old.epoch or (entry.epoch == old.epoch and not moved)
                assert entry.slot == old.slot
            if entry != before.get(name):
                assert entry.server in self.up
                assert entry.endpoint == f"tcp://host-{entry.server}:{9100 + entry.slot}"
                assert self.shards[name] in {"", entry.server} or entry.server == old.server
                self.history.append((self.now, name, entry))

    def _opens(self, name: str) -> bool:
        entry = self.assignment.shards[name]
        since = max((at for at, of, one in self.history if (of, one) == (name, entry)), default=0)
        return self.now - since < self.opening_seconds

    def _member(self, server: str) -> Member:
        states = {}
        for name, entry in self.assignment.shards.items():
            fails = self.failing & {(server, name), (server, "*")} or self._opens(name)
            if entry.server == server and name in self.superseded:
                states[name] = ShardState("superseded", self.superseded[name])
            elif entry.server == server:
                states[name] = ShardState("serving", entry.epoch - bool(fails))
            elif entry.next == server:
                states[name] = ShardState("starting" if fails else "standby")
        host, weight = f"host-{server}", self.weights.get(server, 1.0)
        return Member(
            server,
            host,
            f"{host}:9012",
            9100,
            f"{host}:9010",
            "1",
            weight=weight,
            shards=states,
            unreached=self.unreached.get(server, []),
            leaving=server in self.leaving,
        )


def test_new_shards_go_to_the_least_loaded_at_once():
    cluster = Cluster("ABC", 8)
    cluster.weights["A"] = 2.0

    cluster.run()

    assert cluster.loads() == {"A": 4, "B": 2, "C": 2}


@pytest.mark.parametrize("opening_seconds", [0.0, 1.0, 5.0])
@pytest.mark.parametrize("apart_seconds", [0.5, 3.0, 20.0])
def test_a_cluster_that_starts_spreads_its_shards_at_once(apart_seconds, opening_seconds):
    """Whether its servers come together, or one after another."""
    cluster = Cluster("A", 6)
    cluster.opening_seconds = opening_seconds
    for server in "BC":
        cluster.run(apart_seconds)
        cluster.up[server] = 0
    cluster.run(3.0 + 2 * opening_seconds)

    assert cluster.loads() == {"A": 2, "B": 2, "C": 2}
    assert cluster.run(600) == []


def test_servers_that_join_a_cluster_that_serves_wait():
    """Also where the leader is new, and whenever all have joined once for half a minute."""
    cluster = Cluster("A", 6)
    cluster.run(31)
    cluster.up["B"] = 0
    assert cluster.run(29) == []
    cluster.placement = Placement()
    assert cluster.run(29) == []
    assert cluster.run(10)


def test_a_server_that_is_lost_as_the_cluster_starts_comes_back_as_to_any():
    cluster = Cluster("AB", 4)
    cluster.run(5)
    cluster.lose("B")
    cluster.run(5)
    cluster.up["B"] = 1

    assert cluster.run(29) == []


def test_a_lost_servers_shards_go_elsewhere_at_once_and_all_others_stay():
    cluster = Cluster("ABC", 6)
    cluster.run(60)
    before = cluster.owners()

    cluster.lose("B")
    changes = cluster.run()

    moved = {name for name, server in before.items() if server == "B"}
    assert {name for _, name, _ in changes} == moved
    assert not any(entry.planned for _, _, entry in changes)
    assert cluster.loads() == {"A": 3, "C": 3}


def test_of_two_servers_the_other_takes_over_at_once():
    cluster = Cluster("AB", 4)
    cluster.run(60)

    cluster.lose("A")
    cluster.run()

    assert cluster.loads() == {"B": 4}


def test_a_lost_servers_shard_goes_to_the_one_that_prepared_for_it():
    cluster = Cluster("ABC", 1)
    cluster.run(60)
    owner = cluster.owners()["1"]
    cluster.maintenance = {owner}
    cluster.failing = {(server, "*") for server in "ABC"}
    cluster.run()
    prepared = cluster.assignment.shards["1"].next

    cluster.lose(owner)
    cluster.run()

    assert cluster.owners() == {"1": prepared}


def test_a_pinned_shard_waits_for_its_server():
    cluster = Cluster("AB", 0, s1="A", s2="C")
    cluster.run()
    assert cluster.owners() == {"s1": "A"}

    cluster.lose("A")
    assert cluster.run(60) == []
    cluster.up |= {"A": 1, "C": 1}
    cluster.run()

    assert cluster.owners() == {"s1": "A", "s2": "C"}


def test_a_pin_moves_a_shard_in_order():
    cluster = Cluster("AB", 1)
    cluster.run()
    (owner,) = cluster.owners().values()
    (other,) = cluster.up.keys() - {owner}

    cluster.shards["1"] = other
    cluster.run(1)

    assert cluster.owners() == {"1": other}
    assert cluster.assignment.shards["1"].planned


def test_half_of_the_servers_are_awaited_if_they_vanish_together():
    cluster = Cluster("ABCD", 8)
    cluster.run(60)

    cluster.lose("A")
    cluster.lose("B")
    changes = cluster.run(20)

    assert len(changes) == 4
    assert {at for at, _, _ in changes} == {10.0}


@pytest.mark.parametrize("leader", ["stays", "is new"])
def test_servers_that_come_back_with_new_sessions_find_all_as_it_was(leader):
    cluster = Cluster("ABCD", 8)
    cluster.run(60)

    for server in "ABC":
        cluster.lose(server)
    if leader == "is new":
        cluster.placement = Placement()
    assert cluster.run(9) == []
    cluster.up |= dict.fromkeys("ABC", 1)

    assert cluster.run(600) == []


def test_a_server_with_a_new_session_that_nobody_missed_keeps_its_shards():
    cluster = Cluster("ABC", 6)
    cluster.run(60)

    cluster.lose("A")
    cluster.up["A"] = 1

    assert cluster.run(600) == []


def test_a_shard_that_fails_tries_one_server_after_the_other_ever_more_slowly():
    cluster = Cluster("ABC", 1)
    cluster.run(60)
    cluster.failing = {(server, "*") for server in "ABC"}

    changes = cluster.run(180)

    times = [0.0, *(at for at, _, _ in changes)]
    assert [later - at for at, later in pairwise(times)] == pytest.approx(
        [3, 10, 20, 40, 60], abs=1
    )
    owners = [entry.server for _, _, entry in changes]
    assert set(owners[:3]) == set("ABC")
    assert all(one != other for one, other in pairwise(owners))

    cluster.failing.clear()
    cluster.run(700)  # until that is forgotten
    cluster.failing = {(server, "*") for server in "ABC"}
    assert cluster.run(10)[0][0] == 3


def test_of_servers_that_failed_as_often_the_one_that_failed_last_comes_last():
    cluster = Cluster("ABC", 0, moves="")
    cluster.run(60)
    owners = [cluster.owners()["moves"]]
    for _ in range(2):
        cluster.failing = {(owners[-1], "*")}
        cluster.run(10)
        owners.append(cluster.owners()["moves"])

    cluster.shards["pinned"] = owners[0]  # it has more to do than the one that failed last
    cluster.failing = {(owners[-1], "moves")}
    cluster.run(10)

    assert set(owners) == set("ABC")
    assert cluster.owners()["moves"] == owners[0]


def test_an_owner_that_its_store_does_not_know_gets_a_greater_epoch():
    cluster = Cluster("A", 0, s1="A")
    cluster.run()
    (entry,) = cluster.assignment.shards.values()

    cluster.superseded["s1"] = entry.epoch - 1  # said before the last change
    assert cluster.run(10) == []
    cluster.superseded["s1"] = entry.epoch + 5000
    ((_, _, again),) = cluster.run(10)

    assert again.server == "A"
    assert again.epoch > entry.epoch + 5000


@pytest.mark.parametrize("how", ["maintenance", "leaving"])
def test_servers_in_maintenance_are_emptied_in_order(how):
    cluster = Cluster("AB", 16)
    cluster.run(60)

    getattr(cluster, how).add("A")
    changes = cluster.run(3)

    assert cluster.loads() == {"A": 0, "B": 16}
    assert all(entry.planned for _, _, entry in changes if not entry.next)
    preparing: Counter[float] = Counter()
    for at, _, entry in changes:
        preparing[at] += bool(entry.next)
    assert max(preparing.values()) == 4
    setattr(cluster, how, {"A", "B"})
    assert cluster.run(60) == []


def test_a_server_that_does_not_prepare_in_time_is_passed_over():
    cluster = Cluster("ABC", 1)
    cluster.run(60)
    owner = cluster.owners()["1"]
    cluster.maintenance = {owner}
    cluster.run()
    first = cluster.assignment.shards["1"].next
    cluster.failing = {(first, "*")}

    changes = cluster.run(30)

    (second,) = cluster.up.keys() - {owner, first}
    assert [(e.server, e.next) for _, _, e in changes] == [
        (owner, ""),
        (owner, second),
        (second, ""),
    ]
    assert [at for at, _, _ in changes] == pytest.approx([10, 20, 20], abs=1)


def test_a_planned_owner_has_longer_for_its_first_start_only():
    cluster = Cluster("AB", 1)
    cluster.run(60)
    (old,) = cluster.owners().values()
    (new,) = cluster.up.keys() - {old}
    cluster.maintenance = {old}
    cluster.run(TICK_SECONDS)
    cluster.maintenance.clear()
    assert cluster.owners() == {"1": new}

    cluster.failing = {(new, "*")}
    assert cluster.run(9) == []
    cluster.failing.clear()
    cluster.run(20)
    cluster.failing = {(new, "*")}

    assert cluster.run(6)[0][0] == 3


def test_a_shard_goes_where_strictly_more_members_reach_it():
    cluster = Cluster("ABC", 3)
    cluster.run(60)
    shard = {server: name for name, server in cluster.owners().items()}

    cluster.unreached = {"A": [shard["A"]]}  # who reaches it needs no network
    assert cluster.run(10) == []
    cluster.unreached = {"B": [shard["A"]]}
    moves = [(at, name, e.server) for at, name, e in cluster.run(6) if e.planned]
    cluster.unreached = {}

    assert moves == [(3.25, shard["A"], "C")]
    assert cluster.run(300) == []  # not at once the other way


@pytest.mark.parametrize("fault", ["unreached", "failing"])
def test_a_shard_that_serves_again_is_not_made_to_wait_for_what_failed_before(fault):
    cluster = Cluster("abc", 3)
    cluster.run(60.0)
    for _ in range(5):
        (name, owner) = next(iter(cluster.owners().items()))
        if fault == "failing":
            cluster.failing = {(owner, "*")}
        else:
            cluster.unreached = {s: [name] for s in cluster.up if s != owner}
        ((at, _, _), *_) = cluster.run(6.0)
        assert at < 3.0 + 2 * TICK_SECONDS
        assert cluster.owners()[name] != owner
        cluster.unreached.clear()
        cluster.failing.clear()
        cluster.run(2.0)


def test_of_two_servers_that_are_cut_apart_both_keep_their_shards():
    cluster = Cluster("AB", 4)
    cluster.run(60)
    cluster.unreached = {
        server: [name for name, owner in cluster.owners().items() if owner != server]
        for server in "AB"
    }

    assert cluster.run(600) == []


def test_loads_are_balanced_one_shard_at_a_time_once_joins_have_ended():
    cluster = Cluster("A", 6)
    cluster.run(60)
    cluster.up["B"] = 1
    cluster.run(20)
    cluster.up["C"] = 1

    changes = cluster.run(60)

    assert cluster.loads() == {"A": 2, "B": 2, "C": 2}
    assert len(changes) == 8  # each prepared, then moved
    assert changes[0][0] == 30
    assert all(entry.planned != bool(entry.next) for _, _, entry in changes)


def test_a_server_that_rested_gets_its_part_at_once():
    cluster = Cluster("A", 4)
    cluster.run(60)
    cluster.up["B"] = 1
    cluster.run(30)
    assert [entry.next for entry in cluster.assignment.shards.values()].count("B") == 1

    cluster.maintenance = {"B"}
    cluster.run(1)
    assert {entry.next for entry in cluster.assignment.shards.values()} == {""}
    cluster.maintenance.clear()
    cluster.run(2)

    assert cluster.loads() == {"A": 2, "B": 2}


def test_balancing_waits_until_what_it_moved_serves():
    cluster = Cluster("A", 6)
    cluster.run(60)
    cluster.up["B"] = 1
    cluster.run(30 + TICK_SECONDS)
    assert cluster.loads() == {"A": 5, "B": 1}

    cluster.failing = {("B", "*")}
    assert cluster.run(4) == []
    cluster.failing.clear()
    cluster.run(2)

    assert cluster.loads() == {"A": 3, "B": 3}


def test_a_removed_shard_leaves_and_its_slot_is_free():
    cluster = Cluster("A", 3)
    cluster.run()
    slot = cluster.assignment.shards["2"].slot

    del cluster.shards["2"]
    cluster.shards["new"] = ""
    cluster.run()

    assert list(cluster.owners()) == ["1", "3", "new"]
    assert cluster.assignment.shards["new"].slot == slot


def test_a_server_with_a_new_address_has_its_shards_there():
    cluster = Cluster("A", 0, s1="A")
    cluster.run()
    entry = cluster.assignment.shards["s1"]
    member = Member("A", "other", "other:9012", 9300, "other:9010", "1")

    moved = cluster.placement.decide(
        cluster.now, 0, cluster.shards, {"m-1": member}, set(), cluster.assignment
    )

    assert moved.shards["s1"].endpoint == f"tcp://other:{9300 + entry.slot}"
    assert moved.shards["s1"].epoch == entry.epoch


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(("lose", "join", "fail", "mend", "maintain", "cut", "leader", "shard")),
        st.sampled_from("ABCD"),
        st.sampled_from("12345"),
        st.sampled_from((0.0, 1.0, 6.0, 35.0)),
    ),
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(EVENTS, st.sampled_from(("ABCD", "AB", "A")))
def test_whatever_happened_once_it_is_over_all_serve_in_balance_and_nothing_moves(events, servers):
    cluster = Cluster(servers, 5, pinned="A")
    for number, (event, server, shard, seconds) in enumerate(events, start=1):
        if event == "lose" and len(cluster.up) > 1:
            cluster.up.pop(server, None)
        elif event == "join":
            cluster.up.setdefault(server, number)
        elif event == "fail":
            cluster.failing.add((server, shard))
        elif event == "mend":
            cluster.failing.clear()
        elif event == "maintain":
            cluster.maintenance ^= {server}
        elif event == "cut":
            cluster.unreached[server] = [shard]
        elif event == "leader":
            cluster.placement = Placement()
        elif cluster.shards.pop(shard, None) is None:
            cluster.shards[shard] = ""
        cluster.run(seconds)
    cluster.failing.clear()
    cluster.unreached.clear()
    cluster.maintenance.clear()
    cluster.run(10)
    assert all(
        owner in cluster.up for shard, owner in cluster.owners().items() if shard != "pinned"
    )
    assert cluster.owners().keys() | {"pinned"} == cluster.shards.keys() | {"pinned"}

    cluster.run(700)  # until tries are forgotten, and all is balanced

    free = cluster.loads()
    if "A" in cluster.up and "pinned" in cluster.owners():
        free["A"] = max(free["A"], min(free.values()))
    assert max(free.values()) - min(free.values()) <= 1
    assert cluster.run(120) == []
    cluster.placement = Placement()
    assert cluster.run(120) == []
