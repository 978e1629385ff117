"""Whether a shard's store can be relied on, and which of its queues somebody else has locked.

Outcomes go in, a verdict comes out. A store is healthy until it fails several times in a row, or
too often within a window, or takes much longer than it is used to; then it is degraded, with the
reason, until a few uses in a row have gone well. Routers send a degraded shard no new work as long
as others can take it; acks still come, and a probe every second. What a store refuses beyond doubt,
because it is full, is no failure of it: its jobs have to go, so that there is room again. Such a
store takes dequeues and acks as before, and what it says is told to those who run it (`no_room`).

What meets a lock has changed nothing. The calls of that queue wait here, outside of any commit, and
are tried again ten times a second. Once the lock has lasted for `PATIENCE_SECONDS`, as long as a
database would have waited for it, they are refused, and later ones at once, but for those that are
the next try.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from pinlaterd.clock import Clock
from pinlaterd.config.schema import ServerSettings
from pinlaterd.errors import StorageLocked
from pinlaterd.wire.envelope import CallEntry

log = logging.getLogger(__name__)

# Below this many samples a failure rate is not meaningful.
LEAST_OUTCOMES = 10
# Uses in a row that have to go well before a degraded store is trusted again.
GOOD_IN_A_ROW = 3
# After so many uses it is known what is normal. Of that mean, each use changes this part.
LEAST_USES = 100
_NORMAL_PART = 0.002
# Of the recent mean a use changes this part at least; the rarer they are, the more, for a slow
# store has few, and what is older than so many seconds is past. Half at most: one is an accident.
_RECENT_PART, _RECENT_SECONDS, _MOST_RECENT_PART = 0.1, 4.0, 0.5


class StoreHealth:
    """The verdict on one store. `reason` is "" while it is healthy, `no_room` while it takes jobs;
    `cause` is what the store said when it failed last."""

    def __init__(self, server: ServerSettings) -> None:
        """Its limits are the settings `health_…`."""
        self._settings = server
        self.reason = self.cause = self.no_room = ""
        self._failures_in_row = self._good_in_row = self._stored_in_row = 0
        self._used: Counter[int] = Counter()  # by second, within the window
        self._failed: Counter[int] = Counter()
        self._uses = 0  # that went well while it was healthy, ever
        self._normal = 0.0
        self._recent = 0.0
        self._last_use = 0.0  # when that was

    @property
    def degraded(self) -> bool:
        return bool(self.reason)

    def succeeded(self, seconds: float, now: float) -> None:
        """Record that a use went well, and took so long."""
        self._failures_in_row = 0
        if not self.reason:
            self.cause = ""
        self._note(int(now), failures=0)
        part = max(_RECENT_PART, (now - self._last_use) / _RECENT_SECONDS)
        self._recent += min(part, _MOST_RECENT_PART) * (seconds - self._recent)
        self._last_use = now
        if self.reason:
            self._good_in_row = 0 if self._is_slow(seconds) else self._good_in_row + 1
            if self._good_in_row >= GOOD_IN_A_ROW:
                self._recover()
            return
        self._uses += 1
        part = max(1 / self._uses, _NORMAL_PART)
        if self._is_slow(self._recent):
            self.reason = (
                f"its store takes {self._recent * 1000:.0f} ms for a commit, "
                f"{self._normal * 1000:.0f} ms is normal"
            )
            return
        self._normal += part * (seconds - self._normal)

    def is_full(self, why: str) -> None:
        """Note that the store refused jobs for lack of room."""
        self.no_room, self._stored_in_row = why, 0

    def stored(self) -> None:
        """Note that the store took jobs."""
        self._stored_in_row += 1
        if self._stored_in_row >= GOOD_IN_A_ROW:
            self.no_room = ""

    def failed(self, now: float, cause: str = "") -> None:
        """Note that a use failed."""
        self.cause = cause
        self._failures_in_row += 1
        self._good_in_row = 0
        self._note(int(now), failures=1)
        if self.reason:
            return
        settings = self._settings
        uses, failures = self._used.total(), self._failed.total()
        if self._failures_in_row >= settings.health_failures_in_row:
            self.reason = f"its store failed {self._failures_in_row} times in a row"
        elif uses >= LEAST_OUTCOMES and failures >= settings.health_failure_share * uses:
            window = f"{settings.health_window_seconds:g} s"
            self.reason = f"its store failed {failures} of {uses} times within {window}"

    def _is_slow(self, seconds: float) -> bool:
        if self._uses < LEAST_USES:
            return False
        settings = self._settings
        least = settings.health_slow_ms / 1000
        return seconds > max(least, settings.health_slow_factor * self._normal)

    def _note(self, second: int, failures: int) -> None:
        if second not in self._used:
            before = second - self._settings.health_window_seconds
            for past in [past for past in self._used if past < before]:
                del self._used[past], self._failed[past]
        self._used[second] += 1
        self._failed[second] += failures

    def _recover(self) -> None:
        self.reason = ""
        self._good_in_row = 0
        self._recent = self._normal
        self._used.clear()
        self._failed.clear()


# --- locked queues --------------------------------------------------------------------------

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
        """Guard a use of the store for `queue`. Raises StorageLocked, at once where one is known
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
        """Record that a try that began at `started` met a lock."""
        now = self._clock.monotonic()
        lock = self.known.get(error.queue)
        if lock is None:
            log.warning("waits for a lock: %s", error.message)
            lock = self.known[error.queue] = _Lock(started)
        lock.error, lock.waits = error, True
        lock.retry_at = now + max(_RETRY_SECONDS, (now - started) * _SHARE_OF_TRIES)

    def holding(self, queues: Iterable[str]) -> StorageLocked | None:
        """Return why calls that touch any of `queues` must not be tried now; None if they may."""
        if not self.known:
            return None
        for queue in (WHOLE_STORE, *queues):
            lock = self.known.get(queue)
            if lock is not None and lock.waits:
                return lock.error
        return None

    def passed(self, queues: Iterable[str]) -> None:
        """Record that a try that touched `queues` met no lock. One met later is another."""
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
        """Return when `due` has something to say next."""
        return min((lock.retry_at for lock in self.known.values() if lock.waits), default=math.inf)

    def due(self) -> tuple[list[str], list[CallEntry]]:
        """Return the queues that may be tried again, and the calls that waited for that. A lock
        that was not met again is forgotten."""
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
