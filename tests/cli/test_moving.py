"""A move of a shard's jobs, and queues that go away meanwhile."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import cast

import pytest

from pinlaterd.cli.drain import Enqueued, Kept, Move, ShardCalls
from pinlaterd.errors import PinLaterError, QueueNotFound
from pinlaterd.model import AckInfo, Job, JobRecord, JobState, Method
from pinlaterd.rpc import codec
from pinlaterd.rpc.codec import Head
from pinlaterd.wire.envelope import ReplyEntry, Status
from pinlaterd.wire.shard_caller import ShardCaller

SOURCE = "pinlater-admin drain"
NOW_MS = round(time.time() * 1000)


@pytest.fixture(autouse=True)
def now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop the clock, so that what is due in seconds stays so however late the test runs."""
    monkeypatch.setattr(time, "time", lambda: NOW_MS / 1000)


class Source:
    """A shard with jobs in queue a; with `deleted`, that queue has gone meanwhile."""

    def __init__(self, *jobs: JobRecord, deleted: bool = False) -> None:
        self.jobs = {job.descriptor: job for job in jobs}
        self.deleted = deleted
        self.visited: list[str] = []
        self.acked: list[AckInfo] = []

    def queues(self) -> Sequence[str]:
        return ["a", "b"]

    def scan(self, queue: str, state: JobState, *, future: bool) -> Iterator[JobRecord]:
        if queue == "a" and self.deleted:
            raise QueueNotFound(queue)
        self.visited.append(queue)
        for job in self.jobs.values():
            is_future = job.run_after_ms > time.time() * 1000
            if queue == "a" and job.state is state and is_future is future:
                yield job

    def look_up(self, descriptors: Sequence[str]) -> dict[str, JobRecord]:
        return {descriptor: self.jobs[descriptor] for descriptor in descriptors}

    def ack_scheduled(self, _queue: str, acks: Sequence[AckInfo]) -> None:
        self.acked += acks


class Taker:
    """A shard that answers each enqueue by the next of `answers`, then stores what it gets."""

    def __init__(self, source: Source, *answers: Enqueued) -> None:
        self.source = source
        self.answers = list(answers)
        self.stored: list[Job] = []

    name = "2"

    def enqueue(self, _queue: str, jobs: Sequence[Job], _placement: int = 0) -> Enqueued:
        acked = {ack.descriptor.encode() for ack in self.source.acked}
        assert not {job.body for job in jobs} & acked
        if self.answers:
            return self.answers.pop(0)
        self.stored += jobs
        return Enqueued([f"a:s2:p1:{len(self.stored) + n}" for n in range(len(jobs))])


def scheduled(number: int, *, seconds: float = 3600, attempts: int = 2) -> JobRecord:
    descriptor, run_after_ms = f"a:s1:p1:{number}", NOW_MS + round(seconds * 1000)
    body = descriptor.encode()
    return JobRecord(
        descriptor, JobState.PENDING, 2, attempts, "so far", 0, run_after_ms, 0, None, body
    )


def claimed(number: int, source: str, *, seconds: float = 3600) -> JobRecord:
    return scheduled(number, seconds=seconds)._replace(
        state=JobState.IN_PROGRESS, claim_descriptor=f"host:9010:1:{source}:7"
    )


def moved(source: Source, *takers: Taker) -> list[Kept]:
    move = Move(
        cast("ShardCalls", source), lambda: cast("list[ShardCalls]", takers), lambda _: None
    )
    move.run()
    return move.kept


def test_a_queue_that_is_deleted_meanwhile_does_not_stop_it():
    source = Source(deleted=True)

    moved(source)

    assert set(source.visited) == {"b"}


def test_jobs_are_stored_elsewhere_before_they_are_acked_and_what_is_due_soon_stays():
    source = Source(scheduled(1), scheduled(2, attempts=1), scheduled(3, seconds=5))
    taker = Taker(source)

    assert moved(source, taker) == []

    assert [job.custom_status for job in taker.stored] == [
        "moved from a:s1:p1:1; so far",
        "moved from a:s1:p1:2 (1 of 2 attempts left); so far",
    ]
    assert [job.attempts_allowed for job in taker.stored] == [2, 1]
    assert [ack.descriptor for ack in source.acked] == ["a:s1:p1:1", "a:s1:p1:2"]
    assert all(ack.append_custom_status.startswith("moved to a:s2:p1:") for ack in source.acked)


def test_jobs_that_an_earlier_move_has_claimed_are_ended_and_not_copied():
    later, due = claimed(1, SOURCE), claimed(2, SOURCE, seconds=-60)
    source = Source(later, due, claimed(3, "worker"))
    taker = Taker(source)

    assert moved(source, taker) == []

    assert source.acked == [AckInfo(job.descriptor, "moved") for job in (later, due)]
    assert taker.stored == []


def test_what_has_come_due_while_it_was_copied_is_not_acked(monkeypatch):
    source = Source(scheduled(1, seconds=15), scheduled(2))
    taker = Taker(source)
    enqueue = taker.enqueue

    def slow(queue: str, jobs: Sequence[Job], _placement: int) -> Enqueued:
        monkeypatch.setattr(time, "time", lambda: NOW_MS / 1000 + 20)
        return enqueue(queue, jobs)

    monkeypatch.setattr(taker, "enqueue", slow)

    moved(source, taker)

    assert [ack.descriptor for ack in source.acked] == ["a:s1:p1:2"]


def test_an_enqueue_of_unknown_outcome_is_made_again():
    source = Source(scheduled(1))
    taker = Taker(source, Enqueued())

    assert moved(source, taker) == []

    assert len(taker.stored) == len(source.acked) == 1


def test_a_job_that_no_other_shard_takes_stays_and_is_named():
    source = Source(scheduled(1))
    taker = Taker(source, *[Enqueued(reason="the body is too large")] * 3)

    assert moved(source, taker) == [Kept("a:s1:p1:1", "the body is too large")]

    assert (source.acked, taker.stored) == ([], [])


class Caller:
    """Answers each call with the next of `replies`."""

    name = "1"

    def __init__(self, *replies: ReplyEntry) -> None:
        self.replies = list(replies)

    def call(self, *_: object, **__: object) -> ReplyEntry:
        return self.replies.pop(0)


NAMES = Head(Method.QUEUE_NAMES.value, 0, oneway=False, strict=True)


def failed(error: PinLaterError) -> ReplyEntry:
    return ReplyEntry(0, Status.FAILED, codec.encode_error(NAMES, error))


def test_what_a_store_refuses_for_a_while_is_asked_again():
    locked = failed(PinLaterError("the search failed: locked"))
    answer = ReplyEntry(0, Status.DONE, codec.encode_reply(NAMES, frozenset(["a"])))

    shard = ShardCalls(cast("ShardCaller", Caller(locked, locked, answer)))

    assert shard.queues() == ["a"]


def test_what_is_refused_for_good_is_not_asked_again():
    shard = ShardCalls(cast("ShardCaller", Caller(failed(QueueNotFound("a")))))

    with pytest.raises(QueueNotFound):
        shard.queues()
