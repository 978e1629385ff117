"""The connection is lost within a COMMIT: what became of it is looked up, and told as it is."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from pinlaterd.clock import FakeClock
from pinlaterd.engines.base import Batch, Checkpoint, CheckpointOp, EnqueueOp, Release
from pinlaterd.engines.mysql.connection import Connection
from pinlaterd.errors import StorageError, StorageNotCommitted
from pinlaterd.model import Job, JobState
from tests.conformance.engine.harness import QUEUE, Ack, Claimed, EngineHarness, ack_op, claim_op
from tests.conftest import WaitUntil
from tests.engines.mysql.conftest import NewEngine
from tests.servers.proxy import Cut, Proxy

COMMIT = b"COMMIT"
Write = Callable[[EngineHarness, Claimed], object]


def _enqueue(store: EngineHarness, _running: Claimed) -> object:
    return [key.priority for key in store.enqueue(b"new", Job(b"low", priority=2))]


def _enqueue_alone(store: EngineHarness, _running: Claimed) -> object:
    """One statement, which is its own commit."""
    return len(store.enqueue(b"new"))


def _claim(store: EngineHarness, _running: Claimed) -> object:
    return [claimed.body for claimed in store.claim()]


def _succeed(store: EngineHarness, running: Claimed) -> object:
    return store.succeed(running.key).succeeded


def _fail(store: EngineHarness, running: Claimed) -> object:
    return store.fail(running.key).failed


def _fail_and_claim_again(store: EngineHarness, running: Claimed) -> object:
    """In one batch, after which the job is in the state in which it was before."""
    claim = store.claim_on(running.key)
    result = store.engine.apply(
        Batch(
            acks=[ack_op(QUEUE, [], [Ack(running.key)])],
            enqueues=[EnqueueOp(QUEUE, [Job(b"new")])],
            claims=[claim_op(QUEUE, [claim])],
        ),
        store.now_ms,
    )
    return [payload[0] for payload in result.claims[0] if payload is not None]


def _checkpoint(store: EngineHarness, running: Claimed) -> object:
    """The job stays in its state."""
    return store.checkpoint(Checkpoint(running.key, None, new_body=b"changed")).done


def _checkpoints_of_two_calls(store: EngineHarness, running: Claimed) -> object:
    op = CheckpointOp(QUEUE, "worker", [Checkpoint(running.key, None, new_body=b"changed")])
    result = store.engine.apply(Batch(checkpoints=[op, op]), store.now_ms)
    return [one.done for one in result.checkpoints]


def _move_to_pending(store: EngineHarness, running: Claimed) -> object:
    return store.checkpoint(Checkpoint(running.key, None, move_to_pending=True)).done


def _release(store: EngineHarness, running: Claimed) -> object:
    return len(store.release(Release(running.key, running.claim_descriptor)))


def _time_out(store: EngineHarness, _running: Claimed) -> object:
    expired = store.engine.release_expired(
        QUEUE, claimed_before_ms=store.now_ms + 1, limit=9, now_ms=store.now_ms
    )
    return len(expired.retried)


def _delete(store: EngineHarness, _running: Claimed) -> object:
    return len(store.engine.delete_jobs(QUEUE, JobState.PENDING, 1, limit=9))


WRITES: dict[Write, object] = {
    _enqueue: [1, 2],
    _enqueue_alone: 1,
    _claim: [b"pending"],
    _succeed: 1,
    _fail: 1,
    _fail_and_claim_again: [b"running"],
    _checkpoint: 1,
    _checkpoints_of_two_calls: [1, 1],
    _move_to_pending: 1,
    _release: 1,
    _time_out: 1,
    _delete: 1,
}


@pytest.fixture
def running(behind_proxy: EngineHarness) -> Claimed:
    """One job is IN_PROGRESS, and another PENDING."""
    [claimed] = behind_proxy.in_progress(b"running")
    behind_proxy.enqueue(b"pending")
    return claimed


def _all_jobs(stranger: Any, shard: str) -> Sequence[object]:
    jobs = []
    for priority in (1, 2):
        stranger.execute(f"SELECT * FROM `plq_{shard}_{QUEUE}`.jobs_p{priority} ORDER BY local_id")
        jobs += stranger.fetchall()
    return jobs


@pytest.mark.parametrize(("write", "result"), WRITES.items(), ids=[w.__name__ for w in WRITES])
def test_what_was_kept_is_told_as_done_and_what_was_not_as_not_done(
    behind_proxy: EngineHarness,
    running: Claimed,
    proxy: Proxy,
    stranger: Any,
    shard: str,
    wait_until: WaitUntil,
    write: Write,
    result: object,
):
    before = _all_jobs(stranger, shard)
    commit = b"INSERT" if write is _enqueue_alone else COMMIT
    proxy.cut_at(commit, Cut.BEFORE)
    with pytest.raises(StorageNotCommitted, match="was not kept"):
        write(behind_proxy, running)
    assert proxy.cuts == 1
    assert behind_proxy.engine.failure
    assert _all_jobs(stranger, shard) == before
    behind_proxy.reopen()

    proxy.cut_at(commit, Cut.AFTER)
    assert write(behind_proxy, running) == result
    wait_until(lambda: proxy.cuts == 2)
    assert behind_proxy.engine.failure
    assert _all_jobs(stranger, shard) != before
    depths = behind_proxy.depths()
    behind_proxy.reopen()
    assert behind_proxy.depths() == {key: jobs for key, jobs in depths.items() if jobs}


def test_a_claim_that_was_kept_is_found_where_comparisons_heed_blanks(
    behind_proxy: EngineHarness, proxy: Proxy, stranger: Any, table: str
):
    """As they do by MySQL's own collation, to which somebody may have converted the table."""
    stranger.execute(
        f"ALTER TABLE {table} CONVERT TO CHARACTER SET utf8mb4 COLLATE utf8mb4_nopad_bin"
    )
    behind_proxy.enqueue(b"pending")
    proxy.cut_at(COMMIT, Cut.AFTER)

    assert [claimed.body for claimed in behind_proxy.claim()] == [b"pending"]


