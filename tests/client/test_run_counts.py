"""What runs come to: each is counted once, in the bucket of its time."""

from __future__ import annotations

from pinlaterd.client import Ending
from pinlaterd.client.run_counts import BOUNDS_SECONDS, RunCounts


def test_each_run_is_counted_by_its_ending_and_within_every_bound_that_it_kept():
    runs = RunCounts()
    runs.add(Ending.SUCCEEDED, 0.0001)
    runs.add(Ending.SUCCEEDED, 0.001)
    runs.add(Ending.LOST, 0.4)
    runs.add(Ending.RETRIED, 10_000.0)

    figures = runs.figures()

    assert figures.total == 4
    assert figures.endings == {
        Ending.SUCCEEDED: 2,
        Ending.RETRIED: 1,
        Ending.DISCARDED: 0,
        Ending.POSTPONED: 0,
        Ending.LOST: 1,
    }
    assert figures.seconds == 10_000.4011
    within = dict(zip(BOUNDS_SECONDS, figures.within, strict=True))
    assert (within[0.001], within[0.25], within[0.5], within[1800.0]) == (2, 2, 3, 3)
