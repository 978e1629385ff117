"""`pinlater-admin` as a program, on a real service."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pinlaterd.client import AckInfo, Client, Job, JobState
from pinlaterd.config.password import verify_password
from tests.deployment import Deployment
from tests.shared_service import ADMIN_PASSWORD

Run = Callable[..., subprocess.CompletedProcess[str]]
COMMAND = [sys.executable, "-m", "pinlaterd.cli.admin"]


def admin(*arguments: str, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        env={**os.environ, **environment},
    )


def admin_on_a_terminal(typed: str, *arguments: str) -> tuple[int, str]:
    """Exit status, and all that the terminal showed, when a person types `typed` if asked."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [*COMMAND, *arguments])
    shown = b""
    asked = False
    while True:
        try:
            chunk = os.read(terminal, 4096)
        except OSError:  # the program has ended
            break
        shown += chunk
        # Only after the question: a terminal echoes what is typed before it is told not to.
        if not asked and shown.rstrip().endswith((b":", b"]")):
            asked = True
            os.write(terminal, typed.encode())
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    return os.waitstatus_to_exitcode(status), shown.decode()


@pytest.fixture
def run(service: Deployment) -> Run:
    def run(*arguments: str, stdin: str = "", **environment: str):
        return admin(*arguments, "--dir", str(service.folder), stdin=stdin, **environment)

    return run


def facts(done: subprocess.CompletedProcess[str]) -> Any:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def fail_jobs(client: Client, queue: str, count: int) -> list[str]:
    client.enqueue(queue, [Job(b"a", attempts_allowed=1)] * count)
    jobs = client.dequeue(queue, limit=count)
    client.ack(queue, failed=[AckInfo(job.descriptor, "why") for job in jobs])
    return [job.descriptor for job in jobs]


# --- status -----------------------------------------------------------------------------------


def test_status_shows_processes_and_shards(run):
    found = facts(run("status", "--json"))
    shown = run("status")

    assert found["healthy"] is True
    assert {"router", "coordinator", "shard-1", "shard-2"} <= {
        p["name"] for p in found["processes"]
    }
    assert shown.returncode == 0
    assert "healthy" in shown.stdout
    for name in ("router", "coordinator", "shard-1", "shard-2"):
        assert f"\n{name}\tserving\t" in shown.stdout


def test_status_over_http(service):
    done = admin("status", "--json", "--stats-url", f"http://127.0.0.1:{service.stats_port}")

    assert facts(done)["healthy"] is True


def test_the_deployment_may_be_named_before_the_command(service):
    done = admin("--dir", str(service.folder), "queue", "list", "--json")

    assert isinstance(facts(done), list)


def test_status_without_a_service_says_so(tmp_path):
    Deployment(tmp_path).init(shards=1, settings={})

    done = admin("status", "--dir", str(tmp_path))

    assert done.returncode == 1
    assert "no answer from the coordinator" in done.stderr
    assert "`pinlaterd up` starts it, --dir or --stats-url choose it" in done.stderr


def test_a_folder_that_is_no_deployment_is_told_apart(tmp_path):
    done = admin("queue", "list", "--dir", str(tmp_path))
    status = admin("status", "--dir", str(tmp_path))

    assert (done.returncode, status.returncode) == (1, 1)
    assert "pinlaterd init" in done.stderr
    assert "--host and --port" in done.stderr
    cure = f"{tmp_path} is no deployment (no etc/shards.yaml): give --dir, or --stats-url\n"
    assert status.stderr.endswith(cure)


# --- queues -----------------------------------------------------------------------------------


def test_create_list_and_delete_a_queue(run, client):
    assert run("queue", "create", "by_admin").returncode == 0
    assert "by_admin" in run("queue", "list").stdout.splitlines()

    wrong = run("queue", "delete", "by_admin", stdin="wrong\n")
    assert wrong.returncode == 1
    assert "PASSWORD_INVALID" in wrong.stderr
    assert "by_admin" in client.queue_names()

    assert run("queue", "delete", "by_admin", stdin=f"{ADMIN_PASSWORD}\n").returncode == 0
    assert "by_admin" not in client.queue_names()


