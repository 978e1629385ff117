"""The running service that the tests of the Thrift interface share, one for each engine.

What a test needs changed (a shard down, other settings) it does to a deployment of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from pinlaterd.config.password import hash_password
from tests.conformance.api import (
    ADMIN_PASSWORD,
    BACKENDS,
    COUNT_LIMIT,
    MAX_CALLS_PER_CONNECTION,
    MAX_DEQUEUE_WAIT_MS,
    MAX_FRAME_BYTES,
    MAX_RESPONSE_BYTES,
    MONITOR_BATCH_SIZE,
    QUEUES,
    Backend,
    Client,
    Deployment,
    Interface,
    running,
)
from tests.conftest import ProgramPath
from tests.servers.mariadb import HOST, PASSWD, USER, MariaDB, start_mariadb

_numbers = itertools.count(1)


@pytest.fixture(scope="session", params=BACKENDS, ids=[backend.engine for backend in BACKENDS])
def backend(request: pytest.FixtureRequest) -> Backend:
    chosen: Backend = request.param
    return chosen


@pytest.fixture(scope="session")
def thrift_compiler(program_path: ProgramPath) -> str:
    return program_path("thrift", debian_package="thrift-compiler")


@pytest.fixture(scope="session")
def api(thrift_compiler: str, tmp_path_factory: pytest.TempPathFactory) -> Interface:
    return Interface(thrift_compiler, tmp_path_factory.mktemp("generated"))


@pytest.fixture(scope="session")
def new_deployment(
    api: Interface,
    backend: Backend,
    tmp_path_factory: pytest.TempPathFactory,
    free_port: Callable[[], int],
    program_path: ProgramPath,
) -> Iterator[Callable[[], Deployment]]:
    """Writes a deployment that nobody has started yet, with a server of its own if it needs one."""
    servers: list[MariaDB] = []

    def write() -> Deployment:
        folder: Path = tmp_path_factory.mktemp(backend.engine)
        store: Mapping[str, object] = {}
        if backend.engine == "mysql":
            servers.append(start_mariadb(program_path, folder / "db", free_port()))
            master = {"host": HOST, "port": servers[-1].port}
            store = {"master": master, "user": USER, "passwd": PASSWD}
        return Deployment(api, backend, folder / "service", free_port, store)

    yield write
    for server in servers:
        server.stop()


@pytest.fixture(scope="session")
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
        monitor_batch_size=MONITOR_BATCH_SIZE,
        admin_password_hash=hash_password(ADMIN_PASSWORD),
    )
    deployment.configure_queues(QUEUES)
    with running(deployment):
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
