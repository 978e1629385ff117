"""How the runs of a lane have ended, and how long they took, since it began. Pure; its owner's lock
guards it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from pinlaterd.client.outcomes import Ending

# Upper bounds of the histogram of run times, in seconds.
BOUNDS_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0),
)


class RunFigures(NamedTuple):
    """Runs at one moment. `within` says for each of BOUNDS_SECONDS how many took no longer."""

    endings: Mapping[Ending, int]
    seconds: float  # of all together
    within: Sequence[int]

    @property
    def total(self) -> int:
        return sum(self.endings.values())


class RunCounts:
    """Counts runs."""

    def __init__(self) -> None:
        self._endings = dict.fromkeys(Ending, 0)
        self._seconds = 0.0
        self._buckets = [0] * (len(BOUNDS_SECONDS) + 1)

    def add(self, ending: Ending, seconds: float) -> None:
        self._endings[ending] += 1
        self._seconds += seconds
        self._buckets[bisect_left(BOUNDS_SECONDS, seconds)] += 1

    def figures(self) -> RunFigures:
        within = [*accumulate(self._buckets[:-1])]
        return RunFigures(dict(self._endings), self._seconds, within)
