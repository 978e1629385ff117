"""A process's life: signals that only set a flag, exit codes, its title.

Relies on the standard library and setproctitle.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import setproctitle

MIN_LIFE_SECONDS = 2.0
BACKGROUND_NICE = 19
_PROC = Path("/proc")
_PR_SET_PDEATHSIG = 1  # prctl(2)
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class ExitCode(IntEnum):
    """What all command lines and processes end with."""

    OK = 0
    FAILURE = 1
    USAGE = 2
    CONFIG = 3  # the configuration is wrong; all that is wrong was printed


class StopSignal:
    """SIGTERM or SIGINT, as a flag that wakes up what waits for it.

    A process catches the signals in one of two ways, once: `catch` for a blocking loop, which
    polls `fileno()` beside its other descriptors (readable once stopping, and for good), or
    `catch_in` for an event loop, which awaits `wait()`. `set` asks for the same from within.
    """

    def __init__(self) -> None:
        self._read_end, self._write_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._event = asyncio.Event()
        self.requested = False
        self.insisted = False  # whether `catch` has met a second signal: its sender waits no longer
        self._handlers_before: dict[signal.Signals, Any] = {}

    def fileno(self) -> int:
        return self._read_end

    def set(self) -> None:
        if not self.requested:
            self.requested = True
            os.write(self._write_end, b"x")
            self._event.set()

    def catch(self) -> None:
        """For a blocking loop, from the main thread. A call in progress is not interrupted."""

        def handle(_number: int, _frame: FrameType | None) -> None:
            self.insisted = self.requested
            self.set()

        for number in STOP_SIGNALS:
            self._handlers_before[number] = signal.signal(number, handle)

    def catch_in(self, loop: asyncio.AbstractEventLoop) -> None:
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, self.set)

    async def wait(self) -> None:
        await self._event.wait()

    def close(self) -> None:
        for number, handler in self._handlers_before.items():
            signal.signal(number, handler)
        self._handlers_before.clear()
        for descriptor in (self._read_end, self._write_end):
            if descriptor >= 0:
                os.close(descriptor)
        self._read_end = self._write_end = -1


def exit_process(code: int, started_at: float) -> NoReturn:
    """End the process; one that failed soon after `started_at` (monotonic) stays a moment first.

    supervisord starts a process that ended after a second of life again at once, but one that
    ended sooner later and later. So a cause that has gone is noticed within `MIN_LIFE_SECONDS`,
    and one that stays costs no busy loop. SIGTERM ends the wait."""
    rest = started_at + MIN_LIFE_SECONDS - time.monotonic()
    if code != ExitCode.OK and rest > 0 and "SUPERVISOR_ENABLED" in os.environ:
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        time.sleep(rest)
    sys.stdout.flush()
    sys.exit(code)


def process_place() -> str:
    """Within what pids mean one process each: this boot of the machine, and the name space that
    this process counts in; "" where the system does not tell."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        space = (_PROC / "self/ns/pid").readlink().name.strip("pid:[]")
    except OSError:
        return ""
    return f"{boot}-{space}"


def set_title(process: str) -> None:
    """What `ps` shows: which process of the service this is, and no secrets."""
    setproctitle.setproctitle(f"pinlaterd: {process}")


def allow_open_files(wanted: int, warn: Callable[[str], None]) -> None:
    """Raise the limit of open files to `wanted`, or as near as the system lets us."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= wanted:
        return
    reached = min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (reached, hard))
    if reached < wanted:
        warn(f"only {reached} files may be open, {wanted} are wanted; raise `ulimit -n`")


def end_with_parent(parent_pid: int, number: signal.Signals) -> None:
    """Have the kernel send this process `number` when the thread that started it ends, be it by
    kill -9: that must be one that lives as long as this process may."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent_pid:  # it ended before we asked
        os.kill(os.getpid(), number)


def prefer_throughput() -> None:
    """Have the kernel let this process, and the threads that it will start, work on when others
    wake up. ZeroMQ's threads wake each other with every message; without this each wake-up
    costs the one who sends its place on the processor, and messages get small."""
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def run_in_background() -> None:
    """Give this process a small share of the processor where others want it, and never none: what
    runs only when nothing else wants to may never end."""
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    os.setpriority(os.PRIO_PROCESS, 0, BACKGROUND_NICE)
