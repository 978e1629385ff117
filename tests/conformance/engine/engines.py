"""The engines that the suite is run against: one line each.

A maker is called again and again for the same store: each call is another process's view of one
shard. It can be pickled, so that such a process can be real.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest

from pinlaterd.engines.base import StorageEngine
from pinlaterd.engines.mysql.connection import MysqlAddress
from pinlaterd.engines.mysql.engine import MysqlEngine
from pinlaterd.engines.sqlite.engine import SqliteEngine
from tests.servers.mariadb import HOST, PASSWD, USER
from tests.servers.redis import RedisServer, new_shard, redis_engine

EngineMaker = Callable[[], StorageEngine]

# Where the server of this worker listens: known to processes that it spawns, too.
MARIADB_PORT = "PINLATERD_TEST_MARIADB_PORT"
LEVELS = 3
LEASE_SECONDS = 30.0  # longer than a slow test works between two calls
BODY_BYTES = 1 << 20  # the longest that is promised


def sqlite_engine(folder: Path) -> StorageEngine:
    return SqliteEngine(folder / "shard-1.sqlite")


def mysql_engine(folder: Path) -> StorageEngine:
    server = MysqlAddress(HOST, int(os.environ[MARIADB_PORT]), USER, PASSWD)
    return MysqlEngine(
        shard_for(folder),
        server,
        levels=LEVELS,
        most_body_bytes=BODY_BYTES,
        lease_seconds=LEASE_SECONDS,
        answer_seconds=LEASE_SECONDS,
    )


def shard_for(folder: Path) -> str:
    """A shard's name that no other folder has: a server is shared by all tests of a worker."""
    return hashlib.sha256(bytes(folder)).hexdigest()[:12]


def _mysql_maker(request: pytest.FixtureRequest, folder: Path) -> EngineMaker:
    request.getfixturevalue("mariadb")
    return partial(mysql_engine, folder)


def _redis_maker(request: pytest.FixtureRequest, _folder: Path) -> EngineMaker:
    server: RedisServer = request.getfixturevalue("redis_server")
    return partial(redis_engine, server.address, new_shard(), lease_seconds=LEASE_SECONDS)


def _lean_redis_maker(request: pytest.FixtureRequest, _folder: Path) -> EngineMaker:
    server: RedisServer = request.getfixturevalue("redis_server")
    return partial(
        redis_engine, server.address, new_shard(), lean=True, lease_seconds=LEASE_SECONDS
    )


def _sqlite_maker(_request: pytest.FixtureRequest, folder: Path) -> EngineMaker:
    return partial(sqlite_engine, folder)


ENGINES: Mapping[str, Callable[[pytest.FixtureRequest, Path], EngineMaker]] = {
    "mysql": _mysql_maker,
    "redis": _redis_maker,
    "redis-lean": _lean_redis_maker,
    "sqlite": _sqlite_maker,
}


def maker(engine: str, request: pytest.FixtureRequest, folder: Path) -> EngineMaker:
    """A maker for a new, empty store. `folder` is an empty one; a server is one of the fixtures
    that `request` gets."""
    return ENGINES[engine](request, folder)
