"""What is SQLite's own about searches: deadlines within a statement, snapshots, read-only."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from pinlaterd.clock import FakeClock
from pinlaterd.engines.base import Search
from pinlaterd.engines.sqlite.searcher import SqliteSearcher
from pinlaterd.model import Job, JobState
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
    opened = SqliteSearcher(path, ticking)
    yield opened
    opened.close()


def _count(searcher: SqliteSearcher, deadline: float, regex: str | None = None) -> int:
    return searcher.count(Search(QUEUE, JobState.PENDING, body_regex=regex, deadline=deadline))


@pytest.mark.parametrize("regex", [None, "body"])
def test_a_search_ends_in_its_midst(
    searcher: SqliteSearcher, ticking: TickingClock, regex: str | None
):
    with pytest.raises(TimeoutError):
        _count(searcher, deadline=ticking.monotonic() + 3, regex=regex)

    assert ticking.looks < 10
    assert _count(searcher, deadline=float("inf"), regex=regex) == 20_000


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


def test_a_searcher_cannot_write(searcher: SqliteSearcher):
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        searcher._db.execute("DELETE FROM jobs")
