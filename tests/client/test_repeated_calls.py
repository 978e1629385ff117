"""Operations that take several calls: retries and deletes of more jobs than the server's time for
one allows, and enqueues that were stored in part."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import cast

import pytest

from pinlaterd.client import EnqueuedInPart, JobState, calls
from pinlaterd.engines.base import AckOp, Acks, Batch, ClaimOp, Claims, EnqueueOp
from pinlaterd.engines.sqlite.engine import SqliteEngine
from pinlaterd.errors import (
    ConnectionFailed,
    EnqueueRejected,
    NoHealthyShards,
    OutcomeUnknown,
    PinLaterError,
)
from pinlaterd.model import EnqueueRequest, Job, Result, RetryFailedRequest
from pinlaterd.rpc.codec import Call
from tests.client.either_client import BlockingAsyncClient
from tests.client.scripted_server import BreakOff
from tests.deployment import PATIENT, Deployment

# A process may stand still for most of the second half.
REQUEST_TIMEOUT_MS = 3000
AT_ONCE = 10_000
FAILED_JOBS = 50_000
PENDING_JOBS = 101_000  # more than are looked for at a time
LIMIT = 100_500


@pytest.mark.parametrize(
    ("answers", "done"),
    [
        pytest.param([(1000, 0.9)], 1000, id="the limit is reached"),
        pytest.param([(400, 0.04)], 400, id="so short a call has left nothing"),
        pytest.param([(400, 0.9), (0, 0.9)], 400, id="nothing is left"),
        pytest.param([(400, 0.9), (400, 0.8), (100, 0.4)], 900, id="the last one is shorter"),
        pytest.param([(400, 0.9), (600, 0.8)], 1000, id="the rest of the limit"),
    ],
)
def test_calls_end_with_the_limit_or_with_one_that_left_nothing(
    answers: list[tuple[int, float]], done: int
):
    """Each answer: how many jobs were changed, and in how many seconds."""
    now = 0.0
    limits: list[int] = []

    async def run(call: calls.PreparedCall[int]) -> int:
        nonlocal now
        jobs, seconds = answers[len(limits)]
        limits.append(cast("RetryFailedRequest", call.request).limit)
        now += seconds
        return jobs

    prepared = calls.retry_failed("mail", limit=1000)
    assert asyncio.run(calls.change_all(run, prepared, lambda: now)) == done
    assert limits == [1000 - sum(jobs for jobs, _ in answers[:n]) for n in range(len(answers))]


@pytest.mark.parametrize("done", [0, 400])
def test_a_call_that_was_cut_short_says_what_was_done(done: int):
    """A ConnectionFailed would say that nothing was."""
    answers = iter([done] if done else [])

    async def run(_: calls.PreparedCall[int]) -> int:
        for answer in answers:
            return answer
        raise ConnectionFailed("no route")

    with pytest.raises(ConnectionFailed, match="no route") as raised:
        asyncio.run(calls.change_all(run, calls.retry_failed("mail"), iter([0, 9, 9]).__next__))

    assert isinstance(raised.value, OutcomeUnknown) is (done > 0)
    assert ("400 jobs were changed, and the rest was not" in str(raised.value)) is (done > 0)


@pytest.mark.parametrize("operation", ["retry_failed", "delete_jobs"])
def test_each_client_asks_for_the_rest(server, connect, operation: str):
    def reply(_: Call) -> Result:
        time.sleep(0.1)  # as if its time were used up
        return 400

    server.reply = reply
    arguments = [JobState.FAILED] if operation == "delete_jobs" else []
    with connect(port=server.port) as client:
        assert getattr(client, operation)("mail", *arguments, limit=800) == 800
    assert [call.request.limit for call in server.calls] == [800, 400]


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Its file has jobs before it starts."""
    deployment = Deployment(tmp_path_factory.mktemp("d"))
    deployment.init(shards=1, settings={**PATIENT, "request_timeout_ms": REQUEST_TIMEOUT_MS})
    engine = SqliteEngine(deployment.folder / "data/shard-1.sqlite")
    engine.open(now_ms := round(time.time() * 1000))
    for queue in ("pending", "failed"):
        engine.create_queue(queue, now_ms)
    for jobs in parts_of(PENDING_JOBS):
        engine.apply(Batch(enqueues=[EnqueueOp("pending", [Job(b"")] * jobs)]), now_ms)
    for jobs in parts_of(FAILED_JOBS):
        fail(engine, [Job(b"", attempts_allowed=1)] * jobs, now_ms)
    engine.close()
    with deployment.running():
        yield deployment


