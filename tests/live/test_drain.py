"""Taking shards out of service with `pinlater-admin`, while a load runs or things are killed."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from pinlaterd.client import AckInfo, Client, Job, JobOptions, JobState
from tests.deployment import COMMAND_SECONDS
from tests.faults.load import shards_of
from tests.live.conftest import BASE, Live, is_dequeue_only, serves

pytestmark = pytest.mark.service

COMMAND = [sys.executable, "-m", "pinlaterd.cli.admin"]
HOUR_MS = 3_600_000
BATCH_JOBS = 100  # that a move has under way at a time
# Each batch goes into one shard: there are so many that none gets none.
_BATCH_JOBS = 20

Admin = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def admin(live: Live) -> Admin:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*COMMAND, *arguments, "--dir", str(live.deployment.folder)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=COMMAND_SECONDS,
        )

    return run


@pytest.fixture(autouse=True)
def _all_are_known(live: Live) -> None:
    """Also to the router: the test before may have added a shard."""
    live.wait_until(
        lambda status: any(
            process["facts"].get("healthy shards") == "1, 2" for process in status["processes"]
        )
    )


def start(live: Live, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*COMMAND, *arguments, "--dir", str(live.deployment.folder)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def facts(done: subprocess.CompletedProcess[str]):
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def scheduled_jobs(client: Client, queue: str, count: int) -> dict[bytes, Job]:
    """Stored, over all shards; by their bodies."""
    at_ms = round(time.time() * 1000) + HOUR_MS
    jobs = [
        Job(
            f"{queue}/{n}".encode(),
            priority=1 + n % 3,
            run_after_ms=at_ms + n,
            attempts_allowed=1 + n % 4,
            custom_status=f"status {n}",
        )
        for n in range(count)
    ]
    stored: list[str] = []
    for at in range(0, count, _BATCH_JOBS):
        stored += client.enqueue(queue, jobs[at : at + _BATCH_JOBS])
    while len(shards_of(stored)) < 2:  # one was held up for a moment
        more = Job(f"{queue}/{len(jobs)}".encode(), run_after_ms=at_ms)
        jobs.append(more)
        stored += client.enqueue(queue, [more])
    return {job.body: job for job in jobs}


def all_records(client: Client, queue: str):
    found = [
        record.descriptor
        for state in JobState
        for future in (True, False)
        for record in client.scan(queue, state, future=future, page_size=1000)
    ]
    records = {}
    for at in range(0, len(found), 500):
        records.update(client.lookup(found[at : at + 500], include_body=True))
    return records


def check_moved(client: Client, queue: str, jobs: dict[bytes, Job], *, most_twice: int) -> int:
    """Every job is PENDING, on shard 1, as it was, and `most_twice` at most are there twice;
    returns how many have come from shard 2."""
    records = all_records(client, queue)
    pending = [record for record in records.values() if record.state is JobState.PENDING]
    ended = [record for record in records.values() if record.state is JobState.SUCCEEDED]
    assert len(pending) + len(ended) == len(records)
    assert {record.body for record in pending} == set(jobs)
    assert len(pending) - len(jobs) <= most_twice
    assert shards_of(record.descriptor for record in pending) == {"1"}
    for record in pending:
        job = jobs[record.body]
        assert record.run_after_ms == job.run_after_ms
        assert record.attempts_remaining == job.attempts_allowed
        assert record.descriptor.split(":")[2] == f"p{job.priority}"
        assert record.custom_status.endswith(job.custom_status)
    for record in ended:
        _, _, successor = record.custom_status.rpartition("moved to ")
        assert records[successor].body == record.body
        assert records[successor].custom_status.startswith(f"moved from {record.descriptor};")
    return len(ended)


# --- dequeue-only and drain -------------------------------------------------------------------


def test_drain_under_load_until_the_shard_is_empty_then_remove_it(live, admin, load, wait_until):
    with load.running():
        wait_until(lambda: shards_of(load.acknowledged) == {"1", "2"})

        drained = facts(admin("shard", "drain", "2", "--wait", "--json"))

        assert drained["jobs"]["pending"] == drained["jobs"]["in_progress"] == 0
        assert drained["moved"] == 0
    load.check()
    assert load.errors == []

    removed = admin("shard", "remove", "2")
    assert removed.returncode == 0, removed.stderr
    assert "shard 2 is removed" in removed.stderr
    live.wait_until(lambda status: serves(status, "1"))
    assert "shard-2" not in live.deployment.pids()


def test_no_job_is_enqueued_once_dequeue_only_has_returned(
    live, admin, client, load, wait_until, queue
):
    with load.running():
        wait_until(lambda: shards_of(load.acknowledged) == {"1", "2"})

        done = admin("shard", "dequeue-only", "2", "on")
        returned_ms = time.time() * 1000

        assert done.returncode == 0, done.stderr
        count = len(load.acknowledged)
        wait_until(lambda: len(load.acknowledged) > count + 200)
    records = all_records(client, queue).values()
    later = [record.descriptor for record in records if record.created_at_ms > returned_ms]
    assert shards_of(later) == {"1"}
    assert load.errors == []

    assert admin("shard", "dequeue-only", "2", "off").returncode == 0
    assert is_dequeue_only(live.deployment.status())
    wait_until(lambda: shards_of(client.enqueue(queue, [Job(b"again")])) == {"2"})
    client_deletes_all(client, queue)


def test_jobs_scheduled_for_later_do_not_hold_up_a_drain_and_are_told(admin, client, queue):
    scheduled_jobs(client, queue, 500)

    done = admin("shard", "drain", "2", "--wait")
    shown = facts(admin("shard", "drain", "2", "--json"))

    assert done.returncode == 0, done.stderr
    assert "scheduled for later, the last for 20" in done.stdout
    assert "--move" in done.stdout
    last = max(
        record.run_after_ms
        for record in client.scan(queue, JobState.PENDING, future=True)
        if ":s2:" in record.descriptor
    )
    assert shown["latest_run_after_ms"] == last
    refused = admin("shard", "remove", "2")
    assert refused.returncode == 1
    assert f"{shown['jobs']['scheduled']:,} scheduled" in refused.stderr
    client_deletes_all(client, queue)


def client_deletes_all(client: Client, queue: str) -> None:
    for priority in (1, 2, 3):
        client.delete_jobs(queue, JobState.PENDING, priority=priority, limit=10_000)


def test_what_would_stop_all_enqueues_is_asked_first(live, admin):
    assert admin("shard", "drain", "2").returncode == 0

    refused = admin("shard", "drain", "1")

    assert refused.returncode == 2
    assert "every enqueue will be refused" in refused.stderr
    assert is_dequeue_only(live.deployment.status(), "2")


# --- moves ------------------------------------------------------------------------------------


def test_moved_jobs_keep_all_but_their_place(admin, client, queue):
    jobs = scheduled_jobs(client, queue, 1000)
    [failed_once] = client.enqueue(queue, [Job(b"retried", priority=1, attempts_allowed=3)])
    [claimed] = client.dequeue(queue, limit=1, max_wait_ms=30_000)
    client.ack(queue, failed=[_later(claimed)])

    moved = facts(admin("shard", "drain", "2", "--move", "--wait", "--yes", "--json"))

    on_two = ":s2:" in failed_once
    assert moved["jobs"]["scheduled"] == 0
    records = all_records(client, queue)
    [retried] = [r for r in records.values() if r.body == b"retried" and r.state == 0]
    assert retried.attempts_remaining == 2
    assert ("(2 of 3 attempts left)" in retried.custom_status) == on_two
    client.delete_jobs(queue, JobState.PENDING, body_regex="^retried$")
    without_it = {d: r for d, r in records.items() if r.body != b"retried"}
    assert moved["moved"] == on_two + sum(r.state == 2 for r in without_it.values())
    assert admin("shard", "remove", "2").returncode == 0
    live_jobs = {r.body for r in without_it.values() if r.state is JobState.PENDING}
    assert live_jobs == set(jobs)
    client_deletes_all(client, queue)


def test_moved_jobs_keep_their_keys(admin, client, queue):
    later_ms = round(time.time() * 1000) + HOUR_MS
    jobs = [
        Job(
            b"keyed",
            run_after_ms=later_ms,
            options=JobOptions(f"k{number}", key_of_all_queues=of_all, run_after_us=number),
        )
        for number in range(60)
        for of_all in (False, True)
    ]
    before = [one.descriptor for one in client.enqueue_keyed(queue, jobs)]
    moved = facts(admin("shard", "drain", "2", "--move", "--wait", "--yes", "--json"))

    again = client.enqueue_keyed(queue, jobs)
    removed = admin("shard", "remove", "2")
    after = client.enqueue_keyed(queue, jobs)

    assert moved["moved"] == sum(":s2:" in descriptor for descriptor in before) > 0
    assert all(one.existed for one in again)
    assert "the keys of the jobs that shard 2 kept have gone with it" in removed.stderr
    assert all(one.existed for one in after)
    assert {one.descriptor.split(":")[1] for one in after} == {"s1"}
    found = client.lookup([one.descriptor for one in after])
    assert [found[one.descriptor].options for one in after] == [job.options for job in jobs]
    assert client.count(queue, JobState.PENDING, future=True) == len(jobs)
    client_deletes_all(client, queue)


def _later(claimed):
    return AckInfo(
        claimed.descriptor,
        retry_delay_ms=HOUR_MS,
        claim_descriptor=claimed.claim_descriptor,
    )


def test_a_move_that_is_killed_again_and_again_loses_no_job(live, admin, client, queue, wait_until):
    jobs = scheduled_jobs(client, queue, 4000)
    chance = random.Random(4)

    def moved():
        return client.count(queue, JobState.SUCCEEDED, future=True)

    for _ in range(3):
        enough = moved() + chance.randrange(200)
        command = start(live, "shard", "drain", "2", "--move", "--yes")
        wait_until(lambda enough=enough, of=command: moved() > enough or of.poll() is not None)
        command.kill()
        command.communicate()

    finished = facts(admin("shard", "drain", "2", "--move", "--wait", "--yes", "--json"))

    assert finished["jobs"]["scheduled"] == finished["jobs"]["in_progress"] == 0
    assert check_moved(client, queue, jobs, most_twice=3 * BATCH_JOBS) > 500
    client_deletes_all(client, queue)


@pytest.mark.parametrize("victim", ["shard-1", "shard-2"])
def test_a_move_loses_no_job_if_a_shard_is_killed(live, client, queue, wait_until, victim):
    jobs = scheduled_jobs(client, queue, 2500)
    command = start(live, "shard", "drain", "2", "--move", "--wait", "--yes", "--json")
    wait_until(lambda: client.count(queue, JobState.SUCCEEDED, future=True) > 100)

    live.deployment.kill(victim)

    output, errors = command.communicate(timeout=COMMAND_SECONDS)
    assert command.returncode == 0, errors
    assert json.loads(output)["jobs"]["scheduled"] == 0
    live.deployment.wait_until_serving()
    assert check_moved(client, queue, jobs, most_twice=BATCH_JOBS) > 100
    client_deletes_all(client, queue)


def test_two_moves_of_a_shard_do_not_run_at_once(live, admin, client, queue, wait_until):
    scheduled_jobs(client, queue, 1000)
    live.deployment.supervisorctl("stop", "shard-2")
    lock = live.deployment.folder / "run/move-2.lock"
    lock.unlink(missing_ok=True)  # of the tests before
    first = start(live, "shard", "drain", "2", "--move", "--yes")
    wait_until(lock.exists)

    second = admin("shard", "drain", "2", "--move", "--yes")

    assert second.returncode == 1
    assert "another command moves" in second.stderr
    first.send_signal(signal.SIGKILL)
    first.communicate()
    live.deployment.supervisorctl("start", "shard-2")
    live.deployment.wait_until_serving()
    assert admin("shard", "drain", "2", "--move", "--yes").returncode == 0
    client_deletes_all(client, queue)


# --- add, remove ------------------------------------------------------------------------------


def test_add_a_shard_and_remove_it_with_the_jobs_that_it_holds(live, admin, client, queue):
    added = facts(admin("shard", "add", "extra", "--file", "data/other.sqlite", "--json"))

    assert added == {"shard": "extra", "serves": True}
    assert (live.deployment.folder / "data/other.sqlite").exists()
    live.wait_until(lambda status: serves(status, "1", "2", "extra"))
    while "extra" not in shards_of(client.enqueue(queue, [Job(b"x")])):
        pass
    refused = admin("shard", "remove", "extra")
    assert refused.returncode == 1
    assert "--force" in refused.stderr
    assert "extra" in (live.etc / "shards.yaml").read_text()

    assert admin("shard", "remove", "extra", "--force", "--yes").returncode == 0
    live.wait_until(lambda status: serves(status, "1", "2"))
    assert "extra" not in (live.etc / "shards.yaml").read_text()
    client_deletes_all(client, queue)


def test_a_shard_that_may_not_go_does_not_stand_in_the_way_of_others(live, admin, client, queue):
    live.shards(BASE)
    assert admin("shard", "add", "extra", "--dequeue-only").returncode == 0
    while "2" not in shards_of(client.enqueue(queue, [Job(b"x")])):
        pass
    without_two = (live.etc / "shards.yaml").read_text().replace("  2: {}\n", "")
    live.shards(without_two)
    live.wait_until(lambda s: s["config_problems"])

    paused = admin("queue", "pause", queue)
    assert paused.returncode == 0, paused.stderr
    assert "warning: etc/shards.yaml: shards.2: not removed: " in paused.stderr
    removed = admin("shard", "remove", "extra", "--json")
    assert facts(removed) == {"shard": "extra", "given_up": None, "acts": True}

    assert (live.etc / "shards.yaml").read_text() == "shards:\n  1: {}\n"
    assert {one["name"] for one in live.deployment.status()["shards"]} == {"1", "2"}
    client_deletes_all(client, queue)


# --- queues -----------------------------------------------------------------------------------


def test_limit_pause_and_resume_edit_the_file_and_act(live, admin, queue):
    (live.etc / "queues.yaml").write_text("# ours\nqueues: {}\n")

    def in_force() -> float | None:
        found = json.loads((live.deployment.folder / "run/config.json").read_text())["queues"]
        limit: float | None = found.get(queue, {}).get("max_jobs_per_second")
        return limit

    limited = facts(admin("queue", "limit", queue, "2.5", "--json"))
    assert limited == {"queue": queue, "max_jobs_per_second": 2.5, "paused": False, "acts": True}
    assert in_force() == 2.5
    assert admin("queue", "pause", queue).returncode == 0
    assert in_force() == 0
    assert facts(admin("queue", "resume", queue, "--json"))["max_jobs_per_second"] == 2.5
    assert in_force() == 2.5
    assert admin("queue", "limit", queue, "none").returncode == 0
    assert in_force() is None
    assert (live.etc / "queues.yaml").read_text() == "# ours\nqueues: {}\n"
    assert admin("queue", "limit", queue, "-1").returncode == 2


def test_without_a_coordinator_a_change_is_written_and_acts_when_it_is_back(live, admin, queue):
    live.deployment.supervisorctl("stop", "coordinator")
    try:
        done = admin("queue", "pause", queue)
        closed = facts(admin("shard", "dequeue-only", "2", "on", "--json"))
        removed = facts(admin("shard", "remove", "2", "--json"))
    finally:
        live.shards(BASE)
        live.deployment.supervisorctl("start", "coordinator")

    assert done.returncode == 0
    assert "acts when the coordinator is back" in done.stderr
    assert closed == {"shards": ["2"], "dequeue_only": True, "acts": False}
    assert removed == {"shard": "2", "given_up": None, "acts": False}
    live.deployment.wait_until_serving()
    live.wait_until_changed()
    in_force = json.loads((live.deployment.folder / "run/config.json").read_text())
    assert in_force["queues"][queue]["paused"] is True
