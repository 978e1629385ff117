"""`pinlater` as a program of its own, on the service that the tests share."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.deployment import Deployment

Run = Callable[..., subprocess.CompletedProcess[str]]
COMMAND = [sys.executable, "-m", "pinlaterd.cli.pinlater"]


@pytest.fixture
def run(service: Deployment) -> Run:
    def run(*arguments: str, stdin: bytes = b"") -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [*COMMAND, *arguments, "--port", str(service.port)],
            input=stdin,
            capture_output=True,
            check=False,
            timeout=60,
        )
        return subprocess.CompletedProcess(
            done.args, done.returncode, done.stdout.decode(), done.stderr.decode()
        )

    return run


def facts(done: subprocess.CompletedProcess[str]) -> Any:
    """What it printed as JSON; AssertionError if it failed."""
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
