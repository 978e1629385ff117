"""Every test of this folder runs once for each engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pinlaterd.engines.base import Searcher
from tests.clocks import FakeClock
from tests.conformance.engine.engines import ENGINES, EngineMaker, maker
from tests.conformance.engine.harness import QUEUE, EngineHarness
from tests.servers.redis import redis_program, redis_server

__all__ = ["redis_program", "redis_server"]


@pytest.fixture(params=sorted(ENGINES))
def make_engine(request: pytest.FixtureRequest, tmp_path: Path) -> EngineMaker:
    """Another engine on the same, at first empty, store with every call."""
    return maker(request.param, request, tmp_path)


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
