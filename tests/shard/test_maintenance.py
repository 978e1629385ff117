"""What a shard does to its jobs of its own accord."""

from __future__ import annotations

import sqlite3
from datetime import UTC, datetime

from pinlaterd.config.schema import (
    JOB_TYPE_TIMEOUT_SECONDS,
    Config,
    JobType,
    ServerSettings,
    ShardSettings,
    default_queue_settings,
)
from pinlaterd.model import Job, JobOptions, JobState
from pinlaterd.wire.control import GrantedPermits, PermitGrant
from tests.shard.conftest import SHARD

INTERVAL = 10.0
REREAD_SECONDS = 60.0


def maintain(shard) -> None:
    """A whole round, and what it leads to."""
    shard.clock.advance(INTERVAL)
    shard.turn()
    while shard.service.busy:
        shard.turn()


def test_ended_jobs_are_deleted_when_their_time_has_come(shard):
    done, failed = shard.enqueue(Job(b"a"), Job(b"b", attempts_allowed=1))
    shard.dequeue()
    shard.ack([done], [failed])

    shard.clock.advance(24 * 3600)
    maintain(shard)
    assert (shard.state(done), shard.state(failed)) == (None, JobState.FAILED)
    shard.clock.advance(6 * 24 * 3600)
    maintain(shard)

    assert shard.state(failed) is None
    counters = shard.counters()
    assert (counters["mail_succeeded_gc"], counters["mail_failed_gc"]) == (1, 1)


def test_a_round_is_done_in_slices_and_calls_go_on_between_them(make_shard):
    shard = make_shard(monitor_batch_size=100)
    shard.create()
    shard.enqueue(*[b"a"] * 1_000)
    shard.dequeue(1_000)
    shard.clock.advance(700)

    shard.turn()
    shard.turn()
    retried = shard.counters()["mail_timeout_retry"]
    assert 0 < retried < 1_000
    assert len(shard.dequeue(10)) == 10
    maintain(shard)

    assert shard.counters()["mail_timeout_retry"] == 1_000


def test_a_claim_that_bears_a_time_to_come_has_its_whole_time_out(make_shard, clock):
    shard = make_shard()
    shard.create()
    [job] = shard.enqueue(b"a")
    now_ms = clock.now_ms()
    clock.resume(now_ms + 3_600_000)
    shard.dequeue()
    shard.service.close()
    clock.resume(now_ms)  # set back

    successor = make_shard()
    for seconds, state in ((500, JobState.IN_PROGRESS), (100, JobState.PENDING)):
        clock.advance(seconds)
        maintain(successor)
        assert successor.state(job) is state


def _make_job_type(shard, *, attempts: int) -> None:
    """Let the queue be a job type's, of which one job may be in progress."""
    at = datetime(2026, 1, 1, tzinfo=UTC)
    made = JobType("mail", "mail", at, "at_least_once", attempts=attempts)
    shards = {shard.service.name: ShardSettings(shard.service.name)}
    queues = {"mail": default_queue_settings(ServerSettings(), made)}
    shard.service.follow(Config(shards=shards, queues=queues, job_types={"mail": made}))
    one = {"mail": GrantedPermits(1, 1, contested=False)}
    name, incarnation = shard.service.name, shard.service.incarnation
    shard.service.grant(PermitGrant(name, incarnation, JobState.IN_PROGRESS, one))


def test_after_a_lease_the_next_attempt_of_a_job_type_waits(shard):
    _make_job_type(shard, attempts=4)
    shard.enqueue(Job(b"a", attempts_allowed=3))
    assert len(shard.dequeue(claim_timeout_ms=5_000)) == 1
    for _ in range(6):
        shard.clock.advance(1)
        shard.service.tick()
    assert shard.counters()["mail_timeout_retry"] == 1

    shard.clock.advance(2.5)  # of 4 s, by the attempts of the type, and 2 that are left
    at_once = shard.dequeue()
    shard.clock.advance(1)

    assert at_once == []
    assert [job.attempts_remaining for job in shard.dequeue()] == [2]


def test_after_a_time_out_the_next_attempt_of_a_job_type_waits(shard):
    _make_job_type(shard, attempts=3)
    shard.enqueue(Job(b"a", attempts_allowed=3))
    assert len(shard.dequeue()) == 1
    shard.clock.advance(JOB_TYPE_TIMEOUT_SECONDS - INTERVAL + 0.1)
    maintain(shard)

    at_once = shard.dequeue()
    shard.clock.advance(2)

    assert at_once == []
    assert [job.body for job in shard.dequeue()] == [b"a"]


def test_jobs_that_come_back_are_told_to_routers(shard):
    shard.enqueue(b"a")
    shard.dequeue()
    shard.service.take_counts()

    shard.clock.advance(600)
    maintain(shard)

    assert list(shard.service.take_counts()) == [("mail", (1, 0, 0))]


def test_an_idle_shard_sleeps_until_something_is_due(shard):
    maintain(shard)
    assert 0 < shard.service.idle_seconds() <= INTERVAL
    shard.enqueue(Job(b"a", run_after_ms=shard.clock.now_ms() + 2_000))
    assert 0 < shard.service.idle_seconds() <= 2.0

    shard.clock.advance(2.0)
    shard.turn()

    assert list(shard.service.take_counts()) == [("mail", (1, 0, 0))]
    assert shard.service.idle_seconds() > 0


def test_a_gauge_that_is_wrong_after_a_stray_insert_rights_itself(shard, tmp_path, wait_until):
    def gauge() -> float:
        shard.service.tick()
        return float(shard.stats.snapshot()["gauges"]["mail_pending"])

    shard.enqueue(b"a")
    [descriptor] = shard.enqueue(b"b")
    local_id = descriptor.rpartition(":")[2]
    with sqlite3.connect(tmp_path / f"{SHARD}.sqlite") as foreign:
        foreign.execute("DELETE FROM jobs WHERE local_id = ?", (local_id,))
        foreign.execute("DELETE FROM runs WHERE first_id = ?", (local_id,))
    assert gauge() == 2

    shard.clock.advance(REREAD_SECONDS)
    maintain(shard)

    wait_until(lambda: gauge() == 1)


def test_expired_jobs_leave_the_ready_index(shard):
    soon_ms = shard.clock.now_ms() + 5_000
    jobs = [Job(b"%d" % n, options=JobOptions(expires_at_ms=soon_ms)) for n in range(3)]
    expired = shard.enqueue(*jobs)
    [stays] = shard.enqueue(b"stays")
    assert sum(shard.counts()) == 4

    maintain(shard)

    assert sum(shard.counts()) == 1
    assert [job.descriptor for job in shard.dequeue()] == [stays]
    assert {shard.state(job) for job in expired} == {JobState.FAILED}
    assert shard.counters()["mail_expired"] == 3
    assert "mail_claim_mismatch" not in shard.counters()


def test_a_dequeue_passes_over_expired_jobs(shard):
    soon_ms = shard.clock.now_ms() + 1
    expired = shard.enqueue(*[Job(b"x", options=JobOptions(expires_at_ms=soon_ms))] * 3)
    [stays] = shard.enqueue(b"stays")
    shard.clock.advance(1)

    assert [job.descriptor for job in shard.dequeue(1)] == [stays]

    assert {shard.state(job) for job in expired} == {JobState.FAILED}
    assert shard.counters()["mail_expired"] == 3
    assert shard.count(JobState.FAILED) == 3
