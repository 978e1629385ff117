"""MariaDB, Redis and ZooKeepers on machines, and who wrote to a store: no shard's owner may once a
later one has.

Tests reach the servers by their Unix sockets, which namespaces share with the file system.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import pymysql
import redis

from tests.cluster.machines import Machine
from tests.servers.mariadb import PASSWD, USER, MariaDB
from tests.servers.redis import RedisServer
from tests.servers.zookeeper import ZooKeeper

MARIADB_PORT, REDIS_PORT, ZOOKEEPER_PORT = 3306, 6379, 2181
_ANYWHERE = "%"
# In the general log: a connection, and the jobs' table that it writes to.
_SQL_WRITE = re.compile(
    r"\t\s*(\d+) Query\t.*?\b(?:INSERT INTO|UPDATE|DELETE FROM|REPLACE INTO) `plq_([^_`]+)_"
)
# What MONITOR shows: who calls a script, and a command of it that writes jobs.
_TOKEN = re.compile(r'"\d+:\d+:process [^"]*"')
_REDIS_WRITE = re.compile(
    r' lua\] "(?:ZADD|ZREM|ZREMRANGEBYSCORE|HSET|HDEL|DEL|UNLINK|INCRBY)" "pl[bhquxj]_([^_"]+)_'
)


class ClusterMariaDB(MariaDB):
    users_host = _ANYWHERE

    def __init__(self, machine: Machine, folder: Path) -> None:
        self._machine = machine
        self.host = machine.address
        self.general_log = folder / "general.log"
        super().__init__(
            *(folder, MARIADB_PORT, "--general-log", f"--general-log-file={self.general_log}"),
            *("--max-connections=300", "--user=root"),
        )

    def _launch(self, command: Sequence[str], log: BinaryIO) -> subprocess.Popen[bytes]:
        return self._machine.start(*command, log=Path(log.name))

    def connect(self, user: str = USER, passwd: str = PASSWD, **options: Any) -> Any:
        return pymysql.connect(
            unix_socket=str(self.folder / "s"),
            user=user,
            password=passwd,
            autocommit=True,
            **options,
        )


class ClusterRedis(RedisServer):
    def __init__(self, machine: Machine, folder: Path) -> None:
        self._machine = machine
        self._socket = folder / "s"
        super().__init__(
            *("redis-server", folder, REDIS_PORT, "--bind", machine.address),
            *("--protected-mode", "no", "--unixsocket", str(self._socket)),
        )

    def start(self, *more_settings: str) -> None:
        super().start(*more_settings)
        self.monitor_log = self.folder / "monitor.log"
        self._machine.start("redis-cli", "-s", str(self._socket), "monitor", log=self.monitor_log)

    def _launch(self, command: Sequence[str]) -> subprocess.Popen[bytes]:
        return self._machine.start(*command, log=self.folder / "redis.log")

    def client(self) -> redis.Redis:
        return redis.Redis(unix_socket_path=str(self._socket), protocol=2)


class ClusterZooKeeper(ZooKeeper):
    """One of an ensemble, on a machine of its own."""

    def __init__(self, java: str, machine: Machine, folder: Path, number: int) -> None:
        self.machine = machine
        super().__init__(java, folder, machine.address, number, (ZOOKEEPER_PORT, 2888, 3888))

    def _launch(self, command: Sequence[str], log: BinaryIO) -> subprocess.Popen[bytes]:
        return self.machine.start(*command, log=Path(log.name))

    def _answer(self) -> str:
        ask = f"exec 3<>/dev/tcp/{self.host}/{self.port}; echo srvr >&3; cat <&3"
        try:
            return self.machine.run("timeout", "1", "bash", "-c", ask)
        except AssertionError:
            return ""


class Writers:
    """Who wrote to the jobs of each shard, in order, as the logs of the servers tell."""

    def __init__(self) -> None:
        self.returned: list[str] = []  # owners that wrote once a later one had
        self._past: dict[str, set[str]] = {}  # by shard
        self._last: dict[str, str] = {}

    def note(self, shard: str, writer: str, line: str) -> None:
        last = self._last.get(shard)
        if writer == last:
            return
        past = self._past.setdefault(shard, set())
        if writer in past:
            self.returned.append(f"shard {shard}: {writer} after {last}: {line[:300]}")
        if last is not None:
            past.add(last)
        self._last[shard] = writer

    def count(self, shard: str) -> int:
        """How many there were."""
        return len(self._past.get(shard, ())) + 1


class LogReader:
    """The lines that have come since it was read last."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read_bytes = 0

    def lines(self) -> Iterator[str]:
        with self._path.open("rb") as file:
            file.seek(self._read_bytes)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._read_bytes += len(line)
                yield line.decode(errors="replace")


def note_mysql_writers(log: LogReader, writers: Writers) -> None:
    """A writer is a connection."""
    for line in log.lines():
        if (found := _SQL_WRITE.search(line)) is not None:
            writers.note(found[2], f"connection {found[1]}", line)


def note_redis_writers(log: LogReader, writers: Writers) -> None:
    """A writer is a token of ownership; scripts' commands follow the call of the script."""
    caller = ""
    for line in log.lines():
        if '"EVALSHA"' in line:
            found = _TOKEN.search(line)
            caller = line.split()[2] if found is None else found[0]
        elif (write := _REDIS_WRITE.search(line)) is not None:
            writers.note(write[1], caller, line)
