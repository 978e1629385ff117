"""Processes of a deployment, found by what the kernel knows of them.

Whatever became of supervisord, its pid file and its socket: a process of ours has the deployment
as its current folder, and either its title (`pinlaterd: shard-1`) or, before it could set that,
its command line says what it is. What a shard starts beside itself (a searcher) bears the name of
the module that starts it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

_TITLE = "pinlaterd: "
_STARTED_BESIDE = "from multiprocessing."
_ROLES = ("router", "shard", "coordinator")


def processes_of(directory: Path) -> list[psutil.Process]:
    """All processes that run for the deployment in `directory`, supervisord's too."""
    home = os.path.realpath(directory)
    found = []
    for process in psutil.process_iter():
        try:
            alive = process.status() != psutil.STATUS_ZOMBIE
            if alive and _is_ours(process.cmdline()) and os.path.realpath(process.cwd()) == home:
                found.append(process)
        except psutil.Error:
            continue  # it ended meanwhile, or is another user's
    return found


def end(processes: Sequence[psutil.Process], seconds: float, tell: Callable[[str], None]) -> None:
    """Ask processes to stop; kill those that have not within `seconds`."""
    for process in processes:
        try:
            tell(f"stopping {name_of(process)}, pid {process.pid}")
            process.terminate()
        except psutil.NoSuchProcess:
            continue
    _, stubborn = psutil.wait_procs(list(processes), timeout=seconds)
    for process in stubborn:
        tell(f"killing pid {process.pid}, which did not stop within {seconds:g} s")
        process.kill()
    psutil.wait_procs(stubborn, timeout=seconds)


def name_of(process: psutil.Process) -> str:
    """What the process is in a deployment; of a stranger, what it calls itself."""
    try:
        line = process.cmdline()
        if line and line[0].startswith(_TITLE):
            return line[0].removeprefix(_TITLE).strip()
        return "supervisord" if _is_supervisord(line) else process.name()
    except psutil.Error:
        return "a process that has ended"


def is_supervisord(process: psutil.Process) -> bool:
    try:
        return _is_supervisord(process.cmdline())
    except psutil.Error:
        return False


def _is_ours(line: Sequence[str]) -> bool:
    if not line:
        return False
    if line[0].startswith(_TITLE) or _is_supervisord(line):
        return True
    if any(word.startswith(_STARTED_BESIDE) for word in line):
        return True
    for index, word in enumerate(line[:-2]):
        if word == "-m" and line[index + 1] == "pinlaterd":
            return line[index + 2] in _ROLES
    return False


def _is_supervisord(line: Sequence[str]) -> bool:
    return any("supervisord" in word for word in line[:3])
