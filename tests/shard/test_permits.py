"""Permits of a shard: what it claims of a queue with `max_in_progress`, and what it reports."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from pinlaterd.config.schema import Config, ShardSettings
from pinlaterd.model import DequeueRequest, JobState
from pinlaterd.wire.control import GrantedPermits, HeldPermits, PermitGrant
from tests.shard.conftest import MakeShard, Shard

LIMITED = {"mail": {"max_in_progress": 3}}


class LimitedShard:
    """A shard and what it reported last; it plays the coordinator."""

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self._number = 0
        self.grant(0)

    def grant(self, permits: int, *, contested: bool = False) -> None:
        self._number += 1
        granted = {"mail": GrantedPermits(self._number, permits, contested)}
        self.shard.service.grant(self.granted(granted))

    def granted(self, queues: Mapping[str, GrantedPermits]) -> PermitGrant:
        service = self.shard.service
        return PermitGrant(service.name, service.incarnation, JobState.IN_PROGRESS, queues)

    def told(self) -> tuple[int, int, int]:
        """The permits, the jobs that use them and those that are ready, as reported now."""
        self.shard.service.take_counts()
        self.shard.clock.advance(0.1)
        reports = self.shard.service.permit_reports()
        found = reports[0].queues.get("mail") if reports else None
        self._last: HeldPermits = found or self._last
        return self._last[1:]

    def published(self) -> tuple[int, ...]:
        """Ready jobs, as routers learn them unasked; () if nothing is to be told."""
        found = {counts.queue: counts.counts for counts in self.shard.service.take_counts()}
        return found.get("mail", ())


@pytest.fixture
def limited(make_shard: MakeShard) -> LimitedShard:
    shard = make_shard(queues=LIMITED)
    shard.create()
    return LimitedShard(shard)


def test_no_more_are_claimed_than_permits_allow(limited):
    shard = limited.shard
    shard.enqueue(*[b"job"] * 10)

    assert shard.dequeue(10) == []
    limited.grant(3)
    assert len(shard.dequeue(2)) == 2
    assert len(shard.dequeue(10)) == 1
    assert shard.dequeue(10) == []
    assert shard.count(JobState.IN_PROGRESS) == 3


def test_dequeues_of_one_batch_share_the_permits(limited):
    limited.shard.enqueue(*[b"job"] * 10)
    limited.grant(3)

    results = limited.shard.results(*[DequeueRequest("mail", 2)] * 3)

    assert sorted(len(result.jobs) for result in results) == [0, 1, 2]


def test_routers_learn_of_as_many_jobs_as_may_be_claimed(limited):
    shard = limited.shard
    shard.enqueue(*[b"job"] * 10)
    assert limited.published() == (0, 0, 0)

    limited.grant(2)
    assert limited.published() == (2, 0, 0)
    first, _ = shard.dequeue(2)
    assert limited.published() == (0, 0, 0)
    shard.ack([first.descriptor])
    assert limited.published() == (1, 0, 0)


def test_a_claim_that_times_out_frees_its_permit(limited):
    shard = limited.shard
    limited.grant(1)
    shard.enqueue(b"a", b"b")
    shard.dequeue()
    limited.published()

    shard.clock.advance(3600)
    shard.turn()

    assert limited.published() == (1, 0, 0)


def test_permits_that_are_cut_below_what_runs_let_nothing_new_begin(limited):
    shard = limited.shard
    limited.grant(3)
    shard.enqueue(*[b"job"] * 10)
    jobs = shard.dequeue(3)

    limited.grant(1)
    assert limited.told() == (1, 3, 7)
    shard.ack([job.descriptor for job in jobs[:2]])
    assert shard.dequeue() == []
    assert limited.told() == (1, 1, 7)
    shard.ack([jobs[2].descriptor])
    assert len(shard.dequeue()) == 1


def test_permits_that_others_wait_for_are_handed_back_once_nothing_needs_them(limited):
    shard = limited.shard
    limited.grant(3, contested=True)
    shard.enqueue(b"a", b"b")
    assert limited.told() == (2, 0, 2)

    jobs = shard.dequeue()
    shard.ack([jobs[0].descriptor])

    assert limited.told() == (1, 1, 0)
    shard.enqueue(b"c")
    assert shard.dequeue() == []


def test_an_owner_begins_without_permits_and_follows_no_grant_of_before(limited):
    shard = limited.shard
    limited.grant(3)
    shard.enqueue(*[b"job"] * 10)
    shard.dequeue(2)
    before = limited.granted({"mail": GrantedPermits(99, 9, contested=False)})
    shard.service.close()
    shard.service.open()

    assert shard.dequeue() == []
    assert limited.told() == (0, 2, 8)
    older = limited.granted({"mail": GrantedPermits(1, 9, contested=False)})
    for late in (before, older):
        shard.service.grant(late)
    assert shard.dequeue() == []


def test_a_queue_whose_limit_is_removed_has_all_its_jobs_again(limited):
    shard = limited.shard
    shard.enqueue(*[b"job"] * 10)
    limited.published()

    shard.service.follow(Config(shards={shard.service.name: ShardSettings(shard.service.name)}))

    assert limited.published() == (10, 0, 0)
    assert len(shard.dequeue(10)) == 10
