"""One line a record on stderr, which supervisord keeps and rotates in run/log.

    2026-11-21T03:00:00.123Z INFO shard-1 message

Logging never blocks: a line that does not fit into the pipe to supervisord, because supervisord
does not read, is dropped and counted, and the log says how many were once it flows again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import sys
import time
from collections.abc import Callable

_PROC_FD = "/proc/self/fd"


class _OneLine(logging.Formatter):
    """UTC, and no line break from data: nobody can forge a record through a queue's name."""

    converter = staticmethod(time.gmtime)
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)s {process} %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        return super().formatMessage(record).replace("\n", "\\n").replace("\r", "\\r")


class _Stderr(logging.Handler):
    """Writes records to stderr without waiting, and drops those that the pipe has no room for."""

    def __init__(self) -> None:
        super().__init__()
        self._descriptor = _open_without_waiting(sys.stderr.fileno())
        self._rest = b""  # of a record longer than PIPE_BUF, of which the pipe took a part
        self._unreported = 0  # dropped since the log last said so
        self._uncounted = 0  # dropped since `take_dropped`

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.flush()
            if self._unreported or not self._write(record):
                self._unreported += 1
                self._uncounted += 1
        except Exception:  # noqa: BLE001 wrong arguments of a call of `log` must not end its caller
            self.handleError(record)

    def flush(self) -> None:
        """Log how many records were dropped, if the pipe has room by now."""
        if self._unreported:
            text = "%d log lines were dropped: nothing read them; is supervisord or its disk stuck?"
            about = logging.LogRecord(
                __name__, logging.WARNING, __file__, 0, text, (self._unreported,), None
            )
            if self._write(about):
                self._unreported = 0

    def take_dropped(self) -> int:
        """Records that were dropped since the last time."""
        self.flush()
        dropped, self._uncounted = self._uncounted, 0
        return dropped

    def _write(self, record: logging.LogRecord) -> bool:
        """Whether the pipe took it. What it took in part goes on with the next record."""
        line = self.format(record).encode(errors="backslashreplace") + b"\n"
        try:
            if self._rest:
                self._rest = self._rest[os.write(self._descriptor, self._rest) :]
            if self._rest:
                return False
            self._rest = line[os.write(self._descriptor, line) :]
        except OSError:  # no room, or supervisord has gone
            return False
        return True


def set_up(process: str, level: str) -> None:
    """Log as `process` from `level` (debug, info, warning, error) up. Safe to repeat."""
    root = logging.getLogger()
    handler = _handler()
    if handler is None:
        handler = _Stderr()
        root.handlers[:] = [handler]
    handler.setFormatter(_OneLine(process))
    root.setLevel(level.upper())


def count_dropped(count: Callable[[str, int], None]) -> None:
    """Count the lines that were dropped, and log how many. To be called now and then: no other
    line may ever come."""
    handler = _handler()
    dropped = 0 if handler is None else handler.take_dropped()
    if dropped:
        count("log_lines_dropped", dropped)


def _handler() -> _Stderr | None:
    handlers = logging.getLogger().handlers
    return next((found for found in handlers if isinstance(found, _Stderr)), None)


def _open_without_waiting(descriptor: int) -> int:
    """The same pipe, opened once more with O_NONBLOCK: set on `descriptor`, that flag would hold
    for every process that shares it. What is no pipe is written to as it is."""
    if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
        with contextlib.suppress(OSError):  # another user's pipe: of a supervisord run by root
            return os.open(f"{_PROC_FD}/{descriptor}", os.O_WRONLY | os.O_NONBLOCK)
        os.set_blocking(descriptor, False)
    return descriptor
