"""README.md does not promise what does not work: its code is run against a real service.

That the service itself is made by README.md's commands, and ended by them, is the fixture's to see.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

from pinlaterd.client import JobState
from tests.docs.pages import README, REPOSITORY, commands, python_blocks, section

pytestmark = pytest.mark.service


def code_block(holding: str) -> str:
    """The one block of Python in README.md that has these words in it."""
    [found] = [block for block in python_blocks(README.read_text()) if holding in block]
    return found


def run(code: str, port: int, queue: str, **environment: str) -> str:
    assert "9010" in code
    done = subprocess.run(
        [sys.executable, "-c", code.replace("9010", str(port)).replace('"mail"', f'"{queue}"')],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_first_worker_greets(service, shell, client, wait_until):
    text = section(README, "Your first worker")
    activate, start, again, enqueue, look, *others = commands(text)
    assert not others
    [module] = python_blocks(text)
    (shell.folder / "tasks.py").write_text(module)
    assert {activate, again} == {"source .venv/bin/activate"}  # the test's own is active

    worker = shell.start(start)
    try:
        wait_until(lambda: "working on greetings of 127.0.0.1:" in worker.printed(), seconds=60)
        assert "enqueued 2 jobs" in shell.run(enqueue)
        wait_until(lambda: client.count("greetings", JobState.SUCCEEDED) == 2, seconds=60)
    finally:
        worker.end()

    statuses = {line.split("\t")[-1] for line in shell.run(look).splitlines()[1:]}
    assert statuses == {"hello Ada", "hello Grace"}


def test_the_client_of_the_tour_works(service, queue):
    printed = run(code_block("client.enqueue"), service.port, queue)

    assert printed.splitlines() == ["b'to: ada'", "b'to: grace'", "SUCCEEDED"]


def test_the_commands_of_the_shell_work(shell, program_path, wait_until):
    program_path("curl", debian_package="curl")
    lines = commands(section(README, "From the shell"))

    printed = {line: shell.run(line) for line in lines if "bench" not in line}

    def said(words: str) -> str:
        found: str
        [found] = [text for line, text in printed.items() if words in line]
        return found

    assert "enqueued 2 jobs" in said("pinlater enqueue")
    assert "dequeued 2 jobs" in said("pinlater dequeue")
    assert "healthy" in said("pinlater-admin status")
    assert "SUCCEEDED\t" in said("queue stats")
    [figures] = [line for line in lines if "stats.txt" in line]
    wait_until(lambda: "mail_enqueue" in shell.run(figures))  # routers report each second
    assert "RUNNING" in said("supervisorctl")


def test_curl_alone_is_enough(shell, program_path):
    program_path("curl", debian_package="curl")
    create, enqueue, claim, ack, find = commands(section(README, "With curl alone"))

    for line in (create, enqueue):
        assert "errors" not in shell.run(line)
    assert '"existed":true' in shell.run(enqueue)
    [job] = json.loads(shell.run(claim))["jobs"]
    line = ack.replace("DESCRIPTOR", job["descriptor"]).replace("CLAIM", job["claim"])
    [acked] = json.loads(shell.run(line))["succeeded"]
    [found] = json.loads(shell.run(find))["jobs"]

    assert job["data"] == {"to": "ada"}
    assert acked["outcome"] == "done"
    assert found["state"] == "succeeded"


def test_the_bench_of_the_shell_works(shell):
    [line] = [text for text in commands(section(README, "From the shell")) if "bench" in text]

    printed = shell.run(f"{line} --seconds 0.2 --warm-up 0")

    assert "8 connections, 1 job a call" in printed


def test_every_file_that_it_names_is_there():
    linked = re.findall(r"\]\(([^)#]+)", README.read_text("utf-8"))

    assert "docs/worker.md" in linked
    for name in linked:
        assert "://" in name or (REPOSITORY / name).exists(), name
