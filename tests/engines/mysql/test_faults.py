"""Faults of the server, of the network and of strangers: what becomes of them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pymysql.err import OperationalError

from pinlaterd.engines.base import Batch, Checkpoint, EnqueueOp, StorageEngine
from pinlaterd.engines.mysql.connection import leaves_doubt, storage_error
from pinlaterd.errors import (
    EnqueueRejected,
    InvalidRequest,
    ShardOwned,
    StorageError,
    StorageFull,
    StorageNotCommitted,
)
from pinlaterd.model import CheckpointInfo, CheckpointRequest, Job, JobKey, JobState
from tests.clocks import FakeClock
from tests.conformance.engine.engines import LEASE_SECONDS
from tests.conformance.engine.harness import QUEUE, Ack, EngineHarness, counted
from tests.conftest import ProgramPath, WaitUntil
from tests.engines.mysql.conftest import NewEngine
from tests.servers.mariadb import HOST, MariaDB, start_mariadb
from tests.servers.proxy import Cut, Proxy
from tests.shard.conftest import MakeShard

Call = Callable[[StorageEngine], object]

ONE_JOB = Batch(enqueues=[EnqueueOp(QUEUE, [Job(b"x")])])
STORAGE_CALLS: dict[str, Call] = {
    "apply": lambda engine: engine.apply(ONE_JOB, 1),
    "create_queue": lambda engine: engine.create_queue("new", 1),
    "delete_queue": lambda engine: engine.delete_queue(QUEUE),
    "read_pending": lambda engine: engine.read_pending(QUEUE, 1, after=None, until_ms=1, limit=1),
    "payloads": lambda engine: engine.payloads(QUEUE, 1, [1], most_bytes=1),
    "lookup": lambda engine: engine.lookup(QUEUE, [JobKey(1, 1)], include_body=True),
    "oldest_failed": lambda engine: engine.oldest_failed(QUEUE, 1, limit=1),
    "retry_failed": lambda engine: engine.retry_failed(
        QUEUE, 1, attempts=1, run_after_ms=1, limit=1, now_ms=1
    ),
    "delete_jobs": lambda engine: engine.delete_jobs(QUEUE, JobState.PENDING, 1, limit=1),
    "delete_found": lambda engine: engine.delete_found(QUEUE, JobState.PENDING, [JobKey(1, 1)]),
    "release_expired": lambda engine: engine.release_expired(
        QUEUE, claimed_before_ms=1, limit=1, now_ms=1
    ),
    "collect_garbage": lambda engine: engine.collect_garbage(
        QUEUE, JobState.FAILED, updated_before_ms=1, limit=1
    ),
    "durability": lambda engine: engine.durability(),
    "raise_fence": lambda engine: engine.raise_fence(1),
}


# --- the connection is lost ---------------------------------------------------------------------


@pytest.mark.parametrize("call", STORAGE_CALLS.values(), ids=STORAGE_CALLS)
def test_after_a_lost_connection_nothing_goes_on_until_it_is_opened_anew(
    behind_proxy: EngineHarness, proxy: Proxy, call: Call
):
    behind_proxy.failed(Job(b"failed", attempts_allowed=1))
    [claimed] = behind_proxy.in_progress(b"running")
    proxy.cut_at(b"", Cut.BEFORE)

    with pytest.raises(StorageError):
        call(behind_proxy.engine)
    assert behind_proxy.engine.failure
    for _ in range(2):
        with pytest.raises(StorageError, match="must be reopened"):
            behind_proxy.engine.apply(ONE_JOB, 1)

    behind_proxy.reopen()
    assert behind_proxy.states([claimed.key]) in ([JobState.IN_PROGRESS], [])


def test_what_is_cut_before_its_commit_has_changed_nothing(
    behind_proxy: EngineHarness, proxy: Proxy
):
    """Who enqueued in the same batch can be served elsewhere, and the ack repeated."""
    [claimed] = behind_proxy.in_progress(b"a")
    ack = Ack(claimed.key, claim_descriptor=claimed.claim_descriptor)
    proxy.cut_at(b"SELECT", Cut.BEFORE)

    with pytest.raises(StorageNotCommitted, match=r"(?i)lost"):
        behind_proxy.fail(ack)
    with pytest.raises(StorageNotCommitted, match="must be reopened"):
        behind_proxy.engine.apply(ONE_JOB, 1)

    behind_proxy.reopen()
    assert behind_proxy.succeed(ack).succeeded == 1


def test_a_network_that_swallows_everything_costs_the_lease_at_most(
    proxy: Proxy, new_engine: NewEngine, clock: FakeClock
):
    engine = new_engine(port=proxy.port, lease_seconds=3)
    engine.open(clock.now_ms())
    engine.create_queue(QUEUE, clock.now_ms())
    proxy.hold()
    began = time.monotonic()

    # Our patience and the server's end at about the same time: either ends it.
    with pytest.raises(StorageError, match="not known"):
        engine.apply(ONE_JOB, clock.now_ms())

    assert engine.failure
    assert time.monotonic() - began < 40  # nobody waits for the system's own time-outs
    engine.close()
    proxy.go_on()


def test_a_server_that_falls_silent_while_jobs_are_counted_is_given_up_soon(
    proxy: Proxy, new_engine: NewEngine, clock: FakeClock
):
    """However long it might take to count the jobs of a larger table."""
    engine = new_engine(port=proxy.port, answer_seconds=3)
    engine.open(clock.now_ms())
    engine.create_queue(QUEUE, clock.now_ms())
    engine.apply(ONE_JOB, clock.now_ms())
    engine.close()
    proxy.cut_at(b"COUNT(*)", Cut.SILENCE)
    began = time.monotonic()
    engine.open(clock.now_ms())
    engine.depths()

    def works_on() -> None:
        while True:
            engine.apply(ONE_JOB, clock.now_ms())

    with pytest.raises(StorageError, match="timed out"):
        works_on()
    engine.close()

    assert time.monotonic() - began < 40
    engine.open(clock.now_ms())
    [jobs] = counted(engine)[QUEUE].values()
    assert jobs > 0
    engine.close()


def test_a_connection_that_was_given_up_is_not_waited_for(
    proxy: Proxy, new_engine: NewEngine, clock: FakeClock
):
    """The server has heard nothing of it, and would keep the lock to the end of the lease."""
    engine = new_engine(port=proxy.port, lease_seconds=3600, answer_seconds=3)
    engine.open(clock.now_ms())
    engine.create_queue(QUEUE, clock.now_ms())
    proxy.hold_what_is_open()
    with pytest.raises(StorageError, match="timed out"):
        engine.apply(ONE_JOB, clock.now_ms())
    engine.close()

    engine.open(clock.now_ms())

    engine.apply(ONE_JOB, clock.now_ms())
    with pytest.raises(ShardOwned):  # of others only the lease makes an end
        new_engine().open(clock.now_ms())
    engine.close()


def test_an_enqueue_on_a_connection_that_the_server_has_ended_is_not_kept(
    store: EngineHarness, stranger: Any, wait_until: WaitUntil
):
    """It goes with its commit: who enqueues can be served elsewhere, for nothing was sent."""
    [[number]] = store.engine.db.rows(b"SELECT CONNECTION_ID()")  # type: ignore[attr-defined]
    stranger.execute(f"KILL CONNECTION {number}")
    db = store.engine.db  # type: ignore[attr-defined]
    wait_until(lambda: bool(db._unasked.poll(0)))

    with pytest.raises(StorageNotCommitted, match=r"(?i)lost"):
        store.enqueue(b"a")

    store.reopen()
    assert store.ready() == []


def test_a_heartbeat_finds_out(proxy: Proxy, new_engine: NewEngine, clock: FakeClock):
    engine = new_engine(port=proxy.port, beats=clock)
    engine.open(clock.now_ms())
    proxy.cut_at(b"", Cut.BEFORE)
    clock.advance(LEASE_SECONDS / 10)
    engine.heartbeat()
    assert proxy.cuts == 0  # it has been heard of lately
    clock.advance(LEASE_SECONDS * 3 / 10)

    with pytest.raises(StorageError):
        engine.heartbeat()
    engine.close()


# --- the server dies ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def spare_server(
    program_path: ProgramPath,
    tmp_path_factory: pytest.TempPathFactory,
    free_port: Callable[[], int],
) -> Iterator[MariaDB]:
    server = start_mariadb(program_path, tmp_path_factory.mktemp("m") / "db", free_port())
    yield server
    server.stop()


@pytest.fixture
def own_server(spare_server: MariaDB) -> Iterator[MariaDB]:
    """For a test that kills it, or starts it with options of its own."""
    if not spare_server.runs:
        spare_server.start()
    yield spare_server
    spare_server.stop()


@pytest.mark.parametrize("found", ["nothing", "an older copy"])
def test_no_id_is_given_twice_where_the_same_process_finds_less_than_it_left(
    behind_proxy: EngineHarness, proxy: Proxy, stranger: Any, shard: str, found: str
):
    """A replica that took the server's place, or a copy that was put back."""
    engine = behind_proxy.engine
    before = behind_proxy.enqueue(b"a", b"b", b"c")
    proxy.cut_at(b"", Cut.BEFORE)
    with pytest.raises(StorageError):
        behind_proxy.enqueue(b"d")
    engine.close()
    stranger.execute(f"DROP DATABASE `plq_{shard}_{QUEUE}`")
    if found == "nothing":
        stranger.execute(f"DROP DATABASE `plm_{shard}`")
    else:
        stranger.execute(f"REPLACE INTO `plm_{shard}`.owner VALUES ('next_local_id', 1)")

    engine.open(behind_proxy.now_ms)
    engine.create_queue(QUEUE, behind_proxy.now_ms)
    [after] = behind_proxy.enqueue(b"e")

    assert after.local_id > max(key.local_id for key in before)


