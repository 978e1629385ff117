"""The ready jobs of a shard, in memory: they let a claim name its jobs without a search.

For each queue and priority there is a _Line of keys (run-after, local id), earliest first. Its
invariants, which the store and everything here rely on:

  - Up to its horizon, the line holds every PENDING key; beyond it, none.
  - `next_due_ms` is a lower bound of the run-after of every PENDING key beyond the horizon.
  - Every key in the line is due: none has a run-after that is still to come.

So a claim takes from the front, and what is left of a line counts as ready. What has come due
beyond the horizon is read from the store when the line is empty, from the horizon on, so that no
read walks over what was read before. A line has bounded room, and so have all lines together;
what has none is cut off at the tail, which moves the horizon back.

Beside the key of a job that was just enqueued stands its payload, as long as there is room, so that
a claim need not read it: what a PENDING job's worker gets does not change.

A key is either in its line, or in the store beyond the horizon, or taken, to be claimed or
requeued.
"""

from __future__ import annotations

from bisect import bisect
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush
from itertools import compress, repeat, starmap
from operator import not_
from typing import Any, NamedTuple

from pinlaterd.errors import StorageLocked
from pinlaterd.model import Payload, PendingKey, body_of

NEVER_MS = 1 << 62
# Run-after and local id, as PendingKey: of each job there is one, and a plain tuple costs less.
Key = tuple[int, int]
_FIRST: Key = (-1, 0)  # before every key that a store holds
_LAST_LOCAL_ID = (1 << 63) - 1

# One read costs no more than the commit of a full batch, so that a refill is not felt by those who
# wait. It is no smaller where there is room, for a batch has to wait for it: on a server that other
# shards keep busy it takes as long as their commits do, however few keys it brings.
READ_KEYS = 4_000
# What other lines make room for, and what a count reads.
_LEAST_READ_KEYS = 1_000
# One `look` ends after so many lines, or READ_KEYS: calls are served between two.
_LINES_A_LOOK = 16
# Of all keys, what one line leaves to the others; and what a full memory frees at least by
# shortening lines, as it walks over all of them.
_OTHERS_PART, _FREED_PART = 4, 8
# What keys and payloads take of the bytes in memory; the rest is for what a deep queue costs beside
# them: the store's own cache, and batches on their way.
_KEYS_PART, _PAYLOADS_PART = 0.25, 0.45
# A PendingKey with its two numbers and its places in two deques (CPython 3.11).
KEY_BYTES = 128
# A Payload, the header of its body and what allocators add (CPython 3.11).
PAYLOAD_OVERHEAD_BYTES = 120

# StorageEngine.read_pending.
ReadPending = Callable[..., Sequence[PendingKey]]


class Taken(NamedTuple):
    """Jobs of one priority, earliest first, for the taker to claim or to requeue."""

    priority: int
    keys: Sequence[Key]
    payloads: Sequence[Payload | None]


# Of lines without keys, as most are where there are many queues: never changed.
_EMPTY: deque[Any] = deque(maxlen=0)


