"""Who reports, how each of them is, that no figure is lost or counted twice, and what `status`
shows and /health judges."""

from __future__ import annotations

import dataclasses
import os
import time

import pytest
from msgspec.structs import replace

from pinlaterd.config.schema import Config, ServerSettings, ShardSettings
from pinlaterd.coordinator.processes import SILENT_SECONDS, ProcessView, Registry, status
from pinlaterd.stats import Stats, empty, merge
from pinlaterd.status import About
from pinlaterd.wire.control import ProcessState, Report


class Machine:
    """Which pids there are."""

    def __init__(self):
        self.dead = set()

    def is_alive(self, pid):
        return pid not in self.dead


@pytest.fixture
def machine():
    return Machine()


@pytest.fixture
def registry(clock, machine):
    return Registry(clock, machine.is_alive)


def report(process="shard-1", pid=1, state=ProcessState.SERVING, enqueued=0, depth=0.0, full=True):
    stats = Stats()
    if enqueued:
        stats.count("mail_enqueue", enqueued)
    stats.gauge("mail_pending", depth)
    return Report(process, "shard", pid, pid * 1000, state, {}, stats.snapshot(), full)


def states(registry):
    return [(view.report.process, view.report.pid, view.state) for view in registry.views()]


def enqueued(registry):
    return merge(registry.stats().values())["counters"].get("mail_enqueue", 0)


def test_a_heartbeat_keeps_it_so_and_silence_does_not(registry, clock):
    registry.heard(b"a", report())
    clock.advance(SILENT_SECONDS - 0.1)
    assert registry.heard(b"a", None)
    clock.advance(SILENT_SECONDS - 0.1)
    assert states(registry) == [("shard-1", 1, "serving")]

    clock.advance(0.2)
    assert states(registry) == [("shard-1", 1, "silent")]

    registry.heard(b"a", None)
    assert states(registry) == [("shard-1", 1, "serving")]


def test_an_ended_process_is_stopped_at_once(registry, machine):
    registry.heard(b"a", report())
    machine.dead.add(1)

    assert states(registry) == [("shard-1", 1, "stopped")]


def test_who_is_not_known_has_to_tell_all(registry):
    assert not registry.heard(b"a", None)
    assert not registry.heard(b"a", report(full=False))
    assert registry.views() == []

    assert registry.heard(b"a", report())
    assert registry.heard(b"a", None)


def test_changes_go_over_what_was_reported_before(registry):
    registry.heard(b"a", report(enqueued=5, depth=2))
    registry.heard(b"a", report(depth=3, full=False))

    [stats] = registry.stats().values()
    assert stats["counters"] == {"mail_enqueue": 5}
    assert stats["gauges"] == {"mail_pending": 3}


def test_a_new_incarnation_goes_on_where_the_totals_of_the_old_one_ended(registry, machine):
    registry.heard(b"a", report(pid=1, enqueued=5, depth=9))
    machine.dead.add(1)
    assert enqueued(registry) == 5

    registry.heard(b"b", report(pid=2, enqueued=2, depth=1))
    assert states(registry) == [("shard-1", 2, "serving")]
    assert enqueued(registry) == 7
    assert registry.stats()["shard-1"]["gauges"] == {"mail_pending": 1}

    machine.dead.add(2)
    registry.heard(b"c", report(pid=3, enqueued=1))
    assert enqueued(registry) == 8


