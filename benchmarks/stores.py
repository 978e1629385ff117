"""Where the shards of a benchmark keep their jobs: files, or a private server for the run.

All engines are measured with a durability at which an answer means that the job is on the disk,
but for Redis with `appendfsync everysec`, which is what most run and which its name says.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.deployment import BenchmarkFailed
from pinlaterd.config.schema import Address, ShardSettings
from tests.deployment import unused_port
from tests.servers import mariadb, redis

ENGINES = ("sqlite", "mysql", "redis", "redis-always")
_MORE_FOLDERS = "/usr/sbin:/usr/local/sbin"
_MARIADB_OPTIONS = ("--innodb-buffer-pool-size=1G", "--innodb-log-file-size=512M")


@dataclass(frozen=True)
class Store:
    """What a deployment's shards need to know of it, and an engine that is called in process."""

    settings: Mapping[str, Any]  # of a shard of shards.yaml
    # More than any machine of today dequeues from it: so that no queue runs dry.
    dequeues_per_second_at_most: int
    # Forget all jobs: the next deployment begins with an empty store.
    clear: Callable[[], object] = lambda: None

    def shard(self, name: str, folder: Path) -> ShardSettings:
        """Of an engine in process; `folder` is its own."""
        if "master" not in self.settings:
            return ShardSettings(name, file=f"{folder}/{name}.sqlite")
        address = Address(**self.settings["master"])
        return ShardSettings(name, **{**self.settings, "master": address})


@contextmanager
def open_store(engine: str, folder: Path) -> Iterator[Store]:
    """A store of one of ENGINES, ended with the `with`. Raises BenchmarkFailed."""
    port = unused_port()
    if engine == "sqlite":
        yield Store({"engine": engine}, 200_000)
    elif engine == "mysql":
        _program("mariadbd", "mariadb-server")
        database = mariadb.MariaDB(folder / "db", port, *_MARIADB_OPTIONS)
        settings = {
            "engine": engine,
            "master": {"host": mariadb.HOST, "port": port},
            "user": mariadb.USER,
            "passwd": mariadb.PASSWD,
        }
        try:
            yield Store(settings, 80_000, lambda: _drop_all(database))
        finally:
            database.stop()
    else:
        fsync = "always" if engine == "redis-always" else "everysec"
        program = _program("redis-server", "redis-server")
        # A rewrite of the file would take a core from whatever is measured just then.
        options = ("--appendfsync", fsync, "--auto-aof-rewrite-percentage", "0")
        server = redis.RedisServer(program, folder / "redis", port, *options)
        server.start()
        master = {"host": server.address.host, "port": port}
        try:
            yield Store(
                {"engine": "redis", "master": master}, 100_000, lambda: _start_empty(server)
            )
        finally:
            server.stop()


def _drop_all(database: mariadb.MariaDB) -> None:
    with database.connect() as connection, connection.cursor() as cursor:
        cursor.execute("SHOW DATABASES LIKE 'pl__%'")
        for (name,) in cursor.fetchall():
            cursor.execute(f"DROP DATABASE `{name}`")


def _start_empty(server: redis.RedisServer) -> None:
    """To forget millions of keys takes Redis longer."""
    server.kill()
    shutil.rmtree(server.folder)
    server.start()


def _program(name: str, package: str) -> str:
    found = shutil.which(name) or shutil.which(name, path=_MORE_FOLDERS)
    if found is None:
        raise BenchmarkFailed(f"{name} is missing; on Debian: apt-get install {package}")
    return found
