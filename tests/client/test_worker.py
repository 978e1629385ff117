"""The Worker on a real service: every job ends as its handler said, and stopping loses nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from pinlaterd.client import ClaimedJob, Client, Job, JobRecord, JobState, Retry, Worker
from pinlaterd.errors import QueueNotFound
from tests.shared_service import SHORT_CLAIM_SECONDS, SHORT_CLAIMS_QUEUE


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
    client: Client, queue: str, handler: Callable[[ClaimedJob], str | None], jobs: list[Job]
) -> list[JobRecord]:
    """What became of the jobs, in their order."""
    ended = {JobState.SUCCEEDED, JobState.FAILED}
    descriptors = client.enqueue(queue, jobs)
    done = threading.Event()
    with running(Worker(client, queue, handler, max_wait_ms=100)):
        for _ in range(2000):
            if states(client, descriptors) <= ended or done.wait(0.01):
                break
    records = client.lookup(descriptors)
    return [records[descriptor] for descriptor in descriptors]


def test_each_job_runs_once_and_its_status_is_kept(client, queue):
    seen: list[bytes] = []

    def handle(job: ClaimedJob) -> str:
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
    attempts: list[ClaimedJob] = []

    def handle(job: ClaimedJob) -> str:
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
    def handle(_job: ClaimedJob) -> str:
        raise ValueError("no such address \ud800 " + "x" * 1000)

    [record] = work_until_ended(client, queue, handle, [Job(b"a", attempts_allowed=1)])

    assert (record.state, record.attempts_remaining) == (JobState.FAILED, 0)
    assert record.custom_status.startswith("ValueError: no such address ? xxx")
    assert len(record.custom_status) == 500


def test_a_handler_that_exits_fails_its_job_only(client, queue):
    def handle(job: ClaimedJob) -> str:
        if job.body == b"bad":
            raise SystemExit(3)
        return "fine"

    records = work_until_ended(
        client, queue, handle, [Job(b"bad", attempts_allowed=1), *[Job(b"good")] * 20]
    )

    assert [r.state for r in records] == [JobState.FAILED, *[JobState.SUCCEEDED] * 20]


def test_acks_do_not_wait_for_the_next_job(client, queue, wait_until):
    with running(Worker(client, queue, lambda _: "done", max_wait_ms=6000)):
        [descriptor] = client.enqueue(queue, [b"a"])
        # The dequeue that waits for the next job is out meanwhile, and takes no acks along.
        wait_until(lambda: states(client, [descriptor]) == {JobState.SUCCEEDED}, seconds=5)


def test_stop_finishes_what_runs_and_gives_back_the_rest(client, queue, wait_until):
    begun, release = threading.Event(), threading.Event()

    def handle(_job: ClaimedJob) -> str:
        begun.set()
        release.wait(20)
        return "done"

    worker = Worker(client, queue, handle, concurrency=1, batch=5, max_wait_ms=100)
    descriptors = client.enqueue(queue, [b"%d" % n for n in range(5)])
    with running(worker) as thread:
        assert begun.wait(20)
        worker.stop()
        wait_until(lambda: client.count(queue, JobState.PENDING) == 4)
        assert thread.is_alive()
        release.set()

    records = client.lookup(descriptors).values()
    assert sorted(r.state for r in records) == [JobState.PENDING] * 4 + [JobState.SUCCEEDED]
    assert {r.attempts_remaining for r in records} == {2}


def test_claims_of_long_jobs_are_renewed(client, wait_until):
    client.create_queue(SHORT_CLAIMS_QUEUE)
    runs: list[ClaimedJob] = []
    release = threading.Event()

    def handle(job: ClaimedJob) -> str:
        runs.append(job)
        release.wait(30)
        return "done"

    [descriptor] = client.enqueue(SHORT_CLAIMS_QUEUE, [b"long"])

    def is_claimed_for_long() -> bool:
        record: JobRecord = client.lookup([descriptor])[descriptor]
        return record.updated_at_ms > record.created_at_ms + 3000 * SHORT_CLAIM_SECONDS

    with running(Worker(client, SHORT_CLAIMS_QUEUE, handle, concurrency=2, max_wait_ms=100)):
        wait_until(is_claimed_for_long)
        release.set()
        wait_until(lambda: states(client, [descriptor]) == {JobState.SUCCEEDED})

    assert len(runs) == 1
    assert client.lookup([descriptor])[descriptor].attempts_remaining == 2


def test_a_queue_that_does_not_exist_ends_the_run(client):
    with pytest.raises(QueueNotFound):
        Worker(client, "nowhere", lambda _: None).run()


def test_stop_before_run_is_heeded(client, queue):
    [descriptor] = client.enqueue(queue, [b"a"])
    worker = Worker(client, queue, lambda _: "done")
    worker.stop()
    worker.run()

    assert states(client, [descriptor]) == {JobState.PENDING}


@pytest.mark.parametrize("options", [{"concurrency": 0}, {"batch": 0}])
def test_nonsense_is_refused(client, queue, options):
    with pytest.raises(ValueError, match="at least 1"):
        Worker(client, queue, lambda _: None, **options)
