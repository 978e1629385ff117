"""What runs in the process of a handler, and what goes to and fro: orders and answers."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.pool import RemoteTraceback  # type: ignore[attr-defined]
from types import FrameType
from typing import Any, cast

from pinlaterd.client.client import Client
from pinlaterd.client.handlers import QueueHandler
from pinlaterd.client.outcomes import error_text, returned
from pinlaterd.client.running_job import Claim, RunningJob
from pinlaterd.lifecycle import STOP_SIGNALS, end_with_parent, set_title
from pinlaterd.model import ClaimedJob

# Messages go in pieces of so many bytes, the last of which is shorter. A socket that poll(2) calls
# writable has room for one, so that writing it never waits for a child that reads no more.
_PIECE_BYTES = 16_000
READY = ""


@dataclass(frozen=True, slots=True)
class ChildPlan:
    """What a child is made from, each part pickled: what fails with one in the child is told as
    any other failure to begin. A handler may do without a client; `no_client` is why it has to."""

    function: bytes
    set_up: bytes
    client: bytes | None = None
    no_client: str = ""

    @classmethod
    def of(
        cls, handler: QueueHandler, client: Client, set_up: Callable[[], object] | None
    ) -> ChildPlan:
        """Raises ValueError for a function that a child could not find: it imports it by name.
        RuntimeError if this is a child, which imports the program."""
        if getattr(multiprocessing.current_process(), "_inheriting", False):  # as it tells itself
            raise RuntimeError(
                "the program makes a Worker as it is imported, which processes of handlers do; "
                'put that under `if __name__ == "__main__":`'
            )
        plan = cls(
            _pickled(handler.function, f"the handler of queue {handler.queue!r}"),
            _pickled(set_up, "set_up_process"),
        )
        try:
            return replace(plan, client=pickle.dumps(client))
        except Exception as error:  # noqa: BLE001 - it has an SSLContext, or is a user's subclass
            return replace(plan, no_client=str(error))


def _pickled(function: Callable[..., object] | None, what: str) -> bytes:
    try:
        return pickle.dumps(function)
    except Exception as error:
        raise ValueError(
            f"{what} can't be found by a process of its own ({error}); it must be defined at the "
            "top level of a module, and be what the module has by its name, decorators included"
        ) from error


@dataclass(frozen=True, slots=True)
class Order:
    """A job to run."""

    queue: str
    job: ClaimedJob


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of an order. `status` is what was returned, unless there is an `error`."""

    claim_descriptor: str  # the order's
    status: str
    error: CarriedError | None
    body: bytes  # the job's, as it was saved last
    is_lost: bool  # the child has found out that the claim has ended


def pieces(message: object) -> Iterator[bytes]:
    pickled = pickle.dumps(message)
    for start in range(0, len(pickled) + 1, _PIECE_BYTES):
        yield pickled[start : start + _PIECE_BYTES]


def whole(receive: Callable[[], bytes]) -> object:
    """The message whose pieces `receive` returns."""
    pieces = [receive()]
    while len(pieces[-1]) == _PIECE_BYTES:
        pieces.append(receive())
    return pickle.loads(b"".join(pieces))  # noqa: S301 - made by this program


# --- in the child ---------------------------------------------------------------------------


def serve(plan: ChildPlan, connection: Connection, is_lost: ctypes.c_bool, parent_pid: int) -> None:
    end_with_parent(parent_pid, signal.SIGKILL)
    set_title(f"worker {multiprocessing.current_process().name}")
    _leave_signals_to_parent()
    os.register_at_fork(after_in_child=partial(_leave_child, connection))
    try:
        handler = _Handler(plan, is_lost)
    except BaseException:  # noqa: BLE001 - the parent is told, and raises
        _send(connection, traceback.format_exc().rstrip())
        return
    goes_on = _send(connection, READY)
    while goes_on:
        try:
            order = cast("Order", whole(connection.recv_bytes))
        except (EOFError, OSError):  # the parent wants no more of us
            return
        goes_on = _send(connection, handler.run(order))


def _send(connection: Connection, message: object) -> bool:
    """Whether the parent still listens."""
    try:
        for piece in pieces(message):
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


class _Handler:
    """The handler's function, and what it is given."""

    def __init__(self, plan: ChildPlan, is_lost: ctypes.c_bool) -> None:
        self._is_lost = is_lost
        set_up: Callable[[], object] | None = pickle.loads(plan.set_up)  # noqa: S301
        if set_up is not None:
            set_up()
        self._function: Callable[[RunningJob], object] = pickle.loads(plan.function)  # noqa: S301
        self._client: Client | None = pickle.loads(plan.client) if plan.client else None  # noqa: S301
        self._no_client = plan.no_client

    def run(self, order: Order) -> Answer:
        job = RunningJob(order.queue, _WatchedClaim(order.job, self._is_lost), self._get_client)
        status, failure = "", None
        try:
            status = returned(self._function(job)).status
        except BaseException as error:  # noqa: BLE001 - it is the job's outcome, whatever it is
            failure = CarriedError.of(error)
        return Answer(job.claim_descriptor, status, failure, job.body, job.lost)

    def _get_client(self) -> Client:
        if self._client is None:
            raise RuntimeError(
                f"job.client and job.save can't be had in a process: {self._no_client}"
            )
        return self._client


class _WatchedClaim(Claim):
    """A claim that the worker renews, and whose loss it tells by `told_lost`."""

    __slots__ = ("_found_lost", "_told_lost")

    def __init__(self, job: ClaimedJob, told_lost: ctypes.c_bool) -> None:
        self._told_lost = told_lost
        self._found_lost = False
        super().__init__(job, time.monotonic())

    @property
    def is_lost(self) -> bool:
        return self._found_lost or self._told_lost.value

    @is_lost.setter
    def is_lost(self, value: bool) -> None:
        self._found_lost = value


# --- exceptions on their way to the worker --------------------------------------------------


@dataclass(frozen=True, slots=True)
class CarriedError:
    """An exception as bytes, and what can be said of it without its class.

    Retry policies and hooks go by an exception's class, so that comes along if anything does: the
    nearest base class that the worker can import. State is taken along where it can be pickled.
    """

    pickled: bytes
    summary: str  # its `error_text`
    traceback_text: str

    @classmethod
    def of(cls, error: BaseException) -> CarriedError:
        text = "".join(traceback.format_exception(error))
        for candidate in _candidates(error):
            with contextlib.suppress(Exception):  # a user's class may do anything when pickled
                pickled = pickle.dumps(candidate)
                _unpickled(pickled)
                return cls(pickled, error_text(error), text)
        raise AssertionError("unreachable: the last candidate is of the standard library")

    def restored(self) -> BaseException:
        """The exception, with a RemoteTraceback as its cause."""
        try:
            error = _unpickled(self.pickled)
        except Exception as unknown:  # noqa: BLE001 - its module can't be imported here
            error = RuntimeError(f"an error whose class is unknown in this process: {unknown}")
        error.__cause__ = RemoteTraceback(f'\n"""\n{self.traceback_text}"""')
        return error


def _candidates(error: BaseException) -> Iterator[object]:
    """What to send for `error`, the best first: itself, or what to make it of where its constructor
    can't: its class or a base, arguments, state."""
    yield error
    yield type(error), error.args, vars(error)
    try:
        message = str(error)
    except Exception:  # noqa: BLE001 - a user's code
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
    except Exception:  # noqa: BLE001 - a user's class
        return False
    return True
