"""A job whose hash was evicted: never handed out, breaks no call, and is removed when met."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import redis

from pinlaterd.engines.base import Batch, Checkpoint, Finding, Release, Search
from pinlaterd.model import Job, JobKey, JobState, Payload
from tests.clocks import FakeClock
from tests.conformance.engine.harness import END_OF_TIME_MS, QUEUE, Ack, EngineHarness, claim_op
from tests.engines.redis.conftest import NewServer
from tests.servers.redis import RedisServer

Evict = Callable[..., None]


@pytest.fixture
def evict(stranger: redis.Redis, shard: str) -> Evict:
    def remove(*keys: JobKey) -> None:
        for key in keys:
            assert stranger.delete(f"plh_{shard}_{QUEUE}.{key.local_id}") == 1

    return remove


@pytest.fixture
def hashes(stranger: redis.Redis, shard: str) -> Callable[[], int]:
    return lambda: sum(1 for _ in stranger.scan_iter(f"plh_{shard}_*", count=1000))


@pytest.mark.parametrize("payload", [None, Payload(b"a", 2, 2)])
def test_it_is_not_claimed(
    store: EngineHarness, evict: Evict, hashes: Callable[[], int], payload: Payload | None
):
    gone, left = store.enqueue(b"a", b"b")
    claims = [claim._replace(payload=payload) for claim in store.wanted()]
    evict(gone)

    [payloads] = store.engine.apply(Batch(claims=[claim_op(QUEUE, claims)]), store.now_ms).claims

    assert payloads[0] is None
    assert payloads[1] is not None
    assert store.states([gone, left]) == [None, JobState.IN_PROGRESS]
    assert store.depths() == {(1, JobState.IN_PROGRESS): 1}
    assert hashes() == 1


def test_a_read_of_payloads_removes_it(store: EngineHarness, evict: Evict):
    gone, left = store.enqueue(b"a", b"b")
    evict(gone)

    payloads = store.engine.payloads(QUEUE, 1, [gone.local_id, left.local_id], most_bytes=100)

    assert list(payloads) == [None, (b"b", 2, 2)]
    assert store.ready() == [left]


@pytest.mark.parametrize("state", list(JobState))
def test_a_look_up_removes_it(store: EngineHarness, evict: Evict, state: JobState):
    [key] = _in_state(store, state, 1)
    evict(key)

    assert store.states([key]) == [None]
    assert store.depths() == {}


def test_its_ack_checkpoint_and_release_are_no_ops(
    store: EngineHarness, evict: Evict, hashes: Callable[[], int]
):
    claimed = store.in_progress(*[b"x"] * 5)
    first, second, third, fourth, fifth = (one.key for one in claimed)
    evict(first, second, third, fourth, fifth)

    assert store.succeed(first).noop == 1
    named = Ack(fifth, claim_descriptor=claimed[4].claim_descriptor)
    assert store.succeed(named).noop == 1
    assert store.fail(second).noop == 1
    assert store.checkpoint(Checkpoint(third, None, b"new")).noop == 1
    assert list(store.release(Release(fourth, claimed[3].claim_descriptor))) == []
    assert store.depths() == {}
    assert hashes() == 0


def _in_state(store: EngineHarness, state: JobState, jobs: int) -> list[JobKey]:
    job = Job(b"x", attempts_allowed=1)
    keys = store.enqueue(*[job] * jobs)
    if state is not JobState.PENDING:
        store.claim()
    if state is JobState.SUCCEEDED:
        store.succeed(*keys)
    elif state is JobState.FAILED:
        store.fail(*keys)
    return keys


def test_upkeep_passes_over_them_and_removes_them(
    store: EngineHarness, evict: Evict, clock: FakeClock, hashes: Callable[[], int]
):
    running = _in_state(store, JobState.IN_PROGRESS, 7)
    succeeded = _in_state(store, JobState.SUCCEEDED, 7)
    failed = _in_state(store, JobState.FAILED, 7)
    for keys in (running, succeeded, failed):
        evict(*keys[:5])
    clock.advance(1)

    retried = store.engine.retry_failed(
        QUEUE, 1, attempts=1, run_after_ms=store.now_ms + 99, limit=1, now_ms=store.now_ms
    )
    expired = store.engine.release_expired(
        QUEUE, claimed_before_ms=store.now_ms, limit=1, now_ms=store.now_ms
    )
    collected = store.engine.collect_garbage(
        QUEUE, JobState.SUCCEEDED, updated_before_ms=store.now_ms, limit=1
    )

    assert [job.key.local_id for job in retried] == [failed[5].local_id]
    assert expired == ([], 1)
    assert collected == 1
    assert store.depths() == {
        (1, JobState.PENDING): 1,
        (1, JobState.IN_PROGRESS): 1,
        (1, JobState.SUCCEEDED): 1,
        (1, JobState.FAILED): 2,
    }
    assert hashes() == 5


@pytest.mark.parametrize("state", list(JobState))
def test_a_delete_removes_them_and_tells_of_the_others(
    store: EngineHarness, evict: Evict, state: JobState
):
    keys = _in_state(store, state, 6)
    evict(*keys[:3])

    assert list(store.engine.delete_found(QUEUE, state, [keys[0], keys[5]])) == [keys[5]]
    assert list(store.engine.delete_jobs(QUEUE, state, 1, limit=2)) == keys[3:5]
    assert store.depths() == {}


@pytest.mark.parametrize("state", list(JobState))
def test_searches_pass_over_them(store: EngineHarness, evict: Evict, state: JobState):
    keys = _in_state(store, state, 3)
    evict(keys[1])
    searcher = store.engine.searcher()()

    scanned = searcher.scan(Search(QUEUE, state, limit=10, future=False, now_ms=END_OF_TIME_MS))
    found = searcher.find(Search(QUEUE, state, limit=10, body_regex="x"))

    assert [job.key for job in scanned] == [keys[0], keys[2]]
    assert set(found) == {keys[0], keys[2]}
    searcher.close()


def test_they_are_not_counted(
    new_server: NewServer, new_store: Callable[[RedisServer], EngineHarness], shard: str
):
    server = new_server("--maxmemory-policy", "allkeys-lru")
    store = new_store(server)
    keys = store.enqueue(*[b"x"] * 5, Job(b"later", run_after_ms=store.now_ms + 1))
    with server.client() as client:
        client.delete(*[f"plh_{shard}_{QUEUE}.{key.local_id}" for key in keys[1:3]])
    searcher = store.engine.searcher()()

    counts = [
        searcher.count(
            Search(QUEUE, JobState.PENDING, limit=limit, future=future, now_ms=store.now_ms)
        )
        for future, limit in ((False, 99), (False, 2), (True, 99))
    ]

    assert counts == [3, 2, 1]
    searcher.close()


def test_a_check_finds_and_removes_it(store: EngineHarness, evict: Evict):
    gone, left = store.enqueue(b"a", b"b")
    evict(gone)
    finding = Finding(QUEUE, "entries of jobs that are not there", 1)

    assert store.engine.check(repair=False) == [finding]
    assert store.engine.check(repair=True) == [finding]

    assert store.engine.check(repair=False) == []
    assert store.ready() == [left]
