"""Autoreload with real processes: a program is ended in order and started anew, never left over."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from pinlaterd.cli.worker import changes, sources

PARENT = """
import os, sys
from pathlib import Path
from pinlaterd.cli.worker import run_reloaded
command = [sys.executable, "-B", "program.py", str(os.getpid())]
sys.exit(run_reloaded(command, Path.cwd(), lambda text: print(text, flush=True)))
"""
# It counts the signals that it is sent, and ends at the one that `version.py` names.
PROGRAM = """
import os, signal, sys
from pinlaterd.cli.worker import begin_as_child
begin_as_child(int(sys.argv[1]))
from version import ENDS_AT, VERSION
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
print("began", VERSION, os.getpid(), flush=True)
for count in range(1, ENDS_AT + 1):
    signal.sigwait({signal.SIGTERM})
    print("signal", count, flush=True)
"""


class Reloaded:
    """A parent with its child in `folder`, and what both say."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._said = folder / "said"
        (folder / "program.py").write_text(PROGRAM)

    def version(self, version: int, *, ends_at: int = 1) -> None:
        self.write("version.py", f"VERSION = {version}\nENDS_AT = {ends_at}\n")

    def write(self, name: str, text: str) -> None:
        (self._folder / name).write_text(text)

    def start(self) -> subprocess.Popen[bytes]:
        with self._said.open("w") as said:
            self.parent = subprocess.Popen(
                [sys.executable, "-c", PARENT],
                cwd=self._folder,
                env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
                stdout=said,
                stderr=said,
            )
        return self.parent

    def lines(self) -> list[str]:
        return self._said.read_text().splitlines()

    def says(self, beginning: str) -> Callable[[], bool]:
        return lambda: any(line.startswith(beginning) for line in self.lines())

    def child(self) -> psutil.Process:
        [child] = psutil.Process(self.parent.pid).children()
        return child


@pytest.fixture
def reloaded(tmp_path: Path) -> Iterator[Reloaded]:
    made = Reloaded(tmp_path)
    made.version(1)
    yield made
    if made.parent.poll() is None:
        made.parent.kill()
        made.parent.wait()


def test_a_change_ends_the_program_in_order_and_starts_it_anew(reloaded, wait_until):
    parent = reloaded.start()
    wait_until(reloaded.says("began 1"))
    first = reloaded.child()

    reloaded.version(2, ends_at=2)
    wait_until(reloaded.says("began 2"))

    assert not first.is_running()
    assert "version.py changed; restarting" in reloaded.lines()
    assert reloaded.lines().count("signal 1") == 1
    parent.send_signal(signal.SIGINT)
    wait_until(lambda: reloaded.lines().count("signal 1") == 2)
    assert parent.poll() is None  # the program takes its time
    parent.send_signal(signal.SIGTERM)
    assert parent.wait(60) == 0
    assert reloaded.lines()[-1] == "signal 2"


def test_the_program_ends_in_order_with_its_killed_parent(reloaded, wait_until):
    parent = reloaded.start()
    wait_until(reloaded.says("began 1"))
    child = reloaded.child()

    parent.kill()

    wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
    assert reloaded.lines()[-1] == "signal 1"


def test_what_is_looked_at_is_the_application(tmp_path):
    for path in ["tasks.py", "shop/mail.py", "notes.txt", ".git/hook.py", "env/lib/library.py"]:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    (tmp_path / "env/pyvenv.cfg").touch()

    before = sources(tmp_path)
    assert sorted(before) == [str(tmp_path / "shop/mail.py"), str(tmp_path / "tasks.py")]

    (tmp_path / "tasks.py").write_text("x = 1")
    (tmp_path / "shop/mail.py").unlink()
    (tmp_path / "new.py").touch()
    changed = changes(before, sources(tmp_path))
    assert [Path(path).name for path in changed] == ["new.py", "mail.py", "tasks.py"]
