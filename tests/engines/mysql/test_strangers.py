"""Somebody else writes to a shard's tables: no job is handed out twice, and none is forgotten.

A PinLater server that still runs does so, or a hand in a table. The service is the real one, on a
real server; what tells the time stands still but for what a test lets pass.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import pytest

from pinlaterd.engines import counts
from pinlaterd.engines.base import Finding
from pinlaterd.engines.mysql.engine import MysqlEngine
from pinlaterd.errors import QueueNotFound
from pinlaterd.model import (
    AckInfo,
    AckRequest,
    CheckpointInfo,
    CheckpointRequest,
    DequeueRequest,
    EnqueueRequest,
    Job,
    JobState,
)
from pinlaterd.wire.envelope import Status
from tests.clocks import FakeClock
from tests.conformance.engine.harness import QUEUE
from tests.conftest import WaitUntil
from tests.engines.mysql.conftest import NewEngine
from tests.shard.conftest import MakeShard, Shard

PENDING, IN_PROGRESS = JobState.PENDING, JobState.IN_PROGRESS
MONITOR_SECONDS = 10.0
CLAIM_TIMEOUT_SECONDS = 600
# How often every queue is read anew, and how often at most one that shows traces of strangers.
REREAD_SECONDS, LOOK_SECONDS = 60.0, 5.0


@pytest.fixture
def engine(new_engine: NewEngine, clock: FakeClock) -> MysqlEngine:
    return new_engine(beats=clock)


@pytest.fixture
def service(make_shard: MakeShard, engine: MysqlEngine) -> Shard:
    """A shard with one queue."""
    made = make_shard(engine=engine)
    made.create(QUEUE)
    return made


class Stranger:
    """Knows PinLater's columns, and nothing of owners."""

    def __init__(self, cursor: Any, table: str) -> None:
        self._cursor = cursor
        self._table = table

    def inserts(self, body: str) -> None:
        self._cursor.execute(
            f"INSERT INTO {self._table} (state, attempts_allowed, attempts_remaining,"
            " custom_status, updated_at, created_at, run_after, body)"
            " VALUES (0, 2, 2, '', '2020-01-01', '2020-01-01', '2020-01-01', %s)",
            (body,),
        )

    def claims(self, body: str) -> None:
        done = self._cursor.execute(
            f"UPDATE {self._table} SET state = 1, claim_descriptor = 'theirs',"
            " updated_at = '2020-01-01' WHERE body = %s",
            (body,),
        )
        assert done == 1


@pytest.fixture
def somebody(stranger: Any, table: str) -> Stranger:
    return Stranger(stranger, table)


def _upkeep(service: Shard) -> None:
    """A whole round, and what it leads to."""
    service.clock.advance(MONITOR_SECONDS)
    service.turn()
    while service.service.busy:
        service.turn()


