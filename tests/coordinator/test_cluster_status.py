"""What a server of a cluster says of the others: figures and warnings that are worth an alarm."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import pytest

from pinlaterd.clock import FakeClock
from pinlaterd.config.layout import CLUSTER_KEY_FILE, ETC
from pinlaterd.config.schema import Config, ServerSettings, ShardSettings
from pinlaterd.coordinator.cluster import Cluster
from pinlaterd.coordinator.placement import Assigned, Assignment, Member, ShardState
from pinlaterd.coordinator.zookeeper import Node, View
from pinlaterd.wire.curve import ClusterKey

NEVER = "127.0.0.1:1"
CONFIG = Config(shards={name: ShardSettings(name, "redis") for name in "12"})
WELL = {"cluster_zookeeper_away": 0, "cluster_servers_gone": 0, "cluster_shards_not_served": 0}
Figures = Mapping[str, int]


@pytest.fixture
def figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Figures]:
    """Of jobs-1, whose shards are 1; jobs-2 has shard 2."""
    monkeypatch.chdir(tmp_path)
    ETC.mkdir()
    ClusterKey.generate(ETC / CLUSTER_KEY_FILE)

    async def seen(*views: View) -> Figures:
        settings = ServerSettings(cluster="c", server="jobs-1", zookeeper=NEVER)
        cluster = Cluster(settings, None, FakeClock(), lambda _: None)
        for view in views:
            cluster.follow(view)
        return cluster.figures(CONFIG)

    return lambda *views: asyncio.run(seen(*views))


def view(*servers: str, state: str = "serving", connected: bool = True) -> View:
    members = {
        f"m-{number}": Member(
            *(server, "h", "h:9012", 9100, "h:9010", "1"), shards={server[-1]: ShardState(state, 1)}
        )
        for number, server in enumerate(servers)
    }
    owners = {shard: Assigned(f"jobs-{shard}", 1, "h:9100", 0) for shard in "12"}
    return View(
        members={name: msgspec.json.encode(member) for name, member in members.items()},
        servers={f"jobs-{number}": Node(b"{}", 0) for number in "12"},
        nodes={"assignment": Node(msgspec.json.encode(Assignment(owners)), 1)},
        own="m-0",
        connected=connected,
    )


def test_all_is_well(figures: Callable[..., Figures]):
    assert figures(view("jobs-1", "jobs-2")) == WELL


def test_a_server_is_gone_and_its_shard_with_it(figures: Callable[..., Figures]):
    gone = {"cluster_servers_gone": 1, "cluster_shards_not_served": 1}
    assert figures(view("jobs-1")) == WELL | gone


def test_shards_do_not_serve_yet(figures: Callable[..., Figures]):
    found = figures(view("jobs-1", "jobs-2", state="standby"))
    assert found == WELL | {"cluster_shards_not_served": 2}


def test_what_was_seen_last_counts_while_zookeeper_is_away(figures: Callable[..., Figures]):
    before = view("jobs-1", "jobs-2")
    found = figures(before, view(connected=False))
    assert found == WELL | {"cluster_zookeeper_away": 1}
