"""A whole service on Redis shards, with PinLater's configuration and jobs."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from pinlaterd.client import AckInfo, Client, JobState
from tests.conftest import FreePort, WaitUntil
from tests.deployment import MOST_PATIENT, Deployment, claim
from tests.servers.redis import HOST, RedisServer

pytestmark = pytest.mark.service

QUEUE = "mail"
LEASE_SECONDS = 600
OLD_QUEUE = "old"
OLD_CLAIM = "pinlater-host:9010:1421450000123:test:7"
LAST_OLD_ID = 100


def _pinlaters_json(server: RedisServer) -> str:
    """The file that PinLater's server is given."""
    master = {"host": HOST, "port": server.port}
    config = {"master": master, "slave": None, "dequeueOnly": False}
    return json.dumps({"shards": [{"name": name, "shardConfig": config} for name in "12"]})


def _lay_down_pinlaters_jobs(client: redis.Redis) -> None:
    """In shard 1: job 7 is pending, 8 in progress."""
    client.zadd("pln_1", {OLD_QUEUE: 1_421_450_000.5})
    client.set(f"plj_1_{OLD_QUEUE}", LAST_OLD_ID)
    common: dict[Any, Any] = {"cs": "", "al": "3", "ar": "3"}
    common |= {"ca": "1421450000.123", "ua": "1421450000.123"}
    client.hset(f"plh_1_{OLD_QUEUE}.7", mapping=common | {"bd": b"pending"})
    client.zadd(f"plq_1_{OLD_QUEUE}.p1_s0", {"7": 1_421_450_000.123})
    client.hset(f"plh_1_{OLD_QUEUE}.8", mapping=common | {"bd": b"running", "cd": OLD_CLAIM})
    client.zadd(f"plq_1_{OLD_QUEUE}.p1_s1", {"8": time.time()})


@pytest.fixture(scope="module")
def server(
    redis_program: str, free_port: FreePort, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RedisServer]:
    folder = tmp_path_factory.mktemp("r")
    server = RedisServer(redis_program, folder, free_port(), "--appendfsync", "always")
    server.start()
    with server.client() as client:
        _lay_down_pinlaters_jobs(client)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def service(server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    deployment = Deployment(tmp_path_factory.mktemp("service"))
    settings = {"owner_lease_seconds": LEASE_SECONDS, "monitor_interval_seconds": 0.1}
    deployment.init(shards=2, settings={**settings, **MOST_PATIENT})
    (deployment.folder / "etc/shards.yaml").write_text(_pinlaters_json(server))
    with deployment.running():
        yield deployment


@pytest.fixture
def client(service: Deployment) -> Iterator[Client]:
    with service.client() as client:
        client.create_queue(QUEUE)
        yield client


def test_pinlaters_jobs_are_served_with_pinlaters_configuration(
    service: Deployment, client: Client, wait_until: WaitUntil
):
    pending, running = f"{OLD_QUEUE}:s1:p1:7", f"{OLD_QUEUE}:s1:p1:8"
    assert OLD_QUEUE in client.queue_names()
    assert {name: job.state for name, job in client.lookup([pending, running]).items()} == {
        pending: JobState.PENDING,
        running: JobState.IN_PROGRESS,
    }

    claimed = claim(client, OLD_QUEUE)
    assert client.dequeue(OLD_QUEUE, limit=10) == []
    client.ack(
        OLD_QUEUE,
        succeeded=[*claimed, AckInfo(running, claim_descriptor=OLD_CLAIM)],
    )

    assert [(job.descriptor, job.body) for job in claimed] == [(pending, b"pending")]
    found = client.lookup([pending, running])
    assert {job.state for job in found.values()} == {JobState.SUCCEEDED}
    new: list[str] = []

    def is_on_shard_1() -> bool:
        new.extend(client.enqueue(OLD_QUEUE, [b"new"]))
        return ":s1:" in new[-1]

    wait_until(is_on_shard_1)
    assert int(new[-1].rpartition(":")[2]) > LAST_OLD_ID


def test_shards_that_are_killed_are_back_long_before_their_leases_end(
    service: Deployment, client: Client
):
    names = client.enqueue(QUEUE, [b"x"] * 10)
    claimed = client.dequeue(QUEUE, limit=6)
    client.ack(QUEUE, succeeded=claimed)
    for program in ("shard-1", "shard-2"):
        service.kill(program)

    service.wait_until_serving()

    found = client.lookup(names)
    assert found.keys() == set(names)
    ended = {name for name, job in found.items() if job.state is JobState.SUCCEEDED}
    assert ended == {job.descriptor for job in claimed}


def test_its_durability_and_its_errors_are_in_status(
    service: Deployment, client: Client, server: RedisServer, wait_until: WaitUntil
):
    wait_until(lambda: "appendfsync always" in str(service.status()))

    server.stop()

    wait_until(lambda: "can't be reached" in service.log_tails())
    server.start("--appendfsync", "everysec")
    service.wait_until_serving()
    wait_until(lambda: "appendfsync everysec" in str(service.status()))
    said = "its store: appendfsync everysec: a crash of its machine"
    wait_until(lambda: said in service.log_tails(lines=50))
