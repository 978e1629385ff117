"""Another connection has locked a queue, or the whole store: which calls that delays."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pinlaterd.engines.base import Batch, BatchResult, Expired
from pinlaterd.engines.sqlite.engine import SqliteEngine
from pinlaterd.errors import StorageError, StorageLocked
from pinlaterd.model import EnqueueRequest, Job, PendingKey
from pinlaterd.shard.health import PATIENCE_SECONDS
from pinlaterd.wire.envelope import Status
from tests.shard.conftest import MakeShard, Shard

RETRY_SECONDS = 0.1
ROUND_SECONDS = 10.0
OTHERS = [f"other{number}" for number in range(5)]
LOCKED = [f"locked{number}" for number in range(5)]
SMALL_BUFFER = 100_000  # holds the keys of some 90 jobs
MANY = 200


class Lockable(SqliteEngine):
    """The real engine, as if others held locks on the queues in `locked`; "": on the store."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.locked: set[str] = set()
        self.refused: list[str] = []  # the queues of statements that met a lock
        self.fails = False

    def apply(self, batch: Batch, now_ms: int) -> BatchResult:
        if self.fails:
            raise StorageError("the server is gone")
        for queue in [op.queue for op in batch.enqueues]:
            self._check(queue)
        return super().apply(batch, now_ms)

    def read_pending(
        self, queue: str, priority: int, *, after: PendingKey | None, until_ms: int, limit: int
    ) -> Sequence[PendingKey]:
        self._check(queue)
        return super().read_pending(queue, priority, after=after, until_ms=until_ms, limit=limit)

    def release_expired(self, queue: str, **options: Any) -> Expired:
        self._check(queue)
        return super().release_expired(queue, **options)

    def _check(self, queue: str) -> None:
        for locked in (queue, ""):
            if locked in self.locked:
                self.refused.append(queue)
                raise StorageLocked(locked, "has locked these tables")


@pytest.fixture
def engine(tmp_path: Path) -> Lockable:
    return Lockable(tmp_path / "shard.sqlite")


@pytest.fixture
def shard(make_shard: MakeShard, engine: Lockable) -> Shard:
    made = make_shard(engine=engine)
    made.create()
    return made


def statuses(shard: Shard) -> list[Status]:
    return [reply.status for reply in shard.turn()]


def test_short_locks_that_recur_fail_no_call(shard: Shard, engine: Lockable):
    for _ in range(10):
        engine.locked = {"mail"}
        shard.submit(shard.entry(EnqueueRequest("mail", [Job(b"a")])))
        assert statuses(shard) == []
        engine.locked = set()
        shard.clock.advance(RETRY_SECONDS)

        assert statuses(shard) == [Status.DONE]

        shard.clock.advance(2 * RETRY_SECONDS)


def test_a_lock_delays_the_calls_of_its_queue_alone_and_in_order(shard: Shard, engine: Lockable):
    shard.create("post")
    first, free, second = (
        shard.entry(EnqueueRequest(queue, [Job(body)]))
        for queue, body in (("mail", b"1"), ("post", b"free"), ("mail", b"2"))
    )
    engine.locked = {"mail"}
    shard.submit(first, free, second)
    assert [reply.call_id for reply in shard.turn()] == [free.call_id]
    engine.locked = set()
    shard.clock.advance(RETRY_SECONDS)

    assert statuses(shard) == [Status.DONE] * 2

    assert [job.body for job in shard.dequeue()] == [b"1", b"2"]


def test_all_queues_are_announced_after_a_lock_on_the_whole_store(shard: Shard, engine: Lockable):
    shard.create("post")
    for queue in ("mail", "post"):
        shard.enqueue(b"a", queue=queue)
    engine.locked = {""}
    shard.submit(*[shard.entry(EnqueueRequest(queue, [Job(b"b")])) for queue in ("mail", "post")])
    assert statuses(shard) == []
    assert sorted(shard.service.take_counts()) == [("mail", (0, 0, 0)), ("post", (0, 0, 0))]
    shard.clock.advance(PATIENCE_SECONDS)
    assert statuses(shard) == [Status.REFUSED] * 2
    shard.service.take_counts()
    engine.locked = set()

    shard.clock.advance(RETRY_SECONDS)
    shard.turn()

    assert sorted(shard.service.take_counts()) == [("mail", (1, 0, 0)), ("post", (1, 0, 0))]


def test_calls_that_wait_for_a_lock_are_refused_when_the_shard_stops(
    shard: Shard, engine: Lockable
):
    engine.locked = {"mail"}
    entry = shard.entry(EnqueueRequest("mail", [Job(b"a")]))
    shard.submit(entry)
    assert statuses(shard) == []

    shard.service.close()

    replies = [reply for replies in shard.service.replies.take().values() for reply in replies]
    assert [(reply.call_id, reply.status) for reply in replies] == [(entry.call_id, Status.REFUSED)]


def test_a_probe_of_a_degraded_store_waits_for_one_lock_at_most(shard: Shard, engine: Lockable):
    for queue in [*LOCKED, *OTHERS]:
        shard.create(queue)
    while not shard.service.degraded:
        engine.fails = True
        shard.results(EnqueueRequest("mail", [Job(b"a")]))
        engine.fails = False
        shard.clock.advance(60)
        shard.service.recover()
    *locked, _free = shard.service.facts().queues
    engine.locked = set(locked)

    met = []
    while shard.service.degraded:
        shard.service.tick()
        met.append(len(engine.refused))

    assert met[: len(locked)] == list(range(1, len(locked) + 1))


def test_gauges_of_queues_that_are_locked_wait_and_the_others_do_not(
    make_shard: MakeShard, engine: Lockable
):
    shard = make_shard(engine=engine, shard_buffer_bytes=SMALL_BUFFER)
    for queue in [*LOCKED, *OTHERS]:
        shard.create(queue)
        for _ in range(2):
            shard.enqueue(*[b"a"] * (MANY // 2), queue=queue)
    engine.locked = set(LOCKED)

    for _ in range(2):
        shard.service.tick()

    assert sorted(engine.refused) == LOCKED
    gauges = shard.stats.snapshot()["gauges"]
    assert all(f"{queue}_scheduled" in gauges for queue in OTHERS)
    assert not any(f"{queue}_scheduled" in gauges for queue in LOCKED)
    engine.locked = set()
    shard.clock.advance(RETRY_SECONDS)
    shard.turn()
    shard.service.tick()
    gauges = shard.stats.snapshot()["gauges"]
    assert all(f"{queue}_scheduled" in gauges for queue in LOCKED)


def test_maintenance_does_not_try_a_queue_that_is_locked(shard: Shard, engine: Lockable):
    shard.enqueue(b"a")
    shard.dequeue()
    shard.clock.advance(ROUND_SECONDS)
    engine.locked = {"mail"}
    shard.submit(shard.entry(EnqueueRequest("mail", [Job(b"b")])))

    shard.turn()
    while shard.service.busy:
        shard.turn()

    assert engine.refused == ["mail"]  # by the enqueue
