"""The server's lock `pinlaterd:<shard>`: the connection that holds it owns the shard.

A server gives such a lock back once it has ended the connection that holds it, and with that
whatever transaction it was in. So who gets the lock knows that nothing of its predecessor is under
way any more.

All of this takes for granted that a connection of ours is one connection of the server, from its
beginning to its end. A proxy that passes bytes on keeps to that; one that multiplexes (hands each
transaction to whichever connection it has) does not, and no shard may be behind it.
"""

from __future__ import annotations

import contextlib

from pinlaterd.engines.mysql.connection import Connection, Server
from pinlaterd.engines.mysql.faults import FAULTS
from pinlaterd.engines.mysql.literals import quote_text
from pinlaterd.errors import ShardOwned, StorageError

# A server takes a moment to notice that a process that was killed has gone.
_WAIT_SECONDS = 1
# How often the lock is found taken, and then free, before that counts as a failure.
_ATTEMPTS = 3


def lock_name(shard: str) -> str:
    """Of the lock that whoever owns a shard holds."""
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
        holder = self._holder(db)
        if holder is not None and holder == self._last_holder:
            with contextlib.suppress(*FAULTS):  # it may have ended by now
                db.execute(b"KILL CONNECTION %d" % holder)
        for _ in range(_ATTEMPTS):
            locked = self._gets_it(db)
            holder = self._holder(db)
            if locked and holder is not None:
                self._last_holder = holder
                return
            if holder is not None:
                raise self._held_by(holder)
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

    def _gets_it(self, db: Connection) -> bool:
        name = quote_text(self._name)
        with db.patiently(_WAIT_SECONDS):
            [[locked]] = db.rows(b"SELECT GET_LOCK(%s, %d)" % (name, _WAIT_SECONDS))
        return bool(locked == 1)

    def _holder(self, db: Connection) -> int | None:
        """The connection that holds it, as the server numbers them; None: nobody."""
        [[holder]] = db.rows(b"SELECT IS_USED_LOCK(%s)" % quote_text(self._name))
        return None if holder is None else int(holder)
