"""`pinlater-admin top` and `shard list`, on a real service."""

from __future__ import annotations

import time
from typing import Any

import pytest
from click.testing import CliRunner

from pinlaterd.cli import service_status
from pinlaterd.cli.admin import cli
from pinlaterd.client import Job
from pinlaterd.client.coordinator import take_sample
from pinlaterd.stats import Stats, empty
from pinlaterd.status import Sample, frame, shards_of
from tests.cli.program import Program
from tests.deployment import claim, serving


def until_shown(admin, queue, **wanted):
    """A frame in which the queue is as wanted: figures are up to two seconds old."""
    deadline = time.monotonic() + 60
    while True:
        found = admin.facts("top")
        rows: Any = {one["name"]: one for one in found["queues"]}
        shown = rows.get(queue, {})
        if wanted.items() <= shown.items():
            return found, shown
        assert time.monotonic() < deadline, shown


def test_a_frame_shows_what_is_pending_scheduled_and_running(admin, client, queue):
    client.enqueue(queue, [Job(b"a")] * 5 + [Job(b"later", run_after_ms=2**42)] * 2)
    claim(client, queue, 2)

    found, shown = until_shown(admin, queue, pending=3, scheduled=2, in_progress=2)

    assert shown["oldest_ready_age_ms"] > 0
    assert {process["name"] for process in found["processes"]} >= {"router", "shard-1"}
    assert all(process["rss_bytes"] > 1_000_000 for process in found["processes"])
    held = [shard["jobs"] for shard in admin.facts("shard list")]
    assert sum(jobs["scheduled"] for jobs in held) >= 2
    assert sum(jobs["in_progress"] for jobs in held) >= 2
    lines = admin("top").stdout.splitlines()
    assert lines[0].startswith("healthy; ")
    assert any(line.startswith(f"{queue}\t") for line in lines)
    assert "shard\tengine\twhere\tstate\tenqueues\tpending" in admin("shard list").stdout


@pytest.fixture
def counted_to_two(tmp_path_factory):
    folder = tmp_path_factory.mktemp("t") / "d"
    with serving(folder, shards=1, settings={"count_limit": 2, "stats_host": "::1"}) as deployment:
        with deployment.client() as client:
            for name in ("py10", "py2", "py1"):
                client.create_queue(name)
            client.enqueue("py2", [b"a", b"b", b"c", Job(b"later", run_after_ms=2**42)])
        yield deployment


def test_stats_are_exact_and_py2_comes_before_py10(counted_to_two, wait_until):
    admin = Program("admin", "--dir", counted_to_two.folder)

    def is_exact():
        """By gauges, which are a second old."""
        return "PENDING\t3\n" in admin.output("queue stats py2 --seconds 0.1")

    wait_until(is_exact)
    assert admin.facts("queue stats py2 --seconds 0.1")["jobs"]["PENDING"] == 3
    assert admin.output("queue stats py10 --seconds 0.1").count("\t0\n") == 5
    assert admin.output("queue list").split() == ["py1", "py2", "py10"]
    assert [queue["name"] for queue in admin.facts("top")["queues"]] == ["py1", "py2", "py10"]
    assert f"statistics [::1]:{counted_to_two.stats_port}" in admin.output("status")
    up = counted_to_two.command("up", str(counted_to_two.folder))
    assert f"statistics on http://[::1]:{counted_to_two.stats_port}, shards 1" in up


def test_counts_that_end_at_the_limit_say_so_wherever_they_are_asked_for(counted_to_two):
    """Those that the service's figures confirm don't, nor one beside which others did."""
    target = ("--host", "127.0.0.1", "--port", counted_to_two.port)
    url = f"http://[::1]:{counted_to_two.stats_port}"
    pinlater = Program("pinlater", *target)
    admin = Program("admin", *target, "--stats-url", url)
    count = "get-job-count --queue py2"

    assert pinlater.output(count) == ">=2\n"
    assert pinlater.facts(count) == {"count": 2, "at_least": True}
    assert pinlater.facts(f"{count} --count-future-jobs") == {"count": 1, "at_least": False}
    assert pinlater.output(f"{count} --job-state failed") == "0\n"
    stats = admin.facts("queue stats py2 --seconds 0.1")
    assert stats["jobs"]["PENDING"] == 3 or stats["at_least"]["PENDING"]
    assert not stats["at_least"]["SCHEDULED"]


