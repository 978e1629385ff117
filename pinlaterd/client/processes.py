"""A process of our own that applies a function to what it is given, one thing at a time.

What handlers with `run_in="processes"` run in. The thread that makes a HandlerProcess attends it
for all its life, and alone calls it; others ring its bell. A child that has begun dies with that
thread, even if the parent is killed with -9: the kernel sees to it. It is spawned, never forked
from a program with threads, and has none of its parent's sockets. A copy that a handler makes of it
by os.fork is a program that it has started, as any other. It heads a process group of its own, so
that what it has started ends with it, and a terminal's Ctrl-C does not reach it. Relies on
`lifecycle`.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import pickle
import select
import signal
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import process, resource_tracker
from multiprocessing.connection import Connection, wait
from types import FrameType
from typing import Generic, Protocol, TypeVar, cast

from pinlaterd.lifecycle import STOP_SIGNALS, end_with_parent, set_title

# How long an idle child may take to end in order, as for its atexit functions.
_END_SECONDS = 3.0
# How long to wait at most before the clock is looked at again: poll(2) can't count much further.
_LONGEST_WAIT_SECONDS = 3600.0
# What is said goes in pieces of so many bytes, the last of which is shorter. A socket that poll(2)
# calls writable has room for one, so that writing it never waits for a child that reads no more.
_PIECE_BYTES = 16_000
_READY = ""
_spawn = multiprocessing.get_context("spawn")
# Starting a child reaps what multiprocessing looks after: that must not be one that another thread
# has started and not taken away yet.
_starting = threading.Lock()

Given = TypeVar("Given")
Result = TypeVar("Result")
# Until when the child may go on, in monotonic seconds. It is asked anew when the bell rings.
Deadline = Callable[[], float]


class ProcessDied(Exception):
    """The process that ran the handler ended before the handler did; the message says how."""


class ProcessNotStarted(RuntimeError):
    """No process can be had for a handler, or it was gone before it was given anything."""


class OutOfTime(Exception):
    """The deadline passed, and the child was killed."""


class Flag(Protocol):
    """Set by the parent, read by the child."""

    value: bool


class Bell:
    """Wakes the one thread that waits for it; any thread may ring, at any time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._close = weakref.finalize(self, os.close, self._fd)
        self._close.atexit = False  # threads wait for it to the last

    def fileno(self) -> int:
        return self._fd

    def ring(self) -> None:
        with self._lock:
            if self._close.alive:
                os.eventfd_write(self._fd, 1)

    def hush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)

    def close(self) -> None:
        with self._lock:
            self._close()


class HandlerProcess(Generic[Given, Result]):
    """One child. Whatever it is given, and all its results, must be picklable."""

    def __init__(
        self, make: Callable[[Flag], Callable[[Given], Result]], name: str, bell: Bell
    ) -> None:
        """Start it. `make`, picklable, is called in the child and makes the function to apply; its
        argument is the flag that `warn` sets. `name` is what `ps` shows."""
        self._bell = bell
        try:
            self._flag = _spawn.RawValue(ctypes.c_bool, False)
            self._connection, childs_end = _spawn.Pipe()
            with childs_end:
                self._process = _spawn.Process(
                    target=_serve, args=(make, childs_end, self._flag, os.getpid()), name=name
                )
                _start(self._process)
            self._pidfd = _pidfd_of(self._process)
        except OSError as error:
            raise ProcessNotStarted(str(error)) from error
        self._is_buried = False
        self._poll = select.poll()
        for descriptor in (self._connection, self._pidfd, bell):
            self._poll.register(descriptor, select.POLLIN)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def wait_until_ready(self, deadline: Deadline) -> None:
        """Block until the child has its function.

        Raises ProcessNotStarted if it can't have it, and OutOfTime.
        """
        try:
            problem = self._receive(deadline)
        except ProcessDied as error:
            raise ProcessNotStarted(
                f"{error} before it was ready; what it printed to stderr tells why"
            ) from error
        if problem != _READY:
            raise ProcessNotStarted(f"it could not begin:\n{problem}")

    def apply(self, given: Given, deadline: Deadline) -> Result:
        """The function's result for `given`.

        Raises ProcessNotStarted if the child was gone before, ProcessDied if it dies over this,
        and OutOfTime. In all of these cases the child is of no further use.
        """
        self._flag.value = False
        try:
            for piece in _pieces(given):
                self._wait(select.POLLOUT, deadline)
                self._connection.send_bytes(piece)
        except (OSError, ProcessDied) as error:
            raise ProcessNotStarted(self._death()) from error
        return cast("Result", self._receive(deadline))

    def warn(self) -> None:
        """Set the flag that the function sees, until the next `apply`."""
        self._flag.value = True

    def end(self) -> None:
        """End an idle child in order, and any other one at once; nothing is left of it."""
        self._connection.close()
        if not self._is_buried:
            wait([self._pidfd], _END_SECONDS)
        self._bury()
        os.close(self._pidfd)

    def _receive(self, deadline: Deadline) -> object:
        def receive() -> bytes:
            self._wait(select.POLLIN, deadline)
            return self._connection.recv_bytes()

        try:
            return _whole(receive)
        except (ProcessDied, OutOfTime):
            raise
        except (EOFError, OSError) as error:
            raise ProcessDied(self._death()) from error
        except Exception as error:
            self._bury()
            raise ProcessDied(
                f"the handler's process said what can't be read, and was killed: {error!r}"
            ) from error

    def _wait(self, event: int, deadline: Deadline) -> None:
        """Block until the connection is ready for `event`: reading or writing does not block then,
        but may fail. Raises ProcessDied and OutOfTime."""
        self._poll.modify(self._connection, event)
        while True:
            seconds = min(deadline() - time.monotonic(), _LONGEST_WAIT_SECONDS)
            ready = dict(self._poll.poll(max(0.0, seconds) * 1000))
            if self._connection.fileno() in ready:
                return
            if self._pidfd in ready:
                raise ProcessDied(self._death())
            if seconds <= 0:  # now only: an answer that is there counts
                self._bury()
                raise OutOfTime
            self._bell.hush()  # before `deadline` looks: what rings meanwhile is heard next time

    def _death(self) -> str:
        """How the child died, of which nothing is left then."""
        wait([self._pidfd], _END_SECONDS)  # longer lives only one that closed its connection
        self._bury()
        code = self._process.exitcode
        if code is None:  # reaped by another hand, as with `os.wait` in the program
            return "the handler's process ended"
        if code < 0:
            return f"the handler's process was ended by signal {-code} ({_signal_name(-code)})"
        return f"the handler's process ended with exit status {code}"

    def _bury(self) -> None:
        """Kill the child and its group, and reap it. Repeating it changes nothing: the number of
        a process that was reaped may be another's, so the group is killed before."""
        if self._is_buried:
            return
        self._is_buried = True
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.join()


