"""Where handlers run: threads, or tasks of an event loop; `processes` builds on the threads.

An executor takes jobs that are in flight, and hands in how each ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import cast

from pinlaterd.client.handlers import AsyncFunction, QueueHandler
from pinlaterd.client.in_flight import InFlight
from pinlaterd.client.running_job import RELEASED, Outcome, RunningJob

# How long handlers that were cancelled may take to clean up.
CLEAN_UP_SECONDS = 2.0
# How the names of the threads begin that `asyncio.to_thread` takes for a handler. Python waits for
# them when it exits.
TO_THREAD = "handler-to-thread"


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

    def abandon(self) -> None:  # noqa: B027 - there may be nothing to do
        """End what still runs, where that can be done: nobody waits for its outcome any more. Its
        claims are lost (`when_lost` was called) before. Returns at once; any thread may call it."""

    def close(self) -> None:  # noqa: B027
        """Let go of threads and processes: nothing runs that is waited for. Blocks but shortly."""


class ThreadExecutor(Executor):
    """A thread for each job that may run at a time. It ends once `wait` gives it no more jobs, but
    can't be ended: what is abandoned in it goes on, as a daemon."""

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
        """Called in each thread."""
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
