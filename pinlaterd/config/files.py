"""Files in run/ that the processes and commands of a deployment share: locked, or replaced at once.

The kernel releases a lock (flock) when its holder ends, however that happens; a pid in a file
may be another process's by then. Lock files stay where they are, or two processes could lock two
files of one name. Where one is removed all the same (`admin.moving`), its next holder has yet to
check that it still is the file of that name.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import BinaryIO

_LOOK_SECONDS = 0.001  # somebody who looks has it for two system calls


def lock(path: Path, *, patient: bool) -> BinaryIO:
    """Lock the file `path`, which is made if need be, until what this returns is closed.

    Raises BlockingIOError if somebody else has it and this is not `patient`; OSError, with the
    file's name, if it can't be had at all."""
    file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600), "wb")
    try:
        if patient:
            fcntl.flock(file, fcntl.LOCK_EX)
        else:
            _lock_at_once(file)
    except BaseException:
        file.close()
        raise
    return file


def is_locked(path: Path) -> bool:
    """Whether somebody has locked it at this moment. Raises OSError if there is no such file."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _lock_at_once(file: BinaryIO) -> None:
    """Whoever looks (`is_locked`) shares the lock for a moment, which is no reason to give up."""
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # raises if it is not shared
            fcntl.flock(file, fcntl.LOCK_UN)
            time.sleep(_LOOK_SECONDS)
        else:
            return


def replace_file(path: Path, data: bytes, *, durably: bool = False) -> None:
    """Replace the file at once, for its owner only: readers see the old or the new one.

    `durably`: a machine that loses its power leaves no empty file behind."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
    temporary.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    with os.fdopen(os.open(temporary, flags, 0o600), "wb") as file:
        file.write(data)
        if durably:
            file.flush()
            os.fsync(file.fileno())
    temporary.replace(path)


def file_mark(path: Path) -> tuple[int, ...]:
    """What changes with a file's content, and what no tool can set back: the time of change."""
    try:
        found = os.stat(path)  # noqa: PTH116  (the cheapest, several times a second)
    except OSError as error:
        return (error.errno or 0,)
    times = (found.st_mtime_ns, found.st_ctime_ns)
    return (found.st_dev, found.st_ino, found.st_size, *times)
