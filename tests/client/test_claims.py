"""What a worker has in hand, at times that the test chooses."""

from __future__ import annotations

import threading

import pytest

from pinlaterd.client.claims import MOST_IN_A_DEQUEUE, REPEAT_SECONDS, Claim, ClaimsInHand
from pinlaterd.model import AckInfo, CheckpointInfo, ClaimedJob

T0 = 1000.0
ACK_SECONDS = 0.05
PLACES = 4


def claimed(number: int, *, timeout_seconds: int = 60) -> ClaimedJob:
    return ClaimedJob(f"q:s1:p1:{number}", b"", 2, 2, f"h:1:1:me:{number}", timeout_seconds)


def ack(job: ClaimedJob) -> AckInfo:
    return AckInfo(job.descriptor, claim_descriptor=job.claim_descriptor)


@pytest.fixture
def hand() -> ClaimsInHand:
    return ClaimsInHand(concurrency=PLACES, ahead_seconds=0.1, ack_interval_seconds=ACK_SECONDS)


def begin(hand: ClaimsInHand) -> Claim:
    claim = hand.begin(block=False)
    assert claim is not None
    return claim


def finish(hand: ClaimsInHand, claim: Claim, now: float, *, succeeded: bool = True) -> None:
    hand.finish(claim, now, 1.0, ack=ack(claim.job), succeeded=succeeded)


def test_jobs_begin_in_the_order_they_came(hand):
    hand.add([claimed(1), claimed(2)], T0)

    assert [begin(hand).job, begin(hand).job] == [claimed(1), claimed(2)]


def test_no_job_is_claimed_that_can_not_begin(hand):
    """What jobs take is not known yet."""
    assert hand.wait_for_room() == PLACES
    hand.add([claimed(n) for n in range(PLACES)], T0)
    room: list[int] = []
    waiter = threading.Thread(target=lambda: room.append(hand.wait_for_room()))
    waiter.start()

    claims = [begin(hand) for _ in range(PLACES)]
    assert room == []
    finish(hand, claims[0], T0)

    waiter.join(20)
    assert room == [1]


@pytest.mark.parametrize(
    ("run_seconds", "room"),
    [(10.0, 0), (0.1, PLACES), (0.02, 5 * PLACES), (0.0, MOST_IN_A_DEQUEUE)],
)
def test_so_many_jobs_wait_as_begin_soon(hand, run_seconds, room):
    hand.add([claimed(1)], T0)
    hand.finish(begin(hand), T0, run_seconds, ack=ack(claimed(1)), succeeded=True)
    hand.add([claimed(n) for n in range(PLACES)], T0)
    for _ in range(PLACES):
        begin(hand)

    hand.stop() if room == 0 else None
    assert hand.wait_for_room() == room


def test_a_claim_that_is_lost_is_forgotten_and_its_end_is_told_nobody(hand):
    hand.add([claimed(1), claimed(2)], T0)
    claim = begin(hand)

    hand.lose([job.claim_descriptor for job in (claimed(1), claimed(2))])
    finish(hand, claim, T0)

    assert hand.take_waiting() == []
    assert hand.take_due(T0 + 1000) == []
    assert hand.idle


def test_a_checkpoint_is_told_at_once_and_by_no_dequeue(hand):
    hand.add([claimed(1)], T0)
    later = CheckpointInfo(claimed(1).descriptor, move_to_pending=True)
    hand.finish(begin(hand), T0, 1.0, checkpoint=later)

    assert hand.take_acks() == []
    assert [one.checkpoint for one in hand.take_due(T0)] == [later]


def test_an_ack_goes_with_the_next_dequeue_or_alone_after_a_moment(hand):
    hand.add([claimed(1), claimed(2)], T0)
    for claim in (begin(hand), begin(hand)):
        finish(hand, claim, T0)

    assert hand.take_due(T0) == []
    assert len(hand.take_due(T0 + ACK_SECONDS)) == 2
    assert hand.take_acks() == []


def test_an_ack_that_failed_is_repeated_later_and_never_by_a_dequeue(hand):
    hand.add([claimed(1)], T0)
    claim = begin(hand)
    finish(hand, claim, T0, succeeded=False)
    assert hand.put_back(hand.take_acks(), T0) == []

    assert hand.take_acks() == []
    assert hand.take_due(T0 + REPEAT_SECONDS / 2) == []
    [again] = hand.take_due(T0 + REPEAT_SECONDS)
    assert again.ack == ack(claim.job)
    assert again.succeeded is False


def test_an_ack_is_dropped_once_its_claim_has_timed_out(hand):
    hand.add([claimed(1, timeout_seconds=60)], T0)
    claim = begin(hand)
    finish(hand, claim, T0 + 1)
    acks = hand.take_acks()

    [late] = hand.put_back(acks, T0 + 60)

    assert late.ack == ack(claim.job)
    assert hand.take_due(T0 + 1000) == []


def test_claims_are_renewed_well_before_they_time_out(hand):
    waiting, running = claimed(2, timeout_seconds=60), claimed(1, timeout_seconds=60)
    hand.add([running, waiting], T0)
    begin(hand)

    assert hand.due_for_renewal(T0 + 10) == []
    due = hand.due_for_renewal(T0 + 20)
    assert due == [waiting, running]
    hand.renewed(due, T0 + 20, done=True)
    assert hand.due_for_renewal(T0 + 39) == []
    assert hand.due_for_renewal(T0 + 40) == [waiting, running]


def test_a_renewal_that_failed_is_tried_again_soon(hand):
    hand.add([claimed(1, timeout_seconds=60)], T0)
    due = hand.due_for_renewal(T0 + 20)

    hand.renewed(due, T0 + 20, done=False)

    assert hand.due_for_renewal(T0 + 24) == []
    assert hand.due_for_renewal(T0 + 25) == due


def test_a_renewed_claim_keeps_its_ack_worth_sending(hand):
    hand.add([claimed(1, timeout_seconds=60)], T0)
    claim = begin(hand)
    hand.renewed([claim.job], T0 + 20, done=True)
    finish(hand, claim, T0 + 21)

    assert hand.put_back(hand.take_acks(), T0 + 79) == []


def test_a_finished_job_is_renewed_no_more(hand):
    hand.add([claimed(1)], T0)
    claim = begin(hand)
    finish(hand, claim, T0)

    assert hand.due_for_renewal(T0 + 1000) == []


def test_stopping_wakes_everyone_and_leaves_what_was_not_begun(hand):
    results: list[object] = []
    threads = [
        threading.Thread(target=lambda: results.append(hand.begin())),
        threading.Thread(target=lambda: results.append(hand.pause(60))),
    ]
    for thread in threads:
        thread.start()
    hand.stop()
    for thread in threads:
        thread.join(20)
    hand.add([claimed(1)], T0)

    assert results == [None, None]
    assert hand.wait_for_room() == 0
    assert hand.begin() is None
    assert hand.take_waiting() == [claimed(1)]


def test_the_keeper_wakes_for_the_first_ack_and_ends_when_drained(hand):
    hand.add([claimed(1)], T0)
    claim = begin(hand)
    woken: list[bool] = []
    keeper = threading.Thread(target=lambda: woken.append(hand.wait_until_due(T0)))
    keeper.start()

    finish(hand, claim, T0)
    keeper.join(20)
    hand.drain()

    assert woken == [True]
    assert hand.wait_until_due(T0) is False
