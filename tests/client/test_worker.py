"""The Worker on a real service: every job ends as its handler said, and stopping loses nothing."""

from __future__ import annotations

import asyncio
import ctypes
import re
import sys
import threading
import time
from collections.abc import Callable

import pytest

from pinlaterd.client import (
    ClaimLost,
    Client,
    Discard,
    Ending,
    Handlers,
    Job,
    JobState,
    Later,
    Outcome,
    Retry,
    RunningJob,
    Worker,
    constant,
    never,
)
from pinlaterd.errors import QueueNotFound
from tests.client.working import (
    books,
    handlers_of,
    have_ended,
    of_kind,
    records_of,
    running,
    take_away,
)
from tests.shared_service import SHORT_CLAIM_SECONDS, SHORT_CLAIMS_QUEUE

DONE = ("SUCCEEDED", 2)


# --- outcomes -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["threads", "tasks"])
def test_a_thousand_short_jobs_run_once_each_and_their_statuses_are_kept(
    client, queue, work_until_ended, kind
):
    seen: list[bytes] = []

    def handle(job: RunningJob) -> str:
        seen.append(job.body)
        return f"did {job.body.decode()}"

    handlers = handlers_of(queue, of_kind(kind, handle), concurrency=16)
    jobs = [Job(b"%d" % n) for n in range(1000)]
    records = work_until_ended(handlers, queue, jobs)

    assert sorted(seen) == sorted(job.body for job in jobs)
    assert [r.custom_status for r in records] == [f"did {n}" for n in range(1000)]
    assert {(r.state.name, r.attempts_remaining) for r in records} == {DONE}


def test_tasks_run_together_up_to_their_concurrency(client, queue, work_until_ended):
    at_once = [0, 0]
    together = asyncio.Event()

    async def handle(job: RunningJob) -> None:
        at_once[0] += 1
        at_once[1] = max(at_once)
        if at_once[0] == 30:
            together.set()
        await together.wait()
        at_once[0] -= 1

    work_until_ended(handlers_of(queue, handle, concurrency=30), queue, [Job(b"x")] * 45)

    assert at_once == [0, 30]


def test_each_attempt_knows_its_number_and_waits_as_told(client, queue, work_until_ended):
    attempts: list[int] = []

    def handle(job: RunningJob) -> str:
        attempts.append(job.attempt)
        if job.attempt == 1:
            raise Retry(delay_seconds=0.3, status="not yet; ")
        if job.attempt == 2:
            raise ConnectionError("refused")
        return "done"

    handlers = handlers_of(queue, handle, retry={ConnectionError: constant(0.1)})
    [record] = work_until_ended(handlers, queue, [Job(b"a", attempts_allowed=3)])

    assert attempts == [1, 2, 3]
    assert (record.state, record.attempts_remaining) == (JobState.SUCCEEDED, 1)
    assert record.custom_status.startswith("not yet; ConnectionError: refused (test_worker.py:")
    assert record.custom_status.endswith("in handle); done")
    assert record.updated_at_ms >= record.created_at_ms + 400


def test_later_goes_on_with_another_body_at_no_attempts_cost(client, queue, work_until_ended):
    begun_at: list[float] = []

    def handle(job: RunningJob) -> str:
        begun_at.append(time.time())
        step = int(job.body)
        if step < 3:
            raise Later(0.1, body=b"%d" % (step + 1), status=f"step {step}; ")
        return "done"

    [record] = work_until_ended(handlers_of(queue, handle), queue, [Job(b"1", attempts_allowed=1)])

    assert (record.state, record.attempts_remaining) == (JobState.SUCCEEDED, 1)
    assert (record.body, record.custom_status) == (b"3", "step 2; step 1; done")
    assert begun_at[2] - begun_at[0] >= 0.2


def test_progress_that_was_saved_is_what_the_next_attempt_begins_with(client, queue, wait_until):
    chained: list[str] = []

    def handle(job: RunningJob) -> str:
        if job.body == b"half":
            chained.extend(job.client.enqueue(queue, [b"next"]))
        elif job.body == b"job":
            job.save(body=b"half", status="half; ")
            assert job.body == b"half"
            raise Retry(0, "broke; ")
        return "done"

    descriptors = client.enqueue(queue, [b"job"])
    with running(Worker(client, handlers_of(queue, handle), max_wait_ms=100)):
        wait_until(lambda: have_ended(client, descriptors))
        wait_until(lambda: have_ended(client, chained))

    [record] = records_of(client, descriptors)
    assert (record.body, record.custom_status) == (b"half", "half; broke; done")
    assert books(client, chained) == {DONE: 1}


