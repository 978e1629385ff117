"""What is SQLite's own about searches: deadlines within a statement, snapshots, read-only."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from pinlaterd import engines
from pinlaterd.engines.base import Checkpoint, Search
from pinlaterd.engines.sqlite import searcher as searching
from pinlaterd.engines.sqlite.searcher import SqliteSearcher
from pinlaterd.model import Job, JobChoice, JobState
from tests.clocks import FakeClock
from tests.conformance.engine.harness import QUEUE, EngineHarness


class TickingClock(FakeClock):
    """A second passes whenever somebody looks."""

    looks = 0

    def monotonic(self) -> float:
        self.looks += 1
        self.advance(1)
        return super().monotonic()


@pytest.fixture
def ticking() -> TickingClock:
    return TickingClock()


@pytest.fixture
def searcher(store: EngineHarness, path: Path, ticking: TickingClock) -> Iterator[SqliteSearcher]:
    store.enqueue(*[Job(b"body", run_after_ms=n) for n in range(20_000)])
    opened = SqliteSearcher(path, clock=ticking)
    yield opened
    opened.close()


WANTED = Search(QUEUE, JobState.PENDING)
OF_EMPTY_STATUS = WANTED._replace(choice=JobChoice(status_regex="^$"))


@pytest.mark.parametrize("wanted", [WANTED, WANTED._replace(body_regex="body"), OF_EMPTY_STATUS])
def test_a_search_ends_in_its_midst(
    searcher: SqliteSearcher, ticking: TickingClock, wanted: Search
):
    with pytest.raises(TimeoutError):
        searcher.count(wanted._replace(deadline=ticking.monotonic() + 3))

    assert ticking.looks < 10
    assert searcher.count(wanted._replace(deadline=float("inf"))) == 20_000


def test_jobs_are_chosen_by_status_with_others_in_between(store: EngineHarness, path: Path):
    store.enqueue(*[b"job"] * 10)
    looks = list[int]()
    opened = SqliteSearcher(path, lambda: looks.append(opened.looked_at))

    opened.count(OF_EMPTY_STATUS)
    opened.close()

    assert set(range(10)) <= set(looks), "before each job, as its status may be long"


def test_a_search_holds_no_snapshot_between_slices(
    store: EngineHarness, searcher: SqliteSearcher, stranger: sqlite3.Connection
):
    wanted = Search(QUEUE, JobState.PENDING)
    searcher._begin(wanted)
    walk = searcher._walk(wanted, 1)
    next(walk)

    store.enqueue(*[b"x" * 1_000] * 1_000)
    busy, in_log, moved = stranger.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()

    assert (busy, in_log, moved) == (0, 0, 0)
    assert sum(1 for _ in walk) >= 19_999


@pytest.mark.parametrize("state", list(JobState))
def test_a_walk_meets_no_job_twice_and_none_that_has_gone(
    store: EngineHarness, path: Path, state: JobState
):
    jobs = [Job(b"x", attempts_allowed=1)] * 2_500
    keys = store.enqueue(*jobs)
    if state is not JobState.PENDING:
        store.claim(limit=len(jobs))
    if state in (JobState.SUCCEEDED, JobState.FAILED):
        (store.succeed if state is JobState.SUCCEEDED else store.fail)(*keys)
    searcher = SqliteSearcher(path, clock=FakeClock())
    wanted = Search(QUEUE, state)
    searcher._begin(wanted)
    walk = searcher._walk(wanted, 1)

    met = [next(walk).key]
    store.clock.advance(1)
    store.checkpoint(Checkpoint(keys[0], None), Checkpoint(keys[2_000], None))  # claims are renewed
    store.engine.delete_found(QUEUE, state, [keys[2_200]])
    met += [job.key for job in walk]

    assert sorted(met) == [key for key in keys if key != keys[2_200]]
    searcher.close()


def test_a_searcher_cannot_write(searcher: SqliteSearcher):
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        searcher._db.execute("DELETE FROM jobs")


def test_claims_that_are_renewed_together_while_a_walk_goes_on_are_all_met(
    store: EngineHarness, path: Path, monkeypatch: pytest.MonkeyPatch
):
    """They are in one run then, which began where the walk has been."""
    monkeypatch.setattr(searching, "_RUNS_A_READ", 1)
    monkeypatch.setattr(engines.searching, "_SLICE_JOBS", 2)
    keys = store.enqueue(b"a", b"b", b"c", b"d")
    for _ in range(2):
        store.claim(limit=2)
        store.clock.advance(1)
    searcher = SqliteSearcher(path, clock=FakeClock())
    wanted = Search(QUEUE, JobState.IN_PROGRESS)
    searcher._begin(wanted)
    walk = searcher._walk(wanted, 1)
    met = [next(walk).key]

    assert store.checkpoint(*[Checkpoint(key, None) for key in keys]).done == 4

    assert met + [job.key for job in walk] == keys
    searcher.close()
