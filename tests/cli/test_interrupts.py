"""Ctrl-C in a command line: one line and exit 130, whatever the command is doing."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from pinlaterd.cli import EXIT_INTERRUPTED
from tests.cli.program import NOT_IGNORED

PROGRAMS = Path(sys.executable).parent
SECONDS = 60
TRIES = 50


def end_of(process: subprocess.Popen[str]) -> tuple[int, list[str]]:
    """Its exit status, and what it wrote beside the times of imports."""
    _, said = process.communicate(timeout=SECONDS)
    lines = [line for line in said.splitlines() if not line.startswith("import time:")]
    return process.returncode, lines


@pytest.mark.parametrize("module", ["click.core", "pinlaterd.lifecycle"])
@pytest.mark.parametrize("program", ["pinlaterd", "pinlater", "pinlater-admin"])
def test_while_it_imports(program, module):
    """The module is just imported, and others are next. On a busy machine it may end before."""
    ends = (_interrupted_while_it_imports(program, module) for _ in range(TRIES))
    in_time = next(end for end in ends if end != (0, []))
    assert in_time == (EXIT_INTERRUPTED, [f"{program}: interrupted"])


def _interrupted_while_it_imports(program, module):
    with subprocess.Popen(
        [*NOT_IGNORED, sys.executable, "-X", "importtime", PROGRAMS / program, "--help"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if line.rpartition("|")[2].strip() == module:
                process.send_signal(signal.SIGINT)
                break
        return end_of(process)


@pytest.mark.parametrize(
    ("program", "arguments"),
    [
        ("pinlater", ["get-queue-names", "--port"]),
        ("pinlater-admin", ["queue", "list", "--port"]),
        ("pinlaterd", ["status"]),
    ],
)
def test_while_it_waits_for_an_answer(program, arguments, tmp_path):
    with socket.socket(socket.AF_UNIX if program == "pinlaterd" else socket.AF_INET) as silent:
        if program == "pinlaterd":
            (tmp_path / "run").mkdir()
            silent.bind(str(tmp_path / "run/stats.sock"))
        else:
            silent.bind(("127.0.0.1", 0))
            arguments = [*arguments, str(silent.getsockname()[1])]
        silent.listen()
        with subprocess.Popen(
            [*NOT_IGNORED, PROGRAMS / program, *arguments],
            cwd=tmp_path,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            silent.settimeout(SECONDS)
            connection, _ = silent.accept()
            with connection:
                process.send_signal(signal.SIGINT)
                assert end_of(process) == (EXIT_INTERRUPTED, [f"{program}: interrupted"])
