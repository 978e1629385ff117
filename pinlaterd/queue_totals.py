"""The totals of queues: what all processes together report of each at one time.

Pure. The coordinator keeps the totals of several times; what happened in between is the difference
of two. `top`, history, verdicts and the dashboard show such differences.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import msgspec

from pinlaterd.stats import Histogram, StatsSnapshot

# Every queue that a shard has, and nothing else, has a peak whose name ends so.
AGE = "_oldest_ready_age_ms"
_LIMITED = "_dequeue_requests_rate_limited"
_LIMITS = ("rate_limit", "in_progress_limit", "pending_limit")


class _Names(NamedTuple):
    """The names of a queue's figures in a shard's statistics."""

    enqueue: str
    dequeue: str
    ack_succeeded: str
    ack_failed: str
    timeout_retry: str
    timeout_done: str
    enqueue_rejected: str
    pending: str
    scheduled: str
    in_progress: str
    succeeded: str
    failed: str
    held_by_limit: str
    dequeue_delay_ms: str


@lru_cache(maxsize=20_000)
def _names(queue: str) -> _Names:
    return _Names(*[f"{queue}_{name}" for name in _Names._fields])


class QueueTotals(msgspec.Struct):
    """The totals of one queue. Counters: since processes began; states: as it is now."""

    enqueued: int = 0
    dequeued: int = 0
    succeeded: int = 0  # attempts, as are the failed ones
    failed: int = 0
    timed_out: int = 0  # claims
    refused: int = 0  # dequeues over the rate, enqueues beyond max_pending
    ready: int = 0
    scheduled: int = 0
    in_progress: int = 0
    kept_succeeded: int = 0  # jobs that have ended, and are kept
    kept_failed: int = 0
    held_by_limit: int = 0
    oldest_ms: float = 0
    counted: int = 0  # shards that know how many of its jobs they hold
    rate_limit: float | None = None  # jobs/s, this server's part
    in_progress_limit: float | None = None
    pending_limit: float | None = None
    waits: dict[str, Histogram] = {}  # how long jobs waited until they were handed out, by process


class Recent(msgspec.Struct):
    """The activity of a queue between two times, per second."""

    seconds: float
    enqueued: float = 0
    dequeued: float = 0
    succeeded: float = 0
    failed: float = 0
    timed_out: float = 0
    refused: float = 0
    wait: Histogram | None = None  # how long jobs waited that were handed out, if any were

    def add_waits(self, waits: Histogram | None) -> None:
        """Add waits to those that are known."""
        if waits is not None and waits.count:
            self.wait = self.wait or Histogram()
            self.wait.add_all(waits)


RATES = ("enqueued", "dequeued", "succeeded", "failed", "timed_out", "refused")


def totals_of(
    stats: Mapping[str, StatsSnapshot], shards: Collection[str]
) -> dict[str, QueueTotals]:
    """Return the totals of all queues. `stats`: by process; `shards`: names of shards' processes.

    What a process reports later does not change them."""
    found: dict[str, QueueTotals] = {}
    for process, snapshot in stats.items():
        if process in shards:
            _add_shard(found, process, snapshot)
    for process, snapshot in stats.items():
        if process not in shards:
            _add_limits(found, snapshot)
    return found


def _add_limits(found: Mapping[str, QueueTotals], snapshot: StatsSnapshot) -> None:
    """Add what routers and the coordinator report of queues with limits, which are few."""
    for name, count in snapshot["counters"].items():
        if name.endswith(_LIMITED) and (queue := found.get(name.removesuffix(_LIMITED))):
            queue.refused += count
    for name, value in snapshot["gauges"].items():
        for limit in _LIMITS:
            if name.endswith(f"_{limit}") and (queue := found.get(name.removesuffix(f"_{limit}"))):
                setattr(queue, limit, value)


def _add_shard(found: dict[str, QueueTotals], process: str, snapshot: StatsSnapshot) -> None:
    count, gauge = snapshot["counters"].get, snapshot["gauges"].get
    histograms = snapshot["histograms"]
    for name, age_ms in snapshot["peaks"].items():
        if not name.endswith(AGE):
            continue
        queue = name.removesuffix(AGE)
        known = found.get(queue)
        if known is None:
            known = found[queue] = QueueTotals(waits={})
        names = _names(queue)
        known.enqueued += count(names.enqueue, 0)
        known.dequeued += count(names.dequeue, 0)
        known.succeeded += count(names.ack_succeeded, 0)
        known.failed += count(names.ack_failed, 0)
        known.timed_out += count(names.timeout_retry, 0) + count(names.timeout_done, 0)
        known.refused += count(names.enqueue_rejected, 0)
        known.oldest_ms = max(known.oldest_ms, age_ms)
        wait = histograms.get(names.dequeue_delay_ms)
        if wait is not None:
            known.waits[process] = wait  # a later one takes its place; it does not change
        pending = gauge(names.pending)
        if pending is None:
            continue
        known.counted += 1
        scheduled = round(gauge(names.scheduled, 0))
        known.ready += max(0, round(pending) - scheduled)
        known.scheduled += scheduled
        known.in_progress += round(gauge(names.in_progress, 0))
        known.kept_succeeded += round(gauge(names.succeeded, 0))
        known.kept_failed += round(gauge(names.failed, 0))
        known.held_by_limit += round(gauge(names.held_by_limit, 0))


def recent(
    before: QueueTotals | None, now: QueueTotals, seconds: float, *, with_waits: bool = True
) -> Recent:
    """Return what happened between two totals of a queue. One that was not there had nothing; a
    counter that has become less began at 0 meanwhile."""
    found = Recent(seconds)
    if before is now:
        return found
    earlier = before or _NOTHING
    for name in RATES:
        total = getattr(now, name)
        gained = total - getattr(earlier, name)
        if gained:
            setattr(found, name, (gained if gained > 0 else total) / seconds)
    for process, wait in now.waits.items() if with_waits else ():
        known = earlier.waits.get(process)
        if wait is not known:
            found.add_waits(wait.since(known))
    return found


def merged_recent(parts: Sequence[Recent]) -> Recent:
    """Add up what happened on several servers."""
    if len(parts) == 1:
        return parts[0]
    whole = Recent(max(part.seconds for part in parts))
    for part in parts:
        for name in RATES:
            setattr(whole, name, getattr(whole, name) + getattr(part, name))
        whole.add_waits(part.wait)
    return whole


def merged_totals(parts: Sequence[QueueTotals]) -> QueueTotals:
    """Add up the totals of several servers; of ages the greatest counts."""
    if len(parts) == 1:
        return parts[0]
    whole = QueueTotals()
    for part in parts:
        for name in _ADDED:
            setattr(whole, name, getattr(whole, name) + getattr(part, name))
        for name in _LIMITS:
            limit = getattr(part, name)
            if limit is not None:
                setattr(whole, name, (getattr(whole, name) or 0) + limit)
        whole.oldest_ms = max(whole.oldest_ms, part.oldest_ms)
    return whole


_NOTHING = QueueTotals()
_ADDED = sorted({*QueueTotals.__struct_fields__} - {*_LIMITS, "oldest_ms", "waits"})
