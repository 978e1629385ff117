"""Nothing of a deployment is left running that its operator did not want."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from pinlaterd.client import JobState
from tests.deployment import Deployment, claim
from tests.faults.conftest import SETTINGS

pytestmark = pytest.mark.service


@pytest.fixture(scope="module")
def deployment(tmp_path_factory) -> Iterator[Deployment]:
    deployment = Deployment(tmp_path_factory.mktemp("d"))
    deployment.init(shards=2, settings=SETTINGS)
    yield deployment
    deployment.destroy()


@pytest.fixture
def busy(deployment: Deployment) -> Deployment:
    """It runs, and its shards have searchers beside them."""
    deployment.up()
    deployment.wait_until_serving()  # starts the searchers, which takes a busy machine long
    with deployment.client() as client:
        client.create_queue("q")
        assert client.count("q", JobState.PENDING, body_regex="b") == 0
    return deployment


def test_down_leaves_no_process_and_up_finds_the_jobs(busy):
    with busy.client() as client:
        client.enqueue("q", [b"abc"])
    assert len(busy.processes()) >= 5  # supervisord, coordinator, router, two shards, searchers

    busy.down()

    assert busy.processes() == []
    busy.up()
    with busy.client() as client:
        assert [job.body for job in claim(client, "q")] == [b"abc"]
        assert client.dequeue("q", limit=10) == []


def test_down_finds_what_a_killed_supervisord_left_behind(busy):
    os.kill(busy.supervisord_pid(), signal.SIGKILL)

    busy.down()

    assert busy.processes() == []


def test_a_searcher_ends_with_its_shard(busy, wait_until):
    before = {process.pid for process in busy.processes()}
    busy.supervisorctl("stop", "shard-1", "shard-2")
    wait_until(lambda: len(busy.processes()) == 3)  # supervisord, coordinator, router

    busy.supervisorctl("start", "shard-1", "shard-2")
    busy.wait_until_serving()

    assert {process.pid for process in busy.processes()} != before


def test_a_killed_shard_takes_its_searcher_along(busy, wait_until):
    children = {p.pid: p.children() for p in busy.processes()}
    pids = [busy.kill("shard-1"), busy.kill("shard-2")]
    searchers = [searcher for pid in pids for searcher in children[pid]]
    assert searchers

    wait_until(lambda: not any(searcher in busy.processes() for searcher in searchers))
