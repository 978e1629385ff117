"""What tells, after its connection was lost, whether a transaction was committed.

Of all that a transaction wrote, one thing is enough: it was committed as a whole or not at all, and
nobody but the owner writes. So each remembers the last thing that it changed; nothing within the
same transaction comes after that and changes it again.
"""

from __future__ import annotations

from typing import NamedTuple

from pinlaterd.engines.mysql.connection import Connection
from pinlaterd.engines.mysql.literals import quote_text
from pinlaterd.engines.mysql.tables import Table
from pinlaterd.errors import StorageError
from pinlaterd.model import JobState


class Witness(NamedTuple):
    """`statement` reads one number: `after` once the transaction was committed, else `before`.
    None stands for no row."""

    statement: bytes
    before: int | None
    after: int | None


def moved_job(
    table: Table, local_id: int, before: JobState | None, after: JobState | None
) -> Witness:
    """A job that changed from one state to another; None: not there."""
    statement = b"SELECT state FROM %b WHERE local_id = %d" % (table.name, local_id)
    return Witness(statement, before, after)


def claimed_job(table: Table, local_id: int, claim_descriptor: str) -> Witness:
    """A claim. No two are alike, so it is told from one that ended within the same transaction."""
    statement = b"SELECT state = 1 AND claim_descriptor <=> %b FROM %b WHERE local_id = %d" % (
        quote_text(table.claim(claim_descriptor)),
        table.name,
        local_id,
    )
    return Witness(statement, 0, 1)


def remembered(table: bytes, name: str, value: int) -> Witness:
    """A value that the owner's table did not have before."""
    statement = b"SELECT COUNT(*) FROM %b WHERE name = %b AND value = %d" % (
        table,
        quote_text(name),
        value,
    )
    return Witness(statement, 0, 1)


def was_committed(db: Connection, witness: Witness) -> bool:
    """To be asked by the owner once the transaction has ended. The driver's faults are passed on.

    Raises StorageError if somebody else has changed what would tell."""
    rows = db.rows(witness.statement)
    found = int(rows[0][0]) if rows else None
    if found not in (witness.before, witness.after):
        raise StorageError("somebody else has changed the job that would tell")
    return found == witness.after
