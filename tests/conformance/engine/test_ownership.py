"""Sole ownership, restarts, and ids that are never used twice."""

from __future__ import annotations

import pytest

from pinlaterd.errors import ShardOwned
from pinlaterd.model import JobState
from tests.clocks import FakeClock
from tests.conformance.engine.engines import EngineMaker
from tests.conformance.engine.harness import EngineHarness


def test_a_store_has_one_owner_at_a_time(store: EngineHarness, make_engine: EngineMaker):
    second = make_engine()

    with pytest.raises(ShardOwned):
        second.open(store.now_ms)

    store.engine.close()
    second.open(store.now_ms)
    second.close()


def test_a_refused_owner_leaves_the_first_one_at_work(
    store: EngineHarness, make_engine: EngineMaker
):
    with pytest.raises(ShardOwned):
        make_engine().open(store.now_ms)

    [key] = store.enqueue(b"a")

    assert store.states([key]) == [JobState.PENDING]


def test_closing_may_be_repeated_and_may_come_before_opening(make_engine: EngineMaker):
    engine = make_engine()

    engine.close()
    engine.open(1)
    engine.close()
    engine.close()


def test_a_first_ownership_begins_at_the_time(make_engine: EngineMaker):
    engine = make_engine()

    assert engine.open(5_000) == 5_000

    engine.close()


def test_a_start_is_greater_than_any_before_even_if_the_clock_went_back(
    store: EngineHarness, clock: FakeClock
):
    starts = [store.start_ms]

    for seconds in (10, 0, -3600):
        clock.advance(seconds)
        starts.append(store.reopen())

    assert starts == sorted(set(starts))


def test_the_durability_is_named(store: EngineHarness):
    assert store.engine.durability().setting
