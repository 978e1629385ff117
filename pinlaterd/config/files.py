"""Files in run/ that the processes and commands of a deployment share: locked, or replaced at once.

The kernel releases a lock (flock) when its holder ends, however that happens; a pid in a file
may be another process's by then. Lock files stay where they are, or two processes could lock two
files of one name.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import BinaryIO


def lock(path: Path, *, patient: bool) -> BinaryIO:
    """Lock the file `path`, which is made if need be, until what this returns is closed.

    Raises BlockingIOError if another process has it and this is not `patient`; OSError, with the
    file's name, if it can't be had at all."""
    file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600), "wb")
    try:
        fcntl.flock(file, fcntl.LOCK_EX if patient else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        file.close()
        raise
    return file


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
