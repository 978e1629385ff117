"""Ownership of a shard: its owner is the connection that holds the lock `pinlaterd:<shard>`.

Where several servers share the shards, an owner has also claimed the shard's record for its term:
it claims, ends the connection that holds the lock, takes the lock, and reads the record again. From
the end of its connection on, the owner of an earlier term can commit nothing. It can't come back
either: its claim fails, or, if it came before the later one, the second look at the record.
"""

from __future__ import annotations

from pinlaterd.engines.base import SINGLE, Term
from pinlaterd.engines.mysql.connection import (
    FAULTS,
    UNKNOWN_CONNECTION,
    WAIT_FOR_LOCKS,
    MysqlAddress,
    MysqlConnection,
    code_of,
    is_gone,
    quote_name,
    quote_text,
)
from pinlaterd.engines.mysql.tables import create_database, create_table, owner_database
from pinlaterd.errors import ShardOwned, StorageError, Superseded

# A server takes a moment to notice that a process that was killed has gone.
_WAIT_SECONDS = 1
# How long the owner before may take to close the store, in a planned move.
_PLANNED_WAIT_SECONDS = 5


class ServerLock:
    """One shard's lock and record, and which connection of this process had the lock last."""

    def __init__(self, shard: str, server: MysqlAddress) -> None:
        self._database = owner_database(shard)
        self._record = quote_name(self._database, "cluster")
        self._name = f"pinlaterd:{shard}"
        self._where = f"shard {shard} in {server}"
        self._last_holder = 0  # as the server numbers connections

    def take_in(self, db: MysqlConnection, term: Term, *, was_ours: bool) -> None:
        """Make `db` the owner in `term`. If that was ours before, its holder is another process of
        this server: none is ended then, or the two would end each other for ever.

        Raises Superseded, and as `take`."""
        if not term.epoch:
            self.take(db)
            return
        self._claim(db, term)
        waits = _PLANNED_WAIT_SECONDS if term.planned else 0
        self.take(db, attempts=waits + 3, ends_after=None if was_ours else waits, term=term)
        try:
            self.check(db, term)  # a later term may have claimed and found the lock free
        except Superseded:
            self.release(db)
            raise

    def _claim(self, db: MysqlConnection, term: Term) -> None:
        """Raises Superseded. The driver's faults are passed on."""
        server = quote_text(term.server)
        # Another claim may hold the row until it is committed.
        statement = (WAIT_FOR_LOCKS if db.is_mariadb else b"") + (
            b"INSERT INTO %b VALUES (1, %d, %b) ON DUPLICATE KEY UPDATE"
            b" server = IF(epoch < %d, %b, server), epoch = GREATEST(epoch, %d)"
            % (self._record, term.epoch, server, term.epoch, server, term.epoch)
        )
        try:
            db.execute(statement)
        except FAULTS as fault:
            if not is_gone(fault):
                raise
            db.execute(create_database(self._database))
            db.execute(create_table("cluster.sql", self._database, "cluster"))
            db.execute(statement)
        self.check(db, term)

    def check(self, db: MysqlConnection, term: Term) -> None:
        """Raises Superseded unless the record bears this term, if it is one: else it was claimed in
        a later one, or by another server in the same epoch."""
        if not term.epoch:
            return
        rows = db.rows(b"SELECT server, epoch FROM " + self._record)
        server, epoch = rows[0] if rows else ("", 0)
        if (server, epoch) != term[:2]:
            raise Superseded(
                f"{self._where}: server {server} has claimed it in epoch {epoch}; this is "
                f"{term.server} in epoch {term.epoch}",
                server,
                epoch,
            )

    def take(
        self,
        db: MysqlConnection,
        *,
        attempts: int = 3,
        ends_after: int | None = None,
        term: Term = SINGLE,
    ) -> int:
        """Make `db` the owner; returns how many connections were ended for that: one of ours that
        holds the lock still, because the server has not heard of its end or is at work for it, and
        any other after so many seconds, unless `term` is over. It is tried `attempts` times more,
        for a second each. The driver's faults are passed on.

        Raises ShardOwned while another process holds it; StorageError if it can't be had yet."""
        name = quote_text(self._name)
        ended: set[int] = set()
        for attempt in range(1 + attempts):
            with db.patiently(_WAIT_SECONDS):
                wait = b"SELECT GET_LOCK(%b, %d)" % (name, _WAIT_SECONDS if attempt else 0)
                [[locked]] = db.rows(wait)
            [[holder]] = db.rows(b"SELECT IS_USED_LOCK(%b)" % name)
            if locked == 1 and holder is not None:
                self._last_holder = int(holder)
                return len(ended)
            if holder is None:
                continue
            if attempt and (attempt == attempts or ends_after is None):
                raise self._held_by(int(holder))
            self.check(db, term)  # behind the question who holds it: a later one claims before
            if holder == self._last_holder or (ends_after is not None and attempt >= ends_after):
                ended.add(int(holder))
                try:
                    db.execute(b"KILL CONNECTION %d" % holder)
                except FAULTS as fault:
                    if code_of(fault) != UNKNOWN_CONNECTION:  # it may have ended by now
                        raise
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

    def release(self, db: MysqlConnection) -> None:
        """Release the lock; a busy server may notice much later that a connection is closed."""
        db.execute(b"DO RELEASE_LOCK(" + quote_text(self._name) + b")")
