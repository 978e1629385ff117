"""Every test of this folder runs once for each engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pinlaterd.clock import FakeClock
from pinlaterd.engines.base import Searcher
from tests.conformance.engine.engines import ENGINES, SERVERS, EngineMaker, maker
from tests.conformance.engine.harness import QUEUE, EngineHarness


@pytest.fixture(params=sorted(ENGINES))
def make_engine(request: pytest.FixtureRequest, tmp_path: Path) -> EngineMaker:
    """Another engine on the same, at first empty, store with every call."""
    if request.param in SERVERS:
        request.getfixturevalue(SERVERS[request.param])
    return maker(request.param, tmp_path)


@pytest.fixture
def store(make_engine: EngineMaker, clock: FakeClock) -> Iterator[EngineHarness]:
    """An open engine that has one queue."""
    harness = EngineHarness(make_engine, clock)
    harness.engine.create_queue(QUEUE, clock.now_ms())
    yield harness
    harness.engine.close()


@pytest.fixture
def searcher(store: EngineHarness) -> Iterator[Searcher]:
    opened = store.engine.searcher()()
    yield opened
    opened.close()