def test_the_password_may_come_from_a_file_or_the_environment(run, client, tmp_path):
    file = tmp_path / "password"
    file.write_text(f"{ADMIN_PASSWORD}\n")
    client.create_queue("with_file")
    client.create_queue("with_environment")

    by_file = run("queue", "delete", "with_file", "--password-file", str(file))
    by_environment = run(
        "queue", "delete", "with_environment", PINLATERD_ADMIN_PASSWORD=ADMIN_PASSWORD
    )

    assert (by_file.returncode, by_environment.returncode) == (0, 0)
    assert client.queue_names().isdisjoint({"with_file", "with_environment"})


def test_the_password_is_asked_for_on_a_terminal_and_never_shown(service, client):
    client.create_queue("typed")

    exit_status, shown = admin_on_a_terminal(
        f"{ADMIN_PASSWORD}\n", "queue", "delete", "typed", "--dir", str(service.folder)
    )

    assert exit_status == 0, shown
    assert "password" in shown.lower()
    assert ADMIN_PASSWORD not in shown
    assert "typed" not in client.queue_names()


def test_queue_stats_shows_depth_by_state_and_rates(run, client, queue):
    fail_jobs(client, queue, 2)
    client.enqueue(queue, [b"a", b"b", Job(b"later", run_after_ms=2**42)])

    found = facts(run("queue", "stats", queue, "--seconds", "0.1", "--json"))

    assert found["jobs"] == {
        "SCHEDULED": 1,
        "PENDING": 2,
        "IN_PROGRESS": 0,
        "SUCCEEDED": 0,
        "FAILED": 2,
    }
    assert found["per_second"].keys() == {"enqueued", "dequeued", "succeeded", "failed"}
    assert "SCHEDULED\t1\n" in run("queue", "stats", queue, "--seconds", "0.1").stdout


def test_settings_of_a_queue_that_is_not_there_come_with_a_warning(run, queue):
    of_none = run("queue", "limit", "mistyped", "5")
    of_one = run("queue", "limit", queue, "5")

    assert (of_none.returncode, of_one.returncode) == (0, 0)
    assert "warning: there is no queue mistyped yet; `pinlater-admin queue list`" in of_none.stderr
    assert "warning" not in of_one.stderr


# --- jobs -------------------------------------------------------------------------------------


def test_lookup_escapes_what_strangers_wrote(run, client, queue):
    [descriptor] = client.enqueue(queue, [Job(b"\x1b[2J\xff", custom_status="\x07\x1b]0;x\x07")])

    shown = run("job", "lookup", descriptor)
    assert shown.returncode == 0
    assert "\x1b" not in shown.stdout
    assert "\x07" not in shown.stdout
    assert "\\x1b[2J\\xff" in shown.stdout

    found = facts(run("job", "lookup", descriptor, "--json"))
    assert found[descriptor]["body_base64"] == "G1sySv8="
    assert found[descriptor]["custom_status"] == "\x07\x1b]0;x\x07"


def test_lookup_fails_for_unknown_jobs(run, queue):
    done = run("job", "lookup", f"{queue}:s1:p1:99999999")

    assert done.returncode == 1
    assert "unknown" in done.stderr


def test_scan_lists_jobs_of_a_state(run, client, queue):
    failed = fail_jobs(client, queue, 3)

    found = facts(run("job", "scan", queue, "FAILED", "--json"))
    shown = run("job", "scan", queue, "failed", "--limit", "2").stdout.splitlines()

    assert {record["descriptor"] for record in found} == set(failed)
    assert len(shown) == 1 + 2
    assert shown[1].endswith("\t0 of 1\twhy")


def test_retry_makes_failed_jobs_pending(run, client, queue):
    fail_jobs(client, queue, 3)

    assert facts(run("job", "retry", queue, "--limit", "2", "--json")) == {"retried": 2}
    assert client.count(queue, JobState.PENDING) == 2
    assert run("job", "retry", queue, "--delay-seconds", "3600").returncode == 0
    assert client.count(queue, JobState.PENDING, future=True) == 1
    assert run("job", "retry", queue).stdout == "0 jobs made pending again\n"


