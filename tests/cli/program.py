"""The three programs, as their users run them."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import select
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SECONDS = 100
# Programs started by a background job inherit that SIGINT is ignored, and so leave it.
NOT_IGNORED = ("env", "--default-signal=INT")

Done = subprocess.CompletedProcess[str]
Run = Callable[..., Done]


class Program:
    """One of them, called with a command line and further arguments; `options` go with each."""

    def __init__(
        self, name: str, *options: object, folder: Path = ROOT, python: Path | str = sys.executable
    ) -> None:
        self._command = [str(python), "-m", f"pinlaterd.cli.{name}"]
        self._options = options
        self._folder = folder

    def line(self, command: str, *arguments: object) -> list[str]:
        given = (*shlex.split(command), *arguments, *self._options)
        return [*self._command, *map(str, given)]

    def __call__(
        self, command: str, *arguments: object, stdin: bytes | str = b"", **environment: str
    ) -> Done:
        done = subprocess.run(
            self.line(command, *arguments),
            input=stdin.encode() if isinstance(stdin, str) else stdin,
            cwd=self._folder,
            env=self._environment(environment),
            capture_output=True,
            check=False,
            timeout=SECONDS,
        )
        return Done(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())

    def output(self, command: str, *arguments: object, **options: Any) -> str:
        """What it prints; AssertionError if it fails."""
        done = self(command, *arguments, **options)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def error(self, command: str, *arguments: object, code: int = 1, **options: Any) -> str:
        """What it says as it fails, by this exit code; AssertionError if it does not."""
        done = self(command, *arguments, **options)
        assert done.returncode == code, (done.stdout, done.stderr)
        return done.stderr

    def facts(self, command: str, *arguments: object) -> Any:
        """What it prints as JSON; AssertionError if it fails."""
        return json.loads(self.output(command, *arguments, "--json"))

    @contextmanager
    def started(
        self, command: str, *arguments: object, stderr: Any = subprocess.PIPE
    ) -> Iterator[subprocess.Popen[bytes]]:
        """Its pipes have no buffers here: whatever it wrote is there to read."""
        with subprocess.Popen(
            [*NOT_IGNORED, *self.line(command, *arguments)],
            cwd=self._folder,
            env=self._environment({}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            bufsize=0,
        ) as process:
            try:
                yield process
            finally:
                process.kill()

    def _environment(self, more: dict[str, str]) -> dict[str, str]:
        return os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "100"} | more

    @contextmanager
    def on_a_terminal(self, command: str, *arguments: object) -> Iterator[Terminal]:
        pid, descriptor = pty.fork()
        if pid == 0:
            os.environ["TERM"] = "xterm"
            line = self.line(command, *arguments)
            os.execv(line[0], line)
        terminal = Terminal(pid, descriptor)
        try:
            yield terminal
        finally:
            os.close(descriptor)  # which ends it if it runs still
            terminal.reap()


class Terminal:
    """What a person sees of a program, and types."""

    def __init__(self, pid: int, descriptor: int) -> None:
        self._pid = pid
        self._descriptor = descriptor
        self._status: int | None = None
        self.shown = b""

    def wait_for(self, word: bytes, *, times: int = 1) -> None:
        while self.shown.count(word) < times:
            self.shown += read_until(self._descriptor, word)

    def types(self, text: str) -> None:
        os.write(self._descriptor, text.encode())

    def end(self) -> int:
        """Its exit code, once it has ended by itself."""
        with contextlib.suppress(OSError):  # which says that it has ended
            while piece := os.read(self._descriptor, 65536):
                self.shown += piece
        return self.reap()

    def reap(self) -> int:
        if self._status is None:
            _, self._status = os.waitpid(self._pid, 0)
        return os.waitstatus_to_exitcode(self._status)


def read_until(descriptor: int, word: bytes) -> bytes:
    """What comes up to the word; AssertionError if it does not."""
    shown = b""
    until = time.monotonic() + SECONDS
    while word not in shown:
        assert select.select([descriptor], [], [], max(0, until - time.monotonic()))[0], shown
        piece = os.read(descriptor, 4096)
        assert piece, shown
        shown += piece
    return shown
