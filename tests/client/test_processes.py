"""The process of a handler at close quarters: every way to end it, and what is left of it. What
handlers in processes do for jobs is in `test_worker_processes`."""

from __future__ import annotations

import math
import multiprocessing
import os
import pickle
import resource
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest

from pinlaterd.client import ClaimLost, Client, Later, Retry, RunningJob
from pinlaterd.client.processes import (
    CarriedError,
    Child,
    ChildPlan,
    ProcessDied,
    ProcessNotStarted,
)
from pinlaterd.client.running_job import ErrorSummary
from pinlaterd.model import ClaimedJob
from tests.client.process_handlers import note_pid
from tests.client.working import is_gone


def handle(job: RunningJob) -> object:
    what, _, argument = job.body.decode().partition(" ")
    match what:
        case "echo":
            return argument
        case "hang_with_a_child":
            with subprocess.Popen(["sleep", "300"]) as sleeper:
                note_pid(argument, sleeper.pid)
        case "terminate_a_child":
            with subprocess.Popen(["sleep", "300"]) as sleeper:
                sleeper.terminate()
                return sleeper.wait()
        case "wait_for":
            while not Path(argument).exists():
                time.sleep(0.01)
        case "copy":
            return talk_of_a_copy()
        case "sockets":
            return [str(c.laddr) for c in psutil.Process().net_connections("inet")]
    return "not done"


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


PLAN = ChildPlan("q", pickle.dumps(handle), pickle.dumps(None))


def never() -> bool:
    return False


def job_of(body: str) -> RunningJob:
    claimed = ClaimedJob("q:s1:p1:1", body.encode(), 2, 2, "h:1:1:me:1", 60)
    return RunningJob("q", claimed, Client(), 0.0)


def apply(child: Child, body: str, limit_seconds: float = math.inf) -> str:
    answer = child.apply(job_of(body), limit_seconds)
    assert answer.error is None
    return answer.status


@contextmanager
def a_child(is_abandoned: Callable[[], bool] = never) -> Iterator[Child]:
    child = Child(PLAN, "test", is_abandoned)
    try:
        yield child
    finally:
        child.end()
    assert not psutil.pid_exists(child.pid)


@pytest.fixture
def child() -> Iterator[Child]:
    with a_child() as child:
        child.wait_until_ready()
        yield child


def test_it_answers_one_order_after_the_other_whatever_signals_come(child):
    assert apply(child, "echo 1") == "1"
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(child.pid, number)
    long = "x" * 10_000_000
    assert apply(child, f"echo {long}") == long
    assert os.getpgid(child.pid) == child.pid  # a terminal's Ctrl-C goes to another group
    assert apply(child, "sockets") == "[]"
    # What it starts heeds signals all the same.
    assert apply(child, "terminate_a_child") == str(-signal.SIGTERM)
    assert apply(child, "copy") == f"1 socket, ended by {int(signal.SIGTERM)}"


def test_an_answer_that_can_not_be_read_costs_the_process_no_more(child, monkeypatch):
    def broken(_connection: Connection) -> object:
        raise ValueError("no number")

    monkeypatch.setattr(Connection, "recv", broken)
    with pytest.raises(ProcessDied, match="said what can't be read, and was killed: ValueError"):
        apply(child, "echo 1")
    with pytest.raises(ProcessNotStarted, match="was gone"):
        apply(child, "echo too_late")


def test_what_it_has_said_counts_though_its_time_is_over(tmp_path):
    """As where the machine stalls."""
    children: list[Child] = []

    def answer_first() -> bool:
        if children:
            (tmp_path / "go").touch()
            assert select.select([children[0]._connection], [], [], 60)[0]
        return False

    with a_child(answer_first) as child:
        child.wait_until_ready()
        children.append(child)
        assert apply(child, f"wait_for {tmp_path / 'go'}", limit_seconds=0) == "not done"


