"""What a server of a cluster says of itself and the others: what is worth an alarm."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import pytest

from pinlaterd.config.layout import CLUSTER_KEY_FILE, ETC
from pinlaterd.config.schema import Config, ServerSettings, ShardSettings
from pinlaterd.coordinator.cluster import Cluster
from pinlaterd.coordinator.placement import Assigned, Assignment, Member, ShardState
from pinlaterd.coordinator.processes import ProcessView, status
from pinlaterd.coordinator.zookeeper import Node, View
from pinlaterd.stats import empty
from pinlaterd.status import About, Sample, Status, together
from pinlaterd.wire.control import ProcessState, Report
from pinlaterd.wire.curve import ClusterKey
from tests.clocks import FakeClock

NEVER = "127.0.0.1:1"
CONFIG = Config(shards={name: ShardSettings(name, "redis") for name in "12"})
WELL = {"cluster_zookeeper_away": 0, "cluster_servers_gone": 0, "cluster_shards_not_served": 0}
ABOUT = About(
    deployment="",
    uptime_seconds=1.0,
    snapshot_version=1,
    config_version=1,
    config_number=0,
    config_problems=[],
    refused_removals={},
    needs_restart=[],
    config_judged="",
    warnings=[],
)


@pytest.fixture(autouse=True)
def _in_a_deployment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ETC.mkdir()
    ClusterKey.generate(ETC / CLUSTER_KEY_FILE)


def cluster(*views: View, unreached: Sequence[str] = ()) -> tuple[Mapping[str, int], Status]:
    """The figures and the status of jobs-3, which has no shard, after these views."""

    async def seen() -> tuple[Mapping[str, int], Status]:
        settings = ServerSettings(cluster="c", server="jobs-3", zookeeper=NEVER)
        found = Cluster(settings, None, FakeClock(), lambda _: None)
        for view in views:
            found.follow(view)
        found.describe({}, unreached)
        about = status(found.here(CONFIG), [], ABOUT)
        return found.figures(CONFIG), found.add_to({**about, "problems": []}, CONFIG)

    return asyncio.run(seen())


def view(*servers: str, state: str = "serving", connected: bool = True) -> View:
    """jobs-1 owns shard 1, jobs-2 shard 2."""
    members = {
        f"m-{server}": Member(
            *(server, "h", "h:9012", 9100, "h:9010", "1"), shards={server[-1]: ShardState(state, 1)}
        )
        for server in (*servers, "jobs-3")
    }
    owners = {shard: Assigned(f"jobs-{shard}", 1, "tcp://h:9100", 0) for shard in "12"}
    return View(
        members={name: msgspec.json.encode(member) for name, member in members.items()},
        servers={f"jobs-{number}": Node(b"{}", 0) for number in "123"},
        nodes={"assignment": Node(msgspec.json.encode(Assignment(owners)), 1)},
        own="m-jobs-3",
        connected=connected,
    )


def test_all_is_well():
    figures, found = cluster(view("jobs-1", "jobs-2"))

    assert figures == WELL
    assert found["healthy"]
    assert found["warnings"] == []


def test_a_server_is_gone_and_its_shard_with_it():
    figures, found = cluster(view("jobs-1"))

    assert figures == WELL | {"cluster_servers_gone": 1, "cluster_shards_not_served": 1}
    assert found["healthy"]
    assert found["warnings"] == ["shard-2 is not served: server jobs-2, stopped"]


def test_shards_do_not_serve_yet():
    figures, _ = cluster(view("jobs-1", "jobs-2", state="standby"))

    assert figures == WELL | {"cluster_shards_not_served": 2}


def test_while_zookeeper_is_away_what_it_held_last_and_what_is_reached_count():
    before, now = view("jobs-1", "jobs-2"), view(connected=False)

    assert cluster(before, now)[0] == WELL | {"cluster_zookeeper_away": 1}
    figures, found = cluster(before, now, unreached=["2"])
    assert figures == WELL | {"cluster_zookeeper_away": 1, "cluster_shards_not_served": 1}
    assert found["healthy"]
    assert "no router here reaches shard-2" in found["warnings"]


def test_a_server_whose_routers_reach_no_shard_is_not_healthy():
    _, found = cluster(view("jobs-1", "jobs-2"), unreached=["1", "2"])

    assert not found["healthy"]
    assert found["problems"] == ["no router here reaches any shard: clients need another server"]


class Session:
    """ZooKeeper as far as one write goes."""

    def __init__(self) -> None:
        self.written: Assignment | None = None

    async def write(self, path: str, data: bytes, version: int | None, *, as_leader: bool) -> int:
        assert (path, version, as_leader) == ("assignment", None, True)
        self.written = msgspec.json.decode(data, type=Assignment)
        return 0


def test_an_assignment_that_zookeeper_has_lost_is_written_again_as_it_was():
    before = view("jobs-1", "jobs-2")
    servers = {"m-jobs-3": before.members["m-jobs-3"], **before.members}
    lost = View(members=servers, servers=before.servers, own="m-jobs-3", connected=True)

    async def written() -> Assignment | None:
        settings = ServerSettings(cluster="c", server="jobs-3", zookeeper=NEVER)
        found = Cluster(settings, None, FakeClock(), lambda _: None)
        session = Session()
        found._session = session  # type: ignore[assignment]
        found.follow(before)
        found.follow(lost)
        await found.lead(CONFIG.shards)
        return session.written

    expected = msgspec.json.decode(before.nodes["assignment"].data, type=Assignment)
    assert asyncio.run(written()) == expected


def test_what_several_servers_warn_of_for_one_reason_is_said_once():
    def says(server: str, *shards: str) -> Sample:
        views = [
            ProcessView(
                Report(
                    *(f"shard-{shard}", "shard", 1, 0, ProcessState.SERVING),
                    facts={"durability warning": "weak"},
                    stats=empty(),
                ),
                "serving",
            )
            for shard in shards
        ]
        found = status(CONFIG, views, {**ABOUT, "warnings": [f"only {server}"]})
        return Sample({**found, "server": server}, {})

    whole = together(says("jobs-1", "1", "2"), {"jobs-2": says("jobs-2", "3")}).status

    assert whole["warnings"] == [
        "jobs-1/shard-1, jobs-1/shard-2, jobs-2/shard-3: weak",
        "jobs-1: only jobs-1",
        "jobs-2: only jobs-2",
    ]
