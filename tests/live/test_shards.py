"""Changes of etc/shards.yaml while a load runs through the service."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Mapping
from typing import Any

import pytest

from pinlaterd.client import AckInfo, Job, JobState
from tests.deployment import frozen
from tests.faults.load import shards_of
from tests.live.conftest import BASE, is_dequeue_only, serves

pytestmark = pytest.mark.service

THREE = f"{BASE}  3: {{}}\n"


def test_new_shard_has_every_queue_before_its_first_job(
    live, client, queue, load, wait_until, record_property
):
    pids = live.deployment.pids()
    with load.running():
        live.shards(THREE)
        record_property("added", live.wait_until_followed(lambda s: serves(s, "1", "2", "3")))
        wait_until(lambda: "3" in shards_of(load.acknowledged))
    assert load.errors == []
    load.check()
    assert pids.items() <= live.deployment.pids().items()  # nobody else was restarted
    assert client.count(queue, JobState.PENDING) == 0


def test_new_shard_that_can_not_serve_disturbs_nobody(live, client, queue, load, wait_until):
    with load.running():
        live.shards(
            f"{BASE}  3: {{engine: mysql, master: {{host: 127.0.0.1, port: 1}}, user: u}}\n"
        )
        live.wait_until(lambda s: "shard-3 is starting" in s["problems"])
        load.advance()
        assert client.count(queue, JobState.FAILED) == 0  # a call that needs all shards
    assert load.errors == []


def test_what_a_killed_coordinator_had_begun_is_done(live, wait_until):
    live.shards(THREE)
    due = live.deployment.folder / "run/programs.due"
    # On a busy machine it may come and go unseen: then all is done.
    wait_until(lambda: due.exists() or "shard-3" in live.deployment.programs())
    live.deployment.kill("coordinator")

    live.deployment.wait_until_serving()
    live.wait_until_followed(lambda s: serves(s, "1", "2", "3"))


def test_empty_shard_is_removed(live, client, queue, load, wait_until, record_property):
    live.shards(THREE)
    live.wait_until_followed(lambda s: serves(s, "1", "2", "3"))
    live.shards(f"{BASE}  3: {{dequeue_only: true}}\n")
    live.wait_until_followed(lambda s: is_dequeue_only(s, "3"))
    with load.running():
        live.shards(BASE)
        record_property("removed", live.wait_until(lambda s: serves(s, "1", "2")))
        wait_until(lambda: "shard-3" not in live.deployment.programs())
    assert load.errors == []


def test_shard_stays_until_all_routers_know_that_it_takes_no_jobs(live, client, queue, wait_until):
    """Else one might send it jobs yet, and it take them, once it had said that it holds none."""
    live.shards(THREE)
    live.wait_until_followed(lambda s: serves(s, "1", "2", "3"))
    with frozen(live.deployment.pid_of("router")):
        live.shards(BASE)
        live.wait_until(lambda s: is_dequeue_only(s, "3"))
        live.wait_until(lambda s: states(s)["router"] == "silent")
        assert is_dequeue_only(live.deployment.status(), "3")

    live.wait_until(lambda s: serves(s, "1", "2"))
    wait_until(lambda: "shard-3" not in live.deployment.programs())


def states(status: Mapping[str, Any]) -> Mapping[str, str]:
    return {process["name"]: process["state"] for process in status["processes"]}


def test_full_shard_is_not_removed_until_it_is_empty_or_abandoned(live, client, queue, wait_until):
    live.shards(THREE)
    live.wait_until_followed(lambda s: serves(s, "1", "2", "3"))
    live.shards("shards:\n  1: {dequeue_only: true}\n  2: {dequeue_only: true}\n  3: {}\n")
    live.wait_until_followed(lambda s: is_dequeue_only(s, "1", "2"))
    client.enqueue(queue, [Job(b"a"), Job(b"b"), Job(b"later", run_after_ms=int(1e13))])
    [taken] = client.dequeue(queue, limit=1, max_wait_ms=30_000)

    live.shards(BASE)
    told = (
        "etc/shards.yaml: shards.3: not removed: 2 jobs are pending and 1 in progress there; wait "
        "until it holds none (dequeue_only: true keeps new ones out), or give its jobs up: "
        "`abandon: [3]` in that file"
    )
    live.wait_until(lambda s: s["config_problems"] == [told])
    live.wait_until(lambda s: serves(s, "1", "2", "3"))
    client.ack(queue, succeeded=[AckInfo(taken.descriptor)])
    live.wait_until(lambda s: any("2 jobs are pending and 0" in p for p in s["config_problems"]))

    live.shards(f"{BASE}abandon: [3]\n")
    live.wait_until(lambda s: serves(s, "1", "2") and not s["config_problems"])
    wait_until(lambda: "shard-3" not in live.deployment.programs())

    live.shards(THREE)  # what was left in its store is there again
    live.wait_until_followed(lambda s: serves(s, "1", "2", "3"))
    wait_until(lambda: len(client.dequeue(queue, limit=5)) == 1)


def test_another_address_is_another_store(live, client, queue, load, wait_until, record_property):
    other = live.deployment.folder / "data/other.sqlite"
    router = live.deployment.pid_of("router")
    with load.running():
        began = time.monotonic()
        live.shards("shards:\n  1: {file: data/other.sqlite}\n  2: {}\n")
        live.wait_until_followed(
            lambda s: (
                serves(s, "1", "2")
                and any(p["facts"].get("file") == "data/other.sqlite" for p in s["processes"])
            )
        )
        record_property("moved", time.monotonic() - began)
        load.advance()
        wait_until(lambda: "1" in shards_of(client.enqueue(queue, [Job(b"there")])))
    with sqlite3.connect(f"file:{other}?mode=ro", uri=True) as store:
        assert store.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    assert live.deployment.pid_of("router") == router