def test_hooks_see_every_job_and_change_nothing(client, queue, work_until_ended):
    def handle(job: RunningJob) -> str:
        if job.body == b"bad":
            raise KeyError("bad")
        return "fine"

    handlers = handlers_of(queue, handle, concurrency=1, retry=never)
    seen: list[tuple[str, bytes, object]] = []

    @handlers.before
    def before(job: RunningJob) -> None:
        seen.append(("before", job.body, None))

    @handlers.after
    def after(job: RunningJob, outcome: Outcome) -> None:
        seen.append(("after", job.body, outcome.ending))
        raise RuntimeError("hooks may fail")

    @handlers.on_error
    def on_error(job: RunningJob, error: BaseException) -> None:
        seen.append(("error", job.body, type(error)))

    records = work_until_ended(handlers, queue, [Job(b"good"), Job(b"bad")])

    assert [r.state for r in records] == [JobState.SUCCEEDED, JobState.FAILED]
    assert [entry for entry in seen if entry[1] == b"good"] == [
        ("before", b"good", None),
        ("after", b"good", Ending.SUCCEEDED),
    ]
    assert [entry for entry in seen if entry[1] == b"bad"] == [
        ("before", b"bad", None),
        ("error", b"bad", KeyError),
        ("after", b"bad", Ending.DISCARDED),
    ]


def test_a_retry_is_a_warning_in_the_log_and_the_end_an_error_with_the_handlers_lines(
    client, queue, work_until_ended, caplog
):
    def handle(job: RunningJob) -> None:
        raise ValueError("card 4111")

    handlers = handlers_of(queue, handle, retry=constant(0))
    [record] = work_until_ended(handlers, queue, [Job(b"x")])

    warned, failed = (r for r in caplog.records if record.descriptor in r.getMessage())
    assert (warned.levelname, warned.exc_info) == ("WARNING", None)
    assert "attempt 1 failed: ValueError: card 4111" in warned.getMessage()
    assert failed.levelname == "ERROR"
    assert "in handle" in caplog.text
    assert "client/handlers.py" not in caplog.text
    assert record.custom_status.count("ValueError: card 4111 (test_worker.py:") == 2
    assert f"{record.state} {record.state:d} {record.state.value}" == "FAILED 3 3"


def test_renewals_that_are_late_are_a_warning_in_the_log(client, wait_until, caplog):
    """The handler keeps Python's lock for as long as its claim lasts."""
    client.create_queue(SHORT_CLAIMS_QUEUE)
    handlers = handlers_of(
        SHORT_CLAIMS_QUEUE, lambda job: ctypes.PyDLL(None).sleep(SHORT_CLAIM_SECONDS)
    )
    descriptors = client.enqueue(SHORT_CLAIMS_QUEUE, [b"x"])
    with running(Worker(client, handlers, max_wait_ms=100)):
        wait_until(lambda: have_ended(client, descriptors))

    assert f"claims of {SHORT_CLAIMS_QUEUE} are renewed" in caplog.text


class Forgetful(Retry):
    """An application's own, which calls its base as most are never told to."""

    def __init__(self) -> None: ...


class NoException(BaseException):
    """As some libraries have: a test's failure, a panic of another language."""


# What a handler raises by its job's body, and what becomes of the job's status. All fail for good.
RAISED: dict[bytes, tuple[Callable[[], BaseException], str]] = {
    b"discard": (lambda: Discard("no such user"), "no such user"),
    b"never": (lambda: ValueError("not a number"), r"ValueError: not a number \(.*"),
    b"exit": (lambda: SystemExit(3), r"(SystemExit: 3 \([^)]*\)(; )?){5}"),
    b"refused": (lambda: Later(0, body=b"x" * (1 << 21)), "InvalidRequest: invalid request: .*"),
    b"discard badly": (
        lambda: Discard(ValueError("not text")),  # type: ignore[arg-type]
        r"TypeError: reason: expected str, got ValueError\('not text'\) .*",
    ),
    b"later badly": (
        lambda: Later(0, body="text"),  # type: ignore[arg-type]
        "TypeError: body: expected bytes, got 'text' .*",
    ),
    b"forgetful": (Forgetful, "AttributeError: .*"),
    b"interrupt": (KeyboardInterrupt, "KeyboardInterrupt: .*"),
    b"cancelled": (asyncio.CancelledError, "CancelledError: .*"),
    b"no exception": (NoException, "NoException: .*"),
    b"generator": (GeneratorExit, "GeneratorExit: .*"),
}


