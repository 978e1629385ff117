"""What a worker has in hand, at times that the test chooses."""

from __future__ import annotations

import threading

import pytest

from pinlaterd.client.claims import ACK_LINGER_SECONDS, ACK_REPEAT_SECONDS, ClaimsInHand
from pinlaterd.model import AckInfo, ClaimedJob

T0 = 1000.0


def claimed(number: int, *, timeout_seconds: int = 60) -> ClaimedJob:
    return ClaimedJob(f"q:s1:p1:{number}", b"", 2, 2, f"h:1:1:me:{number}", timeout_seconds)


def ack(job: ClaimedJob) -> AckInfo:
    return AckInfo(job.descriptor, claim_descriptor=job.claim_descriptor)


@pytest.fixture
def hand() -> ClaimsInHand:
    return ClaimsInHand()


def test_jobs_begin_in_the_order_they_came(hand):
    hand.add([claimed(1), claimed(2)], T0)

    assert [hand.begin(), hand.begin()] == [claimed(1), claimed(2)]


def test_there_is_room_once_every_job_has_begun(hand):
    hand.add([claimed(1)], T0)
    room: list[bool] = []
    waiter = threading.Thread(target=lambda: room.append(hand.wait_for_room()))
    waiter.start()
    assert room == []

    hand.begin()

    waiter.join(20)
    assert room == [True]


def test_an_ack_goes_with_the_next_dequeue_or_alone_after_a_moment(hand):
    hand.add([claimed(1), claimed(2)], T0)
    for job in (hand.begin(), hand.begin()):
        hand.finish(job, ack(job), T0, succeeded=True)

    assert hand.take_due_acks(T0) == []
    assert len(hand.take_due_acks(T0 + ACK_LINGER_SECONDS)) == 2
    assert hand.take_acks() == []


def test_an_ack_that_failed_is_repeated_later_and_never_by_a_dequeue(hand):
    hand.add([claimed(1)], T0)
    job = hand.begin()
    hand.finish(job, ack(job), T0, succeeded=False)
    assert hand.put_back(hand.take_acks(), T0) == []

    assert hand.take_acks() == []
    assert hand.take_due_acks(T0 + ACK_REPEAT_SECONDS / 2) == []
    [again] = hand.take_due_acks(T0 + ACK_REPEAT_SECONDS)
    assert again.ack == ack(job)
    assert again.succeeded is False


def test_an_ack_is_dropped_once_its_claim_has_timed_out(hand):
    hand.add([claimed(1, timeout_seconds=60)], T0)
    job = hand.begin()
    hand.finish(job, ack(job), T0 + 1, succeeded=True)
    acks = hand.take_acks()

    [late] = hand.put_back(acks, T0 + 60)

    assert late.ack == ack(job)
    assert hand.take_due_acks(T0 + 1000) == []


def test_claims_are_renewed_well_before_they_time_out(hand):
    waiting, running = claimed(2, timeout_seconds=60), claimed(1, timeout_seconds=60)
    hand.add([running, waiting], T0)
    hand.begin()

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
    job = hand.begin()
    hand.renewed([job], T0 + 20, done=True)
    hand.finish(job, ack(job), T0 + 21, succeeded=True)

    assert hand.put_back(hand.take_acks(), T0 + 79) == []


def test_a_finished_job_is_renewed_no_more(hand):
    hand.add([claimed(1)], T0)
    job = hand.begin()
    hand.finish(job, ack(job), T0, succeeded=True)

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
    assert hand.wait_for_room() is False
    assert hand.begin() is None
    assert hand.take_waiting() == [claimed(1)]


def test_the_keeper_wakes_for_the_first_ack_and_ends_when_drained(hand):
    hand.add([claimed(1)], T0)
    job = hand.begin()
    woken: list[bool] = []
    keeper = threading.Thread(target=lambda: woken.append(hand.wait_until_due(T0)))
    keeper.start()

    hand.finish(job, ack(job), T0, succeeded=True)
    keeper.join(20)
    hand.drain()

    assert woken == [True]
    assert hand.wait_until_due(T0) is False
