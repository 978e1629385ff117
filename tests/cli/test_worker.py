"""`pinlater worker` as a user runs it: in a folder with a module, on a real service."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.request import urlopen

import pytest

from pinlaterd.client import JobState
from tests.cli.program import Program

pytestmark = pytest.mark.service

MODULE = """
from pinlaterd.client import Handlers

handlers = Handlers()

@handlers.queue("{queue}")
def work(job):
    return "{said} " + job.body.decode()
"""


class Shell(Program):
    """Runs `pinlater worker` in `folder`."""

    def __init__(self, folder: Path, port: int) -> None:
        super().__init__("pinlater", "--port", port, folder=folder)
        self.folder = folder
        self._errors = folder / "stderr.txt"
        self.processes = ExitStack()

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)

    def start(self, command: str) -> subprocess.Popen[bytes]:
        with self._errors.open("wb") as errors:
            return self.processes.enter_context(self.started(command, stderr=errors))

    def errors(self) -> str:
        return self._errors.read_text()


@pytest.fixture
def shell(service, tmp_path) -> Iterator[Shell]:
    made = Shell(tmp_path, service.port)
    with made.processes:
        yield made


@pytest.fixture
def status_of(client) -> Callable[[str], tuple[JobState, str]]:
    def status(descriptor: str) -> tuple[JobState, str]:
        record = client.lookup([descriptor])[descriptor]
        return record.state, record.custom_status

    return status


def test_it_makes_the_queue_works_and_ends_in_order(shell, client, queue, wait_until, status_of):
    name = f"made_by_{queue}"
    shell.write("tasks.py", MODULE.format(queue=name, said="did"))
    refused = shell("worker tasks")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert f"make it with `pinlater create --queue {name}`" in refused.stderr

    process = shell.start("worker tasks --create-queues")
    wait_until(lambda: "working on" in shell.errors(), seconds=60)
    [descriptor] = client.enqueue(name, [b"a job"])

    wait_until(lambda: status_of(descriptor) == (JobState.SUCCEEDED, "did a job"), seconds=60)
    process.send_signal(signal.SIGTERM)
    assert process.wait(90) == 0
    assert f"working on {name} of 127.0.0.1:" in shell.errors()
    assert shell.errors().endswith("ended\n")


def test_with_reload_the_next_job_is_done_by_what_was_written(
    shell, client, queue, wait_until, status_of
):
    shell.write("tasks.py", MODULE.format(queue=queue, said="old"))
    process = shell.start("worker tasks --reload")
    [first] = client.enqueue(queue, [b"1"])
    wait_until(lambda: status_of(first) == (JobState.SUCCEEDED, "old 1"), seconds=60)

    shell.write("tasks.py", MODULE.format(queue=queue, said="new")[:-2])
    wait_until(lambda: "SyntaxError" in shell.errors(), seconds=60)
    wait_until(lambda: "ended with 1; waiting for a source to change" in shell.errors(), seconds=60)
    shell.write("tasks.py", MODULE.format(queue=queue, said="new"))
    [second] = client.enqueue(queue, [b"2"])

    wait_until(lambda: status_of(second) == (JobState.SUCCEEDED, "new 2"), seconds=60)
    process.send_signal(signal.SIGINT)
    assert process.wait(90) == 0


def test_a_queue_without_handler_is_refused(shell):
    shell.write("tasks.py", MODULE.format(queue="mail", said="did"))

    refused = shell.error("worker tasks --queue mial", code=2)

    assert "--queue mial: the module has no handler for it; it has mail" in refused


HANGS_IN_A_THREAD_OF_ITS_OWN = """
import asyncio
import time
from pathlib import Path
from pinlaterd.client import Handlers

handlers = Handlers()

@handlers.queue("{queue}", concurrency=1)
async def hang(job):
    await asyncio.to_thread(block)

def block():
    Path("begun").touch()
    time.sleep(600)
"""


def test_a_thread_that_a_task_waits_for_does_not_keep_it_alive(shell, client, queue, wait_until):
    shell.write("tasks.py", HANGS_IN_A_THREAD_OF_ITS_OWN.format(queue=queue))
    [descriptor] = client.enqueue(queue, [b"job"])
    process = shell.start("worker tasks --grace-seconds 0")
    wait_until((shell.folder / "begun").exists, seconds=60)
    process.send_signal(signal.SIGTERM)

    assert process.wait(60) == 0
    record = client.lookup([descriptor])[descriptor]
    assert (record.state, record.attempts_remaining) == (JobState.PENDING, 2)
    assert "a handler's thread still runs; it ends with the process" in shell.errors()


IN_PROCESSES = """
import logging
import os
from pinlaterd.client import Handlers

handlers = Handlers()

@handlers.queue("{queue}", run_in="processes", concurrency=1)
def work(job):
    print("\u20ac", flush=True)
    logging.getLogger("tasks").info("at work on %s", job.body.decode())
    return str(os.getpid())
"""


def test_handlers_in_processes_print_and_log_as_the_worker_does_and_are_counted(
    shell, client, queue, wait_until, status_of, monkeypatch
):
    monkeypatch.setenv("PYTHONIOENCODING", "latin-1")
    shell.write("tasks.py", IN_PROCESSES.format(queue=queue))
    process = shell.start("worker tasks --metrics-port 0")
    descriptors = client.enqueue(queue, [b"one", b"two"])
    wait_until(lambda: client.count(queue, JobState.SUCCEEDED) == 2, seconds=60)
    url = re.search(r"metrics at (http://127\.0\.0\.1:\d+/metrics)\n", shell.errors())
    assert url is not None
    with urlopen(url[1]) as answer:
        figures = answer.read().decode()

    assert f'pinlaterd_worker_jobs_total{{ending="succeeded",queue="{queue}"}} 2.0\n' in figures
    pids = {status_of(descriptor)[1] for descriptor in descriptors}
    assert len(pids) == 1
    assert str(process.pid) not in pids
    said = re.compile(r"^\S+Z INFO worker at work on one$", re.MULTILINE)
    wait_until(lambda: said.search(shell.errors()))
    process.send_signal(signal.SIGTERM)
    assert process.wait(90) == 0
    assert process.stdout is not None
    assert process.stdout.read() == b"\\u20ac\n" * 2


LOCAL = """
from pinlaterd.client import Handlers

handlers = Handlers()
handlers.queue("mail", run_in="processes")(lambda job: None)
"""


def test_what_can_not_begin_is_said_before_there_is_a_service(shell):
    shell.write("tasks.py", MODULE.format(queue="mail", said="did"))
    shell.write("local.py", LOCAL)

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = shell("worker tasks --metrics-port", port)
    assert refused.returncode == 1
    assert (
        f"cannot serve metrics at 127.0.0.1:{port}: Address already in use; "
        "see --metrics-host and --metrics-port"
    ) in refused.stderr

    refused = shell("worker tasks --metrics-port 0 --metrics-host a..b")
    assert refused.returncode == 1
    assert "cannot serve metrics at a..b:0: no host has such a name" in refused.stderr

    refused = shell("worker local")
    assert refused.returncode == 1
    assert "local: the handler of queue 'mail' can't be found by a process" in refused.stderr
