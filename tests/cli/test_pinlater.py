"""`pinlater` as a program, on a real service."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pinlaterd.client import Client, Job, JobState
from tests.cli.program import COMMAND, facts
from tests.conftest import WaitUntil
from tests.deployment import Deployment, frozen
from tests.servers.proxy import Cut, Proxy

SECONDS = 30

Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def proxy(service: Deployment) -> Iterator[Proxy]:
    proxy = Proxy(service.port)
    yield proxy
    proxy.close()


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts `pinlater`. Its pipes have no buffers here: whatever it wrote is there to read."""
    with contextlib.ExitStack() as started:

        def start(port: int, *arguments: str) -> subprocess.Popen[bytes]:
            process = subprocess.Popen(
                [*COMMAND, *arguments, "--port", str(port)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
            )
            started.enter_context(process)
            started.callback(process.kill)
            return process

        yield start


def read_until(descriptor: int, word: bytes) -> bytes:
    """What comes up to the word; AssertionError if it does not."""
    shown = b""
    until = time.monotonic() + SECONDS
    while word not in shown:
        assert select.select([descriptor], [], [], max(0, until - time.monotonic()))[0], shown
        piece = os.read(descriptor, 4096)
        assert piece, shown
        shown += piece
    return shown


def test_create_and_get_queue_names(run, client):
    assert facts(run("create", "--queue", "made_by_tool", "--json")) == {"created": "made_by_tool"}
    assert run("create", "--queue", "made_by_tool").returncode == 0

    assert "made_by_tool" in client.queue_names()
    assert "made_by_tool" in run("get-queue-names").stdout.splitlines()
    assert "made_by_tool" in facts(run("get-queue-names", "--json"))


def test_enqueue_makes_batches_over_all_connections(run, client, queue):
    done = facts(
        run(
            *("enqueue", "--queue", queue, "--num-queries", "25", "--batch-size", "4"),
            *("--concurrency", "3", "--priority", "2", "--body-bytes", "123", "--json"),
        )
    )

    assert (done["calls"], done["jobs"], done["errors"]) == (25, 100, {})
    assert done["p50_ms"] > 0
    records = list(client.scan(queue, JobState.PENDING, priority=2))
    assert len(records) == 100
    bodies = client.lookup([r.descriptor for r in records], include_body=True).values()
    assert {len(r.body or b"") for r in bodies} == {123}


def test_what_was_enqueued_comes_out_checked(run, client, queue):
    assert run("enqueue", "--queue", queue, "--num-queries", "20", "--batch-size", "10").stdout
    done = facts(
        run("check-dequeue", "--queue", queue, "--batch-size", "7", "--concurrency", "2", "--json")
    )

    assert done["check"]["distinct"] == 200
    assert done["check"]["runs"] == 1
    assert [done["check"][fault] for fault in ("duplicates", "missing", "damaged")] == [0, 0, 0]
    assert client.count(queue, JobState.SUCCEEDED) == 200


def test_check_dequeue_misses_a_lost_job(run, client, queue):
    run("enqueue", "--queue", queue, "--num-queries", "1", "--batch-size", "10")
    [stolen, *_] = client.dequeue(queue, limit=3)
    client.ack(queue, succeeded=[stolen])

    done = run("check-dequeue", "--queue", queue, "--batch-size", "10")

    assert done.returncode == 1
    assert "3 missing" in done.stdout


def test_dequeue_fails_the_share_it_is_told_to(run, client, queue):
    client.enqueue(queue, [Job(b"a", attempts_allowed=1)] * 60)

    done = facts(
        run(
            *("dequeue", "--queue", queue, "--num-queries", "6", "--batch-size", "10"),
            *("--dequeue-success-percent", "0", "--json"),
        )
    )

    assert done["jobs"] == 60
    assert client.count(queue, JobState.FAILED) == 60


def test_some_of_the_jobs_succeed_and_the_others_fail(run, client, queue):
    client.enqueue(queue, [Job(b"a", attempts_allowed=1)] * 200)

    done = run(
        *("dequeue", "--queue", queue, "--num-queries", "2", "--batch-size", "100"),
        *("--dequeue-success-percent", "50"),
    )

    assert done.returncode == 0, done.stderr
    failed = client.count(queue, JobState.FAILED)
    assert 50 < failed < 150  # outside in one of 10 ** 12 runs
    assert client.count(queue, JobState.SUCCEEDED) == 200 - failed


@pytest.mark.parametrize("source", ["file", "-"])
def test_lines_of_a_file_become_jobs(run, client, queue, tmp_path, source):
    content = b"to: ada\n\nto: gr\xffce"
    path = tmp_path / "lines"
    path.write_bytes(content)

    done = run(
        *("enqueue", "--queue", queue, "--batch-size", "2"),
        *("--from-file", str(path) if source == "file" else "-"),
        stdin=content,
    )

    assert done.returncode == 0, done.stderr
    assert "enqueued 3 jobs in 2 calls" in done.stdout
    bodies = sorted(job.body for job in client.dequeue(queue, limit=10))
    assert bodies == [b"", b"to: ada", b"to: gr\xffce"]


def test_a_line_that_cannot_be_stored_stops_the_run_and_is_named(run, client, queue):
    lines = b"short\n" * 4 + b"x" * (2 << 20) + b"\nshort\n"

    done = run("enqueue", "--queue", queue, "--batch-size", "2", "--from-file", "-", stdin=lines)

    assert done.returncode == 1
    assert "stopped at lines 5 to 6, which were not stored: invalid request: " in done.stderr
    assert client.count(queue, JobState.PENDING) == 4


def test_a_line_that_was_never_sent_is_known_not_to_be_stored(
    start, proxy, client, queue, wait_until
):
    process = start(proxy.port, "enqueue", "--queue", queue, "--from-file", "-")
    assert process.stdin is not None
    process.stdin.write(b"one\n")
    wait_until(lambda: b"enqueueJobs" in proxy.last_answer)
    proxy.close()

    _, said = process.communicate(b"two\n", timeout=SECONDS)

    assert process.returncode == 1
    assert b"stopped at line 2, which was not stored: " in said
    assert b"connection refused" in said


def test_a_line_whose_answer_is_lost_is_not_said_to_be_missing(start, proxy, client, queue):
    proxy.cut_at(b"enqueueJobs", Cut.AFTER)
    process = start(proxy.port, "enqueue", "--queue", queue, "--from-file", "-")

    _, said = process.communicate(b"one\n", timeout=SECONDS)

    assert process.returncode == 1
    assert b"stopped at line 1, which was not stored for sure: " in said
    assert client.count(queue, JobState.PENDING) == 1


def test_get_job_count(run, client, queue):
    client.enqueue(queue, [Job(b"a", priority=2), Job(b"b"), Job(b"c", run_after_ms=2**42)])

    count = ("get-job-count", "--queue", queue)
    assert run(*count).stdout == "2\n"
    assert facts(run(*count, "--priority", "2", "--json")) == {"count": 1}
    assert run(*count, "--count-future-jobs").stdout == "1\n"
    assert run(*count, "--job-state", "FAILED").stdout == "0\n"


def test_lookup_shows_jobs_and_fails_for_unknown_ones(run, client, queue):
    [descriptor] = client.enqueue(queue, [b"\x1b[2J"])

    shown = run("lookup", "--job-descriptor", descriptor)
    assert shown.returncode == 0
    assert "PENDING" in shown.stdout
    assert "\\x1b[2J" in shown.stdout
    found = facts(run("lookup", "--job-descriptor", descriptor, "--json"))
    assert found[descriptor]["body"] == "\x1b[2J"

    unknown = run("lookup", "--job-descriptor", f"{queue}:s1:p1:99999999")
    assert unknown.returncode == 1
    assert "unknown" in unknown.stderr


def test_an_endless_load_shows_a_line_a_second_and_ends_in_order(service, queue, client):
    process = subprocess.Popen(
        [
            *COMMAND,
            "enqueue",
            "--queue",
            queue,
            "--num-queries",
            "-1",
            "--progress",
            "--port",
            str(service.port),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    line = process.stderr.readline()
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=30)

    for word in ("calls/s", "jobs/s", "p50", "p99", "errors 0"):
        assert word in line
    assert process.returncode == 0
    assert f"enqueued {client.count(queue, JobState.PENDING):,} jobs" in out


def test_a_second_interrupt_ends_a_load_whose_service_hangs(
    start, proxy, queue, client, wait_until
):
    client.enqueue(queue, [b"a"] * 5)
    process = start(
        *(proxy.port, "dequeue", "--queue", queue, "--num-queries", "-1", "--progress", "--json")
    )
    assert process.stderr is not None
    wait_until(lambda: client.count(queue, JobState.SUCCEEDED) == 5)
    proxy.hold()

    process.send_signal(signal.SIGINT)
    read_until(process.stderr.fileno(), b"interrupt it again")
    process.send_signal(signal.SIGINT)
    out, said = process.communicate(timeout=SECONDS)

    assert process.returncode == 1, said
    done = json.loads(out)
    assert done["jobs"] == 5
    assert done["errors"] == {"GivenUp": 1}


@pytest.mark.parametrize("command", ["dequeue", "check-dequeue"])
def test_a_last_ack_that_fails_costs_no_figures(start, proxy, run, queue, client, command):
    run("enqueue", "--queue", queue, "--batch-size", "5")
    proxy.cut_at(b"ackDequeuedJobs", Cut.BEFORE, times=2)  # it is sent once more

    process = start(
        *(proxy.port, command, "--queue", queue, "--num-queries", "1", "--batch-size", "5"),
        "--json",
    )
    out, said = process.communicate(timeout=SECONDS)

    assert process.returncode == 1, said
    done = json.loads(out)
    assert (done["calls"], done["jobs"], done["errors"]) == (1, 5, {"OutcomeUnknown": 1})
    assert command == "dequeue" or done["check"]["distinct"] == 5
    assert client.count(queue, JobState.IN_PROGRESS) == 5


def test_a_load_outlives_the_router_and_counts_its_errors(
    start: Start, service: Deployment, client: Client, queue: str, wait_until: WaitUntil
):
    """Nothing starts the router again until the load has met its absence."""
    process = start(
        *(service.port, "enqueue", "--queue", queue, "--num-queries", "-1", "--progress", "--json")
    )
    assert process.stderr is not None
    wait_until(lambda: client.count(queue, JobState.PENDING) > 0)
    router, supervisord = service.pid_of("router"), service.supervisord_pid()
    with frozen(supervisord):
        os.kill(router, signal.SIGKILL)
        read_until(process.stderr.fileno(), b"CannotConnect")
    service.wait_until_serving()
    stored = client.count(queue, JobState.PENDING)
    wait_until(lambda: client.count(queue, JobState.PENDING) > stored)

    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=SECONDS)

    assert process.returncode == 1
    done = json.loads(out)
    assert done["errors"]["CannotConnect"] > 0
    unknown = done["errors"].get("OutcomeUnknown", 0)
    assert 0 <= client.count(queue, JobState.PENDING) - done["jobs"] <= unknown


def test_a_terminal_gets_a_line_a_second_by_itself(service, queue):
    pid, terminal = pty.fork()
    if pid == 0:
        command = [*COMMAND, "enqueue", "--queue", queue, "--num-queries", "-1"]
        os.execv(sys.executable, [*command, "--port", str(service.port)])
    try:
        read_until(terminal, b"calls/s")
        os.write(terminal, b"\x03")  # Ctrl-C
        read_until(terminal, b"enqueued ")
        _, status = os.waitpid(pid, 0)
    finally:
        os.close(terminal)  # which ends it if it runs still

    assert os.waitstatus_to_exitcode(status) == 0


def test_a_pipe_gets_the_summary_only(run, queue):
    done = run("enqueue", "--queue", queue)

    assert done.stderr == ""
    assert done.stdout.startswith("enqueued 1 job in 1 call\n")


def test_a_body_of_the_command_line_is_that_of_each_job(run, client, queue):
    done = run("enqueue", "--queue", queue, "--body", "grüße\n", "--batch-size", "2")

    assert done.stdout.startswith("enqueued 2 jobs in 1 call")
    assert [job.body for job in client.dequeue(queue, limit=3)] == ["grüße\n".encode()] * 2


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_is_one_line(service, unbuffered):
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [*COMMAND, "get-queue-names", "--json", "--port", str(service.port)],
            env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=SECONDS,
        )

    assert done.returncode == 1
    assert done.stderr == "pinlater: input or output failed: no space left on device\n"


