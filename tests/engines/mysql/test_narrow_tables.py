"""What does not fit into tables that PinLater made: found before the batch, by the whole shard."""

from __future__ import annotations

from typing import Any

import pytest

from pinlaterd.errors import EnqueueRejected, InvalidRequest
from pinlaterd.model import (
    AckInfo,
    AckRequest,
    CheckpointInfo,
    CheckpointRequest,
    DequeueRequest,
    EnqueueRequest,
    Job,
    JobState,
    RetryFailedRequest,
)
from tests.clocks import FakeClock
from tests.engines.mysql.conftest import NewEngine
from tests.servers.pinlater import make_tables
from tests.shard.conftest import MakeShard, Shard

SECOND = 1000
MOST_BODY = 65_535
LATEST_MS = (2**31 - 1) * SECOND
WIDE_QUEUE = "wide"


@pytest.fixture
def old(
    stranger: Any, shard: str, make_shard: MakeShard, new_engine: NewEngine, clock: FakeClock
) -> Shard:
    """A shard of which the queue `mail` is PinLater's, and the queue `wide` is ours."""
    make_tables(stranger, shard, "mail")
    made = make_shard(shard, new_engine())
    made.create(WIDE_QUEUE)
    clock.advance(1 - clock.now_ms() % SECOND / SECOND)
    return made


def commits(shard: Shard) -> int:
    return shard.stats.snapshot()["histograms"]["shard_commit_ms"].count


@pytest.mark.parametrize(
    ("job", "problem"),
    [
        (Job(b"x" * (MOST_BODY + 1)), r"jobs\[1\]\.body has 65536 bytes; .* holds 65535"),
        (Job(b"x", run_after_ms=LATEST_MS + 1), rf"jobs\[1\].* holds times up to {LATEST_MS}"),
        (Job(b"x", 2, LATEST_MS + SECOND), rf"jobs\[1\].*priority 2 .* up to {LATEST_MS}"),
    ],
)
def test_a_job_that_its_table_cannot_hold_fails_its_call_alone(old: Shard, job: Job, problem: str):
    old.enqueue(b"ready")
    before = commits(old)

    fine, rejected, wide, dequeued = old.results(
        EnqueueRequest("mail", [Job(b"x" * MOST_BODY, 1, LATEST_MS)]),
        EnqueueRequest("mail", [Job(b"fits"), job]),
        EnqueueRequest(WIDE_QUEUE, [job]),
        DequeueRequest("mail", 10),
    )

    assert isinstance(rejected, EnqueueRejected)
    with pytest.raises(EnqueueRejected, match=problem):
        raise rejected
    assert len(fine) == len(wide) == 1
    assert [claimed.body for claimed in dequeued.jobs] == [b"ready"]
    assert commits(old) == before + 1
    assert old.counts() == (0, 0, 0)
    assert old.lookup(*fine, body=True)[fine[0]].body == b"x" * MOST_BODY


def test_what_a_checkpoint_brings_has_to_fit_too(old: Shard):
    descriptors = old.enqueue(b"a", b"b", b"c")
    old.dequeue()
    large, late, fine = descriptors

    [result] = old.results(
        CheckpointRequest(
            "mail",
            [
                CheckpointInfo(large, new_body=b"x" * (MOST_BODY + 1)),
                CheckpointInfo(late, run_after_ms=LATEST_MS + 1),
                CheckpointInfo(fine, new_body=b"x" * MOST_BODY, run_after_ms=LATEST_MS),
            ],
        ),
        source="web:h1",
    )

    assert isinstance(result, InvalidRequest)
    assert f"at most {MOST_BODY} are kept" in result.message
    found = old.lookup(*descriptors, body=True)
    assert [found[name].body for name in descriptors] == [b"a", b"b", b"x" * MOST_BODY]
    assert found[fine].run_after_ms == LATEST_MS


def test_retries_later_than_the_table_holds_are_refused(old: Shard):
    first, second = old.enqueue(b"a", b"b")
    old.dequeue()
    most_ms = LATEST_MS - old.clock.now_ms()

    [result] = old.results(
        AckRequest("mail", (), [AckInfo(first, "", most_ms + 1), AckInfo(second, "", most_ms)])
    )
    assert isinstance(result, InvalidRequest)
    assert first in result.message
    assert old.state(first) is JobState.IN_PROGRESS
    assert old.lookup(second)[second].run_after_ms == LATEST_MS

    [result] = old.results(RetryFailedRequest("mail", run_after_ms=LATEST_MS + 1))
    assert isinstance(result, InvalidRequest)


def test_jobs_of_one_second_go_in_the_order_that_a_restart_would_read(old: Shard):
    now_ms = old.clock.now_ms()
    late = old.enqueue(Job(b"late", run_after_ms=now_ms + 900))
    old.clock.advance(0.5)
    early = old.enqueue(Job(b"early", run_after_ms=now_ms + 100), b"now")
    future = old.enqueue(Job(b"future", run_after_ms=now_ms + 2 * SECOND + 1))
    old.clock.advance(1.6)  # of its second, the future one's, too

    [claimed] = old.dequeue(1)
    old.service.close()
    old.service.open()

    rest = [job.descriptor for job in old.dequeue(10)]
    assert [claimed.descriptor, *rest] == [*late, *early, *future]
    assert {job.run_after_ms for job in old.lookup(*late, *early).values()} == {now_ms}
