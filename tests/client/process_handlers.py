"""Handlers that run in processes: their children find them here by name. A job's body says what to
do; the rest of it is what that needs, such as a file in which to note the process.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

from pinlaterd.client import Discard, Later, Retry, RunningJob


class Unpicklable(Exception):
    """Its constructor can't make it again."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(f"{why} ({code})")
        self.hook = lambda: code


EXITS = property(lambda self: sys.exit(1))


class Evil(Exception):
    """Every way in which it can be shown ends the program."""

    __notes__ = __cause__ = __context__ = __traceback__ = EXITS

    def __str__(self) -> str:
        raise SystemExit(1)


def handle(job: RunningJob) -> object:
    what, _, argument = job.body.decode().partition(" ")
    return globals()[f"do_{what}"](job, argument)


def do_pid(job: RunningJob, argument: str) -> str:
    return str(os.getpid())


def do_streams(job: RunningJob, argument: str) -> str:
    return " ".join(str(Path(f"/proc/self/fd/{number}").readlink()) for number in range(3))


def do_retry(job: RunningJob, argument: str) -> str:
    if job.attempt == 1:
        raise Retry(0, "not yet; ")
    return "done"


def do_discard(job: RunningJob, argument: str) -> None:
    raise Discard("no such user")


def do_later(job: RunningJob, argument: str) -> None:
    raise Later(0, body=b"pid", status="later; ", attempts=5)


def do_raise(job: RunningJob, argument: str) -> None:
    raise Unpicklable(7, argument)


def do_raise_evil(job: RunningJob, argument: str) -> None:
    raise Evil


def do_save(job: RunningJob, argument: str) -> None:
    [child] = job.client.enqueue(job.queue, [b"pid"])
    job.save(b"pid", f"chained {child}; ")
    raise Retry(0)


def do_exit(job: RunningJob, argument: str) -> None:
    os._exit(int(argument))


def do_signal(job: RunningJob, argument: str) -> None:
    os.kill(os.getpid(), int(argument))


def do_fork(job: RunningJob, argument: str) -> str:
    """Return twice: in a copy of this process, and in itself when the copy has ended."""
    copy_pid = os.fork()
    if copy_pid:
        os.waitpid(copy_pid, 0)
    return "from the process" if copy_pid else "from the copy"


def do_fork_in_c(job: RunningJob, argument: str) -> str:
    """As `do_fork`, but behind Python's back: the copy answers, and ends when it is to go on."""
    copy_pid = ctypes.CDLL(None).fork()
    if copy_pid:
        os.waitpid(copy_pid, 0)
        return "from the process"
    setattr(Connection, "recv", lambda _: os._exit(0))  # noqa: B010 - it has a type
    return "from the copy"


def do_hang(job: RunningJob, argument: str) -> None:
    note_pid(argument, os.getpid())
    threading.Event().wait()


def do_hang_once(job: RunningJob, argument: str) -> str:
    if not Path(argument).exists():
        do_hang(job, argument)
    return "second"


def do_wait_for(job: RunningJob, argument: str) -> None:
    Path(f"{argument}.{os.getpid()}").touch()
    while not Path(argument).exists():
        time.sleep(0.01)


def do_wait_until_lost(job: RunningJob, argument: str) -> str | None:
    if Path(argument).exists():
        return "second"
    note_pid(argument, os.getpid())
    while not job.lost:
        time.sleep(0.01)
    Path(f"{argument}.told").touch()
    job.raise_if_lost()
    return "first"


def note_pid(path: str, pid: int) -> None:
    """Appears whole or not at all."""
    made = Path(f"{path}.new")
    made.write_text(str(pid))
    made.rename(path)
