"""How deep the queues are and how old their oldest ready jobs, at the cost of what has changed.

Each time, the queues with changes are looked at, up to a bound, and some of the others in turn:
ages grow without a change, and another program's writes to the store show in nothing that a shard
does. The gauges of a queue that is locked stay as they are until it can be read again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from itertools import islice

from pinlaterd.clock import Clock
from pinlaterd.engines.base import StorageEngine
from pinlaterd.errors import StorageLocked
from pinlaterd.model import JobState
from pinlaterd.shard.locks import QueueLocks
from pinlaterd.shard.works import Memory
from pinlaterd.stats import Stats

_STATE_NAMES = {
    JobState.PENDING: "pending",
    JobState.IN_PROGRESS: "in_progress",
    JobState.SUCCEEDED: "succeeded",
    JobState.FAILED: "failed",
}
# Queues without changes that one refresh looks at.
_QUEUES_IN_TURN = 100
# Calls wait for a refresh: it ends after so many queues, or so much time.
_MOST_QUEUES, _MOST_SECONDS = 1_000, 0.02


class QueueGauges:
    """The gauges of a shard's queues, and which of them hold jobs that upkeep has to do with."""

    def __init__(
        self,
        engine: StorageEngine,
        memory: Memory,
        locks: QueueLocks,
        clock: Clock,
        stats: Stats,
    ) -> None:
        self._engine = engine
        self._memory = memory
        self._locks = locks
        self._clock = clock
        self._stats = stats
        self._in_turn: deque[str] = deque()
        self._waiting: dict[str, None] = {}  # queues to look at, the first to change first
        self._holding: dict[str, AbstractSet[JobState]] = {}
        self._counting: set[str] = set()

    def holding(self) -> Mapping[str, AbstractSet[JobState]]:
        """Queues that hold jobs in progress, succeeded or failed, as of the last refresh."""
        return self._holding

    def refresh(self, now_ms: int) -> None:
        memory = self._memory
        if not self._in_turn:
            self._in_turn.extend(memory.ready.queues())
        turns = min(_QUEUES_IN_TURN, len(self._in_turn))
        self._waiting |= dict.fromkeys(memory.changed)
        self._waiting |= dict.fromkeys([self._in_turn.popleft() for _ in range(turns)])
        memory.changed.clear()
        queues = list(islice(self._waiting, _MOST_QUEUES))
        depths = self._engine.depths(queues)
        until = self._clock.monotonic() + _MOST_SECONDS
        for queue in queues:
            started = self._clock.monotonic()
            if started > until:
                break
            if self._locks.holding((queue,)):
                continue
            self._counting.discard(queue)
            if queue in depths and queue in memory.ready:
                try:
                    self._show(queue, depths[queue], now_ms)
                except StorageLocked as error:
                    self._locks.met(error, started=started, now=self._clock.monotonic())
                    continue
            else:
                self._holding.pop(queue, None)
                self._stats.drop_queue(queue)
            del self._waiting[queue]
        self._waiting |= dict.fromkeys(self._counting)  # they are looked at until they are known
        self._stats.gauge("shard_queues_counting", len(self._counting))

    def _show(
        self, queue: str, depths: Mapping[tuple[int, JobState], int] | None, now_ms: int
    ) -> None:
        oldest_ms = self._memory.ready.oldest_ms(queue)
        age_ms = 0 if oldest_ms is None else now_ms - oldest_ms
        self._stats.peak(f"{queue}_oldest_ready_age_ms", age_ms)
        if depths is not None:
            self._show_depths(queue, depths, now_ms)
            return
        self._counting.add(queue)
        self._holding[queue] = frozenset(JobState)
        for name in (*_STATE_NAMES.values(), "scheduled"):
            self._stats.drop_gauge(f"{queue}_{name}")

    def _show_depths(
        self, queue: str, depths: Mapping[tuple[int, JobState], int], now_ms: int
    ) -> None:
        """Jobs that are scheduled are among the pending ones."""
        ready, stats = self._memory.ready, self._stats
        totals = dict.fromkeys(JobState, 0)
        pending: dict[int, int] = {}
        for (priority, state), jobs in depths.items():
            totals[state] += jobs
            if state is JobState.PENDING and jobs:
                pending[priority] = jobs
        for state, jobs in totals.items():
            stats.gauge(f"{queue}_{_STATE_NAMES[state]}", jobs)
        held = {state for state, jobs in totals.items() if jobs and state is not JobState.PENDING}
        if held:
            self._holding[queue] = held
        else:
            self._holding.pop(queue, None)
        stats.gauge(f"{queue}_scheduled", ready.scheduled(queue, pending, now_ms))
