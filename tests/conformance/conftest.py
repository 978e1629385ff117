"""The running service that the tests of the Thrift interface share, one for each engine.

What a test needs changed (a shard down, other settings) it does to a deployment of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import cast

import pytest

from pinlaterd.config.password import hash_password
from tests.conformance.api import (
    ADMIN_PASSWORD,
    BACKENDS,
    COUNT_LIMIT,
    GRACE_MS,
    MAX_CALLS_PER_CONNECTION,
    MAX_DEQUEUE_WAIT_MS,
    MAX_FRAME_BYTES,
    MAX_RESPONSE_BYTES,
    MONITOR_BATCH_SIZE,
    QUEUES,
    REQUEST_TIMEOUT_MS,
    Backend,
    Client,
    Deployment,
    Interface,
)
from tests.conftest import FreePort, ProgramPath
from tests.deployment import MOST_PATIENT, PATIENT
from tests.servers import mariadb
from tests.servers.mariadb import MariaDB, start_mariadb
from tests.servers.redis import RedisServer, redis_program

__all__ = ["redis_program"]

NewStore = Callable[[Path], Mapping[str, object]]

_numbers = itertools.count(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that are marked `one_engine` run on the last one."""
    items[:] = [
        item
        for item in items
        if not item.get_closest_marker("one_engine")
        or cast("pytest.Function", item).callspec.params["backend"] is BACKENDS[-1]
    ]


@pytest.fixture(scope="package", params=BACKENDS, ids=[backend.engine for backend in BACKENDS])
def backend(request: pytest.FixtureRequest) -> Backend:
    chosen: Backend = request.param
    return chosen


@pytest.fixture(scope="package")
def thrift_compiler(program_path: ProgramPath) -> str:
    return program_path("thrift", debian_package="thrift-compiler")


@pytest.fixture(scope="package")
def api(thrift_compiler: str, tmp_path_factory: pytest.TempPathFactory) -> Interface:
    return Interface(thrift_compiler, tmp_path_factory.mktemp("generated"))


@pytest.fixture(scope="package")
def new_store(
    backend: Backend, request: pytest.FixtureRequest, free_port: FreePort
) -> Iterator[NewStore]:
    """A store for the shards of one deployment: their settings that say where it is. A server,
    where the engine needs one, runs as long."""
    servers: list[MariaDB | RedisServer] = []

    def start_mysql(folder: Path) -> Mapping[str, object]:
        program_path: ProgramPath = request.getfixturevalue("program_path")
        server = start_mariadb(program_path, folder / "db", free_port())
        servers.append(server)
        master = {"host": mariadb.HOST, "port": server.port}
        return {"master": master, "user": mariadb.USER, "passwd": mariadb.PASSWD}

    def start_redis(folder: Path) -> Mapping[str, object]:
        program: str = request.getfixturevalue("redis_program")
        server = RedisServer(program, folder / "redis", free_port())
        servers.append(server)
        server.start()
        return {"master": {"host": server.address.host, "port": server.port}}

    stores: Mapping[str, NewStore] = {"mysql": start_mysql, "redis": start_redis}
    yield stores.get(backend.engine, lambda _folder: {})
    for server in servers:
        server.stop()


@pytest.fixture(scope="package")
def new_deployment(
    api: Interface,
    backend: Backend,
    new_store: NewStore,
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[], Deployment]:
    """Writes a deployment that nobody has started yet."""

    def write() -> Deployment:
        folder: Path = tmp_path_factory.mktemp(backend.engine)
        return Deployment(api, backend, folder / "service", new_store(folder))

    return write


@pytest.fixture(scope="package")
def service(new_deployment: Callable[[], Deployment]) -> Iterator[Deployment]:
    """A healthy service of three shards and two routers."""
    deployment = new_deployment()
    deployment.configure(
        routers=2,
        advertised_host="conformance",
        max_frame_bytes=MAX_FRAME_BYTES,
        max_response_bytes=MAX_RESPONSE_BYTES,
        max_dequeue_wait_ms=MAX_DEQUEUE_WAIT_MS,
        max_calls_per_connection=MAX_CALLS_PER_CONNECTION,
        count_limit=COUNT_LIMIT,
        monitor_interval_seconds=0.1,
        **MOST_PATIENT,
        monitor_batch_size=MONITOR_BATCH_SIZE,
        admin_password_hash=hash_password(ADMIN_PASSWORD),
    )
    deployment.write("queues", QUEUES)
    with deployment.running():
        yield deployment


@pytest.fixture(scope="package")
def mistreated(new_deployment: Callable[[], Deployment]) -> Iterator[Deployment]:
    """A service that test_api_shard_down.py harms, and heals; then test_api_shards_changed.py
    configures it in another way, for good."""
    deployment = new_deployment()
    deployment.configure(
        request_timeout_ms=REQUEST_TIMEOUT_MS,
        shard_restart_grace_ms=GRACE_MS,
        monitor_interval_seconds=0.1,
        **PATIENT,
        admin_password_hash=hash_password(ADMIN_PASSWORD),
    )
    deployment.write("queues", {"stood_by": {"job_claimed_timeout_seconds": 0.3}})
    with deployment.running():
        yield deployment


@pytest.fixture
def client(service: Deployment) -> Iterator[Client]:
    with service.client() as connected:
        yield connected


@pytest.fixture
def new_queue(client: Client) -> Callable[[], str]:
    """Creates queues that no other test uses."""

    def create() -> str:
        name = f"queue_{next(_numbers)}"
        client.create(name)
        return name

    return create


@pytest.fixture
def queue(new_queue: Callable[[], str]) -> str:
    return new_queue()
