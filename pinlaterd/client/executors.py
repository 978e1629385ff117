"""Where handlers run: threads, tasks of an event loop, or processes, each with a thread.

An executor takes jobs that are in flight, and hands in how each ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import cast

from pinlaterd.client.client import Client
from pinlaterd.client.handlers import AsyncFunction, QueueHandler
from pinlaterd.client.in_flight import InFlight
from pinlaterd.client.processes import Answer, Child, ChildPlan, ProcessDied, ProcessNotStarted
from pinlaterd.client.running_job import RELEASED, ClaimLost, Outcome, RunningJob

# How long handlers that were cancelled may take to clean up.
CLEAN_UP_SECONDS = 2.0
# How long the ends of all processes are waited for.
_CLOSE_SECONDS = 5.0
# How the names of the threads begin that `asyncio.to_thread` takes for a handler. Python waits for
# them when it exits.
TO_THREAD = "handler-to-thread"

log = logging.getLogger(__name__)


def executor_of(
    handler: QueueHandler,
    concurrency: int,
    client: Client,
    set_up_process: Callable[[], object] | None,
) -> Executor:
    """Not started yet. Raises ValueError if the handler can't run where it is to run."""
    if handler.run_in == "tasks":
        return TaskExecutor(handler, concurrency)
    if handler.run_in == "threads":
        return ThreadExecutor(handler, concurrency)
    return ProcessExecutor(handler, concurrency, ChildPlan.of(handler, client, set_up_process))


class Executor(ABC):
    """Runs the jobs of one queue, up to its concurrency at a time. Each that it begins it finishes
    exactly once, whatever becomes of its claim."""

    def __init__(self, handler: QueueHandler, concurrency: int) -> None:
        self._handler = handler
        self._concurrency = concurrency

    @abstractmethod
    def start(self, work: InFlight, fail: Callable[[Exception], object]) -> None:
        """Begin to take jobs; returns at once. `fail` is called, from any thread, when jobs can't
        be run here: the worker ends with this error, in order."""

    def close(self) -> None:  # noqa: B027 - there may be nothing to do
        """Let go of threads and processes: nothing runs that is waited for. Blocks but shortly."""


