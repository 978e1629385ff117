"""A shard with many queues: it serves between their counts, and tells routers of none too early."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from pinlaterd.engines.counts import Depths
from pinlaterd.engines.sqlite.engine import SqliteEngine
from pinlaterd.model import DequeueRequest, Job, PendingKey
from pinlaterd.shard import maintenance
from tests.clocks import FakeClock
from tests.shard.conftest import Shard
from tests.shard.test_timekeeping import HOUR_MS, SteppedClock

QUEUES = [f"queue{number}" for number in range(150)]
READS_A_TURN = 60


class SlowReads(SqliteEngine):
    """The real engine, each of whose reads takes 5 ms. Keeps how many queues `depths` was asked
    for."""

    def __init__(self, path: Path, clock: FakeClock) -> None:
        super().__init__(path)
        self.clock = clock
        self.reads = 0
        self.asked: list[int] = []

    def read_pending(self, queue: str, priority: int, **options: Any) -> Sequence[PendingKey]:
        self.clock.advance(0.005)
        self.reads += 1
        return super().read_pending(queue, priority, **options)

    def depths(self, queues: Collection[str] | None = None) -> Mapping[str, Depths | None]:
        self.asked.append(0 if queues is None else len(queues))
        return super().depths(queues)


@pytest.fixture
def clock() -> SteppedClock:
    return SteppedClock()


@pytest.fixture
def many(make_shard: Callable[..., Shard], tmp_path: Path, clock: FakeClock) -> Shard:
    """A shard that was just opened, with a job in each of QUEUES."""
    before = make_shard(engine=SqliteEngine(tmp_path / "many.sqlite"))
    for queue in QUEUES:
        before.create(queue)
        before.enqueue(Job(b"a", priority=2), queue=queue)
    before.service.close()
    return make_shard(engine=SlowReads(tmp_path / "many.sqlite", clock))


def counted_in_turns(shard: Shard) -> dict[str, tuple[int, ...]]:
    """What routers are told until all is counted."""
    engine = shard.engine
    assert isinstance(engine, SlowReads)
    counts: dict[str, tuple[int, ...]] = {}
    while True:
        before = engine.reads
        shard.turn()
        counts.update(shard.service.take_counts())
        assert engine.reads - before <= READS_A_TURN
        if shard.service.idle_seconds() > 0:
            return counts


def test_many_queues_are_counted_in_turns_after_the_opening(many: Shard):
    assert isinstance(many.engine, SlowReads)
    assert many.engine.reads <= READS_A_TURN

    welcome = many.service.facts()
    counts = dict(welcome.counts)
    assert 0 < len(counts) < len(QUEUES)
    counts.update(counted_in_turns(many))

    assert set(welcome.queues) == set(QUEUES)
    assert counts == dict.fromkeys(QUEUES, (0, 1, 0))


def test_a_queue_that_is_not_counted_yet_is_counted_for_who_asks(many: Shard):
    counts = dict(many.service.facts().counts)
    queue = max(set(QUEUES) - counts.keys())  # the last to be looked at

    many.submit(many.entry(DequeueRequest(queue, 10), max_jobs=10, lowest_priority=1))
    (reply,) = many.turn()

    assert reply.jobs == 0
    assert dict(many.service.take_counts())[queue] == (0, 1, 0)
    assert len(many.dequeue(queue=queue)) == 1


def test_many_queues_are_read_again_in_turns_once_the_clock_was_set_back(
    many: Shard, clock: SteppedClock
):
    counted_in_turns(many)
    assert isinstance(many.engine, SlowReads)
    before = many.engine.reads

    clock.ahead_ms = -HOUR_MS
    many.service.tick()

    assert many.engine.reads - before <= READS_A_TURN
    assert set(counted_in_turns(many)) == set(QUEUES)


def test_figures_are_gauged_in_turns(many: Shard, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(maintenance, "_MOST_QUEUES", 40)
    monkeypatch.setattr(maintenance, "_QUEUES_IN_TURN", 25)
    counted_in_turns(many)  # which changes all of them
    assert isinstance(many.engine, SlowReads)
    many.engine.asked.clear()

    for _ in range(15):
        many.service.tick()

    gauged = many.stats.snapshot()["gauges"]
    assert all(gauged[f"{queue}_pending"] == 1 for queue in QUEUES)
    assert many.engine.asked[0] == 40
    assert many.engine.asked[-1] == 25  # nothing has changed since
