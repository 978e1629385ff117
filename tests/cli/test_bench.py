"""`pinlater bench`: that its figures are right, and that a schedule leaves no wait out.

Nothing here depends on how fast the machine is: what a slow one makes of a run (fewer calls, more
slow ones) is allowed for, and the books must balance all the same.
"""

from __future__ import annotations

import contextlib
import json
import signal
import time

import psutil
import pytest

from pinlaterd.cli.bench import report_facts, report_lines
from pinlaterd.cli.callers import Answered, Caller, Kind, Plan
from pinlaterd.cli.load import Load
from pinlaterd.client import JobState
from pinlaterd.errors import ConnectionFailed
from pinlaterd.lifecycle import ExitCode, StopSignal
from tests.cli.program import SECONDS, read_until

FREEZE_SECONDS = 0.3
SLOW_SECONDS = 0.1


@pytest.fixture
def start_bench(pinlater):
    """Starts `pinlater bench`, to be ended by SIGINT, and returns once it has run for a second."""
    with contextlib.ExitStack() as stack:

        def start(command):
            process = stack.enter_context(
                pinlater.started(
                    f"bench {command} --seconds 3600 --slow-ms {1000 * SLOW_SECONDS} --warm-up 0 "
                    "--progress --json"
                )
            )
            read_until(process.stderr.fileno(), b"calls/s")
            return process

        yield start


@pytest.fixture
def freeze_router(service, wait_until):
    def freeze(seconds):
        """Stop the router for `seconds` at least; how long it certainly stood still."""
        router = psutil.Process(service.pid_of("router"))
        try:
            router.send_signal(signal.SIGSTOP)
            wait_until(lambda: router.status() == psutil.STATUS_STOPPED)
            stopped_at = time.monotonic()
            wait_until(lambda: time.monotonic() - stopped_at >= seconds)
            return time.monotonic() - stopped_at
        finally:
            router.send_signal(signal.SIGCONT)

    return freeze


def ended(process):
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == ExitCode.OK, (out, err)
    return json.loads(out)


def test_a_schedule_counts_every_call_that_a_pause_held_up_and_a_closed_loop_hardly_any(
    start_bench, freeze_router, client, queue
):
    rate = 500
    scheduled = start_bench(f"enqueue --queue {queue} --rate {rate} --concurrency 4")
    closed_queue = f"{queue}_closed"
    closed = start_bench(f"enqueue --queue {closed_queue} --create")

    stood_still_seconds = freeze_router(FREEZE_SECONDS)

    in_closed_loop, by_schedule = ended(closed), ended(scheduled)
    held_up = int(rate * (stood_still_seconds - SLOW_SECONDS))
    assert by_schedule["kinds"]["enqueue"]["slow"] >= held_up
    assert by_schedule["kinds"]["enqueue"]["max_ms"] >= 1000 * (stood_still_seconds - 2 / rate)
    # One connection has one call under way. It would take ten seconds of nothing but slow calls
    # to count as many.
    assert 1 <= in_closed_loop["kinds"]["enqueue"]["slow"] < held_up
    assert by_schedule["kinds"]["enqueue"]["jobs"] == client.count(queue, JobState.PENDING)
    assert in_closed_loop["kinds"]["enqueue"]["jobs"] == client.count(
        closed_queue, JobState.PENDING
    )


def test_calls_that_never_started_have_waited_too(pinlater, client, queue):
    found = pinlater.facts(
        f"bench enqueue --queue {queue} --rate 10000 --seconds 0.4 --batch-size 50 --slow-ms 0.001 "
        "--warm-up 0"
    )

    schedule, enqueues = found["schedule"], found["kinds"]["enqueue"]
    assert schedule["due"] == 4000
    assert schedule["started"] == enqueues["calls"] < 4000
    assert not schedule["kept_up"]
    assert enqueues["slow"] == 4000
    assert enqueues["max_ms"] >= schedule["behind_ms"] > 100
    assert client.count(queue, JobState.PENDING) == enqueues["jobs"] == 50 * enqueues["calls"]
    told = "\n".join(report_lines(found))
    assert "schedule: 4,000 calls were due" in told
    assert "NOT KEPT UP, ended " in told


def test_a_dequeue_by_schedule_fills_its_queue_with_what_it_can_take(pinlater, client, queue):
    found = pinlater.facts(
        f"bench dequeue --queue {queue} --rate 50 --seconds 0.4 --batch-size 2 --concurrency 2 "
        "--warm-up 0"
    )

    taken = found["kinds"]["dequeue"]["jobs"]
    assert found["seconds"] >= 0.4
    assert not found["ran_out"]
    assert client.count(queue, JobState.SUCCEEDED) == taken
    assert client.count(queue, JobState.PENDING) >= 40 - taken
    assert found["schedule"]["due"] == 20