def test_delete_needs_yes_where_nobody_can_be_asked(run, client, queue):
    fail_jobs(client, queue, 3)

    refused = run("job", "delete", queue, "failed", stdin="y\n")
    assert refused.returncode == 2
    assert "--yes" in refused.stderr
    assert client.count(queue, JobState.FAILED) == 3

    assert facts(run("job", "delete", queue, "failed", "--yes", "--json")) == {"deleted": 3}
    assert client.count(queue, JobState.FAILED) == 0
    fail_jobs(client, queue, 1)
    assert run("job", "delete", queue, "failed", "--yes").stdout == "1 job deleted\n"


@pytest.mark.parametrize(("typed", "left"), [("n\n", 3), ("y\n", 0)])
def test_delete_asks_on_a_terminal(service, client, queue, typed, left):
    fail_jobs(client, queue, 3)

    exit_status, shown = admin_on_a_terminal(
        typed, "job", "delete", queue, "failed", "--dir", str(service.folder)
    )

    assert f"Delete up to 1,000 jobs of {queue}, priority 1, in state FAILED?" in shown
    assert exit_status == (1 if left else 0)
    assert client.count(queue, JobState.FAILED) == left


# --- configuration ----------------------------------------------------------------------------


def test_config_check_of_a_good_deployment(run, service):
    assert "fine" in run("config", "check").stdout
    found = facts(admin("config", "check", str(service.folder), "--json"))
    assert found["ok"] is True
    assert found["shards"] == ["1", "2"]


def test_config_check_reports_every_mistake_with_its_place(tmp_path):
    etc = tmp_path / "etc"
    etc.mkdir()
    (etc / "pinlaterd.yaml").write_text("port: 99999\n")
    (etc / "shards.yaml").write_text("shards:\n  1:\n    engine: mysqll\n")

    done = admin("config", "check", str(tmp_path))
    found = json.loads(admin("config", "check", str(tmp_path), "--json").stdout)

    assert done.returncode == 1
    assert "pinlaterd.yaml:1: port: " in done.stdout
    assert "shards.yaml:3: shards.1.engine: unknown engine 'mysqll'" in done.stdout
    assert found["ok"] is False
    assert len(found["problems"]) == 2


def test_config_check_warns_of_a_password_that_others_can_read(tmp_path):
    etc = tmp_path / "etc"
    etc.mkdir()
    shards = etc / "shards.yaml"
    shards.write_text(
        "shards: {1: {engine: mysql, master: {host: h, port: 1}, user: u, passwd: sesame}}"
    )
    shards.chmod(0o644)

    done = admin("config", "check", str(tmp_path))

    assert "shards.yaml: holds a password, and others can read it; chmod 600" in done.stdout
    assert "sesame" not in done.stdout + done.stderr


def test_hash_password_reads_a_pipe():
    done = admin("hash-password", stdin="open sesame\n")

    assert done.returncode == 0
    assert verify_password("open sesame", done.stdout.strip())


def test_hash_password_takes_no_argument_and_no_empty_password():
    assert admin("hash-password", "secret").returncode == 2
    empty = admin("hash-password", stdin="\n")
    assert empty.returncode == 1
    assert "no password" in empty.stderr


@pytest.mark.parametrize(
    "command",
    [
        "status",
        "top",
        "shard list",
        "shard drain",
        "shard dequeue-only",
        "shard add",
        "shard remove",
        "queue limit",
        "queue pause",
        "queue resume",
        "queue list",
        "queue create",
        "queue delete",
        "queue stats",
        "job lookup",
        "job scan",
        "job retry",
        "job delete",
        "config check",
        "hash-password",
    ],
)
def test_every_command_has_help_with_an_example(command):
    done = admin(*command.split(), "--help")

    assert done.returncode == 0
    assert "Example" in done.stdout
    assert f"pinlater-admin {command}" in done.stdout


def test_long_paths_do_not_hide_the_service(service, tmp_path):
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    link = Path(deep / "deployment")
    link.symlink_to(service.folder)

    assert admin("status", "--dir", str(link)).returncode == 0
