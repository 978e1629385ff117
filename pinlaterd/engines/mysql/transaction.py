"""One transaction of the owner: its statements, several in a packet, and what it changes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pinlaterd.engines.mysql.connection import Connection
from pinlaterd.engines.mysql.ownership import CommitProbe, moved_job
from pinlaterd.engines.mysql.statements import Each, update
from pinlaterd.engines.mysql.tables import Table
from pinlaterd.model import JobState


class UnexpectedRows(Exception):
    """Jobs were not in the state that a statement relied on: to be done again, looking first."""


@dataclass
class _Write:
    """A change: how many rows its statements have to find, if that is known, and have found."""

    expected: int | None
    found: int = 0


_Statement = tuple[bytes, _Write | None]


class Transaction:
    """What one commit does: statements, and what it changes in the depths.

    Statements are sent several in a packet: with the next one that reads, or at the end."""

    def __init__(self, db: Connection, now_ms: int, *, careful: bool) -> None:
        self.db = db
        self.now_ms = now_ms
        self.careful = careful  # whether rows were unexpected before
        self.probe: CommitProbe | None = None  # of the last change, as far as one can tell
        self.depth_changes: defaultdict[tuple[str, int, JobState], int] = defaultdict(int)
        self.begun = False  # whether anything was sent
        self._unsent: list[_Statement] = []
        self._writes: list[_Write] = []

    @property
    def changed(self) -> bool:
        """Whether anything has been changed, by what was sent."""
        return any(write.found for write in self._writes)

    def run(self, statements: Iterable[bytes], expected: int | None = None) -> None:
        """Change something, later: `send` raises UnexpectedRows if the statements together don't
        find as many rows as expected."""
        write = _Write(expected)
        self._writes.append(write)
        self._unsent += [(statement, write) for statement in statements]

    def update(
        self,
        table: Table,
        local_ids: Sequence[int],
        state: JobState,
        common: bytes,
        each: Sequence[Each] = (),
        *,
        claims: Sequence[bytes] = (),
        expected: int | None = None,
    ) -> None:
        """As `statements.update`, and `run`."""
        most_bytes = self.db.statement_bytes
        statements = update(
            table, local_ids, state, common, each, claims=claims, most_bytes=most_bytes
        )
        self.run(statements, expected)

    def found(self) -> int:
        """How many rows the last change has found, once it was sent."""
        self.send()
        return self._writes[-1].found

    def read(self, statements: Iterable[bytes]) -> list[tuple[Any, ...]]:
        rows: list[tuple[Any, ...]] = []
        for statement in statements:
            self._unsent.append((statement, None))
            rows += self.send()
        return rows

    def send(self) -> tuple[tuple[Any, ...], ...]:
        """Send what has not been sent; returns what the last statement reads."""
        if not self._unsent:
            return ()
        unsent, self._unsent = self._unsent, []
        if not self.begun:
            self.begun = True
            unsent.insert(0, (b"BEGIN", None))
        first = size = 0
        for at, (statement, _) in enumerate(unsent):
            size += len(statement) + 2
            if size > self.db.statement_bytes and at > first:
                self._send_packet(unsent[first:at])
                first, size = at, len(statement)
        rows = self._send_packet(unsent[first:])
        if any(write.expected not in (None, write.found) for write in self._writes):
            raise UnexpectedRows
        return rows

    def _send_packet(self, packet: Sequence[_Statement]) -> tuple[tuple[Any, ...], ...]:
        counts, rows = self.db.run([statement for statement, _ in packet])
        for (_, write), found in zip(packet, counts, strict=True):
            if write is not None:
                write.found += found
        return rows

    def moved(
        self,
        queue: str,
        table: Table,
        local_ids: Sequence[int],
        before: JobState | None,
        after: JobState | None,
    ) -> None:
        """Note that jobs changed state; None: not there."""
        if not local_ids:
            return
        priority, jobs = table.priority, len(local_ids)
        if before is not None:
            self.depth_changes[queue, priority, before] -= jobs
        if after is not None:
            self.depth_changes[queue, priority, after] += jobs
        self.probe = moved_job(table, local_ids[0], before, after)
