"""Each call of the contract that reaches the store, in its simplest form: for tests of faults."""

from __future__ import annotations

from collections.abc import Callable

from pinlaterd.engines.base import Batch, EnqueueOp, Search, Searcher, StorageEngine
from pinlaterd.model import Job, JobKey, JobState
from tests.conformance.engine.harness import QUEUE

Call = Callable[[StorageEngine], object]

ONE_JOB = Batch(enqueues=[EnqueueOp(QUEUE, [Job(b"x")])])
KEY = JobKey(1, 1)

STORAGE_CALLS: dict[str, Call] = {
    "apply": lambda engine: engine.apply(ONE_JOB, 1),
    "create_queue": lambda engine: engine.create_queue("new", 1),
    "delete_queue": lambda engine: engine.delete_queue(QUEUE),
    "read_pending": lambda engine: engine.read_pending(QUEUE, 1, after=None, until_ms=1, limit=1),
    "payloads": lambda engine: engine.payloads(QUEUE, 1, [KEY.local_id], most_bytes=1),
    "lookup": lambda engine: engine.lookup(QUEUE, [KEY], include_body=True),
    "oldest_failed": lambda engine: engine.oldest_failed(QUEUE, 1, limit=1),
    "retry_failed": lambda engine: engine.retry_failed(
        QUEUE, 1, attempts=1, run_after_ms=1, limit=1, now_ms=1
    ),
    "retry_found": lambda engine: engine.retry_found(
        QUEUE, {KEY: 1}, attempts=1, ended_before_ms=2, now_ms=1
    ),
    "delete_jobs": lambda engine: engine.delete_jobs(QUEUE, JobState.PENDING, 1, limit=1),
    "delete_found": lambda engine: engine.delete_found(QUEUE, JobState.PENDING, [KEY]),
    "release_expired": lambda engine: engine.release_expired(
        QUEUE, claimed_before_ms=1, limit=1, now_ms=1
    ),
    "collect_garbage": lambda engine: engine.collect_garbage(
        QUEUE, JobState.FAILED, updated_before_ms=1, limit=1
    ),
    "vacuum": lambda engine: engine.vacuum(limit=1),
    "depths": lambda engine: engine.depths(),
    "heartbeat": lambda engine: engine.heartbeat(),
    "try_enqueue": lambda engine: engine.try_enqueue(QUEUE),
    "find_keys": lambda engine: engine.find_keys(QUEUE, ["k"]),
    "find_keys_of_all": lambda engine: engine.find_keys_of_all(["k"]),
    "expire_jobs": lambda engine: engine.expire_jobs(QUEUE, limit=1, now_ms=1),
    "raise_fence": lambda engine: engine.raise_fence(1),
}
SEARCHES: dict[str, Callable[[Searcher], object]] = {
    "count": lambda searcher: searcher.count(Search(QUEUE, JobState.FAILED, future=False)),
    "scan": lambda searcher: searcher.scan(Search(QUEUE, JobState.PENDING, limit=1)),
    "find": lambda searcher: searcher.find(Search(QUEUE, JobState.PENDING, body_regex="x")),
}
