"""The documentation as a reader uses it: blocks of code, command lines, and a shell for these."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

from tests.deployment import Deployment

REPOSITORY = Path(__file__).parents[2]
README = REPOSITORY / "README.md"

# What README.md calls the service's folder and ports.
_FOLDER, _PORT, _STATS_PORT = "~/jobs", "9020", "9021"
_DEFAULT_STATS_PORT = "9999"
_COMMAND_SECONDS = 180.0
_END_SECONDS = 120.0


def section(page: Path, title: str) -> str:
    """What stands under a title, up to the next one."""
    found: list[str] = []
    is_within = is_code = False
    for line in page.read_text("utf-8").splitlines(keepends=True):
        is_code ^= line.startswith("```")
        if line.startswith("#") and not is_code:
            is_within = line.strip("# \n") == title
        elif is_within:
            found.append(line)
    assert found, f"{page} has no section {title!r}"
    return "".join(found)


def python_blocks(text: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def commands(text: str) -> list[str]:
    """The lines that are indented as command lines are, without their comments."""
    lines = re.findall(
        r"^    (\S.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE
    )
    return [re.sub(r"\s+# .*", "", line) for line in lines]


class ReadersShell:
    """Runs command lines of the documentation in `folder`, with ours on the path.

    The reader's service has the default ports, the test's any that are free: they are put in.
    """

    def __init__(self, folder: Path, service: Deployment) -> None:
        self.folder = folder
        self._service = service

    def run(self, line: str) -> str:
        """What it prints; AssertionError if it fails."""
        done = subprocess.run(
            ["bash", "-c", self._here(line)],
            cwd=self.folder,
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=_COMMAND_SECONDS,
        )
        assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"
        return done.stdout

    def start(self, line: str) -> Started:
        return Started(self._here(line), self.folder, self._environment)

    def _here(self, line: str) -> str:
        service = self._service
        line = line.replace(_FOLDER, str(service.folder)).replace(_PORT, str(service.port))
        for its_port in (_STATS_PORT, _DEFAULT_STATS_PORT):
            line = line.replace(its_port, str(service.stats_port))
        # `init` with another Thrift port chooses that of HTTP.
        line = line.replace("localhost:9013", f"localhost:{service.port + 3}")
        speaks_thrift = re.search(r"(^|\| )(pinlater|python) ", line)
        return f"{line} --port {service.port}" if speaks_thrift else line

    @property
    def _environment(self) -> dict[str, str]:
        programs = str(Path(sys.executable).parent)
        return {
            **os.environ,
            "PATH": f"{programs}:{os.environ['PATH']}",
            "PYTHONPATH": str(REPOSITORY),
        }


class Started:
    """A command that goes on until it is ended."""

    def __init__(self, line: str, folder: Path, environment: dict[str, str]) -> None:
        self._printed = folder / "printed.txt"
        with self._printed.open("wb") as printed:
            self._process = subprocess.Popen(
                ["bash", "-c", f"exec {line}"],
                cwd=folder,
                env=environment,
                stdout=printed,
                stderr=subprocess.STDOUT,
            )

    def printed(self) -> str:
        """All so far, errors too."""
        return self._printed.read_text()

    def end(self) -> None:
        """As Ctrl-C does. AssertionError if it does not end in order."""
        self._process.send_signal(signal.SIGINT)
        try:
            assert self._process.wait(_END_SECONDS) == 0, self.printed()
        finally:
            self._process.kill()
