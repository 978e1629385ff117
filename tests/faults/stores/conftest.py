"""A deployment of three shards, one of each engine; its servers can be killed, hung and cut off.

Each server is reached through a proxy. Shards are named after their engines, so that a descriptor
and an error tell which store they are about: `mysql`, `redis`, and `sqlite`, which has no server.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack

import pytest

from tests.conftest import FreePort, ProgramPath
from tests.deployment import Deployment, serving
from tests.faults.stores.store import ENGINES, SETTINGS, Store, shard_settings
from tests.servers.mariadb import MariaDB, start_mariadb
from tests.servers.proxy import Proxy
from tests.servers.redis import RedisServer, redis_program

__all__ = ["redis_program"]


@pytest.fixture(scope="package")
def stores(
    program_path: ProgramPath,
    redis_program: str,
    free_port: FreePort,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Mapping[str, Store]]:
    """By engine. Redis writes to its disk before it answers, so that kill -9 loses nothing."""
    folder = tmp_path_factory.mktemp("s")
    servers: dict[str, MariaDB | RedisServer] = {}
    with ExitStack() as ends:
        servers["mysql"] = start_mariadb(program_path, folder / "db", free_port())
        ends.callback(servers["mysql"].stop)
        redis = RedisServer(redis_program, folder / "r", free_port(), "--appendfsync", "always")
        ends.callback(redis.stop)
        redis.start()
        servers["redis"] = redis
        stores = {}
        for name, server in servers.items():
            proxy = Proxy(server.port)
            ends.callback(proxy.close)
            stores[name] = Store(name, server, proxy)
        yield stores


@pytest.fixture(scope="package")
def shared_deployment(
    stores: Mapping[str, Store], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    shards: dict[str, Mapping[str, object]] = {"sqlite": {}} | {
        name: shard_settings(name, store.proxy.port) for name, store in stores.items()
    }
    with serving(tmp_path_factory.mktemp("d"), shards=shards, settings=SETTINGS) as deployment:
        yield deployment


@pytest.fixture(params=ENGINES)
def store(request: pytest.FixtureRequest, stores: Mapping[str, Store]) -> Store:
    """The one that the test disturbs."""
    return stores[request.param]
