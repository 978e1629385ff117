"""A primary MariaDB server and a replica of it, to be made anew for each test.

Two servers that stay, because to install one takes seconds; what a test did to them is undone by
`reset`: they begin with empty binary logs and without jobs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pymysql.cursors import DictCursor

from tests.conftest import FreePort, ProgramPath, WaitUntil
from tests.servers.mariadb import HOST, PASSWD, USER, MariaDB, require_mariadb


class MariaDBPair:
    """`primary` and `replica` are these only until a failover."""

    def __init__(self, primary: MariaDB, replica: MariaDB) -> None:
        self.primary = primary
        self.replica = replica

    def reset(self, *, gtid: bool) -> None:
        """Empty servers, and the replica replicates, by GTIDs or by file and offset."""
        for server in (self.primary, self.replica):
            if not server.runs:
                server.start()
            with cursor_of(server) as cursor:
                cursor.execute("STOP ALL SLAVES")
                cursor.execute("RESET SLAVE ALL")
                cursor.execute("SET GLOBAL read_only = 0")
                cursor.execute("SHOW DATABASES LIKE 'pl%'")
                for (name,) in cursor.fetchall():
                    cursor.execute(f"DROP DATABASE `{name}`")
                cursor.execute("RESET MASTER")
                cursor.execute("SET GLOBAL gtid_slave_pos = ''")
        with cursor_of(self.primary) as cursor:
            cursor.execute("SHOW MASTER STATUS")
            file, offset = cursor.fetchone()[:2]
        place = (
            "MASTER_USE_GTID = slave_pos"
            if gtid
            else f"MASTER_LOG_FILE = '{file}', MASTER_LOG_POS = {offset}"
        )
        with cursor_of(self.replica) as cursor:
            cursor.execute("SET GLOBAL read_only = 1")
            cursor.execute(
                f"CHANGE MASTER TO MASTER_HOST = '{HOST}', MASTER_PORT = {self.primary.port},"
                f" MASTER_USER = '{USER}', MASTER_PASSWORD = %s, MASTER_CONNECT_RETRY = 1, {place}",
                (PASSWD,),
            )
            cursor.execute("START SLAVE")

    def stop(self) -> None:
        self.primary.stop()
        self.replica.stop()


@contextlib.contextmanager
def cursor_of(server: MariaDB) -> Iterator[Any]:
    """Of an administrator with the mysql command line."""
    with server.connect() as connection, connection.cursor() as cursor:
        yield cursor


def replica_status(server: MariaDB) -> dict[str, Any]:
    """SHOW SLAVE STATUS; empty if it is no replica."""
    with server.connect(cursorclass=DictCursor) as connection, connection.cursor() as cursor:
        cursor.execute("SHOW SLAVE STATUS")
        return dict(cursor.fetchone() or {})


def is_read_only(server: MariaDB) -> bool:
    with cursor_of(server) as cursor:
        cursor.execute("SELECT @@global.read_only")
        return bool(cursor.fetchone()[0])


@pytest.fixture(scope="session")
def mariadb_servers(
    program_path: ProgramPath, tmp_path_factory: pytest.TempPathFactory, free_port: FreePort
) -> Iterator[MariaDBPair]:
    require_mariadb(program_path)
    pair = MariaDBPair(*servers_at(tmp_path_factory.mktemp("pair"), free_port))
    yield pair
    pair.stop()


def servers_at(folder: Path, free_port: FreePort) -> tuple[MariaDB, MariaDB]:
    """Two that can replicate each other."""
    first, second = (
        MariaDB(
            folder / str(number),
            free_port(),
            f"--server-id={number}",
            "--log-bin=binlog",
            "--log-slave-updates",
            "--binlog-format=ROW",
            "--skip-slave-start",
        )
        for number in (1, 2)
    )
    return first, second


@pytest.fixture(params=["gtid", "file and offset"])
def mariadb_pair(
    mariadb_servers: MariaDBPair, request: pytest.FixtureRequest, wait_until: WaitUntil
) -> MariaDBPair:
    """In each way to replicate."""
    return fresh(mariadb_servers, wait_until, gtid=request.param == "gtid")


@pytest.fixture
def gtid_pair(mariadb_servers: MariaDBPair, wait_until: WaitUntil) -> MariaDBPair:
    return fresh(mariadb_servers, wait_until, gtid=True)


def fresh(pair: MariaDBPair, wait_until: WaitUntil, *, gtid: bool) -> MariaDBPair:
    pair.reset(gtid=gtid)
    wait_until(lambda: replica_status(pair.replica)["Slave_IO_Running"] == "Yes")
    return pair