class _Line:
    """The ready jobs of one queue and priority."""

    __slots__ = ("horizon", "keys", "next_due_ms", "payloads")

    def __init__(self, next_due_ms: int) -> None:
        self.keys: deque[Key] = _EMPTY  # taken from the left, appended on the right
        self.payloads: deque[Payload | None] = _EMPTY  # of the same jobs
        self.horizon = _FIRST
        self.next_due_ms = next_due_ms

    def extend(self, keys: Sequence[Key], payloads: Sequence[Payload | None], now_ms: int) -> bool:
        """Add `keys` (ascending) if they all belong behind what is here, or all in front of it; the
        common cases."""
        held, last = self.keys, keys[-1]
        if held and last < held[0]:
            held.extendleft(reversed(keys))
            self.payloads.extendleft(reversed(payloads))
            return True
        if held and keys[0] <= held[-1]:
            return False
        if last > self.horizon:
            if last[0] >= self.next_due_ms or last[0] > now_ms:
                return False
            self.horizon = last
        if held:
            held += keys
            self.payloads += payloads
        else:
            self.keys, self.payloads = deque(keys), deque(payloads)
        return True

    def insert(self, key: Key, payload: Payload | None, now_ms: int, *, room: bool) -> bool:
        """Put a job where it belongs, in memory if it may be here."""
        if key > self.horizon:
            run_after_ms = key[0]
            if run_after_ms >= self.next_due_ms:
                return False
            if not room or run_after_ms > now_ms:
                self.next_due_ms = run_after_ms
                return False
            self.horizon = key
        if not self.keys:
            self.keys, self.payloads = deque(), deque()
        at = bisect(self.keys, key)
        self.keys.insert(at, key)
        self.payloads.insert(at, payload)
        return True

    def take(self, count: int) -> tuple[list[Key], list[Payload | None]]:
        """Take the first ones."""
        if count == len(self.keys):
            taken = list(self.keys), list(self.payloads)
            self.keys = self.payloads = _EMPTY
            return taken
        keys = starmap(self.keys.popleft, repeat((), count))  # half the cost of a comprehension
        return list(keys), list(starmap(self.payloads.popleft, repeat((), count)))

    def cut(self, keep: int) -> list[Payload | None]:
        """Leave all but the first `keep` jobs to the store; returns what was known of those."""
        dropped = []
        for _ in range(len(self.keys) - keep):
            run_after_ms, local_id = self.keys.pop()
            dropped.append(self.payloads.pop())
        if dropped:
            self.horizon = self.keys[-1] if self.keys else (run_after_ms, local_id - 1)
            self.next_due_ms = min(self.next_due_ms, run_after_ms)
        return dropped


def _size(payloads: Iterable[Payload | None]) -> int:
    sizes = list(map(len, map(body_of, filter(None, payloads))))
    return sum(sizes) + PAYLOAD_OVERHEAD_BYTES * len(sizes)


