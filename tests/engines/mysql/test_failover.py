"""A replica takes its master's place: MariaDB servers, and an owner that writes to the old one."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from pinlaterd.config.schema import Address
from pinlaterd.engines.base import Batch, EnqueueOp
from pinlaterd.engines.failover import Account, Failover, Handover, Notes, Pair
from pinlaterd.engines.mysql.connection import MysqlAddress
from pinlaterd.engines.mysql.engine import MysqlEngine
from pinlaterd.engines.mysql.failover import MysqlFailover
from pinlaterd.errors import ShardOwned, StorageError
from pinlaterd.model import Job
from tests.servers.mariadb import HOST, PASSWD, USER, MariaDB
from tests.servers.mariadb_pair import (
    MariaDBPair,
    cursor_of,
    gtid_pair,
    is_read_only,
    mariadb_pair,
    mariadb_servers,
    replica_status,
)

__all__ = ["gtid_pair", "mariadb_pair", "mariadb_servers"]

SHARD, QUEUE = "f1", "mail"
NOW_MS = 1_700_000_000_000
US = Account(USER, PASSWD)


class Remembered(Notes):
    """Outlives the commands of a test."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}

    def get(self, key: str) -> str:
        return self._texts.get(key, "")

    def put(self, key: str, text: str) -> None:
        self._texts[key] = text


NewFailover = Callable[..., Failover]


@pytest.fixture
def new_failover() -> Iterator[NewFailover]:
    """From the first server of a pair to the second, unless told otherwise."""
    made: list[Failover] = []

    def make(
        pair: MariaDBPair,
        *,
        notes: Notes | None = None,
        accept_loss: bool = False,
        catch_up_seconds: float = 60.0,
        replication: Account = US,
    ) -> Failover:
        servers = Pair(Address(HOST, pair.primary.port), Address(HOST, pair.replica.port))
        handover = Handover([SHARD], US, replication, accept_loss, catch_up_seconds)
        made.append(MysqlFailover(servers, handover, notes or Remembered()))
        return made[-1]

    yield make
    for failover in made:
        failover.close()


def engine_on(server: MariaDB) -> MysqlEngine:
    account = MysqlAddress(HOST, server.port, USER, PASSWD)
    return MysqlEngine(
        SHARD, account, levels=3, most_body_bytes=1, lease_seconds=10.0, answer_seconds=10.0
    )


def enqueue(engine: MysqlEngine, count: int) -> list[int]:
    op = EnqueueOp(QUEUE, [Job(b"x")] * count)
    [local_ids] = engine.apply(Batch(enqueues=[op]), NOW_MS).enqueues
    return list(local_ids)


def pending(engine: MysqlEngine) -> list[int]:
    found = engine.read_pending(QUEUE, 1, after=None, until_ms=NOW_MS, limit=10_000)
    return [key.local_id for key in found]


@pytest.fixture
def owner(request: pytest.FixtureRequest) -> Iterator[MysqlEngine]:
    """On the primary, with 100 jobs."""
    name = "mariadb_pair" if "mariadb_pair" in request.fixturenames else "gtid_pair"
    pair: MariaDBPair = request.getfixturevalue(name)
    engine = engine_on(pair.primary)
    engine.open(NOW_MS)
    engine.create_queue(QUEUE, NOW_MS)
    enqueue(engine, 100)
    yield engine
    engine.close()


def carry_out(failover: Failover, *, until: str = "") -> list[str]:
    """All steps; `until`: up to and with the one of that name."""
    said = []
    for step in (*failover.steps(), *failover.last_steps()):
        said.append(step.run())
        if step.name == until:
            break
    return said


# --- in order ---------------------------------------------------------------------------------


def test_a_replica_takes_over_all_jobs_and_the_old_master_follows_it(
    mariadb_pair, owner, new_failover, wait_until
):
    failover = new_failover(mariadb_pair)
    found = failover.examine()
    assert (found.obstacles, found.risks) == ([], [])
    old_ids = pending(owner)

    carry_out(failover)

    assert is_read_only(mariadb_pair.primary)
    assert not is_read_only(mariadb_pair.replica)
    successor = engine_on(mariadb_pair.replica)
    successor.open(NOW_MS)
    assert pending(successor) == old_ids
    [new_id] = enqueue(successor, 1)
    assert new_id > max(old_ids)
    successor.close()
    wait_until(lambda: _count_jobs(mariadb_pair.primary) == 101)


def test_an_owner_can_write_nothing_once_writes_are_stopped(gtid_pair, owner, new_failover):
    failover = new_failover(gtid_pair)

    carry_out(failover, until="stop-writes")

    with pytest.raises(StorageError):
        enqueue(owner, 1)
    owner.close()
    with pytest.raises(ShardOwned):
        owner.open(NOW_MS)
    failover.close()
    with pytest.raises(StorageError, match="read-only"):
        owner.open(NOW_MS)


def test_it_can_go_back_and_forth(mariadb_pair, owner, new_failover):
    forth = new_failover(mariadb_pair)
    carry_out(forth)
    forth.close()
    there = MariaDBPair(mariadb_pair.replica, mariadb_pair.primary)
    back = new_failover(there)
    assert back.examine().risks == []

    carry_out(back)

    successor = engine_on(mariadb_pair.primary)
    successor.open(NOW_MS)
    assert len(pending(successor)) == 100
    successor.close()


def test_a_step_that_fails_is_put_back(gtid_pair, owner, new_failover):
    on_replica(gtid_pair, "STOP SLAVE SQL_THREAD")
    enqueue(owner, 1)
    failover = new_failover(gtid_pair)

    carry_out(failover, until="stop-writes")
    with pytest.raises(StorageError, match="does not replicate any more"):
        failover.steps()[1].run()
    failover.undo()
    failover.close()

    assert not is_read_only(gtid_pair.primary)
    owner.close()
    owner.open(NOW_MS)
    assert len(pending(owner)) == 101


