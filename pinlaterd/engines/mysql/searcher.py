"""MysqlSearcher: reads of unbounded cost, on a read-only connection in another process.

A search walks a state's jobs in the order of a scan (run-after, or the time of the end, downwards,
then local id upwards), in pages of keys, which an index holds; the server sorts them where it holds
them in another order (jobs.sql). No lock and no old version of a row is kept for long, and between
statements jobs may come and go. What is in memory is one page of keys, and what is returned. The
server ends a statement at the search's deadline, and so do we.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from pinlaterd.engines.base import ScanAfter, Search, StoredJob, no_pause
from pinlaterd.engines.mysql.connection import (
    FAULTS,
    MysqlAddress,
    MysqlConnection,
    is_gone,
    is_timeout,
    storage_error,
)
from pinlaterd.engines.mysql.statements import in_ms, select, stored_job, whole_job
from pinlaterd.engines.mysql.tables import Order, Table, TimeColumn, database_prefix, tables_of
from pinlaterd.engines.searching import WalkingSearcher, too_late
from pinlaterd.errors import QueueNotFound
from pinlaterd.model import JobState, PendingKey

# Of a page: some 0.5 ms of a searcher.
_KEYS = 100
# Where no index has a state's jobs in order the server sorts them for each page, so pages grow: by
# run-after a new table has one for pending jobs only.
_SORTED_KEYS, _MOST_SORTED_KEYS = 5_000, 80_000
_LONGEST_SECONDS = 3600.0


class MysqlSearcher(WalkingSearcher):
    """A connection of its own, made when it is first needed, and another one after a fault."""

    def __init__(
        self, shard: str, server: MysqlAddress, between_slices: Callable[[], None] = no_pause
    ) -> None:
        super().__init__(between_slices)
        self._prefix = database_prefix(shard)
        self._server = server
        self._db: MysqlConnection | None = None
        self._tables: dict[int, Table] = {}  # of the queue of the search that goes on

    def close(self) -> None:
        db, self._db = self._db, None
        if db is not None:
            db.close()

    @contextmanager
    def _guarded(self, search: Search) -> Iterator[None]:
        """Raise TimeoutError once the deadline has passed, within a statement too. A search that
        ends in its midst may leave a page unread: its connection is closed."""
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

    def _connection(self) -> MysqlConnection:
        if self._db is None:
            # One search that waits for a lock would hold up the others.
            self._db = MysqlConnection(
                self._server,
                patience_seconds=_LONGEST_SECONDS,
                read_only=True,
                waits_for_locks=False,
            )
        return self._db

    def _timed(self, search: Search, statement: bytes) -> bytes:
        """Write a SELECT that the server ends at the deadline."""
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
        at, bound = _order(table, search).column, _times(table, search).bound
        last = b"%b <= %b" % (at, bound(search.times_ms[1]))
        jobs = self._found(search, table, b"1", b"%b AND %b" % (_from(search, table), last))
        [[count]] = self._connection().rows(
            self._timed(
                search, b"SELECT COUNT(*) FROM (%b LIMIT %d) AS jobs" % (jobs, search.limit)
            )
        )
        return int(count)

    def _walk(self, search: Search, priority: int) -> Iterator[StoredJob]:
        """Yield jobs in the order of a scan."""
        table = self._tables.get(priority)
        last_ms = search.times_ms[1]
        place: PendingKey | None = PendingKey(last_ms, 0)
        if search.after is not None and search.after.time_ms <= last_ms:
            place = _behind(search.after, priority)
        met: set[int] = set()
        sorts = table is not None and not _order(table, search).forced
        most = _SORTED_KEYS if sorts else _KEYS
        while place is not None and table is not None:
            self._next_slice(search)
            keys, place = self._page(search, table, place, most)
            if sorts:
                most = min(2 * most, _MOST_SORTED_KEYS)
            if search.state is JobState.IN_PROGRESS:
                # The only state in which a job's run-after may change while the walk goes on.
                keys = [key for key in keys if key.local_id not in met]
                met.update(key.local_id for key in keys)
            columns = whole_job(table, with_body=self._matches is not None)
            for part in self._slices(search, keys):
                yield from self._read(search, table, columns, part)

    def _page(
        self, search: Search, table: Table, place: PendingKey, most: int
    ) -> tuple[list[PendingKey], PendingKey | None]:
        """Return `most` jobs from `place` on, or fewer, and where the next page begins, or None.

        The index runs both columns the same way, so jobs of the run-after at `place` are read
        apart, upwards; of those read downwards the last run-after may be cut short, and is left to
        the next page."""
        at, times = _order(table, search).column, _times(table, search)
        bound = times.bound(place.run_after_ms)

        def keys(where: bytes, order: bytes, limit: int) -> list[PendingKey]:
            found = self._found(search, table, in_ms(at) + b", local_id", where)
            statement = b"%b ORDER BY %b LIMIT %d" % (found, order, limit)
            rows = self._connection().rows(self._timed(search, statement))
            return [PendingKey(*row) for row in rows]

        equal = keys(b"%b = %b AND local_id > %d" % (at, bound, place.local_id), b"local_id", most)
        if len(equal) == most:
            return equal, equal[-1]
        below = keys(
            b"%b < %b AND %b" % (at, bound, _from(search, table)),
            b"%b DESC, local_id DESC" % at,
            most - len(equal),
        )
        next_place = None
        if len(equal) + len(below) == most:
            next_place = PendingKey(below[-1].run_after_ms, 0)
            below = [key for key in below if key.run_after_ms != next_place.run_after_ms]
        return equal + sorted(below, key=lambda key: (-key.run_after_ms, key.local_id)), next_place

    def _found(self, search: Search, table: Table, columns: bytes, where: bytes) -> bytes:
        return b"SELECT %b FROM %b%b WHERE state = %d AND %b" % (
            columns,
            table.name,
            _order(table, search).forced,
            search.state,
            where,
        )

    def _read(
        self, search: Search, table: Table, columns: bytes, keys: Sequence[PendingKey]
    ) -> list[StoredJob]:
        """Read the jobs that are where the walk has found them."""
        times = {local_id: time_ms for time_ms, local_id in keys}
        jobs = [
            stored_job(table.priority, row)
            for statement in select(table, columns, list(times), search.state)
            for row in self._connection().rows(self._timed(search, statement))
        ]
        found = [job for job in jobs if search.time_of(job) == times[job.key.local_id]]
        return sorted(found, key=search.order_of)


def _order(table: Table, search: Search) -> Order:
    """Return the order in which jobs of the search's state are walked."""
    if search.newest_end_first:
        return table.aged
    return table.ready if search.state is JobState.PENDING else Order(b"run_after", b"")


def _times(table: Table, search: Search) -> TimeColumn:
    return table.updated_at if search.newest_end_first else table.run_after


def _from(search: Search, table: Table) -> bytes:
    """Write the condition for the earliest time of a search, which the column may not hold."""
    times = _times(table, search)
    first_ms = search.times_ms[0] + times.step_ms - 1
    return _order(table, search).column + b" >= " + times.bound(first_ms)


def _behind(after: ScanAfter, priority: int) -> PendingKey:
    """Return the key after which a scan goes on in the table of `priority`."""
    if priority < after.priority:
        return PendingKey(after.time_ms, 2**64 - 1)  # all of that run-after have come
    return PendingKey(after.time_ms, after.local_id if priority == after.priority else 0)
