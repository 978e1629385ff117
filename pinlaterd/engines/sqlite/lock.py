"""Sole ownership of a shard's file: an exclusive flock on a lock file beside it.

SQLite's own exclusive locking mode would shut out our searcher, so the lock is on a file of its
own. The kernel lets go of it when its holder ends, however that happens. The file itself stays:
removing it would let two processes hold locks on two files of one name.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from pinlaterd.errors import ShardOwned


class OwnerLock:
    """The lock of one shard. Do not fork while it is held: a child would share it."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._fd: int | None = None

    def acquire(self) -> None:
        """Take the lock, or raise ShardOwned at once, naming the holder. OSError if unusable."""
        # Beside the file itself, whichever symbolic links lead to it.
        path = Path(f"{self._file.resolve()}.lock")
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _pid_in(fd)
            os.close(fd)
            who = f"process {holder}" if holder else "another process"
            raise ShardOwned(f"{path} is locked by {who}, which owns this shard") from None
        except OSError:
            os.close(fd)
            raise
        self._fd = fd
        # The pid is only for the message above: a full disk must not keep the shard down.
        with contextlib.suppress(OSError):
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Let go, for children that may have inherited it too. Safe to repeat."""
        fd, self._fd = self._fd, None
        if fd is not None:
            fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)


def _pid_in(fd: int) -> int | None:
    text = os.pread(fd, 20, 0).strip()
    return int(text) if text.isdigit() else None
