"""A file that release 0.1's first layout wrote: a row for each job in the table of its state."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any, NoReturn

import pytest

from pinlaterd.engines.base import Batch, EnqueueOp
from pinlaterd.engines.sqlite import file
from pinlaterd.engines.sqlite.engine import SqliteEngine
from pinlaterd.errors import StorageError
from pinlaterd.model import Job, JobKey, JobState
from tests.clocks import FakeClock
from tests.conformance.engine.harness import QUEUE, Ack, EngineHarness

NOW_MS = 1_700_004_000
FIRST_ID = 1_700_000_000_001
CLAIM = "host:9010:1700000000:worker:"


@pytest.fixture
def path(path: Path) -> Path:
    script = Path(__file__).with_name("version_1.sql").read_text()
    with closing(sqlite3.connect(path)) as db:
        db.executescript(script)
    return path


def records(path: Path) -> list[Any]:
    """Both versions have this view."""
    with closing(sqlite3.connect(path)) as db:
        return db.execute("SELECT * FROM job_records ORDER BY local_id").fetchall()


def key(number: int, priority: int = 1) -> JobKey:
    return JobKey(priority, FIRST_ID + number)


@pytest.fixture
def upgraded(path: Path) -> EngineHarness:
    return EngineHarness(lambda: SqliteEngine(path), FakeClock(NOW_MS))


def test_every_job_is_as_it_was(path: Path):
    before = records(path)
    engine = SqliteEngine(path)

    for _ in range(2):
        engine.open(1)
        assert engine.check(repair=False) == []
        engine.close()
        assert records(path) == before

    assert len(before) == 12
    assert engine.open(1) > 1_700_000_000


def test_its_jobs_go_on(upgraded: EngineHarness):
    store = upgraded
    assert store.engine.queues() == {"mail", "other"}
    assert store.ready() == [key(8), key(9)]
    assert store.depths("other") == {(1, JobState.IN_PROGRESS): 1}
    assert store.succeed(Ack(key(4), claim_descriptor=f"{CLAIM}6")).noop == 1
    assert store.succeed(Ack(key(4), claim_descriptor=f"{CLAIM}5")).succeeded == 1
    expired = store.engine.release_expired(
        "mail", claimed_before_ms=store.now_ms, limit=10, now_ms=store.now_ms
    )
    assert (expired.retried, expired.failed) == ([], 1)
    again = store.engine.retry_failed(
        "mail", 1, attempts=1, run_after_ms=0, limit=1, now_ms=store.now_ms
    )
    assert [job.key.local_id for job in again] == [FIRST_ID + 2]
    assert [one.key for one in store.claim()] == [key(2), key(8), key(9)]
    assert (
        store.engine.collect_garbage(
            "mail", JobState.SUCCEEDED, updated_before_ms=1_700_003_000, limit=10
        )
        == 2
    )
    while store.engine.vacuum(limit=1):
        pass
    [new] = store.enqueue(b"new")
    assert new > key(10)
    assert store.depths() == {
        (1, JobState.PENDING): 2,
        (1, JobState.IN_PROGRESS): 3,
        (1, JobState.SUCCEEDED): 2,
        (1, JobState.FAILED): 1,
        (3, JobState.PENDING): 1,
    }
    assert store.engine.check(repair=False) == []
    store.engine.close()


def test_an_upgrade_that_fails_changes_nothing(path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(_: object) -> NoReturn:
        raise MemoryError

    before = records(path)
    with monkeypatch.context() as patch:
        patch.setattr(file, "merged", fail)
        with pytest.raises(StorageError):
            SqliteEngine(path).open(1)

    assert records(path) == before
    with closing(sqlite3.connect(path)) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (1,)
    SqliteEngine(path).open(1)


def test_what_damage_put_into_several_states_is_in_the_one_that_counted(path: Path):
    with closing(sqlite3.connect(path)) as db:
        [before] = [row for row in records(path) if row[0] == FIRST_ID + 4]
        for number in (2, 4):  # FAILED, claimed
            db.execute("INSERT INTO pending VALUES (?, ?, ?, ?)", (1, 1, 0, FIRST_ID + number))
        db.execute("INSERT INTO ended VALUES (?, 1, 1, 2, 5, 'x:1')", (FIRST_ID + 4,))
        db.commit()
    expected = records(path)
    assert before in expected

    engine = SqliteEngine(path)
    engine.open(1)
    assert engine.check(repair=False) == []
    engine.close()

    assert records(path) == expected


def test_a_file_of_version_2_loses_what_is_written_no_more(path: Path):
    path.unlink()
    engine = SqliteEngine(path)
    engine.open(1)
    engine.create_queue(QUEUE, 1)
    engine.apply(Batch(enqueues=[EnqueueOp(QUEUE, [Job(b"a")])]), 1)
    engine.close()
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE depths (queue, priority, state, jobs)")
        db.execute("INSERT INTO depths VALUES (1, 1, 0, 7)")
        db.execute("CREATE INDEX runs_claimed ON runs (queue, priority) WHERE state = 1")
        db.execute("PRAGMA user_version = 2")
        db.commit()

    engine.open(2)

    assert engine.depths() == {QUEUE: {(1, JobState.PENDING): 1}}
    engine.close()
    with closing(sqlite3.connect(path)) as db:
        left = "SELECT name FROM sqlite_master WHERE name IN ('depths', 'runs_claimed')"
        assert db.execute(left).fetchall() == []
        assert db.execute("PRAGMA user_version").fetchone() == (3,)
