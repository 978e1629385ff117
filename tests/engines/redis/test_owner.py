"""An owner that was killed is not waited for where its machine can tell that it has ended."""

from __future__ import annotations

import multiprocessing
import os
import re
import socket
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import pytest

from pinlaterd.engines.base import SINGLE, Term
from pinlaterd.engines.redis.connection import Server
from pinlaterd.engines.redis.scripts import HOLD
from pinlaterd.engines.redis.store import Store, has_ended, own_name
from pinlaterd.errors import ShardOwned, StorageError
from tests.clocks import FakeClock
from tests.conformance.engine.engines import EngineMaker
from tests.conformance.engine.harness import QUEUE
from tests.conftest import WaitUntil
from tests.servers.redis import RedisServer, redis_engine

SPAWN = multiprocessing.get_context("spawn")
# Far longer than a test may take.
LEASE_SECONDS = 3600.0


_engine = partial(redis_engine, lease_seconds=LEASE_SECONDS)


def _own(server: Server, shard: str, talk: Connection) -> None:
    engine = _engine(server, shard)
    engine.open(0)
    engine.create_queue(QUEUE, 0)
    talk.send(own_name())
    talk.recv()  # never: it is killed


class Owner:
    """Another process, which owns the shard."""

    def __init__(self, server: Server, shard: str) -> None:
        self.talk, theirs = SPAWN.Pipe()
        self.process: BaseProcess = SPAWN.Process(
            target=_own, args=(server, shard, theirs), daemon=True
        )
        self.process.start()
        assert self.talk.poll(60)
        self.name: str = self.talk.recv()


@pytest.fixture
def owner(redis_server: RedisServer, shard: str):
    owner = Owner(redis_server.address, shard)
    yield owner
    owner.process.kill()
    owner.process.join()


def test_who_runs_has_not_ended_and_who_was_killed_has(owner: Owner, wait_until: WaitUntil):
    assert not has_ended(own_name())
    assert not has_ended(owner.name)

    owner.process.kill()

    wait_until(lambda: has_ended(owner.name))  # before anybody has asked for its exit code, too
    owner.process.join()
    assert has_ended(owner.name)


def test_a_process_that_got_the_number_of_another_is_not_that_other():
    started = re.sub(r"/\d+/", "/1/", own_name())
    assert str(os.getpid()) in started
    assert has_ended(started)


def test_of_processes_elsewhere_nothing_is_known(owner: Owner):
    owner.process.kill()
    owner.process.join()

    elsewhere = re.sub(r"\([^/]*/", "(another-boot-1/", owner.name)
    in_another_container = re.sub(r"-\d+/", "-7/", owner.name, count=1)

    assert elsewhere != owner.name != in_another_container
    assert not has_ended(elsewhere)
    assert not has_ended(in_another_container)
    assert not has_ended("process 1 on a host of an older release (0123abcd)")
    assert not has_ended("a hand in the store")


def test_a_successor_of_a_killed_owner_does_not_wait_for_its_lease(
    owner: Owner, redis_server: RedisServer, shard: str, clock: FakeClock
):
    engine = _engine(redis_server.address, shard)
    with pytest.raises(ShardOwned, match=rf"is owned by process {owner.process.pid} on [^(]*, for"):
        engine.open(clock.now_ms())
    owner.process.kill()
    owner.process.join()

    engine.open(clock.now_ms())
    assert engine.queues() == {QUEUE}
    engine.heartbeat()
    engine.close()


def test_a_later_term_does_not_take_a_shard_from_a_failover(make: EngineMaker, clock: FakeClock):
    owner, successor = make(), make()
    owner.open(clock.now_ms(), Term("a", 1))
    assert isinstance(owner, Store)
    owner.connection.run(HOLD, (owner.shard.name, "0:0:a failover", 60_000))

    with pytest.raises(ShardOwned, match="owned by a failover"):
        successor.open(clock.now_ms(), Term("b", 2))

    with pytest.raises(StorageError, match="not ours any more"):
        owner.heartbeat()
    owner.close()


@pytest.mark.parametrize("term", [SINGLE, Term("a", 1)])
def test_an_owner_that_others_can_follow_notices_a_cut_before_its_time_limit(
    redis_server: RedisServer, shard: str, term: Term
):
    engine = _engine(redis_server.address, shard)
    engine.open(0, term)

    connected: Any = engine.connection._driver._sock
    limit = connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)

    assert limit == (3000 if term.epoch else 0)
    engine.close()
