"""`pinlater-admin` as a program, on a real service."""

from __future__ import annotations

import json
import re
import time
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pinlaterd.cli.admin import _delete
from pinlaterd.cli.command import telling
from pinlaterd.client import AckInfo, Client, Job, JobState, calls
from pinlaterd.config.password import verify_password
from pinlaterd.model import JobRecord, ScanResult
from tests.cli.program import Program
from tests.deployment import Deployment, claim
from tests.shared_service import ADMIN_PASSWORD


@pytest.fixture
def anywhere():
    """Without the options that name a deployment."""
    return Program("admin")


def fail_jobs(client: Client, queue: str, count: int) -> list[str]:
    client.enqueue(queue, [Job(b"a", attempts_allowed=1)] * count)
    jobs = claim(client, queue, count)
    client.ack(queue, failed=[AckInfo(job.descriptor, "why") for job in jobs])
    return [job.descriptor for job in jobs]


# --- status -----------------------------------------------------------------------------------


def test_status_shows_processes_and_shards(admin):
    found = admin.facts("status")
    shown = admin.output("status")

    assert found["healthy"] is True
    names = {"router", "coordinator", "shard-1", "shard-2"}
    assert names <= {process["name"] for process in found["processes"]}
    assert "healthy" in shown
    for name in names:
        assert f"\n{name}\tserving\t" in shown


def test_the_service_may_be_named_in_several_ways(anywhere, service, tmp_path):
    """By a path too long for a socket, too."""
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    link = Path(deep / "deployment")
    link.symlink_to(service.folder)

    url = f"http://127.0.0.1:{service.stats_port}"
    assert anywhere.facts("status --stats-url", url)["healthy"] is True
    assert isinstance(anywhere.facts(f"--dir {service.folder} queue list"), list)
    assert anywhere("status --dir", link).returncode == 0


def test_status_without_a_service_says_so(anywhere, tmp_path):
    Deployment(tmp_path).init(shards=1, settings={})

    done = anywhere.error("status --dir", tmp_path)
    nowhere = anywhere.error("status --stats-url http://a..b/")

    assert "no answer from the coordinator at http://a..b/: " in nowhere
    assert "no answer from the coordinator" in done
    assert "`pinlaterd up` starts it, --dir or --stats-url choose it" in done


def test_a_folder_that_is_no_deployment_is_told_apart(anywhere, tmp_path):
    done = anywhere("queue list --dir", tmp_path)
    status = anywhere("status --dir", tmp_path)

    assert (done.returncode, status.returncode) == (1, 1)
    assert "pinlaterd init" in done.stderr
    assert "--host and --port" in done.stderr
    cure = f"{tmp_path} is no deployment (no etc/shards.yaml): give --dir, or --stats-url\n"
    assert status.stderr.endswith(cure)


# --- queues -----------------------------------------------------------------------------------


def test_create_list_and_delete_a_queue(admin, client):
    assert admin.output("queue create by_admin") == "queue by_admin is there\n"
    assert admin.facts("queue create by_admin") == {"created": "by_admin"}
    assert "by_admin" in admin("queue list").stdout.splitlines()

    assert "PASSWORD_INVALID" in admin.error("queue delete by_admin", stdin="wrong\n")
    assert "by_admin" in client.queue_names()

    deleted = admin.output("queue delete by_admin --json", stdin=f"{ADMIN_PASSWORD}\n")
    assert json.loads(deleted) == {"deleted": "by_admin"}
    assert "by_admin" not in client.queue_names()


def test_the_password_may_come_from_a_file_or_the_environment(admin, client, tmp_path):
    file = tmp_path / "password"
    file.write_text(f"{ADMIN_PASSWORD}\n")
    client.create_queue("with_file")
    client.create_queue("with_environment")

    by_file = admin("queue delete with_file --password-file", file)
    by_environment = admin("queue delete with_environment", PINLATERD_ADMIN_PASSWORD=ADMIN_PASSWORD)

    assert (by_file.returncode, by_environment.returncode) == (0, 0)
    assert client.queue_names().isdisjoint({"with_file", "with_environment"})


def test_the_password_is_asked_for_on_a_terminal_and_never_shown(admin, client):
    client.create_queue("typed")

    with admin.on_a_terminal("queue delete typed") as terminal:
        terminal.wait_for(b"password: ")
        terminal.types(f"{ADMIN_PASSWORD}\n")

        assert terminal.end() == 0, terminal.shown
    assert ADMIN_PASSWORD.encode() not in terminal.shown
    assert "typed" not in client.queue_names()


