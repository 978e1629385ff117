"""A service on MySQL against the model of a queue."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import WaitUntil
from tests.deployment import Deployment
from tests.properties.service_model import SHARDS, SQL_KEEPS, check_service, running
from tests.servers.mariadb import HOST, PASSWD, USER, MariaDB

pytestmark = pytest.mark.service

SEED = 3


@pytest.fixture
def deployment(mariadb: MariaDB, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    master = {"host": HOST, "port": mariadb.port}
    shard = {"engine": "mysql", "master": master, "user": USER, "passwd": PASSWD}
    with running(tmp_path_factory.mktemp("d"), shard) as deployment:
        yield deployment
    with mariadb.connect() as stranger, stranger.cursor() as cursor:
        for name in SHARDS:
            cursor.execute("SHOW DATABASES LIKE %s", (f"pl_\\_{name}%",))
            for (database,) in cursor.fetchall():
                cursor.execute(f"DROP DATABASE `{database}`")


def test_any_order_of_calls_leaves_what_the_model_has(
    deployment: Deployment, wait_until: WaitUntil
):
    check_service(deployment, SEED, wait_until, SQL_KEEPS)
