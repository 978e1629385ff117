"""Somebody else writes to a shard's keys, such as a PinLater server that still runs: no job is
handed out twice, and none is forgotten."""

from __future__ import annotations

import pytest
import redis

from pinlaterd.model import JobState
from tests.conformance.engine.engines import EngineMaker
from tests.conformance.engine.harness import QUEUE
from tests.shard.conftest import MakeShard, Shard, make_shard

__all__ = ["make_shard"]

# A round of upkeep comes every ten seconds, and reads every queue anew once a minute.
REREAD_SECONDS = 70


@pytest.fixture
def service(make_shard: MakeShard, make: EngineMaker) -> Shard:
    """A shard with one queue."""
    made = make_shard(engine=make())
    made.create(QUEUE)
    return made


def test_a_job_that_a_stranger_adds_is_found_now_and_then(
    service: Shard, stranger: redis.Redis, shard: str
):
    assert service.dequeue() == []
    number = stranger.incr(f"plj_{shard}_{QUEUE}")
    stranger.hset(f"plh_{shard}_{QUEUE}.{number}", mapping={"bd": b"theirs", "al": 2, "ar": 2})
    stranger.zadd(f"plq_{shard}_{QUEUE}.p1_s0", {str(number): 1_421_450_000.123})

    service.clock.advance(REREAD_SECONDS)
    service.turn()
    while service.service.busy:
        service.turn()

    assert service.counts() == (1, 0, 0)
    assert [job.body for job in service.dequeue()] == [b"theirs"]


def test_a_job_that_a_stranger_claims_is_counted_and_not_handed_out(
    service: Shard, stranger: redis.Redis, shard: str
):
    theirs, ours = service.enqueue(b"theirs", b"ours")
    number = theirs.rpartition(":")[2]
    stranger.zrem(f"plq_{shard}_{QUEUE}.p1_s0", number)
    stranger.zadd(f"plq_{shard}_{QUEUE}.p1_s1", {number: service.clock.now_ms() / 1000})

    assert [job.descriptor for job in service.dequeue()] == [ours]

    assert service.counters()[f"{QUEUE}_claim_mismatch"] == 1
    assert service.state(theirs) is JobState.IN_PROGRESS
