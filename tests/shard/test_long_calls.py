"""Calls of more acks, checkpoints or releases than one commit takes go through several."""

from __future__ import annotations

import pytest

from pinlaterd.errors import InvalidRequest, ShardConnectionFailed
from pinlaterd.model import (
    AckInfo,
    AckRequest,
    CheckpointInfo,
    CheckpointRequest,
    DequeueRequest,
    Job,
    JobState,
)
from pinlaterd.shard.operations import PART_JOBS
from pinlaterd.wire.envelope import Op, Status
from tests.shard.conftest import SECONDS_TO_ANSWER, Shard

JOBS = 5 * PART_JOBS // 2


@pytest.fixture
def claimed(shard: Shard) -> list[str]:
    """The descriptors of JOBS jobs that are IN_PROGRESS, with two attempts."""
    for _ in range(5):
        shard.enqueue(*[Job(b"x")] * (PART_JOBS // 2))
    return [job.descriptor for job in shard.dequeue(JOBS)]


def acks(descriptors: list[str]) -> list[AckInfo]:
    return [AckInfo(descriptor) for descriptor in descriptors]


def test_other_calls_are_answered_between_its_commits(shard, claimed):
    long = shard.entry(AckRequest("mail", acks(claimed), ()))
    short = shard.entry(DequeueRequest("mail", 1))
    shard.submit(long)
    assert shard.turn() == []

    shard.submit(short)

    assert [reply.call_id for reply in shard.turn()] == [short.call_id]
    assert [reply.call_id for reply in shard.turn()] == [long.call_id]
    assert shard.count(JobState.SUCCEEDED) == JOBS


def test_acks_that_ride_on_a_dequeue_all_go_before_it(shard, claimed):
    request = AckRequest("mail", acks(claimed[:PART_JOBS]), acks(claimed[PART_JOBS:]))

    jobs = shard.dequeue(JOBS, acks=request)

    assert [job.descriptor for job in jobs] == claimed[PART_JOBS:]
    assert {job.attempts_remaining for job in jobs} == {1}
    assert shard.count(JobState.SUCCEEDED) == PART_JOBS


def test_what_is_wrong_with_some_is_said_once_the_others_are_done(shard, claimed):
    request = AckRequest("mail", acks(["nonsense", *claimed]), ())

    with pytest.raises(InvalidRequest, match="nonsense"):
        shard.call(request, whole=False)

    assert shard.count(JobState.SUCCEEDED) == JOBS


def test_checkpoints(shard, claimed):
    shard.call(
        CheckpointRequest("mail", [CheckpointInfo(each, move_to_pending=True) for each in claimed])
    )

    assert shard.counts()[0] == JOBS


def test_releases(shard):
    for _ in range(5):
        shard.enqueue(*[Job(b"x")] * (PART_JOBS // 2))
    [answer] = shard.replies(shard.entry(DequeueRequest("mail", JOBS)))
    assert answer.jobs == JOBS

    [reply] = shard.replies(shard.raw(answer.payload, Op.RELEASE))

    assert reply.status is Status.DONE
    assert shard.counts()[0] == JOBS


def test_its_deadline_comes_between_two_commits(shard, claimed, clock):
    """An outcome that is in part unknown to the caller, as if the shard had been too late."""
    shard.submit(shard.entry(AckRequest("mail", acks(claimed), ())))
    shard.turn()
    clock.advance(SECONDS_TO_ANSWER + 1)

    [reply] = shard.turn()

    assert isinstance(shard.decode(reply), ShardConnectionFailed)
    assert shard.count(JobState.SUCCEEDED) == PART_JOBS
