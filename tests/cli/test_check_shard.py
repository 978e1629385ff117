"""`pinlater-admin shard check` as a program, on a deployment that is not up."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from pinlaterd.deployment.files import write_deployment
from pinlaterd.engines.base import Batch, EnqueueOp
from pinlaterd.engines.sqlite.engine import SqliteEngine
from pinlaterd.model import Job
from tests.cli.program import Program

NOW_MS = 1_700_000_000_000


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("d")  # short, for its sockets
    write_deployment(made, "sqlite", 1, {})
    return made


@pytest.fixture
def engine(folder: Path) -> SqliteEngine:
    """Of the shard; its file lacks the state of its job. It is closed."""
    file = folder / "data/shard-1.sqlite"
    engine = SqliteEngine(file)
    engine.open(NOW_MS)
    engine.create_queue("mail", NOW_MS)
    engine.apply(Batch(enqueues=[EnqueueOp("mail", [Job(b"lost")])]), NOW_MS)
    engine.close()
    with closing(sqlite3.connect(file, isolation_level=None)) as hand:
        hand.execute("DELETE FROM runs")
    return engine


@pytest.fixture
def check(folder: Path) -> Program:
    return Program("admin", "--dir", folder)


def problems(found: Any) -> set[str]:
    return {one["problem"] for one in found["found"]}


def test_what_disagrees_is_shown_and_repaired(check: Program, engine: SqliteEngine):
    shown = check("shard check 1 --json")
    assert shown.returncode == 1
    engine.open(NOW_MS)
    assert not engine.counts.sound  # it is searched, and warned of
    engine.close()
    assert "jobs in no state, which are never handed out" in problems(json.loads(shown.stdout))

    assert "(repaired)" in check.output("shard check 1 --repair")

    assert check.output("shard check 1") == "shard 1 agrees with itself\n"


def test_a_shard_that_runs_is_left_alone(check: Program, engine: SqliteEngine):
    engine.open(NOW_MS)

    refused = check.error("shard check 1 --repair")

    engine.close()
    assert "stop it first: supervisorctl" in refused
