"""Keys that a hand has damaged: what can be served is, the rest is told of by name, and nobody else
suffers."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import pytest
import redis

from pinlaterd.engines.base import Batch, EnqueueOp, Search
from pinlaterd.errors import StorageError, StorageNotCommitted
from pinlaterd.model import Job, JobKey, JobState
from tests.clocks import FakeClock
from tests.conformance.engine.calls import STORAGE_CALLS
from tests.conformance.engine.engines import EngineMaker
from tests.conformance.engine.harness import QUEUE, Ack, EngineHarness, ack_op, claim_op

NO_NUMBERS = ["", "many", "nan", "inf", "-inf", "1e400", "99999999999999999999", "0x"]
NO_JOBS = ["", "abc", "007", "-3", "1.0", "9223372036854775808", "99999999999999999999", "é"]


class Hand:
    """Somebody with redis-cli, in one shard."""

    def __init__(self, client: redis.Redis, shard: str) -> None:
        self.client = client
        self.shard = shard
        self.counter = f"plj_{shard}_{QUEUE}"
        self.record = f"plm_{shard}"

    def set_of(self, state: JobState, priority: int = 1) -> str:
        return f"plq_{self.shard}_{QUEUE}.p{priority}_s{int(state)}"

    def hash_of(self, key: JobKey) -> str:
        return f"plh_{self.shard}_{QUEUE}.{key.local_id}"

    def replace(self, name: str) -> None:
        """A string in place of what was there."""
        self.client.delete(name)
        self.client.set(name, "no such thing")


@pytest.fixture
def hand(stranger: redis.Redis, shard: str) -> Hand:
    return Hand(stranger, shard)


def in_each_state(store: EngineHarness) -> dict[JobState, JobKey]:
    """One job in each, and none else."""
    job = Job(b"x", attempts_allowed=1)
    keys = store.enqueue(job, job, job)
    store.claim()
    store.succeed(keys[1])
    store.fail(keys[2])
    [pending] = store.enqueue(job)
    return dict(zip(JobState, (pending, *keys), strict=True))


def release_expired(store: EngineHarness) -> Any:
    return store.engine.release_expired(
        QUEUE, claimed_before_ms=store.now_ms + 1, limit=100, now_ms=store.now_ms
    )


def retry_failed(store: EngineHarness) -> Any:
    return store.engine.retry_failed(
        QUEUE, 1, attempts=1, run_after_ms=store.now_ms, limit=100, now_ms=store.now_ms
    )


# --- jobs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", NO_NUMBERS)
def test_a_field_that_is_no_number_counts_as_missing(
    store: EngineHarness, hand: Hand, text: str, clock: FakeClock
):
    damaged, sound = store.enqueue(Job(b"a", attempts_allowed=2), Job(b"b", attempts_allowed=2))
    fields = dict.fromkeys(("al", "ar", "ca", "ua", "ra"), text)
    hand.client.hset(hand.hash_of(damaged), mapping=fields)  # type: ignore[arg-type]

    job = store.job(damaged)
    assert (job.attempts_allowed, job.created_at_ms) == (1, store.now_ms)
    first, second = store.claim()
    assert first.payload == (b"a", 1, 1)
    assert second.payload == (b"b", 2, 2)
    assert store.job(damaged).run_after_ms == store.now_ms
    assert store.fail(damaged, sound).requeued[0].key.local_id == sound.local_id
    assert store.states([damaged, sound]) == [JobState.FAILED, JobState.PENDING]
    hand.client.hset(hand.hash_of(damaged), mapping=fields)  # type: ignore[arg-type]
    assert len(retry_failed(store)) == 1
    assert store.job(damaged).attempts_allowed == 1
    store.claim()
    hand.client.hset(hand.hash_of(damaged), mapping=fields)  # type: ignore[arg-type]
    clock.advance(1)
    assert len(release_expired(store).retried) == 0
    assert store.states([damaged, sound]) == [JobState.FAILED, JobState.FAILED]


def test_something_else_in_place_of_a_job_is_no_job(store: EngineHarness, hand: Hand):
    keys = in_each_state(store)
    [sound] = store.enqueue(b"sound")
    for key in keys.values():
        hand.replace(hand.hash_of(key))

    assert [claimed.key for claimed in store.claim()] == [sound]
    assert store.succeed(keys[JobState.IN_PROGRESS], sound).noop == 1
    assert release_expired(store) == ([], 0)
    assert not retry_failed(store)
    assert store.states(keys.values()) == [None] * 4
    assert store.depths() == {(1, JobState.SUCCEEDED): 1}


@pytest.mark.parametrize("state", list(JobState))
def test_members_that_are_no_jobs_are_removed_when_met(
    store: EngineHarness, hand: Hand, state: JobState
):
    key = in_each_state(store)[state]
    now = store.now_ms / 1000
    members = dict.fromkeys(NO_JOBS, now - 1) | {"77": float("-inf"), "78": float("inf")}
    hand.client.zadd(hand.set_of(state), members)
    searcher = store.engine.searcher()()

    for future in (False, True):
        searcher.scan(Search(QUEUE, state, limit=9, future=future, now_ms=store.now_ms))
    assert searcher.find(Search(QUEUE, state, limit=9, body_regex="x")) == [key]
    searcher.close()
    if state is JobState.PENDING:
        assert [claimed.key for claimed in store.claim()] == [key]
        store.engine.payloads(QUEUE, 1, [77, 78], most_bytes=1)
    elif state is JobState.IN_PROGRESS:
        assert release_expired(store).failed == 1
    elif state is JobState.FAILED:
        assert len(store.engine.oldest_failed(QUEUE, 1, limit=99)) > 1
        assert [job.key.local_id for job in retry_failed(store)] == [key.local_id]
    assert len(store.engine.delete_jobs(QUEUE, state, 1, limit=99)) == (
        1 if state is JobState.SUCCEEDED else 0
    )
    assert set(hand.client.zrange(hand.set_of(state), 0, -1)) <= {b"78"}


# --- sets ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", list(JobState))
def test_what_is_no_set_costs_its_own_priority_only(
    store: EngineHarness, hand: Hand, state: JobState, caplog: pytest.LogCaptureFixture
):
    [elsewhere] = store.enqueue(Job(b"2", priority=2))
    [running] = store.in_progress(Job(b"1", attempts_allowed=1))
    name = hand.set_of(state)
    hand.replace(name)

    with caplog.at_level(logging.ERROR):
        store.ready()
    assert (name in caplog.text) == (state is JobState.PENDING)
    batch = Batch(  # both priorities, and what needs that set
        acks=[
            ack_op(QUEUE, [Ack(running.key)], ())
            if state is JobState.SUCCEEDED
            else ack_op(QUEUE, (), [Ack(running.key)])
        ],
        enqueues=[EnqueueOp(QUEUE, [Job(b"3", priority=2), Job(b"4")])],
        claims=[claim_op(QUEUE, store.wanted(priority=2))],
    )
    with pytest.raises(StorageNotCommitted, match=f"key {name} holds string, expected zset"):
        store.engine.apply(batch, store.now_ms)
    assert store.ready(priority=2) == [elsewhere]
    assert [claimed.key for claimed in store.claim(priority=2)] == [elsewhere]
    assert store.succeed(elsewhere).succeeded == 1
    assert store.depths()[2, JobState.SUCCEEDED] == 1

    hand.client.delete(name)  # as the message says
    [after] = store.enqueue(b"5")
    assert after in [claimed.key for claimed in store.claim()]


@pytest.mark.parametrize("name", sorted(STORAGE_CALLS.keys()))
def test_no_call_ends_ownership_because_of_what_is_no_set(
    store: EngineHarness, hand: Hand, name: str
):
    for state in JobState:
        hand.replace(hand.set_of(state))
    hand.replace(f"pln_{hand.shard}")

    with contextlib.suppress(StorageNotCommitted):
        STORAGE_CALLS[name](store.engine)

    store.engine.heartbeat()  # and not: must be opened anew


def test_a_queue_of_damaged_sets_can_be_deleted_and_made_anew(store: EngineHarness, hand: Hand):
    store.enqueue(b"a")
    for state in JobState:
        hand.replace(hand.set_of(state))

    store.engine.delete_queue(QUEUE)
    while store.engine.vacuum(limit=10):
        pass
    store.engine.create_queue(QUEUE, store.now_ms)

    assert store.ready() == []
    assert store.claim() == []
    assert store.enqueue(b"b") == store.ready()
    assert not hand.client.keys(f"plt_{hand.shard}*")


# --- counter, record, names -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "damage", ["text", "-1", "1e3", "99999999999999999999", "9007199254740993"]
)
def test_a_counter_that_counts_nothing_stops_enqueues_alone(
    store: EngineHarness, hand: Hand, damage: str
):
    [running] = store.in_progress(b"a")
    hand.client.set(hand.counter, damage)
    both = Batch(
        acks=[ack_op(QUEUE, [Ack(running.key)], ())], enqueues=[EnqueueOp(QUEUE, [Job(b"b")])]
    )

    for _ in range(3):
        with pytest.raises(StorageNotCommitted, match=f"key {hand.counter} holds what is no id"):
            store.engine.apply(both, store.now_ms)
    assert hand.client.get(hand.counter) == damage.encode()
    assert store.states([running.key]) == [JobState.IN_PROGRESS]
    store.reopen()
    assert store.succeed(running.key).succeeded == 1

    hand.client.delete(hand.counter)
    [key] = store.enqueue(b"c")
    assert key.local_id > running.key.local_id


def test_a_counter_that_is_evicted_again_and_again_gives_no_id_twice(
    store: EngineHarness, hand: Hand, clock: FakeClock
):
    keys = []
    for _ in range(5):
        keys += store.enqueue(*[b"a"] * 50)  # far more than one a millisecond
        hand.client.delete(hand.counter)
        clock.advance(0.001)

    assert len(set(keys)) == 250
    assert store.states(keys) == [JobState.PENDING] * 250
    assert store.ready() == keys


def test_an_owner_whose_record_is_evicted_takes_over_anew(store: EngineHarness, hand: Hand):
    before = store.enqueue(b"a")
    start_ms = store.start_ms
    hand.client.delete(hand.record)

    with pytest.raises(StorageError, match="its record is gone") as caught:
        store.enqueue(b"b")
    assert not isinstance(caught.value, StorageNotCommitted)
    store.clock.advance(1)
    store.engine.close()
    assert store.engine.open(store.now_ms) > start_ms

    after = store.enqueue(b"c")
    assert store.ready() == before + after


def test_a_record_of_no_numbers_is_begun_anew(store: EngineHarness, hand: Hand):
    [key] = store.enqueue(b"a")
    store.engine.close()
    hand.client.hset(
        hand.record, mapping={"fence": "x", "start_ms": "nan", "dropped": "-inf", "clean": "?"}
    )

    store.engine.open(store.now_ms)
    store.engine.delete_queue(QUEUE)
    store.engine.create_queue(QUEUE, store.now_ms)

    assert store.enqueue(b"b") != [key]


@pytest.mark.parametrize("prefix", ["plm", "plo", "pln", "plt"])
def test_a_shard_whose_own_keys_are_something_else_says_which(
    store: EngineHarness, make: EngineMaker, hand: Hand, prefix: str
):
    store.engine.close()
    name = f"{prefix}_{hand.shard}"
    hand.client.delete(name)
    hand.client.xadd(name, {"a": "b"})
    engine = make()

    with pytest.raises(StorageError, match=f"key {name} holds stream, expected"):
        engine.open(store.now_ms)
    hand.client.delete(name)
    engine.open(store.now_ms)
    engine.close()


def test_names_that_are_no_queues_are_passed_over(store: EngineHarness, hand: Hand):
    hand.client.zadd(f"pln_{hand.shard}", {b"\xff": 1, b"a.b": 2, b"": 3, b"a b": 4})
    store.reopen()

    assert store.engine.queues() == {QUEUE}
    assert store.engine.depths() == {QUEUE: {}}


def test_a_score_beyond_all_times_is_read(store: EngineHarness, hand: Hand):
    keys = store.enqueue(b"first", b"never")
    first, never = (str(key.local_id) for key in keys)
    hand.client.zadd(hand.set_of(JobState.PENDING), {first: float("-inf"), never: float("inf")})

    assert store.ready() == [keys[0]]
    [claimed] = store.claim()
    found = store.engine.lookup(QUEUE, keys, include_body=False)
    assert {job.key: job.state for job in found} == {
        keys[0]: JobState.IN_PROGRESS,
        keys[1]: JobState.PENDING,
    }
    assert store.fail(claimed.key).failed == 1
