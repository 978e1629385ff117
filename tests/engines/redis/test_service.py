"""A whole service on Redis shards: its server killed and hung, its shard killed and frozen."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from pinlaterd.client import Client, ConnectionFailed, Job, JobState, PinLaterError
from tests.conftest import WaitUntil
from tests.deployment import Deployment
from tests.engines.redis.conftest import NewServer
from tests.servers.redis import HOST, RedisServer

pytestmark = pytest.mark.service

QUEUE = "mail"
LEASE_SECONDS = 2
SHARDS_YAML = """\
shards:
  1: {engine: redis, master: {host: %(host)s, port: %(port)d}}
  2: {engine: redis, master: {host: %(host)s, port: %(port)d}}
"""


@pytest.fixture
def server(new_server: NewServer) -> RedisServer:
    return new_server("--appendfsync", "always")


@pytest.fixture
def service(server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder: Path = tmp_path_factory.mktemp("service")
    deployment = Deployment(folder)
    deployment.init(
        shards=2,
        settings={"owner_lease_seconds": LEASE_SECONDS, "monitor_interval_seconds": 0.1},
    )
    shards = SHARDS_YAML % {"host": HOST, "port": server.port}
    (deployment.folder / "etc/shards.yaml").write_text(shards)
    try:
        deployment.up()
        yield deployment
    finally:
        deployment.destroy()


@pytest.fixture
def client(service: Deployment) -> Iterator[Client]:
    with service.client() as client:
        client.create_queue(QUEUE)
        yield client


class Acknowledged:
    """Jobs, and the state that the service has answered for."""

    def __init__(self) -> None:
        self.states: dict[str, JobState] = {}

    def work(self, client: Client, rounds: int) -> None:
        """Enqueue, claim, and ack the half."""
        for _ in range(rounds):
            enqueued = client.enqueue(QUEUE, [Job(b"x" * 200, attempts_allowed=9)] * 10)
            self.states |= dict.fromkeys(enqueued, JobState.PENDING)
            claimed = client.dequeue(QUEUE, limit=6)
            self.states |= {job.descriptor: JobState.IN_PROGRESS for job in claimed}
            client.ack(QUEUE, succeeded=claimed[:3])
            self.states |= {job.descriptor: JobState.SUCCEEDED for job in claimed[:3]}

    def are_kept(self, client: Client) -> bool:
        """A call that was not answered may have been carried out all the same, or its claims have
        gone back: a job may be elsewhere than is known, but it is nowhere lost, nor undone."""
        found = client.lookup(list(self.states))
        ended = {d for d, state in self.states.items() if state is JobState.SUCCEEDED}
        return found.keys() == self.states.keys() and all(
            found[descriptor].state is JobState.SUCCEEDED for descriptor in ended
        )


def _until_it_fails(jobs: Acknowledged, client: Client) -> None:
    with pytest.raises((PinLaterError, ConnectionFailed)):
        jobs.work(client, rounds=1_000_000)


def test_a_server_that_is_killed_again_and_again(
    service: Deployment, client: Client, server: RedisServer
):
    jobs = Acknowledged()
    for _ in range(3):
        jobs.work(client, rounds=10)
        server.kill()
        _until_it_fails(jobs, client)
        server.start()
        service.wait_until_serving()
        assert jobs.are_kept(client)


def test_a_server_that_hangs(service: Deployment, client: Client, server: RedisServer):
    jobs = Acknowledged()
    jobs.work(client, rounds=10)
    os.kill(server.pid, signal.SIGSTOP)
    try:
        _until_it_fails(jobs, client)
    finally:
        os.kill(server.pid, signal.SIGCONT)

    service.wait_until_serving()
    assert jobs.are_kept(client)


def test_a_shard_that_is_killed_is_back_after_its_lease(service: Deployment, client: Client):
    jobs = Acknowledged()
    jobs.work(client, rounds=10)
    for program in ("shard-1", "shard-2"):
        service.kill(program)

    service.wait_until_serving()

    assert jobs.are_kept(client)


def _state_of(service: Deployment, pid: int) -> str | None:
    states = {process["pid"]: process["state"] for process in service.status()["processes"]}
    return states.get(pid)


def test_a_shard_that_is_frozen_loses_its_store_to_a_standby(
    service: Deployment, client: Client, wait_until: WaitUntil
):
    jobs = Acknowledged()
    jobs.work(client, rounds=10)
    frozen = service.pid_of("shard-1")
    os.kill(frozen, signal.SIGSTOP)
    standby = service.start_process("shard", "1")
    try:
        log = service.folder / "run/log/shard-1.log"
        wait_until(lambda: _state_of(service, standby.pid) == "serving")
        os.kill(frozen, signal.SIGCONT)
        wait_until(lambda: "has lost its store" in log.read_text())
    finally:
        standby.terminate()
        standby.wait()

    service.wait_until_serving()
    assert jobs.are_kept(client)


def test_its_durability_and_its_errors_are_in_status(
    service: Deployment, client: Client, server: RedisServer, wait_until: WaitUntil
):
    wait_until(lambda: "appendfsync always" in str(service.status()))

    server.stop()

    wait_until(lambda: "can't be reached" in service.log_tails())
    server.start()
    service.wait_until_serving()
