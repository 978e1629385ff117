"""Dry runs, which are done in slices beside the batches, one after the other."""

from __future__ import annotations

import pytest

from pinlaterd.errors import InvalidRequest, StorageError
from pinlaterd.model import (
    AckInfo,
    AckRequest,
    DeleteQueueRequest,
    DequeueRequest,
    DequeueResult,
    Job,
    JobState,
)
from pinlaterd.shard.tasks import MOST_TASKS
from pinlaterd.wire.envelope import ReplyEntry, Status

JOBS = 700  # more than a few slices


@pytest.fixture
def bodies(shard) -> list[bytes]:
    """Of many jobs, as a dequeue hands them out."""
    made = [Job(b"%d" % number, priority=1 + number % 3) for number in range(JOBS)]
    shard.enqueue(*made)
    return [job.body for job in sorted(made, key=lambda job: job.priority)]


def dry_run(limit: int = 1000, acks: AckRequest | None = None) -> DequeueRequest:
    return DequeueRequest("mail", limit, acks, dry_run=True)


def first_slice(shard, *requests):
    """Begin these; returns their entries once the first slice of the first has been read."""
    entries = [shard.entry(request) for request in requests]
    shard.submit(*entries)
    assert shard.turn() == []
    return entries


@pytest.mark.parametrize("limit", [1, 199, 200, 201, JOBS, 1000])
def test_it_shows_what_a_dequeue_would_give_and_claims_nothing(shard, bodies, limit):
    [reply] = shard.replies(shard.entry(dry_run(limit)))

    shown = shard.decode(reply).jobs
    assert [job.body for job in shown] == bodies[:limit]
    assert reply.jobs == 0  # by which a router counts claims
    assert {job.claim_descriptor for job in shown} == {""}
    assert shard.count(JobState.PENDING) == JOBS
    assert [job.body for job in shard.dequeue(limit)] == bodies[:limit]


def test_it_ends_where_its_answer_would_be_too_large(make_shard):
    shard = make_shard(max_response_bytes=100_000)
    shard.create()
    shard.enqueue(*[b"x" * 10_000] * 30)

    assert len(shard.call(dry_run()).jobs) == len(shard.dequeue(100)) == 9


def test_it_shows_a_job_too_large_for_any_answer_alone(make_shard):
    shard = make_shard(max_response_bytes=100_000)
    shard.create()
    shard.enqueue(b"x" * 200_000, b"y")

    assert len(shard.call(dry_run()).jobs) == len(shard.dequeue(100)) == 1


def test_batches_go_on_between_its_slices(shard, bodies):
    [entry] = first_slice(shard, dry_run())

    assert shard.enqueue(b"meanwhile")

    [reply] = shard.replies(entry)
    assert [job.body for job in shard.decode(reply).jobs[:200]] == bodies[:200]


def test_those_that_wait_are_answered_one_after_the_other(shard, bodies):
    entries = first_slice(shard, *[dry_run()] * 5)

    answered: list[int] = []
    while len(answered) < 5:
        answered += [reply.call_id for reply in shard.turn()]

    assert answered == [entry.call_id for entry in entries]


def test_no_more_wait_than_can_be_done(shard, bodies):
    requests = [dry_run(1)] * (MOST_TASKS + 5)

    results = shard.results(*requests)

    refused = [result for result in results if not isinstance(result, DequeueResult)]
    assert len(refused) == 5
    assert "dry runs are in flight" in str(refused[0])


def test_one_whose_time_is_up_is_read_no_further(shard, bodies, clock):
    first, second = first_slice(shard, dry_run(), dry_run())
    clock.advance(3600)

    replies: list[ReplyEntry] = []
    while len(replies) < 2:
        replies += shard.turn()

    assert [reply.call_id for reply in replies] == [first.call_id, second.call_id]
    assert all(len(shard.decode(reply).jobs) <= 400 for reply in replies)


def test_its_acks_are_carried_out_and_what_is_wrong_with_them_is_said(shard, bodies):
    claimed = shard.dequeue(3)
    good = AckRequest("mail", [AckInfo(claimed[0].descriptor)])

    shown = shard.call(dry_run(5, good)).jobs

    assert [job.body for job in shown] == bodies[3:8]
    assert shard.state(claimed[0].descriptor) is JobState.SUCCEEDED
    for bad in (
        AckRequest("mail", [], [AckInfo(claimed[1].descriptor, retry_delay_ms=-1)]),
        AckRequest("mail", [AckInfo(claimed[2].descriptor)], [AckInfo("nonsense")]),
    ):
        with pytest.raises(InvalidRequest):
            shard.call(dry_run(5, bad), whole=False)
    assert shard.state(claimed[2].descriptor) is JobState.SUCCEEDED


def test_a_queue_that_is_deleted_meanwhile_ends_it(shard, bodies):
    [entry] = first_slice(shard, dry_run())
    delete = shard.entry(DeleteQueueRequest("mail", "secret"))
    shard.submit(delete)

    replies: dict[int, ReplyEntry] = {}
    while len(replies) < 2:
        replies.update({reply.call_id: reply for reply in shard.turn()})

    assert len(shard.decode(replies[entry.call_id]).jobs) == 200


def test_a_store_that_breaks_meanwhile_is_told(shard, bodies, monkeypatch):
    [entry] = first_slice(shard, dry_run())

    def gone(*_arguments: object, **_options: object) -> None:
        raise StorageError("the disk is gone")

    monkeypatch.setattr(shard.engine, "payloads", gone)
    [reply] = shard.turn()
    monkeypatch.undo()

    assert reply.call_id == entry.call_id
    assert [job.body for job in shard.decode(reply).jobs] == bodies[:200]
    shard.service.recover()
    assert len(shard.call(dry_run()).jobs) == JOBS


def test_a_shard_that_stops_leaves_them_to_its_successor(shard, bodies):
    first_slice(shard, dry_run(), dry_run())

    shard.service.close()

    assert shard.service.replies.take() == {}


def test_a_shard_that_stops_answers_one_whose_acks_were_carried_out(shard, bodies):
    [job] = shard.dequeue(1)
    acks = AckRequest("mail", [AckInfo(job.descriptor)])
    [entry] = first_slice(shard, dry_run(acks=acks))

    shard.service.close()

    [reply] = shard.service.replies.take()[b"router"]
    assert reply.call_id == entry.call_id
    assert reply.status is Status.FAILED
