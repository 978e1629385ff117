"""SqliteSearcher: reads of unbounded cost, on a read-only connection in another process.

A search walks one state's table in slices of keys, by an index, and each slice is read within a
transaction of its own: the owner's checkpoints are never held up for long, and between slices jobs
may come and go. What is kept in memory is one slice without bodies and, for a scan, the jobs it
returns.

PENDING jobs are walked in the order of a scan (run-after downwards, then local id upwards), which
stops when it has enough. IN_PROGRESS ones are walked by local id, ended ones by the time of their
end, all of them: no job is met twice, wherever it goes meanwhile. A scan keeps the best.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pinlaterd.clock import Clock, SystemClock
from pinlaterd.engines.base import EARLIEST_MS, Search, StoredJob, no_pause
from pinlaterd.engines.searching import WalkingSearcher, scan_order, too_late
from pinlaterd.engines.sqlite.file import (
    FAULTS,
    connect_reader,
    id_list,
    reading,
    storage_error,
)
from pinlaterd.errors import QueueNotFound
from pinlaterd.model import JobKey, JobState

# Steps of SQLite's virtual machine between looks at the deadline: some 0.1 ms.
_STEPS_PER_LOOK = 10_000
_SLICE_JOBS, _SLICE_BODIES = 1000, 16


_WITHOUT_BODY = (
    "SELECT priority, local_id, state, attempts_allowed, attempts_remaining, custom_status,"
    " created_at, run_after, updated_at, claim_descriptor, NULL"
    " FROM job_records WHERE local_id IN (SELECT value FROM json_each(?)) AND queue = ?"
)
_WITH_BODY = _WITHOUT_BODY.replace("NULL", "body")


def stored_jobs(
    db: sqlite3.Connection, queue_id: int, local_ids: Iterable[int], *, with_body: bool
) -> Iterator[StoredJob]:
    """A queue's jobs of these ids, in no order, read one at a time."""
    statement = _WITH_BODY if with_body else _WITHOUT_BODY
    rows = db.execute(statement, (id_list(local_ids), queue_id))
    for priority, local_id, state, *rest in rows:
        yield StoredJob(JobKey(priority, local_id), JobState(state), *rest)


