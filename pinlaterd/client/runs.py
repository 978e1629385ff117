"""How the runs of a queue's jobs went, and so how many jobs to claim ahead. Everything is pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from pinlaterd.client.outcomes import Ending

# The most jobs that one dequeue claims; twice that wait at most, so that handlers are busy with
# one answer while the next one comes.
LARGEST_CLAIM = 1000
# Upper bounds of the histogram of run times, in seconds.
BOUNDS_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0),
)
# A new run's weight in the mean: the last dozen decide.
_WEIGHT = 1 / 12


class RunFigures(NamedTuple):
    """Runs at one moment. `within` says for each of BOUNDS_SECONDS how many took no longer."""

    endings: Mapping[Ending, int]
    seconds: float  # of all together
    within: Sequence[int]

    @property
    def total(self) -> int:
        return sum(self.endings.values())


class Runs:
    """Counts runs, and knows how many jobs `concurrency` places will begin within `ahead_seconds`,
    by how long jobs took so far. Not thread-safe.

    Jobs that run for minutes are claimed only when a place is free for them, so that other workers
    can have the rest; jobs that run for microseconds by the thousand.
    """

    def __init__(self, concurrency: int, ahead_seconds: float) -> None:
        self._concurrency = concurrency
        self._ahead_seconds = ahead_seconds
        self._mean_seconds: float | None = None
        self._endings = dict.fromkeys(Ending, 0)
        self._seconds = 0.0
        self._buckets = [0] * (len(BOUNDS_SECONDS) + 1)

    def add(self, ending: Ending, seconds: float) -> None:
        """A job has run for so long."""
        self._endings[ending] += 1
        self._seconds += seconds
        self._buckets[bisect_left(BOUNDS_SECONDS, seconds)] += 1
        if ending is not Ending.LOST:
            mean = self._mean_seconds
            self._mean_seconds = seconds if mean is None else mean + (seconds - mean) * _WEIGHT

    def stalled(self, seconds: float) -> None:
        """A job has waited for so long without being begun: the mean has promised too much."""
        if self._mean_seconds is None or self._mean_seconds < seconds:
            self._mean_seconds = seconds

    def figures(self) -> RunFigures:
        within = [*accumulate(self._buckets[:-1])]
        return RunFigures(dict(self._endings), self._seconds, within)

    @property
    def ahead(self) -> int:
        """How many jobs may wait. None before the first has run: nothing is known of them yet."""
        if self._mean_seconds is None or not self._ahead_seconds:
            return 0
        most = 2 * LARGEST_CLAIM
        run_seconds = self._ahead_seconds * self._concurrency
        if self._mean_seconds * most <= run_seconds:
            return most
        return int(run_seconds / self._mean_seconds)

    @property
    def claim_below(self) -> int:
        """With so many waiting, or fewer, it is time to claim more."""
        return self.ahead // 2

    def claimable(self, *, running: int, waiting: int) -> int:
        """How many jobs to claim now; 0: none yet."""
        if waiting > self.claim_below:
            return 0
        free = max(0, self._concurrency - running)
        return max(0, min(LARGEST_CLAIM, free + self.ahead - waiting))
