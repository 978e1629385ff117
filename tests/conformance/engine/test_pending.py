"""What is enqueued, and in what order it is read as ready."""

from __future__ import annotations

import pytest

from pinlaterd.engines.base import Batch, Checkpoint, EnqueueOp
from pinlaterd.model import Job, JobKey, JobState, PendingKey
from tests.conformance.engine.harness import EngineHarness


def test_ids_come_in_the_order_of_the_jobs_of_each_op(store: EngineHarness):
    store.engine.create_queue("other", store.now_ms)
    batch = Batch(
        enqueues=[
            EnqueueOp("mail", [Job(b"0"), Job(b"1", priority=3), Job(b"2")]),
            EnqueueOp("other", [Job(b"3")]),
            EnqueueOp("mail", []),
        ]
    )

    first, second, third = store.engine.apply(batch, store.now_ms).enqueues

    assert [len(ids) for ids in (first, second, third)] == [3, 1, 0]
    bodies = [
        store.job(JobKey(1, first[0])).body,
        store.job(JobKey(3, first[1])).body,
        store.job(JobKey(1, first[2])).body,
        store.job(JobKey(1, second[0]), queue="other").body,
    ]
    assert bodies == [b"0", b"1", b"2", b"3"]


def test_reading_goes_on_strictly_behind_a_key(store: EngineHarness):
    now_ms = store.now_ms
    keys = store.enqueue(*[Job(b"x", run_after_ms=now_ms - 10 + i // 3) for i in range(10)])

    read: list[PendingKey] = []
    while page := store.engine.read_pending(
        "mail", 1, after=read[-1] if read else None, until_ms=now_ms, limit=4
    ):
        assert len(page) <= 4
        read += page

    assert [key.local_id for key in read] == [key.local_id for key in keys]
    assert read == sorted(read)


@pytest.mark.parametrize("size", [0, 1, 64 * 1024, 1 << 20])
def test_bodies_of_every_size_come_back_as_they_were(store: EngineHarness, size: int):
    body = bytes(i * 7 % 256 for i in range(256)) * (size // 256) + bytes(size % 256)

    [claimed] = store.in_progress(body)

    assert claimed.body == body
    assert store.job(claimed.key).body == body


def test_the_latest_run_after_is_within_the_limits(store: EngineHarness):
    latest_ms = store.engine.limits.run_after_ms
    [key] = store.enqueue(Job(b"a", run_after_ms=latest_ms))

    assert store.job(key).run_after_ms == latest_ms


def test_payloads_show_what_a_claim_would_hand_out(store: EngineHarness):
    keys = store.enqueue(Job(b"a", attempts_allowed=4), b"b", b"c")
    local_ids = [key.local_id for key in reversed(keys)]
    store.engine.delete_found("mail", JobState.PENDING, keys[1:2])

    payloads = store.engine.payloads("mail", 1, local_ids, most_bytes=1000)

    assert list(payloads) == [(b"c", 2, 2), None, (b"a", 4, 4)]
    assert store.states(keys) == [JobState.PENDING, None, JobState.PENDING]


def test_a_read_of_payloads_is_bounded_in_bytes_but_gives_one(store: EngineHarness):
    keys = store.enqueue(b"x" * 400, b"y" * 400, b"z" * 400)
    local_ids = [key.local_id for key in keys]

    for most_bytes, bodies in ((10, 1), (400, 1), (800, 2), (1_199, 2), (1_200, 3)):
        payloads = store.engine.payloads("mail", 1, local_ids, most_bytes=most_bytes)
        assert len(payloads) == bodies


@pytest.mark.parametrize("size", [1, 1 << 20])
def test_a_body_may_grow_and_shrink(store: EngineHarness, size: int):
    [claimed] = store.in_progress(b"x" * (1 << 18))

    store.checkpoint(Checkpoint(claimed.key, None, new_body=b"y" * size))

    assert store.job(claimed.key).body == b"y" * size
