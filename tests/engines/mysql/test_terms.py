"""Terms in MySQL alone: other accounts, processes of one server, waits for the lock."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest

from pinlaterd.engines.base import SINGLE, Term
from pinlaterd.errors import ShardOwned, StorageError, Superseded
from tests.clocks import FakeClock
from tests.conformance.engine.harness import QUEUE, EngineHarness
from tests.conftest import WaitUntil
from tests.engines.mysql.conftest import NewEngine
from tests.servers.mariadb import HOST, MariaDB

A1, B2, C3 = Term("a", 1), Term("b", 2), Term("c", 3)
WAITS_FOR_THE_LOCK = (
    "SELECT COUNT(*) FROM information_schema.processlist WHERE info LIKE %s AND state = 'User lock'"
)


@pytest.fixture
def store(new_engine: NewEngine, clock: FakeClock):
    harness = EngineHarness(new_engine, clock, A1)
    harness.engine.create_queue(QUEUE, clock.now_ms())
    yield harness
    harness.engine.close()


def test_a_single_machine_keeps_no_record_of_terms(
    new_engine: NewEngine, clock: FakeClock, stranger: Any, shard: str
):
    engine = new_engine()
    engine.open(clock.now_ms())

    stranger.execute(f"SHOW TABLES IN `plm_{shard}`")

    assert stranger.fetchall() == (("owner",),)
    engine.close()


@pytest.mark.parametrize("term", [SINGLE, A1])
def test_an_owner_that_others_can_follow_notices_a_cut_before_its_time_limit(
    new_engine: NewEngine, clock: FakeClock, term: Term
):
    engine = new_engine()
    engine.open(clock.now_ms(), term)

    limit = engine.db._db._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)

    assert limit == (3000 if term.epoch else 0)
    engine.close()


def test_an_account_that_may_not_end_the_owner_says_what_it_lacks(
    store: EngineHarness, new_engine: NewEngine, mariadb: MariaDB
):
    with mariadb.connect("root", "") as root, root.cursor() as cursor:
        cursor.execute(f"CREATE OR REPLACE USER other@'{HOST}' IDENTIFIED BY 'o'")
        for databases in ("plq", "plm"):
            cursor.execute(f"GRANT ALL ON `{databases}\\_%`.* TO other@'{HOST}'")
    other = new_engine(user="other", passwd="o")

    with pytest.raises(StorageError, match=r"one account for this shard, .*CONNECTION ADMIN"):
        other.open(store.now_ms, B2)

    assert store.enqueue(b"a")
    store.engine.close()
    other.open(store.now_ms, B2)
    other.close()


def test_two_processes_of_one_server_do_not_end_each_other_for_ever(
    store: EngineHarness, new_engine: NewEngine
):
    second = new_engine()
    second.open(store.now_ms, A1)  # its predecessor may have been cut off
    with pytest.raises(StorageError):
        store.engine.heartbeat()
    store.engine.close()

    with pytest.raises(ShardOwned) as caught:
        store.engine.open(store.now_ms, A1)

    assert not isinstance(caught.value, Superseded)
    second.heartbeat()
    second.close()


def test_an_owner_reopens_after_its_connection_was_lost(
    store: EngineHarness, stranger: Any, shard: str
):
    stranger.execute("SELECT IS_USED_LOCK(%s)", (f"pinlaterd:{shard}",))
    stranger.execute("KILL %s", stranger.fetchone())
    with pytest.raises(StorageError):
        store.engine.heartbeat()
    store.engine.close()

    store.engine.open(store.now_ms, A1)
    assert store.enqueue(b"a")


def test_who_waited_for_the_lock_and_gets_it_after_a_later_claim_lets_go(
    store: EngineHarness,
    new_engine: NewEngine,
    stranger: Any,
    shard: str,
    wait_until: WaitUntil,
):
    outcome: list[object] = []

    def wait() -> None:
        waiting = new_engine()
        try:
            outcome.append(waiting.open(store.now_ms, B2._replace(planned=True)))
        except StorageError as error:
            outcome.append(type(error))
        waiting.close()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()

    def waits() -> bool:
        stranger.execute(WAITS_FOR_THE_LOCK, (f"SELECT GET_LOCK('pinlaterd:{shard}'%",))
        return bool(stranger.fetchone()[0])

    wait_until(waits)
    later = new_engine()
    later.open(store.now_ms, C3)
    thread.join(60)

    assert outcome == [Superseded]
    later.create_queue("more", store.now_ms)
    later.close()
