"""A store that fails: whose call it costs what, and how the shard comes back."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from pinlaterd.config.schema import ServerSettings
from pinlaterd.engines.base import SINGLE, Batch, BatchResult, Term
from pinlaterd.engines.counts import Depths
from pinlaterd.engines.sqlite.engine import SqliteEngine
from pinlaterd.errors import (
    ShardConnectionFailed,
    ShardOwned,
    StorageError,
    StorageFull,
    StorageNotCommitted,
    Superseded,
)
from pinlaterd.model import (
    AckInfo,
    AckRequest,
    DeleteJobsRequest,
    DequeueRequest,
    EnqueueRequest,
    Job,
    JobState,
    LookupRequest,
    PendingKey,
    QueueNamesRequest,
    RetryFailedRequest,
)
from pinlaterd.wire.envelope import Op, Status
from tests.shard.conftest import MakeShard

ACK = AckRequest("mail", [AckInfo("mail:ss1:p1:1")])


class Failing(SqliteEngine):
    """The real engine, whose commits and opens fail when told to."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.on_apply: Callable[[Batch], None] = lambda _batch: None
        self.after_apply: Callable[[Batch], None] = lambda _batch: None
        self.on_open: Callable[[], None] = lambda: None
        self.on_read: Callable[[str], None] = lambda _call: None
        self.lost = ""  # why it has to be opened again
        self.applied = 0
        self.opened = 0

    def open(self, now_ms: int, term: Term = SINGLE) -> int:
        self.on_open()
        self.lost = ""
        self.opened += 1
        return super().open(now_ms, term)

    @property
    def failure(self) -> str:
        return self.lost or super().failure

    def heartbeat(self) -> None:
        self.on_read("heartbeat")
        super().heartbeat()

    def depths(self, queues: Collection[str] | None = None) -> Mapping[str, Depths | None]:
        self.on_read("depths")
        return super().depths(queues)

    def read_pending(
        self, queue: str, priority: int, *, after: PendingKey | None, until_ms: int, limit: int
    ) -> Sequence[PendingKey]:
        self.on_read("read_pending")
        return super().read_pending(queue, priority, after=after, until_ms=until_ms, limit=limit)

    def apply(self, batch: Batch, now_ms: int) -> BatchResult:
        self.applied += 1
        self.on_apply(batch)
        result = super().apply(batch, now_ms)
        self.after_apply(batch)
        return result


@pytest.fixture
def engine(tmp_path):
    return Failing(tmp_path / "shard.sqlite")


@pytest.fixture
def shard(make_shard, engine):
    made = make_shard(engine=engine)
    made.create()
    return made


def refuse(
    bodies: set[bytes], error: type[StorageNotCommitted] = StorageNotCommitted
) -> Callable[[Batch], None]:
    """Commits that hold such a job fail, beyond doubt."""

    def check(batch: Batch) -> None:
        if any(job.body in bodies for op in batch.enqueues for job in op.jobs):
            raise error("the disk is full")

    return check


def break_down(_batch: Batch) -> None:
    raise StorageError("the disk is gone")


# --- a commit that is known to have failed ----------------------------------------------------


def test_the_call_that_fails_a_batch_is_refused_and_the_others_are_carried_out(shard, engine):
    shard.enqueue(b"before")
    engine.on_apply = refuse({b"poison"})

    results = shard.results(
        EnqueueRequest("mail", [Job(b"a")]),
        EnqueueRequest("mail", [Job(b"poison")]),
        DequeueRequest("mail", 1),
        EnqueueRequest("mail", [Job(b"b")]),
    )

    assert len(results[0]) == len(results[3]) == 1
    assert results[1] is Status.REFUSED
    assert [job.body for job in results[2].jobs] == [b"before"]
    assert shard.counts() == (2, 0, 0)
    assert shard.service.serving


def test_jobs_of_a_claim_that_failed_can_be_had_again(shard, engine):
    shard.enqueue(b"a", b"b")

    def no_claims(batch: Batch) -> None:
        if batch.claims:
            raise StorageNotCommitted("the disk is full")

    engine.on_apply = no_claims
    assert shard.results(DequeueRequest("mail", 10)) == [Status.REFUSED]
    engine.on_apply = lambda _batch: None

    assert [job.body for job in shard.dequeue()] == [b"a", b"b"]