def test_a_child_that_is_stopped_while_it_is_given_something_long_is_gone(monkeypatch):
    monkeypatch.setattr("pinlaterd.client.processes._STALL_SECONDS", 1)
    with a_child() as child:
        child.wait_until_ready()
        os.kill(child.pid, signal.SIGSTOP)
        with pytest.raises(ProcessNotStarted):
            apply(child, "echo " + "x" * 10_000_000)


def test_without_a_descriptor_left_there_is_no_process(child):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    spare = os.dup(0)
    os.close(spare)
    resource.setrlimit(resource.RLIMIT_NOFILE, (spare, hard))
    try:
        with pytest.raises(ProcessNotStarted, match="Too many open files"):
            Child(PLAN, "test", never)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert apply(child, "echo 1") == "1"


def test_nobody_else_reaps_it(child, wait_until):
    """Its number stays its own, and its group's, until it is reaped here."""
    os.kill(child.pid, signal.SIGKILL)
    wait_until(lambda: is_gone(child.pid))

    multiprocessing.active_children()  # reaps what multiprocessing looks after

    assert psutil.pid_exists(child.pid)


def test_one_that_nobody_waits_for_says_nothing_of_it(capfd):
    with a_child():
        pass

    assert capfd.readouterr().err == ""


def test_what_it_started_ends_with_it(child, tmp_path, wait_until, monkeypatch):
    monkeypatch.setattr("pinlaterd.client.processes.LOST_GRACE_SECONDS", 0)
    pid_file = tmp_path / "pid"
    job = job_of(f"hang_with_a_child {pid_file}")

    def lose() -> None:
        wait_until(pid_file.exists, seconds=60)
        job.lose()

    threading.Thread(target=lose).start()
    with pytest.raises(ClaimLost, match="its process was killed"):
        child.apply(job)

    assert not psutil.pid_exists(child.pid)
    sleeper_pid = int(pid_file.read_text())
    wait_until(lambda: is_gone(sleeper_pid))


# --- exceptions: class, text and a handler's word come along --------------------------------


class NeedsTwo(Exception):
    def __init__(self, code: int, why: str) -> None:
        super().__init__(f"{why} ({code})")
        self.code = code


class NotYet(Retry):
    """What a handler's own class says must survive what it holds."""

    def __init__(self, lock: object) -> None:
        super().__init__(delay_seconds=60, status="locked; ")
        self.lock = lock


class Refuses(Exception):
    def __reduce__(self) -> str:
        raise RuntimeError("no")

    def __str__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    "error",
    [
        ValueError("plain"),
        OSError(2, "No such file", "x.txt"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
        NeedsTwo(7, "because"),
        NeedsTwo(threading.Lock(), "because"),  # type: ignore[arg-type]
    ],
    ids=["plain", "of the system", "of several arguments", "of our own", "that can not be pickled"],
)
def test_class_and_text_come_along(error):
    came = CarriedError.of(error).restored()

    assert (type(came), str(came)) == (type(error), str(error))
    assert type(error).__name__ in str(came.__cause__)


def test_state_comes_along_where_it_can():
    came = CarriedError.of(NotYet(threading.Lock())).restored()
    assert isinstance(came, NotYet)
    assert (came.delay_seconds, came.status) == (60, "locked; ")

    later = CarriedError.of(Later(run_after_ms=5, body=b"b", attempts=3)).restored()
    assert isinstance(later, Later)
    said = (later.delay_seconds, later.run_after_ms, later.body, later.attempts)
    assert said == (None, 5, b"b", 3)


def test_a_class_that_is_found_nowhere_becomes_its_base():
    class Local(LookupError):
        pass

    came = CarriedError.of(Local("gone")).restored()

    assert (type(came), str(came)) == (LookupError, "gone")
    assert type(CarriedError.of(Refuses()).restored()) is Refuses


def test_one_whose_module_is_unknown_here_is_told_by_its_traceback():
    summary = ErrorSummary("Missing", "gone", "")
    came = CarriedError(b"cnowhere\nMissing\n.", summary, "Traceback: Missing: gone").restored()

    assert "No module named 'nowhere'" in str(came)
    assert "Missing: gone" in str(came.__cause__)
