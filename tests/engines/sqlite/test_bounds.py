"""What the owner's loop does costs what it moves, not what the queue holds."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from pinlaterd.engines.base import Batch, EnqueueOp
from pinlaterd.engines.sqlite.engine import SqliteEngine
from pinlaterd.engines.sqlite.file import connect_owner
from pinlaterd.model import Job, JobKey
from tests.clocks import FakeClock
from tests.conformance.engine.harness import (
    QUEUE,
    EngineHarness,
    claim_op,
)
from tests.conftest import WaitUntil
from tests.engines.bounded_calls import BOUNDED_CALLS, LIMIT, Call

DEEP = 5_000
# SQLite's virtual machine takes some 20 to 100 steps a job; a walk over a deep queue many more.
STEPS = 6_000


class Steps:
    """Of SQLite's virtual machine, on the connections that it watches."""

    def __init__(self) -> None:
        self.taken = 0

    def watch(self, db: sqlite3.Connection) -> None:
        db.set_progress_handler(self._count, 100)

    def _count(self) -> int:
        self.taken += 100
        return 0


@pytest.fixture(scope="module")
def deep_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DEEP jobs in each state, each in a run of its own; a deleted queue as deep."""
    path = tmp_path_factory.mktemp("deep") / "shard-1.sqlite"
    store = EngineHarness(lambda: SqliteEngine(path), FakeClock())

    def fill(queue: str) -> None:
        for n in range(DEEP):  # neighbours of one priority would be in one run
            store.enqueue(Job(b"x", priority=1 + n % 2, attempts_allowed=1), queue=queue)

    for queue in (QUEUE, "dropped"):
        store.engine.create_queue(queue, store.now_ms)
    for end in (store.succeed, store.fail, None):
        fill(QUEUE)
        for priority in (1, 2):
            keys = [claimed.key for claimed in store.claim(priority=priority, limit=DEEP)]
            if end is not None:
                end(*keys)
    for queue in (QUEUE, "dropped"):
        fill(queue)
    store.engine.delete_queue("dropped")
    store.engine.close()
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("SELECT count(*) FROM runs").fetchone() == (5 * DEEP,)
    return path


@pytest.fixture
def deep(deep_file: Path, path: Path) -> Iterator[EngineHarness]:
    shutil.copy(deep_file, path)
    store = EngineHarness(lambda: SqliteEngine(path), FakeClock())
    yield store
    store.engine.close()


@pytest.mark.parametrize("call", BOUNDED_CALLS.values(), ids=BOUNDED_CALLS)
def test_no_call_walks_over_a_deep_queue(deep: EngineHarness, call: Call):
    assert isinstance(deep.engine, SqliteEngine)
    keys = deep.engine.db.execute("SELECT priority, first_id FROM runs WHERE state = 1").fetchall()
    steps = Steps()

    steps.watch(deep.engine.db)
    call(deep.engine, [JobKey(*key) for key in keys])
    deep.engine.db.set_progress_handler(None, 0)

    assert steps.taken < STEPS


@pytest.mark.parametrize("killed", [False, True])
def test_opening_walks_over_no_queue(
    deep: EngineHarness, monkeypatch: pytest.MonkeyPatch, wait_until: WaitUntil, killed: bool
):
    engine, steps = deep.engine, Steps()
    assert isinstance(engine, SqliteEngine)
    depths = deep.depths()

    def connect_watched(path: Path) -> sqlite3.Connection:
        db = connect_owner(path)
        steps.watch(db)
        return db

    monkeypatch.setattr("pinlaterd.engines.sqlite.store.connect_owner", connect_watched)
    if killed:
        engine._abandon()
    else:
        engine.close()

    engine.open(deep.now_ms)

    assert deep.depths() == depths
    assert BOUNDED_CALLS["read_pending"](engine, [])
    assert steps.taken < STEPS
    # What has to be compared after an unclean end is compared beside.
    wait_until(lambda: engine.depths() and engine.counts.sound)
    assert deep.depths() == depths
    assert steps.taken < STEPS


def test_the_rows_of_a_deleted_queue_need_several_slices(store: EngineHarness):
    store.enqueue(*[b"x"] * 25)
    store.claim(limit=15)
    store.engine.delete_queue(QUEUE)

    slices = 1
    while store.engine.vacuum(limit=LIMIT):
        slices += 1

    assert slices >= 3


def test_jobs_that_go_together_are_one_row(store: EngineHarness, stranger: sqlite3.Connection):
    def rows() -> list[tuple[int, int]]:
        return stranger.execute(
            "SELECT state, last_id - first_id + 1 FROM runs ORDER BY first_id"
        ).fetchall()

    jobs = [Job(b"x", priority=1 + n % 2) for n in range(20)]
    store.engine.apply(Batch(enqueues=[EnqueueOp(QUEUE, [job]) for job in jobs]), store.now_ms)
    assert rows() == [(0, 10), (0, 10)]

    claims = [
        claim._replace(claim_descriptor=f"host:9010:1:worker:{n}")
        for n, claim in enumerate(store.wanted(limit=8))
    ]
    store.engine.apply(
        Batch(claims=[claim_op(QUEUE, claims[:4]), claim_op(QUEUE, claims[4:])]), store.now_ms
    )
    assert rows() == [(1, 8), (0, 2), (0, 10)]

    store.succeed(*[claim.key for claim in claims[2:5]])
    assert rows() == [(1, 2), (2, 3), (1, 3), (0, 2), (0, 10)]
    assert [store.job(claim.key).claim_descriptor for claim in claims] == [
        claim.claim_descriptor for claim in claims
    ]