def test_an_unknown_queue_is_said_at_once(run):
    done = run("dequeue", "--queue", "nowhere", "--num-queries", "-1")

    assert done.returncode == 1
    assert done.stderr.startswith("pinlater: QUEUE_NOT_FOUND: queue 'nowhere' does not exist")


def test_no_service_is_said_with_the_cure(free_port):
    done = subprocess.run(
        [*COMMAND, "get-queue-names", "--port", str(free_port())],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 1
    assert "connection refused" in done.stderr
    assert "`pinlaterd up`" in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["enqueue"],
        ["dequeue", "--queue", "q", "--batch-size", "0"],
        ["enqueue", "--queue", "q", "--priority", "128"],
        ["enqueue", "--queue", "q", "--body", "a", "--from-file", "-"],
        ["dequeue", "--queue", "q", "--batch-size", str(2**31)],
        ["fly"],
    ],
)
def test_wrong_usage_exits_2(run, arguments):
    assert run(*arguments).returncode == 2


@pytest.mark.parametrize(
    "command",
    [
        *("create", "enqueue", "dequeue", "check-dequeue", "lookup", "get-queue-names"),
        *("get-job-count", "bench"),
    ],
)
def test_every_command_has_help_with_an_example(command):
    environment = {**os.environ, "COLUMNS": "100"}
    done = subprocess.run(
        [*COMMAND, command, "--help"],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )

    assert done.returncode == 0
    assert "Example" in done.stdout
    assert f"pinlater {command}" in done.stdout