def refuse_calls(*names: str) -> Callable[[str], None]:
    def check(call: str) -> None:
        if call in names:
            raise StorageNotCommitted("the server is busy")

    return check


def test_a_dequeue_whose_jobs_cannot_be_read_is_refused_alone_and_they_can_be_had_again(
    shard, engine
):
    shard.enqueue(Job(b"first"), Job(b"second", priority=2))
    shard.service.close()
    shard.service.open()  # with no payloads in memory

    def no_reads(batch: Batch) -> None:
        if any(None in op.payloads for op in batch.claims):
            raise StorageNotCommitted("the server is busy")

    engine.on_apply = no_reads
    results = shard.results(
        EnqueueRequest("mail", [Job(b"a")]),
        DequeueRequest("mail", 10),
        EnqueueRequest("mail", [Job(b"b")]),
    )
    assert [len(results[0]), results[1], len(results[2])] == [1, Status.REFUSED, 1]
    assert shard.counts() == (3, 1, 0)
    engine.on_apply = lambda _batch: None

    assert [job.body for job in shard.dequeue()] == [b"first", b"a", b"b", b"second"]
    assert shard.service.serving


def test_a_store_lost_in_a_read_costs_its_batch_nothing_that_another_shard_could_not_do(
    shard, engine
):
    shard.enqueue(Job(b"first", run_after_ms=shard.clock.now_ms() + 1_000))
    shard.clock.advance(1.0)  # not in memory: only the store knows that it is due

    def lose(call: str) -> None:
        if call == "read_pending":
            engine.lost = "the connection was lost"
        if engine.lost:
            raise StorageNotCommitted(engine.lost)

    engine.on_read = lose
    engine.on_apply = lambda _batch: lose("apply")
    results = shard.results(EnqueueRequest("mail", [Job(b"a")]), DequeueRequest("mail", 1))

    assert results == [Status.REFUSED] * 2
    assert not shard.service.serving
    engine.on_read, engine.on_apply = (lambda _call: None), (lambda _batch: None)
    shard.service.recover()
    assert [job.body for job in shard.dequeue()] == [b"first"]


def test_a_store_that_refuses_what_is_due_each_second_stays_open(shard, engine):
    [descriptor] = shard.enqueue(b"a")
    shard.dequeue()
    incarnation, opened = shard.service.incarnation, engine.opened
    engine.on_read = refuse_calls("heartbeat", "depths")

    shard.service.tick()

    assert shard.service.serving
    assert (shard.service.incarnation, engine.opened) == (incarnation, opened)
    shard.ack([descriptor])
    assert shard.state(descriptor) is JobState.SUCCEEDED


def test_an_owner_that_cannot_prove_that_it_still_is_one_opens_its_store_again(shard, engine):
    incarnation = shard.service.incarnation

    def lost(call: str) -> None:
        if call == "heartbeat":
            raise StorageError("the lease is gone")

    engine.on_read = lost
    shard.service.tick()
    assert not shard.service.serving
    engine.on_read = lambda _call: None
    shard.service.recover()

    assert shard.service.incarnation > incarnation


# --- a store that is lost while the outcome is known --------------------------------------------


def test_what_was_committed_is_told_before_the_store_is_opened_again(shard, engine):
    shard.enqueue(b"before")
    incarnation = shard.service.incarnation

    def lose(_batch: Batch) -> None:
        engine.lost = "the connection was lost"

    engine.after_apply = lose
    results = shard.results(EnqueueRequest("mail", [Job(b"a")]), DequeueRequest("mail", 1))

    assert len(results[0]) == 1
    assert [job.body for job in results[1].jobs] == [b"before"]
    assert not shard.service.serving
    assert "connection was lost" in shard.service.store_error
    engine.after_apply = lambda _batch: None
    shard.service.recover()
    assert shard.service.incarnation > incarnation
    assert [job.body for job in shard.dequeue()] == [b"a"]