def test_queue_stats_shows_depth_by_state_and_rates(admin, client, queue):
    fail_jobs(client, queue, 2)
    client.enqueue(queue, [b"a", b"b", Job(b"later", run_after_ms=2**42)])

    found = admin.facts(f"queue stats {queue} --seconds 0.1")

    assert found["jobs"] == {
        "SCHEDULED": 1,
        "PENDING": 2,
        "IN_PROGRESS": 0,
        "SUCCEEDED": 0,
        "FAILED": 2,
    }
    assert found["per_second"].keys() == {"enqueued", "dequeued", "succeeded", "failed"}
    assert "SCHEDULED\t1\n" in admin(f"queue stats {queue} --seconds 0.1").stdout


def test_settings_of_a_queue_that_is_not_there_come_with_a_warning(admin, queue):
    of_none = admin("queue limit mistyped 5")
    of_one = admin.facts(f"queue limit {queue} 5")

    assert of_none.returncode == 0
    assert "warning: there is no queue mistyped yet; `pinlater-admin queue list`" in of_none.stderr
    assert of_one == {"queue": queue, "max_jobs_per_second": 5, "paused": False, "acts": True}


# --- jobs -------------------------------------------------------------------------------------


def test_scan_lists_jobs_of_a_state(admin, client, queue):
    failed = fail_jobs(client, queue, 3)

    found = admin.facts(f"job scan {queue} FAILED")
    assert admin.facts("job lookup", *failed).keys() == set(failed)
    shown = admin(f"job scan {queue} failed --limit 2").stdout.splitlines()

    assert {record["descriptor"] for record in found} == set(failed)
    assert len(shown) == 1 + 2
    assert shown[1].endswith("\t0 of 1\twhy")


def test_scan_chooses_jobs_and_says_how_far_it_got(admin, client, queue):
    [first] = fail_jobs(client, queue, 1)
    [second, *_] = fail_jobs(client, queue, 2)
    ended = client.lookup([second])[second].updated_at_ms

    found = admin.facts(f"job scan {queue} failed --before {ended} --message why --progress")
    shown = admin(f"job scan {queue} failed --newest --limit 2 --status-regex w.y --progress")

    assert [record["descriptor"] for record in found] == [first]
    assert shown.stdout.splitlines()[0] == "descriptor\tended\tattempts left\tcustom status"
    assert shown.stdout.count("\twhy\n") == 2
    assert re.search(r"looked at [23] of about 3 jobs, 2 found", shown.stderr)
    assert admin.facts(f"job scan {queue} failed --since 23:59:59 --worker nobody") == []
    assert "is no time" in admin.error(f"job scan {queue} failed --since noon", code=2)


def test_retry_makes_failed_jobs_pending(admin, client, queue):
    fail_jobs(client, queue, 3)

    assert admin.facts(f"job retry {queue} --limit 2") == {"retried": 2}
    assert client.count(queue, JobState.PENDING) == 2
    assert admin(f"job retry {queue} --delay-seconds 3600").returncode == 0
    assert client.count(queue, JobState.PENDING, future=True) == 1
    assert admin(f"job retry {queue}").stdout == "0 jobs made pending again\n"


def test_chosen_jobs_are_retried(admin, client, queue):
    fail_jobs(client, queue, 5)
    named = [job.descriptor for job in client.scan(queue, JobState.FAILED)]

    assert admin.facts(f"job retry {queue} {named[0]} --preview") == {"would_retry": 1}
    assert admin.facts(f"job retry {queue} {named[0]}") == {"retried": 1}
    both = f"{named[1]}\n{named[0]}\n"
    assert admin(f"job retry {queue} -", stdin=both).stdout == "1 job made pending again\n"
    assert admin.facts(f"job retry {queue} --before 2020-01-01T00:00:00Z") == {"retried": 0}
    assert admin.facts(f"job retry {queue} --message other --preview") == {"would_retry": 0}
    assert admin.facts(f"job retry {queue} --message why --preview") == {"would_retry": 3}
    assert admin.facts(f"job retry {queue} --status-regex ^w --preview") == {"would_retry": 3}
    later = "--delay-seconds 3600 --spread 0.01"
    assert admin.facts(f"job retry {queue} --before 2100-01-01T00:00:00Z {later}") == {"retried": 3}
    times = [job.run_after_ms for job in client.scan(queue, JobState.PENDING, future=True)]
    assert len(times) == 3
    assert max(times) - min(times) >= 90_000


