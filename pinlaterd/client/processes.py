"""Handlers in processes of their own, `run_in="processes"`: each thread has a child.

    thread ──claimed job──▶ its child: handler(RunningJob of its own)
           ◀───answer──────            what was returned or raised, what was saved

Policies and hooks stay with the worker: the child knows the handler's function alone. It is
spawned, never forked from a program with threads, and has none of its parent's sockets. It heads a
process group, so that what it has started ends with it, and that a terminal's Ctrl-C does not reach
it. Once it has begun the kernel kills it with its thread, even if the worker is killed with -9. A
copy that a handler makes of it by os.fork is a program that it has started, as any other.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import multiprocessing
import os
import pickle
import select
import signal
import socket
import struct
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import process, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.pool import RemoteTraceback  # type: ignore[attr-defined]
from typing import Any, NamedTuple, NoReturn, cast

from pinlaterd.client.client import Client
from pinlaterd.client.running_job import (
    ClaimLost,
    ErrorSummary,
    RunningJob,
    check_has_begun,
    returned,
)
from pinlaterd.lifecycle import (
    STOP_SIGNALS,
    begin_process,
    end_with_parent,
    open_standard_numbers,
    prepare_streams,
)
from pinlaterd.model import ClaimedJob

# SIGHUP comes when a terminal is closed, SIGQUIT from a key of it.
WORKER_STOP_SIGNALS = (*STOP_SIGNALS, signal.SIGHUP, signal.SIGQUIT)
# How long a handler may go on after it could see that its claim is lost.
LOST_GRACE_SECONDS = 5.0
# How long an idle child may take to end in order, as for its atexit functions.
_END_SECONDS = 3.0
# How often a thread looks whether its child is still wanted, and has a claim.
_LOOK_SECONDS = 0.1
# How long a child may stand still in the middle of a message, as when it was stopped.
_STALL_SECONDS = 10
_READY = ""

_spawn = multiprocessing.get_context("spawn")
# Starting a child reaps what multiprocessing looks after: that must not be one that another thread
# has started and not taken away yet.
_starting = threading.Lock()


class ProcessDied(Exception):
    """The process that ran the handler ended before the handler did; the message says how."""


class ProcessNotStarted(RuntimeError):
    """No process can be had for a handler, or it was gone before it was given anything."""


class ChildPlan(NamedTuple):
    """The parts of a child, each pickled: what fails with one in the child is reported as any other
    failure to begin. A handler may do without a client; `no_client` is why it has to."""

    queue: str
    function: bytes
    set_up: bytes
    client: bytes | None = None
    no_client: str = ""

    @classmethod
    def of(
        cls,
        queue: str,
        function: Callable[..., object],
        client: Client,
        set_up: Callable[[], object] | None,
    ) -> ChildPlan:
        """Raises ValueError for a function that a child could not find: it imports it by name.
        RuntimeError if this is a child, which imports the program."""
        if getattr(multiprocessing.current_process(), "_inheriting", False):  # as it tells itself
            raise RuntimeError(
                "the program makes a Worker as it is imported, which processes of handlers do; "
                'put that under `if __name__ == "__main__":`'
            )
        open_standard_numbers()  # else a pipe of ours gets one, into which a child would print
        plan = cls(
            queue,
            _pickled(function, f"the handler of queue {queue!r}"),
            _pickled(set_up, "set_up_process"),
        )
        try:
            return plan._replace(client=pickle.dumps(client))
        except Exception as error:  # noqa: BLE001 - it has an SSLContext, or is a user's subclass
            return plan._replace(no_client=str(error))


def _pickled(function: Callable[..., object] | None, what: str) -> bytes:
    try:
        return pickle.dumps(function)
    except Exception as error:
        raise ValueError(
            f"{what} can't be found by a process of its own ({error}); it must be defined at the "
            "top level of a module, and be what the module has by its name, decorators included"
        ) from error


class Answer(NamedTuple):
    """The result of a job. `status` is what was returned, unless there is an `error`."""

    claim_descriptor: str
    status: str
    error: CarriedError | None
    body: bytes  # the job's, as it was saved last
    is_lost: bool  # the child has found out that the claim has ended


# --- the parent's side ------------------------------------------------------------------------


class Child:
    """One child. The thread that makes it attends it for all its life, and alone calls it."""

    def __init__(self, plan: ChildPlan, name: str, is_abandoned: Callable[[], bool]) -> None:
        """Start it; `name` is what `ps` shows. Once `is_abandoned` it is not waited for any more.
        Raises ProcessNotStarted."""
        self._is_abandoned = is_abandoned
        try:
            self._told_lost = _spawn.RawValue(ctypes.c_bool, False)
            self._connection, childs_end = _spawn.Pipe()
            with childs_end:
                self._process = _spawn.Process(
                    target=_serve, args=(plan, childs_end, self._told_lost, os.getpid()), name=name
                )
                _bound_stalls(self._connection)
                self.pid, self._pidfd = _start(self._process)
        except OSError as error:
            raise ProcessNotStarted(str(error)) from error
        self._is_reaped = False
        self._poll = select.poll()
        for descriptor in (self._connection, self._pidfd):
            self._poll.register(descriptor, select.POLLIN)

    def has_died(self) -> bool:
        return self._pidfd in dict(self._poll.poll(0))

    def wait_until_ready(self) -> None:
        """Raises ProcessNotStarted: it is of no use then."""
        try:
            while not self._has_answered(_LOOK_SECONDS):
                if self._is_abandoned():
                    self._kill()
                    raise ProcessNotStarted("the worker ends")
            problem = self._receive()
        except ProcessDied as error:
            raise ProcessNotStarted(f"{error}; what it printed to stderr tells why") from error
        if problem != _READY:
            raise ProcessNotStarted(f"it could not begin:\n{problem}")

    def apply(self, job: RunningJob, limit_seconds: float = math.inf) -> Answer:
        """Have the job run. Raises ProcessNotStarted if the child was gone before, ProcessDied if
        it dies over this, TimeoutError, and ClaimLost once the job's claim is lost for too long, or
        the job abandoned. In all of these cases the child is of no further use."""
        self._told_lost.value = False
        try:
            self._connection.send(job.claimed)
        except OSError as error:
            raise ProcessNotStarted("the handler's process was gone") from error
        self._wait_for_answer(job, limit_seconds)
        answer = cast("Answer", self._receive())
        if answer.claim_descriptor != job.claim_descriptor:  # as of a copy that C code made
            self._kill()
            raise ProcessDied("the handler's process answered for another job, and was killed")
        return answer

    def _wait_for_answer(self, job: RunningJob, limit_seconds: float) -> None:
        ends_at = time.monotonic() + limit_seconds
        while not self._has_answered(ends_at - time.monotonic()):
            if job.lost and not self._told_lost.value:
                self._told_lost.value = True
                ends_at = min(ends_at, time.monotonic() + LOST_GRACE_SECONDS)
            is_abandoned = self._is_abandoned()
            if not is_abandoned and time.monotonic() < ends_at:
                continue
            if self._has_answered(0):
                return
            self._kill()
            if job.lost or is_abandoned:
                raise ClaimLost(
                    "its claim has ended, and its handler goes on; its process was killed"
                )
            raise TimeoutError(
                f"the handler took longer than {limit_seconds:g} s; its process was killed"
            )

    def end(self) -> None:
        """End an idle child in order, and any other one at once; nothing is left of it."""
        self._connection.close()
        if not self._is_reaped:
            wait([self._pidfd], _END_SECONDS)
        self._kill()
        os.close(self._pidfd)

    def _has_answered(self, seconds: float) -> bool:
        """Wait so long for something to receive, or a look at a time. Raises ProcessDied."""
        ready = dict(self._poll.poll(min(max(0.0, seconds), _LOOK_SECONDS) * 1000))
        if self._connection.fileno() in ready:
            return True
        if self._pidfd in ready:
            raise ProcessDied(self._death())
        return False

    def _receive(self) -> object:
        try:
            return self._connection.recv()
        except (EOFError, OSError) as error:
            raise ProcessDied(self._death()) from error
        except Exception as error:
            self._kill()
            raise ProcessDied(
                f"the handler's process said what can't be read, and was killed: {error!r}"
            ) from error

    def _death(self) -> str:
        """Describe how the child died, and wait until nothing of it is left."""
        wait([self._pidfd], _END_SECONDS)  # longer lives only one that closed its connection
        self._kill()
        code = self._process.exitcode
        if code is None:  # reaped by others, as with `os.wait` in the program
            return "the handler's process ended"
        if code >= 0:
            return f"the handler's process ended with exit status {code}"
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = "real-time"
        return f"the handler's process was ended by signal {-code} ({name})"

    def _kill(self) -> None:
        """Kill the child and its group, and reap it; repeating it changes nothing. A reaped PID may
        be reused: kill the group before joining."""
        if self._is_reaped:
            return
        self._is_reaped = True
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.join()


def _start(child: process.BaseProcess) -> tuple[int, int]:
    """Start it with stop signals blocked; return its pid and a pidfd. Take it from multiprocessing,
    which joins its children when the program exits, however long they hang, and reaps those that
    died whenever it starts another: the PID of one that we have not killed yet could be reused."""
    with _starting:
        resource_tracker.ensure_running()  # multiprocessing's own; starting it unblocks signals
        before = signal.pthread_sigmask(signal.SIG_BLOCK, WORKER_STOP_SIGNALS)
        try:
            child.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        process._children.discard(child)  # type: ignore[attr-defined]  # noqa: SLF001
    assert child.pid is not None
    try:
        return child.pid, os.pidfd_open(child.pid)
    except OSError:
        child.kill()
        child.join()
        raise


def _bound_stalls(connection: Connection) -> None:
    """Have the system end a read or write that makes no progress, with an OSError."""
    limit = struct.pack("ll", _STALL_SECONDS, 0)
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            end.setsockopt(socket.SOL_SOCKET, option, limit)
        end.setblocking(True)  # whatever `socket.setdefaulttimeout` has made of it


# --- in the child -----------------------------------------------------------------------------


def _serve(
    plan: ChildPlan, connection: Connection, is_lost: ctypes.c_bool, parent_pid: int
) -> None:
    end_with_parent(parent_pid, signal.SIGKILL)
    prepare_streams()
    begin_process(f"worker {multiprocessing.current_process().name}")
    _leave_signals_to_parent()
    os.register_at_fork(after_in_child=partial(_leave_child, connection))
    try:
        run = _handler_of(plan, is_lost)
    except BaseException as error:  # noqa: BLE001 - the parent is told, and raises
        connection.send(_traceback_of(error).rstrip())
        return
    with contextlib.suppress(EOFError, OSError):  # the parent wants no more of us
        connection.send(_READY)
        while True:
            connection.send(run(connection.recv()))


def _leave_signals_to_parent() -> None:
    """Leave it to the parent to end in order. Catch stop signals, never ignore them: so programs
    that a handler starts have them as usual."""
    os.setpgid(0, 0)
    for number in WORKER_STOP_SIGNALS:
        signal.signal(number, lambda _number, _frame: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, WORKER_STOP_SIGNALS)


def _leave_child(connection: Connection) -> None:
    """Leave a copy that a handler made by `os.fork`: it is none of the parent's children, answers
    nothing, and heeds signals."""
    connection.close()
    for number in WORKER_STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def _handler_of(plan: ChildPlan, is_lost: ctypes.c_bool) -> Callable[[ClaimedJob], Answer]:
    """Set the process up, and return the function that runs a job in it."""
    set_up: Callable[[], object] | None = pickle.loads(plan.set_up)  # noqa: S301 - this program's
    if set_up is not None:
        check_has_begun(set_up())
    function: Callable[[RunningJob], object] = pickle.loads(plan.function)  # noqa: S301
    client: Any = _NoClient(plan.no_client)
    if plan.client:
        client = pickle.loads(plan.client)  # noqa: S301

    def run(claimed: ClaimedJob) -> Answer:
        job = _ChildJob(plan.queue, claimed, client, is_lost)
        status, failure = "", None
        try:
            status = returned(function(job)).status
        except BaseException as error:  # noqa: BLE001 - it is the job's outcome, whatever it is
            failure = CarriedError.of(error)
        return Answer(job.claim_descriptor, status, failure, job.body, job.lost)

    return run


class _ChildJob(RunningJob):
    """A job whose claim the worker renews; it notes the loss of that in `told_lost`."""

    __slots__ = ("_found_lost", "_told_lost")

    def __init__(
        self, queue: str, claimed: ClaimedJob, client: Client, told_lost: ctypes.c_bool
    ) -> None:
        self._told_lost = told_lost
        super().__init__(queue, claimed, client, time.monotonic())

    @property
    def lost(self) -> bool:
        return self._found_lost or self._told_lost.value

    @lost.setter
    def lost(self, value: bool) -> None:
        self._found_lost = value


class _NoClient:
    def __init__(self, why: str) -> None:
        self._why = why

    def __getattr__(self, _: str) -> NoReturn:
        raise RuntimeError(f"job.client and job.save can't be had in a process: {self._why}")


# --- exceptions on their way to the worker --------------------------------------------------


class CarriedError(NamedTuple):
    """An exception as bytes, and what can be said of it without its class. Retry policies and hooks
    go by the class, so that comes along if anything does: the nearest base class that the worker
    can import. State is taken along where it can be pickled."""

    pickled: bytes
    summary: ErrorSummary
    traceback_text: str

    @classmethod
    def of(cls, error: BaseException) -> CarriedError:
        text = _traceback_of(error)
        for candidate in _candidates(error):
            with contextlib.suppress(BaseException):  # a user's class may do anything when pickled
                pickled = pickle.dumps(candidate)
                _unpickled(pickled)
                return cls(pickled, ErrorSummary.of(error), text)
        raise AssertionError("unreachable: the last candidate is of the standard library")

    def restored(self) -> BaseException:
        """Return the exception, with a RemoteTraceback as its cause."""
        try:
            error = _unpickled(self.pickled)
        except BaseException as unknown:  # noqa: BLE001 - its module can't be imported here
            why = ErrorSummary.of(unknown).text()
            error = RuntimeError(f"an error whose class is unknown in this process: {why}")
        cause = RemoteTraceback(f'\n"""\n{self.traceback_text}"""')
        # Its class may have a property of this name.
        vars(BaseException)["__cause__"].__set__(error, cause)
        return error


def _traceback_of(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(error))
    except BaseException:  # noqa: BLE001 - a user's class may run any code when it is formatted
        return f"{type(error).__name__}, whose traceback can't be shown\n"


def _candidates(error: BaseException) -> Iterator[object]:
    """Yield what can be sent for `error`, the best first: itself, or, where its constructor
    prevents that, its class or a base, arguments, and state."""
    yield error
    try:
        message = str(error)
    except BaseException:  # noqa: BLE001 - a user's code
        message = ""
    state = {name: value for name, value in vars(error).items() if _can_be_pickled(value)}
    for kind in type(error).__mro__:
        if issubclass(kind, BaseException):
            yield kind, (message,), state


def _unpickled(pickled: bytes) -> BaseException:
    found: Any = pickle.loads(pickled)  # noqa: S301 - made by this program, in this process or a child
    if isinstance(found, tuple):
        kind, arguments, state = found
        found = kind.__new__(kind, *arguments)
        found.args = arguments
        vars(found).update(state)
    if not isinstance(found, BaseException):
        raise TypeError(f"pickled as an exception, it came back as {type(found).__name__}")
    return found


def _can_be_pickled(value: object) -> bool:
    try:
        pickle.dumps(value)
    except BaseException:  # noqa: BLE001 - a user's class
        return False
    return True
