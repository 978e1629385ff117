"""How runs went: each is counted once, and as many jobs are claimed ahead as begin soon."""

from __future__ import annotations

import pytest

from pinlaterd.client import Ending
from pinlaterd.client.in_flight import BOUNDS_SECONDS, LARGEST_CLAIM, Runs


def runs_of(*seconds: float) -> Runs:
    runs = Runs(4, ahead_seconds=0.1)
    for each in seconds:
        runs.add(Ending.SUCCEEDED, each)
    return runs


def test_each_run_is_counted_by_its_ending_and_within_every_bound_that_it_kept():
    runs = runs_of(0.0001, 0.001)
    runs.add(Ending.LOST, 0.4)
    runs.add(Ending.RETRIED, 10_000.0)

    figures = runs.figures()

    assert figures.total == 4
    counted = {Ending.SUCCEEDED: 2, Ending.RETRIED: 1, Ending.LOST: 1}
    assert figures.endings == dict.fromkeys(Ending, 0) | counted
    assert figures.seconds == 10_000.4011
    within = dict(zip(BOUNDS_SECONDS, figures.within, strict=True))
    assert (within[0.001], within[0.25], within[0.5], within[1800.0]) == (2, 2, 3, 3)


@pytest.mark.parametrize(
    ("runs", "running", "waiting", "claimable"),
    [
        pytest.param([], 1, 0, 3, id="before the first run: free places"),
        pytest.param([], 4, 0, 0, id="before the first run: no free place"),
        pytest.param([0.5], 4, 0, 0, id="long jobs are not claimed ahead"),
        pytest.param([3600], 2, 0, 2, id="long jobs for free places"),
        pytest.param([0.01], 4, 0, 40, id="what begins in time"),
        pytest.param([0.01], 4, 20, 20, id="half of them wait"),
        pytest.param([0.01], 4, 21, 0, id="more than half of them wait"),
        pytest.param([0.0], 0, 0, LARGEST_CLAIM, id="jobs that take no time"),
        pytest.param([1e-6], 0, LARGEST_CLAIM, LARGEST_CLAIM, id="one dequeue ahead"),
        pytest.param([1e-6], 0, LARGEST_CLAIM + 1, 0, id="no more than two"),
        pytest.param([0.001] + 40 * [1.0], 4, 0, 0, id="the last dozen decide"),
    ],
)
def test_as_many_are_claimed_as_begin_soon(runs, running, waiting, claimable):
    assert runs_of(*runs).claimable(running=running, waiting=waiting) == claimable


def test_a_stall_is_believed_until_jobs_run_fast_again():
    runs = runs_of(0.001)
    runs.stalled(1.0)
    runs.add(Ending.LOST, 0.0)  # which says nothing of how long a run takes
    assert runs.ahead == 0

    for _ in range(60):
        runs.add(Ending.SUCCEEDED, 0.001)
    assert runs.ahead > 10
