"""What runs in the process of a handler, and what goes to and fro."""

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
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.pool import RemoteTraceback  # type: ignore[attr-defined]
from typing import Any, NamedTuple, cast

from pinlaterd.client.client import Client
from pinlaterd.client.handlers import QueueHandler
from pinlaterd.client.running_job import RunningJob, error_text, returned
from pinlaterd.lifecycle import STOP_SIGNALS, end_with_parent, set_title
from pinlaterd.model import ClaimedJob

READY = ""


class ChildPlan(NamedTuple):
    """What a child is made from, each part pickled: what fails with one in the child is reported as
    any other failure to begin. A handler may do without a client; `no_client` is why it has to."""

    queue: str
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
            handler.queue,
            _pickled(handler.function, f"the handler of queue {handler.queue!r}"),
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
    """What came of a job. `status` is what was returned, unless there is an `error`."""

    claim_descriptor: str
    status: str
    error: CarriedError | None
    body: bytes  # the job's, as it was saved last
    is_lost: bool  # the child has found out that the claim has ended


# --- in the child ---------------------------------------------------------------------------


def serve(plan: ChildPlan, connection: Connection, is_lost: ctypes.c_bool, parent_pid: int) -> None:
    end_with_parent(parent_pid, signal.SIGKILL)
    set_title(f"worker {multiprocessing.current_process().name}")
    _leave_signals_to_parent()
    os.register_at_fork(after_in_child=partial(_leave_child, connection))
    try:
        run = _handler_of(plan, is_lost)
    except BaseException:  # noqa: BLE001 - the parent is told, and raises
        connection.send(traceback.format_exc().rstrip())
        return
    with contextlib.suppress(EOFError, OSError):  # the parent wants no more of us
        connection.send(READY)
        while True:
            connection.send(run(connection.recv()))


def _leave_signals_to_parent() -> None:
    """The parent ends its jobs in order: a stop signal to a whole group, or to all processes of a
    service, is no child's. They are caught, not ignored, so that programs that a handler starts
    have them as usual."""
    os.setpgid(0, 0)
    for number in STOP_SIGNALS:
        signal.signal(number, lambda _number, _frame: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def _leave_child(connection: Connection) -> None:
    """In a copy that a handler made by `os.fork`: it is none of the parent's children. It answers
    nothing, is not talked to, and heeds signals, as any process of the handler's does."""
    connection.close()
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def _handler_of(plan: ChildPlan, is_lost: ctypes.c_bool) -> Callable[[ClaimedJob], Answer]:
    """What runs a job, once the process was set up."""
    set_up: Callable[[], object] | None = pickle.loads(plan.set_up)  # noqa: S301 - this program's
    if set_up is not None:
        set_up()
    function: Callable[[RunningJob], object] = pickle.loads(plan.function)  # noqa: S301
    client: Client | None = pickle.loads(plan.client) if plan.client else None  # noqa: S301

    def run(claimed: ClaimedJob) -> Answer:
        job = _ChildJob(plan, claimed, client, is_lost)
        status, failure = "", None
        try:
            status = returned(function(job)).status
        except BaseException as error:  # noqa: BLE001 - it is the job's outcome, whatever it is
            failure = CarriedError.of(error)
        return Answer(job.claim_descriptor, status, failure, job.body, job.lost)

    return run


class _ChildJob(RunningJob):
    """A job whose claim the worker renews; it notes the loss of that in `told_lost`."""

    __slots__ = ("_found_lost", "_no_client", "_told_lost")

    def __init__(
        self, plan: ChildPlan, claimed: ClaimedJob, client: Client | None, told_lost: ctypes.c_bool
    ) -> None:
        self._no_client = plan.no_client
        self._told_lost = told_lost
        super().__init__(plan.queue, claimed, cast("Client", client), time.monotonic())

    @property
    def lost(self) -> bool:
        return self._found_lost or self._told_lost.value

    @lost.setter
    def lost(self, value: bool) -> None:
        self._found_lost = value

    @property
    def client(self) -> Client:
        if self._no_client:
            raise RuntimeError(
                f"job.client and job.save can't be had in a process: {self._no_client}"
            )
        return self._client


# --- exceptions on their way to the worker --------------------------------------------------


class CarriedError(NamedTuple):
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
