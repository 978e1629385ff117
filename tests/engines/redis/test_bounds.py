"""What the owner's loop does costs what it moves, not what the queue holds."""

from __future__ import annotations

from functools import partial
from typing import cast

import pytest
import redis

from pinlaterd.engines.redis.engine import RedisEngine
from pinlaterd.model import Job, JobKey, JobOptions, PendingKey
from tests.conformance.engine.engines import EngineMaker
from tests.conformance.engine.harness import QUEUE, EngineHarness
from tests.engines.bounded_calls import BOUNDED_CALLS, LIMIT, YEAR_4000_MS, Call
from tests.servers.redis import RedisServer, redis_engine

DEEP = 3_000
# Commands that a script makes: some ten a job, and for a page the scores of two milliseconds.
MOST_COMMANDS = 150
# The deletion of a queue looks for sets of all priorities there may have been.
MOST_COMMANDS_OF_A_DROP = 600


CALLS: dict[str, Call] = {
    **BOUNDED_CALLS,
    "depths": lambda engine, keys: engine.depths(),
    "heartbeat": lambda engine, keys: engine.heartbeat(),
}


@pytest.fixture
def make(redis_server: RedisServer, shard: str) -> EngineMaker:
    """With a lease that lasts for as long as a busy machine takes to fill a deep queue."""
    return partial(redis_engine, redis_server.address, shard, lease_seconds=120.0)


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
