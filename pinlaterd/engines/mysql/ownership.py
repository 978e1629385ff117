"""Who owns a shard, and how a COMMIT ended whose connection was lost.

The server's lock `pinlaterd:<shard>` makes an owner: the connection that holds it owns the shard. A
server releases such a lock once it has ended the connection that holds it, and with that whatever
transaction it was in. So the next one that gets the lock knows that nothing of its predecessor is
under way any more.

All of this takes for granted that a connection of ours is one connection of the server, from its
beginning to its end. A proxy that passes bytes on keeps to that; one that multiplexes (hands each
transaction to any connection that it has) does not, and no shard may be behind it.

Of all that a transaction wrote, one thing tells whether it was committed: it was committed as a
whole or not at all, and nobody but the owner writes. So a transaction remembers the last thing that
it changed, as a `CommitProbe`; nothing within it comes after that and changes it again.
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple

from pinlaterd.engines.mysql.connection import Connection, Server
from pinlaterd.engines.mysql.faults import FAULTS
from pinlaterd.engines.mysql.literals import quote_text
from pinlaterd.engines.mysql.tables import Table
from pinlaterd.errors import ShardOwned, StorageError
from pinlaterd.model import JobState

# A server takes a moment to notice that a process that was killed has gone.
_WAIT_SECONDS = 1
# How often the lock is found taken, and then free, before that counts as a failure.
_ATTEMPTS = 3


def lock_name(shard: str) -> str:
    """Of the lock that the owner of a shard holds."""
    return f"pinlaterd:{shard}"


class OwnerLock:
    """One shard's lock, and which connection of this process had it last."""

    def __init__(self, shard: str, server: Server) -> None:
        self._name = lock_name(shard)
        self._where = f"shard {shard} in {server}"
        self._last_holder = 0  # as the server numbers connections

    def take(self, db: Connection) -> None:
        """Make `db` the owner. A connection of ours that holds the lock still, because the server
        has not heard of its end or is at work for it, is ended. The driver's faults are passed on.

        Raises ShardOwned while another process holds it; StorageError if it can't be had yet."""
        name = quote_text(self._name)
        for attempt in range(1 + _ATTEMPTS):
            with db.patiently(_WAIT_SECONDS):
                wait = b"SELECT GET_LOCK(%b, %d)" % (name, _WAIT_SECONDS if attempt else 0)
                [[locked]] = db.rows(wait)
            [[holder]] = db.rows(b"SELECT IS_USED_LOCK(%b)" % name)
            if locked == 1 and holder is not None:
                self._last_holder = int(holder)
                return
            if holder is not None and attempt:
                raise self._held_by(int(holder))
            if holder is not None and holder == self._last_holder:
                with contextlib.suppress(*FAULTS):  # it may have ended by now
                    db.execute(b"KILL CONNECTION %d" % holder)
        raise StorageError(
            f"{self._where}: the lock {self._name!r} is free and can't be had; it is tried again. "
            "If a proxy is between, it must not multiplex connections"
        )

    def _held_by(self, holder: int) -> StorageError:
        if holder == self._last_holder:
            return StorageError(
                f"{self._where}: connection {holder} of that server, which was ours, still holds "
                f"the lock {self._name!r}; it is waited for"
            )
        return ShardOwned(
            f"{self._where}: connection {holder} of that server holds the lock {self._name!r}: "
            "another process owns this shard"
        )

    def release(self, db: Connection) -> None:
        """A server that is busy may see much later that a connection has been closed."""
        db.execute(b"DO RELEASE_LOCK(" + quote_text(self._name) + b")")


# --- commits in doubt -----------------------------------------------------------------------


class CommitProbe(NamedTuple):
    """`statement` reads one number: `after` once the transaction was committed, else `before`.
    None stands for no row."""

    statement: bytes
    before: int | None
    after: int | None


def moved_job(
    table: Table, local_id: int, before: JobState | None, after: JobState | None
) -> CommitProbe:
    """A job that changed from one state to another; None: not there."""
    statement = b"SELECT state FROM %b WHERE local_id = %d" % (table.name, local_id)
    return CommitProbe(statement, before, after)


def claimed_job(table: Table, local_id: int, claim_descriptor: str) -> CommitProbe:
    """A claim. No two are alike, so it is told from one that ended within the same transaction."""
    statement = b"SELECT state = 1 AND claim_descriptor <=> %b FROM %b WHERE local_id = %d" % (
        quote_text(table.claim(claim_descriptor)),
        table.name,
        local_id,
    )
    return CommitProbe(statement, 0, 1)


def remembered(table: bytes, name: str, value: int) -> CommitProbe:
    """A value that the owner's table did not have before."""
    statement = b"SELECT COUNT(*) FROM %b WHERE name = %b AND value = %d" % (
        table,
        quote_text(name),
        value,
    )
    return CommitProbe(statement, 0, 1)


def was_committed(db: Connection, probe: CommitProbe) -> bool:
    """To be asked by the owner once the transaction has ended. The driver's faults are passed on.

    Raises StorageError if somebody else has changed what would tell."""
    rows = db.rows(probe.statement)
    found = int(rows[0][0]) if rows else None
    if found not in (probe.before, probe.after):
        raise StorageError("somebody else has changed the job that would tell")
    return found == probe.after
