"""Claims that were asked for with a time-out of their own."""

from __future__ import annotations

import pytest

from pinlaterd.errors import InvalidRequest
from pinlaterd.model import (
    AckInfo,
    AckRequest,
    CheckpointInfo,
    CheckpointRequest,
    ClaimedJob,
    Job,
    JobState,
)

LEASE_MS = 5_000


def _pass(shard, seconds: float) -> None:
    """Let time pass, and do what is due."""
    for _ in range(round(seconds)):
        shard.clock.advance(1)
        shard.service.tick()
        shard.turn()


def _claim(shard, *jobs: Job | bytes, lease_ms: int = LEASE_MS) -> list[ClaimedJob]:
    shard.enqueue(*jobs)
    return list(shard.dequeue(claim_timeout_ms=lease_ms))


def _checkpoint(shard, *jobs: ClaimedJob, lease_ms: int | None = None) -> None:
    infos = [CheckpointInfo(job.descriptor, claim_descriptor=job.claim_descriptor) for job in jobs]
    shard.call(CheckpointRequest("mail", infos, lease_ms))


def test_a_claim_ends_with_its_lease(shard):
    job, last = _claim(shard, b"a", Job(b"b", attempts_allowed=1))
    [others] = _claim(shard, b"other", lease_ms=60_000)
    assert (job.claim_timeout_seconds, others.claim_timeout_seconds) == (5, 60)

    _pass(shard, 4)
    assert shard.state(job.descriptor) is JobState.IN_PROGRESS
    _pass(shard, 2)

    assert shard.state(last.descriptor) is JobState.FAILED
    assert shard.state(others.descriptor) is JobState.IN_PROGRESS
    [again] = shard.dequeue()
    assert (again.descriptor, again.attempts_remaining) == (job.descriptor, 1)
    counters = shard.counters()
    assert (counters["mail_timeout_retry"], counters["mail_timeout_done"]) == (1, 1)


def test_a_checkpoint_renews_for_as_long_again_or_as_it_says(shard):
    as_before, longer = _claim(shard, b"a", b"b")
    for _ in range(3):
        _pass(shard, 4)
        _checkpoint(shard, as_before)
        _checkpoint(shard, longer, lease_ms=20_000)

    _pass(shard, 6)
    assert shard.state(as_before.descriptor) is JobState.PENDING
    assert shard.state(longer.descriptor) is JobState.IN_PROGRESS
    _checkpoint(shard, longer, lease_ms=1_000)
    _pass(shard, 2)
    assert shard.state(longer.descriptor) is JobState.PENDING


def test_a_lease_ends_only_its_own_claim(shard):
    first, acked, released = _claim(shard, b"a", b"b", b"c")
    shard.call(AckRequest("mail", [AckInfo(acked.descriptor)]))
    back = CheckpointInfo(released.descriptor, move_to_pending=True, claim_descriptor=released[4])
    shard.call(CheckpointRequest("mail", [back]))
    [again] = shard.dequeue()  # as the queue says
    stale = AckInfo(first.descriptor, claim_descriptor="nobody's")
    shard.call(AckRequest("mail", [stale]))

    _pass(shard, 6)

    assert shard.state(acked.descriptor) is JobState.SUCCEEDED
    assert shard.state(again.descriptor) is JobState.IN_PROGRESS
    assert shard.state(first.descriptor) is JobState.PENDING


def test_after_a_restart_a_claim_lasts_as_its_queue_says_until_it_is_renewed(make_shard):
    shard = make_shard()
    shard.create()
    lost, renewed = _claim(shard, b"a", b"b")
    shard.service.close()
    shard.service.open()
    _checkpoint(shard, renewed, lease_ms=LEASE_MS)

    _pass(shard, 6)

    assert shard.state(lost.descriptor) is JobState.IN_PROGRESS
    assert shard.state(renewed.descriptor) is JobState.PENDING


def test_a_lease_is_no_longer_than_the_queues_time_out(shard):
    [job] = _claim(shard, b"a", lease_ms=3_600_000)

    assert job.claim_timeout_seconds == 600
    _pass(shard, 3)
    assert not shard.service._state.leases.looks


@pytest.mark.parametrize("lease_ms", [999, 0, -1])
def test_a_lease_is_a_second_at_least(shard, lease_ms):
    [job] = _claim(shard, b"a")
    with pytest.raises(InvalidRequest, match=r"claimTimeoutMillis is .* at least 1000"):
        shard.dequeue(claim_timeout_ms=lease_ms)
    with pytest.raises(InvalidRequest, match=r"claimTimeoutMillis is .* at least 1000"):
        _checkpoint(shard, job, lease_ms=lease_ms)