def test_chosen_jobs_are_deleted(admin, client, queue):
    fail_jobs(client, queue, 3)
    first, *_ = (job.descriptor for job in client.scan(queue, JobState.FAILED))

    asked = admin.error(f"job delete {queue} failed {first}", stdin="y\n", code=2)
    assert f"Delete 1 job of {queue} in state FAILED?" in asked
    assert admin.facts(f"job delete {queue} failed --preview") == {"would_delete": 3}
    assert admin.facts(f"job delete {queue} failed {first} --yes") == {"deleted": 1}
    assert client.count(queue, JobState.FAILED) == 2


def test_a_delete_leaves_jobs_that_changed_since_a_time(admin, client, queue, wait_until):
    old = client.enqueue(queue, [Job(b"a", run_after_ms=4_102_444_800_000), Job(b"a"), Job(b"b")])
    at = int(time.time()) + 1
    wait_until(lambda: time.time() >= at + 0.01)  # times in a command are whole seconds
    [new] = client.enqueue(queue, [b"a"])
    since = datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    delete = f"job delete {queue} pending --unchanged-since {since}"

    assert admin.facts(f"{delete} --preview") == {"would_delete": 3}
    assert admin.facts(f"{delete} --body-regex a --yes") == {"deleted": 2}
    assert client.lookup([*old, new]).keys() == {old[2], new}
    assert admin.facts(f"{delete} --first 5 --yes") == {"deleted": 1}
    assert admin.facts(f"{delete} --yes") == {"deleted": 0}
    named = f"job delete {queue} pending {new} --yes --unchanged-since"
    assert admin.facts(f"{named} {since}") == {"deleted": 0}
    now = datetime.fromtimestamp(time.time() + 60, UTC)
    assert admin.facts(f"{named} {now:%Y-%m-%dT%H:%M:%SZ}") == {"deleted": 1}


def test_a_job_that_falls_due_between_the_scans_is_counted_once():
    jobs = [
        JobRecord(f"mail:s1:p1:{at}", JobState.PENDING, 1, 1, "", 0, at, 0, None, None)
        for at in (3, 2, 1)
    ]
    pages = iter([ScanResult(jobs[:2]), ScanResult(jobs)])  # the third was due all the time
    which = {"priority": 0, "limit": 9, "body_regex": None, "choice": None}
    client: Any = SimpleNamespace(run=lambda _: next(pages))

    assert _delete(client, "mail", JobState.PENDING, which, 1, dry_run=True) == 3


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        ("job retry {} --preview", "counting jobs"),
        ("job retry {}", "2 jobs so far"),
        ("job delete {} failed --yes", "2 jobs so far"),
        ("job failures {}", "looked at 2 failed jobs"),
        ("queue delete {}", "deleting the queue"),
    ],
)
def test_what_may_take_long_says_so_on_a_terminal_only(admin, client, line, shown, monkeypatch):
    monkeypatch.setenv("PINLATERD_ADMIN_PASSWORD", ADMIN_PASSWORD)
    client.create_queue("long")
    fail_jobs(client, "long", 2)

    with admin.on_a_terminal(line.format("long")) as terminal:
        assert terminal.end() == 0, terminal.shown
    client.create_queue("long")
    in_a_pipe = admin(line.format("long"))

    assert shown.encode() in terminal.shown
    assert in_a_pipe.returncode == 0
    assert shown not in in_a_pipe.stderr
    client.delete_queue("long", password=ADMIN_PASSWORD)


def test_a_change_that_takes_several_calls_tells_how_far_it_got():
    told: list[str] = []
    call = telling(calls.retry_failed("mail", limit=9000), told.append)

    assert [call.result(1), call._replace(request=call.request).result(4000)] == [1, 4000]
    assert told == ["1 job so far", "4,001 jobs so far"]


@pytest.mark.parametrize("state", ["pending", "failed"])
def test_a_job_that_changes_after_the_question_stays(admin, client, queue, wait_until, state):
    if state == "failed":
        fail_jobs(client, queue, 2)
    else:
        client.enqueue(queue, [Job(b"a", attempts_allowed=2)] * 2)
    at = int(time.time()) + 1
    wait_until(lambda: time.time() >= at + 0.01)
    since = datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    with admin.on_a_terminal(f"job delete {queue} {state} --unchanged-since {since}") as terminal:
        terminal.wait_for(b"[y/N]")
        client.retry_failed(queue, limit=1)
        [job] = claim(client, queue)
        client.ack(queue, failed=[AckInfo(job.descriptor, "again")])
        terminal.types("y\n")

        assert terminal.end() == 0, terminal.shown
    left = client.scan(queue, JobState[state.upper()])
    assert [one.descriptor for one in left] == [job.descriptor]


