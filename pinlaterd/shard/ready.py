"""Which jobs of a shard are ready, in memory: what lets a claim name its jobs without a search.

For each queue and priority there is a _Line of keys (run-after, local id), earliest first. Its
invariants, which the store and everything here rely on:

  - Up to its horizon, the line holds every PENDING key; beyond it, none.
  - `next_due_ms` is a lower bound of the run-after of every PENDING key beyond the horizon.
  - Every key in the line is due: none has a run-after that is still to come.

So a claim takes from the front, and what is left of a line counts as ready. What has come due
beyond the horizon is read from the store when the line is empty, from the horizon on, so that no
read walks over what was read before. A line has bounded room, and so have all lines together;
what has none is cut off at the tail, which moves the horizon back.

A key is either in its line, or in the store beyond the horizon, or taken, to be claimed or
requeued.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple, Protocol

from pinlaterd.model import PendingKey

NEVER_MS = 1 << 62
_FIRST = PendingKey(-1, 0)  # before every key that a store holds
_LAST_LOCAL_ID = (1 << 63) - 1

LINE_KEYS = 16_000
# One read costs no more than the commit of a full batch, so that a refill is not felt by those who
# wait. It is no smaller where there is room, for a batch has to wait for it: on a server that other
# shards keep busy it takes as long as their commits do, however few keys it brings.
READ_KEYS = 4_000
# What other lines make room for, and what a count reads.
_LEAST_READ_KEYS = 1_000
# One `look` ends after so many lines, or READ_KEYS: calls are served between two.
_LINES_A_LOOK = 16
# Of a full memory, shortening lines frees at least this part: it walks over all of them.
_FREED_PART = 8


class PendingReader(Protocol):
    """The part of a StorageEngine that is read here."""

    def read_pending(
        self, queue: str, priority: int, *, after: PendingKey | None, until_ms: int, limit: int
    ) -> Sequence[PendingKey]: ...


class Taken(NamedTuple):
    """Keys of one priority, earliest first, for the taker to claim or to requeue."""

    priority: int
    keys: list[PendingKey]


class _Line:
    """The ready keys of one queue and priority."""

    __slots__ = ("horizon", "keys", "next_due_ms")

    def __init__(self, next_due_ms: int) -> None:
        self.keys: deque[PendingKey] = deque()  # taken from the left, appended on the right
        self.horizon = _FIRST
        self.next_due_ms = next_due_ms

    def extend(self, keys: Sequence[PendingKey], now_ms: int) -> bool:
        """Append `keys` (ascending) if they all belong behind what is here; the common case."""
        last = keys[-1]
        if self.keys and keys[0] <= self.keys[-1]:
            return False
        if last > self.horizon:
            if last.run_after_ms >= self.next_due_ms or last.run_after_ms > now_ms:
                return False
            self.horizon = last
        self.keys += keys
        return True

    def insert(self, key: PendingKey, now_ms: int, *, room: bool) -> bool:
        """Put `key` where it belongs, in memory if it may be here."""
        if key <= self.horizon:
            insort(self.keys, key)
            return True
        run_after_ms = key.run_after_ms
        if run_after_ms < self.next_due_ms:
            if room and run_after_ms <= now_ms:
                self.keys.append(key)
                self.horizon = key
                return True
            self.next_due_ms = run_after_ms
        return False

    def cut(self, keep: int) -> int:
        """Leave all but the first `keep` keys to the store; returns how many those are."""
        dropped = len(self.keys) - keep
        if dropped <= 0:
            return 0
        for _ in range(dropped):
            first_dropped = self.keys.pop()
        self.horizon = (
            self.keys[-1]
            if self.keys
            else PendingKey(first_dropped.run_after_ms, first_dropped.local_id - 1)
        )
        self.next_due_ms = min(self.next_due_ms, first_dropped.run_after_ms)
        return dropped


class ReadyIndex:
    """The ready jobs of all queues of one shard."""

    def __init__(
        self, store: PendingReader, levels: int, *, max_keys: int, max_run_after_ms: int
    ) -> None:
        self._store = store
        self._levels = levels
        self._max_keys = max_keys
        self._line_keys = min(LINE_KEYS, max_keys)
        self._read_keys = min(READ_KEYS, self._line_keys)
        self._least_read_keys = min(_LEAST_READ_KEYS, self._read_keys)
        self._max_run_after_ms = max_run_after_ms
        self._queues: dict[str, list[_Line]] = {}
        self._held = 0
        # When each queue with an empty line has to be looked at, and those times as a heap. An
        # entry of the heap that is not the queue's time is outdated.
        self._looks: dict[str, int] = {}
        self._heap: list[tuple[int, str]] = []

    # --- queues --------------------------------------------------------------------------

    def __len__(self) -> int:
        """Keys in memory."""
        return self._held

    def __contains__(self, queue: str) -> bool:
        return queue in self._queues

    def queues(self) -> Collection[str]:
        return self._queues.keys()

    def open_queue(self, queue: str, nonempty: Iterable[int] = ()) -> None:
        """Begin to index `queue`. Only its priorities in `nonempty` hold PENDING jobs."""
        self._queues[queue] = [_Line(NEVER_MS) for _ in range(self._levels)]
        for priority in nonempty:
            if priority <= self._levels:
                line = self._queues[queue][priority - 1]
                line.next_due_ms = 0
                self._watch(queue, line)

    def reread(self, queue: str) -> None:
        """Begin again with a queue that somebody else may have written to: nothing is known of what
        the store holds. No keys may be taken."""
        self.drop_queue(queue)
        self.open_queue(queue, range(1, self._levels + 1))

    def drop_queue(self, queue: str) -> None:
        self._looks.pop(queue, None)
        for line in self._queues.pop(queue, ()):
            self._held -= len(line.keys)

    def clear(self) -> None:
        self._queues.clear()
        self._looks.clear()
        self._heap.clear()
        self._held = 0

    # --- keys come -----------------------------------------------------------------------

    def add(self, queue: str, priority: int, keys: Sequence[PendingKey], now_ms: int) -> int:
        """Jobs became PENDING: `keys`, ascending. Returns how many of the first are in memory."""
        if not keys:
            return 0
        if priority > self._levels:
            return 0  # of a time with more levels; they come back if the setting does
        line = self._queues[queue][priority - 1]
        count = len(keys)
        if self._held + count > self._max_keys:
            self._make_room(count)
        room = min(self._line_keys - len(line.keys), self._max_keys - self._held)
        if count <= room and line.extend(keys, now_ms):
            self._held += count
            return count
        before = len(line.keys)
        kept = 0
        for key in keys:
            if line.insert(key, now_ms, room=len(line.keys) - before < room):
                kept += 1
        line.cut(self._line_keys)
        self._held += len(line.keys) - before
        self._make_room(0)
        self._watch(queue, line)
        return kept

    def requeue(self, queue: str, taken: Iterable[Taken], now_ms: int) -> None:
        """What was taken was not claimed after all."""
        if queue in self._queues:
            for priority, keys in taken:
                self.add(queue, priority, keys, now_ms)

    def _make_room(self, count: int) -> None:
        """Halve the longest lines until `count` more keys fit, and some more, so that the next time
        is far off.

        Each keeps one, so that what is ready counts as ready: the bound is `max_keys`, or one for
        each line if that is more."""
        while self._held + count > self._max_keys:
            to_free = self._held + count - self._max_keys + self._max_keys // _FREED_PART
            long = [line for lines in self._queues.values() for line in lines if len(line.keys) > 1]
            if not long:
                return
            long.sort(key=lambda line: len(line.keys), reverse=True)
            for line in long:
                dropped = line.cut(max(1, len(line.keys) // 2))
                self._held -= dropped
                to_free -= dropped
                if to_free <= 0:
                    break

    # --- keys go -------------------------------------------------------------------------

    def take(self, queue: str, limit: int, lowest_priority: int, now_ms: int) -> list[Taken]:
        """Up to `limit` ready keys, higher priorities first, within one the earliest first.

        None of a priority below `lowest_priority`; 0: any."""
        taken: list[Taken] = []
        try:
            self._take(taken, queue, limit, lowest_priority, now_ms)
        except BaseException:
            self.requeue(queue, taken, now_ms)
            raise
        return taken

    def _take(
        self, taken: list[Taken], queue: str, limit: int, lowest_priority: int, now_ms: int
    ) -> None:
        for priority, line in enumerate(self._queues[queue][: lowest_priority or None], 1):
            while limit > 0:
                if not line.keys and not self._read(queue, priority, line, now_ms):
                    break
                popleft = line.keys.popleft
                keys = [popleft() for _ in range(min(limit, len(line.keys)))]
                self._held -= len(keys)
                limit -= len(keys)
                taken.append(Taken(priority, keys))
            self._watch(queue, line)
            if limit <= 0:
                break

    def discard(self, queue: str, priority: int, local_ids: Iterable[int]) -> None:
        """Jobs are PENDING no more (deleted)."""
        if priority > self._levels or queue not in self._queues:
            return
        line = self._queues[queue][priority - 1]
        if line.keys:
            gone = frozenset(local_ids)
            before = len(line.keys)
            line.keys = deque([key for key in line.keys if key.local_id not in gone])
            self._held -= before - len(line.keys)
            self._watch(queue, line)

    # --- what is ready -------------------------------------------------------------------

    def counts(self, queue: str, now_ms: int) -> tuple[int, ...]:
        """Ready jobs in memory, by priority; 0 only if none is ready in the store either."""
        lines = self._queues[queue]
        for priority, line in enumerate(lines, 1):
            if not line.keys and line.next_due_ms <= now_ms:
                self._read(queue, priority, line, now_ms)
        return tuple([len(line.keys) for line in lines])

    def has_ready(self, queue: str, lowest_priority: int, now_ms: int) -> bool:
        """Whether `take` would find anything (or has to look in the store)."""
        return any(
            line.keys or line.next_due_ms <= now_ms
            for line in self._queues[queue][: lowest_priority or None]
        )

    def oldest_ms(self, queue: str) -> int | None:
        """The earliest run-after of a ready job, of any priority."""
        first = [line.keys[0].run_after_ms for line in self._queues[queue] if line.keys]
        return min(first, default=None)

    def scheduled(self, queue: str, pending: Mapping[int, int], now_ms: int) -> int:
        """How many of `pending` (jobs by priority) have a run-after that is still to come.

        While more is ready than is in memory, they are counted in the store, up to one read for
        each priority: then there may be more."""
        found = 0
        for priority, jobs in pending.items():
            if priority > self._levels:
                continue
            line = self._queues[queue][priority - 1]
            if line.next_due_ms > now_ms:
                found += max(0, jobs - len(line.keys))
                continue
            behind = self._store.read_pending(
                queue,
                priority,
                after=PendingKey(now_ms, _LAST_LOCAL_ID),
                until_ms=self._max_run_after_ms,
                limit=self._least_read_keys,
            )
            found += len(behind)
        return found

    def is_counted(self, queue: str, now_ms: int) -> bool:
        """Whether `counts` needs no read. If not, a `look` that is due reads."""
        return all(line.keys or line.next_due_ms > now_ms for line in self._queues[queue])

    def wake_ms(self) -> int:
        """When `look` has to be called next; NEVER_MS if nothing is scheduled."""
        return self._heap[0][0] if self._heap else NEVER_MS

    def look(
        self, now_ms: int, skipped: Callable[[str], bool] = lambda _queue: False
    ) -> Iterator[str]:
        """Read what has come due into lines that are empty, a bounded part of it: `wake_ms` tells
        whether there is more. Yields each queue once it was read for. Those that are `skipped` wait
        for `look_again`; one whose read fails is looked at the next time."""
        lines_left, most_held = _LINES_A_LOOK, self._held + self._read_keys
        while self.wake_ms() <= now_ms and lines_left > 0 and self._held < most_held:
            due_ms, queue = heappop(self._heap)
            if self._looks.get(queue) != due_ms:
                continue
            del self._looks[queue]
            if skipped(queue):
                continue
            try:
                for priority, line in enumerate(self._queues[queue], 1):
                    if not line.keys and line.next_due_ms <= now_ms:
                        lines_left -= 1
                        self._read(queue, priority, line, now_ms)
            finally:
                self.look_again(queue)
            yield queue

    def look_again(self, queue: str) -> None:
        """Have `look` read for `queue` when anything of it is due."""
        for line in self._queues[queue]:
            self._watch(queue, line)

    def _watch(self, queue: str, line: _Line) -> None:
        due_ms = line.next_due_ms
        if line.keys or due_ms >= self._looks.get(queue, NEVER_MS):
            return
        self._looks[queue] = due_ms
        heappush(self._heap, (due_ms, queue))
        if len(self._heap) > 2 * len(self._looks) + _LINES_A_LOOK:
            self._heap = [(at, name) for name, at in self._looks.items()]
            heapify(self._heap)

    def _read(self, queue: str, priority: int, line: _Line, now_ms: int) -> bool:
        """Fill an empty line with what has come due beyond its horizon; False if nothing has."""
        if line.next_due_ms > now_ms:
            return False
        after = None if line.horizon is _FIRST else line.horizon
        self._make_room(self._least_read_keys)
        limit = max(1, min(self._read_keys, self._max_keys - self._held))
        keys = self._store.read_pending(queue, priority, after=after, until_ms=now_ms, limit=limit)
        line.keys = deque(keys)
        self._held += len(keys)
        if len(keys) == limit:
            line.horizon = keys[-1]
            line.next_due_ms = keys[-1].run_after_ms
            return True  # there may be more due now: read again when these are taken
        line.horizon = PendingKey(now_ms, _LAST_LOCAL_ID)
        beyond = self._store.read_pending(
            queue, priority, after=line.horizon, until_ms=self._max_run_after_ms, limit=1
        )
        line.next_due_ms = beyond[0].run_after_ms if beyond else NEVER_MS
        self._watch(queue, line)
        return bool(keys)