@pytest.fixture(autouse=True)
def count_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not after a hundred times as long as the last count took: a busy machine may hold that up."""
    monkeypatch.setattr(counts, "_RECOUNT_PART", 1.0)


def _counted(service: Shard, wait_until: WaitUntil, depths: Mapping[Any, int]) -> None:
    """Jobs are counted beside the shard."""

    def agrees() -> bool:
        service.service.tick()
        return service.engine.depths()[QUEUE] == depths

    wait_until(agrees)
    service.service.tick()  # the count may have ended after the last one


def _bodies(service: Shard) -> list[bytes]:
    return [job.body for job in service.dequeue()]


def test_a_job_that_a_stranger_adds_is_found_now_and_then(
    service: Shard, somebody: Stranger, wait_until: WaitUntil
):
    assert _bodies(service) == []
    somebody.inserts("theirs")

    service.clock.advance(REREAD_SECONDS)
    _upkeep(service)

    assert service.counts() == (1, 0, 0)
    _counted(service, wait_until, {(1, PENDING): 1})
    assert service.stats.snapshot()["gauges"]["mail_pending"] == 1
    assert _bodies(service) == [b"theirs"]


def test_a_stranger_who_takes_our_next_id_is_noticed_at_once(
    service: Shard, somebody: Stranger, wait_until: WaitUntil
):
    service.enqueue(b"a")
    somebody.inserts("theirs")

    service.enqueue(b"b")
    service.service.tick()

    _counted(service, wait_until, {(1, PENDING): 3})
    assert sorted(_bodies(service)) == [b"a", b"b", b"theirs"]


def test_a_job_that_a_stranger_claims_is_counted_and_ends_by_its_time_out(
    service: Shard, somebody: Stranger, wait_until: WaitUntil, caplog: pytest.LogCaptureFixture
):
    service.enqueue(b"a", b"b")
    somebody.claims("a")

    with caplog.at_level(logging.WARNING):
        assert _bodies(service) == [b"b"]
        service.service.tick()

    assert service.counters()["mail_claim_mismatch"] == 1
    assert "somebody else writes to its store" in caplog.text
    _counted(service, wait_until, {(1, IN_PROGRESS): 2})
    service.clock.advance(CLAIM_TIMEOUT_SECONDS)
    _upkeep(service)
    assert sorted(_bodies(service)) == [b"a", b"b"]
    assert service.counters()["mail_timeout_retry"] == 2


def test_a_claim_of_a_strangers_that_we_never_met_ends_by_its_time_out(
    service: Shard, somebody: Stranger, stranger: Any, table: str
):
    """The shard, as far as it knows, has no job in progress. It does not know how long claims of
    before its start have lasted."""
    somebody.inserts("theirs")
    somebody.claims("theirs")

    service.clock.advance(CLAIM_TIMEOUT_SECONDS)
    _upkeep(service)

    stranger.execute(f"SELECT state, attempts_remaining FROM {table}")
    assert stranger.fetchall() == ((0, 1),)
    assert _bodies(service) == [b"theirs"]


def test_a_stranger_who_goes_on_costs_a_look_now_and_then_only(
    service: Shard, somebody: Stranger, wait_until: WaitUntil, caplog: pytest.LogCaptureFixture
):
    def looks() -> int:
        return caplog.text.count("somebody else writes to its store")

    service.enqueue(b"a", b"b")
    somebody.claims("a")
    _bodies(service)
    _counted(service, wait_until, {(1, IN_PROGRESS): 2})
    service.enqueue(b"c")
    somebody.claims("c")
    assert _bodies(service) == []

    service.service.tick()
    assert looks() == 1

    service.clock.advance(LOOK_SECONDS)
    _counted(service, wait_until, {(1, IN_PROGRESS): 3})
    assert looks() == 2


def test_a_check_gives_a_job_in_no_state_back(
    service: Shard, engine: MysqlEngine, stranger: Any, table: str
):
    service.enqueue(b"ours")
    stranger.execute(f"UPDATE {table} SET state = 9")
    finding = Finding(QUEUE, "jobs in a state that does not exist", 1)

    assert engine.check(repair=False) == [finding]
    assert engine.check(repair=True) == [finding]

    assert engine.check(repair=False) == []
    stranger.execute(f"SELECT state FROM {table}")
    assert stranger.fetchall() == ((0,),)


# --- a queue that a stranger removes ------------------------------------------------------------


def test_calls_for_a_queue_whose_database_is_gone_are_told_so_at_once(
    service: Shard, stranger: Any, shard: str
):
    service.create("other")
    [descriptor] = service.enqueue(b"a")
    service.dequeue()
    service.enqueue(b"b")
    stranger.execute(f"DROP DATABASE `plq_{shard}_{QUEUE}`")

    *gone, other = service.results(
        EnqueueRequest(QUEUE, [Job(b"c")]),
        AckRequest(QUEUE, [AckInfo(descriptor)]),
        CheckpointRequest(QUEUE, [CheckpointInfo(descriptor)]),
        DequeueRequest(QUEUE, 1),
        EnqueueRequest("other", [Job(b"d")]),
    )

    assert [type(answer) for answer in gone] == [QueueNotFound] * 4
    assert other is Status.REFUSED
    service.service.recover()
    assert len(service.enqueue(b"d", queue="other")) == 1
    with pytest.raises(QueueNotFound):
        service.enqueue(b"e")


def test_a_table_that_is_gone_is_made_anew(service: Shard, stranger: Any, table: str):
    service.enqueue(b"a")
    stranger.execute(f"DROP TABLE {table}")

    assert service.results(EnqueueRequest(QUEUE, [Job(b"b")])) == [Status.REFUSED]
    service.service.recover()

    service.enqueue(b"c")
    assert _bodies(service) == [b"c"]
