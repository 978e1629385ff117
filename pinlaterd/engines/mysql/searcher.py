"""MysqlSearcher: reads of unbounded cost, on a read-only connection in another process.

A search walks a state's jobs in the order of a scan (run-after downwards, then local id upwards),
in pages that are ranges of an index and statements of their own: no lock and no old version of a
row is kept for long, and between pages jobs may come and go. What is in memory is one page without
bodies, and what is returned. The server ends a statement at the search's deadline, and so do we.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, TypeVar

from pinlaterd.clock import Clock, SystemClock
from pinlaterd.engines.base import ScanAfter, Searcher, StoredJob, no_pause
from pinlaterd.engines.body_regex import compile_body_regex
from pinlaterd.engines.mysql.connection import Connection, Server
from pinlaterd.engines.mysql.faults import FAULTS, is_gone, is_timeout, storage_error
from pinlaterd.engines.mysql.limits import database_prefix
from pinlaterd.engines.mysql.literals import EARLIEST_MS, LATEST_MS
from pinlaterd.engines.mysql.records import WITH_BODY, WITHOUT_BODY, stored_job
from pinlaterd.engines.mysql.tables import Table, tables_of
from pinlaterd.engines.scans import scan_order, take_ordered, too_late
from pinlaterd.model import JobKey, JobState

T = TypeVar("T")

_PAGE_JOBS = 1000
# A page of bodies is read as a whole: between bodies, others have their turns.
_PAGE_BODIES = 50
_LONGEST_SECONDS = 3600.0


class _Wanted(NamedTuple):
    """What a search looks for: jobs of a state with run-after from and to, ends included."""

    table: Table
    state: JobState
    from_ms: int
    to_ms: int
    matches: Callable[[bytes], bool] | None


class _Place(NamedTuple):
    """How far a walk has come."""

    run_after_ms: int
    local_id: int


class MysqlSearcher(Searcher):
    """A connection of its own, made when it is first needed, and anew after a fault."""

    def __init__(
        self,
        shard: str,
        server: Server,
        clock: Clock,
        between_slices: Callable[[], None] = no_pause,
    ) -> None:
        self._between_slices = between_slices
        self.found: list[StoredJob] = []
        self._prefix = database_prefix(shard)
        self._server = server
        self._clock = clock
        self._db: Connection | None = None

    def close(self) -> None:
        db, self._db = self._db, None
        if db is not None:
            db.close()

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
        def search() -> int:
            range_ms = _run_after_range(now_ms, future=future)
            total = 0
            for wanted in self._wanted(queue, state, [priority], range_ms, body_regex):
                if wanted.matches is None:
                    total += self._count(wanted, limit, deadline)
                else:
                    total += sum(1 for _ in islice(self._walk(wanted, None, deadline), limit))
            return total

        return self._until(deadline, search, nothing=0)

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

        def search() -> Sequence[StoredJob]:
            range_ms = _run_after_range(now_ms, future=future)
            several = sorted(set(priorities))
            walks = [
                self._walk(wanted, after, deadline)
                for wanted in self._wanted(queue, state, several, range_ms, body_regex)
            ]
            return take_ordered(walks, limit, self.found)

        return self._until(deadline, search, nothing=())

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
        def search() -> Sequence[JobKey]:
            return [
                job.key
                for wanted in self._wanted(
                    queue, state, [priority], (EARLIEST_MS, LATEST_MS), body_regex
                )
                for job in islice(self._walk(wanted, None, deadline), limit)
            ]

        return self._until(deadline, search, nothing=())

    # --- how a search goes -------------------------------------------------------------------

    def _until(self, deadline: float, search: Callable[[], T], *, nothing: T) -> T:
        """Around a search: TimeoutError once the deadline has passed, in the server's midst too.

        `nothing` is found in a queue that is dropped meanwhile."""
        self._check(deadline)
        try:
            return search()
        except TimeoutError:
            self.close()  # it may be within a page
            raise
        except FAULTS as fault:
            self.close()
            if is_timeout(fault):
                raise too_late() from fault
            if is_gone(fault):
                return nothing
            raise storage_error(fault, str(self._server), undone=True) from fault
        except BaseException:
            self.close()
            raise

    def _check(self, deadline: float) -> None:
        if self._clock.monotonic() > deadline:
            raise too_late()

    def _connection(self) -> Connection:
        if self._db is None:
            # One search that waits for a lock would hold up the others.
            self._db = Connection(
                self._server,
                patience_seconds=_LONGEST_SECONDS,
                read_only=True,
                waits_for_locks=False,
            )
        return self._db

    def _wanted(
        self,
        queue: str,
        state: JobState,
        priorities: Sequence[int],
        run_after_ms: tuple[int, int],
        body_regex: str | None,
    ) -> list[_Wanted]:
        """One for each priority that there is."""
        matches = None if body_regex is None else compile_body_regex(body_regex)
        tables = tables_of(self._connection(), self._prefix + queue)
        return [
            _Wanted(tables[priority], state, *run_after_ms, matches)
            for priority in priorities
            if priority in tables
        ]

    def _timed(self, statement: bytes, deadline: float) -> bytes:
        """A SELECT that the server ends at the deadline."""
        self._check(deadline)
        seconds = min(max(deadline - self._clock.monotonic(), 0.001), _LONGEST_SECONDS)
        db = self._connection()
        db.be_patient(seconds + 1)
        if db.is_mariadb:
            return b"SET STATEMENT max_statement_time = %.3f FOR " % seconds + statement
        hint = b"SELECT /*+ MAX_EXECUTION_TIME(%d) */ " % math.ceil(seconds * 1000)
        return statement.replace(b"SELECT ", hint, 1)

    def _count(self, wanted: _Wanted, limit: int, deadline: float) -> int:
        run_after = wanted.table.run_after
        statement = (
            b"SELECT COUNT(*) FROM (SELECT 1 FROM %b%b WHERE state = %d AND run_after >= %b"
            b" AND run_after <= %b LIMIT %d) AS jobs"
            % (
                wanted.table.name,
                wanted.table.by_run_after,
                wanted.state,
                run_after.bound(wanted.from_ms + run_after.step_ms - 1),
                run_after.bound(wanted.to_ms),
                limit,
            )
        )
        [[jobs]] = self._connection().rows(self._timed(statement, deadline))
        return int(jobs)

    def _walk(
        self, wanted: _Wanted, after: ScanAfter | None, deadline: float
    ) -> Iterator[StoredJob]:
        """All wanted jobs of one priority, without bodies, in the order of a scan; behind `after`
        if it is given."""
        place: _Place | None = _Place(wanted.to_ms, 0)
        if after is not None and after.run_after_ms <= wanted.to_ms:
            place = _Place(*_behind(after, wanted.table.priority))
        met: set[int] = set()
        while place is not None:
            self._between_slices()
            jobs, place = self._page(wanted, place, deadline)
            if wanted.state is JobState.IN_PROGRESS:
                # The only state in which a job's run-after may change while the walk goes on.
                jobs = [job for job in jobs if job.key.local_id not in met]
                met.update(job.key.local_id for job in jobs)
            yield from jobs

    def _page(
        self, wanted: _Wanted, place: _Place, deadline: float
    ) -> tuple[list[StoredJob], _Place | None]:
        """The wanted jobs from `place` on, and where the next page begins; None: nothing is left.

        The index runs both columns the same way, so jobs of the run-after at `place` are read
        apart, upwards; of those read downwards the last run-after may be cut short, and is left to
        the next page."""
        most = _PAGE_JOBS if wanted.matches is None else _PAGE_BODIES
        run_after = wanted.table.run_after
        at = run_after.bound(place.run_after_ms)
        equal, keys = self._read(
            wanted,
            b"run_after = %b AND local_id > %d ORDER BY local_id LIMIT %d"
            % (at, place.local_id, most),
            deadline,
        )
        if len(keys) == most:
            return equal, _Place(place.run_after_ms, keys[-1].local_id)
        room = most - len(keys)
        earliest = run_after.bound(wanted.from_ms + run_after.step_ms - 1)
        below, keys = self._read(
            wanted,
            b"run_after < %b AND run_after >= %b ORDER BY run_after DESC, local_id DESC LIMIT %d"
            % (at, earliest, room),
            deadline,
        )
        next_place = None
        if len(keys) == room:
            next_place = _Place(keys[-1].run_after_ms, 0)
            below = [job for job in below if job.run_after_ms != next_place.run_after_ms]
        return equal + sorted(below, key=scan_order), next_place

    def _read(
        self, wanted: _Wanted, where: bytes, deadline: float
    ) -> tuple[list[StoredJob], list[_Place]]:
        """Those that match, without bodies, and the places of all."""
        table, matches = wanted.table, wanted.matches
        columns = WITHOUT_BODY if matches is None else WITH_BODY
        statement = b"SELECT %b FROM %b%b WHERE state = %d AND " % (
            columns,
            table.name,
            table.by_run_after,
            wanted.state,
        )
        found: list[StoredJob] = []
        places: list[_Place] = []
        for row in self._connection().rows(self._timed(statement + where, deadline)):
            job = stored_job(table.priority, row)
            places.append(_Place(job.run_after_ms, job.key.local_id))
            if matches is None:
                found.append(job)
                continue
            self._between_slices()  # a large body may take as long as a slice
            self._check(deadline)
            if matches(job.body or b""):
                found.append(job._replace(body=None))
        return found, places


@dataclass(frozen=True)
class MysqlSearcherFactory:
    """Made in one process, called in another."""

    shard: str
    server: Server

    def __call__(self, between_slices: Callable[[], None] = no_pause) -> MysqlSearcher:
        return MysqlSearcher(self.shard, self.server, SystemClock(), between_slices)


def _run_after_range(now_ms: int, *, future: bool) -> tuple[int, int]:
    return (now_ms + 1, LATEST_MS) if future else (EARLIEST_MS, now_ms)


def _behind(after: ScanAfter, priority: int) -> tuple[int, int]:
    """Where a scan goes on in the table of `priority`: what comes behind this run-after and id."""
    if priority < after.priority:
        return after.run_after_ms, 2**64 - 1  # all of that run-after have come
    return after.run_after_ms, after.local_id if priority == after.priority else 0
