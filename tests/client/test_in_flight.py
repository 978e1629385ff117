"""What is in flight, at times that the test chooses."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence

import pytest

from pinlaterd.client import Client
from pinlaterd.client.in_flight import (
    BOUNDS_SECONDS,
    HOARD_SECONDS,
    LARGEST_CLAIM,
    REPEAT_SECONDS,
    InFlight,
    Runs,
)
from pinlaterd.client.running_job import RELEASED, SUCCEEDED, Ending, Outcome, RunningJob
from pinlaterd.model import ClaimedJob

T0 = 1000.0
ACK_SECONDS = 0.05
FAILED = Outcome(Ending.RETRIED, "no")
DISCARDED = Outcome(Ending.DISCARDED, "never")
POSTPONED = Outcome(Ending.POSTPONED, delay_seconds=60)


def claimed(number: int, *, timeout_seconds: int = 60, attempts_remaining: int = 2) -> ClaimedJob:
    return ClaimedJob(
        f"q:s1:p1:{number}", b"", 2, attempts_remaining, f"h:1:1:me:{number}", timeout_seconds
    )


def claims_of(jobs: Sequence[RunningJob]) -> list[ClaimedJob]:
    return [job.claimed for job in jobs]


def begun(flight: InFlight, *jobs: ClaimedJob) -> RunningJob:
    """The next job, after `jobs` were added; it began as it came."""
    flight.add(jobs, T0, asked=0)
    job = flight.begin()
    assert job is not None
    job.began_at = job.claimed_at
    return job


def ended(flight: InFlight, number: int, outcome: Outcome, at: float = T0) -> RunningJob:
    """A job that was claimed and begun at T0 and ended at `at`."""
    job = begun(flight, claimed(number))
    flight.finish(job, outcome, at)
    return job


def jobs_take(flight: InFlight, seconds: float) -> None:
    for number in range(20):
        ended(flight, number, SUCCEEDED, T0 + seconds)
    flight.take_acks()


def in_thread(results: list[object], function: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=lambda: results.append(function()), daemon=True)
    thread.start()
    return thread


def wakes_of(flight: InFlight) -> list[str]:
    """What fetchers and the reporter are woken for from now on."""
    woken: list[str] = []
    flight.wake(room=lambda: woken.append("room"), due=lambda: woken.append("due"))
    return woken


@pytest.fixture
def flight() -> InFlight:
    return InFlight("q", Client(), 2, ahead_seconds=0.1, ack_seconds=ACK_SECONDS)


# --- fetchers -------------------------------------------------------------------------------


def test_jobs_are_claimed_for_free_places_and_begin_in_the_order_they_came(flight):
    assert flight.take_room() == 2

    assert begun(flight, claimed(1), claimed(2)).claimed == claimed(1)
    assert begun(flight).claimed == claimed(2)
    assert flight.begin() is None


def test_with_every_place_taken_the_fetcher_waits_for_a_free_one(flight):
    first = begun(flight, claimed(1), claimed(2))
    begun(flight)
    assert flight.take_room() == 0
    woken = wakes_of(flight)

    flight.finish(first, SUCCEEDED, T0 + 60)  # jobs of a minute: none are claimed ahead
    assert flight.begin() is None

    assert woken == ["room"]
    assert flight.take_room() == 1


def test_with_plenty_in_the_queue_a_second_dequeue_is_under_way_beside_the_first(flight):
    jobs_take(flight, 0)
    first = flight.take_room()
    flight.add([claimed(number) for number in range(first)], T0, asked=first)
    rooms = [flight.take_room()]
    woken = wakes_of(flight)

    while flight.begin() is not None:
        if woken:
            rooms.append(flight.take_room())
            woken.clear()

    assert [room for room in rooms if room] == [LARGEST_CLAIM, LARGEST_CLAIM]


def test_while_a_dequeue_may_wait_for_jobs_there_is_no_second_one(flight):
    jobs_take(flight, 0)
    first = flight.take_room()
    flight.add([claimed(number) for number in range(first - 1)], T0, asked=first)
    while flight.begin() is not None:
        pass

    assert flight.take_room() == LARGEST_CLAIM
    assert flight.take_room() == 0


def test_every_handler_gets_its_job_though_each_wakes_only_the_next(flight):
    got: list[object] = []
    all_there = threading.Barrier(9)

    def handle() -> object:
        job = flight.wait()
        all_there.wait(60)  # as a job that takes its time
        return job

    threads = [in_thread(got, handle) for _ in range(8)]
    flight.add([claimed(number) for number in range(8)], T0, asked=0)
    all_there.wait(60)
    for thread in threads:
        thread.join(60)

    assert len({job for job in got if job is not None}) == 8


# --- reports --------------------------------------------------------------------------------


def test_an_ack_goes_with_the_next_dequeue_or_alone_after_a_moment(flight):
    first, second = ended(flight, 1, SUCCEEDED), ended(flight, 2, FAILED)

    assert flight.take_reports(T0) == []
    assert flight.take_reports(T0 + ACK_SECONDS) == [first, second]
    assert flight.take_acks() == []


def test_an_ack_that_failed_is_repeated_later_and_never_by_a_dequeue(flight):
    claim = ended(flight, 1, FAILED)
    assert flight.repeat_later(flight.take_acks(), T0) == []

    assert flight.take_acks() == []
    assert flight.take_reports(T0 + REPEAT_SECONDS / 2) == []
    assert flight.take_reports(T0 + REPEAT_SECONDS) == [claim]


def test_what_can_not_be_reported_is_dropped_once_its_claim_has_timed_out(flight):
    claim = ended(flight, 1, SUCCEEDED)

    assert flight.repeat_later(flight.take_acks(), T0 + 60) == [claim]
    assert flight.take_reports(T0 + 1000) == []


@pytest.mark.parametrize("outcome", [DISCARDED, POSTPONED])
def test_what_takes_a_checkpoint_is_the_reporters_and_is_told_at_once(flight, outcome):
    claim = ended(flight, 1, outcome)

    assert flight.take_acks() == []
    assert flight.take_reports(T0) == [claim]


def test_discarding_the_last_attempt_takes_an_ack_only(flight):
    job = begun(flight, claimed(1, attempts_remaining=1))
    flight.finish(job, DISCARDED, T0)

    assert flight.take_acks() == [job]


def test_the_reporter_wakes_for_the_first_end_and_is_done_when_all_was_told(flight):
    job = begun(flight, claimed(1, timeout_seconds=600))
    woken = wakes_of(flight)
    assert flight.due_at() == T0 + 200  # its claim is renewed then
    flight.finish(job, SUCCEEDED, T0)
    assert woken == ["due"]
    assert flight.due_at() == T0 + ACK_SECONDS

    flight.stop()
    assert flight.due_at() == -math.inf
    assert flight.take_reports(T0) == [job]
    assert flight.due_at() is None


def test_the_reporter_is_not_done_while_a_dequeue_may_bring_jobs(flight):
    room = flight.take_room()
    flight.stop()
    woken = wakes_of(flight)
    assert flight.due_at() == math.inf
    flight.add([claimed(1)], T0, asked=room)

    assert woken == ["due"]
    assert claims_of(flight.take_reports(T0)) == [claimed(1)]
    assert flight.due_at() is None


# --- renewals, and claims that are lost -----------------------------------------------------


def test_claims_of_jobs_that_run_are_renewed_well_before_they_time_out(flight):
    job = begun(flight, claimed(1))

    assert flight.take_renewals(T0 + 19) == []
    assert flight.take_renewals(T0 + 20) == [job]
    flight.renewed([job], T0 + 20, done=True)
    assert flight.take_renewals(T0 + 39) == []
    assert flight.take_renewals(T0 + 40) == [job]

    flight.renewed([job], T0 + 40, done=False)  # that failed: soon again
    assert flight.take_renewals(T0 + 44) == []
    assert flight.take_renewals(T0 + 45) == [job]
    assert flight.take_renewals(T0 + 46) == [job]  # nobody has said how that went

    flight.finish(job, SUCCEEDED, T0 + 46)
    assert flight.take_renewals(T0 + 1000) == []
    assert flight.repeat_later(flight.take_acks(), T0 + 79) == []  # its claim holds until T0 + 80


def test_a_claim_that_was_lost_while_it_waited_is_not_begun(flight):
    flight.add([claimed(1), claimed(2)], T0, asked=0)
    [first] = [claim for claim in flight.take_renewals(T0 + 20) if claim.claimed == claimed(1)]
    first.lose()

    assert begun(flight).claimed == claimed(2)
    facts = flight.facts()
    assert (facts.waiting, facts.running, facts.claims_lost) == (0, 1, 1)
    assert facts.runs.total == 0


# --- releases and the end -------------------------------------------------------------------


def test_jobs_that_wait_for_long_are_released_and_none_are_claimed_ahead(flight):
    jobs_take(flight, 0.001)
    assert flight.take_room() > 100
    begun(flight, claimed(21), claimed(22), claimed(23))
    begun(flight)

    assert flight.take_reports(T0 + HOARD_SECONDS - 0.1) == []
    [back] = flight.take_reports(T0 + HOARD_SECONDS)
    assert (back.claimed, back.outcome) == (claimed(23), RELEASED)
    assert flight.begin() is None
    assert flight.facts().running == 2


def test_stopping_wakes_everyone_and_releases_what_was_not_begun(flight):
    results: list[object] = []
    handler = in_thread(results, flight.wait)
    flight.stop()
    handler.join(60)
    flight.add([claimed(1)], T0, asked=0)

    assert results == [None]
    assert flight.stopping.is_set()
    assert flight.take_room() == 0
    assert flight.begin() is None
    assert claims_of(flight.take_reports(T0)) == [claimed(1)]


def test_what_is_abandoned_is_released_and_its_outcome_is_dropped(flight):
    job = begun(flight, claimed(1))
    flight.stop()

    flight.abandon()

    assert job.lost
    [back] = flight.take_reports(T0)
    assert (back.claimed, back.outcome) == (claimed(1), RELEASED)
    flight.finish(job, SUCCEEDED, T0 + 1)
    assert flight.take_reports(T0 + 2) == []


def single(number: int) -> ClaimedJob:
    return claimed(number, attempts_remaining=1)._replace(attempts_allowed=1)


@pytest.fixture
def keeping() -> InFlight:
    times = {"ahead_seconds": 0.1, "ack_seconds": ACK_SECONDS}
    return InFlight("q", Client(), 2, **times, keeps_single_attempts=True)


def test_jobs_with_a_single_attempt_that_wait_are_begun_after_a_stop(keeping):
    results: list[object] = []
    jobs_take(keeping, 0.001)
    asked = keeping.take_room()
    keeping.add([claimed(21), single(22)], T0, asked=0)
    keeping.stop()
    [back] = keeping.take_reports(T0)
    assert (back.claimed, back.outcome) == (claimed(21), RELEASED)
    assert keeping.begin().claimed == single(22)

    handler = in_thread(results, keeping.wait)  # a dequeue is under way
    keeping.add([single(23), claimed(24)], T0, asked=asked)
    handler.join(60)
    [job] = results
    assert isinstance(job, RunningJob)
    assert job.claimed == single(23)
    assert claims_of(keeping.take_reports(T0)) == [claimed(24)]
    assert keeping.wait() is None


def test_jobs_with_a_single_attempt_stay_however_long_they_wait(keeping):
    keeping.add([single(1), claimed(2)], T0, asked=0)

    assert claims_of(keeping.take_reports(T0 + HOARD_SECONDS)) == [claimed(2)]
    assert keeping.due_at() > T0 + HOARD_SECONDS
    assert keeping.begin().claimed == single(1)


def test_what_is_abandoned_with_a_single_attempt_has_failed(keeping):
    job = begun(keeping, single(1), single(2))
    keeping.stop()

    keeping.abandon()
    keeping.add([single(3)], T0, asked=0)

    assert keeping.begin() is None
    acks = keeping.take_acks()
    assert {ack.descriptor for ack in acks} == {f"q:s1:p1:{number}" for number in (1, 2, 3)}
    assert {ack.outcome.ending for ack in acks} == {Ending.FAILED}
    keeping.finish(job, SUCCEEDED, T0 + 1)
    assert keeping.take_acks() == []


def test_once_given_up_nothing_is_reported_any_more(flight):
    ended(flight, 1, SUCCEEDED)
    reports = flight.take_reports(T0 + ACK_SECONDS)
    ended(flight, 2, POSTPONED)

    assert flight.give_up() == 2  # one that is being reported, and one that is not
    assert flight.repeat_later(reports, T0 + 1) == []
    assert flight.due_at() is None


# --- how many are claimed ahead --------------------------------------------------------------


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
