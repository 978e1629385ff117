"""The engines that the suite is run against: one line each.

A maker is called again and again for the same store: each call is another process's view of one
shard. It can be pickled, so that such a process can be real.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest

from pinlaterd.engines.base import StorageEngine
from pinlaterd.engines.sqlite.engine import SqliteEngine
from tests.servers.redis import RedisServer, new_shard, redis_engine

EngineMaker = Callable[[], StorageEngine]


def sqlite_engine(folder: Path) -> StorageEngine:
    return SqliteEngine(folder / "shard-1.sqlite")


def _sqlite_maker(_request: pytest.FixtureRequest, folder: Path) -> EngineMaker:
    return partial(sqlite_engine, folder)


def _redis_maker(request: pytest.FixtureRequest, _folder: Path) -> EngineMaker:
    server: RedisServer = request.getfixturevalue("redis_server")
    return partial(redis_engine, server.address, new_shard())


ENGINES: Mapping[str, Callable[[pytest.FixtureRequest, Path], EngineMaker]] = {
    "redis": _redis_maker,
    "sqlite": _sqlite_maker,
}


def maker(engine: str, request: pytest.FixtureRequest, folder: Path) -> EngineMaker:
    """A maker for a new, empty store. `folder` is an empty one; a server is one of the fixtures
    that `request` gets."""
    return ENGINES[engine](request, folder)