def test_what_was_not_committed_is_refused_with_all_of_its_batch(shard, engine):
    shard.enqueue(b"before")

    def lose(batch: Batch) -> None:
        engine.lost = "the connection was lost"
        raise StorageNotCommitted("the connection was lost")

    engine.on_apply = lose
    applied = engine.applied
    results = shard.results(EnqueueRequest("mail", [Job(b"a")]), ACK, DequeueRequest("mail", 1))

    assert results == [Status.REFUSED] * 3
    assert engine.applied == applied + 1  # none is tried alone on a store that is lost
    assert not shard.service.serving
    engine.on_apply = lambda _batch: None
    shard.service.recover()
    assert [job.body for job in shard.dequeue()] == [b"before"]


def test_calls_tried_alone_are_refused_once_the_store_is_lost(shard, engine):
    def lose_at_the_second(batch: Batch) -> None:
        if any(job.body == b"b" for op in batch.enqueues for job in op.jobs):
            if sum(len(op.jobs) for op in batch.enqueues) == 1:
                engine.lost = "the connection was lost"
            raise StorageNotCommitted("the connection was lost")

    engine.on_apply = lose_at_the_second
    results = shard.results(*[EnqueueRequest("mail", [Job(body)]) for body in (b"a", b"b", b"c")])

    assert len(results[0]) == 1
    assert results[1:] == [Status.REFUSED] * 2
    engine.on_apply = lambda _batch: None
    shard.service.recover()
    assert [job.body for job in shard.dequeue()] == [b"a"]


def test_a_dequeue_is_not_refused_whose_acks_were_carried_out_by_an_earlier_commit(shard, engine):
    """To be refused means that nothing was done: a router would have another shard do it all."""
    [descriptor] = shard.enqueue(b"a")
    shard.dequeue()
    acks = AckRequest("mail", failed=[AckInfo(descriptor, retry_delay_ms=0)])

    def no_claims(batch: Batch) -> None:
        if batch.claims:
            raise StorageNotCommitted("the server is busy")

    engine.on_apply = no_claims
    (result,) = shard.results(DequeueRequest("mail", 1, acks))

    assert isinstance(result, ShardConnectionFailed)
    assert result.message.startswith("shard s1: the server is busy")
    assert shard.state(descriptor) is JobState.PENDING


def test_queues_of_others_that_it_cannot_create_leave_it_serving(shard, engine):
    def full(_queue: str, _now_ms: int) -> None:
        raise StorageNotCommitted("may not create databases")

    engine.create_queue = full
    opened = engine.opened
    (reply,) = shard.replies(shard.raw(json.dumps(["other"]).encode(), Op.ENSURE_QUEUES))
    shard.service.create_queues(["another"])

    assert reply.status is Status.REFUSED
    assert shard.service.serving
    assert engine.opened == opened


# --- a commit of which nothing is known-----------------------------------------------------


def test_callers_are_told_that_nothing_is_known(shard, engine):
    engine.on_apply = break_down

    results = shard.results(EnqueueRequest("mail", [Job(b"a")]), ACK, DequeueRequest("mail", 1))

    assert [type(result) for result in results[:2]] == [ShardConnectionFailed] * 2
    assert "not known" in results[0].message
    assert not shard.service.serving


def test_a_look_up_in_which_the_store_fails_is_answered_once(shard, engine, monkeypatch):
    [descriptor] = shard.enqueue(b"a")

    def fail(*_args: object, **_options: object) -> None:
        raise StorageError("the disk is gone")

    monkeypatch.setattr(engine, "lookup", fail)
    shard.submit(shard.entry(LookupRequest([descriptor])))

    replies = [reply for _ in range(3) for reply in shard.turn()]

    assert [reply.status for reply in replies] == [Status.FAILED]
    assert shard.service.store_error == "the disk is gone"


def test_an_ack_of_scheduled_jobs_that_was_cut_short_after_its_claims_can_be_repeated(
    shard, engine
):
    at_ms = shard.clock.now_ms() + 3_600_000
    descriptors = shard.enqueue(*[Job(b"later", run_after_ms=at_ms)] * 2)
    request = AckRequest("mail", [AckInfo(descriptor) for descriptor in descriptors])
    engine.after_apply = break_down

    (result,) = shard.results(request, op=Op.ACK_SCHEDULED)

    assert isinstance(result, ShardConnectionFailed)
    engine.after_apply = lambda _batch: None
    shard.service.recover()
    shard.clock.advance(86_400)  # which is beyond any claim's time-out
    shard.turn()
    while shard.service.busy:
        shard.turn()
    assert [shard.state(descriptor) for descriptor in descriptors] == [JobState.IN_PROGRESS] * 2
    assert shard.call(request, op=Op.ACK_SCHEDULED) is None
    assert [shard.state(descriptor) for descriptor in descriptors] == [JobState.SUCCEEDED] * 2