def parts_of(jobs: int) -> list[int]:
    return [min(AT_ONCE, jobs - at) for at in range(0, jobs, AT_ONCE)]


def fail(engine: SqliteEngine, jobs: list[Job], now_ms: int) -> None:
    [ids] = engine.apply(Batch(enqueues=[EnqueueOp("failed", jobs)]), now_ms).enqueues
    claims = Claims(1, ids, [None] * len(ids), "test:", 1)
    engine.apply(Batch(claims=[ClaimOp("failed", [claims])]), now_ms)
    engine.apply(Batch(acks=[AckOp("failed", [], [Acks(1, ids)])]), now_ms)


@pytest.mark.service
def test_more_failed_jobs_than_one_call_has_time_for(deployment: Deployment):
    with deployment.client() as client:
        assert client.retry_failed("failed", limit=10**6) == FAILED_JOBS
        assert client.retry_failed("failed") == 0


@pytest.mark.service
def test_a_limit_beyond_what_one_call_has_time_for_is_kept_to(deployment: Deployment):
    with BlockingAsyncClient(port=deployment.port) as client:
        assert client.delete_jobs("pending", JobState.PENDING, limit=LIMIT) == LIMIT
        left = client.dequeue("pending", limit=1_000, dry_run=True, max_wait_ms=30_000)
        assert len(left) == PENDING_JOBS - LIMIT


# --- an enqueue that was stored in part: what certainly is not stored is sent once more ----

BODIES = [b"stored", b"not", b"neither"]


def bodies(call: Call) -> list[bytes]:
    return [job.body for job in cast("EnqueueRequest", call.request).jobs]


def test_the_rest_is_stored_at_the_second_time(server, connect):
    in_part = EnqueuedInPart(["q:s1:p1:1", "", ""], "shard 2: the store is full")
    answers = iter([in_part, ["q:s1:p1:2", "q:s1:p1:3"]])
    server.reply = lambda _: next(answers)
    with connect(port=server.port) as client:
        assert client.enqueue("q", BODIES) == ["q:s1:p1:1", "q:s1:p1:2", "q:s1:p1:3"]
    assert [bodies(call) for call in server.calls] == [BODIES, BODIES[1:]]


@pytest.mark.parametrize(
    ("again", "found"),
    [
        (EnqueueRejected("overloaded: full"), ["q:s1:p1:1", "", ""]),
        (EnqueuedInPart(["", "q:s1:p1:3"], "full"), ["q:s1:p1:1", "", "q:s1:p1:3"]),
        (NoHealthyShards(), ["q:s1:p1:1", "", ""]),
        (PinLaterError("internal error; the server's log says more"), ["q:s1:p1:1", "?", "?"]),
        (BreakOff(), ["q:s1:p1:1", "?", "?"]),
    ],
)
def test_what_became_of_each_job_is_told(server, connect, again, found):
    answers = iter([EnqueuedInPart(["q:s1:p1:1", "", ""], "full"), again])
    server.reply = lambda _: next(answers)
    with connect(port=server.port) as client, pytest.raises(EnqueuedInPart) as caught:
        client.enqueue("q", BODIES)
    assert caught.value.descriptors == found


def test_jobs_that_may_be_stored_are_not_sent_again(server, connect):
    why = "shard 2: did not answer in time"
    server.reply = lambda _: EnqueuedInPart(["q:s1:p1:1", "?", "?"], why)
    with connect(port=server.port) as client, pytest.raises(EnqueuedInPart, match="2 may be"):
        client.enqueue("q", BODIES)
    assert len(server.calls) == 1
