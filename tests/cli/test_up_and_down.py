"""`pinlaterd up`, `down` and `status` on real processes, from any state they may find.

After kills under load: tests/faults/test_kill.py and test_orphans.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from pinlaterd.client import Client, JobState
from pinlaterd.deployment.service import processes_of, wait_for
from pinlaterd.lifecycle import ExitCode
from tests.cli.program import ROOT, Program
from tests.deployment import unused_port

pytestmark = pytest.mark.service

ALL = {"supervisord", "coordinator", "router", "shard-1", "shard-2"}
KILLED_SECONDS = 60.0
SOON_SECONDS = 40.0  # 3 on an idle machine; its time is 60
TRIES = 3  # on a busy one
TASKS = """
from pinlaterd.client import Handlers

handlers = Handlers()


@handlers.queue("tasks", run_in="processes", concurrency=1)
def handle(job):
    pass
"""


def kill(*pids):
    processes = [psutil.Process(pid) for pid in pids]
    for process in processes:
        process.kill()
    assert wait_for(processes, KILLED_SECONDS) == []


@pytest.fixture(scope="module")
def deployment(operators):
    made = operators()
    made.init("--shards", 2)
    return made, {path.name: path.read_text() for path in (made.folder / "etc").iterdir()}


@pytest.fixture
def written(deployment):
    """As `init` wrote it, in whatever state the test before has left the processes."""
    operator, files = deployment
    for name, text in files.items():
        operator.write(name, text)
    assert operator.down().returncode == 0
    shutil.rmtree(operator.folder / "data")
    (operator.folder / "data").mkdir(mode=0o700)
    return operator


@pytest.fixture
def serving(deployment):
    operator, files = deployment
    for name, text in files.items():
        operator.write(name, text)
    done = operator.up()
    assert done.returncode == 0, done.stderr
    assert set(operator.pids()) == ALL
    return operator


def test_from_nothing_to_serving_and_back(written):
    assert written.status().returncode == 1

    done = written.up()
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"serving: Thrift on 127.0.0.1:{written.port}")
    assert done.stderr == ""  # no progress in a pipe
    with Client(port=written.port) as client:
        assert client.queue_names() == frozenset()
    assert set(written.pids()) == ALL
    assert processes_of(written.folder.parent) == []

    again = written.up()
    assert again.returncode == 0
    assert again.stdout.startswith("already serving")

    assert written.down().stdout == "stopped\n"
    assert written.pids() == {}
    once_more = written.down()
    assert (once_more.returncode, once_more.stdout) == (0, "was not running\n")


def test_status(serving):
    shown = serving.status()
    assert shown.returncode == 0
    assert "healthy" in shown.stdout
    assert "shard-2" in shown.stdout

    facts = json.loads(serving.status("--json").stdout)
    assert facts["healthy"]
    assert {process["name"] for process in facts["processes"]} == ALL - {"supervisord"}
    assert all(process["rss_bytes"] > 0 for process in facts["processes"])
    assert [shard["healthy"] for shard in facts["shards"]] == [True, True]

    supervisorctl(serving, "stop", "shard-2")
    unwell = serving.status()
    assert unwell.returncode == 1
    assert "shard-2 is stopped" in unwell.stdout

    restarted = serving.up()
    assert restarted.returncode == 0, restarted.stderr
    assert serving.status().returncode == 0


def supervisorctl(operator, *arguments):
    conf = str(operator.folder / "etc" / "supervisord.conf")
    return subprocess.run(
        [sys.executable, "-m", "supervisor.supervisorctl", "-c", conf, *arguments],
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    ).stdout


def test_supervisorctl_works_from_any_folder(serving, wait_until):
    def running():
        shown = supervisorctl(serving, "status")
        return {line.split()[0] for line in shown.splitlines() if "RUNNING" in line}

    # For its first second a program is STARTING to supervisord, though it serves already.
    wait_until(lambda: running() == ALL - {"supervisord"})


def test_a_changed_configuration_restarts_only_whom_it_concerns(serving):
    before = serving.pids()
    serving.append("shards.yaml", "  3: {}\n")
    assert serving.up().returncode == 0

    grown = serving.pids()
    assert set(grown) == ALL | {"shard-3"}
    assert grown["shard-1"] == before["shard-1"]
    assert grown["router"] == before["router"]
    assert grown["coordinator"] == before["coordinator"]

    serving.write("shards.yaml", "shards: {1: , 2: {dequeue_only: true}}\n")
    assert serving.up().returncode == 0

    shrunk = serving.pids()
    assert set(shrunk) == ALL
    assert shrunk["shard-1"] == before["shard-1"]
    assert shrunk["shard-2"] == before["shard-2"]
    facts = json.loads(serving.status("--json").stdout)
    assert [shard["dequeue_only"] for shard in facts["shards"]] == [False, True]

    serving.write("shards.yaml", "shards: {1: , 2: {file: data/other.sqlite}}\n")
    assert serving.up().returncode == 0

    moved = serving.pids()
    assert moved["shard-1"] == before["shard-1"]
    assert moved["shard-2"] != before["shard-2"]


def test_the_files_are_edited_while_it_starts(operator, wait_until):
    """As `pinlater-admin` does; what is found in the end is what counts."""
    operator.init("--shards", 1)
    with ThreadPoolExecutor() as threads:
        starts = threads.submit(operator.up)
        wait_until((operator.folder / "run/command.lock").exists)
        operator.append("pinlaterd.yaml", "log_level: debug\n")

        done = starts.result()

    assert done.returncode == 0, done.stderr


def test_another_port_and_another_router(serving):
    port = unused_port()
    text = (serving.folder / "etc" / "pinlaterd.yaml").read_text()
    text = text.replace(f"\nport: {serving.port}", f"\nport: {port}")
    serving.write("pinlaterd.yaml", f"{text}routers: 2\n")

    done = serving.up()

    assert done.returncode == 0, done.stderr
    assert {"router-1", "router-2"} < set(serving.pids())
    with Client(port=port) as client:
        client.queue_names()


# What supervisord takes for an expansion, a pattern, a comment, or the end of a name.
@pytest.mark.parametrize("name", ["50% of %(here)s", 'it\'s ;a[b] "#1" {*}?'])
def test_a_folder_of_any_name(operator, name, wait_until):
    operator.folder = operator.folder / name
    done = operator.init("--shards", 1)
    assert done.returncode == 0, done.stderr
    assert f"pinlaterd up {shlex.quote(str(operator.folder))}" in done.stdout

    done = operator.up()
    assert done.returncode == 0, done.stderr
    assert set(operator.pids()) == ALL - {"shard-2"}
    assert operator.status().returncode == 0
    assert "shard-1: started" in supervisorctl(operator, "restart", "shard-1")
    admin = Program("admin", "--dir", operator.folder)
    admin.output("restart router")
    admin.output("restart shard all")
    before = operator.pids()["coordinator"]
    assert "Restarted supervisord" in supervisorctl(operator, "reload")
    # The one that ends may still answer that all is well; `down` would meet a reload halfway.
    wait_until(lambda: operator.pids().get("coordinator", before) != before)
    wait_until(operator.is_healthy)

    assert operator.down().stdout == "stopped\n"
    assert operator.pids() == {}


def test_python_and_package_in_a_folder_of_any_name(operator):
    operator.init("--shards", 1)
    home = operator.folder.parent / "a #2 ;b %s [c] 'd"
    home.mkdir()
    (home / "venv").symlink_to(sys.prefix)
    (home / "source").symlink_to(ROOT)
    program = Program("pinlaterd", folder=home, python=home / "venv/bin/python")

    done = program("up", operator.folder, PYTHONPATH=str(home / "source"))

    assert done.returncode == 0, done.stderr
    pids = operator.pids()
    assert set(pids) == ALL - {"shard-2"}
    of_router = psutil.Process(pids["router"]).environ()
    assert of_router["PYTHONPATH"] == f"{home}/source/"
    assert operator.down().stdout == "stopped\n"


def test_an_init_system_starts_supervisord_in_a_folder_of_any_name(operator, wait_until):
    operator.folder = operator.folder / "50% of [my] jobs"
    operator.init("--shards", 1)
    operator.up()
    operator.down()
    conf = "/proc/self/cwd/etc/supervisord.conf"
    command = [sys.executable, "-m", "supervisor.supervisord", "-n", "-c", conf]
    with subprocess.Popen(command, cwd=operator.folder, stdout=subprocess.DEVNULL) as supervisord:
        try:
            wait_until(operator.is_healthy)
            assert operator.down().stdout == "stopped\n"
            assert supervisord.wait(SOON_SECONDS) == 0
        finally:
            supervisord.kill()


def test_with_a_supervisord_that_is_stopped(serving):
    pid = serving.pids()["supervisord"]
    os.kill(pid, signal.SIGSTOP)

    done = serving.up()
    assert done.returncode == 1
    assert "supervisord runs, but does not answer getPID: was it stopped?" in done.stderr
    assert "`pinlaterd down` ends it" in done.stderr
    assert serving.pids()["supervisord"] == pid

    assert is_down_soon(serving, lambda: os.kill(serving.pids()["supervisord"], signal.SIGSTOP))


def is_down_soon(serving, harm):
    """Whether `down` takes less than its time in one of the tries; `harm` is done before each."""
    for tries_left in reversed(range(TRIES)):
        began = time.monotonic()
        assert serving.down().stdout == "stopped\n"
        seconds = time.monotonic() - began
        assert serving.pids() == {}
        if seconds < SOON_SECONDS:
            return True
        if tries_left:
            assert serving.up().returncode == 0
            harm()
    return False


def test_after_everything_was_killed(serving):
    kill(*serving.pids().values())

    assert serving.status().returncode == 1
    assert serving.down().stdout == "was not running\n"
    assert serving.up().returncode == 0


def test_a_port_in_use_is_told_before_anything_starts(written):
    for port, key in ((written.port, "port"), (written.stats_port, "stats_port")):
        with socket.create_server(("127.0.0.1", port)):
            done = written.up()

        assert done.returncode == 1
        assert f"{key} {port} is in use by pid {os.getpid()}" in done.stderr
        assert f"set another {key}" in done.stderr
        assert written.pids() == {}


def test_a_broken_configuration_is_told_in_whole_before_anything_starts(written):
    written.append("pinlaterd.yaml", "prt: 1\nhost: []\n")

    done = written.up()

    assert done.returncode == 1
    assert "2 mistakes" in done.stderr
    assert "prt: unknown key; did you mean 'port'?" in done.stderr
    assert "host: expected text, got a list" in done.stderr
    assert written.pids() == {}


def test_a_folder_that_others_may_write_to_is_refused_by_up_and_by_each_process(serving):
    before = serving.pids()
    log = serving.folder / "run/log"
    log.chmod(0o777)
    try:
        for command in ("up", "down"):
            done = serving.run(command)
            assert done.returncode == 1
            assert f"pinlaterd: {log}: other users may write to it (mode 0777)" in done.stderr
            assert f"`chmod go-w {log}`" in done.stderr
        for process in ("router", "coordinator", "shard-1"):
            command = f"{process.replace('-', ' ')} --config {serving.folder}/etc"
            refused = Program("pinlaterd").error(command, code=ExitCode.CONFIG)
            assert f"ERROR {process} {log}: other users may write to it" in refused
    finally:
        log.chmod(0o700)
    assert serving.pids() == before
    assert serving.up().stdout.startswith("already serving")


def test_a_process_that_fails_is_named_with_the_end_of_its_log(operator):
    operator.init("--shards", 2)
    damaged = operator.folder / "data/shard-2.sqlite"
    damaged.write_bytes(b"not a database, but long enough" * 99)

    done = operator.up()

    assert done.returncode == 1
    assert "shard-2" in done.stderr
    assert "The last lines of run/log/shard-2.log:" in done.stderr
    assert "shard-2.sqlite" in done.stderr
    assert "Traceback" not in done.stderr


def test_no_deployment_there(operator):
    for command in ("up", "down", "status"):
        done = operator.run(command)
        assert done.returncode == 1
        assert str(operator.folder) in done.stderr
        assert "Traceback" not in done.stderr
    assert not operator.folder.exists()


def test_only_one_command_works_in_a_folder_at_a_time(serving):
    lock = (serving.folder / "run" / "command.lock").open("w")
    with lock:
        import fcntl

        fcntl.flock(lock, fcntl.LOCK_EX)
        done = serving.down()

    assert done.returncode == 1
    assert "another `pinlaterd up`, `down` or `pinlater-admin restart` works in" in done.stderr
    assert set(serving.pids()) == ALL


@pytest.fixture
def others(serving, wait_until):
    """What users run in a deployment's folder: a worker with a process, readers of logs."""
    (serving.folder / "tasks.py").write_text(TASKS)
    worker = Program("pinlater", "--port", serving.port).line("worker tasks --create-queues")
    ctl = [sys.executable, "-m", "supervisor.supervisorctl", "-c", "etc/supervisord.conf"]
    with contextlib.ExitStack() as stack:
        started = []
        for command in (
            worker,
            ["tail", "-f", "run/log/supervisord.log"],
            [*ctl, "tail", "-f", "router"],
        ):
            process = subprocess.Popen(
                command,
                cwd=serving.folder,
                env=os.environ | {"PYTHONPATH": str(ROOT)},
                stdout=subprocess.DEVNULL,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            started.append(psutil.Process(process.pid))
        with Client(port=serving.port) as client:
            wait_until(lambda: "tasks" in client.queue_names())
            client.enqueue("tasks", [b""])
            wait_until(lambda: client.count("tasks", JobState.PENDING) == 0)
            wait_until(lambda: client.count("tasks", JobState.IN_PROGRESS) == 0)
        children = started[0].children()
        assert children
        yield started + children


@pytest.mark.parametrize("is_killed", [False, True])
def test_down_ends_its_own_processes_only_and_soon(serving, others, is_killed):
    def harm():
        if is_killed:
            kill(serving.pids()["supervisord"])

    harm()
    assert is_down_soon(serving, harm)
    assert [one for one in others if not one.is_running()] == []


def test_a_process_that_has_ended_is_not_waited_for_though_nobody_reaps_it():
    with subprocess.Popen(["/bin/sh", "-c", "true & exec sleep 60"]) as careless:
        try:
            while not (children := psutil.Process(careless.pid).children()):
                time.sleep(0.01)
            assert wait_for(children, KILLED_SECONDS) == []
            assert wait_for([psutil.Process(careless.pid)], 0.05) != []
        finally:
            careless.kill()