def test_what_changes_nothing_is_done_in_any_case(
    behind_proxy: EngineHarness, running: Claimed, proxy: Proxy
):
    behind_proxy.succeed(running.key)
    for how in (Cut.BEFORE, Cut.AFTER):
        proxy.cut_at(COMMIT, how)
        assert behind_proxy.succeed(running.key).noop == 1
        behind_proxy.reopen()


def test_a_batch_that_the_server_has_refused_is_told_as_not_done(
    behind_proxy: EngineHarness, running: Claimed, proxy: Proxy
):
    """A repeated ack ends it, which goes along with the claim and the COMMIT."""
    behind_proxy.succeed(running.key)
    [wanted] = behind_proxy.wanted(limit=1)
    claim = wanted._replace(payload=(b"pending", 2, 2))  # so nothing is read before
    proxy.cut_at(COMMIT, Cut.AFTER)

    with pytest.raises(StorageNotCommitted, match="was not kept"):
        behind_proxy.engine.apply(
            Batch(acks=[ack_op(QUEUE, [Ack(running.key)], [])], claims=[claim_op(QUEUE, [claim])]),
            behind_proxy.now_ms,
        )

    behind_proxy.reopen()
    assert behind_proxy.states([claim.key]) == [JobState.PENDING]


def test_an_owner_that_is_cut_off_while_it_takes_over_does_so_the_next_time(
    behind_proxy: EngineHarness, proxy: Proxy, clock: FakeClock
):
    keys = behind_proxy.enqueue(b"a")
    behind_proxy.engine.close()
    engine = behind_proxy.engine = behind_proxy.make()
    proxy.cut_at(b"REPLACE", Cut.BEFORE)

    with pytest.raises(StorageError):
        engine.open(clock.now_ms())

    assert engine.open(clock.now_ms()).clean
    assert behind_proxy.ready() == keys


def test_while_the_server_stays_away_nobody_knows(
    behind_proxy: EngineHarness, running: Claimed, proxy: Proxy
):
    proxy.refuses = True
    proxy.cut_at(COMMIT, Cut.AFTER)

    with pytest.raises(StorageError, match="not known, and can't be looked up") as caught:
        behind_proxy.succeed(running.key)

    assert not isinstance(caught.value, StorageNotCommitted)
    proxy.refuses = False
    behind_proxy.reopen()
    assert behind_proxy.states([running.key]) == [JobState.SUCCEEDED]
    assert behind_proxy.succeed(running.key).noop == 1


def test_a_network_that_swallows_the_commit_is_asked_around(
    proxy: Proxy, new_engine: NewEngine, clock: FakeClock
):
    """The server hears nothing of the end, and would keep transaction and lock for the lease."""
    store = EngineHarness(
        lambda: new_engine(port=proxy.port, lease_seconds=3600, answer_seconds=1), clock
    )
    store.engine.create_queue(QUEUE, store.now_ms)
    proxy.cut_at(b"INSERT", Cut.SILENCE)
    began = time.monotonic()

    with pytest.raises(StorageNotCommitted, match=r"timed out.*was not kept"):
        store.enqueue(b"a")

    assert time.monotonic() - began < 10
    store.reopen()
    assert store.ready() == []
    store.engine.close()


def test_after_another_owner_nobody_knows(
    behind_proxy: EngineHarness,
    running: Claimed,
    proxy: Proxy,
    new_engine: NewEngine,
    monkeypatch: pytest.MonkeyPatch,
):
    """It may have changed what would tell."""
    store = behind_proxy.engine
    connect = store._connect  # type: ignore[attr-defined]

    def connect_late(patience_seconds: float) -> Connection:
        monkeypatch.undo()
        other = EngineHarness(new_engine, behind_proxy.clock)
        other.engine.close()
        connection: Connection = connect(patience_seconds)
        return connection

    monkeypatch.setattr(store, "_connect", connect_late)
    proxy.cut_at(COMMIT, Cut.AFTER)

    with pytest.raises(StorageError, match="another process has owned the shard") as caught:
        behind_proxy.succeed(running.key)

    assert not isinstance(caught.value, StorageNotCommitted)
