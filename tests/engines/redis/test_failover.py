"""A replica takes its master's place: Redis servers, alone and watched by Sentinels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pinlaterd.config.schema import Address
from pinlaterd.engines.base import Batch, EnqueueOp, StorageEngine
from pinlaterd.engines.failover import Account, Failover, Handover, Notes, Pair
from pinlaterd.engines.redis.connection import Server
from pinlaterd.engines.redis.failover import RedisFailover, SentinelFailover
from pinlaterd.engines.redis.servers import Sentinels
from pinlaterd.errors import StorageError
from pinlaterd.model import Job
from tests.servers.redis import HOST, RedisServer, redis_engine
from tests.servers.redis_replicas import (
    SERVICE,
    RedisPair,
    Watched,
    redis_pair,
    replication,
    watched,
)

__all__ = ["redis_pair", "watched"]

SHARD, QUEUE = "f1", "mail"
NOW_MS = 1_700_000_000_000
NOBODY = Account()


class Forgotten(Notes):
    """Redis servers remember enough by themselves."""

    def get(self, key: str) -> str:
        return ""

    def put(self, key: str, text: str) -> None:
        raise AssertionError("nothing has to be noted")


def failover_of(pair: RedisPair, *, accept_loss: bool = False) -> RedisFailover:
    servers = Pair(Address(HOST, pair.master.port), Address(HOST, pair.replica.port))
    handover = Handover([SHARD], NOBODY, NOBODY, accept_loss, catch_up_seconds=60.0)
    return RedisFailover(servers, handover, Forgotten())


def carry_out(failover: Failover) -> list[str]:
    return [step.run() for step in (*failover.steps(), *failover.last_steps())]


def enqueue(engine: StorageEngine, count: int) -> list[int]:
    [local_ids] = engine.apply(Batch(enqueues=[EnqueueOp(QUEUE, [Job(b"x")] * count)]), NOW_MS)[3]
    return list(local_ids)


def pending(engine: StorageEngine) -> list[int]:
    found = engine.read_pending(QUEUE, 1, after=None, until_ms=NOW_MS, limit=10_000)
    return [key.local_id for key in found]


def opened(server: RedisServer) -> StorageEngine:
    """At once: nobody's lease is in the way."""
    engine = redis_engine(server.address, SHARD)
    engine.open(NOW_MS + 1000)
    return engine


def begin(engine: StorageEngine) -> list[int]:
    engine.open(NOW_MS)
    engine.create_queue(QUEUE, NOW_MS)
    return enqueue(engine, 100)


@pytest.fixture
def owner(redis_pair: RedisPair) -> Iterator[StorageEngine]:
    """On the master, with 100 jobs."""
    engine = redis_engine(redis_pair.master.address, SHARD)
    begin(engine)
    yield engine
    engine.close()


# --- two servers ------------------------------------------------------------------------------


def test_a_replica_takes_over_all_jobs_and_the_old_master_follows_it(redis_pair, owner):
    failover = failover_of(redis_pair)
    found = failover.examine()
    assert (found.obstacles, found.risks) == ([], [])
    old_ids = pending(owner)

    said = carry_out(failover)

    with pytest.raises(StorageError, match="is a replica"):
        enqueue(owner, 1)
    assert "replicates from" in said[-1]
    assert replication(redis_pair.master)["role"] == "slave"
    successor = opened(redis_pair.replica)
    assert pending(successor) == old_ids
    [new_id] = enqueue(successor, 1)
    assert new_id > max(old_ids)
    successor.close()


def test_a_hand_over_that_was_broken_off_is_repeated(redis_pair, owner):
    first = failover_of(redis_pair)
    first.steps()[0].run()
    first.close()

    said = carry_out(failover_of(redis_pair))

    assert "done before" in said[0]
    assert len(pending(opened(redis_pair.replica))) == 100


def test_a_master_that_can_t_hand_over_goes_on(redis_pair, owner, wait_until):
    with redis_pair.replica.client() as client:
        client.replicaof("NO", "ONE")
    wait_until(lambda: replication(redis_pair.master)["connected_slaves"] == 0)
    failover = failover_of(redis_pair)

    assert "is no replica" in failover.examine().obstacles[0]
    with pytest.raises(StorageError, match="does not list"):
        failover.steps()[0].run()

    assert len(enqueue(owner, 1)) == 1


def test_a_hand_over_that_is_interrupted_is_called_off(redis_pair, owner, monkeypatch):
    redis_pair.replica.freeze()
    enqueue(owner, 1)  # which the replica can't confirm
    failover = failover_of(redis_pair)
    hand_over = failover.steps()[0]

    def interrupt(_seconds: float) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("time.sleep", interrupt)
        with pytest.raises(KeyboardInterrupt):
            hand_over.run()
    waited = replication(redis_pair.master)["master_failover_state"]
    failover.undo()
    redis_pair.replica.thaw()

    found = replication(redis_pair.master)
    assert waited == "waiting-for-sync"
    assert (found["role"], found["master_failover_state"]) == ("master", "no-failover")
    assert len(enqueue(owner, 1)) == 1


def test_a_replica_of_another_server_is_refused(redis_pair, owner, new_server):
    stranger = new_server()
    with redis_pair.replica.client() as client:
        client.replicaof(HOST, stranger.port)

    assert "from another server" in failover_of(redis_pair).examine().obstacles[0]


def test_without_its_master_a_replica_proves_nothing(redis_pair, owner):
    redis_pair.master.kill()
    failover = failover_of(redis_pair)

    assert "does not answer" in failover.examine().risks[0]
    with pytest.raises(StorageError, match="can't prove"):
        failover.steps()[0].run()

    assert replication(redis_pair.replica)["role"] == "slave"


def test_loss_that_is_accepted_never_brings_ids_back(redis_pair, owner, wait_until):
    """The replica stands where the shard was closed in order; what came later is lost."""
    owner.close()
    redis_pair.wait_until_in_step(wait_until)
    with redis_pair.replica.client() as client:
        client.replicaof(HOST, 1)
    owner.open(NOW_MS)
    lost = enqueue(owner, 5)
    redis_pair.master.kill()

    said = carry_out(failover_of(redis_pair, accept_loss=True))

    assert "may have jobs" in said[-1]
    successor = opened(redis_pair.replica)
    assert set(pending(successor)).isdisjoint(lost)
    assert min(enqueue(successor, 5)) > max(lost)
    successor.close()


# --- Sentinels --------------------------------------------------------------------------------


def sentinels_of(watched: Watched) -> Sentinels:
    places = tuple(Server(HOST, sentinel.port) for sentinel in watched.sentinels)
    return Sentinels(SERVICE, places, Server("", 0))


def test_what_was_held_is_given_back(watched):
    engine = redis_engine(sentinels_of(watched), SHARD)
    begin(engine)
    handover = Handover([SHARD], NOBODY, NOBODY, accept_loss=False, catch_up_seconds=0.3)
    failover = SentinelFailover(sentinels_of(watched), handover)
    watched.pair.replica.freeze()
    try:
        with pytest.raises(StorageError, match="0 of 1 replicas"):
            failover.steps()[0].run()
        failover.undo()
    finally:
        watched.pair.replica.thaw()

    engine.close()
    engine.open(NOW_MS)
    assert len(pending(engine)) == 100
    engine.close()


def test_without_any_sentinel_nobody_knows_the_master():
    engine = redis_engine(Sentinels(SERVICE, (Server(HOST, 1),), Server("", 0)), SHARD)

    with pytest.raises(StorageError, match="no Sentinel knows the master"):
        engine.open(NOW_MS)
