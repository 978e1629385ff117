"""One transaction of the owner: its statements, several in a packet, and what it changes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from pinlaterd.engines.mysql.connection import Connection
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

    def was_committed(self, db: Connection) -> bool:
        """To be asked by the owner once the transaction has ended. The driver's faults are passed
        on. Raises StorageError if somebody else has changed what would tell."""
        rows = db.rows(self.statement)
        found = int(rows[0][0]) if rows else None
        if found not in (self.before, self.after):
            raise StorageError("somebody else has changed the job that would tell")
        return found == self.after


class UnexpectedRows(Exception):
    """Jobs were not in the state that a statement relied on: to be done again, looking first."""


class Transaction:
    """Statements are sent several in a packet: with the next one that reads, or at the end. One
    that is alone is a transaction by itself."""

    def __init__(self, db: Connection, now_ms: int, *, careful: bool) -> None:
        self.now_ms = now_ms
        self.careful = careful  # whether rows were unexpected before
        self.committing = False  # whether the server was asked to commit
        self.probe: CommitProbe | None = None  # of the last change, as far as one can tell
        self.depth_changes: defaultdict[tuple[str, int, JobState], int] = defaultdict(int)
        self._db = db
        self._begun = False
        self._unsent: list[tuple[bytes, int | None]] = []  # and how many rows they have to find

    # --- statements --------------------------------------------------------------------------

    def run(self, statement: bytes) -> None:
        """Change something, later."""
        self._unsent.append((statement, None))

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
        """As `statements.update`. Later UnexpectedRows is raised unless all of them are found."""
        most_bytes = self._db.statement_bytes
        self._unsent += update(
            table, local_ids, before, common, each, claims=claims, most_bytes=most_bytes
        )
        if after is not before:
            self._moved(table, local_ids, before, after)

    def delete(self, table: Table, local_ids: Sequence[int], state: JobState) -> None:
        for part in pieces(local_ids, LISTED_IDS):
            self._unsent.append((b"DELETE FROM " + table.name + by_ids(part, state), len(part)))
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
        """Send what has not been sent. `committing` tells whether an error is that of a commit."""
        if any(expected is not None for _, expected in self._unsent):
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
            unsent.insert(0, (b"BEGIN", None))
        first = size = 0
        for at, (statement, _) in enumerate(unsent):
            size += len(statement) + 2
            if size > self._db.statement_bytes and at > first:
                self._send_packet(unsent[first:at])
                first, size = at, len(statement)
        self.committing = commits
        return self._send_packet(unsent[first:])

    def _send_packet(
        self, packet: Sequence[tuple[bytes, int | None]]
    ) -> tuple[tuple[Any, ...], ...]:
        counts, rows = self._db.run([statement for statement, _ in packet])
        for (_, expected), found in zip(packet, counts, strict=True):
            if expected not in (None, found):
                raise UnexpectedRows
        return rows

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
        self.probe = CommitProbe(statement, before, after)