class ReadyIndex:
    """The ready jobs of all queues of one shard."""

    def __init__(
        self, read_pending: ReadPending, levels: int, *, most_bytes: int, max_run_after_ms: int
    ) -> None:
        self._read_pending = read_pending
        self._levels = levels
        self._max_keys = max_keys = int(most_bytes * _KEYS_PART) // KEY_BYTES
        self._line_keys = max(1, max_keys - max_keys // _OTHERS_PART)
        self._read_keys = min(READ_KEYS, self._line_keys)
        self._least_read_keys = min(_LEAST_READ_KEYS, self._read_keys)
        self._max_payload_bytes = int(most_bytes * _PAYLOADS_PART)
        self._max_run_after_ms = max_run_after_ms
        self._queues: dict[str, list[_Line]] = {}
        self._held = 0  # keys
        self._payload_bytes = 0
        # When each queue with an empty line has to be looked at, and those times as a heap. An
        # entry of the heap that is not the queue's time is outdated.
        self._looks: dict[str, int] = {}
        self._heap: list[tuple[int, str]] = []

    # --- queues --------------------------------------------------------------------------

    def __len__(self) -> int:
        """Count the keys in memory."""
        return self._held

    @property
    def held_bytes(self) -> int:
        return self._held * KEY_BYTES + self._payload_bytes

    def __contains__(self, queue: str) -> bool:
        return queue in self._queues

    def queues(self) -> Collection[str]:
        return self._queues.keys()

    def open_queue(self, queue: str, nonempty: Iterable[int] = ()) -> None:
        """Begin to index `queue`. Only its priorities in `nonempty` hold PENDING jobs."""
        self._queues[queue] = [_Line(NEVER_MS) for _ in range(self._levels)]
        for priority in nonempty:
            if 1 <= priority <= self._levels:
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
            self._cut(line, 0)

    def clear(self) -> None:
        self._queues.clear()
        self._looks.clear()
        self._heap.clear()
        self._held = self._payload_bytes = 0

    # --- keys come -----------------------------------------------------------------------

    def add(
        self,
        queue: str,
        priority: int,
        keys: Sequence[Key],
        now_ms: int,
        payloads: Sequence[Payload | None] = (),
    ) -> None:
        """Add jobs that became PENDING: `keys`, ascending, and what is known of their payloads.

        A priority may be of a time with more levels; its jobs come back if the setting does."""
        if not keys or priority > self._levels or queue not in self._queues:
            return
        line = self._queues[queue][priority - 1]
        count, size = len(keys), _size(payloads)
        if not size or self._payload_bytes + size > self._max_payload_bytes:
            payloads, size = [None] * count, 0  # those here are ahead of them
        if self._held + count > self._max_keys:
            self._make_room(count)
        room = min(self._line_keys - len(line.keys), self._max_keys - self._held)
        if count <= room and line.extend(keys, payloads, now_ms):
            self._held += count
            self._payload_bytes += size
            return
        before = len(line.keys)
        inserted = [
            line.insert(key, payload, now_ms, room=len(line.keys) - before < room)
            for key, payload in zip(keys, payloads, strict=True)
        ]
        self._held += sum(inserted)
        self._payload_bytes += _size(compress(payloads, inserted))
        self._cut(line, self._line_keys)
        self._make_room(0)
        self._watch(queue, line)

    def requeue(self, queue: str, taken: Iterable[Taken], now_ms: int) -> None:
        """Return jobs that were taken and not claimed."""
        for each in taken:
            self.add(queue, each.priority, each.keys, now_ms, each.payloads)

    def _cut(self, line: _Line, keep: int) -> int:
        """Shorten `line`; returns by how many keys."""
        dropped = line.cut(keep)
        self._held -= len(dropped)
        self._payload_bytes -= _size(dropped)
        return len(dropped)

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
                to_free -= self._cut(line, max(1, len(line.keys) // 2))
                if to_free <= 0:
                    break

    # --- keys go -------------------------------------------------------------------------

    def take(self, queue: str, limit: int, lowest_priority: int, now_ms: int) -> list[Taken]:
        """Take up to `limit` ready jobs, higher priorities first, within one the earliest first.

        None of a priority below `lowest_priority`; 0: any."""
        taken: list[Taken] = []
        try:
            lines = self._queues.get(queue, ())[: lowest_priority or None]
            for priority, line in enumerate(lines, 1):
                if not line.keys and line.next_due_ms > now_ms:
                    continue
                while limit > 0 and (line.keys or self._read(queue, priority, line, now_ms)):
                    count = min(limit, len(line.keys))
                    keys, payloads = line.take(count)
                    taken.append(Taken(priority, keys, payloads))
                    limit -= count
                    self._held -= count
                    if self._payload_bytes:
                        self._payload_bytes -= _size(payloads)
                if not line.keys:
                    self._watch(queue, line)
                if limit <= 0:
                    break
        except BaseException:
            self.requeue(queue, taken, now_ms)
            raise
        return taken

    def discard(self, queue: str, priority: int, local_ids: Iterable[int]) -> None:
        """Remove jobs that are PENDING no more (deleted)."""
        if priority > self._levels or queue not in self._queues:
            return
        line, gone = self._queues[queue][priority - 1], set(local_ids)
        dropped: list[Payload | None] = []
        while line.keys and line.keys[0][1] in gone:  # mostly the first ones are deleted
            gone.remove(line.keys.popleft()[1])
            dropped.append(line.payloads.popleft())
        if gone:
            kept = [key[1] not in gone for key in line.keys]
            if not all(kept):
                dropped += compress(line.payloads, map(not_, kept))
                line.keys = deque(compress(line.keys, kept))
                line.payloads = deque(compress(line.payloads, kept))
        self._held -= len(dropped)
        self._payload_bytes -= _size(dropped)
        self._watch(queue, line)

    # --- what is ready -------------------------------------------------------------------

    def counts(self, queue: str, now_ms: int) -> tuple[int, ...]:
        """Ready jobs in memory, by priority; 0 only if none is ready in the store either. Empty if
        there is no such queue."""
        lines = self._queues.get(queue, ())
        for priority, line in enumerate(lines, 1):
            if not line.keys and line.next_due_ms <= now_ms:
                self._read(queue, priority, line, now_ms)
        return tuple([len(line.keys) for line in lines])

    def no_counts(self, queue: str) -> tuple[int, ...]:
        """Return the counts of a queue in which nothing is ready."""
        return (0,) * len(self._queues.get(queue, ()))

    def has_ready(self, queue: str, lowest_priority: int, now_ms: int) -> bool:
        """Tell whether `take` would find anything (or has to look in the store)."""
        return any(
            line.keys or line.next_due_ms <= now_ms
            for line in self._queues.get(queue, ())[: lowest_priority or None]
        )

    def oldest_ms(self, queue: str) -> int | None:
        """Return the earliest run-after of a ready job, of any priority."""
        first = [line.keys[0][0] for line in self._queues[queue] if line.keys]
        return min(first, default=None)

    def scheduled(self, queue: str, pending: Mapping[int, int], now_ms: int) -> int:
        """Count those of `pending` (jobs by priority) whose run-after is still to come.

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
            behind = self._read_pending(
                queue,
                priority,
                after=PendingKey(now_ms, _LAST_LOCAL_ID),
                until_ms=self._max_run_after_ms,
                limit=self._least_read_keys,
            )
            found += len(behind)
        return found

    def is_counted(self, queue: str, now_ms: int) -> bool:
        """Tell whether `counts` needs no read. If not, a `look` that is due reads."""
        return all(line.keys or line.next_due_ms > now_ms for line in self._queues[queue])

    def wake_ms(self) -> int:
        """Return when `look` has to be called next; NEVER_MS if nothing is scheduled."""
        return self._heap[0][0] if self._heap else NEVER_MS

    def look(self, now_ms: int) -> Iterator[str]:
        """Read what has come due into lines that are empty, a bounded part of it: `wake_ms` tells
        whether there is more. Yields each queue once it was read for. One that is locked waits for
        `look_again`; one whose read fails is looked at the next time."""
        lines_left, most_held = _LINES_A_LOOK, self._held + self._read_keys
        while self.wake_ms() <= now_ms and lines_left > 0 and self._held < most_held:
            due_ms, queue = heappop(self._heap)
            if self._looks.get(queue) != due_ms:
                continue
            del self._looks[queue]
            try:
                for priority, line in enumerate(self._queues[queue], 1):
                    if not line.keys and line.next_due_ms <= now_ms:
                        lines_left -= 1
                        self._read(queue, priority, line, now_ms)
            except StorageLocked:
                continue
            except BaseException:
                self.look_again(queue)
                raise
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
        after = None if line.horizon is _FIRST else PendingKey(*line.horizon)
        self._make_room(self._least_read_keys)
        limit = max(1, min(self._read_keys, self._max_keys - self._held))
        keys = self._read_pending(queue, priority, after=after, until_ms=now_ms, limit=limit)
        if keys:
            line.keys, line.payloads = deque(keys), deque([None] * len(keys))
        self._held += len(keys)
        if len(keys) == limit:
            line.horizon = keys[-1]
            line.next_due_ms = keys[-1].run_after_ms
            return True  # there may be more due now: read again when these are taken
        line.horizon = PendingKey(now_ms, _LAST_LOCAL_ID)
        beyond = self._read_pending(
            queue, priority, after=line.horizon, until_ms=self._max_run_after_ms, limit=1
        )
        line.next_due_ms = beyond[0].run_after_ms if beyond else NEVER_MS
        self._watch(queue, line)
        return bool(keys)
