"""The connection is lost within a COMMIT: nobody knows what became of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from pinlaterd.engines.base import Batch, Checkpoint, CheckpointOp, EnqueueOp, Release
from pinlaterd.errors import StorageError, StorageNotCommitted
from pinlaterd.model import Job, JobState
from tests.clocks import FakeClock
from tests.conformance.engine.harness import QUEUE, Ack, Claimed, EngineHarness, ack_op, claim_op
from tests.conftest import WaitUntil
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


WRITES: Sequence[Write] = (
    _enqueue,
    _enqueue_alone,
    _claim,
    _succeed,
    _fail,
    _fail_and_claim_again,
    _checkpoint,
    _checkpoints_of_two_calls,
    _move_to_pending,
    _release,
    _time_out,
    _delete,
)


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


@pytest.mark.parametrize("how", [Cut.BEFORE, Cut.AFTER])
@pytest.mark.parametrize("write", WRITES, ids=[write.__name__ for write in WRITES])
def test_the_outcome_is_told_as_unknown_and_nothing_is_kept_by_halves(
    behind_proxy: EngineHarness,
    running: Claimed,
    proxy: Proxy,
    stranger: Any,
    shard: str,
    wait_until: WaitUntil,
    write: Write,
    how: Cut,
):
    before = _all_jobs(stranger, shard)
    proxy.cut_at(b"INSERT" if write is _enqueue_alone else COMMIT, how)

    with pytest.raises(StorageError, match="was kept is not known") as told:
        write(behind_proxy, running)

    assert not isinstance(told.value, StorageNotCommitted)
    assert behind_proxy.engine.failure
    wait_until(lambda: proxy.cuts == 1)
    behind_proxy.reopen()
    assert (_all_jobs(stranger, shard) == before) is (how is Cut.BEFORE)


def test_an_owner_that_is_cut_off_while_it_takes_over_does_so_the_next_time(
    behind_proxy: EngineHarness, proxy: Proxy, clock: FakeClock
):
    keys = behind_proxy.enqueue(b"a")
    behind_proxy.engine.close()
    engine = behind_proxy.engine = behind_proxy.make()
    proxy.cut_at(b"REPLACE", Cut.BEFORE)

    with pytest.raises(StorageError):
        engine.open(clock.now_ms())

    engine.open(clock.now_ms())
    assert behind_proxy.ready() == keys
