"""What `status` shows and /health judges."""

from __future__ import annotations

import os
import time
from dataclasses import replace

import pytest

from pinlaterd.config.schema import Config, ServerSettings, ShardSettings
from pinlaterd.coordinator.processes import About, ProcessView, status
from pinlaterd.stats import empty
from pinlaterd.wire.control import ProcessState, Report

ABOUT = About(
    deployment="/srv/pinlaterd",
    uptime_seconds=12.0,
    snapshot_version=7,
    config_version=5,
    warnings=(),
    config_problems=(),
    refused_removals={},
    needs_restart=(),
    config_judged="abc",
)
CONFIG = Config(
    ServerSettings(),
    {
        "1": ShardSettings("1", file="data/shard-1.sqlite"),
        "2": ShardSettings("2", dequeue_only=True, file="data/shard-2.sqlite"),
    },
)


def view(process, state="serving", facts=(), pid=None):
    started_at_ms = int(time.time() * 1000) - 5000
    about = (process, "x", pid or os.getpid(), started_at_ms)
    return ProcessView(Report(*about, ProcessState.SERVING, dict(facts), empty()), state)


ALL = [view("router"), view("shard-1"), view("shard-2")]


def test_all_that_should_serve_does():
    found = status(CONFIG, ALL, ABOUT)

    assert found["healthy"]
    assert found["problems"] == []
    assert [process["name"] for process in found["processes"]] == ["router", "shard-1", "shard-2"]
    assert [
        (shard["name"], shard["healthy"], shard["dequeue_only"]) for shard in found["shards"]
    ] == [("1", True, False), ("2", True, True)]
    assert found["processes"][0]["uptime_seconds"] >= 5
    assert found["processes"][0]["rss_bytes"] > 1_000_000


def test_a_relief_serves_in_its_routers_place():
    found = status(CONFIG, [view("router", "stopped"), *ALL[1:], view("router-handover")], ABOUT)

    assert found["healthy"]
    assert [process["name"] for process in found["processes"]][-1] == "router-handover"


def test_what_has_ended_and_is_not_expected_is_not_shown():
    found = status(CONFIG, [*ALL, view("router-handover", "stopped")], ABOUT)

    assert [process["name"] for process in found["processes"]] == ["router", "shard-1", "shard-2"]


def test_a_process_never_heard_of_is_a_problem():
    found = status(CONFIG, ALL[:2], ABOUT)

    assert not found["healthy"]
    assert found["problems"] == ["shard-2 is stopped"]
    assert not found["shards"][1]["healthy"]
    assert found["processes"][2]["pid"] is None


@pytest.mark.parametrize("state", ["starting", "standby", "stopping", "silent", "stopped"])
def test_a_shard_that_does_not_serve_is_a_problem(state):
    found = status(CONFIG, [*ALL[:2], view("shard-2", state)], ABOUT)

    assert found["problems"] == [f"shard-2 is {state}"]
    assert found["shards"][1]["state"] == state


def test_a_standby_beside_the_owner_is_none():
    found = status(CONFIG, [*ALL, view("shard-2", "standby")], ABOUT)

    assert found["healthy"]
    assert found["shards"][1]["state"] == "serving"
    assert len(found["processes"]) == 4


@pytest.mark.parametrize("accepted", [False, True])
def test_weak_durability_is_a_warning_unless_it_is_accepted(accepted):
    server = replace(CONFIG.server, accept_weak_durability=accepted)
    facts = {"durability": "everysec", "durability warning": "loses a second"}
    views = [view("router"), view("shard-1", facts=facts), view("shard-2")]

    found = status(replace(CONFIG, server=server), views, ABOUT)

    assert found["warnings"] == ([] if accepted else ["shard-1: loses a second"])
    assert found["healthy"]


def test_warnings_are_gathered_from_facts():
    facts = {"durability": "FULL", "durability warning": "", "store warning": "disk nearly full"}
    found = status(CONFIG, [view("router"), view("shard-1", facts=facts), view("shard-2")], ABOUT)

    assert found["healthy"]
    assert found["warnings"] == ["shard-1: disk nearly full"]
    assert found["shards"][0]["warnings"] == ["disk nearly full"]


def test_a_warning_that_several_shards_have_is_given_once():
    facts = {"durability warning": "appendfsync everysec: …"}
    own = {**facts, "store warning": "disk nearly full"}

    found = status(
        CONFIG, [view("router"), view("shard-1", facts=facts), view("shard-2", facts=own)], ABOUT
    )

    assert found["warnings"] == [
        "shard-1, shard-2: appendfsync everysec: …",
        "shard-2: disk nearly full",
    ]
    assert found["shards"][0]["warnings"] == ["appendfsync everysec: …"]


def test_a_broken_file_takes_nothing_out_of_service():
    about = ABOUT | {"config_problems": ("etc/queues.yaml:1: …",), "needs_restart": ("port …",)}
    found = status(CONFIG, ALL, about)

    assert found["healthy"]
    assert found["problems"] == []
    assert found["config_problems"] == ("etc/queues.yaml:1: …",)
    assert found["needs_restart"] == ("port …",)


def test_several_routers_are_each_expected():
    config = Config(ServerSettings(routers=2), CONFIG.shards)

    found = status(config, [view("router-1"), *ALL[1:]], ABOUT)

    assert found["problems"] == ["router-2 is stopped"]


def test_an_ended_process_uses_nothing():
    found = status(CONFIG, [view("router", "stopped"), *ALL[1:]], ABOUT)

    router = found["processes"][0]
    assert (router["uptime_seconds"], router["cpu_seconds"], router["rss_bytes"]) == (0, 0, 0)
