"""An owner that is frozen loses the shard after its lease, and can't write when it wakes up."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection as Talk
from typing import Any

import pytest

from pinlaterd.engines.mysql.connection import MysqlAddress, MysqlConnection
from pinlaterd.engines.mysql.engine import MysqlEngine
from pinlaterd.errors import ShardOwned, StorageError, StorageNotCommitted
from tests.clocks import FakeClock
from tests.conformance.engine.engines import BODY_BYTES, LEVELS
from tests.conformance.engine.harness import QUEUE, EngineHarness
from tests.conftest import WaitUntil
from tests.engines.mysql.conftest import NewEngine
from tests.servers.mariadb import HOST, PASSWD, USER, MariaDB

LEASE_SECONDS = 4.0
SPAWN = multiprocessing.get_context("spawn")


def _own(shard: str, port: int, talk: Talk) -> None:
    """An owner that writes when it is told to, tells what came of it, and beats meanwhile."""
    server = MysqlAddress(HOST, port, USER, PASSWD)
    store = EngineHarness(
        lambda: MysqlEngine(
            shard,
            server,
            levels=LEVELS,
            most_body_bytes=BODY_BYTES,
            lease_seconds=LEASE_SECONDS,
            answer_seconds=LEASE_SECONDS,
        ),
        FakeClock(),
    )
    store.engine.create_queue(QUEUE, store.now_ms)
    talk.send(store.enqueue(b"first"))
    try:
        while not talk.poll(0.1):
            store.engine.heartbeat()
        talk.send(store.enqueue(b"again"))
    except StorageError as error:
        talk.send(error)


@pytest.fixture
def owner(mariadb: MariaDB, shard: str):
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=_own, args=(shard, mariadb.port, theirs), daemon=True)
    process.start()
    assert ours.poll(60)
    ours.recv()
    yield process, ours
    process.kill()
    process.join()


def test_a_frozen_owner_loses_its_shard_and_cannot_write_afterwards(
    owner, new_engine: NewEngine, clock: FakeClock, wait_until: WaitUntil
):
    process, talk = owner
    engine = new_engine(lease_seconds=LEASE_SECONDS)
    with pytest.raises(ShardOwned, match=r"connection \d+ .*another process owns"):
        engine.open(clock.now_ms())
    os.kill(process.pid, signal.SIGSTOP)

    def takes_over() -> bool:
        try:
            engine.open(clock.now_ms())
        except ShardOwned:
            return False
        return True

    wait_until(takes_over)
    wait_until(lambda: None not in engine.depths().values())
    before = engine.depths()
    talk.send(True)
    os.kill(process.pid, signal.SIGCONT)
    assert talk.poll(60)
    outcome = talk.recv()

    assert isinstance(outcome, StorageNotCommitted), outcome
    assert engine.depths() == before
    keys = engine.read_pending(QUEUE, 1, after=None, until_ms=clock.now_ms(), limit=9)
    assert len(keys) == 1
    engine.close()


def test_heartbeats_keep_an_idle_owner_alive(
    new_engine: NewEngine, clock: FakeClock, wait_until: WaitUntil
):
    engine = new_engine(lease_seconds=LEASE_SECONDS)
    engine.open(clock.now_ms())
    began = time.monotonic()

    def beat() -> bool:
        engine.heartbeat()
        return time.monotonic() > began + 1.5 * LEASE_SECONDS

    wait_until(beat)

    engine.create_queue(QUEUE, clock.now_ms())
    assert engine.queues() == {QUEUE}
    engine.close()


def test_a_lock_that_its_holder_gives_back_just_then_is_taken(
    store: EngineHarness, new_engine: NewEngine, monkeypatch: pytest.MonkeyPatch
):
    """Between the vain attempt to get it and the question who holds it."""
    second = new_engine()
    asked: list[bytes] = []
    rows = MysqlConnection.rows

    def rows_of(connection: MysqlConnection, statement: bytes) -> Any:
        if b"IS_USED_LOCK" in statement:
            asked.append(statement)
            if len(asked) == 2:  # the first comes before the attempt
                monkeypatch.undo()
                store.engine.close()
        return rows(connection, statement)

    with pytest.raises(ShardOwned):
        second.open(store.now_ms)
    monkeypatch.setattr(MysqlConnection, "rows", rows_of)

    second.open(store.now_ms)
    assert len(asked) == 2
    second.close()
