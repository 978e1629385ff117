"""The marks: what changed at one time, in words, the last 500."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from pinlaterd.clock import Clock
from pinlaterd.config.schema import Config, QueueSettings, ServerSettings, ShardSettings
from pinlaterd.coordinator.events import MOST_EVENTS, Event, Events, changes_between, merged_events
from pinlaterd.coordinator.overview import Overview
from pinlaterd.wire.control import Mend


def status(*, pid=7, state="serving", degraded="", dequeue_only=False) -> Any:
    shard = {"name": "1", "state": state, "degraded": degraded, "dequeue_only": dequeue_only}
    return {"processes": [{"name": "shard-1", "pid": pid, "state": state}], "shards": [shard]}


def texts(events):
    return [event.text for event in events.since(0)]


def test_restarts_and_states_are_marked_and_what_is_seen_first_is_not():
    events = Events()

    events.look(status(), 1_000)
    events.look(status(), 2_000)
    assert texts(events) == []
    events.look(status(pid=None, state="stopped"), 3_000)
    events.look(status(pid=8), 4_000)
    events.look(status(pid=8, degraded="it is full"), 5_000)

    assert texts(events) == [
        "shard-1 is stopped",
        "shard 1: stopped",
        "shard-1 restarted, pid 8",
        "shard-1 is serving",
        "shard 1: serving",
        "shard 1: degraded: it is full",
    ]
    assert [event.at_ms for event in events.since(4_000)] == [4_000, 4_000, 4_000, 5_000]


def test_the_last_500_are_kept():
    events = Events()
    for number in range(MOST_EVENTS + 1):
        events.add(number, "config", "1", str(number))

    assert texts(events) == [str(number) for number in range(1, MOST_EVENTS + 1)]


def test_mends_of_a_queue_within_a_minute_are_one_mark():
    events = Events()
    for at_ms, queue, method in (
        (0, "mail", "retryFailedJobs"),
        (500, "pay", "retryFailedJobs"),
        (1_000, "mail", "retryFailedJobs"),
        (2_000, "mail", "deleteJobs"),
        (90_000, "mail", "retryFailedJobs"),
    ):
        events.add_mend(at_ms, Mend(queue, method, 1_000))

    assert texts(events) == [
        "pay: 1,000 jobs retried",
        "mail: 2,000 jobs retried",
        "mail: 1,000 jobs deleted",
        "mail: 1,000 jobs retried",
    ]


def test_a_configuration_says_what_it_changes_and_no_secret():
    before = Config(shards={"1": ShardSettings("1"), "2": ShardSettings("2")})
    limited = QueueSettings(600, 24, 168, max_jobs_per_second=5.0, paused=True, paused_by="ada")
    after = Config(
        server=ServerSettings(admin_password_hash="scrypt$secret"),
        shards={
            "1": ShardSettings("1", dequeue_only=True, passwd="secret"),
            "3": ShardSettings("3"),
        },
        queues={"mail": limited},
    )

    changes = changes_between(before, after)

    assert changes.keys() == {"", "mail"}
    text = changes[""]
    assert text.startswith("admin_password_hash, shard 1: dequeue_only, shard 1: passwd, ")
    assert "shard 2 removed, shard 3 added" in text
    assert "mail: max_jobs_per_second 5," in changes["mail"]
    assert ", paused on, paused_by ada" in changes["mail"]
    assert "secret" not in str(changes)
    assert changes_between(after, after) == {"": "the files"}
    many = Config(queues={f"q{number}": limited for number in range(30)})
    assert changes_between(Config(), many) == {"": "settings of 30 queues"}


@pytest.mark.parametrize(
    ("minutes", "marked"), [(None, []), (5, ["restarted"]), (7 * 24 * 60, ["started"])]
)
def test_a_coordinator_is_restarted_only_if_one_ran_a_moment_before(tmp_path, minutes, marked):
    """One that was killed had written its history within 5 min."""
    path, clock = Path(tmp_path, "history"), Clock()
    if minutes is not None:
        path.touch()
        written = clock.now_ms() / 1000 - minutes * 60
        os.utime(path, (written, written))

    overview = Overview(clock, Mock(), Config, Mock(), Mock(), path)

    found = texts(overview.events)
    assert found == [f"coordinator {what}, pid {os.getpid()}" for what in marked]


def test_marks_of_several_servers_name_them_and_a_configuration_is_one():
    paused = Event(2_000, "config", "mail", "mail: paused on")
    killed = Event(1_000, "process", "router", "router restarted, pid 8")

    again = Event(9_000, "config", "mail", "mail: paused on")
    late = Event(9_500, "config", "mail", "mail: paused on")

    found = merged_events(
        {"jobs-1": [paused, again], "jobs-2": [killed, paused, late], "jobs-3": None}
    )

    killed_text = "jobs-2: router restarted, pid 8"
    assert [event.text for event in found] == [killed_text, paused.text, again.text]
    assert found[-1].at_ms == 9_000
