"""What the owner's loop does costs what it moves, not what the queue holds."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from pinlaterd.engines.base import Batch
from pinlaterd.engines.mysql.engine import MysqlEngine
from pinlaterd.errors import StorageLocked
from pinlaterd.model import Job, JobKey
from tests.conformance.engine.harness import (
    QUEUE,
    Ack,
    EngineHarness,
    claim_op,
    counted,
)
from tests.engines.bounded_calls import BOUNDED_CALLS, LIMIT, Call
from tests.servers.mariadb import MariaDB

DEEP = 1_500
# Rows and index entries that the server looks at; a walk over a deep queue looks at DEEP of them.
LOOKS = 300


@pytest.fixture
def deep(store: EngineHarness) -> EngineHarness:
    """DEEP jobs in each state."""
    for end in (store.succeed, store.fail, None):
        store.enqueue(*[Job(b"x", attempts_allowed=1)] * DEEP)
        keys = [claimed.key for claimed in store.claim(limit=DEEP)]
        if end is not None:
            end(*keys)
    store.enqueue(*[b"x"] * DEEP)
    return store


def _looks(engine: MysqlEngine) -> int:
    db = engine.db
    return sum(int(count) for _, count in db.rows(b"SHOW SESSION STATUS LIKE 'Handler_read_%'"))


def test_no_call_walks_over_a_deep_queue(deep: EngineHarness):
    engine = deep.engine
    assert isinstance(engine, MysqlEngine)
    running = engine.db.rows(
        b"SELECT local_id FROM " + engine.tables.of(QUEUE)[1].name + b" WHERE state = 1"
    )
    keys = [JobKey(1, local_id) for (local_id,) in running]
    claims = deep.wanted(limit=LIMIT)
    calls: dict[str, Call] = {
        **BOUNDED_CALLS,
        "claims": lambda engine, keys: engine.apply(Batch(claims=[claim_op(QUEUE, claims)]), 1),
    }

    looks = {}
    for number, (name, call) in enumerate(calls.items()):
        before = _looks(engine)
        own = _looks(engine) - before
        before = _looks(engine)
        call(engine, keys[number * LIMIT : (number + 1) * LIMIT])
        looks[name] = _looks(engine) - before - own

    assert {name: count for name, count in looks.items() if count > LOOKS} == {}
    assert looks["claims"] >= LIMIT


@pytest.mark.parametrize("killed", [False, True])
def test_opening_walks_over_no_queue_and_counts_beside(deep: EngineHarness, killed: bool):
    engine = deep.engine
    assert isinstance(engine, MysqlEngine)
    depths = deep.depths()
    if killed:
        engine._abandon()
    else:
        engine.close()

    engine.open(deep.now_ms)

    assert _looks(engine) <= DEEP
    assert deep.depths() == depths
    assert _looks(engine) <= DEEP


def test_to_create_a_queue_takes_as_many_statements_however_many_there_are(store: EngineHarness):
    engine = store.engine
    assert isinstance(engine, MysqlEngine)

    def statements(queue: str) -> int:
        before = _asked(engine)
        engine.create_queue(queue, store.now_ms)
        return _asked(engine) - before

    first = statements("another")

    assert [statements(f"another_{number}") for number in range(5)] == [first] * 5


OTHERS = [f"another_{number}" for number in range(5)]


@pytest.fixture
def many(store: EngineHarness) -> EngineHarness:
    """Several queues."""
    for queue in OTHERS:
        store.engine.create_queue(queue, store.now_ms)
    return store


def test_to_open_a_shard_takes_as_many_statements_however_many_queues_it_has(many: EngineHarness):
    engine = many.engine
    assert isinstance(engine, MysqlEngine)

    def statements() -> int:
        engine.close()
        engine.open(many.now_ms)
        return _asked(engine)

    of_many = statements()
    for queue in OTHERS:
        engine.delete_queue(queue)

    assert statements() == of_many
    assert engine.queues() == {QUEUE}


def test_an_opened_shard_goes_on_above_the_ids_of_every_queue(
    many: EngineHarness, stranger: Any, shard: str
):
    last = 2**60
    for queue in (QUEUE, *OTHERS):
        many.engine.close()
        last += 10**9
        stranger.execute(f"ALTER TABLE `plq_{shard}_{queue}`.jobs_p2 AUTO_INCREMENT = {last}")

        many.engine.open(many.now_ms)

        [key] = many.enqueue(b"job")
        assert last <= key.local_id < last + 10**9


def test_a_lock_that_is_met_while_opening_names_its_queue(
    many: EngineHarness, mariadb: MariaDB, shard: str
):
    many.engine.close()
    with mariadb.connect() as operator, operator.cursor() as cursor:
        cursor.execute(f"LOCK TABLES `plq_{shard}_{OTHERS[2]}`.jobs_p1 WRITE")
        with pytest.raises(StorageLocked) as raised:
            many.engine.open(many.now_ms)

    assert raised.value.queue == OTHERS[2]
    many.engine.open(many.now_ms)


def _asked(engine: MysqlEngine) -> int:
    [(_, count)] = engine.db.rows(b"SHOW SESSION STATUS LIKE 'Questions'")
    return int(count)


@pytest.mark.parametrize("has_room", [True, False])
def test_a_claim_changes_its_row_in_its_place(
    store: EngineHarness, stranger: Any, table: str, has_room: bool
):
    """In new tables; in older ones, and of a source with a long name, it is kept whole as well."""
    if not has_room:
        stranger.execute(f"ALTER TABLE {table} ALTER claim_descriptor SET DEFAULT NULL")
        store.reopen()
    [short] = store.in_progress(b"x")
    [long] = store.in_progress(b"x", source="w" * 60)
    pending = store.enqueue(b"x")
    stranger.execute(f"SELECT CHAR_LENGTH(claim_descriptor) FROM {table} ORDER BY local_id")
    lengths = [length for (length,) in stranger.fetchall()]

    assert lengths[1] == len(long.claim_descriptor)
    assert (lengths[0], lengths[2]) == (
        (64, 64) if has_room else (len(short.claim_descriptor), None)
    )
    assert store.job(pending[0]).claim_descriptor is None
    for claimed in (short, long):
        assert store.job(claimed.key).claim_descriptor == claimed.claim_descriptor
        assert store.succeed(Ack(claimed.key, claim_descriptor=claimed.claim_descriptor)).noop == 0


def test_a_queue_is_deleted_while_it_is_counted(deep: EngineHarness):
    engine = deep.engine
    engine.recount(QUEUE)
    engine.depths()

    engine.delete_queue(QUEUE)

    assert counted(engine) == {}


def test_a_network_that_falls_silent_during_a_long_statement_is_noticed(store: EngineHarness):
    """By the system's probes: patience with a statement may be had for minutes."""
    connected = store.engine.db._db._sock  # type: ignore[attr-defined]

    def option(level: int, name: int) -> int:
        value: int = connected.getsockopt(level, name)
        return value

    probes = option(socket.IPPROTO_TCP, socket.TCP_KEEPCNT)
    silence_seconds = option(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
    silence_seconds += probes * option(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL)
    assert option(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert silence_seconds <= 30
