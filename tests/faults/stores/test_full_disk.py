"""The disk of a MySQL server is full: calls fail in time, and nothing acknowledged is lost.

MariaDB tries for some seconds to make its files longer, and then either refuses the statement or
aborts. What starts it again on a real machine is the system; here it is the test.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pinlaterd.client import PinLaterError
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
def deployment(server: MariaDB, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    shards = {"mysql": shard_settings("mysql", server.port)}
    with serving(tmp_path_factory.mktemp("d"), shards=shards, settings=SETTINGS) as deployment:
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
