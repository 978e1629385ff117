"""`pinlater` as a program, on a real service."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from pinlaterd.client import Job, JobState
from tests.cli.program import SECONDS, Program, read_until
from tests.deployment import claim, frozen
from tests.servers.proxy import Cut, Proxy


@pytest.fixture
def proxy(service):
    proxy = Proxy(service.port)
    yield proxy
    proxy.close()


@pytest.fixture
def by_proxy(proxy):
    return Program("pinlater", "--port", proxy.port)


def test_create_and_get_queue_names(pinlater, client):
    assert pinlater.facts("create --queue made_by_tool") == {"created": "made_by_tool"}
    assert pinlater("create --queue made_by_tool").returncode == 0

    assert "made_by_tool" in client.queue_names()
    assert "made_by_tool" in pinlater("get-queue-names").stdout.splitlines()
    assert "made_by_tool" in pinlater.facts("get-queue-names")


def test_enqueue_makes_batches_over_all_connections(pinlater, client, queue):
    done = pinlater.facts(
        f"enqueue --queue {queue} --num-queries 25 --batch-size 4 --concurrency 3 --priority 2 "
        "--body-bytes 123"
    )

    assert (done["calls"], done["jobs"], done["errors"]) == (25, 100, {})
    assert done["p50_ms"] > 0
    records = list(client.scan(queue, JobState.PENDING, priority=2))
    assert len(records) == 100
    bodies = client.lookup([r.descriptor for r in records], include_body=True).values()
    assert {len(r.body or b"") for r in bodies} == {123}


def test_what_was_enqueued_comes_out_checked(pinlater, client, queue):
    assert pinlater(f"enqueue --queue {queue} --num-queries 20 --batch-size 10").stdout
    done = pinlater.facts(f"check-dequeue --queue {queue} --batch-size 7 --concurrency 2")

    assert done["check"]["distinct"] == 200
    assert done["check"]["runs"] == 1
    assert [done["check"][fault] for fault in ("duplicates", "missing", "damaged")] == [0, 0, 0]
    assert client.count(queue, JobState.SUCCEEDED) == 200


def test_check_dequeue_misses_a_lost_job(pinlater, client, queue):
    pinlater(f"enqueue --queue {queue} --batch-size 10")
    [stolen, *_] = claim(client, queue, 3)
    client.ack(queue, succeeded=[stolen])

    done = pinlater(f"check-dequeue --queue {queue} --batch-size 10")

    assert done.returncode == 1
    assert "3 missing" in done.stdout


def test_some_of_the_jobs_succeed_and_the_others_fail(pinlater, client, queue):
    client.enqueue(queue, [Job(b"a", attempts_allowed=1)] * 260)

    def take(jobs: int, percent: int) -> None:
        """Dequeue so many jobs, in as many calls as it takes."""
        until = time.monotonic() + SECONDS
        while jobs > 0:
            assert time.monotonic() < until, f"{jobs} jobs did not come"
            one = f"dequeue --queue {queue} --num-queries 1 --batch-size {min(100, jobs)}"
            jobs -= pinlater.facts(f"{one} --dequeue-success-percent {percent}")["jobs"]
        assert jobs == 0

    take(200, percent=50)
    failed = client.count(queue, JobState.FAILED)
    take(60, percent=0)

    assert 50 < failed < 150  # outside in one of 10 ** 12 runs
    assert client.count(queue, JobState.SUCCEEDED) == 200 - failed
    assert client.count(queue, JobState.FAILED) == failed + 60


# --- lines of a file --------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["file", "-"])
def test_lines_of_a_file_become_jobs(pinlater, client, queue, tmp_path, source):
    content = b"to: ada\r\n\nto: gr\xffce\r"
    path = tmp_path / "lines"
    path.write_bytes(content)

    file = path if source == "file" else "-"
    done = pinlater.output(
        f"enqueue --queue {queue} --batch-size 2 --from-file", file, stdin=content
    )

    assert "enqueued 3 jobs in 2 calls" in done
    bodies = sorted(job.body for job in claim(client, queue, 3))
    assert bodies == [b"", b"to: ada", b"to: gr\xffce\r"]


def test_the_first_lines_are_the_descriptors_which_lookup_takes(pinlater, queue):
    moment = "2100-01-02T03:04:05.678Z"
    at = f"--run-after {moment} --attempts 7 --status"
    done = pinlater.output(f"enqueue --queue {queue} --num-queries 2 --body x {at}", "to be done")

    *descriptors, summary = done.splitlines()
    assert summary == "enqueued 2 jobs in 2 calls"
    assert len({*descriptors}) == 2
    for descriptor in descriptors:
        shown = pinlater.output(f"lookup --job-descriptor {descriptor}")
        for fact in (
            f"run after      {moment}",
            "7 of 7 remaining",
            "to be done",
            "body           x",
        ):
            assert fact in shown


def test_a_delay_counts_from_the_moment_of_each_enqueue(pinlater, client, queue):
    facts = pinlater.facts(f"enqueue --queue {queue} --delay 3600 --batch-size 10")

    [first, *_] = client.lookup(facts["descriptors"]).values()
    assert len(facts["descriptors"]) == 10
    assert 3500 < first.run_after_ms / 1000 - time.time() <= 3600


def test_more_than_ten_jobs_are_a_load_whose_rates_are_shown(pinlater, queue):
    done = pinlater.output(f"enqueue --queue {queue} --batch-size 11")

    assert done.startswith("enqueued 11 jobs in 1 call\n")
    assert "jobs/s" in done
    assert f"{queue}:" not in done


def test_a_line_that_cannot_be_stored_stops_the_run_and_is_named(pinlater, client, queue):
    lines = b"short\n" * 4 + b"x" * (2 << 20) + b"\nshort\n"

    done = pinlater.error(f"enqueue --queue {queue} --batch-size 2 --from-file -", stdin=lines)

    assert "stopped at lines 5 to 6, which were not stored: invalid request: " in done
    assert client.count(queue, JobState.PENDING) == 4


def test_a_line_that_was_never_sent_is_known_not_to_be_stored(by_proxy, proxy, queue, wait_until):
    with by_proxy.started(f"enqueue --queue {queue} --from-file -") as process:
        process.stdin.write(b"one\n")
        wait_until(lambda: b"enqueueJobs" in proxy.last_answer)
        proxy.close()

        _, said = process.communicate(b"two\n", timeout=SECONDS)

    assert process.returncode == 1
    assert b"stopped at line 2, which was not stored: " in said
    assert b"connection refused" in said


def test_a_line_whose_answer_is_lost_is_not_said_to_be_missing(by_proxy, proxy, client, queue):
    proxy.cut_at(b"enqueueJobs", Cut.AFTER)

    done = by_proxy.error(f"enqueue --queue {queue} --from-file -", stdin=b"one\n")

    assert "stopped at line 1, which was not stored for sure: " in done
    assert client.count(queue, JobState.PENDING) == 1


# --- single calls -----------------------------------------------------------------------------


def test_get_job_count(pinlater, client, queue):
    client.enqueue(queue, [Job(b"a", priority=2), Job(b"b"), Job(b"c", run_after_ms=2**42)])

    count = f"get-job-count --queue {queue}"
    assert pinlater(count).stdout == "2\n"
    assert pinlater.facts(f"{count} --priority 2") == {"count": 1, "at_least": False}
    assert pinlater(f"{count} --count-future-jobs").stdout == "1\n"
    assert pinlater(f"{count} --job-state FAILED").stdout == "0\n"


def test_lookup_shows_jobs_and_fails_for_unknown_ones(pinlater, client, queue):
    """What anybody wrote is escaped for people, and exact for programs."""
    [descriptor] = client.enqueue(queue, [Job(b"\x1b[2J\xff", custom_status="\x07\x1b]0;x\x07")])

    shown = pinlater.output("lookup --job-descriptor", descriptor)
    assert "PENDING" in shown
    assert "\\x1b[2J\\xff" in shown
    assert not {"\x1b", "\x07"} & {*shown}
    exact = pinlater("lookup --json --job-descriptor", descriptor).stdout
    assert exact.isascii()
    assert not {"\x1b", "\x07"} & {*exact}
    found = json.loads(exact)[descriptor]
    assert "body" not in found
    assert (found["body_base64"], found["custom_status"]) == ("G1sySv8=", "\x07\x1b]0;x\x07")

    unknown = pinlater.error(f"lookup --job-descriptor {queue}:s1:p1:99999999")
    assert "unknown" in unknown


def test_a_job_with_a_key_is_stored_once_and_found_by_it(pinlater, client, queue):
    command = f"enqueue --queue {queue} --body hello --key order-17"
    first, repeated = pinlater.output(command), pinlater.output(command)

    descriptor = first.splitlines()[0]
    assert repeated == f"{descriptor}\nexisted, nothing was stored\n"
    assert [job.descriptor for job in client.scan(queue, JobState.PENDING)] == [descriptor]
    assert json.loads(pinlater.output(f"{command} --json")) == {
        "descriptor": descriptor,
        "existed": True,
    }
    shown = pinlater.output(f"lookup --queue {queue} --key order-17")
    assert shown.startswith(descriptor)
    assert "\n  key            order-17\n" in shown
    assert "\n  key of all queues False\n" in shown
    found = json.loads(pinlater.output(f"lookup --json --queue {queue} --key order-17"))
    assert (found["order-17"]["descriptor"], found["order-17"]["key"]) == (descriptor, "order-17")

    assert "unknown: order-18" in pinlater.error(f"lookup --queue {queue} --key order-18")


def test_jobs_that_expire(pinlater, client, queue):
    """At a time, or so many seconds after each is made; one that has a key, too."""
    enqueue = f"enqueue --queue {queue} --body a --expires-at"
    before_ms = round(time.time() * 1000)
    pinlater.output(f"{enqueue} 2100-01-01T00:00:00Z")
    pinlater.output(f"{enqueue} 3600.5 --key order-18")
    after_ms = round(time.time() * 1000)

    jobs = client.scan(queue, JobState.PENDING)
    found = {job.options.key: job.options.expires_at_ms for job in jobs}
    assert found[None] == 4_102_444_800_000
    assert before_ms <= found["order-18"] - 3_600_500 <= after_ms
    assert "write 2026-11-21T03:00:00Z" in pinlater.error(f"{enqueue} tomorrow", code=2)


# --- progress, interrupts, failures -----------------------------------------------------------


def test_an_endless_load_shows_a_line_a_second_and_ends_in_order(pinlater, queue, client):
    with pinlater.started(f"enqueue --queue {queue} --num-queries -1 --progress") as process:
        line = read_until(process.stderr.fileno(), b"\n")
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=SECONDS)

    for word in (b"calls/s", b"jobs/s", b"p50", b"p99", b"errors 0"):
        assert word in line
    assert process.returncode == 0
    assert f"enqueued {client.count(queue, JobState.PENDING):,} jobs".encode() in out


def test_a_second_interrupt_ends_a_load_whose_service_hangs(
    by_proxy, proxy, queue, client, wait_until
):
    client.enqueue(queue, [b"a"] * 5)
    dequeue = f"dequeue --queue {queue} --num-queries -1 --progress --json"
    with by_proxy.started(dequeue) as process:
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
def test_a_last_ack_that_fails_costs_no_figures(by_proxy, proxy, pinlater, queue, client, command):
    pinlater(f"enqueue --queue {queue} --batch-size 5")
    proxy.cut_at(b"ackDequeuedJobs", Cut.BEFORE, times=2)  # it is sent once more

    ended = by_proxy(f"{command} --queue {queue} --num-queries 1 --batch-size 5 --json")

    assert ended.returncode == 1, ended.stderr
    done = json.loads(ended.stdout)
    assert (done["calls"], done["jobs"], done["errors"]) == (1, 5, {"OutcomeUnknown": 1})
    assert command == "dequeue" or done["check"]["distinct"] == 5
    assert client.count(queue, JobState.IN_PROGRESS) == 5


def test_a_load_outlives_the_router_and_counts_its_errors(
    pinlater, service, client, queue, wait_until
):
    """Nothing starts the router again until the load has met its absence."""
    enqueue = f"enqueue --queue {queue} --num-queries -1 --progress --json"
    with pinlater.started(enqueue) as process:
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


def test_a_terminal_gets_a_line_a_second_by_itself(pinlater, queue):
    with pinlater.on_a_terminal(f"enqueue --queue {queue} --num-queries -1") as terminal:
        terminal.wait_for(b"calls/s")
        terminal.types("\x03")  # Ctrl-C

        assert terminal.end() == 0
    assert b"enqueued " in terminal.shown


def test_a_pipe_gets_descriptors_and_summary_only(pinlater, client, queue):
    done = pinlater(f"enqueue --queue {queue} --batch-size 2 --body", "grüße\n")

    assert done.stderr == ""
    assert done.stdout.endswith("\nenqueued 2 jobs in 1 call\n")
    assert [job.body for job in claim(client, queue, 2)] == ["grüße\n".encode()] * 2


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_is_one_line(pinlater, unbuffered):
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            pinlater.line("get-queue-names --json"),
            env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=SECONDS,
        )

    assert done.returncode == 1
    assert done.stderr == "pinlater: input or output failed: no space left on device\n"


def test_an_unknown_queue_is_said_at_once(pinlater):
    done = pinlater.error("dequeue --queue nowhere --num-queries -1")

    assert done.startswith("pinlater: QUEUE_NOT_FOUND: queue 'nowhere' does not exist")


def test_no_service_is_said_with_the_cure(free_port):
    done = Program("pinlater", "--port", free_port())("get-queue-names")

    assert done.returncode == 1
    assert "connection refused" in done.stderr
    assert "`pinlaterd up`" in done.stderr