def test_the_shard_comes_back_as_a_new_incarnation_with_what_was_committed(shard, engine):
    shard.enqueue(b"a", Job(b"b", priority=2))
    before = shard.service.incarnation
    engine.after_apply = break_down  # committed, and then the answer got lost
    shard.results(EnqueueRequest("mail", [Job(b"c")]))
    assert shard.counts() == (0, 0, 0)
    engine.after_apply = lambda _batch: None

    shard.service.recover()

    assert shard.service.serving
    assert shard.service.incarnation > before
    assert shard.counts() == (2, 1, 0)
    assert [job.body for job in shard.dequeue()] == [b"a", b"c", b"b"]


def test_while_its_store_cannot_be_opened_all_is_refused(shard, engine):
    shard.enqueue(b"a")
    engine.on_apply = break_down
    shard.results(EnqueueRequest("mail", [Job(b"b")]))

    def stuck() -> None:
        raise StorageError("the disk is gone")

    engine.on_open = stuck
    shard.service.recover()

    assert "the disk is gone" in shard.service.store_error
    assert shard.service.idle_seconds() > 0
    results = shard.results(EnqueueRequest("mail", [Job(b"b")]), DequeueRequest("mail", 1))
    assert results == [Status.REFUSED, Status.REFUSED]
    assert shard.counts() == (
        0,
        0,
        0,
    )  # routers still know the queue, and that nothing is to be had

    engine.on_open, engine.on_apply = (lambda: None), (lambda _batch: None)
    shard.service.recover()
    assert not shard.service.serving  # not before its time
    shard.clock.advance(shard.service.idle_seconds())
    shard.service.recover()
    assert [job.body for job in shard.dequeue()] == [b"a"]


def test_a_store_that_keeps_failing_is_degraded_until_it_has_done_well_for_a_while(shard, engine):
    for failures in range(1, 6):
        engine.on_apply = break_down
        shard.results(EnqueueRequest("mail", [Job(b"bad")]))
        engine.on_apply = lambda _batch: None
        shard.clock.advance(60)
        shard.service.recover()
        assert bool(shard.service.degraded) == (failures == 5)

    assert shard.service.degraded == "its store failed 5 times in a row"
    shard.enqueue(b"good")  # what comes all the same is served
    shard.service.tick()
    assert shard.service.degraded
    shard.service.tick()  # probes: nobody sends it work
    assert shard.service.degraded == ""


def test_a_store_that_fails_as_soon_as_it_is_open_is_opened_less_and_less_often(shard, engine):
    engine.on_apply = break_down
    waits = []
    for _ in range(4):
        shard.results(EnqueueRequest("mail", [Job(b"bad")]))
        waits.append(shard.service.idle_seconds())
        shard.clock.advance(waits[-1])
        shard.service.recover()
        assert shard.service.serving

    assert waits == pytest.approx([0, 0.05, 0.1, 0.2])
    shard.clock.advance(5)
    shard.results(EnqueueRequest("mail", [Job(b"bad")]))
    assert shard.service.idle_seconds() == 0


def test_a_store_that_is_full_is_not_degraded(shard, engine):
    """It refuses beyond doubt; its jobs have to be dequeued, so that there is room again."""
    engine.on_apply = refuse({b"more"}, StorageFull)

    for _ in range(20):
        assert shard.results(*[EnqueueRequest("mail", [Job(b"more")])] * 2) == [Status.REFUSED] * 2

    assert shard.service.degraded == ""


def test_acks_and_dequeues_do_not_wait_for_each_refusal_of_a_full_store(shard, engine):
    [descriptor, _] = shard.enqueue(b"a", b"b")
    shard.dequeue(1)
    engine.on_apply = refuse({b"more"}, StorageFull)
    before = engine.applied

    *enqueues, ack, dequeue = shard.results(
        *[EnqueueRequest("mail", [Job(b"more")])] * 100,
        AckRequest("mail", [AckInfo(descriptor)]),
        DequeueRequest("mail", 1),
    )

    assert enqueues == [Status.REFUSED] * 100
    assert ack is None
    assert [job.body for job in dequeue.jobs] == [b"b"]
    assert engine.applied - before < 20