class SqliteSearcher(WalkingSearcher):
    """A connection of its own to the file of a shard, while its owner has it open."""

    def __init__(
        self, path: Path, clock: Clock, between_slices: Callable[[], None] = no_pause
    ) -> None:
        super().__init__(clock, between_slices)
        self._path = path
        self._queue_id = 0  # of the search that goes on
        with reading(path):
            self._db = connect_reader(path)

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def _guarded(self, search: Search) -> Iterator[None]:
        """TimeoutError once the deadline has passed, within a statement too."""
        self._db.set_progress_handler(
            lambda: self._clock.monotonic() > search.deadline, _STEPS_PER_LOOK
        )
        try:
            yield
        except TimeoutError:
            raise
        except FAULTS as fault:
            if getattr(fault, "sqlite_errorcode", None) == sqlite3.SQLITE_INTERRUPT:
                raise too_late() from fault
            raise storage_error(fault, self._path, undone=True) from fault
        finally:
            self._db.set_progress_handler(None, 0)

    def _begin(self, search: Search) -> None:
        row = self._db.execute(
            "SELECT id FROM queues WHERE name = ? AND NOT dropped", (search.queue,)
        ).fetchone()
        if row is None:
            raise QueueNotFound(search.queue)
        self._queue_id = row[0]

    def _walks_in_order(self, search: Search) -> bool:
        return search.state is JobState.PENDING

    def _quick_count(self, search: Search, priority: int) -> int | None:
        if search.state is not JobState.PENDING:
            return None
        [jobs] = self._db.execute(
            "SELECT count(*) FROM (SELECT 1 FROM pending WHERE queue = ? AND priority = ?"
            " AND run_after BETWEEN ? AND ? LIMIT ?)",
            (self._queue_id, priority, *search.run_after_ms, search.limit),
        ).fetchone()
        return int(jobs)

    def _walk(self, search: Search, priority: int) -> Iterator[StoredJob]:
        slices = {
            JobState.PENDING: self._pending,
            JobState.IN_PROGRESS: self._claimed,
        }.get(search.state, self._ended)(search, priority)
        with_body = self._matches is not None
        while True:
            self._next_slice(search)
            with self._snapshot():
                local_ids = next(slices, None)
                if local_ids is None:
                    return
                jobs = list(stored_jobs(self._db, self._queue_id, local_ids, with_body=with_body))
            yield from sorted(self._matching(search, jobs), key=scan_order)

    @contextmanager
    def _snapshot(self) -> Iterator[None]:
        self._db.execute("BEGIN")
        try:
            yield
        finally:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")

    # --- ids, slice by slice -----------------------------------------------------------------

    @property
    def _most(self) -> int:
        return _SLICE_JOBS if self._matches is None else _SLICE_BODIES

    def _ids(self, statement: str, *values: int) -> list[int]:
        return [local_id for (local_id,) in self._db.execute(statement, values)]

    def _pending(self, search: Search, priority: int) -> Iterator[Sequence[int]]:
        """The index runs both columns the same way, so jobs of the run-after `at_ms` are read
        apart, upwards; of those read downwards the last run-after may be cut short, and is left to
        the next slice."""
        which = (self._queue_id, priority)
        from_ms, at_ms = search.run_after_ms
        behind_id = 0
        while True:
            ids = self._ids(
                "SELECT local_id FROM pending WHERE queue = ? AND priority = ?"
                " AND run_after = ? AND local_id > ? ORDER BY local_id LIMIT ?",
                *(*which, at_ms, behind_id, self._most),
            )
            if len(ids) == self._most:
                yield ids
                behind_id = ids[-1]
                continue
            room = self._most - len(ids)
            below = self._db.execute(
                "SELECT run_after, local_id FROM pending WHERE queue = ? AND priority = ?"
                " AND run_after < ? AND run_after >= ? ORDER BY run_after DESC, local_id DESC"
                " LIMIT ?",
                (*which, at_ms, from_ms, room),
            ).fetchall()
            if len(below) < room:
                yield ids + [local_id for _, local_id in below]
                return
            at_ms, behind_id = below[-1][0], 0
            yield ids + [local_id for run_after_ms, local_id in below if run_after_ms != at_ms]

    def _claimed(self, search: Search, priority: int) -> Iterator[Sequence[int]]:
        behind_id = EARLIEST_MS
        while True:
            ids = self._ids(
                "SELECT local_id FROM claims"
                " WHERE local_id > ? AND +queue = ? AND +priority = ? ORDER BY local_id LIMIT ?",
                *(behind_id, self._queue_id, priority, self._most),
            )
            yield ids
            if len(ids) < self._most:
                return
            behind_id = ids[-1]

    def _ended(self, search: Search, priority: int) -> Iterator[Sequence[int]]:
        """Those that ended before the walk began, not what is retried and ends again."""
        which = (self._queue_id, int(search.state), priority)
        [newest_ms] = self._db.execute(
            "SELECT max(ended_at) FROM ended WHERE queue = ? AND state = ? AND priority = ?", which
        ).fetchone()
        place = (EARLIEST_MS, 0)
        while newest_ms is not None:
            rows = self._db.execute(
                "SELECT ended_at, local_id FROM ended INDEXED BY ended_by_age"
                " WHERE queue = ? AND state = ? AND priority = ?"
                " AND (ended_at, local_id) > (?, ?) AND ended_at <= ?"
                " ORDER BY ended_at, local_id LIMIT ?",
                (*which, *place, newest_ms, self._most),
            ).fetchall()
            if not rows:
                return
            yield [local_id for _, local_id in rows]
            place = rows[-1]


@dataclass(frozen=True)
class SqliteSearcherFactory:
    """Opens the file at `path`, an absolute one: made in one process, called in another."""

    path: Path

    def __call__(self, between_slices: Callable[[], None] = no_pause) -> SqliteSearcher:
        return SqliteSearcher(self.path, SystemClock(), between_slices)
