"""Queues whose tables another connection to the store has locked: only their calls wait.

A commit that meets a lock has changed nothing. The calls of that queue wait here, outside of any
commit, and are tried again ten times a second. Once the lock has lasted for `PATIENCE_SECONDS`, as
long as a database would have waited for it, they are refused, and later ones at once, but for those
that are the next try.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from pinlaterd.errors import StorageLocked
from pinlaterd.shard.state import Arrival

log = logging.getLogger(__name__)

PATIENCE_SECONDS = 1.0
_RETRY_SECONDS = 0.1
# A server that waits before it says that there is a lock holds up every call meanwhile: all tries
# together take one part in so many of the time.
_SHARE_OF_TRIES = 10
_MOST_ARRIVALS = 500
WHOLE_STORE = ""


class _Lock:
    """A lock on one queue, as it was last met."""

    def __init__(self, since: float) -> None:
        self.since = since
        self.retry_at = 0.0
        self.waits = False  # whether the next try is still to come
        self.error = StorageLocked(WHOLE_STORE, "")
        self.arrivals: list[Arrival] = []


class QueueLocks:
    """The locks that were met, and the calls that wait for them. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._locks: dict[str, _Lock] = {}

    def __len__(self) -> int:
        return len(self._locks)

    def met(self, error: StorageLocked, *, started: float, now: float) -> None:
        """A try that began at `started` met a lock."""
        lock = self._locks.get(error.queue)
        if lock is None:
            log.warning("waits for a lock: %s", error.message)
            lock = self._locks[error.queue] = _Lock(started)
        lock.error, lock.waits = error, True
        lock.retry_at = now + max(_RETRY_SECONDS, (now - started) * _SHARE_OF_TRIES)

    def holding(self, queues: Iterable[str]) -> StorageLocked | None:
        """Why calls that touch any of `queues` must not be tried now; None if they may."""
        if not self._locks:
            return None
        for queue in (WHOLE_STORE, *queues):
            lock = self._locks.get(queue)
            if lock is not None and lock.waits:
                return lock.error
        return None

    def passed(self, queues: Iterable[str]) -> None:
        """A try that touched `queues` met no lock. A lock that is met later is another one."""
        if not self._locks:
            return
        for queue in (WHOLE_STORE, *queues):
            lock = self._locks.get(queue)
            if lock is not None and not lock.waits:
                del self._locks[queue]

    def keep(self, error: StorageLocked, arrival: Arrival, now: float) -> bool:
        """Keep a call until the next try; False if it is to be refused."""
        lock = self._locks[error.queue]
        if now - lock.since >= PATIENCE_SECONDS or len(lock.arrivals) >= _MOST_ARRIVALS:
            return False
        lock.arrivals.append(arrival)
        return True

    def next_try(self) -> float | None:
        """When `due` has something to say next."""
        return min((lock.retry_at for lock in self._locks.values() if lock.waits), default=None)

    def due(self, now: float) -> tuple[list[str], list[Arrival]]:
        """The queues that may be tried again, and the calls that waited for that. A lock that was
        not met again is forgotten."""
        queues: list[str] = []
        arrivals: list[Arrival] = []
        for queue, lock in list(self._locks.items()):
            if now < lock.retry_at:
                continue
            if lock.waits:
                queues.append(queue)
                arrivals += lock.arrivals
                lock.arrivals, lock.waits = [], False
            elif now - lock.retry_at >= PATIENCE_SECONDS:
                del self._locks[queue]
        return queues, arrivals

    def clear(self) -> list[Arrival]:
        """Forget all locks; returns the calls that waited."""
        arrivals = [arrival for lock in self._locks.values() for arrival in lock.arrivals]
        self._locks.clear()
        return arrivals
