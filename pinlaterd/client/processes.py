"""Places that run jobs in processes of their own: `run_in="processes"`.

    thread of the place              its child
      RunningJob ──order──────────▶    handler(RunningJob of its own)
      Outcome    ◀──answer─────────    what was returned or raised, what was saved

Policies and hooks stay with the worker: the child knows the handler's function alone. It is
spawned, never forked from a program with threads, and has none of its parent's sockets. It heads a
process group, so that what it has started ends with it, and that a terminal's Ctrl-C does not reach
it. Once it has begun the kernel kills it with the thread of its place, even if the worker is killed
with -9. A copy that a handler makes of it by os.fork is a program that it has started, as any
other.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import multiprocessing
import os
import select
import signal
import threading
import time
import weakref
from collections.abc import Callable
from multiprocessing import process, resource_tracker
from multiprocessing.connection import wait
from typing import cast

from pinlaterd.client.executors import Place
from pinlaterd.client.handler_process import (
    READY,
    Answer,
    ChildPlan,
    Order,
    pieces,
    serve,
    whole,
)
from pinlaterd.client.handlers import QueueHandler
from pinlaterd.client.outcomes import HANDED_BACK, ClaimLost, Outcome
from pinlaterd.client.running_job import RunningJob
from pinlaterd.lifecycle import STOP_SIGNALS

# How long a handler may go on after it could see that its claim is lost.
LOST_GRACE_SECONDS = 5.0
# How long an idle child may take to end in order, as for its atexit functions.
_END_SECONDS = 3.0
# How long to wait at most before the clock is looked at again: poll(2) can't count much further.
_LONGEST_WAIT_SECONDS = 3600.0
_spawn = multiprocessing.get_context("spawn")
# Starting a child reaps what multiprocessing looks after: that must not be one that another thread
# has started and not taken away yet.
_starting = threading.Lock()

# Until when a child may go on, in monotonic seconds. It is asked again when the bell rings.
Deadline = Callable[[], float]

log = logging.getLogger(__name__)


class ProcessDied(Exception):
    """The process that ran the handler ended before the handler did; the message says how."""


class ProcessNotStarted(RuntimeError):
    """No process can be had for a handler, or it was gone before it was given anything."""


class OutOfTime(Exception):
    """The deadline passed, and the child was killed."""


class ProcessPlace(Place):
    """Runs one job at a time in a child that it keeps; in one thread, but for `abandon`.

    A child that died over a job is replaced before the place takes another one; one that died idle,
    which nobody looks at, when it is given a job.
    """

    can_be_ended = True

    def __init__(self, handler: QueueHandler, plan: ChildPlan, name: str) -> None:
        super().__init__(handler)
        self._plan = plan
        self._name = name
        self._bell = Bell()
        self._child: Child | None = None
        self._is_abandoned = False

    def prepare(self) -> None:
        """Have a child that is ready. Raises ProcessNotStarted."""
        if self._child is not None or self._is_abandoned:
            return
        try:
            self._child = Child(self._plan, self._name, self._bell)
            self._child.wait_until_ready(lambda: -math.inf if self._is_abandoned else math.inf)
        except OutOfTime:
            self._end_child()
        except ProcessNotStarted as error:
            self._end_child()
            raise ProcessNotStarted(
                f"no process can run the handler of queue {self._handler.queue!r}: {error}"
            ) from error

    def run(self, job: RunningJob) -> Outcome:
        job.claim.when_lost(self._bell.ring)
        try:
            answer = self._answer(job)
        except ProcessNotStarted:  # handed back; `prepare` will say why
            return HANDED_BACK
        except (ProcessDied, TimeoutError, ClaimLost) as error:
            log.warning("job %s: %s", job.descriptor, error)
            return self._handler.outcome_of(job, error.with_traceback(None))
        finally:
            job.claim.when_lost(None)
        job.note_saved(answer.body)
        if answer.is_lost:
            job.claim.lose()
        if answer.error is None:
            return self._handler.outcome_of_value(job, answer.status or None)
        return self._handler.outcome_of(job, answer.error.restored(), answer.error.summary)

    def abandon(self) -> None:
        self._is_abandoned = True
        self._bell.ring()

    def close(self) -> None:
        self._end_child()

    def _answer(self, job: RunningJob) -> Answer:
        """Raises ProcessNotStarted, ProcessDied, TimeoutError and ClaimLost: there is no child any
        more."""
        try:
            try:
                return self._apply(job)
            except ProcessNotStarted:  # it died while it had nothing to do
                self._end_child()
                return self._apply(job)
        except BaseException:
            self._end_child()
            raise

    def _apply(self, job: RunningJob) -> Answer:
        self.prepare()
        child = self._child
        if child is None:
            raise ProcessNotStarted("the worker ends")
        limit_seconds = self._handler.time_limit_seconds or math.inf
        ends_at = time.monotonic() + limit_seconds
        is_warned = False

        def deadline() -> float:
            nonlocal ends_at, is_warned
            if self._is_abandoned:
                return -math.inf
            if job.lost and not is_warned:
                is_warned = True
                child.warn()
                ends_at = min(ends_at, time.monotonic() + LOST_GRACE_SECONDS)
            return ends_at

        try:
            answer = child.apply(Order(job.queue, job.claim.job), deadline)
        except OutOfTime as error:
            if job.lost:
                raise ClaimLost(
                    "its claim has ended, and its handler goes on; its process was killed"
                ) from error
            raise TimeoutError(
                f"the handler took longer than {limit_seconds:g} s; its process was killed"
            ) from error
        if answer.claim_descriptor != job.claim_descriptor:  # as of a copy that C code made
            raise ProcessDied("the handler's process answered for another job, and was killed")
        return answer

    def _end_child(self) -> None:
        if self._child is not None:
            self._child.end()
            self._child = None


class Bell:
    """Wakes the one thread that waits for it; any thread may ring, at any time."""

    def __init__(self) -> None:
        self._fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # Not before: a thread that rings has the Bell. Nor at exit: threads wait to the last.
        weakref.finalize(self, os.close, self._fd).atexit = False

    def fileno(self) -> int:
        return self._fd

    def ring(self) -> None:
        os.eventfd_write(self._fd, 1)

    def hush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)


class Child:
    """One child. The thread that makes it attends it for all its life, and alone calls it."""

    def __init__(self, plan: ChildPlan, name: str, bell: Bell) -> None:
        """Start it; `name` is what `ps` shows. Raises ProcessNotStarted."""
        self._bell = bell
        try:
            self._flag = _spawn.RawValue(ctypes.c_bool, False)
            self._connection, childs_end = _spawn.Pipe()
            with childs_end:
                self._process = _spawn.Process(
                    target=serve, args=(plan, childs_end, self._flag, os.getpid()), name=name
                )
                _start(self._process)
            self._pidfd = _pidfd_of(self._process)
        except OSError as error:
            raise ProcessNotStarted(str(error)) from error
        self._is_reaped = False
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
        if problem != READY:
            raise ProcessNotStarted(f"it could not begin:\n{problem}")

    def apply(self, order: Order, deadline: Deadline) -> Answer:
        """Have the job run.

        Raises ProcessNotStarted if the child was gone before, ProcessDied if it dies over this,
        and OutOfTime. In all of these cases the child is of no further use.
        """
        self._flag.value = False
        try:
            for piece in pieces(order):
                self._wait(select.POLLOUT, deadline)
                self._connection.send_bytes(piece)
        except (OSError, ProcessDied) as error:
            raise ProcessNotStarted(self._death()) from error
        return cast("Answer", self._receive(deadline))

    def warn(self) -> None:
        """Let the job know that its claim is lost, until the next `apply`."""
        self._flag.value = True

    def end(self) -> None:
        """End an idle child in order, and any other one at once; nothing is left of it."""
        self._connection.close()
        if not self._is_reaped:
            wait([self._pidfd], _END_SECONDS)
        self._kill()
        os.close(self._pidfd)

    def _receive(self, deadline: Deadline) -> object:
        def receive() -> bytes:
            self._wait(select.POLLIN, deadline)
            return self._connection.recv_bytes()

        try:
            return whole(receive)
        except (ProcessDied, OutOfTime):
            raise
        except (EOFError, OSError) as error:
            raise ProcessDied(self._death()) from error
        except Exception as error:
            self._kill()
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
                self._kill()
                raise OutOfTime
            self._bell.hush()  # before `deadline` looks: what rings meanwhile is heard next time

    def _death(self) -> str:
        """How the child died, of which nothing is left then."""
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


def _start(child: process.BaseProcess) -> None:
    """Start it with stop signals blocked, and take it from multiprocessing, which joins its
    children when the program exits, however long they hang, and reaps those that died whenever it
    starts another: the PID of one that we have not killed yet could be reused then."""
    with _starting:
        resource_tracker.ensure_running()  # multiprocessing's own; starting it unblocks signals
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            child.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        process._children.discard(child)  # type: ignore[attr-defined]  # noqa: SLF001


def _pidfd_of(child: process.BaseProcess) -> int:
    assert child.pid is not None
    try:
        return os.pidfd_open(child.pid)
    except OSError:
        child.kill()
        child.join()
        raise
