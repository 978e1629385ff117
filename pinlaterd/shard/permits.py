"""Permits of a shard: how many jobs of each limited queue may be in one state here.

All permits of a queue, over all shards, are its limit. The coordinator divides them
(coordinator/permits.py). A shard takes no job beyond its own permits into the state, and reports
which it follows, how many jobs are in the state, and how many more are ready to be. An owner of
the store begins without permits: what its predecessor had may be another shard's by now.

Permits that other shards wait for (`contested`) are handed back with the report that nothing here
needs them. So they move with two messages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence

from pinlaterd.model import JobState
from pinlaterd.wire.control import GrantedPermits, HeldPermits

# How soon changes are reported for which nobody waits.
_REPORT_SECONDS = 0.1
_AGAIN_SECONDS = 1.0  # after which jobs that still wait are reported once more


class _Limited:
    """A limited queue. `grant` is the number of the last grant that is followed; `used`: jobs in
    the state; None while they are counted."""

    __slots__ = ("contested", "grant", "permits", "ready", "reported", "reported_at", "used")

    def __init__(self) -> None:
        self.grant = self.permits = self.ready = 0
        self.used: int | None = None
        self.contested = False
        self.reported: HeldPermits | None = None
        self.reported_at = -math.inf

    @property
    def free(self) -> int:
        return 0 if self.used is None else max(0, self.permits - self.used)


class Permits:
    """The permits for one state of jobs, by queue. Used by the shard's thread."""

    def __init__(
        self,
        state: JobState,
        used: Callable[[str, JobState], int | None],
        monotonic: Callable[[], float],
    ) -> None:
        """`used`: how many jobs of a queue are in a state; None while they are counted."""
        self.state = state
        self._hands_back = state is JobState.IN_PROGRESS
        self._used = used
        self._monotonic = monotonic
        self._is_open = False
        # Others ask only whether a queue is in it, at the cost of a look-up.
        self.queues: dict[str, _Limited] = {}
        self._due: dict[str, float] = {}  # when what has changed is to be reported, by queue

    def follow(self, limited: Collection[str]) -> Collection[str]:
        """Limit these queues only; return those whose limit begins or ends."""
        before = self.queues
        self.queues = {queue: before.get(queue) or _Limited() for queue in limited}
        self._due = {queue: due for queue, due in self._due.items() if queue in self.queues}
        return before.keys() ^ self.queues.keys()

    def begin(self) -> None:
        """Hold no permits: this is another ownership of the store."""
        self.end()
        self._is_open = True
        self.report_all()

    def end(self) -> None:
        """Forget all counts: the store is closed."""
        self._is_open = False
        for limited in self.queues.values():
            limited.permits, limited.used = 0, None

    def held(self, queue: str) -> int:
        """Return the permits for a limited queue."""
        return self.queues[queue].permits

    def free(self, queue: str) -> int:
        """Count the jobs that may be taken into the state now, of a limited queue."""
        limited = self.queues[queue]
        limited.used = self._used(queue, self.state) if self._is_open else None
        return limited.free

    def permitted(self, queue: str, ready: Sequence[int]) -> tuple[int, ...]:
        """Cut the numbers of ready jobs of a limited queue, by priority, to those that permits
        allow; what has changed is reported soon."""
        self.look(queue, waiting=sum(ready))
        left, allowed = self.queues[queue].free, list[int]()
        for jobs in ready:
            allowed.append(min(jobs, left))
            left -= allowed[-1]
        return tuple(allowed)

    def look(self, queue: str, *, waiting: int | None = None) -> None:
        """Have it reported soon if more or fewer jobs are in the state by now, or wait to be."""
        limited = self.queues[queue]
        if waiting is not None:
            limited.ready = waiting
        self.free(queue)
        self._look(queue, limited)

    def is_contested(self, queue: str) -> bool:
        """Return whether jobs wait for permits of a limited queue, here or elsewhere."""
        return self.queues[queue].contested

    def waiting(self, queue: str) -> int:
        """Count the jobs of a limited queue that wait for permits, as was last seen."""
        limited = self.queues[queue]
        return max(0, limited.ready - limited.free)

    # --- what the coordinator is told and grants -----------------------------------------------

    def grant(self, granted: Mapping[str, GrantedPermits]) -> Collection[str]:
        """Follow grants, each unless a later one has come; return their queues."""
        for queue, (number, permits, contested) in granted.items():
            limited = self.queues.get(queue)
            if limited is not None and number > limited.grant:
                limited.grant, limited.permits, limited.contested = number, permits, contested
                self._due[queue] = -math.inf
        return granted.keys()

    def report_all(self) -> None:
        """Have all be reported again: the coordinator may know nothing."""
        self._due = dict.fromkeys(self.queues, -math.inf)

    @property
    def due(self) -> float:
        """When something is to be reported, in monotonic seconds."""
        return min(self._due.values()) if self._due and self._is_open else math.inf

    def report(self) -> Mapping[str, HeldPermits]:
        """Take what is to be reported by now."""
        now = self._monotonic()
        found = {}
        for queue in [queue for queue, due in self._due.items() if due <= now]:
            del self._due[queue]
            limited = self.queues.get(queue)
            if limited is None:
                continue
            self.free(queue)
            if limited.used is not None:
                limited.reported, limited.reported_at = _held(limited, limited.used), now
                found[queue] = limited.reported
                if limited.reported.waits:  # a report may be lost
                    self._due[queue] = now + _AGAIN_SECONDS
        return found

    def _look(self, queue: str, limited: _Limited) -> None:
        """Note when what has changed is to be reported."""
        if limited.used is None:
            return
        if limited.contested and self._hands_back:
            limited.permits = min(limited.permits, limited.used + limited.ready)
        held, reported = _held(limited, limited.used), limited.reported
        if held == reported:
            return
        is_urgent = (
            reported is None
            or held.permits != reported.permits
            or (self._hands_back and held.used > held.permits)  # others wait for these jobs' ends
            or (held.waits and not reported.waits)
            or (limited.contested and held.used < reported.used)  # others may have it
        )
        due = -math.inf if is_urgent else limited.reported_at + _REPORT_SECONDS
        self._due[queue] = min(due, self._due.get(queue, math.inf))


def _held(limited: _Limited, used: int) -> HeldPermits:
    return HeldPermits(limited.grant, limited.permits, used, limited.ready)
