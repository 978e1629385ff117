"""Where the shards of a benchmark keep their jobs: files, or a private server for the run.

All engines are measured with a durability at which an answer means that the job is on the disk,
but for Redis with `appendfsync everysec`, which is what most run and which its name says.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from benchmarks.deployment import BenchmarkFailed, free_ports
from pinlaterd.config.schema import Address, ShardSettings
from tests.servers import mariadb
from tests.servers.mariadb import MariaDB
from tests.servers.redis import RedisServer

ENGINES = ("sqlite", "mysql", "redis", "redis-always")
_MORE_FOLDERS = "/usr/sbin:/usr/local/sbin"
_MARIADB_OPTIONS = ("--innodb-buffer-pool-size=1G", "--innodb-log-file-size=512M")


class Store(Protocol):
    """What a deployment's shards need to know of it, and an engine that is called in process."""

    engine: str
    dequeues_per_second_at_most: int
    """More than any machine of today dequeues from it: so that no queue runs dry."""

    def settings(self) -> Mapping[str, object]:
        """Of a shard of shards.yaml."""
        ...

    def shard(self, name: str, folder: Path) -> ShardSettings:
        """Of an engine in process; `folder` is its own."""
        ...

    def clear(self) -> None:
        """Forget all jobs: the next deployment begins with an empty store."""
        ...


class Files:
    engine = "sqlite"
    dequeues_per_second_at_most = 200_000

    def settings(self) -> Mapping[str, object]:
        return {"engine": self.engine}

    def shard(self, name: str, folder: Path) -> ShardSettings:
        return ShardSettings(name, file=f"{folder}/{name}.sqlite")

    def clear(self) -> None:
        """Files go with the folder of their deployment."""


class MariaDBStore:
    engine = "mysql"
    dequeues_per_second_at_most = 80_000

    def __init__(self, server: MariaDB) -> None:
        self._server = server

    def settings(self) -> Mapping[str, object]:
        return {
            "engine": self.engine,
            "master": {"host": mariadb.HOST, "port": self._server.port},
            "user": mariadb.USER,
            "passwd": mariadb.PASSWD,
        }

    def shard(self, name: str, folder: Path) -> ShardSettings:
        master = Address(mariadb.HOST, self._server.port)
        return ShardSettings(
            name, self.engine, master=master, user=mariadb.USER, passwd=mariadb.PASSWD
        )

    def clear(self) -> None:
        with self._server.connect() as connection, connection.cursor() as cursor:
            cursor.execute("SHOW DATABASES LIKE 'pl__%'")
            for (name,) in cursor.fetchall():
                cursor.execute(f"DROP DATABASE `{name}`")


class RedisStore:
    engine = "redis"
    dequeues_per_second_at_most = 100_000

    def __init__(self, server: RedisServer) -> None:
        self._server = server

    def settings(self) -> Mapping[str, object]:
        return {
            "engine": self.engine,
            "master": {"host": self._server.address.host, "port": self._server.port},
        }

    def shard(self, name: str, folder: Path) -> ShardSettings:
        master = Address(self._server.address.host, self._server.port)
        return ShardSettings(name, self.engine, master=master)

    def clear(self) -> None:
        """A new server: to forget millions of keys takes Redis longer."""
        self._server.kill()
        shutil.rmtree(self._server.folder)
        self._server.start()


@contextmanager
def open_store(engine: str, folder: Path) -> Iterator[Store]:
    """A store of one of ENGINES, ended with the `with`. Raises BenchmarkFailed."""
    if engine == "sqlite":
        yield Files()
        return
    [port] = free_ports(1)
    if engine == "mysql":
        _program("mariadbd", "mariadb-server")
        database = MariaDB(folder / "db", port, *_MARIADB_OPTIONS)
        try:
            yield MariaDBStore(database)
        finally:
            database.stop()
        return
    fsync = "always" if engine == "redis-always" else "everysec"
    program = _program("redis-server", "redis-server")
    # A rewrite of the file would take a core from whatever is measured just then.
    settings = ("--appendfsync", fsync, "--auto-aof-rewrite-percentage", "0")
    server = RedisServer(program, folder / "redis", port, *settings)
    server.start()
    try:
        yield RedisStore(server)
    finally:
        server.stop()


def _program(name: str, package: str) -> str:
    found = shutil.which(name) or shutil.which(name, path=_MORE_FOLDERS)
    if found is None:
        raise BenchmarkFailed(f"{name} is missing; on Debian: apt-get install {package}")
    return found
