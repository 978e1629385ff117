"""MysqlSearcher: reads of unbounded cost, on a read-only connection in another process.

A search walks a state's jobs in the order of a scan (run-after downwards, then local id upwards),
in pages that are ranges of an index and statements of their own: no lock and no old version of a
row is kept for long, and between pages jobs may come and go. What is in memory is one page without
bodies, and what is returned. The server ends a statement at the search's deadline, and so do we.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from pinlaterd.clock import Clock, SystemClock
from pinlaterd.engines.base import ScanAfter, Search, StoredJob, no_pause
from pinlaterd.engines.mysql.connection import Connection, Server
from pinlaterd.engines.mysql.faults import FAULTS, is_gone, is_timeout, storage_error
from pinlaterd.engines.mysql.literals import database_prefix
from pinlaterd.engines.mysql.statements import WITH_BODY, WITHOUT_BODY, stored_job
from pinlaterd.engines.mysql.tables import Table, tables_of
from pinlaterd.engines.searching import WalkingSearcher, scan_order, too_late
from pinlaterd.errors import QueueNotFound
from pinlaterd.model import JobState

_PAGE_JOBS = 1000
# A page of bodies is read as a whole: between bodies, others have their turns.
_PAGE_BODIES = 50
_LONGEST_SECONDS = 3600.0


class _Place(NamedTuple):
    """How far a walk has come."""

    run_after_ms: int
    local_id: int


class MysqlSearcher(WalkingSearcher):
    """A connection of its own, made when it is first needed, and another one after a fault."""

    def __init__(
        self,
        shard: str,
        server: Server,
        clock: Clock,
        between_slices: Callable[[], None] = no_pause,
    ) -> None:
        super().__init__(clock, between_slices)
        self._prefix = database_prefix(shard)
        self._server = server
        self._db: Connection | None = None
        self._tables: dict[int, Table] = {}  # of the queue of the search that goes on

    def close(self) -> None:
        db, self._db = self._db, None
        if db is not None:
            db.close()

    @contextmanager
    def _guarded(self, search: Search) -> Iterator[None]:
        """TimeoutError once the deadline has passed, within a statement too. A search that ends in
        its midst may leave a page unread: its connection is closed."""
        try:
            yield
        except FAULTS as fault:
            self.close()
            if isinstance(fault, TimeoutError):
                raise
            if is_timeout(fault):
                raise too_late() from fault
            if is_gone(fault):
                raise QueueNotFound(search.queue) from fault
            raise storage_error(fault, str(self._server), undone=True) from fault
        except BaseException:
            self.close()
            raise

    def _begin(self, search: Search) -> None:
        self._tables = tables_of(self._connection(), self._prefix + search.queue)

    def _walks_in_order(self, search: Search) -> bool:
        return True

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

    def _timed(self, search: Search, statement: bytes) -> bytes:
        """A SELECT that the server ends at the deadline."""
        self._check(search)
        seconds = min(max(search.deadline - self._clock.monotonic(), 0.001), _LONGEST_SECONDS)
        db = self._connection()
        db.be_patient(seconds + 1)
        if db.is_mariadb:
            return b"SET STATEMENT max_statement_time = %.3f FOR " % seconds + statement
        hint = b"SELECT /*+ MAX_EXECUTION_TIME(%d) */ " % math.ceil(seconds * 1000)
        return statement.replace(b"SELECT ", hint, 1)

    def _quick_count(self, search: Search, priority: int) -> int | None:
        if priority not in self._tables:
            return 0
        table = self._tables[priority]
        statement = (
            b"SELECT COUNT(*) FROM (SELECT 1 FROM %b%b"
            b" WHERE state = %d AND %b AND %b LIMIT %d) AS jobs"
        ) % (
            table.name,
            table.by_run_after,
            search.state,
            _from(search, table),
            b"run_after <= " + table.run_after.bound(search.run_after_ms[1]),
            search.limit,
        )
        [[jobs]] = self._connection().rows(self._timed(search, statement))
        return int(jobs)

    def _walk(self, search: Search, priority: int) -> Iterator[StoredJob]:
        """In the order of a scan."""
        table = self._tables.get(priority)
        last_ms = search.run_after_ms[1]
        place: _Place | None = _Place(last_ms, 0)
        if search.after is not None and search.after.run_after_ms <= last_ms:
            place = _behind(search.after, priority)
        met: set[int] = set()
        while place is not None and table is not None:
            self._next_slice(search)
            jobs, place = self._page(search, table, place)
            if search.state is JobState.IN_PROGRESS:
                # The only state in which a job's run-after may change while the walk goes on.
                jobs = [job for job in jobs if job.key.local_id not in met]
                met.update(job.key.local_id for job in jobs)
            yield from self._matching(search, jobs)

    def _page(
        self, search: Search, table: Table, place: _Place
    ) -> tuple[list[StoredJob], _Place | None]:
        """The jobs from `place` on, and where the next page begins; None: nothing is left.

        The index runs both columns the same way, so jobs of the run-after at `place` are read
        apart, upwards; of those read downwards the last run-after may be cut short, and is left to
        the next page."""
        most = _PAGE_JOBS if self._matches is None else _PAGE_BODIES
        at = table.run_after.bound(place.run_after_ms)
        equal = self._read(
            search,
            table,
            b"run_after = %b AND local_id > %d ORDER BY local_id LIMIT %d"
            % (at, place.local_id, most),
        )
        if len(equal) == most:
            return equal, _Place(place.run_after_ms, equal[-1].key.local_id)
        room = most - len(equal)
        below = self._read(
            search,
            table,
            b"run_after < %b AND %b ORDER BY run_after DESC, local_id DESC LIMIT %d"
            % (at, _from(search, table), room),
        )
        next_place = None
        if len(below) == room:
            next_place = _Place(below[-1].run_after_ms, 0)
            below = [job for job in below if job.run_after_ms != next_place.run_after_ms]
        return equal + sorted(below, key=scan_order), next_place

    def _read(self, search: Search, table: Table, where: bytes) -> list[StoredJob]:
        columns = WITHOUT_BODY if self._matches is None else WITH_BODY
        statement = b"SELECT %b FROM %b%b WHERE state = %d AND %b" % (
            columns,
            table.name,
            table.by_run_after,
            search.state,
            where,
        )
        rows = self._connection().rows(self._timed(search, statement))
        return [stored_job(table.priority, row) for row in rows]


@dataclass(frozen=True)
class MysqlSearcherFactory:
    """Made in one process, called in another."""

    shard: str
    server: Server

    def __call__(self, between_slices: Callable[[], None] = no_pause) -> MysqlSearcher:
        return MysqlSearcher(self.shard, self.server, SystemClock(), between_slices)


def _from(search: Search, table: Table) -> bytes:
    """The condition for the earliest run-after of a search, which the column may not hold."""
    run_after = table.run_after
    return b"run_after >= " + run_after.bound(search.run_after_ms[0] + run_after.step_ms - 1)


def _behind(after: ScanAfter, priority: int) -> _Place:
    """Where a scan goes on in the table of `priority`."""
    if priority < after.priority:
        return _Place(after.run_after_ms, 2**64 - 1)  # all of that run-after have come
    return _Place(after.run_after_ms, after.local_id if priority == after.priority else 0)