def test_no_id_is_given_twice_where_a_copy_was_put_back(
    store: EngineHarness, clock: FakeClock, stranger: Any, shard: str, table: str
):
    store.enqueue(b"a")
    store.engine.close()
    stranger.execute(f"SELECT name, value FROM `plm_{shard}`.owner")
    owner = stranger.fetchall()
    clock.advance(1)
    store.reopen()
    lost = store.enqueue(b"b", b"c")
    store.engine.close()
    stranger.execute(f"DELETE FROM {table} WHERE body IN ('b', 'c')")
    stranger.execute(f"ALTER TABLE {table} AUTO_INCREMENT = 1")
    stranger.executemany(f"REPLACE INTO `plm_{shard}`.owner VALUES (%s, %s)", owner)

    clock.advance(1)
    store.reopen()

    assert min(store.enqueue(b"d", b"e")) > max(lost)


def test_a_weaker_durability_is_told(
    own_server: MariaDB, new_engine: NewEngine, clock: FakeClock, table: str
):
    store = EngineHarness(lambda: new_engine(port=own_server.port), clock)
    store.engine.create_queue(QUEUE, clock.now_ms())
    assert store.engine.durability() == ("innodb_flush_log_at_trx_commit=1", "")

    with own_server.connect() as stranger, stranger.cursor() as cursor:
        cursor.execute("SET GLOBAL innodb_flush_log_at_trx_commit = 2")
        cursor.execute(f"ALTER TABLE {table.replace('_p1', '_p2')} ENGINE = Aria")
    store.reopen()

    durability = store.engine.durability()
    assert durability.setting == "innodb_flush_log_at_trx_commit=2"
    assert "set it to 1" in durability.warning
    assert "jobs_p2" in durability.warning
    assert "ENGINE = InnoDB" in durability.warning
    store.engine.close()


