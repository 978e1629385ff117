"""Statistics of one process: counters, gauges and histograms, and snapshots of them, which are sent
and add up over processes. A process has one Stats object, which is passed in, never global.

Counters and histograms are totals since a process started; figures of the last minute are the
difference of two snapshots. Names of a queue's figures are `<queue>_<figure>`, but for
`job_body_size_<queue>`; docs/metrics.md lists them, with the names that Prometheus has for them.

A histogram has buckets that grow by 8 %: any percentile within 4 %, in bounded memory. Buckets are
the same in every process, so histograms merge without loss, also as JSON. Count, sum, minimum and
maximum are exact.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from math import log
from typing import NamedTuple, TypedDict


@lru_cache(10_000)
def natural(name: str) -> str:
    """Return the key by which py2 is sorted before py10."""
    return re.sub(r"[0-9]+", lambda digits: digits[0].zfill(20), name)


BODY_SIZE = "job_body_size_"
STATES = ("pending", "in_progress", "succeeded", "failed")
COUNTERS = (
    "enqueue",
    "enqueue_rejected",
    "dequeue",
    "dequeue_requests_rate_limited",
    "claim_mismatch",
    "ack_succeeded",
    "ack_failed",
    "ack_noop",
    "finish",
    "finish_noop",
    "checkpoint",
    "checkpoint_noop",
    "timeout_done",
    "timeout_retry",
    "expired",
    "succeeded_gc",
    "failed_gc",
    "pushed",
    "push_failed",
    "push_overdue",
)
GAUGES = (
    *("scheduled", "oldest_ready_age_ms", "rate_limit", "rate_share", "rate_demand"),
    *("in_progress_limit", "pending_limit", "held_by_limit", "push_concurrency"),
)
HISTOGRAMS = ("dequeue_delay_ms", "first_dequeue_delay_ms")


def names_of(queue: str) -> Iterator[str]:
    """List every name that a figure of `queue` may have."""
    yield BODY_SIZE + queue
    for figure in (*STATES, *COUNTERS, *GAUGES, *HISTOGRAMS):
        yield f"{queue}_{figure}"


class StatsSnapshot(TypedDict):
    counters: dict[str, int]
    gauges: dict[str, int | float]  # added up over processes
    peaks: dict[str, int | float]  # gauges too, but of several processes the highest counts
    histograms: dict[str, Histogram]


class Changes(NamedTuple):
    """The difference between two snapshots: names that were dropped, then the figures of `now`."""

    now: StatsSnapshot
    dropped: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.dropped) or any(self.now.values())


class Stats:
    """Counters, gauges and histograms by name, since the process started. Used by one
    thread; every call costs well under a microsecond."""

    def __init__(self) -> None:
        self._counters: defaultdict[str, int] = defaultdict(int)
        self._gauges: dict[str, float] = {}
        self._peaks: dict[str, float] = {}
        self._histograms: defaultdict[str, Histogram] = defaultdict(Histogram)
        # Names since `take_changes`, so that a report costs what has changed, not what there is.
        self._changed: set[str] = set()
        self._dropped: set[str] = set()

    def count(self, name: str, by: int = 1) -> None:
        self._counters[name] += by
        self._changed.add(name)

    def gauge(self, name: str, value: float) -> None:
        """Set a figure as it is now; over several processes it is added up."""
        if self._gauges.get(name) != value:
            self._gauges[name] = value
            self._changed.add(name)

    def peak(self, name: str, value: float) -> None:
        """Set a gauge of which, over several processes, the highest counts: ages, lags."""
        if self._peaks.get(name) != value:
            self._peaks[name] = value
            self._changed.add(name)

    def drop_gauge(self, name: str) -> None:
        """Forget a gauge or peak whose subject has gone. None of that name is no error."""
        self._drop((name,))

    def drop_queue(self, queue: str) -> None:
        """Forget all figures of a queue that was deleted, also those of earlier processes."""
        self._drop(names_of(queue))

    def _drop(self, names: Iterable[str]) -> None:
        for name in names:
            self._dropped.add(name)
            for section in (self._counters, self._gauges, self._peaks, self._histograms):
                section.pop(name, None)

    def record(self, name: str, value: float) -> None:
        """Add one sample to the histogram `name`."""
        self._histograms[name].add(value)
        self._changed.add(name)

    def record_each(self, names: Iterable[str], values: Sequence[int]) -> None:
        """Add each of `values` to each of `names`: several times faster than `record`."""
        if not values:
            return
        samples = Histogram.of(values) if len(values) > 1 else None
        for name in names:
            if samples is None:
                self._histograms[name].add(values[0])
            else:
                self._histograms[name].add_all(samples)
            self._changed.add(name)

    def snapshot(self) -> StatsSnapshot:
        return {
            "counters": dict(self._counters),
            "gauges": dict(self._gauges),
            "peaks": dict(self._peaks),
            "histograms": {name: found.copy() for name, found in self._histograms.items()},
        }

    def take_changes(self) -> Changes:
        """Return what has changed since the last call; the first time, everything."""
        changed, self._changed = self._changed, set()
        dropped, self._dropped = self._dropped, set()
        counters, gauges, peaks = self._counters, self._gauges, self._peaks
        histograms = self._histograms
        now: StatsSnapshot = {
            "counters": {name: counters[name] for name in changed if name in counters},
            "gauges": {name: gauges[name] for name in changed if name in gauges},
            "peaks": {name: peaks[name] for name in changed if name in peaks},
            "histograms": {name: histograms[name].copy() for name in changed if name in histograms},
        }
        return Changes(now, tuple(sorted(dropped)))


# --- snapshots -------------------------------------------------------------------------------


def empty() -> StatsSnapshot:
    return {"counters": {}, "gauges": {}, "peaks": {}, "histograms": {}}


def merge(snapshots: Iterable[StatsSnapshot]) -> StatsSnapshot:
    """Make one snapshot of all: counters, gauges and histograms add up, the highest peak counts."""
    merged = empty()
    for snapshot in snapshots:
        for name, count in snapshot["counters"].items():
            merged["counters"][name] = merged["counters"].get(name, 0) + count
        for name, value in snapshot["gauges"].items():
            merged["gauges"][name] = merged["gauges"].get(name, 0) + value
        for name, value in snapshot["peaks"].items():
            merged["peaks"][name] = max(merged["peaks"].get(name, value), value)
        for name, data in snapshot["histograms"].items():
            merged["histograms"].setdefault(name, Histogram()).add_all(data)
    return merged


def raised(changed: StatsSnapshot, earlier: StatsSnapshot) -> StatsSnapshot:
    """Return the totals of `changed` with those that `earlier` has of the same names."""
    same = empty()
    for name in changed["counters"].keys() & earlier["counters"].keys():
        same["counters"][name] = earlier["counters"][name]
    for name in changed["histograms"].keys() & earlier["histograms"].keys():
        same["histograms"][name] = earlier["histograms"][name]
    return merge([changed, same])


def totals(snapshot: StatsSnapshot) -> StatsSnapshot:
    """Keep what stays true of a process that has ended: its counters and histograms."""
    return empty() | {"counters": snapshot["counters"], "histograms": snapshot["histograms"]}


def forget(snapshot: StatsSnapshot, name: str) -> None:
    snapshot["counters"].pop(name, None)
    snapshot["gauges"].pop(name, None)
    snapshot["peaks"].pop(name, None)
    snapshot["histograms"].pop(name, None)


def apply(before: StatsSnapshot, changes: Changes) -> None:
    """Turn `before` into what it has become."""
    for name in changes.dropped:
        forget(before, name)
    before["counters"].update(changes.now["counters"])
    before["gauges"].update(changes.now["gauges"])
    before["peaks"].update(changes.now["peaks"])
    before["histograms"].update(changes.now["histograms"])


def since(before: StatsSnapshot, now: StatsSnapshot) -> StatsSnapshot:
    """Subtract the counters and histograms of `before` from `now`; keep gauges and peaks.

    A total that has become less began at 0 meanwhile: all of it is later than `before`."""
    counters = {
        name: count - earlier if (earlier := before["counters"].get(name, 0)) <= count else count
        for name, count in now["counters"].items()
    }
    histograms = {
        name: data.since(before["histograms"].get(name)) for name, data in now["histograms"].items()
    }
    return now | {"counters": counters, "histograms": histograms}


# --- histograms ------------------------------------------------------------------------------

GROWTH = 1.08
_LOWEST, _HIGHEST = 1e-4, 1e13  # what is smaller or larger counts as this
_BUCKETS_PER_E = 1.0 / math.log(GROWTH)
_OFFSET = math.ceil(-math.log(_LOWEST) * _BUCKETS_PER_E)  # so that bucket numbers start at 0


SHOWN_PERCENTILES = {
    "p50": 0.5,
    "p90": 0.9,
    "p95": 0.95,
    "p99": 0.99,
    "p999": 0.999,
    "p9999": 0.9999,
}


_KNOWN_BUCKETS = 16_384  # of the small numbers: sizes of common bodies, delays of some seconds


class _Buckets(dict[int, int]):
    """The bucket of an integer. Those of small ones are looked up, not computed."""

    def __missing__(self, value: int) -> int:
        bucket = _bucket(value)
        if 0 <= value < _KNOWN_BUCKETS:
            self[value] = bucket
        return bucket


@dataclass(slots=True)
class Histogram:
    """Samples since the process started, or of some time."""

    count: int = 0
    sum: int | float = 0.0  # whole numbers stay whole on their way through JSON
    minimum: int | float = math.inf
    maximum: int | float = -math.inf
    buckets: dict[int, int] = field(default_factory=dict)

    def add(self, value: float) -> None:
        # on the path of every call: no function calls but these two, no min() and max()
        within = value if _LOWEST < value < _HIGHEST else _clamp(value)
        bucket = int(log(within) * _BUCKETS_PER_E + _OFFSET)
        buckets = self.buckets
        if bucket in buckets:
            buckets[bucket] += 1
        else:
            buckets[bucket] = 1
        self.count += 1
        self.sum += value
        if value < self.minimum:  # noqa: PLR1730
            self.minimum = value
        if value > self.maximum:  # noqa: PLR1730
            self.maximum = value

    @classmethod
    def of(cls, values: Sequence[int]) -> Histogram:
        """Make one of `values`, which are not empty: on the path of every job, so without a line of
        Python for each."""
        buckets = Counter(map(_BUCKETS.__getitem__, values))
        return cls(len(values), float(sum(values)), min(values), max(values), buckets)

    def copy(self) -> Histogram:
        return Histogram(self.count, self.sum, self.minimum, self.maximum, self.buckets.copy())

    def add_all(self, other: Histogram) -> None:
        buckets = self.buckets
        for bucket, times in other.buckets.items():
            buckets[bucket] = buckets.get(bucket, 0) + times
        self.count += other.count
        self.sum += other.sum
        self.minimum = min(self.minimum, other.minimum)
        self.maximum = max(self.maximum, other.maximum)

    def since(self, before: Histogram | None) -> Histogram:
        """Return the samples that this has and `before` had not. Minimum and maximum are those of
        all: of these alone they are not known. `before` None, or more than this: all of them."""
        if before is None or before.count > self.count:
            return self
        left = Counter(self.buckets)
        left.subtract(before.buckets)
        return Histogram(
            self.count - before.count, self.sum - before.sum, self.minimum, self.maximum, +left
        )


def percentiles(data: Histogram, fractions: Sequence[float]) -> list[float]:
    """Return the values that `fractions` (in rising order) of the samples do not exceed."""
    found: list[float] = []
    buckets = sorted(data.buckets.items())
    seen, at = 0, -1
    for fraction in fractions:
        rank = max(1, math.ceil(fraction * data.count))
        while seen < rank and at + 1 < len(buckets):
            at += 1
            seen += buckets[at][1]
        if at < 0:
            found.append(0.0)
            continue
        found.append(min(max(_middle(buckets[at][0]), data.minimum), data.maximum))
    return found


def summary(data: Histogram) -> Mapping[str, float]:
    """Summarize a histogram for display, by Ostrich's names."""
    values = percentiles(data, tuple(SHOWN_PERCENTILES.values()))
    return {
        "average": data.sum / data.count if data.count else 0.0,
        "count": data.count,
        "maximum": data.maximum,
        "minimum": data.minimum,
        **dict(zip(SHOWN_PERCENTILES, values, strict=True)),
        "sum": data.sum,
    }


def _bucket(value: float) -> int:
    within = value if _LOWEST < value < _HIGHEST else _clamp(value)
    return int(log(within) * _BUCKETS_PER_E + _OFFSET)


@cache
def _middle(bucket: int) -> float:
    """Return the value with the same relative error at both ends."""
    low = math.exp((bucket - _OFFSET) / _BUCKETS_PER_E)
    return 2 * low * GROWTH / (1 + GROWTH)


def _clamp(value: float) -> float:
    return _HIGHEST if value >= _HIGHEST else _LOWEST


_BUCKETS = _Buckets()
