"""The Redis engine against the model of a queue."""

from __future__ import annotations

import pytest

from tests.properties.engine_model import check_engine
from tests.servers.redis import redis_program, redis_server

__all__ = ["redis_program", "redis_server"]


@pytest.mark.timeout(600)  # thousands of commits, each flushed to the disk
@pytest.mark.parametrize("engine", ["redis", "redis-lean"])
def test_the_engine_agrees_with_the_model(request: pytest.FixtureRequest, engine: str):
    check_engine(engine, request, examples=100)
