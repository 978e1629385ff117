"""Payloads of jobs that were just enqueued."""

from __future__ import annotations

from pinlaterd.model import Payload
from pinlaterd.shard.state import PAYLOAD_OVERHEAD_BYTES, FreshPayloads


def payload(size: int) -> Payload:
    return Payload(b"x" * size, 2, 2)


def test_what_was_kept_is_taken_once():
    fresh = FreshPayloads(10_000)
    fresh.keep("mail", 1, [1, 2], [payload(1), payload(2)])

    assert fresh.take("mail", 1, [2, 3, 1]) == [payload(2), None, payload(1)]
    assert fresh.take("mail", 1, [1, 2]) == [None, None]
    assert fresh.held_bytes == 0


def test_priorities_and_queues_are_kept_apart():
    fresh = FreshPayloads(10_000)
    fresh.keep("mail", 1, [1], [payload(1)])

    assert fresh.take("mail", 2, [1]) == [None]
    assert fresh.take("post", 1, [1]) == [None]


def test_when_full_newcomers_are_not_kept():
    room_for_one = 100 + PAYLOAD_OVERHEAD_BYTES
    fresh = FreshPayloads(room_for_one)
    fresh.keep("mail", 1, [1], [payload(100)])
    fresh.keep("mail", 1, [2], [payload(100)])

    assert fresh.held_bytes == room_for_one
    assert fresh.take("mail", 1, [1, 2]) == [payload(100), None]


def test_deleted_jobs_and_dropped_queues_give_back_their_room():
    fresh = FreshPayloads(10_000)
    for queue in ("mail", "mails"):
        for priority in (1, 2):
            fresh.keep(queue, priority, [1, 2], [payload(10), payload(20)])
    whole = fresh.held_bytes

    fresh.take("mail", 1, [2, 7])
    assert fresh.held_bytes == whole - 20 - PAYLOAD_OVERHEAD_BYTES
    fresh.drop_queue("mail")
    assert fresh.held_bytes == whole / 2
    assert fresh.take("mails", 2, [1]) == [payload(10)]
