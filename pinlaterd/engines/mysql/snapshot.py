"""A snapshot of a shard's tables, in which jobs are counted (see engines/counts.py)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence

from pinlaterd.engines.counts import Depths
from pinlaterd.engines.mysql.connection import Connection, Server
from pinlaterd.engines.mysql.faults import FAULTS, storage_error
from pinlaterd.engines.mysql.literals import quote_text
from pinlaterd.engines.mysql.records import STATES
from pinlaterd.engines.mysql.tables import Table
from pinlaterd.model import JobState

# A count may take so long for each job, at worst from a cold disk.
_SECONDS_A_JOB = 1 / 100_000


class TableSnapshot:
    """A transaction on a connection of its own. It keeps what it has read from being dropped or
    altered, until it is closed."""

    def __init__(
        self, server: Server, tables: Mapping[str, Iterable[Table]], owner: Connection
    ) -> None:
        """`owner`: ends the connection if the count is cancelled."""
        self._server = server
        self._tables = tables
        self._owner = owner
        self._db = Connection(server, patience_seconds=owner.patience_seconds, read_only=True)
        try:
            self._db.execute(b"SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            self._db.execute(b"START TRANSACTION WITH CONSISTENT SNAPSHOT")
            [[self._number]] = self._db.rows(b"SELECT CONNECTION_ID()")
        except FAULTS as fault:
            self._db.close()
            raise storage_error(fault, str(server), undone=True) from fault

    def count(self, queue: str) -> Depths:
        """By an index that holds the state and no bodies, where there is one."""
        try:
            return {
                (table.priority, JobState(state)): jobs
                for table in self._tables[queue]
                for state, jobs in self._count(table)
                if state in STATES
            }
        except FAULTS as fault:
            raise storage_error(fault, str(self._server), undone=True) from fault

    def _count(self, table: Table) -> Sequence[tuple[int, ...]]:
        database, name = table.label.split(".")
        [[estimate]] = self._db.rows(
            b"SELECT COALESCE(MAX(table_rows), 0) FROM information_schema.tables"
            b" WHERE table_schema = %b AND table_name = %b"
            % (quote_text(database), quote_text(name))
        )
        with self._db.patiently(int(estimate) * _SECONDS_A_JOB):
            return self._db.rows(
                b"SELECT state, COUNT(*) FROM %b%b GROUP BY state"
                % (table.name, table.by_run_after)
            )

    def find_damage(self) -> str:
        """Jobs lie in one place each; ids that were taken are passed when the shard is opened."""
        return ""

    def cancel(self) -> None:
        with contextlib.suppress(*FAULTS):
            self._owner.execute(b"KILL CONNECTION %d" % self._number)

    def close(self) -> None:
        self._db.close()