def test_stats_that_are_not_known_exactly_say_so(monkeypatch, service, client, queue):
    client.enqueue(queue, [b"a"] * 3)
    frame = service_status.take_frame

    def with_a_shard_that_counts() -> dict[str, Any]:
        found = frame()
        shards = [{**shard, "jobs": None} for shard in found["shards"]]
        return {**found, "shards": shards, "count_limit": 3}

    monkeypatch.setattr(service_status, "take_frame", with_a_shard_that_counts)
    target = ["--dir", str(service.folder), "--port", str(service.port)]
    samples = Sample(STATUS, {}, 0), Sample(STATUS, {}, 1)
    monkeypatch.setattr(service_status, "take_sample", iter(samples).__next__)

    shown = CliRunner().invoke(cli, ["queue", "stats", queue, "--seconds", "0.1", *target]).output

    assert "PENDING\t>=3\n" in shown
    assert "IN_PROGRESS\t0\n" in shown


@pytest.mark.parametrize("by_url", [False, True])
def test_a_program_sees_what_shard_list_shows(admin, service, *, by_url):
    url = f"127.0.0.1:{service.stats_port}" if by_url else None

    sample = take_sample(service.folder, url)

    shown = [(shard["name"], shard["state"], shard["where"]) for shard in shards_of(sample)]
    assert shown == [(s["name"], s["state"], s["where"]) for s in admin.facts("shard list")]
    assert sample.stats["router"]["gauges"]["process_up"] == 1


def test_top_on_a_terminal_goes_on_until_q(admin):
    with admin.on_a_terminal("top") as terminal:
        terminal.wait_for(b"q ends", times=2)
        terminal.types("q")

        assert terminal.end() == 0
    assert b"\x1b[?1049h" in terminal.shown  # the other screen,
    assert b"\x1b[?1049l" in terminal.shown  # and back
    assert b"shard-1" in terminal.shown


# --- frames -----------------------------------------------------------------------------------

STATUS: Any = {
    "healthy": True,
    "problems": [],
    "warnings": [],
    "shards": [
        {
            "name": "1",
            "engine": "sqlite",
            "state": "serving",
            "dequeue_only": False,
            "degraded": "",
            "server": "",
        }
    ],
    "processes": [
        {
            "name": "shard-1",
            "kind": "shard",
            "state": "serving",
            "pid": 7,
            "facts": {"file": "f"},
            "cpu_seconds": 1.0,
            "rss_bytes": 5,
        }
    ],
}


def counted(stats: Stats) -> Stats:
    stats.gauge("shard_queues_counting", 0)
    stats.gauge("mail_pending", 10)
    stats.gauge("mail_scheduled", 4)
    stats.peak("mail_oldest_ready_age_ms", 70)
    return stats


def test_rates_and_percentiles_are_of_the_time_between_the_samples():
    stats = counted(Stats())
    stats.record_each(("mail_dequeue_delay_ms",), [9_000] * 1_000)
    before = Sample(STATUS, {"shard-1": stats.snapshot()}, 1.0)
    stats.count("mail_enqueue", 30)
    stats.count("mail_ack_failed", 3)
    stats.count("mail_timeout_retry", 1)
    stats.record_each(("mail_dequeue_delay_ms",), [5] * 10)
    for jobs in (10, 20):
        stats.record("shard_batch_jobs", jobs)
        stats.record("shard_commit_ms", 2)
    busier = [STATUS["processes"][0] | {"cpu_seconds": 2.0}]
    now = Sample(STATUS | {"processes": busier}, {"shard-1": stats.snapshot()}, 3.0)

    found = frame(before, now)

    [mail], [shard], [process] = found["queues"], found["shards"], found["processes"]
    assert (mail["enqueues_per_second"], mail["failures_per_second"]) == (15, 2)
    assert (mail["pending"], mail["scheduled"]) == (6, 4)
    assert mail["dequeue_delay_p99_ms"] == pytest.approx(5, rel=0.05)
    assert mail["jobs_per_second_limit"] is None
    assert (shard["commits_per_second"], shard["jobs_per_commit"]) == (1, 15)
    assert shard["commit_p99_ms"] == pytest.approx(2, rel=0.05)
    assert process["cpu_percent"] == 50


def test_what_a_shard_that_does_not_serve_holds_is_not_known():
    sample = Sample(STATUS, {"shard-1": empty()}, 1.0)

    [shard] = frame(sample, sample)["shards"]

    assert shard["jobs"] is None


@pytest.mark.parametrize(
    ("healthy", "degraded", "shown"),
    [(True, "", "healthy; "), (True, "the store is full", "degraded; "), (False, "", "NOT he")],
)
def test_the_first_line_says_how_the_service_is(capsys, healthy, degraded, shown):
    shards = [STATUS["shards"][0] | {"degraded": degraded}]
    sample = Sample(STATUS | {"healthy": healthy, "shards": shards}, {}, 1.0)

    service_status._print_frame(frame(sample, sample))

    first_line, _, tables = capsys.readouterr().out.partition("\n")
    assert first_line.startswith(shown)
    state, takes_jobs = ("serving, degraded", "no") if degraded else ("serving", "yes")
    assert f"\n1\t{state}\t{takes_jobs}\t" in tables
