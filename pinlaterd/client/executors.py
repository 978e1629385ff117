"""Where handlers run: in threads, or as tasks of an event loop.

An executor takes jobs from a lane (`begin`), runs the lane's handler and says how it went
(`ended`). It knows nothing of the service.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine
from functools import partial
from typing import Any, Protocol

from pinlaterd.client.claims import Claim
from pinlaterd.client.outcomes import Outcome
from pinlaterd.client.running_job import ClaimLost, RunningJob

_JOIN_SECONDS = 5.0


class Work(Protocol):
    """What a lane offers to its executor. All methods may be called from any thread."""

    def begin(self, *, block: bool) -> tuple[Claim, RunningJob] | None:
        """A job to run; None once stopped, or if there is none and this must not `block`."""
        ...

    def call(self, job: RunningJob) -> Any:
        """Call the handler: its result, or a coroutine of an `async def` one."""
        ...

    def outcome(self, job: RunningJob, result: object, error: BaseException | None) -> Outcome:
        """How the job ended."""
        ...

    def ended(self, claim: Claim, job: RunningJob, outcome: Outcome, run_seconds: float) -> None:
        """The job does not run any more."""
        ...


class Executor(Protocol):
    def start(self) -> None: ...

    def wake(self) -> None:
        """Jobs have come, or it is time to stop."""
        ...

    def close(self, *, abandon: bool) -> None:
        """The lane has stopped. `abandon`: what still runs is not waited for."""
        ...


class ThreadExecutor:
    """Runs a plain handler in `concurrency` threads."""

    def __init__(self, work: Work, name: str, concurrency: int) -> None:
        self._work = work
        # Daemons: a handler that hangs must not keep the process from ending.
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True)
            for number in range(concurrency)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def wake(self) -> None:
        """Threads that wait for a job are woken by the lane itself."""

    def close(self, *, abandon: bool) -> None:
        if not abandon:
            for thread in self._threads:
                thread.join()

    def _run(self) -> None:
        work = self._work
        while (begun := work.begin(block=True)) is not None:
            claim, job = begun
            began = time.monotonic()
            try:
                outcome = work.outcome(job, work.call(job), None)
            except (Exception, SystemExit) as error:  # noqa: BLE001  the job's failure, not ours
                outcome = work.outcome(job, None, error)
            work.ended(claim, job, outcome, time.monotonic() - began)


class TaskExecutor:
    """Runs an `async def` handler as up to `concurrency` tasks of an event loop of its own."""

    def __init__(self, work: Work, name: str, concurrency: int) -> None:
        self._work = work
        self._concurrency = concurrency
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._serve, name=f"{name}-loop", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        self._loop.call_soon_threadsafe(self._begin_more)

    def close(self, *, abandon: bool) -> None:
        """Tasks that are abandoned are cancelled, and have a moment to clean up."""
        self._loop.call_soon_threadsafe(self._end)
        self._thread.join(_JOIN_SECONDS if abandon else None)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    def _begin_more(self) -> None:
        while len(self._tasks) < self._concurrency:
            begun = self._work.begin(block=False)
            if begun is None:
                return
            task = self._loop.create_task(self._run(*begun))
            begun[1].when_lost(partial(self._loop.call_soon_threadsafe, task.cancel))
            self._tasks.add(task)
            task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not self._loop.is_closed():
            self._begin_more()

    async def _run(self, claim: Claim, job: RunningJob) -> None:
        began = time.monotonic()
        try:
            coroutine: Coroutine[Any, Any, object] = self._work.call(job)
            outcome = self._work.outcome(job, await coroutine, None)
        except asyncio.CancelledError:
            outcome = self._work.outcome(job, None, ClaimLost("cancelled"))
        except (Exception, SystemExit) as error:  # noqa: BLE001  the job's failure, not ours
            outcome = self._work.outcome(job, None, error)
        self._work.ended(claim, job, outcome, time.monotonic() - began)

    def _end(self) -> None:
        async def end() -> None:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._loop.shutdown_asyncgens()
            self._loop.stop()

        self._ending = self._loop.create_task(end())
