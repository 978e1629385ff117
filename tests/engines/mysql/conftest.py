"""A MySQL engine on a private server, and strangers who know nothing of owners."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pinlaterd.clock import Clock
from pinlaterd.engines.base import StorageEngine
from pinlaterd.engines.mysql.connection import MysqlAddress
from pinlaterd.engines.mysql.engine import MysqlEngine
from tests.clocks import FakeClock
from tests.conformance.engine.engines import BODY_BYTES, LEASE_SECONDS, LEVELS, shard_for
from tests.conformance.engine.harness import QUEUE, EngineHarness
from tests.servers.mariadb import HOST, PASSWD, USER, MariaDB
from tests.servers.proxy import Proxy
from tests.shard.conftest import make_shard

__all__ = ["make_shard"]

NewEngine = Callable[..., MysqlEngine]


@pytest.fixture
def shard(tmp_path: Path) -> str:
    """The name of a shard that no other test has."""
    return shard_for(tmp_path)


@pytest.fixture
def new_engine(mariadb: MariaDB, shard: str) -> NewEngine:
    """Another engine on the shard of this test; with other settings, if any are given. `beats`: the
    clock that its heartbeats go by."""

    def make(
        *,
        host: str = HOST,
        port: int = mariadb.port,
        user: str = USER,
        passwd: str = PASSWD,
        lease_seconds: float = LEASE_SECONDS,
        answer_seconds: float | None = None,
        name: str = shard,
        beats: Clock | None = None,
    ) -> MysqlEngine:
        server = MysqlAddress(host, port, user, passwd)
        return MysqlEngine(
            name,
            server,
            levels=LEVELS,
            most_body_bytes=BODY_BYTES,
            lease_seconds=lease_seconds,
            answer_seconds=answer_seconds or lease_seconds,
            clock=beats,
        )

    return make


@pytest.fixture
def store(new_engine: NewEngine, clock: FakeClock) -> Iterator[EngineHarness]:
    harness = EngineHarness(new_engine, clock)
    harness.engine.create_queue(QUEUE, clock.now_ms())
    yield harness
    harness.engine.close()


@pytest.fixture
def table(shard: str) -> str:
    """Of priority 1 of the queue, for a stranger's statements."""
    return f"`plq_{shard}_{QUEUE}`.jobs_p1"


@pytest.fixture
def stranger(mariadb: MariaDB) -> Iterator[Any]:
    """Somebody with the mysql command line."""
    connection = mariadb.connect()
    with connection, connection.cursor() as cursor:
        yield cursor


@pytest.fixture
def proxy(mariadb: MariaDB) -> Iterator[Proxy]:
    between = Proxy(mariadb.port)
    yield between
    between.close()


@pytest.fixture
def behind_proxy(proxy: Proxy, new_engine: NewEngine, clock: FakeClock) -> Iterator[EngineHarness]:
    def make() -> StorageEngine:
        return new_engine(port=proxy.port)

    harness = EngineHarness(make, clock)
    harness.engine.create_queue(QUEUE, clock.now_ms())
    yield harness
    harness.engine.close()
