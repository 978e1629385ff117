"""SqliteSearcher: reads of unbounded cost, on a read-only connection in another process.

A search walks over the runs of one state by an index, and reads their jobs in slices, each by one
statement: the owner's checkpoints are never held up for long. Between them jobs may come and go, so
those of a slice are compared with what their run said of them. What is kept in memory is some runs,
one slice without bodies and, for a scan, the jobs it returns.

PENDING jobs are walked in the order of a scan (run-after downwards, then local id upwards), which
stops when it has enough; so are those that have ended, in the order of their ends. Otherwise they
are walked by the time that counts in their state, all of them, and a scan keeps the best. A
checkpoint moves a job to the end of those IN_PROGRESS, so the ids of that walk are kept, too.
"""

from __future__ import annotations

import logging
import sqlite3
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from pinlaterd.clock import Clock
from pinlaterd.engines.base import EARLIEST_MS, LATEST_MS, Search, StoredJob, no_pause
from pinlaterd.engines.searching import WalkingSearcher, too_late
from pinlaterd.engines.sqlite.file import (
    FAULTS,
    connect_reader,
    id_list,
    reading,
    storage_error,
)
from pinlaterd.engines.sqlite.keys import SCOPE_OF_ALL
from pinlaterd.engines.sqlite.options import has_options
from pinlaterd.errors import QueueNotFound
from pinlaterd.model import JobKey, JobOptions, JobState

log = logging.getLogger(__name__)

# Steps of SQLite's virtual machine between looks at the deadline: some 0.1 ms.
_STEPS_PER_LOOK = 10_000
_RUNS_A_READ = 500

_SOUND, _SOUND_TIMES = struct.Struct(">bii").pack, struct.Struct(">6q").pack  # as in an answer
_OPTIONS = (
    "options.end_reason,"
    f" options.key, options.expires_at, options.scope = {SCOPE_OF_ALL},"
    " options.run_after_us, options.expires_at_us"
)
_JOIN_OPTIONS = " LEFT JOIN options ON options.local_id = job.local_id"


_USUAL = JobOptions()


def _select(body: str, options: str, join: str) -> str:
    return (
        "SELECT job.priority, job.local_id, job.state, job.attempts_allowed,"  # noqa: S608
        " job.attempts_remaining, job.custom_status, job.created_at, job.run_after, job.updated_at,"
        f" job.claim_descriptor, {body}, {options} FROM job_records AS job{join}"
        " WHERE job.local_id IN (SELECT value FROM json_each(?)) AND job.queue = ?"
    )


# By whether bodies and options are read.
_SELECTS = {
    (with_body, with_options): _select(
        "job.body" if with_body else "NULL",
        *((_OPTIONS, _JOIN_OPTIONS) if with_options else ("NULL, NULL, NULL, 0, NULL, NULL", "")),
    )
    for with_body in (False, True)
    for with_options in (False, True)
}


def stored_jobs(
    db: sqlite3.Connection,
    queue_id: int,
    local_ids: Iterable[int],
    *,
    with_body: bool,
    with_options: bool,
) -> Iterator[StoredJob]:
    """Yield a queue's jobs of these ids, in no order, but for those that hold what no job has.
    `with_options`: if it may have jobs with options."""
    rows = db.execute(_SELECTS[with_body, with_options], (id_list(local_ids), queue_id))
    for priority, local_id, state, *rest in rows:
        *fields, end_reason, key, expires_at_ms, of_all, run_after_us, expires_at_us = rest
        try:
            job = StoredJob(JobKey(priority, local_id), JobState(state), *fields)
            options = JobOptions(key, expires_at_ms, bool(of_all), run_after_us, expires_at_us)
            if options != _USUAL:
                job = job._replace(options=options, end_reason=end_reason)
            _SOUND(priority, job.attempts_allowed, job.attempts_remaining)
            times = [expires_at_ms or 0, run_after_us or 0, expires_at_us or 0]
            _SOUND_TIMES(job.created_at_ms, job.run_after_ms, job.updated_at_ms, *times)
            texts = job.custom_status, job.claim_descriptor or "", key or "", job.end_reason or ""
            if {*map(type, texts)} != {str} or type(job.body or b"") is not bytes:
                raise ValueError(texts)
        except (struct.error, ValueError):
            log.error("job %d holds values that no job has; it is not shown", local_id)
        else:
            yield job


