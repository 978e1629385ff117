"""The engines that the suite is run against: one line each.

A maker is called with an empty folder of the test's own, again and again for the same store: each
call is another process's view of one shard. It can be pickled, so that such a process can be real.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from pinlaterd.engines.base import StorageEngine
from pinlaterd.engines.mysql.connection import Server
from pinlaterd.engines.mysql.engine import MysqlEngine
from pinlaterd.engines.sqlite.engine import SqliteEngine
from tests.servers.mariadb import HOST, PASSWD, USER

EngineMaker = Callable[[], StorageEngine]

# Where the server of this worker listens: known to processes that it spawns, too.
MARIADB_PORT = "PINLATERD_TEST_MARIADB_PORT"
LEVELS = 3
LEASE_SECONDS = 10.0


def sqlite_engine(folder: Path) -> StorageEngine:
    return SqliteEngine(folder / "shard-1.sqlite")


def mysql_engine(folder: Path) -> StorageEngine:
    server = Server(HOST, int(os.environ[MARIADB_PORT]), USER, PASSWD)
    return MysqlEngine(shard_for(folder), server, levels=LEVELS, lease_seconds=LEASE_SECONDS)


def shard_for(folder: Path) -> str:
    """A shard's name that no other folder has: a server is shared by all tests of a worker."""
    return hashlib.sha256(bytes(folder)).hexdigest()[:12]


ENGINES: Mapping[str, Callable[[Path], StorageEngine]] = {
    "mysql": mysql_engine,
    "sqlite": sqlite_engine,
}

# The fixtures that start the servers of those that need one.
SERVERS: Mapping[str, str] = {"mysql": "mariadb"}


def maker(engine: str, folder: Path) -> EngineMaker:
    return partial(ENGINES[engine], folder)