class ThreadExecutor(Executor):
    """A thread for each job that may run at a time. It can't be ended: what is abandoned in it goes
    on, as a daemon."""

    def __init__(self, handler: QueueHandler, concurrency: int) -> None:
        super().__init__(handler, concurrency)
        self._threads: list[threading.Thread] = []

    def start(self, work: InFlight, fail: Callable[[Exception], object]) -> None:
        def run(name: str) -> None:
            try:
                self._run_jobs(work, name)
            except Exception as error:  # noqa: BLE001 - the worker raises it in the thread of `run`
                fail(error)

        for number in range(1, self._concurrency + 1):
            name = f"{self._handler.queue}-{number}"
            thread = threading.Thread(target=run, args=(name,), name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def _run_jobs(self, work: InFlight, name: str) -> None:
        while (job := work.wait()) is not None:
            self._run(work, job, self._handler.run)

    def _run(
        self, work: InFlight, job: RunningJob, handler: Callable[[RunningJob], Outcome]
    ) -> None:
        """Whatever breaks, the job is finished: at worst it is released."""
        outcome, hooks = RELEASED, self._handler.hooks
        if hooks:
            hooks.begin(job)
        try:
            outcome = handler(job)
        finally:
            if hooks:
                hooks.end(job, outcome)
            work.finish(job, outcome, time.monotonic())


# --- processes --------------------------------------------------------------------------------


class ProcessExecutor(ThreadExecutor):
    """A child for each of the threads. What is abandoned ends with its child."""

    def __init__(self, handler: QueueHandler, concurrency: int, plan: ChildPlan) -> None:
        super().__init__(handler, concurrency)
        self._plan = plan

    def close(self) -> None:
        deadline = time.monotonic() + _CLOSE_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _run_jobs(self, work: InFlight, name: str) -> None:
        place = ProcessPlace(self._handler, self._plan, name, work)
        try:
            place.prepare()
            while (job := work.wait()) is not None:
                self._run(work, job, place.run)
                place.prepare()
        finally:
            place.close()


class ProcessPlace:
    """Runs one job at a time in a child that it keeps; in one thread. A child that died over a job
    is replaced before the place takes another one; one that died idle, when it is given a job."""

    def __init__(self, handler: QueueHandler, plan: ChildPlan, name: str, work: InFlight) -> None:
        self._handler = handler
        self._plan = plan
        self._name = name
        self._work = work
        self._child: Child | None = None

    def prepare(self) -> None:
        """Have a child that is ready, unless abandoned. Raises ProcessNotStarted."""
        if self._child is not None or self._work.abandoned:
            return
        try:
            self._child = Child(self._plan, self._name, lambda: self._work.abandoned)
            self._child.wait_until_ready()
        except ProcessNotStarted as error:
            self.close()
            if not self._work.abandoned:
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
        return self._child.apply(job, self._handler.time_limit_seconds or math.inf)


# --- tasks ------------------------------------------------------------------------------------


class TaskExecutor(Executor):
    """Tasks of an event loop, in a thread of its own; one whose claim is lost is cancelled."""

    def __init__(self, handler: QueueHandler, concurrency: int) -> None:
        super().__init__(handler, concurrency)
        self._function = cast("AsyncFunction", handler.function)
        self._thread = threading.Thread(
            target=self._run_loop, name=f"{handler.queue}-loop", daemon=True
        )
        self._tasks: set[asyncio.Task[None]] = set()
        self._running: dict[asyncio.Task[None], RunningJob] = {}  # in whose handlers tasks are
        self._closing = False

    def start(self, work: InFlight, fail: Callable[[Exception], object]) -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(ThreadPoolExecutor(thread_name_prefix=TO_THREAD))
        self._thread.start()
        work.when_ready(lambda: self._tell(self._begin_jobs, work))

    def close(self) -> None:
        """Handlers that were cancelled may clean up, but not for long."""
        self._tell(self._close)
        self._thread.join(CLEAN_UP_SECONDS)

    def _tell(self, function: Callable[..., object], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # it is closed: nobody is there to be told
            self._loop.call_soon_threadsafe(function, *arguments)

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    # --- in the loop's thread ---------------------------------------------------------------

    def _begin_jobs(self, work: InFlight) -> None:
        while len(self._tasks) < self._concurrency and (job := work.begin()) is not None:
            self._tasks.add(self._loop.create_task(self._run_jobs(work, job)))

    async def _run_jobs(self, work: InFlight, first: RunningJob) -> None:
        """Run `first`, and what waits then: one task for many jobs costs less than one for each."""
        task, hooks = asyncio.current_task(), self._handler.hooks
        assert task is not None
        job: RunningJob | None = first
        while job is not None:
            if hooks:
                hooks.begin(job)
            outcome = await self._run(task, job)
            if hooks:
                hooks.end(job, outcome)
            work.finish(job, outcome, time.monotonic())
            await asyncio.sleep(0)  # a handler that never waits must not hold up the others
            job = work.begin()
        self._tasks.discard(task)  # at once: a job that comes now finds the place free
        if self._closing and not self._tasks:
            self._loop.stop()

    async def _run(self, task: asyncio.Task[None], job: RunningJob) -> Outcome:
        self._running[task] = job
        job.when_lost(lambda: self._tell(self._cancel, task, job))
        try:
            async with asyncio.timeout(self._handler.time_limit_seconds):
                return self._handler.outcome_of_value(job, await self._function(job))
        except GeneratorExit:  # the loop is gone
            raise
        except BaseException as error:  # noqa: BLE001 - it is the job's outcome, whatever it is
            return self._handler.outcome_of(job, error)
        finally:
            # It is too late to be cancelled: that would end the task, and so take a place.
            del self._running[task]
            job.when_lost(None)
            while task.cancelling():
                task.uncancel()

    def _cancel(self, task: asyncio.Task[None], job: RunningJob) -> None:
        if self._running.get(task) is job:
            task.cancel()

    def _close(self) -> None:
        self._closing = True
        if not self._tasks:
            self._loop.stop()
