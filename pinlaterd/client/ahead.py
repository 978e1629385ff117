"""How many jobs a lane claims ahead of its handlers: as many as begin soon, and no more.

Jobs that run for minutes are claimed only when a place is free for them, so that other workers can
have the rest. Jobs that run for microseconds are claimed by the thousand. Everything here is pure.
"""

from __future__ import annotations

# The most jobs that one dequeue claims; twice that wait at most, so that handlers are busy with
# one answer while the next one comes.
LARGEST_CLAIM = 1000
# A new run's weight in the mean: the last dozen decide.
_WEIGHT = 1 / 12


class Pace:
    """How fast a pool of `concurrency` places has been working, and what it can begin soon.

    Not thread-safe: the caller's lock guards it.
    """

    def __init__(self, concurrency: int, ahead_seconds: float) -> None:
        self._concurrency = concurrency
        self._ahead_seconds = ahead_seconds
        self._mean_run_seconds: float | None = None

    def ran(self, seconds: float) -> None:
        """A job has run for so long."""
        mean = self._mean_run_seconds
        self._mean_run_seconds = seconds if mean is None else mean + (seconds - mean) * _WEIGHT

    def stalled(self, seconds: float) -> None:
        """A job has waited for so long without being begun: the mean has promised too much."""
        if self._mean_run_seconds is None or self._mean_run_seconds < seconds:
            self._mean_run_seconds = seconds

    @property
    def ahead(self) -> int:
        """How many jobs may wait: those that begin within `ahead_seconds`. None before the first
        has run: nothing is known of them yet."""
        if self._mean_run_seconds is None or not self._ahead_seconds:
            return 0
        most = 2 * LARGEST_CLAIM
        run_seconds = self._ahead_seconds * self._concurrency
        if self._mean_run_seconds * most <= run_seconds:
            return most
        return int(run_seconds / self._mean_run_seconds)

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