def test_totals_of_a_replaced_process_are_added_to_what_changes_alone(registry, machine):
    """A scrape costs what has changed, also after a shard with thousands of queues was replaced."""
    stats = Stats()
    stats.record("job_body_size_mail", 3)
    stats.record("job_body_size_idle", 3)
    stats.count("mail_enqueue", 5)
    registry.heard(b"a", replace(report(), stats=stats.snapshot()))
    machine.dead.add(1)
    registry.heard(b"b", replace(report(pid=2), stats=stats.snapshot()))
    before = dict(registry.stats()["shard-1"]["histograms"])

    stats.take_changes()
    stats.record("job_body_size_mail", 3)
    stats.count("mail_enqueue", 1)
    changes = stats.take_changes()
    registry.heard(b"b", replace(report(pid=2, full=False), stats=changes.now))

    after = registry.stats()["shard-1"]
    assert after["counters"] == {"mail_enqueue": 11}
    assert after["histograms"]["job_body_size_mail"].count == 3
    assert after["histograms"]["job_body_size_idle"] is before["job_body_size_idle"]
    assert before["job_body_size_idle"].count == 2

    registry.heard(b"c", replace(report(pid=2), stats=stats.snapshot()))
    assert enqueued(registry) == 11

    stats.drop_queue("mail")
    changes = stats.take_changes()
    dropped = replace(report(pid=2, full=False), stats=changes.now, dropped=changes.dropped)
    registry.heard(b"c", dropped)
    registry.heard(b"c", replace(report(pid=2), stats=stats.snapshot()))
    assert enqueued(registry) == 0


def test_a_process_that_reconnects_is_counted_once(registry):
    registry.heard(b"a", report(enqueued=5))
    registry.heard(b"b", report(enqueued=6))

    assert states(registry) == [("shard-1", 1, "serving")]
    assert enqueued(registry) == 6


def test_an_owner_and_its_standby_are_both_there(registry, machine):
    registry.heard(b"a", report(pid=1))
    registry.heard(b"b", report(pid=2, state=ProcessState.STANDBY))
    assert states(registry) == [("shard-1", 1, "serving"), ("shard-1", 2, "standby")]

    machine.dead.add(1)
    registry.heard(b"b", report(pid=2, state=ProcessState.SERVING))
    assert states(registry) == [("shard-1", 2, "serving")]


def test_gauges_of_a_silent_process_are_left_out(registry, clock):
    registry.heard(b"a", report(enqueued=5, depth=9))
    clock.advance(SILENT_SECONDS + 1)

    [stats] = registry.stats().values()
    assert stats["gauges"] == {}
    assert stats["counters"] == {"mail_enqueue": 5}


# --- status ---------------------------------------------------------------------------------

ABOUT = About(
    deployment="/srv/pinlaterd",
    uptime_seconds=12.0,
    snapshot_version=7,
    config_version=5,
    config_number=0,
    warnings=(),
    config_problems=(),
    refused_removals={},
    needs_restart=(),
    config_judged="abc",
)
CONFIG = Config(
    ServerSettings(http_port=0, web_port=0),
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
    server = dataclasses.replace(CONFIG.server, accept_weak_durability=accepted)
    facts = {"durability": "everysec", "durability warning": "loses a second"}
    views = [view("router"), view("shard-1", facts=facts), view("shard-2")]

    found = status(dataclasses.replace(CONFIG, server=server), views, ABOUT)

    assert found["warnings"] == ([] if accepted else ["shard-1: loses a second"])
    assert found["healthy"]


def test_a_warning_that_several_shards_have_is_given_once():
    facts = {"durability warning": "appendfsync everysec: …", "memory warning": ""}
    own = {**facts, "store warning": "disk nearly full"}

    found = status(
        CONFIG, [view("router"), view("shard-1", facts=facts), view("shard-2", facts=own)], ABOUT
    )

    assert found["warnings"] == [
        "shard-1, shard-2: appendfsync everysec: …",
        "shard-2: disk nearly full",
    ]
    assert found["shards"][0]["warnings"] == ["appendfsync everysec: …"]
    assert found["healthy"]


def test_several_routers_are_each_expected():
    config = Config(ServerSettings(routers=2, http_port=0, web_port=0), CONFIG.shards)

    found = status(config, [view("router-1"), *ALL[1:]], ABOUT)

    assert found["problems"] == ["router-2 is stopped"]


def test_an_ended_process_uses_nothing():
    found = status(CONFIG, [view("router", "stopped"), *ALL[1:]], ABOUT)

    router = found["processes"][0]
    assert (router["uptime_seconds"], router["cpu_seconds"], router["rss_bytes"]) == (0, 0, 0)
