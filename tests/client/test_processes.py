"""A process that runs handlers, tried with real ones: what it answers, and every way to die."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from pinlaterd.client.processes import (
    Bell,
    Flag,
    HandlerProcess,
    OutOfTime,
    ProcessDied,
    ProcessNotStarted,
)
from tests.client.working import is_gone

Order = tuple[str, str]
Doer = HandlerProcess[Order, str]


class Do:
    """What the child does, by its order."""

    def __init__(self, flag: Flag) -> None:
        self._flag = flag

    def __call__(self, order: Order) -> str:
        what, argument = order
        match what:
            case "echo":
                return argument
            case "exit":
                os._exit(int(argument))
            case "signal":
                os.kill(os.getpid(), int(argument))
            case "wait for the flag":
                Path(argument).touch()
                while not self._flag.value:
                    time.sleep(0.01)
                return "was warned"
            case "hang with a child":
                with subprocess.Popen(["sleep", "300"]) as sleeper:
                    note(argument, str(sleeper.pid))
            case "terminate a child":
                with subprocess.Popen(["sleep", "300"]) as sleeper:
                    sleeper.terminate()
                    return str(sleeper.wait())
            case "sockets":
                return ",".join(str(c.laddr) for c in psutil.Process().net_connections("inet"))
        return "not done"


def note(path: str, text: str) -> None:
    """Appears whole or not at all."""
    made = Path(f"{path}.new")
    made.write_text(text)
    made.rename(path)


def fails(flag: Flag) -> Do:
    raise LookupError("no such model")


def ends(flag: Flag) -> Do:
    os._exit(5)


def hangs(flag: Flag) -> Do:
    threading.Event().wait()
    raise AssertionError


def never() -> float:
    return math.inf


def now() -> float:
    return -math.inf


@contextmanager
def a_process(make: Callable[[Flag], Do] = Do, bell: Bell | None = None) -> Iterator[Doer]:
    process = HandlerProcess[Order, str](make, "test", bell or Bell())
    try:
        yield process
    finally:
        process.end()
    assert not psutil.pid_exists(process.pid)


@pytest.fixture
def bell() -> Bell:
    return Bell()


@pytest.fixture
def process(bell: Bell) -> Iterator[Doer]:
    with a_process(bell=bell) as process:
        process.wait_until_ready(never)
        yield process


def test_it_answers_one_thing_after_the_other_whatever_signals_come(process):
    assert process.apply(("echo", "1"), never) == "1"
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(process.pid, number)
    assert len(process.apply(("echo", "x" * 10_000_000), never)) == 10_000_000
    assert os.getpgid(process.pid) == process.pid  # a terminal's Ctrl-C goes to another group
    assert process.apply(("sockets", ""), never) == ""
    # What it starts heeds signals all the same.
    assert process.apply(("terminate a child", ""), never) == str(-signal.SIGTERM)


@pytest.mark.parametrize(
    ("order", "how"),
    [
        (("exit", "3"), r"ended with exit status 3$"),
        (("signal", str(int(signal.SIGSEGV))), r"was ended by signal 11 \(SIGSEGV\)$"),
    ],
    ids=str,
)
def test_how_it_died_is_said(process, order, how):
    with pytest.raises(ProcessDied, match=f"the handler's process {how}"):
        process.apply(order, never)
    with pytest.raises(ProcessNotStarted):
        process.apply(("echo", "too late"), never)


def test_its_time_ends_when_the_bell_rings_and_what_it_started_ends_with_it(
    process, bell, tmp_path, wait_until
):
    pid_file = tmp_path / "pid"
    is_over = threading.Event()

    def ring() -> None:
        wait_until(pid_file.exists)
        is_over.set()
        bell.ring()

    ringer = threading.Thread(target=ring)
    ringer.start()
    with pytest.raises(OutOfTime):
        process.apply(
            ("hang with a child", str(pid_file)), lambda: now() if is_over.is_set() else never()
        )
    ringer.join()

    assert not psutil.pid_exists(process.pid)
    sleeper_pid = int(pid_file.read_text())
    wait_until(lambda: is_gone(sleeper_pid))


def test_it_is_warned_and_the_next_thing_is_not(process, bell, tmp_path, wait_until):
    began = tmp_path / "began"
    ringer = threading.Thread(target=lambda: (wait_until(began.exists), bell.ring()))
    ringer.start()

    def deadline() -> float:
        if began.exists():
            process.warn()
        return never()

    assert process.apply(("wait for the flag", str(began)), deadline) == "was warned"
    ringer.join()
    soon = time.monotonic() + 0.2
    with pytest.raises(OutOfTime):
        process.apply(("wait for the flag", str(began)), lambda: soon)


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (fails, r"(?s)in fails.*LookupError: no such model$"),
        (ends, r"exit status 5 before it was ready; what it printed to stderr tells why$"),
    ],
)
def test_one_that_can_not_begin_says_why(make, what):
    with a_process(make) as process, pytest.raises(ProcessNotStarted, match=what):
        process.wait_until_ready(never)


def test_one_that_hangs_before_it_is_ready_can_be_ended():
    with a_process(hangs) as process, pytest.raises(OutOfTime):
        process.wait_until_ready(now)


PARENT = """
import sys, threading
from tests.client.test_processes import Bell, Do, HandlerProcess, never

def attend():
    process = HandlerProcess(Do, "test", Bell())
    process.wait_until_ready(never)
    print(process.pid, flush=True)
    process.apply(("hang with a child", sys.argv[1]), never)

threading.Thread(target=attend).start()
"""


def test_it_ends_with_a_killed_parent_though_it_hangs(tmp_path, wait_until):
    pid_file = tmp_path / "pid"
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(pid_file)],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        child_pid = int(parent.stdout.readline())
        wait_until(pid_file.exists)

        parent.kill()

        wait_until(lambda: is_gone(child_pid))
    os.kill(int(pid_file.read_text()), signal.SIGKILL)