def test_a_binary_log_of_statements_is_served_and_its_flush_is_looked_at(
    own_server: MariaDB, new_engine: NewEngine, clock: FakeClock
):
    own_server.stop()
    own_server.start("--log-bin", "--binlog-format=STATEMENT", "--sync-binlog=0")
    store = EngineHarness(lambda: new_engine(port=own_server.port), clock)
    store.engine.create_queue(QUEUE, clock.now_ms())

    [claimed] = store.in_progress(b"a")
    assert store.succeed(claimed.key).succeeded == 1
    durability = store.engine.durability()
    assert durability.setting == "innodb_flush_log_at_trx_commit=1, sync_binlog=0"
    assert "sync_binlog is 0; set it to 1" in durability.warning
    store.engine.close()


@pytest.fixture
def plain_user(mariadb: MariaDB) -> dict[str, str]:
    """One that `read_only` holds for: it may write to the shards' databases, and no more."""
    with mariadb.connect("root", "") as root, root.cursor() as cursor:
        cursor.execute(f"CREATE OR REPLACE USER plain@'{HOST}' IDENTIFIED BY 'p'")
        cursor.execute(f"GRANT ALL ON `plq\\_%`.* TO plain@'{HOST}'")
        cursor.execute(f"GRANT ALL ON `plm\\_%`.* TO plain@'{HOST}'")
    return {"user": "plain", "passwd": "p"}


