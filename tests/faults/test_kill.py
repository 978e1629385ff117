"""kill -9 in the middle of load: nothing acknowledged is lost, nothing has two live claims, and
the service comes back by itself."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import psutil
import pytest

from pinlaterd.client import ConnectionFailed, PinLaterError
from tests.conftest import WaitUntil
from tests.deployment import Deployment
from tests.faults.load import Load

pytestmark = pytest.mark.service

BACK_SECONDS = 120.0  # two on a quiet machine


@pytest.mark.parametrize("program", ["router", "shard-2"])
def test_a_killed_process_loses_nothing(deployment: Deployment, load: Load, program, wait_until):
    with load.running():
        killed = deployment.kill(program)

        wait_until(lambda: deployment.pids().get(program, killed) != killed)
        deployment.wait_until_serving(seconds=BACK_SECONDS)

    load.check(claims_may_be_lost=True)


def test_a_killed_coordinator_is_not_noticed(deployment: Deployment, load: Load, wait_until):
    with load.running():
        killed = deployment.kill("coordinator")
        wait_until(lambda: deployment.pids().get("coordinator", killed) != killed)
        deployment.wait_until_serving(seconds=BACK_SECONDS)

    load.check()
    assert load.errors == []


def test_a_router_that_starts_without_a_coordinator_serves(
    deployment: Deployment, load: Load, wait_until
):
    coordinator = deployment.pid_of("coordinator")
    os.kill(coordinator, signal.SIGSTOP)
    try:
        with load.running():
            killed = deployment.kill("router")
            wait_until(lambda: deployment.pids().get("router", killed) != killed)
    finally:
        os.kill(coordinator, signal.SIGCONT)

    load.check(claims_may_be_lost=True)


def test_all_processes_killed_at_once_lose_nothing(deployment: Deployment, load: Load, wait_until):
    with load.running():
        deployment.kill_programs()

        deployment.wait_until_serving(seconds=BACK_SECONDS)

    load.check(claims_may_be_lost=True)


def test_the_service_goes_on_without_supervisord_and_up_takes_over(
    deployment: Deployment, load: Load
):
    programs = set(deployment.pids())
    with load.running():
        os.kill(deployment.supervisord_pid(), signal.SIGKILL)
        load.advance()
        assert load.errors == []

        deployment.up()

    load.check(claims_may_be_lost=True)
    assert set(deployment.pids()) == programs
    supervisord = psutil.Process(deployment.supervisord_pid())
    family = {supervisord.pid, *(child.pid for child in supervisord.children(recursive=True))}
    assert {process.pid for process in deployment.processes()} == family


def test_everything_killed_comes_back_with_up(deployment: Deployment, load: Load):
    with load.running():
        # supervisord first, or it would start what it sees end
        os.kill(deployment.supervisord_pid(), signal.SIGKILL)
        deployment.kill_all()
        deployment.up()

    load.check(claims_may_be_lost=True)


DEEP_JOBS = 300_000
FIRST_ANSWER_SECONDS = 2.0
TRIES = 5  # a busy machine may hold up one start of two


@pytest.fixture
def deep_queue(deployment: Deployment, queue: str, tmp_path: Path) -> Iterator[str]:
    """With DEEP_JOBS in shard 1: a third pending, a third running, a third succeeded."""
    file, copy = deployment.folder / "data/shard-1.sqlite", tmp_path / "copy"
    deployment.supervisorctl("stop", "shard-1")
    shutil.copy(file, copy)
    with closing(sqlite3.connect(file)) as db:
        [number] = db.execute("SELECT id FROM queues WHERE name = ? AND NOT dropped", (queue,))
        db.executescript(_fill(*number))
    deployment.supervisorctl("start", "shard-1")
    yield queue
    deployment.supervisorctl("stop", "shard-1")
    shutil.copy(copy, file)
    deployment.supervisorctl("start", "shard-1")


def _fill(queue: int) -> str:
    now_ms = round(time.time() * 1000)
    ids = f"WITH RECURSIVE ids(id) AS (SELECT 1 UNION ALL SELECT id + 1 FROM ids LIMIT {DEEP_JOBS})"
    return f"""
        BEGIN;
        {ids} INSERT INTO jobs
            SELECT id, {queue}, 1, 1, 1, {now_ms}, {now_ms}, {now_ms}, '', x'78' FROM ids;
        {ids} INSERT INTO runs
            SELECT id, id, {queue}, 1, id % 3, {now_ms}, iif(id % 3, 'claim', NULL), NULL
            FROM ids;
        COMMIT;
    """


def test_a_killed_shard_answers_at_once_however_many_jobs_it_holds(
    deployment: Deployment, deep_queue: str, wait_until: WaitUntil
):
    with deployment.client() as client:

        def answers(shard: str) -> bool:
            with suppress(PinLaterError, ConnectionFailed):
                client.lookup([f"{deep_queue}:s{shard}:p1:1"])
                return True
            return False

        def seconds_from_its_start(shard: str) -> float:
            """supervisord may take its time before that."""
            program = f"shard-{shard}"
            killed = deployment.kill(program)
            wait_until(lambda: answers(shard) and deployment.pids().get(program, killed) != killed)
            return time.time() - psutil.Process(deployment.pid_of(program)).create_time()

        usual: list[float] = []

        def is_quick() -> bool:
            """By a shard that holds next to nothing, on however busy a machine."""
            usual.append(seconds_from_its_start("3"))
            return seconds_from_its_start("1") < max(FIRST_ANSWER_SECONDS, max(usual) + 0.8)

        wait_until(lambda: answers("1"))
        assert any(is_quick() for _ in range(TRIES))