def test_a_dequeue_that_runs_out_of_jobs_ends_and_says_so(pinlater, client, queue):
    done = pinlater.output(
        f"bench dequeue --queue {queue} --fill 30 --batch-size 10 --seconds 50 --warm-up 0"
    )

    assert "ran out of jobs after" in done
    assert client.count(queue, JobState.SUCCEEDED) == 30


def test_a_cycle_leaves_nothing_claimed_and_its_books_balance(pinlater, client, queue):
    found = pinlater.facts(
        f"bench cycle --queue {queue} --seconds 0.5 --batch-size 3 --concurrency 2 --warm-up 0"
    )

    enqueued, dequeued = (found["kinds"][kind]["jobs"] for kind in ("enqueue", "dequeue"))
    assert client.count(queue, JobState.IN_PROGRESS) == 0
    assert client.count(queue, JobState.SUCCEEDED) == dequeued
    assert client.count(queue, JobState.PENDING) == enqueued - dequeued


def test_the_warm_up_is_not_counted(pinlater, client, queue):
    found = pinlater.facts(
        f"bench enqueue --queue {queue} --rate 200 --warm-up 0.1 --num-queries 5"
    )

    assert found["warm_up_seconds"] == 0.1
    assert found["kinds"]["enqueue"]["calls"] == found["schedule"]["due"] == 5
    assert client.count(queue, JobState.PENDING) == 20 + 5


def test_a_run_that_ends_within_its_warm_up_says_that_nothing_was_measured(pinlater, client, queue):
    done = pinlater.error(f"bench dequeue --queue {queue} --fill 3 --warm-up 50")

    assert "nothing was measured, as the warm-up of 50 s did not end: ran out" in done
    assert client.count(queue, JobState.SUCCEEDED) == 3


@pytest.mark.parametrize("schedule", ["", "--rate 1000"], ids=["closed", "open"])
def test_it_ends_after_as_many_calls_as_it_is_told(pinlater, client, queue, schedule):
    done = pinlater.output(
        f"bench enqueue --queue {queue} --num-queries 7 --concurrency 2 --warm-up 0 --priority 2 "
        f"{schedule}"
    )

    assert ", 2 connections, 1 job a call" in done
    assert client.count(queue, JobState.PENDING, priority=2) == 7


@pytest.mark.parametrize("work", ["dequeue", "cycle"])
def test_a_queue_with_jobs_of_others_is_refused_and_left_as_it_is(pinlater, client, queue, work):
    [descriptor] = client.enqueue(queue, [b"precious"])

    done = pinlater.error(f"bench {work} --queue {queue}")

    assert f"holds jobs that the bench did not make, as {descriptor}" in done
    assert "nothing was done" in done
    assert client.count(queue, JobState.PENDING) == 1
    assert client.count(queue, JobState.SUCCEEDED) == 0


def test_a_job_that_others_enqueue_during_a_run_is_released_and_ends_it(start_bench, client, queue):
    process = start_bench(f"cycle --queue {queue} --concurrency 2 --batch-size 3")

    [descriptor] = client.enqueue(queue, [b"precious"])

    out, err = process.communicate(timeout=SECONDS)
    assert (process.returncode, out) == (ExitCode.FAILURE, b"")
    assert descriptor.encode() in err
    assert b"released, at no attempt's cost" in err
    record = client.lookup([descriptor])[descriptor]
    assert (record.state, record.attempts_remaining) == (JobState.PENDING, 2)
    assert client.count(queue, JobState.IN_PROGRESS) == 0


def test_a_missing_queue_is_refused_with_the_cure(pinlater, client):
    done = pinlater.error("bench enqueue --queue not_there")

    assert "queue 'not_there' does not exist; --create makes it" in done
    assert "not_there" not in client.queue_names()


def test_a_call_that_the_service_refuses_ends_the_run(pinlater, queue):
    done = pinlater.error(f"bench enqueue --queue {queue} --body-bytes {2 << 20}")

    assert done.startswith("pinlater: ENQUEUE_REJECTED: invalid request: ")


PLAN = Plan(queue="q", num_queries=3, batch_size=1, concurrency=1, progress=None)


class Forgetful(Caller):
    """Its service is away when its claims are to be ended."""

    def call(self) -> Answered:
        return Answered(1)

    def finish(self) -> None:
        raise ConnectionFailed("the service is away")


def test_claims_that_cannot_be_ended_are_said_beside_the_figures(client):
    done = Load(PLAN, [Forgetful(client, PLAN, [Kind.DEQUEUE])])
    with contextlib.closing(StopSignal()) as stop:
        done.run(stop)

    found = report_facts(PLAN, done)

    assert done.has_errors
    assert found["left_claimed"] == "the service is away"
    assert done.kinds[Kind.DEQUEUE].jobs == 3
    [line] = [line for line in report_lines(found) if "the service is away" in line]
    assert "come out again when their claims time out" in line
