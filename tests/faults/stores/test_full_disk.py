"""The disk of a MySQL server is full: calls fail in time, and nothing acknowledged is lost.

MariaDB tries for some seconds to make its files longer, and then either refuses the statement or
aborts. What starts it again on a real machine is the system; here it is the test.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pymysql
import pytest

from pinlaterd.client import PinLaterError
from pinlaterd.errors import Overloaded
from tests.conftest import FreePort, ProgramPath, WaitUntil
from tests.deployment import Deployment, serving
from tests.faults.load import Load
from tests.faults.small_disk import SmallDisk, fill
from tests.faults.stores.store import SETTINGS, check_in_time, shard_settings
from tests.servers.mariadb import MariaDB, start_mariadb

pytestmark = pytest.mark.service

# A new server's files take two thirds of it at first.
DISK_BYTES = 150 * 1024 * 1024
BODY = bytes(1024 * 1024)
SMALLEST_ROW_BYTES = 20_000
# All tables share one file that may not grow: a full one is refused at once, and ends no server.
BOUNDED = ("--innodb-file-per-table=OFF", "--innodb-data-file-path=ibdata1:12M:autoextend:max:32M")
ROOM = "--innodb-data-file-path=ibdata1:12M:autoextend:max:64M"  # even to drop a table takes some


@pytest.fixture
def server(
    program_path: ProgramPath,
    free_port: FreePort,
    small_disk: SmallDisk,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[MariaDB]:
    folder: Path = tmp_path_factory.mktemp("s")
    (folder / "data").mkdir()
    small_disk(folder / "data", DISK_BYTES)
    server = start_mariadb(program_path, folder, free_port())
    yield server
    server.stop()


@pytest.fixture
def bounded_server(
    program_path: ProgramPath, free_port: FreePort, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MariaDB]:
    folder = tmp_path_factory.mktemp("s") / "db"
    server = start_mariadb(program_path, folder, free_port(), *BOUNDED)
    yield server
    server.stop()


@contextmanager
def on(server: MariaDB, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """A deployment whose shard is on `server`."""
    shards = {"mysql": shard_settings("mysql", server.port)}
    with serving(tmp_path_factory.mktemp("d"), shards=shards, settings=SETTINGS) as deployment:
        yield deployment


@pytest.fixture
def deployment(server: MariaDB, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with on(server, tmp_path_factory) as deployment:
        yield deployment


def test_a_full_disk_loses_nothing_and_is_got_over(
    deployment: Deployment, server: MariaDB, load: Load, wait_until: WaitUntil
):
    filler = server.folder / "data/filler"

    def is_back() -> bool:
        if server.has_ended:
            server.start()
        return deployment.is_serving()

    with load.running():
        fill(filler)
        with deployment.client() as client, pytest.raises(PinLaterError):
            client.enqueue(load.queue, [BODY])
        wait_until(lambda: len(load.errors) >= 10)
        filler.unlink()

        wait_until(is_back)

    load.check(claims_may_be_lost=True)
    check_in_time(load)


def test_a_shard_whose_server_has_no_room_is_degraded_until_there_is_some(
    bounded_server: MariaDB, tmp_path_factory: pytest.TempPathFactory, wait_until: WaitUntil
):
    """Without a client that writes meanwhile."""
    with on(bounded_server, tmp_path_factory) as deployment, deployment.client() as client:

        def degraded() -> str:
            return str(deployment.status()["shards"][0]["degraded"])

        client.create_queue("mail")
        with pytest.raises(pymysql.MySQLError, match="is full"):
            _fill(bounded_server)
        with pytest.raises(Overloaded, match="store is full"):
            client.enqueue("mail", [BODY])
        wait_until(lambda: degraded() != "")

        assert "the store is full" in degraded()
        assert "make room there" in degraded()
        wait_until(lambda: len(deployment.status()["problems"]) == 1)
        status = deployment.status()
        with pytest.raises(HTTPError) as unavailable:
            urlopen(f"http://{status['stats']}/health")
        assert unavailable.value.code == HTTPStatus.SERVICE_UNAVAILABLE
        bounded_server.stop()
        bounded_server.start(ROOM)
        wait_until(lambda: not degraded() and deployment.status()["healthy"])

        assert client.enqueue("mail", [BODY])


def _fill(server: MariaDB) -> None:
    """Insert ever smaller rows until the server has room for none."""
    size = len(BODY)
    with server.connect() as db:
        db.cursor().execute("CREATE TABLE mysql.filler (filler LONGBLOB)")
        while True:
            try:
                db.cursor().execute("INSERT INTO mysql.filler VALUES (REPEAT('x', %s))", (size,))
            except pymysql.MySQLError:
                if size < SMALLEST_ROW_BYTES:
                    raise
                size //= 4
