"""The programs on the service that the tests share, and a deployment of an operator's own."""

from __future__ import annotations

import tempfile
from contextlib import suppress
from pathlib import Path

import pytest

from pinlaterd.client.coordinator import fetch_json
from pinlaterd.deployment.service import name_of, processes_of
from pinlaterd.errors import ConnectionFailed
from tests.cli.program import Done, Program
from tests.deployment import unused_port


@pytest.fixture
def pinlater(service):
    return Program("pinlater", "--port", service.port)


@pytest.fixture
def admin(service):
    return Program("admin", "--dir", service.folder)


class Operator:
    """Runs `pinlaterd` on a deployment in `folder`, from another folder."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.port = unused_port()
        self.stats_port = unused_port()
        self._pinlaterd = Program("pinlaterd")

    def run(self, command: str, *arguments: object) -> Done:
        return self._pinlaterd(command, self.folder, *arguments)

    def init(self, *arguments: object) -> Done:
        """Without HTTP and the dashboard, unless `arguments` say otherwise."""
        ports = ("--port", self.port, "--stats-port", self.stats_port)
        return self.run("init", *ports, "--http-port", 0, "--web-port", 0, *arguments)

    def up(self) -> Done:
        return self.run("up")

    def down(self) -> Done:
        return self.run("down")

    def status(self, *arguments: str) -> Done:
        return self.run("status", *arguments)

    def is_healthy(self) -> bool:
        """Ask as `status` does, without the start of a command."""
        with suppress(ConnectionFailed):
            return bool(fetch_json("/status.json", directory=self.folder, url=None)["healthy"])
        return False

    def pids(self) -> dict[str, int]:
        return {name_of(found): found.pid for found in processes_of(self.folder)}

    def write(self, name: str, text: str) -> None:
        (self.folder / "etc" / name).write_text(text)

    def append(self, name: str, text: str) -> None:
        with (self.folder / "etc" / name).open("a") as file:
            file.write(text)


@pytest.fixture(scope="module")
def operators():
    """Makes operators; their processes end with the module."""
    # not pytest's own folder: the path of a Unix socket must be short
    with tempfile.TemporaryDirectory(prefix="pl", dir="/tmp") as folder:
        made: list[Operator] = []

        def make() -> Operator:
            made.append(Operator(Path(folder) / f"d{len(made)}"))
            return made[-1]

        yield make
        for operator in made:
            for process in processes_of(operator.folder):
                process.kill()


@pytest.fixture
def operator(operators):
    return operators()
