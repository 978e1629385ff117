"""A process's life: signals that only set a flag, exit codes, title, streams, threads, log.

The log is one line a record on stderr, which supervisord keeps and rotates in run/log:

    2026-11-21T03:00:00.123Z INFO shard-1 message

Logging never blocks: a line that does not fit into the pipe to supervisord, because supervisord
does not read, is dropped and counted, and the log says how many were once it flows again.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import ctypes
import errno
import io
import logging
import os
import resource
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from enum import IntEnum
from pathlib import Path
from types import FrameType
from typing import Any, Final, NoReturn, ParamSpec, TypeVar

import setproctitle

MIN_LIFE_SECONDS = 2.0
BACKGROUND_NICE = 19
_PROC = Path("/proc")
_NO_PROCESS = {errno.ESRCH, errno.EINVAL, errno.ENOENT}  # no such pid, or a thread's
_PR_SET_PDEATHSIG = 1  # prctl(2)
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class ExitCode(IntEnum):
    """The exit codes of all command lines and processes."""

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
        """Catch signals for a blocking loop, from the main thread; interrupt no call."""

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
    """Return within what pids mean one process each: this boot of the machine, and the name space
    that this process counts in; "" where the system does not tell."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        space = (_PROC / "self/ns/pid").readlink().name.strip("pid:[]")
    except OSError:
        return ""
    return f"{boot}-{space}"


def begin_process(process: str) -> None:
    """Name this process for `ps` (which one of the service it is, and no secrets), and let it open
    as many files as the system allows."""
    setproctitle.setproctitle(f"pinlaterd: {process}")
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with contextlib.suppress(OSError, ValueError):  # above what the system has allowed since
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def allowed_files(wanted: int, warn: Callable[[str], None]) -> int:
    """Return how many files this process may open, `wanted` at most; warn if that is less."""
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if allowed < wanted:
        warn(f"only {allowed} files may be open, {wanted} are wanted; raise `ulimit -n`")
    return min(allowed, wanted)


def process_exists(pid: int) -> bool:
    """Return whether there is a process of that pid; without a free file a thread counts, too."""
    try:
        os.close(os.pidfd_open(pid))
    except OSError as error:
        return error.errno not in _NO_PROCESS and (_PROC / str(pid)).exists()
    return True


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


# --- standard streams -------------------------------------------------------------------------


def prepare_streams() -> None:
    """Open those of the standard streams that are closed, on nothing, have stdout and stderr escape
    what they can't show, and stdin keep what is not UTF-8, as arguments do.

    To be called before files are opened: one would get a closed stream's number, and the output."""
    open_standard_numbers()
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode, encoding="utf-8"))
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            is_ascii = codecs.lookup(stream.encoding).name == "ascii"
            encoding = _ESCAPED_ASCII if is_ascii else stream.encoding
            stream.reconfigure(encoding=encoding, errors="backslashreplace")


def open_standard_numbers() -> None:
    """Open those of the descriptors 0 to 2 that are closed, on nothing."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free: this one
            os.set_inheritable(number, True)


# click takes a stream that says ASCII for one that was set up wrongly, and writes UTF-8 to it.
_ESCAPED_ASCII = "escaped_ascii"


@codecs.register
def _find_codec(name: str) -> codecs.CodecInfo | None:
    found = codecs.lookup("ascii") if name == _ESCAPED_ASCII else None
    return found and codecs.CodecInfo(
        *found, found.incrementalencoder, found.incrementaldecoder, _ESCAPED_ASCII
    )


def escaped(text: str) -> str:
    """Return `text` with all that is not printable, line ends too, as Python escapes it."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


# --- the log ----------------------------------------------------------------------------------

_LONGEST_LINE = 16 * 1024  # bytes
_SPARE_BYTES = 64  # of a line, for what says that it was cut


class _OneLine(logging.Formatter):
    """UTC, and no line break from data: nobody can forge a record through a queue's name.

    The lines of a traceback, whose text may be anybody's too, are indented."""

    converter = staticmethod(time.gmtime)
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)s {process} %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        return _line(super().formatMessage(record))

    def format(self, record: logging.LogRecord) -> str:
        message, _, traceback = super().format(record).partition("\n")
        half = _LONGEST_LINE // 2
        if len(traceback) > 2 * half:  # the end has the error, but for an endless one
            left_out = f"\n… {len(traceback) - 2 * half} characters are left out …\n"
            traceback = traceback[:half] + left_out + traceback[-half:]
        lines = traceback.split("\n") if traceback else ()
        return "\n".join([message, *(_line(f"  {line}") for line in lines)])


def _line(text: str) -> str:
    """Make `text` one line that no terminal takes for commands, cut to the longest allowed."""
    shown = escaped(text[:_LONGEST_LINE])  # not all of it: escaping megabytes would take seconds
    data = shown.encode()
    if len(text) <= _LONGEST_LINE and len(data) < _LONGEST_LINE:
        return shown
    kept = data[: _LONGEST_LINE - _SPARE_BYTES].decode(errors="ignore")
    return f"{kept}… ({len(text)} characters)"


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
        """Return how many records were dropped since the last time."""
        self.flush()
        dropped, self._uncounted = self._uncounted, 0
        return dropped

    def _write(self, record: logging.LogRecord) -> bool:
        """Return whether the pipe took it. What it took in part goes on with the next record."""
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


def set_up_log(process: str, level: str) -> None:
    """Log as `process` from `level` (debug, info, warning, error) up; errors that end a thread or
    the process, too. Safe to repeat."""
    root = logging.getLogger()
    handler = _handler()
    if handler is None:
        handler = _Stderr()
        root.handlers[:] = [handler]
    handler.setFormatter(_OneLine(process))
    root.setLevel(level.upper())
    log = root.critical
    sys.excepthook = lambda _kind, error, _where: log("the process ends", exc_info=error)
    threading.excepthook = lambda end: log("a thread ends", exc_info=end.exc_value)


def count_dropped_lines(count: Callable[[str, int], None]) -> None:
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
    """Open the same pipe once more, with O_NONBLOCK: set on `descriptor`, that flag would hold
    for every process that shares it. What is no pipe is written to as it is."""
    if stat.S_ISFIFO(os.fstat(descriptor).st_mode):
        with contextlib.suppress(OSError):  # another user's pipe: of a supervisord run by root
            return os.open(_PROC / f"self/fd/{descriptor}", os.O_WRONLY | os.O_NONBLOCK)
        os.set_blocking(descriptor, False)
    return descriptor


P = ParamSpec("P")
T = TypeVar("T")

# To decode a byte takes up to a microsecond, to change threads a hundred.
ASIDE_BYTES: Final = 8 * 1024
# The loop takes the interpreter back from it within milliseconds; from several, one by one.
_ASIDE: Final = ThreadPoolExecutor(1, "aside")


def begin_aside(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
    """Call a pure function that would hold the event loop for long in a thread beside it."""
    return asyncio.wrap_future(_ASIDE.submit(function, *args, **kwargs))


async def aside(size: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a pure function that works on `size` bytes: beside the event loop if they are many."""
    if size <= ASIDE_BYTES:
        return function(*args, **kwargs)
    return await begin_aside(function, *args, **kwargs)
