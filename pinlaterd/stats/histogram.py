"""A histogram in buckets that grow by 8 %: any percentile within 4 %, in bounded memory.

Buckets are the same in every process, so histograms merge without loss, also as JSON. Count, sum,
minimum and maximum are exact.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import log

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
        """One of `values`, which are not empty: on the path of every job, so without a line of
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
        """The samples that this has and `before` had not. Minimum and maximum are those of all: of
        these alone they are not known. `before` None, or more than this: all of them."""
        if before is None or before.count > self.count:
            return self
        left = Counter(self.buckets)
        left.subtract(before.buckets)
        return Histogram(
            self.count - before.count, self.sum - before.sum, self.minimum, self.maximum, +left
        )


def percentiles(data: Histogram, fractions: Sequence[float]) -> list[float]:
    """The values that `fractions` (in rising order) of the samples do not exceed."""
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
    """What is shown of a histogram, by Ostrich's names."""
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
    """The value with the same relative error at both ends."""
    low = math.exp((bucket - _OFFSET) / _BUCKETS_PER_E)
    return 2 * low * GROWTH / (1 + GROWTH)


def _clamp(value: float) -> float:
    return _HIGHEST if value >= _HIGHEST else _LOWEST


_BUCKETS = _Buckets()