@pytest.mark.parametrize("kind", ["threads", "tasks"])
def test_whatever_a_handler_raises_ends_its_job_alone(client, queue, work_until_ended, kind):
    def handle(job: RunningJob) -> str:
        if job.body in RAISED:
            mistake, _ = RAISED[job.body]
            raise mistake()
        return "fine"

    retries = {ValueError: never, SystemExit: constant(0)}
    handlers = handlers_of(queue, of_kind(kind, handle), concurrency=1, retry=retries)
    several = {b"discard", b"never", b"exit"}
    jobs = [Job(body, attempts_allowed=5 if body in several else 1) for body in RAISED]
    records = work_until_ended(handlers, queue, [*jobs, *[Job(b"good")] * 20])

    bad, good = records[: len(RAISED)], records[len(RAISED) :]
    assert {(r.state, r.attempts_remaining) for r in bad} == {(JobState.FAILED, 0)}
    for record, (_, status) in zip(bad, RAISED.values(), strict=True):
        assert re.fullmatch(status, record.custom_status)
    assert {(r.state, r.custom_status) for r in good} == {(JobState.SUCCEEDED, "fine")}


async def exits() -> None:
    raise SystemExit(3)


async def wait_for_one_that_exits() -> None:
    await asyncio.wait_for(exits(), 60)


async def gather_one_that_exits() -> None:
    await asyncio.gather(exits(), asyncio.sleep(0))


async def group_one_that_is_interrupted() -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(interrupted())


async def interrupted() -> None:
    raise KeyboardInterrupt


async def close_the_generator() -> None:
    raise GeneratorExit


async def exit_in_a_callback() -> None:
    asyncio.get_running_loop().call_soon(sys.exit, 3)
    await asyncio.sleep(0.01)


async def stop_the_loop() -> None:
    asyncio.get_running_loop().stop()
    await asyncio.sleep(0.01)


async def cancel_all() -> None:
    for task in asyncio.all_tasks():
        task.cancel()
    await asyncio.sleep(60)


async def return_a_coroutine() -> object:
    return exits()


@pytest.mark.parametrize(
    ("harm", "status"),
    [
        (wait_for_one_that_exits, "SystemExit: 3"),
        (gather_one_that_exits, "SystemExit: 3"),
        (group_one_that_is_interrupted, "KeyboardInterrupt"),
        (close_the_generator, "GeneratorExit"),
        (return_a_coroutine, "SystemExit: 3"),
        (cancel_all, "CancelledError"),
        (exit_in_a_callback, "done"),
        (stop_the_loop, "done"),
    ],
)
def test_what_harms_the_event_loop_costs_its_own_attempt_alone(
    client, queue, wait_until, harm, status
):
    async def handle(job: RunningJob) -> object:
        if job.body == b"bad":
            return await harm() or "done"
        if job.body == b"innocent":
            await later.wait()
        return "done"

    later = asyncio.Event()
    handlers = handlers_of(queue, handle, concurrency=3)
    single = [Job(body, attempts_allowed=1) for body in (b"innocent", b"bad")]
    if harm is cancel_all:
        single = single[1:]
    descriptors = client.enqueue(queue, single)
    with running(Worker(client, handlers, max_wait_ms=100)) as thread:
        wait_until(lambda: have_ended(client, descriptors[-1:]))
        handlers.by_queue[queue].hooks.before(lambda job: later.set())
        descriptors += client.enqueue(queue, [b"good"] * 20)
        wait_until(lambda: have_ended(client, descriptors))
        assert thread.is_alive()

    records = records_of(client, descriptors)
    assert records.pop(len(single) - 1).custom_status.startswith(status)
    assert {(record.state, record.custom_status) for record in records} == {
        (JobState.SUCCEEDED, "done")
    }


