"""A Redis engine on a shared server, on a server of the test's own, and those who meddle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import redis

from tests.clocks import FakeClock
from tests.conformance.engine.engines import EngineMaker
from tests.conformance.engine.harness import QUEUE, EngineHarness
from tests.conftest import FreePort
from tests.servers.redis import (
    RedisServer,
    new_shard,
    redis_engine,
    redis_program,
    redis_server,
)

__all__ = ["redis_program", "redis_server"]

NewServer = Callable[..., RedisServer]


@pytest.fixture
def shard() -> str:
    return new_shard()


@pytest.fixture
def make(redis_server: RedisServer, shard: str) -> EngineMaker:
    return partial(redis_engine, redis_server.address, shard)


@pytest.fixture
def store(make: EngineMaker, clock: FakeClock) -> Iterator[EngineHarness]:
    harness = EngineHarness(make, clock)
    harness.engine.create_queue(QUEUE, clock.now_ms())
    yield harness
    harness.engine.close()


@pytest.fixture
def stranger(redis_server: RedisServer) -> Iterator[redis.Redis]:
    """Somebody with redis-cli, who knows nothing of owners."""
    with redis_server.client() as client:
        yield client


@pytest.fixture
def new_server(redis_program: str, free_port: FreePort, tmp_path: Path) -> Iterator[NewServer]:
    """Starts servers of the test's own, with settings of their own."""
    started: list[RedisServer] = []

    def start(*settings: str) -> RedisServer:
        folder = tmp_path / f"redis-{len(started)}"
        server = RedisServer(redis_program, folder, free_port(), *settings)
        started.append(server)
        server.start()
        return server

    yield start
    for server in started:
        server.stop()


@pytest.fixture
def new_store(clock: FakeClock, shard: str) -> Iterator[Callable[[RedisServer], EngineHarness]]:
    """Opens a store with one queue on a server of the test's own."""
    opened: list[EngineHarness] = []

    def open_on(server: RedisServer) -> EngineHarness:
        harness = EngineHarness(partial(redis_engine, server.address, shard), clock)
        opened.append(harness)
        harness.engine.create_queue(QUEUE, clock.now_ms())
        return harness

    yield open_on
    for harness in opened:
        harness.engine.close()
