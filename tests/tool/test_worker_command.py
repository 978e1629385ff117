"""`pinlater worker` on a real service: it runs a module's handlers, and ends in order."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pinlaterd.client import Client, JobState
from tests.conftest import WaitUntil
from tests.deployment import Deployment
from tests.shared_service import client, queue, service

__all__ = ["client", "queue", "service"]

pytestmark = pytest.mark.service

TASKS = """
import time
from pinlaterd.client import Handlers

handlers = Handlers()

@handlers.queue({queue!r}, concurrency=1)
def handle(job):
    if job.body == b"hang":
        time.sleep(600)
    return "done"
"""


def command(deployment: Deployment, *arguments: str) -> list[str]:
    program = [sys.executable, "-m", "pinlaterd.tool.main", "worker", *arguments]
    return [*program, "--port", str(deployment.port)]


@contextmanager
def started(
    deployment: Deployment, folder: Path, *arguments: str
) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        command(deployment, *arguments), cwd=folder, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_modules_handlers_run_until_sigterm(service, client, queue, tmp_path, wait_until):
    (tmp_path / "tasks.py").write_text(TASKS.format(queue=queue))
    descriptors = client.enqueue(queue, [b"a", b"b"])
    with started(service, tmp_path, "tasks") as process:
        wait_until(lambda: client.count(queue, JobState.SUCCEEDED) == 2, seconds=60)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        assert process.stderr is not None
        assert f"working on {queue} at 127.0.0.1:{service.port}" in process.stderr.read()

    records = client.lookup(descriptors).values()
    assert [record.custom_status for record in records] == ["done", "done"]


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_job_that_hangs_is_not_lost(
    service: Deployment,
    client: Client,
    queue: str,
    tmp_path: Path,
    wait_until: WaitUntil,
    how: signal.Signals,
):
    """SIGTERM gives it back; after SIGKILL it is the service's to take back, by its time-out."""
    (tmp_path / "tasks.py").write_text(TASKS.format(queue=queue))
    [descriptor] = client.enqueue(queue, [b"hang"])
    with started(service, tmp_path, "tasks:handlers", "--grace-seconds", "0") as process:
        wait_until(lambda: client.count(queue, JobState.IN_PROGRESS) == 1, seconds=60)
        process.send_signal(how)
        assert process.wait(60) == (0 if how is signal.SIGTERM else -how)

    record = client.lookup([descriptor])[descriptor]
    expected = JobState.PENDING if how is signal.SIGTERM else JobState.IN_PROGRESS
    assert (record.state, record.attempts_remaining) == (expected, 2)


@pytest.mark.parametrize(
    ("source", "target", "says"),
    [
        (None, "nowhere", "no module nowhere in "),
        ("x = 1", "tasks", "module tasks has no Handlers"),
        ("1 / 0", "tasks", "ZeroDivisionError"),
        ("import missing_thing", "tasks", "imports missing_thing, which is missing"),
        (TASKS.format(queue="q"), "tasks:other", "has no Handlers called other"),
        (
            "from pinlaterd.client import Handlers\na, b = Handlers(), Handlers()",
            "tasks",
            "tasks:a",
        ),
        ("from pinlaterd.client import Handlers\na = Handlers()", "tasks", "no queue to work on"),
    ],
)
def test_what_can_not_be_run_is_said(service, tmp_path, source, target, says):
    if source is not None:
        (tmp_path / "tasks.py").write_text(source)

    done = subprocess.run(
        command(service, target), cwd=tmp_path, capture_output=True, text=True, check=False
    )

    assert done.returncode == 1
    assert says in done.stderr
