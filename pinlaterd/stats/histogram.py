"""A histogram in buckets that grow by 8 %: any percentile within 4 %, in bounded memory.

Buckets are the same in every process, so histograms merge without loss. Count, sum, minimum and
maximum are exact.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from math import log
from typing import TypedDict

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


class HistogramData(TypedDict):
    """A histogram as JSON: bucket number -> samples in it."""

    count: int
    sum: int | float  # whole numbers stay whole on their way through JSON
    minimum: int | float
    maximum: int | float
    buckets: dict[str, int]


class Histogram:
    """Samples since the process started."""

    __slots__ = ("buckets", "count", "maximum", "minimum", "sum")

    def __init__(self) -> None:
        self.buckets: dict[int, int] = {}
        self.count = 0
        self.sum = 0.0
        self.minimum = math.inf
        self.maximum = -math.inf

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
        """One of `values`, which are not empty: on the path of every job, so without a line of
        Python for each."""
        histogram = cls()
        histogram.buckets = Counter(map(_BUCKETS.__getitem__, values))
        histogram.count = len(values)
        histogram.sum = float(sum(values))
        histogram.minimum, histogram.maximum = min(values), max(values)
        return histogram

    def add_all(self, other: Histogram) -> None:
        buckets = self.buckets
        for bucket, times in other.buckets.items():
            buckets[bucket] = buckets.get(bucket, 0) + times
        self.count += other.count
        self.sum += other.sum
        self.minimum = min(self.minimum, other.minimum)
        self.maximum = max(self.maximum, other.maximum)

    def merge(self, data: HistogramData) -> None:
        if not data["count"]:
            return
        for bucket, times in data["buckets"].items():
            self.buckets[int(bucket)] = self.buckets.get(int(bucket), 0) + times
        self.count += data["count"]
        self.sum += data["sum"]
        self.minimum = min(self.minimum, data["minimum"])
        self.maximum = max(self.maximum, data["maximum"])

    def data(self) -> HistogramData:
        empty = self.count == 0
        return {
            "count": self.count,
            "sum": self.sum,
            "minimum": 0.0 if empty else self.minimum,
            "maximum": 0.0 if empty else self.maximum,
            "buckets": {str(bucket): times for bucket, times in self.buckets.items()},
        }


def recorded_since(before: HistogramData | None, now: HistogramData) -> HistogramData:
    """The samples that `now` has and `before` had not. Minimum and maximum are those of all: of
    these alone they are not known. `before` None, or more than `now`: all of them."""
    if before is None or before["count"] > now["count"]:
        return now
    return {
        "count": now["count"] - before["count"],
        "sum": now["sum"] - before["sum"],
        "minimum": now["minimum"],
        "maximum": now["maximum"],
        "buckets": {
            bucket: left
            for bucket, times in now["buckets"].items()
            if (left := times - before["buckets"].get(bucket, 0)) > 0
        },
    }


def percentiles(data: HistogramData, fractions: Sequence[float]) -> list[float]:
    """The values that `fractions` (in rising order) of the samples do not exceed."""
    found: list[float] = []
    buckets = sorted((int(bucket), times) for bucket, times in data["buckets"].items())
    seen, at = 0, -1
    for fraction in fractions:
        rank = max(1, math.ceil(fraction * data["count"]))
        while seen < rank and at + 1 < len(buckets):
            at += 1
            seen += buckets[at][1]
        if at < 0:
            found.append(0.0)
            continue
        found.append(min(max(_middle(buckets[at][0]), data["minimum"]), data["maximum"]))
    return found


def summary(data: HistogramData) -> Mapping[str, float]:
    """What is shown of a histogram, by Ostrich's names."""
    count = data["count"]
    values = percentiles(data, tuple(SHOWN_PERCENTILES.values()))
    return {
        "average": data["sum"] / count if count else 0.0,
        "count": count,
        "maximum": data["maximum"],
        "minimum": data["minimum"],
        **dict(zip(SHOWN_PERCENTILES, values, strict=True)),
        "sum": data["sum"],
    }


def _bucket(value: float) -> int:
    within = value if _LOWEST < value < _HIGHEST else _clamp(value)
    return int(log(within) * _BUCKETS_PER_E + _OFFSET)


@cache
def _middle(bucket: int) -> float:
    """The value with the same relative error at both ends."""
    low = math.exp((bucket - _OFFSET) / _BUCKETS_PER_E)
    return 2 * low * GROWTH / (1 + GROWTH)


def _clamp(value: float) -> float:
    return _HIGHEST if value >= _HIGHEST else _LOWEST


_BUCKETS = _Buckets()
