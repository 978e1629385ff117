"""SqliteSearcher: reads of unbounded cost, on a read-only connection in another process.

A search walks one state's table in slices of keys, and each slice is read within a transaction of
its own: the owner's checkpoints are never held up for long, and between slices jobs may come and
go. What is kept in memory is one slice without bodies and, for a scan, the jobs it returns.

PENDING jobs are walked in the order of a scan, which stops when it has enough. The others are
walked by id or by age, all of them, and a scan keeps the best.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from pinlaterd.clock import Clock, SystemClock
from pinlaterd.engines.base import ScanAfter, Searcher, StoredJob, no_pause
from pinlaterd.engines.body_regex import compile_body_regex
from pinlaterd.engines.scans import (
    behind,
    scan_order,
    take_ordered,
    take_unordered,
    too_late,
)
from pinlaterd.engines.sqlite.faults import FAULTS, reading, storage_error
from pinlaterd.engines.sqlite.records import stored_jobs
from pinlaterd.engines.sqlite.schema import connect_reader
from pinlaterd.engines.sqlite.walks import EARLIEST_MS, LATEST_MS, Place, begin, read_slice
from pinlaterd.model import JobKey, JobState

# Steps of SQLite's virtual machine between looks at the deadline: some 0.1 ms.
_STEPS_PER_LOOK = 10_000
_SLICE_JOBS, _SLICE_BODIES = 1000, 16


class _Wanted(NamedTuple):
    """What a search looks for: jobs of a state with run-after from and to, ends included."""

    queue_id: int
    state: JobState
    run_after_ms: tuple[int, int]
    matches: Callable[[bytes], bool] | None


class SqliteSearcher(Searcher):
    """A connection of its own to the file of a shard, while its owner has it open."""

    def __init__(
        self, path: Path, clock: Clock, between_slices: Callable[[], None] = no_pause
    ) -> None:
        self._between_slices = between_slices
        self.found: list[StoredJob] = []
        self._path = path
        self._clock = clock
        with reading(path):
            self._db = connect_reader(path)

    def close(self) -> None:
        self._db.close()

    def count(
        self,
        queue: str,
        state: JobState,
        priority: int,
        *,
        future: bool,
        now_ms: int,
        limit: int,
        body_regex: str | None,
        deadline: float,
    ) -> int:
        with self._until(deadline):
            wanted = self._wanted(queue, state, _run_after_range(now_ms, future=future), body_regex)
            if wanted is None:
                return 0
            if state is JobState.PENDING and body_regex is None:
                return self._count_pending(wanted, priority, limit)
            return sum(1 for _ in islice(self._walk(wanted, priority, deadline), limit))

    def scan(
        self,
        queue: str,
        state: JobState,
        priorities: Sequence[int],
        *,
        future: bool,
        now_ms: int,
        after: ScanAfter | None,
        limit: int,
        body_regex: str | None,
        deadline: float,
    ) -> Sequence[StoredJob]:
        self.found = []
        from_ms, to_ms = _run_after_range(now_ms, future=future)
        if after is not None:
            to_ms = min(to_ms, after.run_after_ms)
        with self._until(deadline):
            wanted = self._wanted(queue, state, (from_ms, to_ms), body_regex)
            if wanted is None:
                return []
            walks = [
                behind(after, self._walk(wanted, priority, deadline))
                for priority in sorted(set(priorities))
            ]
            take = take_ordered if state is JobState.PENDING else take_unordered
            return take(walks, limit, self.found)

    def find(
        self,
        queue: str,
        state: JobState,
        priority: int,
        *,
        limit: int,
        body_regex: str,
        deadline: float,
    ) -> Sequence[JobKey]:
        with self._until(deadline):
            wanted = self._wanted(queue, state, (EARLIEST_MS, LATEST_MS), body_regex)
            if wanted is None:
                return []
            return [job.key for job in islice(self._walk(wanted, priority, deadline), limit)]

    # --- how a search goes -------------------------------------------------------------------

    @contextmanager
    def _until(self, deadline: float) -> Iterator[None]:
        """Around a search: TimeoutError once the deadline has passed, in SQLite's midst too."""
        self._db.set_progress_handler(lambda: self._clock.monotonic() > deadline, _STEPS_PER_LOOK)
        try:
            self._check(deadline)
            yield
        except TimeoutError:
            raise
        except FAULTS as fault:
            if getattr(fault, "sqlite_errorcode", None) == sqlite3.SQLITE_INTERRUPT:
                raise too_late() from fault
            raise storage_error(fault, self._path, undone=True) from fault
        finally:
            self._db.set_progress_handler(None, 0)

    def _check(self, deadline: float) -> None:
        if self._clock.monotonic() > deadline:
            raise too_late()

    def _wanted(
        self, queue: str, state: JobState, run_after_ms: tuple[int, int], body_regex: str | None
    ) -> _Wanted | None:
        """None if there is no such queue."""
        row = self._db.execute(
            "SELECT id FROM queues WHERE name = ? AND NOT dropped", (queue,)
        ).fetchone()
        if row is None:
            return None
        matches = None if body_regex is None else compile_body_regex(body_regex)
        return _Wanted(row[0], state, run_after_ms, matches)

    def _count_pending(self, wanted: _Wanted, priority: int, limit: int) -> int:
        [jobs] = self._db.execute(
            "SELECT count(*) FROM (SELECT 1 FROM pending WHERE queue = ? AND priority = ?"
            " AND run_after BETWEEN ? AND ? LIMIT ?)",
            (wanted.queue_id, priority, *wanted.run_after_ms, limit),
        ).fetchone()
        return int(jobs)

    def _walk(self, wanted: _Wanted, priority: int, deadline: float) -> Iterator[StoredJob]:
        """All wanted jobs of one priority, without bodies; PENDING ones in the order of a scan."""
        queue_id, state, run_after_ms, _ = wanted
        place: Place | None
        walk, place = begin(self._db, queue_id, state, priority, run_after_ms)
        most = _SLICE_JOBS if wanted.matches is None else _SLICE_BODIES
        while place is not None:
            self._between_slices()
            self._check(deadline)
            with self._snapshot():
                local_ids, place = read_slice(self._db, walk, place, most)
                with_body = wanted.matches is not None
                jobs = list(stored_jobs(self._db, queue_id, local_ids, with_body=with_body))
            yield from sorted(self._matching(wanted, jobs, deadline), key=scan_order)

    @contextmanager
    def _snapshot(self) -> Iterator[None]:
        self._db.execute("BEGIN")
        try:
            yield
        finally:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")

    def _matching(
        self, wanted: _Wanted, jobs: Sequence[StoredJob], deadline: float
    ) -> Iterator[StoredJob]:
        """Those that are wanted, without bodies."""
        (from_ms, to_ms), matches = wanted.run_after_ms, wanted.matches
        for job in jobs:
            if not from_ms <= job.run_after_ms <= to_ms:
                continue
            if matches is None:
                yield job
                continue
            self._between_slices()  # a large body may take as long as a slice
            self._check(deadline)
            if matches(job.body or b""):
                yield job._replace(body=None)


@dataclass(frozen=True)
class SqliteSearcherFactory:
    """Opens the file at `path`, an absolute one: made in one process, called in another."""

    path: Path

    def __call__(self, between_slices: Callable[[], None] = no_pause) -> SqliteSearcher:
        return SqliteSearcher(self.path, SystemClock(), between_slices)


def _run_after_range(now_ms: int, *, future: bool) -> tuple[int, int]:
    return (now_ms + 1, LATEST_MS) if future else (EARLIEST_MS, now_ms)
