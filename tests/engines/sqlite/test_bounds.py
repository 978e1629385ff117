"""What the owner's loop does costs what it moves, not what the queue holds."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pinlaterd.engines.base import Ack, AckOp, Batch, StorageEngine
from pinlaterd.engines.sqlite.engine import SqliteEngine
from pinlaterd.model import Job, JobKey, JobState, PendingKey
from tests.conformance.engine.harness import END_OF_TIME_MS, QUEUE, EngineHarness

DEEP = 5_000
# SQLite's virtual machine takes some 20 to 100 steps a job; a walk over a deep queue many more.
STEPS = 6_000
LIMIT = 10

Call = Callable[[StorageEngine, list[JobKey]], object]


def delete(state: JobState) -> Call:
    return lambda engine, keys: engine.delete_jobs(QUEUE, state, 1, limit=LIMIT)


def garbage(state: JobState) -> Call:
    return lambda engine, keys: engine.collect_garbage(
        QUEUE, state, updated_before_ms=END_OF_TIME_MS, limit=LIMIT
    )


CALLS: dict[str, Call] = {
    "read_pending": lambda engine, keys: engine.read_pending(
        QUEUE, 1, after=PendingKey(0, 10), until_ms=END_OF_TIME_MS, limit=LIMIT
    ),
    "payloads": lambda engine, keys: engine.payloads(
        QUEUE, 1, [key.local_id for key in keys[:LIMIT]], most_bytes=1_000
    ),
    "lookup": lambda engine, keys: engine.lookup(QUEUE, keys[:LIMIT], include_body=True),
    "acks": lambda engine, keys: engine.apply(
        Batch(acks=[AckOp(QUEUE, [Ack(key) for key in keys[:LIMIT]], ())]), END_OF_TIME_MS
    ),
    "failures": lambda engine, keys: engine.apply(
        Batch(acks=[AckOp(QUEUE, (), [Ack(key, "why") for key in keys[:LIMIT]])]), 1
    ),
    "none expired": lambda engine, keys: engine.release_expired(
        QUEUE, claimed_before_ms=0, limit=LIMIT, now_ms=0
    ),
    "some expired": lambda engine, keys: engine.release_expired(
        QUEUE, claimed_before_ms=END_OF_TIME_MS, limit=LIMIT, now_ms=0
    ),
    "oldest_failed": lambda engine, keys: engine.oldest_failed(QUEUE, 1, limit=LIMIT),
    "retry_failed": lambda engine, keys: engine.retry_failed(
        QUEUE, 1, attempts=1, run_after_ms=1, limit=LIMIT, now_ms=1
    ),
    "vacuum": lambda engine, keys: engine.vacuum(limit=LIMIT),
    **{f"delete {state.name}": delete(state) for state in JobState},
    "garbage SUCCEEDED": garbage(JobState.SUCCEEDED),
    "garbage FAILED": garbage(JobState.FAILED),
}


@pytest.fixture
def deep(store: EngineHarness) -> EngineHarness:
    """DEEP jobs in each state, half of them of another priority; a deleted queue as deep."""
    store.engine.create_queue("dropped", store.now_ms)
    store.enqueue(*[b"x"] * DEEP, queue="dropped")
    store.engine.delete_queue("dropped")
    for end in (store.succeed, store.fail, None):
        for priority in (1, 2):
            jobs = [Job(b"x", priority=priority, attempts_allowed=1)] * (DEEP // 2)
            store.enqueue(*jobs)
            keys = [claimed.key for claimed in store.claim(priority=priority, limit=DEEP)]
            if end is not None:
                end(*keys)
    for priority in (1, 2):
        store.enqueue(*[Job(b"x", priority=priority)] * (DEEP // 2))
    return store


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_no_call_walks_over_a_deep_queue(deep: EngineHarness, call: Call):
    assert isinstance(deep.engine, SqliteEngine)
    keys = deep.engine._store.db.execute("SELECT priority, local_id FROM claims").fetchall()
    steps = 0

    def count() -> int:
        nonlocal steps
        steps += 100
        return 0

    deep.engine._store.db.set_progress_handler(count, 100)
    call(deep.engine, [JobKey(*key) for key in keys])
    deep.engine._store.db.set_progress_handler(None, 0)

    assert steps < STEPS


def test_the_rows_of_a_deleted_queue_need_several_slices(store: EngineHarness):
    store.enqueue(*[b"x"] * 25)
    store.claim(limit=15)
    store.engine.delete_queue(QUEUE)

    slices = 1
    while store.engine.vacuum(limit=LIMIT):
        slices += 1

    assert slices >= 3
