"""A process that runs handlers, tried with real ones: what it answers, and every way to die."""

from __future__ import annotations

import math
import multiprocessing
import os
import resource
import select
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
Doer = HandlerProcess[Order, object]


class Do:
    """What the child does, by its order."""

    def __init__(self, flag: Flag) -> None:
        self._flag = flag

    def __call__(self, order: Order) -> object:
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
            case "copy":
                return talk_of_a_copy()
            case "unreadable":
                return Unreadable()
            case "sockets":
                return ",".join(str(c.laddr) for c in psutil.Process().net_connections("inet"))
        return "not done"


class Unreadable:
    """Can be pickled, and can't be made again."""

    def __reduce__(self) -> tuple[object, ...]:
        return int, ("no number",)


def talk_of_a_copy() -> str:
    """Make a copy by os.fork: how many sockets it has let go of, and what SIGTERM does to it."""
    before = count_of_sockets()
    read_end, write_end = os.pipe()
    copy_pid = os.fork()
    if not copy_pid:
        os.write(write_end, str(before - count_of_sockets()).encode())
        threading.Event().wait()
    let_go_of = os.read(read_end, 10).decode()
    os.kill(copy_pid, signal.SIGTERM)
    return f"{let_go_of} socket, ended by {os.waitpid(copy_pid, 0)[1]}"


def count_of_sockets() -> int:
    descriptors = [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return sum(path.readlink().name.startswith("socket:") for path in descriptors)


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
    process = HandlerProcess[Order, object](make, "test", bell or Bell())
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
    long = "x" * 10_000_000
    assert process.apply(("echo", long), never) == long
    assert os.getpgid(process.pid) == process.pid  # a terminal's Ctrl-C goes to another group
    assert process.apply(("sockets", ""), never) == ""
    # What it starts heeds signals all the same.
    assert process.apply(("terminate a child", ""), never) == str(-signal.SIGTERM)
    assert process.apply(("copy", ""), never) == f"1 socket, ended by {int(signal.SIGTERM)}"
    # Longer than the clock of poll(2) goes.
    assert process.apply(("echo", "2"), lambda: time.monotonic() + 3e6) == "2"


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


def test_an_answer_that_can_not_be_read_costs_the_process_no_more(process):
    with pytest.raises(ProcessDied, match="said what can't be read, and was killed: ValueError"):
        process.apply(("unreadable", ""), never)


def test_what_it_has_said_counts_though_its_time_is_over():
    """As where the machine stalls: the clock is looked at once the child has spoken."""

    with a_process() as child:

        def late() -> float:
            assert select.select([child._connection], [], [], 60)[0]
            return now()

        child.wait_until_ready(late)


def test_a_child_that_is_stopped_is_ended_while_it_is_given_something_long(process):
    os.kill(process.pid, signal.SIGSTOP)
    with pytest.raises(OutOfTime):
        process.apply(("echo", "x" * 10_000_000), now)


def test_without_a_descriptor_left_there_is_no_process(process, bell):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    spare = os.dup(0)
    os.close(spare)
    resource.setrlimit(resource.RLIMIT_NOFILE, (spare, hard))
    try:
        with pytest.raises(ProcessNotStarted, match="Too many open files"):
            HandlerProcess[Order, object](Do, "test", bell)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert process.apply(("echo", "still here"), never) == "still here"


def test_nobody_else_reaps_it(process, wait_until):
    """Its number stays its own, and its group's, until it is buried."""
    os.kill(process.pid, signal.SIGKILL)
    wait_until(lambda: is_gone(process.pid))

    multiprocessing.active_children()  # reaps what multiprocessing looks after

    assert psutil.pid_exists(process.pid)


def test_one_that_nobody_waits_for_says_nothing_of_it(capfd):
    with a_process():
        pass

    assert capfd.readouterr().err == ""


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
import sys, threading, time
from pathlib import Path
from tests.client.test_processes import Bell, Do, HandlerProcess, never

def attend():
    process = HandlerProcess(Do, "test", Bell())
    process.wait_until_ready(never)
    print(process.pid, flush=True)
    process.apply(("hang with a child", sys.argv[1]), never)

threading.Thread(target=attend, daemon=True).start()
while not Path(sys.argv[1]).exists():
    time.sleep(0.01)
if sys.argv[2] == "stays":
    threading.Event().wait()
"""


@pytest.mark.parametrize("how", ["stays", "ends"])
def test_it_ends_with_its_parent_though_it_hangs(tmp_path, wait_until, how):
    """Be that killed, or have it come to its end while a daemon thread attends the child."""
    pid_file = tmp_path / "pid"
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(pid_file), how],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        child_pid = int(parent.stdout.readline())
        wait_until(pid_file.exists)

        if how == "stays":
            parent.kill()

        try:
            wait_until(lambda: is_gone(child_pid), seconds=60)
        finally:
            parent.kill()
    os.kill(int(pid_file.read_text()), signal.SIGKILL)