def test_a_call_that_does_not_fit_leaves_the_room_to_the_others(shard, engine):
    engine.on_apply = refuse({b"large"}, StorageFull)
    large, small = (EnqueueRequest("mail", [Job(body)]) for body in (b"large", b"small"))

    results = shard.results(large, small, DequeueRequest("mail", 1), small)

    assert results[0] is Status.REFUSED
    assert len(results[1]) == len(results[3]) == 1


def test_a_store_that_refuses_every_batch_is_degraded(shard, engine):
    def refuse_all(_batch: Batch) -> None:
        raise StorageNotCommitted("no statement goes well")

    engine.on_apply = refuse_all
    enqueue = EnqueueRequest("mail", [Job(b"a")])

    for batches in range(ServerSettings().health_failures_in_row):
        assert shard.service.degraded == "", batches
        shard.results(enqueue, enqueue)  # one failure of the store, however many calls it cost

    assert "failed 5 times in a row" in shard.service.degraded
    assert shard.service.serving


def test_a_call_that_fails_each_batch_it_is_in_does_not_degrade_the_store(shard, engine):
    engine.on_apply = refuse({b"poison"})

    for _ in range(20):
        shard.results(EnqueueRequest("mail", [Job(b"poison")]), EnqueueRequest("mail", [Job(b"a")]))

    assert shard.service.degraded == ""


def test_a_store_that_is_closed_is_degraded_until_it_is_open(shard, engine):
    engine.on_apply = break_down
    shard.results(EnqueueRequest("mail", [Job(b"b")]))
    assert "the disk is gone" in shard.service.degraded

    shard.service.recover()

    assert shard.service.degraded == ""


def test_a_shard_that_another_process_took_over_ends(shard, engine):
    engine.on_apply = break_down
    shard.results(EnqueueRequest("mail", [Job(b"b")]))

    def taken() -> None:
        raise ShardOwned("process 7 owns it")

    engine.on_open = taken
    with pytest.raises(ShardOwned):
        shard.service.recover()


def test_jobs_that_were_claimed_before_the_failure_are_delivered(shard, engine):
    """A dequeue that takes several commits has the jobs of those that were kept."""
    shard.enqueue(*[b"a"] * 2_500)
    claimed = 0

    def fail_the_second(batch: Batch) -> None:
        nonlocal claimed
        claimed += sum(len(op.payloads) for op in batch.claims)
        if claimed > 2_000:
            raise StorageError("the disk is gone")

    engine.on_apply = fail_the_second
    (result,) = shard.results(DequeueRequest("mail", 2_500))

    assert 1_000 < len(result.jobs) <= 2_000


def test_changes_of_many_jobs_end_with_the_store(shard, engine):
    shard.enqueue(*[b"a"] * 200)
    deleting = shard.entry(DeleteJobsRequest("mail", JobState.PENDING))
    retrying = shard.entry(RetryFailedRequest("mail"))
    shard.submit(deleting, retrying)
    assert shard.turn() == []
    engine.on_apply = break_down
    shard.submit(shard.entry(EnqueueRequest("mail", [Job(b"b")])))

    replies = shard.turn()

    assert {reply.call_id for reply in replies} >= {deleting.call_id, retrying.call_id}
    assert {reply.status for reply in replies} == {Status.FAILED}


# --- a store that other servers may come to own ---------------------------------------------------


@pytest.fixture
def shared(shard):
    shard.service.close()
    shard.service.term = Term("a", 1)
    shard.service.open()
    return shard


def _heartbeats(engine: Failing) -> list[str]:
    calls: list[str] = []
    engine.on_read = lambda call: calls.append(call) if call == "heartbeat" else None
    return calls


def test_an_empty_dequeue_of_a_shared_store_is_answered_by_who_has_heard_from_it_lately(
    shared, engine
):
    heartbeats = _heartbeats(engine)
    assert shared.dequeue() == []
    assert not heartbeats  # it was opened just now

    shared.clock.advance(0.6)
    assert [shared.dequeue(), shared.dequeue()] == [[], []]
    assert len(heartbeats) == 1

    shared.clock.advance(0.6)
    shared.enqueue(b"a")
    [job] = shared.dequeue()
    shared.ack([job.descriptor])
    assert shared.dequeue() == []
    assert len(heartbeats) == 1  # commits say as much


