"""How many jobs a lane claims: what begins soon, and no more."""

from __future__ import annotations

import pytest

from pinlaterd.client.ahead import LARGEST_CLAIM, Pace


def pace(run_seconds: float, concurrency: int = 4) -> Pace:
    pace = Pace(concurrency, ahead_seconds=0.1)
    pace.ran(run_seconds)
    return pace


def test_before_a_job_has_run_only_free_places_are_filled():
    unknown = Pace(4, ahead_seconds=0.1)

    assert unknown.claimable(running=1, waiting=0) == 3
    assert unknown.claimable(running=4, waiting=0) == 0


@pytest.mark.parametrize("run_seconds", [0.5, 60, 3600])
def test_long_jobs_are_not_claimed_ahead(run_seconds):
    assert pace(run_seconds).claimable(running=4, waiting=0) == 0
    assert pace(run_seconds).claimable(running=2, waiting=0) == 2


def test_as_many_are_claimed_ahead_as_begin_in_time():
    assert pace(0.01).claimable(running=4, waiting=0) == 40
    assert pace(0.01).claimable(running=4, waiting=20) == 20
    assert pace(0.01).claimable(running=4, waiting=21) == 0


@pytest.mark.parametrize("run_seconds", [0.0, 1e-6])
def test_jobs_that_take_no_time_come_by_the_thousand(run_seconds):
    assert pace(run_seconds).claimable(running=0, waiting=0) == LARGEST_CLAIM
    assert pace(run_seconds).claimable(running=0, waiting=LARGEST_CLAIM) == LARGEST_CLAIM
    assert pace(run_seconds).claimable(running=0, waiting=LARGEST_CLAIM + 1) == 0


def test_the_last_dozen_runs_decide():
    slowed = pace(0.001)
    for _ in range(40):
        slowed.ran(1.0)

    assert slowed.ahead == 0


def test_a_stall_is_believed_until_jobs_run_fast_again():
    stalled = pace(0.001)
    stalled.stalled(1.0)
    assert stalled.ahead == 0

    for _ in range(60):
        stalled.ran(0.001)
    assert stalled.ahead > 10