def _start(child: process.BaseProcess) -> None:
    """Start it, and take it from multiprocessing, which joins its children when the program exits,
    however long they hang, and reaps those that died whenever it starts another: the number of one
    that we have not buried yet could be a stranger's then."""
    with _starting, _stop_signals_blocked():
        child.start()
        process._children.discard(child)  # type: ignore[attr-defined]  # noqa: SLF001


def _pidfd_of(child: process.BaseProcess) -> int:
    assert child.pid is not None
    try:
        return os.pidfd_open(child.pid)
    except OSError:
        child.kill()
        child.join()
        raise


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return "real-time"


@contextlib.contextmanager
def _stop_signals_blocked() -> Iterator[None]:
    """For what this thread starts: it begins with these signals blocked."""
    resource_tracker.ensure_running()  # multiprocessing's own; starting it unblocks them
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _pieces(said: object) -> Iterator[bytes]:
    pickled = pickle.dumps(said)
    for start in range(0, len(pickled) + 1, _PIECE_BYTES):
        yield pickled[start : start + _PIECE_BYTES]


def _whole(receive: Callable[[], bytes]) -> object:
    """What was said in the pieces that `receive` returns."""
    pieces = [receive()]
    while len(pieces[-1]) == _PIECE_BYTES:
        pieces.append(receive())
    return pickle.loads(b"".join(pieces))  # noqa: S301 - said by this program


# --- in the child ---------------------------------------------------------------------------


def _serve(
    make: Callable[[Flag], Callable[[Given], Result]],
    connection: Connection,
    flag: Flag,
    parent_pid: int,
) -> None:
    end_with_parent(parent_pid, signal.SIGKILL)
    set_title(f"worker {multiprocessing.current_process().name}")
    _leave_signals_to_parent()
    os.register_at_fork(after_in_child=partial(_leave_child, connection))
    try:
        function = make(flag)
    except BaseException:  # noqa: BLE001 - the parent is told, and raises
        _say(connection, traceback.format_exc().rstrip())
        return
    goes_on = _say(connection, _READY)
    while goes_on:
        try:
            given = cast("Given", _whole(connection.recv_bytes))
        except (EOFError, OSError):  # the parent wants no more of us
            return
        goes_on = _say(connection, function(given))


def _say(connection: Connection, said: object) -> bool:
    """Whether the parent still listens."""
    try:
        for piece in _pieces(said):
            connection.send_bytes(piece)
    except OSError:
        return False
    return True


def _leave_signals_to_parent() -> None:
    """The parent ends its jobs in order: a stop signal to a whole group, or to all processes of a
    service, is no child's. They are caught, not ignored, so that programs that a handler starts
    have them as usual."""
    os.setpgid(0, 0)
    for number in STOP_SIGNALS:
        signal.signal(number, _do_nothing)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def _do_nothing(_number: int, _frame: FrameType | None) -> None:
    pass


def _leave_child(connection: Connection) -> None:
    """In a copy that a handler made by `os.fork`: it is none of the parent's children. It answers
    nothing, is not talked to, and heeds signals, as any process of the handler's does."""
    connection.close()
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