def test_a_loop_that_is_closed_ends_the_worker_and_costs_no_attempt(client, queue):
    async def handle(job: RunningJob) -> None:
        loop = asyncio.get_running_loop()
        loop.stop()
        loop.is_running = lambda: False  # type: ignore[method-assign]
        loop.close()

    descriptors = client.enqueue(queue, [b"x"])
    with pytest.raises(RuntimeError, match="Event loop is closed"):
        Worker(client, handlers_of(queue, handle), max_wait_ms=100).run()

    assert books(client, descriptors)["IN_PROGRESS", 2] == 0


@pytest.mark.parametrize("kind", ["threads", "tasks"])
def test_a_claim_that_is_lost_while_its_handler_saves_leaves_its_place_free(
    client, queue, work_until_ended, kind
):
    runs: list[RunningJob] = []

    def handle(job: RunningJob) -> str:
        runs.append(job)
        if len(runs) > 1:
            return "second"
        take_away(client, job)
        with pytest.raises(ClaimLost):
            job.save(status="too late; ")
        return "first"

    handlers = handlers_of(queue, of_kind(kind, handle), concurrency=1)
    endings: list[Ending] = []

    @handlers.after
    def after(_job: RunningJob, outcome: Outcome) -> None:
        endings.append(outcome.ending)

    [record] = work_until_ended(handlers, queue, [Job(b"x")])

    assert record.custom_status == "second"
    assert endings == [Ending.LOST, Ending.SUCCEEDED]


def test_a_task_that_takes_longer_than_it_may_has_failed(client, queue, work_until_ended):
    async def handle(job: RunningJob) -> None:
        await asyncio.sleep(60)

    handlers = handlers_of(queue, handle, time_limit_seconds=0.05)
    [record] = work_until_ended(handlers, queue, [Job(b"a", attempts_allowed=1)])

    assert record.state is JobState.FAILED
    assert record.custom_status.startswith("TimeoutError")


# --- the service's side ---------------------------------------------------------------------


def test_queues_are_worked_on_side_by_side_and_only_those_that_were_chosen(
    client, queue, wait_until
):
    other, ignored = f"{queue}_b", f"{queue}_c"
    handlers = Handlers()
    for name in (queue, other, ignored):
        client.create_queue(name)
        handlers.queue(name)(lambda job: job.queue)
    [first], [second], [third] = (client.enqueue(q, [b"x"]) for q in (queue, other, ignored))

    with running(Worker(client, handlers, max_wait_ms=100, queues=[queue, other])):
        wait_until(lambda: have_ended(client, [first, second]))

    statuses = [r.custom_status for r in records_of(client, [first, second])]
    assert statuses == [queue, other]
    assert books(client, [third]) == {("PENDING", 2): 1}


def test_acks_do_not_wait_for_the_next_job(client, queue, wait_until):
    worker = Worker(client, handlers_of(queue, lambda _: "done"), max_wait_ms=25_000)
    with running(worker):
        descriptors = client.enqueue(queue, [b"a"])
        # The dequeue that waits for the next job is out meanwhile, and takes no acks along.
        wait_until(lambda: have_ended(client, descriptors))
        worker.stop()
        late = client.enqueue(queue, [b"b"])  # ends the wait of that dequeue

    # The server releases what it has claimed for an answer that nobody reads.
    wait_until(lambda: books(client, late) in ({("PENDING", 2): 1}, {DONE: 1}))


def test_a_job_that_takes_longer_than_its_claims_time_out_keeps_it(client, wait_until):
    client.create_queue(SHORT_CLAIMS_QUEUE)
    runs: list[bytes] = []
    release = threading.Event()

    def handle(job: RunningJob) -> str:
        runs.append(job.body)
        release.wait(120)
        return "lost" if job.lost else "kept"

    [descriptor] = client.enqueue(SHORT_CLAIMS_QUEUE, [b"long"])

    def is_claimed_for_long() -> bool:
        [record] = records_of(client, [descriptor])
        return record.updated_at_ms > record.created_at_ms + 2000 * SHORT_CLAIM_SECONDS

    handlers = handlers_of(SHORT_CLAIMS_QUEUE, handle, concurrency=2)
    with running(Worker(client, handlers, max_wait_ms=100)):
        wait_until(is_claimed_for_long)
        release.set()
        wait_until(lambda: have_ended(client, [descriptor]))

    assert runs == [b"long"]
    assert books(client, [descriptor]) == {DONE: 1}
    assert records_of(client, [descriptor])[0].custom_status == "kept"


