"""Handlers in processes of their own, `run_in="processes"`: each thread has a child.

    thread                           its child
      RunningJob ──claimed job────▶    handler(RunningJob of its own)
      Outcome    ◀──answer─────────    what was returned or raised, what was saved

Policies and hooks stay with the worker: the child knows the handler's function alone. It is
spawned, never forked from a program with threads, and has none of its parent's sockets. It heads a
process group, so that what it has started ends with it, and that a terminal's Ctrl-C does not reach
it. Once it has begun the kernel kills it with its thread, even if the worker is killed with -9. A
copy that a handler makes of it by os.fork is a program that it has started, as any other.
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
import socket
import struct
import threading
import time
from collections.abc import Callable
from multiprocessing import process, resource_tracker
from multiprocessing.connection import Connection, wait
from typing import cast

from pinlaterd.client.executors import ThreadExecutor
from pinlaterd.client.handler_process import READY, Answer, ChildPlan, serve
from pinlaterd.client.handlers import QueueHandler
from pinlaterd.client.in_flight import InFlight
from pinlaterd.client.running_job import RELEASED, ClaimLost, Outcome, RunningJob
from pinlaterd.lifecycle import STOP_SIGNALS

# How long a handler may go on after it could see that its claim is lost.
LOST_GRACE_SECONDS = 5.0
# How long an idle child may take to end in order, as for its atexit functions.
_END_SECONDS = 3.0
# How long the ends of all children are waited for.
_CLOSE_SECONDS = 5.0
# How often a thread that waits for its child looks whether it still should.
_LOOK_SECONDS = 0.1
# How long a child may stand still in the middle of a message, as when it was stopped.
_STALL_SECONDS = 10

_spawn = multiprocessing.get_context("spawn")
# Starting a child reaps what multiprocessing looks after: that must not be one that another thread
# has started and not taken away yet.
_starting = threading.Lock()

log = logging.getLogger(__name__)


class ProcessDied(Exception):
    """The process that ran the handler ended before the handler did; the message says how."""


class ProcessNotStarted(RuntimeError):
    """No process can be had for a handler, or it was gone before it was given anything."""


class ProcessExecutor(ThreadExecutor):
    """A child for each of the threads. What is abandoned ends with its child."""

    def __init__(self, handler: QueueHandler, concurrency: int, plan: ChildPlan) -> None:
        super().__init__(handler, concurrency)
        self._plan = plan
        self._is_abandoned = threading.Event()

    def abandon(self) -> None:
        self._is_abandoned.set()

    def close(self) -> None:
        """What is left in a child then, such as one that is just starting, runs for nobody."""
        self.abandon()
        deadline = time.monotonic() + _CLOSE_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _run_jobs(self, work: InFlight, name: str) -> None:
        place = ProcessPlace(self._handler, self._plan, name, self._is_abandoned.is_set)
        try:
            place.prepare()
            while (job := work.wait()) is not None:
                self._run(work, job, place.run)
                place.prepare()
        finally:
            place.close()


class ProcessPlace:
    """Runs one job at a time in a child that it keeps; in one thread.

    A child that died over a job is replaced before the place takes another one; one that died idle,
    which nobody looks at, when it is given a job.
    """

    def __init__(
        self, handler: QueueHandler, plan: ChildPlan, name: str, is_abandoned: Callable[[], bool]
    ) -> None:
        self._handler = handler
        self._plan = plan
        self._name = name
        self._is_abandoned = is_abandoned
        self._child: Child | None = None

    def prepare(self) -> None:
        """Have a child that is ready, unless abandoned. Raises ProcessNotStarted."""
        if self._child is not None or self._is_abandoned():
            return
        try:
            self._child = Child(self._plan, self._name)
            self._child.wait_until_ready(self._is_abandoned)
        except ProcessNotStarted as error:
            self.close()
            if not self._is_abandoned():
                raise ProcessNotStarted(
                    f"no process can run the handler of queue {self._handler.queue!r}: {error}"
                ) from error

    def run(self, job: RunningJob) -> Outcome:
        try:
            answer = self._answer(job)
        except ProcessNotStarted:  # released; `prepare` will say why
            return RELEASED
        except (ProcessDied, TimeoutError, ClaimLost) as error:
            log.warning("job %s: %s", job.descriptor, error)
            return self._handler.outcome_of(job, error.with_traceback(None))
        job.body = answer.body
        if answer.is_lost:
            job.lose()
        if answer.error is None:
            return self._handler.outcome_of_value(job, answer.status or None)
        return self._handler.outcome_of(job, answer.error.restored(), answer.error.summary)

    def close(self) -> None:
        if self._child is not None:
            self._child.end()
            self._child = None

    def _answer(self, job: RunningJob) -> Answer:
        """Raises ProcessNotStarted, ProcessDied, TimeoutError and ClaimLost: there is no child any
        more."""
        try:
            try:
                return self._apply(job)
            except ProcessNotStarted:  # it died while it had nothing to do
                self.close()
                return self._apply(job)
        except BaseException:
            self.close()
            raise

    def _apply(self, job: RunningJob) -> Answer:
        self.prepare()
        if self._child is None:
            raise ProcessNotStarted("the worker ends")
        limit_seconds = self._handler.time_limit_seconds or math.inf
        answer = self._child.apply(job, limit_seconds, self._is_abandoned)
        if answer.claim_descriptor != job.claim_descriptor:  # as of a copy that C code made
            raise ProcessDied("the handler's process answered for another job, and was killed")
        return answer


class Child:
    """One child. The thread that makes it attends it for all its life, and alone calls it."""

    def __init__(self, plan: ChildPlan, name: str) -> None:
        """Start it; `name` is what `ps` shows. Raises ProcessNotStarted."""
        try:
            self._told_lost = _spawn.RawValue(ctypes.c_bool, False)
            self._connection, childs_end = _spawn.Pipe()
            with childs_end:
                self._process = _spawn.Process(
                    target=serve, args=(plan, childs_end, self._told_lost, os.getpid()), name=name
                )
                _bound_stalls(self._connection)
                self.pid, self._pidfd = _start(self._process)
        except OSError as error:
            raise ProcessNotStarted(str(error)) from error
        self._is_reaped = False
        self._poll = select.poll()
        for descriptor in (self._connection, self._pidfd):
            self._poll.register(descriptor, select.POLLIN)

    def wait_until_ready(self, is_abandoned: Callable[[], bool]) -> None:
        """Raises ProcessNotStarted: it is of no use then."""
        try:
            while not self._has_answered(_LOOK_SECONDS):
                if is_abandoned():
                    self._kill()
                    raise ProcessNotStarted("the worker ends")
            problem = self._receive()
        except ProcessDied as error:
            raise ProcessNotStarted(f"{error}; what it printed to stderr tells why") from error
        if problem != READY:
            raise ProcessNotStarted(f"it could not begin:\n{problem}")

    def apply(
        self, job: RunningJob, limit_seconds: float, is_abandoned: Callable[[], bool]
    ) -> Answer:
        """Have the job run.

        Raises ProcessNotStarted if the child was gone before, ProcessDied if it dies over this,
        TimeoutError, and ClaimLost once the job's claim is lost for too long, or the job abandoned.
        In all of these cases the child is of no further use.
        """
        self._told_lost.value = False
        try:
            self._connection.send(job.claimed)
        except OSError as error:
            raise ProcessNotStarted("the handler's process was gone") from error
        ends_at = time.monotonic() + limit_seconds
        while not self._has_answered(min(_LOOK_SECONDS, ends_at - time.monotonic())):
            if job.lost and not self._told_lost.value:
                self._told_lost.value = True
                ends_at = min(ends_at, time.monotonic() + LOST_GRACE_SECONDS)
            if not is_abandoned() and time.monotonic() < ends_at:
                continue
            if self._has_answered(0):
                break
            self._kill()
            if job.lost:
                raise ClaimLost(
                    "its claim has ended, and its handler goes on; its process was killed"
                )
            raise TimeoutError(
                f"the handler took longer than {limit_seconds:g} s; its process was killed"
            )
        return cast("Answer", self._receive())

    def end(self) -> None:
        """End an idle child in order, and any other one at once; nothing is left of it."""
        self._connection.close()
        if not self._is_reaped:
            wait([self._pidfd], _END_SECONDS)
        self._kill()
        os.close(self._pidfd)

    def _has_answered(self, seconds: float) -> bool:
        """Wait so long for something to receive. Raises ProcessDied."""
        ready = dict(self._poll.poll(max(0.0, seconds) * 1000))
        if self._pidfd in ready and self._connection.fileno() not in ready:
            raise ProcessDied(self._death())
        return bool(ready)

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


def _start(child: process.BaseProcess) -> tuple[int, int]:
    """Start it with stop signals blocked; return its pid and a pidfd. Take it from multiprocessing,
    which joins its children when the program exits, however long they hang, and reaps those that
    died whenever it starts another: the PID of one that we have not killed yet could be reused."""
    with _starting:
        resource_tracker.ensure_running()  # multiprocessing's own; starting it unblocks signals
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
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
