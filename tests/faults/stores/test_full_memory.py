"""The memory of a Redis server is full: new jobs go elsewhere, the others go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from pinlaterd.client import ClaimedJob, Client, JobState
from pinlaterd.errors import Overloaded
from tests.conftest import FreePort, WaitUntil
from tests.deployment import Deployment, claim
from tests.faults.load import Load, shards_of
from tests.faults.stores.store import Store, check_in_time, shard_settings
from tests.servers.redis import RedisServer

pytestmark = pytest.mark.service

WAITING = 30


def _fill(server: RedisServer) -> None:
    with server.client() as client:
        client.config_set("maxmemory", client.info("memory")["used_memory"] // 2)


def _make_room(server: RedisServer) -> None:
    with server.client() as client:
        client.config_set("maxmemory", 0)


def test_enqueues_go_elsewhere_and_what_is_there_is_worked_off(
    deployment: Deployment,
    load: Load,
    stores: dict[str, Store],
    wait_until: WaitUntil,
):
    server = stores["redis"].server
    assert isinstance(server, RedisServer)
    aside = f"{load.queue}_aside"

    def takes_jobs() -> bool:
        return "redis" in shards_of(client.enqueue(aside, [b"x"]))

    with load.running(), deployment.client() as client:
        client.create_queue(aside)
        wait_until(takes_jobs)
        _fill(server)
        try:
            load.advance()
            there: list[ClaimedJob] = []
            while "redis" not in shards_of(job.descriptor for job in there):
                there += claim(client, aside)
            new = [client.enqueue(aside, [b"x"])[0] for _ in range(WAITING)]
            assert shards_of(new) <= {"sqlite", "mysql"}
            client.ack(aside, succeeded=there)
            load.advance()
        finally:
            _make_room(server)
        wait_until(takes_jobs)

    load.check()
    check_in_time(load)
    assert load.errors == []


@pytest.fixture
def alone(
    redis_program: str,
    free_port: FreePort,
    tmp_path_factory: pytest.TempPathFactory,
    new_deployment: Callable[..., Deployment],
) -> Iterator[tuple[RedisServer, Client, Deployment]]:
    """A server of one shard, and a client of the service that has no other."""
    server = RedisServer(redis_program, tmp_path_factory.mktemp("r"), free_port())
    server.start()
    deployment = new_deployment({"redis": shard_settings("redis", server.port)})
    deployment.up()
    with deployment.client() as client:
        yield server, client, deployment
    server.stop()


def test_the_only_shard_rejects_enqueues_and_goes_on(
    alone: tuple[RedisServer, Client, Deployment], wait_until: WaitUntil
):
    server, client, deployment = alone
    client.create_queue("mail")
    descriptors = client.enqueue("mail", [b"x" * 1_000] * WAITING)
    claimed = claim(client, "mail", 10)
    _fill(server)

    with pytest.raises(Overloaded, match=r"shard redis: the store is full: .*raise maxmemory"):
        client.enqueue("mail", [b"new"])
    claimed += client.dequeue("mail", limit=WAITING, succeeded=claimed)
    claimed += claim(client, "mail", WAITING - len(claimed))
    client.ack("mail", succeeded=claimed[10:])

    assert len(claimed) == WAITING
    states = {job.state for job in client.lookup(descriptors).values()}
    assert states == {JobState.SUCCEEDED}

    def is_told() -> bool:
        status = deployment.status()
        text = "".join(status["problems"])
        is_all = "shard-redis takes no jobs" in text and "raise maxmemory" in text
        return is_all and len(status["problems"]) == 1 and not status["healthy"]

    wait_until(is_told)
    _make_room(server)
    wait_until(lambda: deployment.status()["healthy"])  # though nobody enqueues
    assert client.enqueue("mail", [b"new"])
