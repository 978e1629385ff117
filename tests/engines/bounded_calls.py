"""Calls of the contract that move LIMIT jobs at most, whatever a queue holds."""

from __future__ import annotations

from collections.abc import Callable

from pinlaterd.engines.base import Batch, StorageEngine
from pinlaterd.model import JobKey, JobState, PendingKey
from tests.conformance.engine.harness import QUEUE, Ack, ack_op

LIMIT = 10
YEAR_4000_MS = 64_060_588_800_000

Call = Callable[[StorageEngine, list[JobKey]], object]


def _delete(state: JobState) -> Call:
    return lambda engine, keys: engine.delete_jobs(QUEUE, state, 1, limit=LIMIT)


def _garbage(state: JobState) -> Call:
    return lambda engine, keys: engine.collect_garbage(
        QUEUE, state, updated_before_ms=YEAR_4000_MS, limit=LIMIT
    )


# Each takes the keys of LIMIT jobs or more that are in progress.
BOUNDED_CALLS: dict[str, Call] = {
    "read_pending": lambda engine, keys: engine.read_pending(
        QUEUE, 1, after=PendingKey(0, 10), until_ms=YEAR_4000_MS, limit=LIMIT
    ),
    "payloads": lambda engine, keys: engine.payloads(
        QUEUE, 1, [key.local_id for key in keys[:LIMIT]], most_bytes=1_000
    ),
    "lookup": lambda engine, keys: engine.lookup(QUEUE, keys[:LIMIT], include_body=True),
    "acks": lambda engine, keys: engine.apply(
        Batch(acks=[ack_op(QUEUE, [Ack(key) for key in keys[:LIMIT]], ())]), 1
    ),
    "failures": lambda engine, keys: engine.apply(
        Batch(acks=[ack_op(QUEUE, (), [Ack(key, "why") for key in keys[:LIMIT]])]), 1
    ),
    "none expired": lambda engine, keys: engine.release_expired(
        QUEUE, claimed_before_ms=0, limit=LIMIT, now_ms=0
    ),
    "some expired": lambda engine, keys: engine.release_expired(
        QUEUE, claimed_before_ms=YEAR_4000_MS, limit=LIMIT, now_ms=0
    ),
    "oldest_failed": lambda engine, keys: engine.oldest_failed(QUEUE, 1, limit=LIMIT),
    "retry_failed": lambda engine, keys: engine.retry_failed(
        QUEUE, 1, attempts=1, run_after_ms=1, limit=LIMIT, now_ms=1
    ),
    "retry_found": lambda engine, keys: engine.retry_found(
        QUEUE, dict.fromkeys(keys[:LIMIT], 1), attempts=1, ended_before_ms=YEAR_4000_MS, now_ms=1
    ),
    "vacuum": lambda engine, keys: engine.vacuum(limit=LIMIT),
    **{f"delete {state.name}": _delete(state) for state in JobState},
    "garbage SUCCEEDED": _garbage(JobState.SUCCEEDED),
    "garbage FAILED": _garbage(JobState.FAILED),
}
