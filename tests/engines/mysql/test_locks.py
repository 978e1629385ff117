"""An operator holds a lock on the tables of one queue: only calls of that queue wait, or fail.

What a shard does about it is told by tests/shard/test_locks.py.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from pinlaterd.engines.base import Batch, Checkpoint
from pinlaterd.errors import StorageLocked
from pinlaterd.model import AckInfo, AckRequest, DequeueRequest, EnqueueRequest, Job, JobState
from pinlaterd.shard.health import PATIENCE_SECONDS
from pinlaterd.wire.envelope import Status
from tests.clocks import FakeClock
from tests.conformance.engine.harness import QUEUE, EngineHarness, claim_op
from tests.engines.mysql.conftest import NewEngine
from tests.servers.mariadb import MariaDB
from tests.shard.conftest import MakeShard, Shard

RETRY_SECONDS = 0.1
AT_ONCE_SECONDS = 0.9  # a server that waited for the lock would take a second at least
TRIES = 10  # on a busy machine


@contextmanager
def row_lock(mariadb: MariaDB, table: str) -> Iterator[None]:
    with mariadb.connect() as operator, operator.cursor() as cursor:
        cursor.execute("BEGIN")
        cursor.execute(f"SELECT * FROM {table} FOR UPDATE")
        yield
        cursor.execute("ROLLBACK")  # a server may notice later that a connection has ended


@contextmanager
def table_lock(mariadb: MariaDB, table: str) -> Iterator[None]:
    with mariadb.connect() as operator, operator.cursor() as cursor:
        cursor.execute(f"LOCK TABLES {table} WRITE")
        yield
        cursor.execute("UNLOCK TABLES")


@contextmanager
def pending_alter(mariadb: MariaDB, table: str) -> Iterator[None]:
    """It waits for a transaction that has read the table, and everything else waits for it."""
    with mariadb.connect() as reader, mariadb.connect() as operator, ExitStack() as ends:
        reader.cursor().execute("BEGIN")
        reader.cursor().execute(f"SELECT * FROM {table}")
        statement = f"ALTER TABLE {table} COMMENT = 'altered'"
        altering = threading.Thread(target=operator.cursor().execute, args=(statement,))
        altering.start()
        ends.callback(altering.join)
        ends.callback(reader.cursor().execute, "COMMIT")
        while not _waits_for_metadata_lock(mariadb):
            time.sleep(0.01)
        yield


def _waits_for_metadata_lock(mariadb: MariaDB) -> bool:
    with mariadb.connect() as observer, observer.cursor() as cursor:
        cursor.execute(
            "SELECT COUNT(*) FROM information_schema.processlist"
            " WHERE state LIKE 'Waiting for table metadata lock%'"
        )
        [[waiting]] = cursor.fetchall()
    return bool(waiting)


def _is_refused_at_once(call: Callable[[], object]) -> bool:
    began = time.monotonic()
    with pytest.raises(StorageLocked, match="end that transaction or ALTER") as raised:
        call()
    assert raised.value.queue == QUEUE
    return time.monotonic() - began < AT_ONCE_SECONDS


LOCKS = pytest.mark.parametrize("lock", [row_lock, table_lock, pending_alter])


@LOCKS
def test_a_lock_on_one_queue_is_told_at_once_and_leaves_the_others_alone(
    store: EngineHarness, mariadb: MariaDB, table: str, lock: Any
):
    [claimed] = store.in_progress(b"job")
    store.enqueue(b"ready")
    claims = claim_op(QUEUE, store.wanted())
    store.engine.create_queue("other", store.now_ms)
    calls: list[Callable[[], object]] = [
        lambda: store.succeed(claimed.key),
        lambda: store.checkpoint(Checkpoint(claimed.key, None)),
        lambda: store.engine.apply(Batch(claims=[claims]), store.now_ms),
    ]
    if lock is not row_lock:
        calls.append(lambda: store.enqueue(b"more"))
    with lock(mariadb, table):
        for call in calls:
            assert any(_is_refused_at_once(call) for _ in range(TRIES))
            assert len(store.enqueue(b"other", queue="other")) == 1
        assert not store.engine.failure

    assert store.states([claimed.key]) == [JobState.IN_PROGRESS]
    assert store.succeed(claimed.key).succeeded == 1


@pytest.fixture
def in_process(make_shard: MakeShard, new_engine: NewEngine) -> Shard:
    made = make_shard(engine=new_engine())
    made.create(QUEUE)
    return made


@LOCKS
def test_a_short_lock_delays_calls_and_fails_none(
    in_process: Shard, mariadb: MariaDB, clock: FakeClock, table: str, lock: Any
):
    [first] = in_process.enqueue(b"first", queue=QUEUE)
    in_process.dequeue(queue=QUEUE)
    ack = in_process.entry(AckRequest(QUEUE, [AckInfo(first)]))
    with lock(mariadb, table):
        in_process.submit(ack)
        assert in_process.turn() == []
        clock.advance(RETRY_SECONDS)
        assert in_process.turn() == []

    clock.advance(RETRY_SECONDS)

    assert [reply.status for reply in in_process.turn()] == [Status.DONE]
    assert in_process.state(first) is JobState.SUCCEEDED


def test_a_locked_queue_counts_as_empty_and_is_tried_again(
    in_process: Shard, mariadb: MariaDB, clock: FakeClock, table: str
):
    """Nobody is sent to a shard in vain; and all are told when it may have jobs again."""
    in_process.create("other")
    in_process.enqueue(b"job", queue=QUEUE)
    with table_lock(mariadb, table):
        entries = [
            in_process.entry(DequeueRequest(QUEUE, 1)),
            in_process.entry(EnqueueRequest("other", [Job(b"other")])),
        ]
        in_process.submit(*entries)
        assert [reply.status for reply in in_process.turn()] == [Status.DONE]
        assert in_process.counts(QUEUE) == (0, 0, 0)
        clock.advance(PATIENCE_SECONDS)
        assert [reply.status for reply in in_process.turn()] == [Status.REFUSED]
        in_process.service.take_counts()

    clock.advance(RETRY_SECONDS)
    in_process.turn()

    assert [tuple(counts) for counts in in_process.service.take_counts()] == [(QUEUE, (1, 0, 0))]
    assert in_process.service.serving
    assert [job.body for job in in_process.dequeue(queue=QUEUE)] == [b"job"]


def test_a_backup_that_blocks_commits_locks_the_whole_store(
    store: EngineHarness, mariadb: MariaDB, clock: FakeClock
):
    """The COMMIT is refused, and nothing of it is kept."""
    with mariadb.connect("root", "") as backup, backup.cursor() as cursor:
        for stage in ("START", "FLUSH", "BLOCK_DDL", "BLOCK_COMMIT"):
            cursor.execute(f"BACKUP STAGE {stage}")
        with pytest.raises(StorageLocked) as raised:
            store.enqueue(b"refused")
        cursor.execute("BACKUP STAGE END")
    stored = store.enqueue(b"stored")

    assert raised.value.queue == ""
    assert not store.engine.failure
    assert store.ready() == stored


def test_a_queue_is_deleted_while_the_server_writes_statistics_of_its_tables(
    store: EngineHarness, mariadb: MariaDB, shard: str
):
    """It does so in the background, after many changes, and holds locks of its own meanwhile."""
    store.enqueue(b"job")
    statistics = f"mysql.innodb_table_stats WHERE database_name = 'plq_{shard}_{QUEUE}'"
    with mariadb.connect("root", "") as server, server.cursor() as cursor:
        cursor.execute("BEGIN")
        assert cursor.execute(f"SELECT * FROM {statistics} FOR UPDATE")
        written = threading.Timer(0.3, cursor.execute, ("COMMIT",))
        written.start()

        store.engine.delete_queue(QUEUE)

        written.join()
    assert store.engine.queues() == frozenset()