@pytest.mark.parametrize("passwd", ["pé", "€", "\udcff"], ids=ascii)
def test_a_user_and_a_password_may_have_any_characters(
    mariadb: MariaDB, new_engine: NewEngine, passwd: str
):
    sent = passwd.encode(errors="surrogateescape").hex()
    with mariadb.connect("root", "") as root, root.cursor() as cursor:
        cursor.execute(f"SELECT PASSWORD(x'{sent}')")
        [[hashed]] = cursor.fetchall()
        cursor.execute(f"CREATE OR REPLACE USER `zoë`@'{HOST}' IDENTIFIED BY PASSWORD '{hashed}'")
        cursor.execute(f"GRANT ALL ON *.* TO `zoë`@'{HOST}'")
    engine = new_engine(user="zoë", passwd=passwd)

    engine.open(1)

    with pytest.raises(StorageError, match="'zoë' or its password is not accepted"):
        new_engine(user="zoë", passwd=f"{passwd}é").open(1)
    with mariadb.connect("root", "") as root, root.cursor() as cursor:
        cursor.execute(f"DROP USER `zoë`@'{HOST}'")


@pytest.fixture
def become_read_only(stranger: Any) -> Iterator[Callable[[], None]]:
    """Makes the server what a replica is, to the end of the test."""
    yield lambda: stranger.execute("SET GLOBAL read_only = 1")
    stranger.execute("SET GLOBAL read_only = 0")


@pytest.mark.parametrize("who", ["one that writes", "an idle one", "an administrator"])
def test_an_owner_whose_server_becomes_read_only_steps_back(
    become_read_only: Callable[[], None],
    plain_user: dict[str, str],
    stranger: Any,
    new_engine: NewEngine,
    clock: FakeClock,
    shard: str,
    who: str,
):
    """A server lets an administrator write all the same; he has no business on a replica."""
    engine = new_engine(beats=clock, **({} if who == "an administrator" else plain_user))
    engine.open(clock.now_ms())
    engine.create_queue(QUEUE, clock.now_ms())
    become_read_only()

    if who == "one that writes":
        with pytest.raises(StorageNotCommitted, match="read-only; point"):
            engine.apply(ONE_JOB, clock.now_ms())
    else:
        # Every third of the lease, however often the connection is used.
        for _ in range(2):
            clock.advance(LEASE_SECONDS / 4)
            engine.read_pending(QUEUE, 1, after=None, until_ms=0, limit=1)
        with pytest.raises(StorageError, match="is read-only, as replicas are"):
            engine.heartbeat()

    assert "read-only" in engine.failure
    with pytest.raises(StorageNotCommitted, match="must be reopened"):
        engine.apply(ONE_JOB, clock.now_ms())
    engine.close()
    with pytest.raises(StorageError, match="is read-only, as replicas are"):
        engine.open(clock.now_ms())


# --- there is no connection to be had -----------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"passwd": "wrong"}, r"user 'pinlater' or its password.*etc/shards.yaml"),
        ({"user": "nobody"}, r"user 'nobody' or its password.*etc/shards.yaml"),
        ({"host": "no-such-host.invalid"}, r"host is unknown.*master"),
    ],
)
def test_why_it_cannot_connect(new_engine: NewEngine, wrong: dict[str, Any], said: str):
    with pytest.raises(StorageError, match=said):
        new_engine(**wrong).open(1)


def test_nobody_listens(new_engine: NewEngine, free_port: Callable[[], int]):
    with pytest.raises(StorageError, match=f"{HOST}:.*nothing listens.*master"):
        new_engine(port=free_port()).open(1)


def test_a_user_who_may_not(mariadb: MariaDB, stranger: Any, new_engine: NewEngine):
    stranger.execute(f"CREATE OR REPLACE USER reader@'{HOST}' IDENTIFIED BY 'r'")

    with pytest.raises(StorageError, match="grant the shard's user"):
        new_engine(user="reader", passwd="r").open(1)


# --- strangers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("call", STORAGE_CALLS.values(), ids=STORAGE_CALLS)
def test_no_call_lets_a_foreign_exception_through(
    store: EngineHarness, stranger: Any, shard: str, call: Call
):
    store.failed(Job(b"failed", attempts_allowed=1))
    store.in_progress(b"running")
    store.enqueue(b"pending")
    stranger.execute(f"DROP DATABASE `plq_{shard}_{QUEUE}`")

    with contextlib.suppress(StorageError):
        call(store.engine)

    store.reopen()
    assert QUEUE not in store.engine.queues()


def test_a_body_beyond_the_packet_is_refused_with_the_cure(store: EngineHarness):
    with pytest.raises(StorageNotCommitted, match="max_allowed_packet"):
        store.enqueue(b"x" * (17 << 20))

    assert store.states(store.enqueue(b"small")) == [JobState.PENDING]


