"""What the owner's loop does costs what it moves, not what the queue holds."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest
import redis

from pinlaterd.engines.base import LATEST_MS, Batch, StorageEngine
from pinlaterd.engines.redis.engine import RedisEngine
from pinlaterd.model import Job, JobKey, JobOptions, JobState, PendingKey
from tests.conformance.engine.harness import QUEUE, Ack, EngineHarness, ack_op

DEEP = 3_000
LIMIT = 10
# Commands that a script makes: some ten a job, and for a page the scores of two milliseconds.
MOST_COMMANDS = 150
# The deletion of a queue looks for sets of all priorities there may have been.
MOST_COMMANDS_OF_A_DROP = 600
YEAR_4000_MS = 64_060_588_800_000

Call = Callable[[StorageEngine, list[JobKey]], object]


def delete(state: JobState) -> Call:
    return lambda engine, keys: engine.delete_jobs(QUEUE, state, 1, limit=LIMIT)


def garbage(state: JobState) -> Call:
    return lambda engine, keys: engine.collect_garbage(
        QUEUE, state, updated_before_ms=YEAR_4000_MS, limit=LIMIT
    )


CALLS: dict[str, Call] = {
    "read_pending": lambda engine, keys: engine.read_pending(
        QUEUE, 1, after=None, until_ms=YEAR_4000_MS, limit=LIMIT
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
        QUEUE,
        dict.fromkeys(keys[:LIMIT], 1),
        attempts=1,
        ended_before_ms=LATEST_MS,
        now_ms=1,
    ),
    "depths": lambda engine, keys: engine.depths(),
    "vacuum": lambda engine, keys: engine.vacuum(limit=LIMIT),
    "heartbeat": lambda engine, keys: engine.heartbeat(),
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


def _running(deep: EngineHarness, stranger: redis.Redis, shard: str) -> list[JobKey]:
    ids = cast("list[bytes]", stranger.zrange(f"plq_{shard}_{QUEUE}.p1_s1", 0, LIMIT - 1))
    return [JobKey(1, int(local_id)) for local_id in ids]


def _commands(stranger: redis.Redis) -> int:
    stats = stranger.info("commandstats")
    return sum(each["calls"] for name, each in stats.items() if not name.endswith("_info"))


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_no_call_walks_over_a_deep_queue(
    deep: EngineHarness, stranger: redis.Redis, shard: str, call: Call
):
    keys = _running(deep, stranger, shard)
    before = _commands(stranger)

    call(deep.engine, keys)

    assert _commands(stranger) - before < MOST_COMMANDS


@pytest.mark.parametrize("killed", [False, True])
def test_opening_walks_over_no_queue(deep: EngineHarness, stranger: redis.Redis, killed: bool):
    engine = deep.engine
    assert isinstance(engine, RedisEngine)
    depths = deep.depths()
    if killed:
        engine.connection.close()
        engine._connection = None
    else:
        engine.close()
    before = _commands(stranger)

    engine.open(deep.now_ms)
    assert deep.depths() == depths
    CALLS["read_pending"](engine, [])

    assert _commands(stranger) - before < MOST_COMMANDS


def test_a_page_in_the_midst_of_one_millisecond_costs_as_little(
    deep: EngineHarness, stranger: redis.Redis
):
    first = deep.engine.read_pending(QUEUE, 1, after=None, until_ms=YEAR_4000_MS, limit=700)
    assert {key.run_after_ms for key in first} == {deep.now_ms}
    before = _commands(stranger)

    page = deep.engine.read_pending(
        QUEUE, 1, after=PendingKey(*first[-1]), until_ms=YEAR_4000_MS, limit=LIMIT
    )

    assert _commands(stranger) - before < MOST_COMMANDS
    assert page[0].local_id == first[-1].local_id + 1


def test_a_queue_is_dropped_at_once(deep: EngineHarness, stranger: redis.Redis):
    before = _commands(stranger)

    deep.engine.delete_queue(QUEUE)

    assert _commands(stranger) - before < MOST_COMMANDS_OF_A_DROP


def test_a_deleted_queue_leaves_nothing_but_its_counter(
    deep: EngineHarness, stranger: redis.Redis, shard: str
):
    deep.engine.delete_queue(QUEUE)
    while deep.engine.vacuum(limit=1_000):
        pass
    deep.engine.close()

    left = {key.decode() for key in stranger.scan_iter(f"pl?_{shard}*", count=10_000)}
    assert left == {f"plm_{shard}", f"plj_{shard}_{QUEUE}", f"plj_{shard}_dropped"}


def test_keys_of_all_queues_are_freed_in_steps_once_their_queue_is_deleted(
    store: EngineHarness, stranger: redis.Redis, shard: str
):
    store.engine.create_queue("other", store.now_ms)
    names = [f"k{number}" for number in range(DEEP)]
    jobs = [Job(b"x", options=JobOptions(name, key_of_all_queues=True)) for name in names]
    store.enqueue_keyed(*jobs)
    store.engine.delete_queue(QUEUE)
    again = store.keyed(*jobs[:LIMIT], queue="other")
    before = _commands(stranger)

    assert store.engine.vacuum(limit=LIMIT)
    assert _commands(stranger) - before < MOST_COMMANDS
    while store.engine.vacuum(limit=DEEP):
        pass

    assert not any(holder.existed for holder in again)
    assert stranger.hlen(f"plk_{shard}_") == LIMIT, "those that are held again"
    assert stranger.keys(f"pl*_{shard}_*{QUEUE}*") in ([], [f"plj_{shard}_{QUEUE}".encode()])
