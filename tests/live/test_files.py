"""What a running service makes of its files: settings, mistakes, and files half written."""

from __future__ import annotations

import json
import time

import pytest

from pinlaterd.client import Job, JobState
from pinlaterd.coordinator.reload import LOOK_SECONDS
from pinlaterd.errors import InvalidRequest
from tests.deployment import POLL_SECONDS
from tests.live.conftest import BASE, is_dequeue_only, serves

pytestmark = pytest.mark.service

TRIES = 20
BROKEN_SHARDS = "shards:\n  1: {engine: mysqll}\n  2: {dequeue_only: maybe}\n"


def log_of(live, program):
    return (live.deployment.folder / "run/log" / f"{program}.log").read_text()


def test_a_broken_file_changes_nothing_and_is_shown_until_it_is_mended(live, client, queue):
    version = live.deployment.status()["config_version"]
    live.shards(BROKEN_SHARDS)
    live.write("queues.yaml", "queues: {mail: {max_jobs_per_second: -1}}\n")
    live.wait_until(lambda s: len(s["config_problems"]) == 3)

    status = live.deployment.status()
    assert [problem.split(": ")[:2] for problem in status["config_problems"]] == [
        ["etc/shards.yaml:2", "shards.1.engine"],
        ["etc/shards.yaml:3", "shards.2.dequeue_only"],
        ["etc/queues.yaml:1", "queues.mail.max_jobs_per_second"],
    ]
    assert status["config_version"] == version
    live.wait_until(lambda s: s["healthy"])
    assert client.enqueue(queue, [Job(b"x")])
    live.wait_until(lambda _: live.deployment.stats()["gauges"]["config_problems"] == 3)
    # supervisord writes what a process logs, a moment later
    live.wait_until(lambda _: "unknown engine 'mysqll'" in log_of(live, "coordinator"))
    assert log_of(live, "coordinator").count("unknown engine 'mysqll'") == 1

    live.shards(BASE)
    live.write("queues.yaml", "queues: {}\n")
    live.wait_until(lambda s: not s["config_problems"])
    live.wait_until(lambda _: live.deployment.stats()["gauges"]["config_problems"] == 0)


def test_processes_come_up_while_a_file_is_broken(live, client, queue):
    live.shards(BROKEN_SHARDS)
    live.wait_until(lambda s: s["config_problems"])

    for program in ("shard-1", "coordinator", "router"):
        live.deployment.supervisorctl("restart", program)
        live.deployment.wait_until_serving()

    live.wait_until(lambda s: len(s["config_problems"]) == 2)


def test_a_half_written_file_is_not_read(live):
    """What is written bit by bit, and valid in between, counts as a whole."""
    for _ in range(TRIES):
        version = live.deployment.status()["config_version"]
        if _is_ignored_while_written(live, version):
            break
        live.shards(BASE)
        live.wait_until_changed()
    else:
        pytest.fail("held up each time")
    live.wait_until(lambda s: is_dequeue_only(s, "1"))
    assert not live.deployment.status()["config_problems"]


def _is_ignored_while_written(live, version):
    """False: we were held up, and what looks the same for so long counts as whole."""
    with (live.etc / "shards.yaml").open("w") as file:
        written_at = time.monotonic()
        for line in ("shards:\n", "  1: {dequeue_only: true}\n", "  2: {}\n", "#\n" * 20):
            for part in (line[:5], line[5:]):
                file.write(part)
                file.flush()
                time.sleep(POLL_SECONDS)
                same = live.deployment.status()["config_version"] == version
                if time.monotonic() - written_at >= LOOK_SECONDS:
                    return False
                assert same
                written_at = time.monotonic()
    return True


def test_an_emptied_or_deleted_file_is_no_configuration(live):
    live.write("queues.yaml", "queues: {mail: {job_claimed_timeout_seconds: 5}}\n")
    version = live.wait_until_changed()
    for leave_behind in (lambda path: path.write_text("\n"), lambda path: path.unlink()):
        leave_behind(live.etc / "queues.yaml")
        live.wait_until(lambda s: "gone or empty" in "".join(s["config_problems"]))
        assert live.deployment.status()["config_version"] == version

    live.write("queues.yaml", "# nothing\n")
    live.wait_until(lambda s: s["config_version"] > version and not s["config_problems"])


def test_time_outs_of_a_queue_and_of_all(live, client, queue, wait_until):
    client.enqueue(queue, [Job(b"a", attempts_allowed=9)])
    assert client.dequeue(queue, limit=1, max_wait_ms=30_000)
    live.write("queues.yaml", f"queues: {{{queue}: {{job_claimed_timeout_seconds: 0.2}}}}\n")
    wait_until(lambda: client.count(queue, JobState.PENDING) == 1)

    live.write("queues.yaml", "queues: {}\n")
    version = live.wait_until_changed()
    [claimed] = client.dequeue(queue, limit=1, max_wait_ms=30_000)
    assert claimed.claim_timeout_seconds == 600
    live.settings(job_claimed_timeout_seconds=0.2)
    live.wait_until_followed(lambda s: s["config_version"] > version)
    wait_until(lambda: client.count(queue, JobState.PENDING) == 1)


def test_no_shard_creates_more_queues_than_allowed(live, client, queue):
    before = client.queue_names()
    live.settings(max_queues=len(before) + 1)
    live.wait_until_changed()

    client.create_queue("the_last")
    with pytest.raises(InvalidRequest, match="as max_queues in etc"):
        client.create_queue("one_too_many")
    client.create_queue(queue)

    assert client.queue_names() == before | {"the_last"}


def test_settings_that_need_a_restart_are_named(live):
    live.settings(request_timeout_ms=6000, count_limit=7)

    live.wait_until(lambda s: s["needs_restart"])
    status = live.deployment.status()
    assert status["needs_restart"] == [
        (
            "etc/pinlaterd.yaml: request_timeout_ms: 30000 is active, the file says 6000; needs a "
            "restart: `pinlaterd up`"
        )
    ]
    active = json.loads((live.deployment.folder / "run/config.json").read_text())["server"]
    assert (active["request_timeout_ms"], active["count_limit"]) == (30_000, 7)
    live.wait_until(lambda s: serves(s, "1", "2"))