def test_delete_needs_yes_where_nobody_can_be_asked(admin, client, queue):
    fail_jobs(client, queue, 3)

    assert "--yes" in admin.error(f"job delete {queue} failed", stdin="y\n", code=2)
    assert client.count(queue, JobState.FAILED) == 3

    assert admin.facts(f"job delete {queue} failed --yes") == {"deleted": 3}
    assert client.count(queue, JobState.FAILED) == 0
    fail_jobs(client, queue, 1)
    assert admin(f"job delete {queue} failed --yes").stdout == "1 job deleted\n"


@pytest.mark.parametrize(("typed", "left"), [("n\n", 3), ("y\n", 0)])
def test_delete_asks_on_a_terminal(admin, client, queue, typed, left):
    fail_jobs(client, queue, 3)
    question = f"Delete up to 1,000 jobs of {queue}, priority 1, in state FAILED?"

    with admin.on_a_terminal(f"job delete {queue} failed") as terminal:
        terminal.wait_for(question.encode())
        terminal.types(typed)

        assert terminal.end() == (1 if left else 0)
    assert client.count(queue, JobState.FAILED) == left


# --- configuration ----------------------------------------------------------------------------


def test_config_check_of_a_good_deployment(admin, anywhere, service):
    assert "fine" in admin("config check").stdout
    found = anywhere.facts("config check", service.folder)
    assert found["ok"] is True
    assert found["shards"] == ["1", "2"]


def test_config_check_reports_every_mistake_with_its_place(anywhere, tmp_path):
    etc = tmp_path / "etc"
    etc.mkdir()
    (etc / "pinlaterd.yaml").write_text("port: 99999\n")
    (etc / "shards.yaml").write_text("shards:\n  1:\n    engine: mysqll\n")

    done = anywhere("config check", tmp_path)
    found = json.loads(anywhere("config check --json", tmp_path).stdout)

    assert done.returncode == 1
    assert "pinlaterd.yaml:1: port: " in done.stdout
    assert "shards.yaml:3: shards.1.engine: unknown engine 'mysqll'" in done.stdout
    assert found["ok"] is False
    assert len(found["problems"]) == 2


def test_config_check_warns_of_a_password_that_others_can_read(anywhere, tmp_path):
    (tmp_path / "etc").mkdir()
    shards = tmp_path / "etc/shards.yaml"
    shards.write_text(
        "shards: {1: {engine: mysql, master: {host: h, port: 1}, user: u, passwd: sesame}}"
    )
    shards.chmod(0o644)

    done = anywhere("config check", tmp_path)

    assert "shards.yaml: holds a password, and others can read it; chmod 600" in done.stdout
    assert "sesame" not in done.stdout + done.stderr


def test_hash_password_reads_a_pipe(anywhere):
    done = anywhere.output("hash-password", stdin="open sesame\n")
    facts = json.loads(anywhere.output("hash-password --json", stdin="open sesame\n"))
    empty = anywhere.error("hash-password", stdin="\n")

    assert verify_password("open sesame", done.strip())
    assert verify_password("open sesame", facts["hash"])
    assert "no password" in empty


def test_failures_are_shown_in_groups(admin, client, queue):
    client.enqueue(queue, [Job(b"a", attempts_allowed=1)] * 3)
    statuses = ["KeyError: 1 (a.py:1 in f)", "KeyError: 22 (a.py:1 in f)", "no (b.py:2 in g)"]
    jobs = zip(claim(client, queue, 3), statuses, strict=True)
    client.ack(queue, failed=[AckInfo(job.descriptor, status) for job, status in jobs])

    found = admin.facts(f"job failures {queue}")
    shown = admin(f"job failures {queue} --by place").stdout.splitlines()

    assert [(group["key"], group["jobs"]) for group in found["groups"]] == [
        ("KeyError: #", 2),
        ("no", 1),
    ]
    assert (found["failed"], found["grouped"], found["is_whole"]) == (3, 3, True)
    assert shown[0].startswith(f"{queue}: the newest 3 of 3 failed jobs (")
    assert shown[2].startswith("2\t67\t")
    assert shown[2].endswith("\ta.py:1 in f\tKeyError: #")
