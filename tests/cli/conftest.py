"""A deployment folder, and `pinlaterd` run on it as an operator would."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from pinlaterd.config.layout import STATS_SOCKET
from pinlaterd.deployment import orphans
from tests.cli.program import run
from tests.deployment import unused_port

__all__ = ["run"]

ROOT = Path(__file__).parents[2]
COMMAND_SECONDS = 100.0


class Operator:
    """Runs commands on a deployment in `folder`, from another folder."""

    def __init__(self, folder: Path, port: int, stats_port: int):
        self.folder = folder
        self.port = port
        self.stats_port = stats_port
        self.socket = folder / STATS_SOCKET

    def run(self, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "pinlaterd", *map(str, arguments)],
            cwd=ROOT,
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=COMMAND_SECONDS,
        )

    def init(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        ports = ("--port", self.port, "--stats-port", self.stats_port)
        return self.run("init", self.folder, *ports, *arguments)

    def up(self) -> subprocess.CompletedProcess[str]:
        return self.run("up", self.folder)

    def down(self) -> subprocess.CompletedProcess[str]:
        return self.run("down", self.folder)

    def status(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.run("status", self.folder, *arguments)

    def pids(self) -> dict[str, int]:
        return {orphans.name_of(found): found.pid for found in orphans.processes_of(self.folder)}

    def write(self, name: str, text: str) -> None:
        (self.folder / "etc" / name).write_text(text)

    def append(self, name: str, text: str) -> None:
        with (self.folder / "etc" / name).open("a") as file:
            file.write(text)


@pytest.fixture
def operator():
    # not pytest's own folder: the path of a Unix socket must be short
    with tempfile.TemporaryDirectory(prefix="pl", dir="/tmp") as folder:
        made = Operator(Path(folder) / "deployment", unused_port(), unused_port())
        yield made
        for process in orphans.processes_of(made.folder):
            process.kill()