class SqliteSearcher(WalkingSearcher):
    """A connection of its own to the file of a shard, while its owner has it open."""

    def __init__(
        self,
        path: Path,
        between_slices: Callable[[], None] = no_pause,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(between_slices, clock)
        self._path = path
        self._queue_id = 0  # of the search that goes on
        self._with_options = False  # whether that queue may have some
        with reading(path):
            self._db = connect_reader(path)

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def _guarded(self, search: Search) -> Iterator[None]:
        """Raise TimeoutError once the deadline has passed, within a statement too."""
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
        self._with_options = has_options(self._db)

    def _walks_in_order(self, search: Search) -> bool:
        return search.state is JobState.PENDING or search.newest_end_first

    def _quick_count(self, search: Search, priority: int) -> int | None:
        if search.state is not JobState.PENDING:
            return None
        [jobs] = self._db.execute(
            "SELECT coalesce(sum(jobs), 0) FROM (SELECT last_id - first_id + 1 AS jobs FROM runs"
            " WHERE queue = ? AND state = 0 AND priority = ? AND at BETWEEN ? AND ? LIMIT ?)",
            (self._queue_id, priority, *search.times_ms, search.limit),
        ).fetchone()
        return int(jobs)

    def _walk(self, search: Search, priority: int) -> Iterator[StoredJob]:
        running = search.state is JobState.IN_PROGRESS
        walk = self._latest_first if self._walks_in_order(search) else self._by_end
        runs = walk(search, priority)
        with_body, met = self._matches is not None, set[int]()
        keys = ((local_id, run[0]) for run in runs for local_id in range(run[1], run[2] + 1))
        for part in self._slices(search, keys):
            times = dict(part)
            jobs = [
                job
                for job in stored_jobs(
                    self._db,
                    self._queue_id,
                    times,
                    with_body=with_body,
                    with_options=self._with_options,
                )
                if job.state is search.state
                and (
                    job.key.local_id not in met if running else times[job.key.local_id] == _at(job)
                )
            ]
            if running:
                met.update(job.key.local_id for job in jobs)
            yield from sorted(jobs, key=search.order_of)

    # --- runs: `at`, and ids from and to ---------------------------------------------------------

    def _latest_first(self, search: Search, priority: int) -> Iterator[_Run]:
        """Yield runs by time downwards. The index runs upwards by local id; of the runs read
        downwards those of the last time may be cut short."""
        which = (self._queue_id, int(search.state), priority)
        from_ms, to_ms = search.times_ms
        while from_ms <= to_ms:
            rows = self._db.execute(
                "SELECT at, first_id, last_id FROM runs WHERE queue = ? AND state = ?"
                " AND priority = ? AND at BETWEEN ? AND ? ORDER BY at DESC, last_id DESC LIMIT ?",
                (*which, from_ms, to_ms, _RUNS_A_READ),
            ).fetchall()
            if not rows:
                return
            last_ms = rows[-1][0]
            for at_ms, alike in groupby(rows, itemgetter(0)):
                if at_ms != last_ms:
                    yield from reversed(list(alike))
            yield from self._by_age(which, last_ms, last_ms)
            to_ms = last_ms - 1

    def _by_end(self, search: Search, priority: int) -> Iterator[_Run]:
        """Yield runs that ended before the walk began, not what is retried and ends again."""
        which = (self._queue_id, int(search.state), priority)
        if search.state is JobState.IN_PROGRESS:
            return self._by_age(which, EARLIEST_MS, LATEST_MS)
        [newest_ms] = self._db.execute(
            "SELECT max(at) FROM runs WHERE queue = ? AND state = ? AND priority = ?", which
        ).fetchone()
        return self._by_age(which, EARLIEST_MS, EARLIEST_MS if newest_ms is None else newest_ms)

    def _by_age(self, which: tuple[int, int, int], from_ms: int, to_ms: int) -> Iterator[_Run]:
        """Yield runs by time upwards, both times included."""
        place = (from_ms, EARLIEST_MS)
        while True:
            rows = self._db.execute(
                "SELECT at, first_id, last_id FROM runs WHERE queue = ? AND state = ?"
                " AND priority = ? AND (at, last_id) > (?, ?) AND at <= ?"
                " ORDER BY at, last_id LIMIT ?",
                (*which, *place, to_ms, _RUNS_A_READ),
            ).fetchall()
            if not rows:
                return
            yield from rows
            place = (rows[-1][0], rows[-1][2])


_Run = tuple[int, int, int]


def _at(job: StoredJob) -> int:
    return job.run_after_ms if job.state is JobState.PENDING else job.updated_at_ms