def test_claims_last_for_a_minute_and_are_renewed(client, queue, wait_until, monkeypatch):
    seconds: list[int] = []
    release = threading.Event()

    def handle(job: RunningJob) -> None:
        seconds.append(job.claimed.claim_timeout_seconds)
        release.wait(120)

    def work_until(is_done: Callable[[], object]) -> None:
        with running(Worker(client, handlers_of(queue, handle, concurrency=2), max_wait_ms=100)):
            wait_until(is_done)
            release.set()
            wait_until(lambda: have_ended(client, [descriptor]))

    [descriptor] = client.enqueue(queue, [b"a"])
    work_until(lambda: seconds == [60])

    release.clear()
    monkeypatch.setattr("pinlaterd.client.worker._CLAIM_TIMEOUT_MS", 6_000)
    [descriptor] = client.enqueue(queue, [b"b"])
    [record] = records_of(client, [descriptor])
    later_ms = record.created_at_ms + 13_000
    work_until(lambda: records_of(client, [descriptor])[0].updated_at_ms > later_ms)

    assert seconds == [60, 6]
    assert books(client, [descriptor]) == {DONE: 1}


@pytest.mark.parametrize("kind", ["threads", "tasks"])
def test_a_claim_that_is_lost_is_told_to_the_handler_and_its_result_is_dropped(
    client, wait_until, kind
):
    """Another hand takes the job away while its first run lasts; the second run ends it."""
    client.create_queue(SHORT_CLAIMS_QUEUE)
    runs: list[RunningJob] = []
    told = threading.Event()

    def end_of(job: RunningJob) -> str:
        with pytest.raises(ClaimLost):
            job.save(status="too late; ")
        told.set()
        return "first"

    def handle(job: RunningJob) -> str:
        runs.append(job)
        if len(runs) > 1:
            return "second"
        while not job.lost:
            time.sleep(0.01)
        return end_of(job)

    async def handle_async(job: RunningJob) -> str:
        runs.append(job)
        if len(runs) > 1:
            return "second"
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            assert job.lost
            end_of(job)
            raise
        return "not cancelled"

    function = handle if kind == "threads" else handle_async
    [descriptor] = client.enqueue(SHORT_CLAIMS_QUEUE, [b"x"])
    worker = Worker(client, handlers_of(SHORT_CLAIMS_QUEUE, function), max_wait_ms=100)
    with running(worker):
        wait_until(lambda: runs)
        take_away(client, runs[0])
        wait_until(lambda: have_ended(client, [descriptor]))
        assert told.wait(60)
        wait_until(lambda: worker.queue_figures()[0].claims_lost == 1)

    assert len(runs) == 2
    assert books(client, [descriptor]) == {DONE: 1}
    assert records_of(client, [descriptor])[0].custom_status == "second"


def test_a_queue_that_does_not_exist_ends_the_run(client, queue):
    handlers = handlers_of("nowhere", lambda _: None)
    handlers.queue(queue)(lambda _: None)

    with pytest.raises(QueueNotFound):
        Worker(client, handlers, max_wait_ms=100).run()


# --- stopping -------------------------------------------------------------------------------


def test_stop_finishes_what_runs_and_hands_back_the_rest_at_once(client, queue, wait_until):
    running_job, release = threading.Event(), threading.Event()

    def handle(job: RunningJob) -> str:
        if job.body == b"quick":
            return "quick"
        running_job.set()
        release.wait(120)
        return "done"

    quick = client.enqueue(queue, [b"quick"] * 20)
    worker = Worker(client, handlers_of(queue, handle, concurrency=1), max_wait_ms=100)
    with running(worker) as thread:
        wait_until(lambda: have_ended(client, quick))
        descriptors = client.enqueue(queue, [b"slow"] * 5)
        assert running_job.wait(60)
        worker.stop()
        wait_until(lambda: books(client, descriptors)["PENDING", 2] == 4)
        assert thread.is_alive()
        release.set()

    assert books(client, descriptors) == {("PENDING", 2): 4, DONE: 1}


