"""One transaction of the owner: its statements, several in a packet, and what it changes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from pinlaterd.engines.mysql.connection import Connection
from pinlaterd.engines.mysql.faults import FAULTS, code_of
from pinlaterd.engines.mysql.literals import pieces
from pinlaterd.engines.mysql.statements import LISTED_IDS, Each, by_ids, select, update
from pinlaterd.engines.mysql.tables import Table
from pinlaterd.errors import StorageError
from pinlaterd.model import JobState


class CommitProbe(NamedTuple):
    """What tells whether a transaction was committed whose connection was lost: the last thing that
    it changed. It was committed as a whole or not at all, and nobody but the owner writes.

    `statement` reads one number: `after` once it was committed, else `before`. None: no row."""

    statement: bytes
    before: int | None
    after: int | None
    is_unique: bool  # whether nothing but this transaction can have made it `after`

    def was_committed(self, db: Connection) -> bool:
        """To be asked by the owner once the transaction has ended. The driver's faults are passed
        on. Raises StorageError if somebody else has changed what would tell."""
        rows = db.rows(self.statement)
        found = int(rows[0][0]) if rows else None
        if found not in (self.before, self.after):
            raise StorageError("somebody else has changed the job that would tell")
        return found == self.after


# Has the server end a packet, before the COMMIT in it, unless the statement before has found so
# many rows. SET fails where DO would not; a number out of range is an error in every sql_mode.
_EXPECT = b"SET @unexpected = 9223372036854775807 + (ROW_COUNT() <> %d)"
_OUT_OF_RANGE = 1690


class UnexpectedRows(Exception):
    """Jobs were not in the state that a statement relied on: to be done again, looking first."""


class Transaction:
    """Statements are sent several in a packet: with the next one that reads, or with the COMMIT.
    One that is alone is a transaction by itself."""

    def __init__(self, db: Connection, now_ms: int, *, careful: bool) -> None:
        self.now_ms = now_ms
        self.careful = careful  # whether rows were unexpected before
        self.committing = False  # whether the server was asked to commit
        self.probe: CommitProbe | None = None  # of the last change, as far as one can tell
        self.depth_changes: defaultdict[tuple[str, int, JobState], int] = defaultdict(int)
        self._db = db
        self._begun = False
        self._unsent: list[bytes] = []

    # --- statements --------------------------------------------------------------------------

    def run(self, statement: bytes) -> None:
        """Change something, later."""
        self._unsent.append(statement)

    def insert(
        self, table: Table, columns: bytes, rows: Sequence[bytes], local_ids: Sequence[int]
    ) -> None:
        """Jobs that are PENDING; in several statements where one would be too long."""
        head = b"INSERT INTO " + table.name + b" (" + columns + b") VALUES "
        first, size = 0, len(head)
        for at, row in enumerate(rows):
            size += len(row) + 2
            if size > self._db.statement_bytes and at > first:
                self.run(head + b", ".join(rows[first:at]))
                first, size = at, len(head) + len(row)
        self.run(head + b", ".join(rows[first:]))
        self._moved(table, local_ids, None, JobState.PENDING)

    def update(
        self,
        table: Table,
        local_ids: Sequence[int],
        before: JobState,
        after: JobState,
        common: bytes,
        each: Sequence[Each] = (),
        claims: Sequence[bytes] = (),
    ) -> None:
        """As `statements.update`. Unless all of them are found, UnexpectedRows is raised later."""
        most_bytes = self._db.statement_bytes
        for statement, jobs in update(
            table, local_ids, before, common, each, claims=claims, most_bytes=most_bytes
        ):
            self._unsent += (statement, _EXPECT % jobs)
        if after is not before:
            self._moved(table, local_ids, before, after)

    def delete(self, table: Table, local_ids: Sequence[int], state: JobState) -> None:
        for part in pieces(local_ids, LISTED_IDS):
            statement = b"DELETE FROM " + table.name + by_ids(part, state)
            self._unsent += (statement, _EXPECT % len(part))
        self._moved(table, local_ids, state, None)

    def read(self, statements: Iterable[bytes]) -> list[tuple[Any, ...]]:
        rows: list[tuple[Any, ...]] = []
        for statement in statements:
            self.run(statement)
            rows += self._send()
        return rows

    def lock(
        self, table: Table, columns: bytes, local_ids: Sequence[int], state: JobState
    ) -> list[tuple[Any, ...]]:
        """Read those that are in `state`. Nobody, not even a foreign writer, changes them before
        our transaction ends."""
        return self.read(
            statement + b" FOR UPDATE" for statement in select(table, columns, local_ids, state)
        )

    def commit(self) -> None:
        """Send what has not been sent. `committing` tells whether an error is that of a commit.

        Jobs that were in their new state before would look like a commit: that they are not is
        known before COMMIT is sent."""
        if self.probe is not None and not self.probe.is_unique:
            self._send()
        if self._begun or len(self._unsent) > 1:
            self.run(b"COMMIT")
        if self._unsent:
            if not self._begun:  # a connection that is lost by now leaves no doubt
                self._db.check_open()
            self._send(commits=True)

    def _send(self, *, commits: bool = False) -> tuple[tuple[Any, ...], ...]:
        """Returns what the last statement reads."""
        unsent, self._unsent = self._unsent, []
        if not unsent:
            return ()
        if not (self._begun or (commits and len(unsent) == 1)):
            self._begun = True
            unsent.insert(0, b"BEGIN")
        first = size = 0
        for at, statement in enumerate(unsent):
            size += len(statement) + 2
            if size > self._db.statement_bytes and at > first:
                self._send_packet(unsent[first:at])
                first, size = at, len(statement)
        self.committing = commits
        return self._send_packet(unsent[first:])

    def _send_packet(self, packet: Sequence[bytes]) -> tuple[tuple[Any, ...], ...]:
        try:
            return self._db.run(packet)
        except FAULTS as fault:
            if code_of(fault) == _OUT_OF_RANGE and self._db.last_statement.startswith(b"SET"):
                raise UnexpectedRows from fault
            raise

    def _moved(
        self,
        table: Table,
        local_ids: Sequence[int],
        before: JobState | None,
        after: JobState | None,
    ) -> None:
        """Note that jobs changed state; None: not there."""
        if not local_ids:
            return
        for state, jobs in ((before, -len(local_ids)), (after, len(local_ids))):
            if state is not None:
                self.depth_changes[table.queue, table.priority, state] += jobs
        statement = b"SELECT state FROM %b WHERE local_id = %d" % (table.name, local_ids[0])
        self.probe = CommitProbe(statement, before, after, is_unique=before is None)
