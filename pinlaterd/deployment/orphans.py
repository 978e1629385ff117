"""Processes of a deployment, found by what the kernel knows of them.

So they are found whatever became of supervisord, its pid file and its socket. Such a process has
the deployment as its current folder. Either its environment has the variable that our definitions
of programs set, and searchers inherit; or it is supervisord: it holds the socket that is named
run/supervisor.sock. Other processes in that folder belong to its users.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from pinlaterd.config.layout import SUPERVISOR_SOCKET
from pinlaterd.coordinator.programs import PROGRAM_VARIABLE

_TITLE = "pinlaterd: "
_POLL_SECONDS = 0.02


def processes_of(directory: Path) -> list[psutil.Process]:
    """All processes that run for the deployment in `directory`, supervisord's too."""
    home = os.path.realpath(directory)
    found = []
    for process in psutil.process_iter():
        # it has ended, or is another user's
        with contextlib.suppress(psutil.Error):
            if process.cwd() == home and (_is_program(process) or _is_supervisord(process, home)):
                found.append(process)
    return found


def resume(processes: Sequence[psutil.Process]) -> None:
    """Continue those that were stopped (SIGSTOP): they could not react to a request to end."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGCONT)


def end(processes: Sequence[psutil.Process], seconds: float, tell: Callable[[str], None]) -> None:
    """Ask processes to stop; kill those that have not within `seconds`."""
    for process in processes:
        try:
            tell(f"stopping {name_of(process)}, pid {process.pid}")
            process.terminate()
        except psutil.NoSuchProcess:
            continue
    stubborn = wait_for(processes, seconds)
    for process in stubborn:
        tell(f"killing pid {process.pid}, which did not stop within {seconds:g} s")
        process.kill()
    wait_for(stubborn, seconds)


def wait_for(processes: Sequence[psutil.Process], seconds: float) -> Sequence[psutil.Process]:
    """Wait until all have ended, but no longer than `seconds`; return those that still run."""
    deadline = time.monotonic() + seconds
    left = [process for process in processes if _runs(process)]
    while left and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
        left = [process for process in left if _runs(process)]
    return left


def name_of(process: psutil.Process) -> str:
    """The process's role in a deployment, or else the name of its program."""
    try:
        line = process.cmdline()
        if line and line[0].startswith(_TITLE):
            return line[0].removeprefix(_TITLE).strip()
        return "supervisord" if "supervisord" in " ".join(line[:3]) else process.name()
    except psutil.Error:
        return "a process that has ended"


def _runs(process: psutil.Process) -> bool:
    """A zombie has ended: in a container PID 1 may reap it late, or never."""
    try:
        return process.is_running() and bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _is_program(process: psutil.Process) -> bool:
    return PROGRAM_VARIABLE in process.environ()


def _is_supervisord(process: psutil.Process, home: str) -> bool:
    """supervisord binds the socket to that name with its pid at the end, then links it."""
    name = str(Path(home) / SUPERVISOR_SOCKET)
    bound = [str(socket.laddr) for socket in process.net_connections("unix") if socket.laddr]
    return any(os.path.realpath(path).startswith(name) for path in bound)