@pytest.mark.parametrize("kind", ["threads", "tasks"])
def test_what_still_runs_when_the_grace_is_over_is_handed_back(client, queue, wait_until, kind):
    release, jobs = threading.Event(), []

    def handle(job: RunningJob) -> str:
        jobs.append(job)
        release.wait(120)
        return "too late"

    async def handle_async(job: RunningJob) -> str:
        jobs.append(job)
        await asyncio.Event().wait()
        return "never"

    function = handle if kind == "threads" else handle_async
    descriptors = client.enqueue(queue, [b"hangs"] * 3)
    handlers = handlers_of(queue, function, concurrency=2)
    with running(Worker(client, handlers, max_wait_ms=100, grace_seconds=0.1)):
        wait_until(lambda: len(jobs) == 2)

    assert all(job.lost for job in jobs)
    release.set()
    assert books(client, descriptors) == {("PENDING", 2): 3}


@pytest.mark.parametrize("kind", ["threads", "tasks"])
@pytest.mark.parametrize("has_time", [True, False])
def test_jobs_that_run_at_most_once_are_not_handed_back(
    client, queue, wait_until, kind, *, has_time
):
    """Those that wait are begun within the grace; what has not ended then has failed."""
    release, runs = threading.Event(), []

    def handle(job: RunningJob) -> None:
        runs.append(job.descriptor)
        if job.body == b"slow":
            release.wait(120)

    async def handle_async(job: RunningJob) -> None:
        runs.append(job.descriptor)
        while job.body == b"slow" and not release.is_set():  # noqa: ASYNC110 - a thread sets it
            await asyncio.sleep(0.01)

    function = handle if kind == "threads" else handle_async
    quick = client.enqueue(queue, [b"quick"] * 20)
    grace_seconds = 60.0 if has_time else 0.1
    handlers = handlers_of(queue, function, concurrency=1)
    # A job that the machine holds up must not keep the worker from claiming five at a time.
    worker = Worker(client, handlers, ahead_ms=60_000, max_wait_ms=100, grace_seconds=grace_seconds)
    with running(worker):
        wait_until(lambda: have_ended(client, quick))
        slow = client.enqueue(queue, [Job(b"slow", attempts_allowed=1)] * 5)
        wait_until(lambda: sum(held.waiting + held.running for held in worker.queue_figures()) == 5)
        worker.stop()
        if has_time:
            release.set()

    assert len(runs) == len(set(runs))
    assert client.dequeue(queue, limit=10) == []
    if has_time:
        assert books(client, slow) == {("SUCCEEDED", 1): 5}
    else:
        assert books(client, slow) == {("FAILED", 0): 5}
        release.set()


def test_a_task_that_is_cancelled_at_the_end_may_clean_up(client, queue):
    begun, cleaned_up = threading.Event(), threading.Event()

    async def handle(_job: RunningJob) -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.3)
            cleaned_up.set()

    client.enqueue(queue, [b"x"])
    worker = Worker(client, handlers_of(queue, handle), max_wait_ms=100, grace_seconds=0)
    with running(worker):
        assert begun.wait(60)

    assert cleaned_up.is_set()


def test_stop_before_run_is_heeded(client, queue):
    descriptors = client.enqueue(queue, [b"a"])
    worker = Worker(client, handlers_of(queue, lambda _: "done"), max_wait_ms=100)
    worker.stop()
    worker.run()

    assert set(books(client, descriptors)) <= {("PENDING", 2), DONE}
    with pytest.raises(RuntimeError, match="make a new one"):
        worker.run()


@pytest.mark.parametrize("name", ["worker", "QUEUE-2", "dns-localhost"])
def test_without_another_thread_a_worker_ends_with_the_error_or_tries_again(
    service, client, queue, wait_until, monkeypatch, name
):
    wanted = name.replace("QUEUE", queue)
    failed: list[threading.Thread] = []
    start = threading.Thread.start

    def start_or_fail(thread: threading.Thread) -> None:
        if thread.name == wanted and not failed:
            failed.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    with Client("localhost", service.port) as by_name:
        worker = Worker(by_name, handlers_of(queue, lambda job: "done"), max_wait_ms=100)
        monkeypatch.setattr(threading.Thread, "start", start_or_fail)
        if name == "dns-localhost":
            descriptors = client.enqueue(queue, [b"x"])
            with running(worker):
                wait_until(lambda: have_ended(client, descriptors))
        else:
            with pytest.raises(RuntimeError, match="can't start new thread"):
                worker.run()

    assert failed
    wait_until(lambda: not any(one.name.startswith(queue) for one in threading.enumerate()))
