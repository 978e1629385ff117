"""Queues whose tables another connection to the store has locked: only their calls wait.

What meets a lock has changed nothing. The calls of that queue wait here, outside of any commit, and
are tried again ten times a second. Once the lock has lasted for `PATIENCE_SECONDS`, as long as a
database would have waited for it, they are refused, and later ones at once, but for those that are
the next try.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from pinlaterd.clock import Clock
from pinlaterd.errors import StorageLocked
from pinlaterd.wire.envelope import CallEntry

log = logging.getLogger(__name__)

PATIENCE_SECONDS = 1.0
_RETRY_SECONDS = 0.1
# A server that waits before it says that there is a lock holds up every call meanwhile: all tries
# together take one part in so many of the time.
_SHARE_OF_TRIES = 10
_MOST_CALLS = 500
WHOLE_STORE = ""


class _Lock:
    """A lock on one queue, as it was last met."""

    def __init__(self, since: float) -> None:
        self.since = since
        self.retry_at = 0.0
        self.waits = False  # whether the next try is still to come
        self.error = StorageLocked(WHOLE_STORE, "")
        self.calls: list[CallEntry] = []


class QueueLocks:
    """The locks that were met, and the calls that wait for them. Times are monotonic seconds."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.known: dict[str, _Lock] = {}  # by queue; to be looked at before a lock is asked for

    @contextmanager
    def trying(self, queue: str) -> Iterator[None]:
        """Around a use of the store for `queue`. Raises StorageLocked, at once where one is known
        and its next try is still to come."""
        held = self.holding((queue,))
        if held is not None:
            raise StorageLocked(held.queue, held.message)
        started = self._clock.monotonic()
        try:
            yield
        except StorageLocked as error:
            self.met(error, started)
            raise

    def met(self, error: StorageLocked, started: float) -> None:
        """A try that began at `started` met a lock."""
        now = self._clock.monotonic()
        lock = self.known.get(error.queue)
        if lock is None:
            log.warning("waits for a lock: %s", error.message)
            lock = self.known[error.queue] = _Lock(started)
        lock.error, lock.waits = error, True
        lock.retry_at = now + max(_RETRY_SECONDS, (now - started) * _SHARE_OF_TRIES)

    def holding(self, queues: Iterable[str]) -> StorageLocked | None:
        """Why calls that touch any of `queues` must not be tried now; None if they may."""
        if not self.known:
            return None
        for queue in (WHOLE_STORE, *queues):
            lock = self.known.get(queue)
            if lock is not None and lock.waits:
                return lock.error
        return None

    def passed(self, queues: Iterable[str]) -> None:
        """A try that touched `queues` met no lock. A lock that is met later is another one."""
        for queue in (WHOLE_STORE, *queues):
            lock = self.known.get(queue)
            if lock is not None and not lock.waits:
                del self.known[queue]

    def keep(self, error: StorageLocked, call: CallEntry) -> bool:
        """Keep a call until the next try; False if it is to be refused."""
        lock = self.known[error.queue]
        patience_ends = lock.since + PATIENCE_SECONDS
        if self._clock.monotonic() >= patience_ends or len(lock.calls) >= _MOST_CALLS:
            return False
        lock.calls.append(call)
        return True

    def next_try(self) -> float:
        """When `due` has something to say next."""
        return min((lock.retry_at for lock in self.known.values() if lock.waits), default=math.inf)

    def due(self) -> tuple[list[str], list[CallEntry]]:
        """The queues that may be tried again, and the calls that waited for that. A lock that was
        not met again is forgotten."""
        now = self._clock.monotonic()
        queues: list[str] = []
        calls: list[CallEntry] = []
        for queue, lock in list(self.known.items()):
            if now < lock.retry_at:
                continue
            if lock.waits:
                queues.append(queue)
                calls += lock.calls
                lock.calls, lock.waits = [], False
            elif now - lock.retry_at >= PATIENCE_SECONDS:
                del self.known[queue]
        return queues, calls

    def clear(self) -> list[CallEntry]:
        """Forget all locks; returns the calls that waited."""
        calls = [call for lock in self.known.values() for call in lock.calls]
        self.known.clear()
        return calls