# --- what is refused --------------------------------------------------------------------------


STOP, START = "STOP SLAVE", "START SLAVE"
DAMAGES = {
    "does not apply what it receives": ["STOP SLAVE SQL_THREAD"],
    "receives nothing from its master": [STOP],
    "is no replica": [STOP, "RESET SLAVE ALL"],
    # Itself, which the server does with an error.
    "replicates from": [STOP, "CHANGE MASTER TO MASTER_PORT = {port}", START],
    "does not replicate everything": [STOP, "SET GLOBAL replicate_do_db = 'other'", START],
}


def on_replica(pair: MariaDBPair, *statements: str) -> None:
    with cursor_of(pair.replica) as cursor:
        for statement in statements:
            cursor.execute(statement.format(port=pair.replica.port))


@pytest.mark.parametrize(("words", "damage"), DAMAGES.items())
def test_a_replica_that_may_lack_jobs_is_a_risk(gtid_pair, owner, new_failover, words, damage):
    on_replica(gtid_pair, *damage)
    try:
        found = new_failover(gtid_pair).examine()
    finally:
        on_replica(gtid_pair, STOP, "SET GLOBAL replicate_do_db = ''")

    assert any(words in risk for risk in found.risks), found.risks


def test_without_its_master_a_replica_proves_nothing(gtid_pair, owner, new_failover, wait_until):
    wait_until(lambda: _count_jobs(gtid_pair.replica) == 100)
    gtid_pair.primary.kill()

    failover = new_failover(gtid_pair)
    found = failover.examine()

    assert "does not answer" in found.risks[0]
    with pytest.raises(StorageError, match="can't prove"):
        failover.steps()[0].run()
    assert is_read_only(gtid_pair.replica)


def test_loss_that_is_accepted_never_brings_ids_back(gtid_pair, owner, new_failover, wait_until):
    """The replica stands where the shard was closed in order; what came later is lost."""
    owner.close()
    wait_until(lambda: _count_jobs(gtid_pair.replica) == 100)
    wait_until(lambda: replica_status(gtid_pair.replica)["Seconds_Behind_Master"] == 0)
    on_replica(gtid_pair, STOP)
    owner.open(NOW_MS)
    lost = enqueue(owner, 5)
    gtid_pair.primary.kill()

    said = carry_out(new_failover(gtid_pair, accept_loss=True))

    assert "may have jobs" in said[-1]
    successor = engine_on(gtid_pair.replica)
    successor.open(NOW_MS + 1)
    assert len(pending(successor)) == 100
    assert min(enqueue(successor, 5)) > max(lost)
    successor.close()


def test_a_replica_that_does_not_catch_up_in_time_is_refused(gtid_pair, owner, new_failover):
    failover = new_failover(gtid_pair, catch_up_seconds=0.5)
    with cursor_of(gtid_pair.replica) as blocker:
        blocker.execute("FLUSH TABLES WITH READ LOCK")
        enqueue(owner, 1)
        carry_out(failover, until="stop-writes")

        with pytest.raises(StorageError, match="did not catch up"):
            failover.steps()[1].run()


# --- broken off -------------------------------------------------------------------------------


@pytest.mark.parametrize("crash_after", ["stop-writes", "catch-up", "promote", "follow"])
def test_broken_off_after_any_step_it_is_done_by_repeating_all(
    mariadb_pair, owner, new_failover, wait_until, crash_after
):
    notes = Remembered()
    first = new_failover(mariadb_pair, notes=notes)
    carry_out(first, until=crash_after)
    first.close()

    carry_out(new_failover(mariadb_pair, notes=notes))

    assert not is_read_only(mariadb_pair.replica)
    assert is_read_only(mariadb_pair.primary)
    successor = engine_on(mariadb_pair.replica)
    successor.open(NOW_MS)
    assert len(pending(successor)) == 100
    enqueue(successor, 1)
    successor.close()
    wait_until(lambda: _count_jobs(mariadb_pair.primary) == 101)


@pytest.mark.parametrize("statement", ["STOP SLAVE", "SET GLOBAL read_only = 0"])
def test_broken_off_in_the_midst_of_promoting_it_goes_on(gtid_pair, owner, new_failover, statement):
    notes = Remembered()
    first = new_failover(gtid_pair, notes=notes)
    carry_out(first, until="catch-up")
    first.close()
    on_replica(gtid_pair, STOP, statement)

    carry_out(new_failover(gtid_pair, notes=notes))

    successor = engine_on(gtid_pair.replica)
    successor.open(NOW_MS)
    assert len(pending(successor)) == 100
    successor.close()


def test_an_old_master_that_can_t_be_let_in_is_left_to_people(gtid_pair, owner, new_failover):
    failover = new_failover(gtid_pair, replication=Account("nobody", "wrong"))

    said = carry_out(failover)

    assert "by hand" in said[-1]
    assert replica_status(gtid_pair.primary) == {}
    assert is_read_only(gtid_pair.primary)


def _count_jobs(server: MariaDB) -> int:
    """A replica may have to make the table yet."""
    with cursor_of(server) as cursor:
        of_queue = f"table_schema = 'plq_{SHARD}_{QUEUE}' AND table_name = 'jobs_p1'"
        if not cursor.execute(f"SELECT 1 FROM information_schema.tables WHERE {of_queue}"):
            return 0
        cursor.execute(f"SELECT COUNT(*) FROM plq_{SHARD}_{QUEUE}.jobs_p1")
        return int(cursor.fetchone()[0])