@pytest.fixture
def small_packets(stranger: Any) -> Iterator[None]:
    """Of 1 MiB, for connections that are made from now on, as old servers had them."""
    stranger.execute("SET GLOBAL max_allowed_packet = 1048576")
    yield
    stranger.execute("SET GLOBAL max_allowed_packet = DEFAULT")


def test_bodies_that_a_small_packet_takes_go_in_several_statements(
    small_packets: None, store: EngineHarness
):
    """Whatever is in them: each byte of these takes two in a statement."""
    longest = store.engine.narrower(QUEUE)[1].body_bytes
    assert longest == (1_048_576 - 65_536) // 2

    keys = store.enqueue(*[b"'" * longest] * 3)
    assert [one.key for one in store.claim()] == keys
    bodies = [b"\\" * longest, b"'" * longest, b"\0" * longest]
    new = [
        Checkpoint(key, None, body, prepend_custom_status="é" * 5000)
        for key, body in zip(keys, bodies, strict=True)
    ]
    assert store.checkpoint(*new).done == 3

    assert [store.job(key).body for key in keys] == bodies


def test_a_body_beyond_a_small_packet_is_refused_before_the_batch_with_the_cure(
    small_packets: None, new_engine: NewEngine, make_shard: MakeShard
):
    shard = make_shard(engine=new_engine())
    shard.create(QUEUE)
    [descriptor] = shard.enqueue(b"x" * 491_520)
    shard.dequeue()

    with pytest.raises(EnqueueRejected, match=r"jobs\[1\]\.body .* 491520; raise max_allowed_p"):
        shard.enqueue(b"a", b"x" * 491_521)
    with pytest.raises(InvalidRequest, match="at most 491520 are kept; raise max_allowed_packet"):
        shard.call(CheckpointRequest(QUEUE, [CheckpointInfo(descriptor, new_body=b"x" * 491_521)]))
    assert shard.service.degraded == ""


def test_a_table_that_is_full_refuses_with_the_cure(
    store: EngineHarness, stranger: Any, table: str
):
    """As a disk does; such a table takes 64 KiB."""
    stranger.execute(f"ALTER TABLE {table} ENGINE = MyISAM, MAX_ROWS = 1, AVG_ROW_LENGTH = 1")

    with pytest.raises(StorageFull, match=r"store is full: .*make room"):
        store.enqueue(b"x" * 70_000)

    assert store.states(store.enqueue(b"small")) == [JobState.PENDING]


@pytest.mark.parametrize(
    ("code", "said", "is_full"),
    [
        (1021, "Disk full (/tmp/#sql); waiting for someone to free some space", True),
        (1026, 'Error writing file "binlog" (errno: 28 "No space left on device")', True),
        (1026, 'Error writing file "binlog" (errno: 5 "Input/output error")', False),
        (1030, 'Got error 28 "No space left on device" from storage engine InnoDB', True),
        (1030, "Got error 128 from storage engine InnoDB", False),
    ],
)
def test_which_errors_say_that_there_is_no_room(code: int, said: str, is_full: bool):
    error = storage_error(OperationalError(code, said), "mysql there:3306", undone=True)

    assert isinstance(error, StorageFull) == is_full
    assert ("make room" in error.message) == is_full


def test_ids_and_times_are_whole_numbers(store: EngineHarness):
    """A server may well answer with decimals, which compare alike and cost far more."""
    [key] = store.enqueue(b"a")
    [pending] = store.engine.read_pending(QUEUE, 1, after=None, until_ms=store.now_ms, limit=1)
    job = store.job(key)

    numbers = [*pending, job.run_after_ms, job.created_at_ms, job.updated_at_ms, *job.key]
    numbers += [*store.depths().values(), store.start_ms]
    assert {type(number) for number in numbers} == {int}


@pytest.mark.parametrize(
    ("fault", "statement", "doubtful"),
    [
        (OperationalError(2013, "Lost connection"), b"INSERT", True),
        (OperationalError(1180, "Got error during COMMIT"), b"INSERT", True),
        (MemoryError(), b"INSERT", True),  # no answer of the server
        (OperationalError(1114, "The table is full"), b"INSERT", False),
        (OperationalError(1026, "Error writing file"), b"COMMIT", True),
        (OperationalError(1205, "Lock wait timeout exceeded"), b"COMMIT", False),
    ],
)
def test_after_which_errors_a_commit_is_looked_up(
    fault: Exception, statement: bytes, doubtful: bool
):
    assert leaves_doubt(fault, statement) == doubtful
