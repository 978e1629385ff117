"""The Worker on a real service: every job ends as its handler said, and stopping loses nothing."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from pinlaterd.client import (
    AckInfo,
    CheckpointInfo,
    ClaimLost,
    Client,
    Discard,
    Ending,
    Handlers,
    Job,
    JobRecord,
    JobState,
    Later,
    Outcome,
    Retry,
    RunningJob,
    Worker,
    constant,
    never,
)
from pinlaterd.client.retries import RetryRule
from pinlaterd.errors import QueueNotFound
from tests.shared_service import SHORT_CLAIM_SECONDS, SHORT_CLAIMS_QUEUE

AT_ONCE = constant(0)
Handler = Callable[[RunningJob], object | Awaitable[object]]


def new_worker(
    client: Client, queue: str, handler: Handler, *, retry: RetryRule = AT_ONCE, **options: Any
) -> Worker:
    handlers = Handlers()
    handlers.queue(queue, retry=retry)(handler)
    return Worker(client, handlers, **options)


@contextmanager
def running(worker: Worker) -> Iterator[threading.Thread]:
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        yield thread
    finally:
        worker.stop()
        thread.join(30)
    assert not thread.is_alive()


def states(client: Client, descriptors: list[str]) -> set[JobState]:
    return {record.state for record in client.lookup(descriptors).values()}


def work_until_ended(
    client: Client,
    queue: str,
    handler: Handler,
    jobs: list[Job],
    *,
    retry: RetryRule = AT_ONCE,
) -> list[JobRecord]:
    """What became of the jobs, in their order."""
    ended = {JobState.SUCCEEDED, JobState.FAILED}
    descriptors = client.enqueue(queue, jobs)
    done = threading.Event()
    with running(new_worker(client, queue, handler, retry=retry, max_wait_ms=100)):
        for _ in range(2000):
            if states(client, descriptors) <= ended or done.wait(0.01):
                break
    records = client.lookup(descriptors)
    return [records[descriptor] for descriptor in descriptors]


def test_each_job_runs_once_and_its_status_is_kept(client, queue):
    seen: list[bytes] = []

    def handle(job: RunningJob) -> str:
        seen.append(job.body)
        return f"did {job.body.decode()}"

    jobs = [Job(b"%d" % n) for n in range(300)]
    records = work_until_ended(client, queue, handle, jobs)

    assert sorted(seen) == sorted(job.body for job in jobs)
    assert [r.custom_status for r in records] == [f"did {n}" for n in range(300)]
    assert {r.state for r in records} == {JobState.SUCCEEDED}
    assert {r.attempts_remaining for r in records} == {2}


def test_a_handler_may_return_nothing(client, queue):
    [record] = work_until_ended(client, queue, lambda _: None, [Job(b"a")])

    assert (record.state, record.custom_status) == (JobState.SUCCEEDED, "")


def test_retry_runs_the_job_again_after_the_delay(client, queue):
    attempts: list[RunningJob] = []

    def handle(job: RunningJob) -> str:
        attempts.append(job)
        if len(attempts) == 1:
            raise Retry(delay_seconds=0.3, status="not yet; ")
        return "done"

    [record] = work_until_ended(client, queue, handle, [Job(b"a", attempts_allowed=3)])

    assert [job.attempts_remaining for job in attempts] == [3, 2]
    assert record.state is JobState.SUCCEEDED
    assert record.custom_status == "not yet; done"
    assert record.run_after_ms >= record.created_at_ms + 300
    assert record.updated_at_ms >= record.run_after_ms


def test_an_exception_fails_the_attempt_with_type_and_message_cut(client, queue):
    def handle(_job: RunningJob) -> str:
        raise ValueError("no such address \ud800 " + "x" * 1000)

    [record] = work_until_ended(client, queue, handle, [Job(b"a", attempts_allowed=1)])

    assert (record.state, record.attempts_remaining) == (JobState.FAILED, 0)
    assert record.custom_status.startswith("ValueError: no such address ? xxx")
    assert len(record.custom_status) == 500


def test_a_handler_that_exits_fails_its_job_only(client, queue):
    def handle(job: RunningJob) -> str:
        if job.body == b"bad":
            raise SystemExit(3)
        return "fine"

    records = work_until_ended(
        client, queue, handle, [Job(b"bad", attempts_allowed=1), *[Job(b"good")] * 20]
    )

    assert [r.state for r in records] == [JobState.FAILED, *[JobState.SUCCEEDED] * 20]


def test_acks_do_not_wait_for_the_next_job(client, queue, wait_until):
    with running(new_worker(client, queue, lambda _: "done", max_wait_ms=6000)):
        [descriptor] = client.enqueue(queue, [b"a"])
        # The dequeue that waits for the next job is out meanwhile, and takes no acks along.
        wait_until(lambda: states(client, [descriptor]) == {JobState.SUCCEEDED}, seconds=5)


def test_stop_finishes_what_runs_and_gives_back_the_rest(client, queue, wait_until):
    """Jobs that take no time make the worker claim ahead; then come slow ones."""
    begun, release = threading.Event(), threading.Event()

    def handle(job: RunningJob) -> str:
        if job.body == b"slow":
            begun.set()
            release.wait(60)
        return "done"

    worker = new_worker(
        client, queue, handle, concurrency=1, max_wait_ms=100, ahead_ms=10_000, grace_seconds=60
    )
    client.enqueue(queue, [b"quick"] * 20)
    with running(worker) as thread:
        wait_until(lambda: client.count(queue, JobState.SUCCEEDED) == 20)
        descriptors = client.enqueue(queue, [b"slow"] * 5)
        assert begun.wait(60)
        wait_until(lambda: client.count(queue, JobState.IN_PROGRESS) == 5)
        worker.stop()
        wait_until(lambda: client.count(queue, JobState.PENDING) == 4)
        assert thread.is_alive()
        release.set()

    records = client.lookup(descriptors).values()
    assert sorted(r.state for r in records) == [JobState.PENDING] * 4 + [JobState.SUCCEEDED]
    assert {r.attempts_remaining for r in records} == {2}


@pytest.mark.parametrize("how", ["grace", "second stop"])
def test_what_hangs_is_given_back_when_the_grace_is_over(client, queue, how):
    begun, release = threading.Event(), threading.Event()
    jobs: list[RunningJob] = []

    def handle(job: RunningJob) -> str:
        jobs.append(job)
        begun.set()
        release.wait(60)
        return "too late"

    [descriptor] = client.enqueue(queue, [b"a"])
    grace_seconds = 0 if how == "grace" else 600
    worker = new_worker(client, queue, handle, max_wait_ms=100, grace_seconds=grace_seconds)
    with running(worker) as thread:
        assert begun.wait(60)
        worker.stop()
        if how == "second stop":
            worker.stop()
        thread.join(30)
        assert not thread.is_alive()
    record = client.lookup([descriptor])[descriptor]
    release.set()

    assert (record.state, record.attempts_remaining) == (JobState.PENDING, 2)
    assert jobs[0].lost


def test_claims_of_long_jobs_are_renewed(client, wait_until):
    client.create_queue(SHORT_CLAIMS_QUEUE)
    runs: list[RunningJob] = []
    release = threading.Event()

    def handle(job: RunningJob) -> str:
        runs.append(job)
        release.wait(30)
        return "done"

    [descriptor] = client.enqueue(SHORT_CLAIMS_QUEUE, [b"long"])

    def is_claimed_for_long() -> bool:
        record: JobRecord = client.lookup([descriptor])[descriptor]
        return record.updated_at_ms > record.created_at_ms + 3000 * SHORT_CLAIM_SECONDS

    with running(new_worker(client, SHORT_CLAIMS_QUEUE, handle, max_wait_ms=100)):
        wait_until(is_claimed_for_long)
        release.set()
        wait_until(lambda: states(client, [descriptor]) == {JobState.SUCCEEDED})

    assert len(runs) == 1
    assert client.lookup([descriptor])[descriptor].attempts_remaining == 2


def test_a_queue_that_does_not_exist_ends_the_run(client):
    with pytest.raises(QueueNotFound):
        new_worker(client, "nowhere", lambda _: None).run()


def test_stop_before_run_is_heeded(client, queue):
    [descriptor] = client.enqueue(queue, [b"a"])
    worker = new_worker(client, queue, lambda _: "done")
    worker.stop()
    worker.run()

    assert states(client, [descriptor]) == {JobState.PENDING}


@pytest.mark.parametrize("options", [{"concurrency": 0}, {"ack_interval_ms": -1}])
def test_nonsense_is_refused(client, queue, options):
    with pytest.raises(ValueError, match="at least"):
        new_worker(client, queue, lambda _: None, **options)


# --- what handlers can say -------------------------------------------------------------------


def test_discard_fails_a_job_for_good(client, queue):
    def handle(_job: RunningJob) -> None:
        raise Discard("no such user")

    [record] = work_until_ended(client, queue, handle, [Job(b"a", attempts_allowed=5)])

    assert (record.state, record.attempts_remaining) == (JobState.FAILED, 0)
    assert record.custom_status == "no such user"


def test_later_runs_a_job_again_step_by_step_at_no_attempts_cost(client, queue):
    seen: list[tuple[bytes, int]] = []

    def handle(job: RunningJob) -> str:
        seen.append((job.body, job.attempt))
        if job.body != b"3":
            raise Later(body=b"%d" % (int(job.body) + 1), status=f"step {job.body.decode()}; ")
        return "done"

    [record] = work_until_ended(client, queue, handle, [Job(b"1")])

    assert seen == [(b"1", 1), (b"2", 1), (b"3", 1)]
    assert (record.state, record.attempts_remaining) == (JobState.SUCCEEDED, 2)
    assert record.custom_status == "step 2; step 1; done"


def test_progress_that_was_saved_is_there_in_the_next_attempt(client, queue):
    seen: list[bytes] = []

    def handle(job: RunningJob) -> None:
        seen.append(job.body)
        if job.attempt == 1:
            job.save(b"half done", status="half; ")
            assert job.body == b"half done"
            raise ConnectionError("cut off")

    [record] = work_until_ended(client, queue, handle, [Job(b"begin")])

    assert seen == [b"begin", b"half done"]
    assert record.custom_status.startswith("half; ConnectionError: cut off (test_worker.py:")


def test_a_job_can_be_followed_by_another(client, queue):
    def handle(job: RunningJob) -> None:
        if job.body == b"first":
            job.client.enqueue(next_queue, [b"second"])

    next_queue = f"{queue}_next"
    client.create_queue(next_queue)
    work_until_ended(client, queue, handle, [Job(b"first")])

    assert client.count(next_queue, JobState.PENDING) == 1


def test_policies_by_exception(client, queue):
    waits: list[int] = []

    def in_an_hour(attempt: int, error: BaseException) -> float:
        waits.append(attempt)
        return 3600.0

    def handle(job: RunningJob) -> None:
        raise {b"value": ValueError, b"key": KeyError, b"io": OSError}[job.body](job.body.decode())

    rule: RetryRule = {LookupError: never, OSError: in_an_hour, ValueError: constant(0)}
    descriptors = client.enqueue(queue, [b"value", b"key", b"io"])
    with running(new_worker(client, queue, handle, retry=rule, max_wait_ms=100)):
        for _ in range(3000):
            records = list(client.lookup(descriptors).values())
            if [r.attempts_remaining for r in records] == [0, 0, 1]:
                break
            time.sleep(0.01)

    value, key, io = (client.lookup(descriptors)[name] for name in descriptors)
    assert (value.state, value.custom_status.count("ValueError")) == (JobState.FAILED, 2)
    assert (key.state, key.custom_status.count("KeyError")) == (JobState.FAILED, 1)
    assert (io.state, waits) == (JobState.PENDING, [1])
    assert io.run_after_ms > io.created_at_ms + 3_590_000


def test_hooks_see_each_job_and_harm_none(client, queue):
    handlers = Handlers()
    seen: list[tuple[str, object]] = []

    @handlers.before
    def begin(job: RunningJob) -> None:
        seen.append(("before", job.body))
        raise RuntimeError("a hook's own mistake")

    @handlers.after
    def end(job: RunningJob, outcome: Outcome) -> None:
        seen.append(("after", outcome.ending))

    @handlers.on_error
    def failed(job: RunningJob, error: BaseException) -> None:
        seen.append(("error", str(error)))

    @handlers.queue(queue, concurrency=1)
    def handle(job: RunningJob) -> None:
        if job.body == b"bad":
            raise ValueError("no")

    descriptors = client.enqueue(queue, [Job(b"good"), Job(b"bad", attempts_allowed=1)])
    with running(Worker(client, handlers, max_wait_ms=100)):
        while states(client, descriptors) != {JobState.SUCCEEDED, JobState.FAILED}:
            time.sleep(0.01)

    assert seen == [
        ("before", b"good"),
        ("after", Ending.SUCCEEDED),
        ("before", b"bad"),
        ("error", "no"),
        ("after", Ending.RETRIED),
    ]


# --- async handlers --------------------------------------------------------------------------


def test_async_handlers_run_side_by_side(client, queue):
    met = asyncio.Event()
    inside: list[bytes] = []

    async def handle(job: RunningJob) -> str:
        inside.append(job.body)
        if len(inside) == 50:
            met.set()
        await met.wait()
        return job.body.decode()

    descriptors = client.enqueue(queue, [b"%d" % n for n in range(50)])
    with running(new_worker(client, queue, handle, concurrency=50, max_wait_ms=100)):
        while states(client, descriptors) != {JobState.SUCCEEDED}:
            time.sleep(0.01)

    records = client.lookup(descriptors)
    assert [records[name].custom_status for name in descriptors] == [str(n) for n in range(50)]


def test_an_async_handler_that_hangs_is_cancelled_and_its_job_given_back(client, queue):
    begun, cancelled = threading.Event(), threading.Event()

    async def handle(_job: RunningJob) -> None:
        begun.set()
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    [descriptor] = client.enqueue(queue, [b"a"])
    worker = new_worker(client, queue, handle, max_wait_ms=100, grace_seconds=0)
    with running(worker):
        assert begun.wait(60)

    assert cancelled.is_set()
    record = client.lookup([descriptor])[descriptor]
    assert (record.state, record.attempts_remaining) == (JobState.PENDING, 2)


# --- lost claims -----------------------------------------------------------------------------


def test_a_handler_whose_claim_is_lost_is_told_and_its_result_is_dropped(client):
    """Somebody else, by the claim's own name, makes the job pending and finishes it meanwhile."""
    client.create_queue(SHORT_CLAIMS_QUEUE)
    begun, done = threading.Event(), threading.Event()
    told: list[BaseException] = []

    def handle(job: RunningJob) -> str:
        job_in_hand.append(job)
        begun.set()
        while not job.lost:
            time.sleep(0.01)
        try:
            job.raise_if_lost()
        except ClaimLost as error:
            told.append(error)
        done.set()
        return "mine"

    job_in_hand: list[RunningJob] = []
    [descriptor] = client.enqueue(SHORT_CLAIMS_QUEUE, [b"contested"])
    worker = new_worker(client, SHORT_CLAIMS_QUEUE, handle, concurrency=1, max_wait_ms=100)
    with running(worker):
        assert begun.wait(60)
        claim = job_in_hand[0].claim_descriptor
        # Far enough away that the worker itself can't claim it again.
        away = CheckpointInfo(
            descriptor,
            move_to_pending=True,
            run_after_ms=round(time.time() * 1000) + 3_600_000,
            claim_descriptor=claim,
        )
        client.checkpoint(SHORT_CLAIMS_QUEUE, [away])
        assert done.wait(60)

    record = client.lookup([descriptor])[descriptor]
    assert (record.state, record.custom_status, record.attempts_remaining) == (
        JobState.PENDING,
        "",
        2,
    )
    assert len(told) == 1
    client.ack(SHORT_CLAIMS_QUEUE, succeeded=[AckInfo(descriptor)])  # which changes nothing