def test_a_store_of_a_single_machine_is_not_asked_before_an_empty_dequeue(shard, engine):
    heartbeats = _heartbeats(engine)
    shard.clock.advance(60)

    assert shard.dequeue() == []
    assert not heartbeats


@pytest.mark.parametrize("error", [StorageError, StorageNotCommitted])
def test_an_owner_that_was_superseded_refuses_an_empty_dequeue_and_closes_its_store(
    shared, engine, error: type[StorageError]
):
    def superseded(call: str) -> None:
        if call == "heartbeat":
            engine.lost = "another server owns it"
            raise error(engine.lost)

    def never_opens() -> None:
        raise Superseded("it is owned by b", "b", 2)

    engine.on_read, engine.on_open = superseded, never_opens
    shared.clock.advance(0.6)

    assert shared.results(DequeueRequest("mail", 1), DequeueRequest("mail", 1)) == [
        Status.REFUSED,
        Status.REFUSED,
    ]
    assert not shared.service.serving
    with pytest.raises(Superseded):
        shared.service.recover()


def test_a_dequeue_beside_a_commit_that_fails_is_not_answered_from_memory_either(shared, engine):
    shared.enqueue(b"a")

    def lose(_what: object) -> None:
        engine.lost = "another server owns it"
        raise StorageNotCommitted(engine.lost)

    engine.on_apply = engine.on_read = lose
    shared.clock.advance(0.6)

    results = shared.results(DequeueRequest("mail", 1), DequeueRequest("mail", 1))

    assert results == [Status.REFUSED, Status.REFUSED]


HOSTILE_ROWS = {
    "an integer as body": "UPDATE jobs SET body = 42 WHERE local_id = ?1",
    "a text as body": "UPDATE jobs SET body = 'text' WHERE local_id = ?1",
    "too many attempts": "UPDATE jobs SET attempts_allowed = 1 << 40 WHERE local_id = ?1",
    "attempts that are text": "UPDATE jobs SET attempts_remaining = 'x' WHERE local_id = ?1",
    "a status that is no UTF-8": "UPDATE jobs SET custom_status = CAST(x'c3' AS TEXT)"
    " WHERE local_id = ?1",
    "a negative priority": "INSERT INTO runs SELECT ?1 - ?1 + 1, 1, queue, -1, 0, at, NULL, NULL"
    " FROM runs",
    "no state": "INSERT INTO runs SELECT ?1 - ?1 + 1, 1, queue, 1, 9, at, NULL, NULL FROM runs",
    "a queue's name that is no UTF-8": "INSERT INTO queues (name, created_at)"
    " VALUES (CAST(x'1bc3' AS TEXT), ?1)",
    "a queue's name that is no text": "INSERT INTO queues (name, created_at) VALUES (x'00', ?1)",
}


@pytest.mark.parametrize("statement", HOSTILE_ROWS.values(), ids=HOSTILE_ROWS)
def test_rows_that_a_hand_has_written_are_left_alone_and_all_else_is_served(
    make_shard: MakeShard, tmp_path: Path, caplog: pytest.LogCaptureFixture, statement: str
):
    before = make_shard()
    before.create()
    first, hostile, last = before.enqueue(b"a", b"b", b"c")
    before.service.close()
    with closing(sqlite3.connect(tmp_path / f"{before.service.name}.sqlite")) as db, db:
        db.execute(statement, (int(hostile.rpartition(":")[2]),))

    shard = make_shard()

    bodies = [job.body for job in shard.dequeue()]
    assert bodies in ([b"a", b"c"], [b"a", b"b", b"c"])
    assert shard.lookup(first, hostile, last, body=True).keys() >= {first, last}
    shard.ack([first], failed=[hostile, last])
    shard.service.tick()
    assert shard.call(QueueNamesRequest()) == {"mail"}
    assert shard.count(JobState.SUCCEEDED, body_regex="a") == 1
    assert shard.enqueue(b"d")
    told = [text for text in caplog.messages if "no job has" in text or "left alone" in text]
    assert told or "custom_status" in statement  # which is served all the same
