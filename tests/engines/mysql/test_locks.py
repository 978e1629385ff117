"""An operator holds a lock on the tables of one queue: only calls of that queue wait, or fail.

The service is a real one with a single shard, so that no other shard can serve in its place.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pinlaterd.client import CheckpointInfo, ClaimedJob, Client, JobState
from pinlaterd.clock import FakeClock
from pinlaterd.errors import PinLaterError, StorageLocked
from pinlaterd.model import AckInfo, AckRequest, DequeueRequest
from pinlaterd.shard.locks import PATIENCE_SECONDS
from pinlaterd.wire.envelope import Status
from tests.conformance.engine.engines import shard_for
from tests.conformance.engine.harness import QUEUE, EngineHarness
from tests.conftest import WaitUntil
from tests.deployment import Deployment
from tests.engines.mysql.conftest import NewEngine
from tests.faults.stores.store import shard_settings, write_shards
from tests.servers.mariadb import MariaDB
from tests.shard.conftest import MakeShard, Shard

pytestmark = pytest.mark.service

LOCKED, OTHER = "locked", "other"
CALLERS = 6  # of the locked queue, all at the same time
REQUEST_SECONDS = 4.0
SLACK_SECONDS = 2.0
USUAL_CALLS, CALLS = 50, 100
RETRY_SECONDS = 0.1
PAUSE_SECONDS = 0.02  # of a caller that was refused: what is measured is not the load


@pytest.fixture(scope="module")
def service(mariadb: MariaDB, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder: Path = tmp_path_factory.mktemp("service")
    deployment = Deployment(folder)
    deployment.init(
        shards=1,
        settings={
            "request_timeout_ms": round(REQUEST_SECONDS * 1000),
            "monitor_interval_seconds": 0.5,
        },
    )
    write_shards(deployment, {shard_for(folder): shard_settings("mysql", mariadb.port)})
    try:
        deployment.up()
        yield deployment
    finally:
        deployment.destroy()


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


class _Others:
    """A client of the queue that nobody locks."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def p99_seconds(self, calls: int) -> float:
        """Of `calls` enqueues, dequeues and acks each; none may fail."""
        times = []
        for _ in range(calls):
            for step in (self._enqueue, self._dequeue, self._ack):
                began = time.monotonic()
                step()
                times.append(time.monotonic() - began)
        return sorted(times)[len(times) * 99 // 100]

    def _enqueue(self) -> None:
        self._client.enqueue(OTHER, [b"job"])

    def _dequeue(self) -> None:
        self._jobs = self._client.dequeue(OTHER, limit=1)
        assert len(self._jobs) == 1

    def _ack(self) -> None:
        self._client.ack(OTHER, succeeded=self._jobs)


def _call_until(stop: threading.Event, service: Deployment, claimed: ClaimedJob) -> list[float]:
    """Use the locked queue in all ways; each call fails in time, and says why."""
    times = []
    with service.client(timeout_seconds=60) as client:
        calls: list[Callable[[], object]] = [
            lambda: client.enqueue(LOCKED, [b"more"]),
            lambda: client.dequeue(LOCKED, limit=1, max_wait_ms=200),
            lambda: client.ack(LOCKED, succeeded=[claimed]),
            lambda: client.checkpoint(LOCKED, [CheckpointInfo(claimed.descriptor)]),
        ]
        while not stop.is_set():
            for call in calls:
                began = time.monotonic()
                with pytest.raises(PinLaterError, match="has locked these tables"):
                    call()
                times.append(time.monotonic() - began)
            stop.wait(PAUSE_SECONDS)
    return times


@pytest.mark.parametrize("lock", [row_lock, table_lock, pending_alter])
def test_a_lock_on_one_queue_leaves_the_others_alone(
    service: Deployment, mariadb: MariaDB, lock: Any, wait_until: WaitUntil
):
    table = f"`plq_{shard_for(service.folder)}_{LOCKED}`.jobs_p1"
    with service.client() as client:
        client.create_queue(LOCKED)
        client.create_queue(OTHER)
        client.enqueue(LOCKED, [b"first"] + CALLERS * [b"one for each caller"])
        [claimed] = client.dequeue(LOCKED, limit=1)
        others = _Others(client)
        usual = others.p99_seconds(USUAL_CALLS)
        stop = threading.Event()
        with ThreadPoolExecutor(CALLERS) as callers, lock(mariadb, table):
            calling = [callers.submit(_call_until, stop, service, claimed) for _ in range(CALLERS)]
            try:
                # A lock slows all rounds, what a busy machine does slows one.
                p99 = min(others.p99_seconds(CALLS) for _ in range(3))
            finally:
                stop.set()
            longest = max(max(times.result()) for times in calling)

        assert p99 < 2 * usual + 0.1
        assert longest < REQUEST_SECONDS + SLACK_SECONDS
        wait_until(partial(_works, client))


def _works(client: Client) -> bool:
    """The queue serves again, with nobody's help."""
    try:
        client.enqueue(LOCKED, [b"after"])
        client.ack(LOCKED, succeeded=client.dequeue(LOCKED, limit=10))
    except PinLaterError:
        return False
    return client.count(LOCKED, JobState.PENDING) == 0


# --- within one shard ----------------------------------------------------------------------------


@pytest.fixture
def in_process(make_shard: MakeShard, new_engine: NewEngine) -> Shard:
    made = make_shard(engine=new_engine())
    made.create(QUEUE)
    return made


@pytest.mark.parametrize("lock", [row_lock, table_lock])
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
    in_process.enqueue(b"job", queue=QUEUE)
    with table_lock(mariadb, table):
        entry = in_process.entry(DequeueRequest(QUEUE, 1))
        in_process.submit(entry)
        assert in_process.turn() == []
        assert in_process.counts(QUEUE) == (0, 0, 0)
        clock.advance(PATIENCE_SECONDS)
        assert [reply.status for reply in in_process.turn()] == [Status.REFUSED]
        in_process.service.take_counts()

    clock.advance(RETRY_SECONDS)
    in_process.turn()

    assert [tuple(counts) for counts in in_process.service.take_counts()] == [(QUEUE, (1, 0, 0))]
    assert in_process.service.serving
    assert [job.body for job in in_process.dequeue(queue=QUEUE)] == [b"job"]


def test_a_lock_names_the_queue(store: EngineHarness, mariadb: MariaDB, table: str):
    [claimed] = store.in_progress(b"job")
    key = claimed.key
    with row_lock(mariadb, table), pytest.raises(StorageLocked) as raised:
        store.succeed(key)

    assert raised.value.queue == QUEUE
    assert store.states([key]) == [JobState.IN_PROGRESS]
    assert store.succeed(key).succeeded == 1


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
    assert not store.engine.trouble
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
