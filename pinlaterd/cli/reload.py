"""Development: a program that is started anew whenever the sources beside it change.

A parent process watches and a child does the work, so that a mistake in the sources ends the
child alone; the parent shows it and waits for the next change. The files are looked at, not
subscribed to: that works on every file system (network mounts, containers), needs no library, and
a look at a thousand files takes a few milliseconds. May rely on `lifecycle`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from pinlaterd.lifecycle import STOP_SIGNALS, ExitCode, end_with_parent

_LOOK_SECONDS = 0.25
# Looking takes no more than this part of one processor, however many files there are.
_MAX_LOOKING_SHARE = 0.1
_NOT_SOURCES = frozenset({"__pycache__", "node_modules"})
_AWAITED = frozenset({*STOP_SIGNALS, signal.SIGCHLD})


class Stamp(NamedTuple):
    """What tells that a file was written."""

    modified_ns: int
    size_bytes: int


def sources(folder: Path) -> Mapping[str, Stamp]:
    """Every Python source below `folder`, without hidden folders and virtual environments."""
    return dict(_walk(str(folder)))


def _walk(folder: str) -> Iterator[tuple[str, Stamp]]:
    try:
        with os.scandir(folder) as found:
            entries = list(found)
    except OSError:  # it went away meanwhile, or is another user's
        return
    if any(entry.name == "pyvenv.cfg" for entry in entries):
        return
    for entry in entries:
        if entry.name.startswith(".") or entry.name in _NOT_SOURCES:
            continue
        try:
            if entry.is_dir(follow_symlinks=False):
                yield from _walk(entry.path)
            elif entry.name.endswith(".py"):
                status = entry.stat()
                yield entry.path, Stamp(status.st_mtime_ns, status.st_size)
        except OSError:  # went away meanwhile: a change, seen by its absence
            continue


def changes(before: Mapping[str, Stamp], after: Mapping[str, Stamp]) -> list[str]:
    """The paths that were written, made or removed, sorted."""
    return sorted(path for path in {*before, *after} if before.get(path) != after.get(path))


class Reloader:
    """Runs a program as a child, ends it in order and starts it anew at each change.

    The child is a process group of its own: Ctrl-C reaches the parent alone, which passes each
    signal on as SIGTERM, so that a second one hurries the child as it would without a parent. It
    begins its life with `begin_as_child`.
    """

    def __init__(self, command: Sequence[str], folder: Path, tell: Callable[[str], None]) -> None:
        """`folder` is what is looked at; `tell` shows a line about what goes on."""
        self._command = command
        self._folder = folder
        self._tell = tell
        self._stopping = False

    def run(self) -> int:
        """Work until SIGTERM or SIGINT; return the exit code of the last child, which has ended.

        For a main thread that does nothing else: signals stay blocked, and are taken one by one.
        """
        signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
        while True:
            seen = sources(self._folder)
            with subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, process_group=0
            ) as child:
                changed = self._wait_for_change(seen, child)
                code = self._end(child)
            if self._stopping:
                return code if code >= 0 else ExitCode.FAILURE
            self._tell(f"{self._shown(changed)} changed; restarting")

    def _wait_for_change(
        self, seen: Mapping[str, Stamp], child: subprocess.Popen[bytes]
    ) -> list[str]:
        """The paths that changed, once they stay as they are; none when asked to stop."""
        latest, pause_seconds, is_running = seen, _LOOK_SECONDS, True
        while not self._stopping:
            self._await_signal(pause_seconds)
            if is_running and child.poll() is not None:
                is_running = False
                self._tell(f"ended with {child.returncode}; waiting for a source to change")
            began_at = time.monotonic()
            found = sources(self._folder)
            looked_seconds = time.monotonic() - began_at
            pause_seconds = max(_LOOK_SECONDS, looked_seconds / _MAX_LOOKING_SHARE)
            if found == latest and (changed := changes(seen, found)):
                return changed
            latest = found
        return []

    def _end(self, child: subprocess.Popen[bytes]) -> int:
        """SIGTERM, and once more for each stop signal after the first; return the exit code."""
        child.terminate()
        while child.poll() is None:
            was_stopping = self._stopping
            if self._await_signal(_LOOK_SECONDS) in STOP_SIGNALS and was_stopping:
                child.terminate()
        return child.returncode

    def _await_signal(self, seconds: float) -> int | None:
        got = signal.sigtimedwait(_AWAITED, seconds)
        if got is None:
            return None
        self._stopping = self._stopping or got.si_signo in STOP_SIGNALS
        return got.si_signo

    def _shown(self, paths: Sequence[str]) -> str:
        names = [os.path.relpath(path, self._folder) for path in paths[:3]]
        more = len(paths) - len(names)
        return ", ".join(names) + (f" and {more} more" if more else "")


def begin_as_child(parent_pid: int) -> None:
    """What the child does first: end in order when its parent ends, be it by kill -9, and let
    the signals in that the parent blocked."""
    end_with_parent(parent_pid, signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _AWAITED)
