"""What a lane has in hand, at times that the test chooses."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest

from pinlaterd.client.ahead import LARGEST_CLAIM
from pinlaterd.client.claims import HOARD_SECONDS, REPEAT_SECONDS, ClaimsInHand
from pinlaterd.client.outcomes import HANDED_BACK, SUCCEEDED, Ending, Outcome
from pinlaterd.client.running_job import Claim
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


def jobs_of(claims: Sequence[Claim]) -> list[ClaimedJob]:
    return [claim.job for claim in claims]


def come(hand: ClaimsInHand, jobs: Sequence[ClaimedJob]) -> None:
    hand.add(jobs, T0, asked=0)


def begun(hand: ClaimsInHand) -> Claim:
    claim = hand.begin()
    assert claim is not None
    claim.began_at = claim.claimed_at
    return claim


def ended(hand: ClaimsInHand, number: int, outcome: Outcome, at: float = T0) -> Claim:
    """A job that was claimed and begun at T0 and ended at `at`."""
    come(hand, [claimed(number)])
    claim = begun(hand)
    hand.finish(claim, outcome, at)
    return claim


def jobs_take_no_time(hand: ClaimsInHand) -> None:
    """So that as many may wait as ever do."""
    for number in range(20):
        ended(hand, number, SUCCEEDED, T0)
    hand.take_acks()


def in_thread(results: list[object], function: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=lambda: results.append(function()), daemon=True)
    thread.start()
    return thread


@pytest.fixture
def hand() -> ClaimsInHand:
    return ClaimsInHand(2, fetchers=1, ahead_seconds=0.1, ack_seconds=ACK_SECONDS)


def test_jobs_begin_in_the_order_they_came(hand):
    come(hand, [claimed(1), claimed(2)])

    assert jobs_of([begun(hand), begun(hand)]) == [claimed(1), claimed(2)]
    assert hand.begin() is None


def test_at_first_there_is_room_for_as_many_as_can_begin(hand):
    assert hand.wait_for_room() == 2


def test_with_every_place_taken_the_fetcher_waits_for_a_free_one(hand):
    come(hand, [claimed(1), claimed(2)])
    first = begun(hand)
    begun(hand)
    room: list[object] = []
    fetcher = in_thread(room, hand.wait_for_room)

    hand.finish(first, SUCCEEDED, T0 + 60)  # jobs of a minute: none are claimed ahead
    assert hand.begin() is None

    fetcher.join(20)
    assert room == [1]


def test_with_plenty_in_the_queue_a_second_dequeue_is_under_way_beside_the_first(hand):
    jobs_take_no_time(hand)
    first = hand.wait_for_room()
    hand.add([claimed(number) for number in range(first)], T0, asked=first)
    rooms: list[object] = []
    fetchers = [in_thread(rooms, hand.wait_for_room) for _ in range(2)]

    while hand.begin() is not None:
        pass

    for fetcher in fetchers:
        fetcher.join(20)
    assert rooms == [LARGEST_CLAIM, LARGEST_CLAIM]


def test_while_a_dequeue_may_wait_for_jobs_there_is_no_second_one(hand):
    jobs_take_no_time(hand)
    first = hand.wait_for_room()
    hand.add([claimed(number) for number in range(first - 1)], T0, asked=first)
    while hand.begin() is not None:
        pass

    assert hand.wait_for_room() == LARGEST_CLAIM
    second: list[object] = []
    fetcher = in_thread(second, hand.wait_for_room)
    hand.stop()
    fetcher.join(20)
    assert second == [0]


def test_an_ack_goes_with_the_next_dequeue_or_alone_after_a_moment(hand):
    first, second = ended(hand, 1, SUCCEEDED), ended(hand, 2, FAILED)

    assert hand.take_chores(T0).acks == []
    assert hand.take_chores(T0 + ACK_SECONDS).acks == [first, second]
    assert hand.take_acks() == []


def test_an_ack_that_failed_is_repeated_later_and_never_by_a_dequeue(hand):
    claim = ended(hand, 1, FAILED)
    assert hand.put_back(hand.take_acks(), T0) == []

    assert hand.take_acks() == []
    assert hand.take_chores(T0 + REPEAT_SECONDS / 2).acks == []
    assert hand.take_chores(T0 + REPEAT_SECONDS).acks == [claim]


def test_what_can_not_be_said_is_dropped_once_its_claim_has_timed_out(hand):
    claim = ended(hand, 1, SUCCEEDED)

    assert hand.put_back(hand.take_acks(), T0 + 60) == [claim]
    assert hand.take_chores(T0 + 1000).acks == []


@pytest.mark.parametrize("outcome", [DISCARDED, POSTPONED])
def test_what_takes_a_checkpoint_is_the_keepers_and_is_said_at_once(hand, outcome):
    claim = ended(hand, 1, outcome)

    assert hand.take_acks() == []
    assert hand.take_chores(T0).settlements == [claim]


def test_discarding_the_last_attempt_takes_an_ack_only(hand):
    come(hand, [claimed(1, attempts_remaining=1)])
    claim = begun(hand)
    hand.finish(claim, DISCARDED, T0)

    assert hand.take_acks() == [claim]


def test_claims_are_renewed_well_before_they_time_out(hand):
    come(hand, [claimed(1)])
    claim = begun(hand)

    assert hand.take_renewals(T0 + 19) == []
    assert hand.take_renewals(T0 + 20) == [claim]
    hand.renewed([claim], T0 + 20, done=True)
    assert hand.take_renewals(T0 + 39) == []
    assert hand.take_renewals(T0 + 40) == [claim]


def test_a_renewal_that_failed_is_tried_again_soon(hand):
    come(hand, [claimed(1)])
    begun(hand)
    due = hand.take_renewals(T0 + 20)

    hand.renewed(due, T0 + 20, done=False)

    assert hand.take_renewals(T0 + 24) == []
    assert hand.take_renewals(T0 + 25) == due


def test_a_renewed_claim_keeps_its_ack_worth_sending(hand):
    come(hand, [claimed(1)])
    claim = begun(hand)
    hand.renewed([claim], T0 + 20, done=True)
    hand.finish(claim, SUCCEEDED, T0 + 21)

    assert hand.put_back(hand.take_acks(), T0 + 79) == []


def test_a_finished_job_is_renewed_no_more(hand):
    ended(hand, 1, SUCCEEDED)

    assert hand.take_renewals(T0 + 1000) == []


def test_what_comes_of_a_lost_claim_is_dropped_and_counted(hand):
    come(hand, [claimed(1)])
    claim = begun(hand)
    told: list[str] = []
    claim.when_lost(lambda: told.append("lost"))

    claim.lose()
    hand.finish(claim, SUCCEEDED, T0 + 1)

    assert told == ["lost"]
    assert hand.take_chores(T0 + 1000) == ([], [])
    assert hand.counts()[:3] == (0, 0, 1)
    assert hand.counts().runs.endings[Ending.LOST] == 1


def test_a_claim_that_was_lost_while_it_waited_is_not_begun(hand):
    come(hand, [claimed(1), claimed(2)])
    [first] = [claim for claim in hand.take_renewals(T0 + 20) if claim.job == claimed(1)]
    first.lose()

    assert begun(hand).job == claimed(2)
    assert hand.counts()[:3] == (0, 1, 1)
    assert hand.counts().runs.total == 0


def test_jobs_that_wait_for_long_go_back_and_none_are_claimed_ahead(hand):
    for number in range(20):
        ended(hand, number, SUCCEEDED, T0 + 0.001)
    hand.take_acks()
    assert hand.wait_for_room() > 100  # at a millisecond a job
    come(hand, [claimed(21), claimed(22), claimed(23)])
    begun(hand)
    begun(hand)

    assert hand.take_chores(T0 + HOARD_SECONDS - 0.1).settlements == []
    [back] = hand.take_chores(T0 + HOARD_SECONDS).settlements
    assert (back.job, back.outcome) == (claimed(23), HANDED_BACK)
    assert hand.begin() is None
    assert hand.counts().running == 2


def test_stopping_wakes_everyone_and_hands_back_what_was_not_begun(hand):
    results: list[object] = []
    threads = [in_thread(results, hand.wait), in_thread(results, lambda: hand.pause(60))]
    hand.stop()
    for thread in threads:
        thread.join(20)
    come(hand, [claimed(1)])

    assert results == [None, None]
    assert hand.wait_for_room() == 0
    assert hand.begin() is None
    assert jobs_of(hand.take_chores(T0).settlements) == [claimed(1)]


def test_what_is_abandoned_goes_back_and_its_outcome_is_dropped(hand):
    come(hand, [claimed(1)])
    claim = begun(hand)
    hand.stop()

    hand.abandon()

    assert claim.is_lost
    [back] = hand.take_chores(T0).settlements
    assert (back.job, back.outcome) == (claimed(1), HANDED_BACK)
    hand.finish(claim, SUCCEEDED, T0 + 1)
    assert hand.take_chores(T0 + 2) == ([], [])


def test_once_given_up_nothing_is_said_any_more(hand):
    ended(hand, 1, SUCCEEDED)
    said = hand.take_chores(T0 + ACK_SECONDS).acks
    ended(hand, 2, POSTPONED)

    assert hand.give_up() == 2  # one that is being said, and one that is not
    assert hand.put_back(said, T0 + 1) == []
    assert hand.wait_until_due(T0 + 2) is False


def test_the_keeper_wakes_for_the_first_end_and_is_done_when_all_was_said(hand):
    come(hand, [claimed(1, timeout_seconds=600)])
    claim = begun(hand)
    woken: list[object] = []
    keeper = in_thread(woken, lambda: hand.wait_until_due(T0))
    hand.finish(claim, SUCCEEDED, T0)
    keeper.join(20)
    assert woken == [True]

    hand.stop()
    hand.end_of_fetching()
    assert hand.wait_until_due(T0) is True
    assert hand.take_chores(T0).acks == [claim]
    assert hand.wait_until_due(T0) is False


def test_every_handler_gets_its_job_though_each_wakes_only_the_next(hand):
    got: list[object] = []
    all_there = threading.Barrier(9)

    def handle() -> object:
        claim = hand.wait()
        all_there.wait(20)  # as a job that takes its time
        return claim

    threads = [in_thread(got, handle) for _ in range(8)]
    come(hand, [claimed(number) for number in range(8)])
    all_there.wait(20)
    for thread in threads:
        thread.join(20)

    assert len({claim for claim in got if claim is not None}) == 8
