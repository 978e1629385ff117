"""Handlers: which function works on which queue, how many at a time, what to do when it fails, and
where it runs: in threads, as tasks of an event loop, or in processes, each with a thread.

A decorated function stays what it is: it can be called, and pickled by its name. An executor takes
jobs that are in flight, and hands in how each ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeVar, cast, get_args

from pinlaterd.client.client import HANDLER_LOOPS, Client
from pinlaterd.client.in_flight import InFlight
from pinlaterd.client.processes import Child, ChildPlan, ProcessDied, ProcessNotStarted
from pinlaterd.client.running_job import (
    DEFAULT_POLICY,
    LOST,
    ClaimLost,
    Ending,
    ErrorSummary,
    Outcome,
    Redact,
    Retries,
    RunningJob,
    broken_off,
    check_has_begun,
    handlers_frames,
    log_guarded,
    raised,
    returned,
    unfinished,
)
from pinlaterd.model import QUEUE_NAME

# How long handlers that were cancelled may take to clean up.
CLEAN_UP_SECONDS = 2.0
# How long the ends of all processes are waited for.
_CLOSE_SECONDS = 5.0
# How the names of the threads begin that `asyncio.to_thread` takes for a handler. Python waits for
# them when it exits.
TO_THREAD = "handler-to-thread"

AsyncFunction = Callable[[RunningJob], Awaitable[object]]

RunIn = Literal["threads", "tasks", "processes"]

Before = Callable[[RunningJob], object]
After = Callable[[RunningJob, Outcome], object]
OnError = Callable[[RunningJob, BaseException], object]

_Function = TypeVar("_Function", bound=Callable[[RunningJob], object])
_Before = TypeVar("_Before", bound=Before)
_After = TypeVar("_After", bound=After)
_OnError = TypeVar("_OnError", bound=OnError)

log = logging.getLogger(__name__)


class Hooks:
    """Plain functions to be called around each job, in the worker's process. One that raises is
    logged; it changes nothing about the job. Raises ValueError (TypeError) for other functions."""

    def __init__(self, redact: Redact | None = None) -> None:
        self.redact = redact
        self._before: list[Before] = []
        self._after: list[After] = []
        self._on_error: list[OnError] = []

    def before(self, hook: _Before) -> _Before:
        """Decorate a function to be called with each job before its handler is."""
        check_plain("before", hook)
        self._before.append(hook)
        return hook

    def after(self, hook: _After) -> _After:
        """Decorate a function to be called with each job and its Outcome after its handler was."""
        check_plain("after", hook)
        self._after.append(hook)
        return hook

    def on_error(self, hook: _OnError) -> _OnError:
        """Decorate a function to be called, before those of `after`, with each job whose handler
        failed, and with what it raised, unless that was Retry, Discard or Later."""
        check_plain("on_error", hook)
        self._on_error.append(hook)
        return hook

    def begin(self, job: RunningJob) -> None:
        for hook in self._before:
            _call(hook, job)

    def end(self, job: RunningJob, outcome: Outcome) -> None:
        if outcome.error is not None:
            for on_error in self._on_error:
                _call(on_error, job, outcome.error)
        for after in self._after:
            _call(after, job, outcome)


@dataclass(frozen=True)
class QueueHandler:
    """The handler of a queue's jobs, and how it is run. `concurrency` None: as the worker says."""

    queue: str
    function: Callable[[RunningJob], object]
    run_in: RunIn
    hooks: Hooks
    concurrency: int | None
    retries: Retries
    time_limit_seconds: float | None

    def run(self, job: RunningJob) -> Outcome:
        """Call a plain function, and say how that ended."""
        try:
            return self.outcome_of_value(job, self.function(job))
        except BaseException as error:  # noqa: BLE001 - it is the job's outcome, whatever it is
            return self.outcome_of(job, error)

    def outcome_of_value(self, job: RunningJob, value: object) -> Outcome:
        """Return the outcome of a job whose handler returned `value`."""
        return LOST if job.lost else returned(value)

    def outcome_of(
        self, job: RunningJob, error: BaseException, summary: ErrorSummary | None = None
    ) -> Outcome:
        """Return what becomes of a job whose handler raised `error`; `summary` as for `raised`."""
        if job.lost:
            return LOST
        redact = self.hooks.redact
        try:
            outcome = raised(error, job, self.retries, summary, redact)
        except BaseException as mistake:  # noqa: BLE001 - as of a Retry that forgets its base
            text = "job %s: what its handler raised makes no outcome"
            log_guarded(log.exception, text, job.descriptor)
            outcome = broken_off(mistake, job, self.retries, redact=redact)
        self._log(job, error, outcome)
        return outcome

    def _log(self, job: RunningJob, error: BaseException, outcome: Outcome) -> None:
        """Log a failure; one that is final as an error, with the traceback in the handler."""
        about = (type(error), error, handlers_frames(error))
        if outcome.ending is Ending.RETRIED:
            why = outcome.status.rstrip("; ")
            text = "job %s: attempt %d failed: %s"
            log_guarded(log.warning, text, job.descriptor, job.attempt, why)
            log_guarded(log.debug, "job %s failed", job.descriptor, exc_info=about)
        elif outcome.ending in (Ending.FAILED, Ending.DISCARDED):
            only = ", at the only attempt that it was enqueued with" * (job.attempts_allowed == 1)
            text = "job %s has failed for good%s"
            log_guarded(log.error, text, job.descriptor, only, exc_info=about)


class Handlers(Hooks):
    """The handlers of a program, one for each queue, and the hooks around all of them."""

    def __init__(self, *, redact: Redact | None = None) -> None:
        """`redact`: returns what a custom status may say of the text of an exception. Raises
        TypeError if it can't be called, ValueError if a call runs nothing of it."""
        if redact is not None:
            check_plain("redact", redact)
        super().__init__(redact)
        self._of_queues: dict[str, QueueHandler] = {}

    @property
    def by_queue(self) -> Mapping[str, QueueHandler]:
        """The handlers by the names of their queues."""
        return self._of_queues

    def queue(
        self,
        name: str,
        *,
        run_in: RunIn | None = None,
        concurrency: int | None = None,
        retry: Retries = DEFAULT_POLICY,
        time_limit_seconds: float | None = None,
    ) -> Callable[[_Function], _Function]:
        """Decorate the function that works on the queue `name`.

        It is run in threads if it is a plain function, as a task of an event loop if it is
        `async def`, and with `run_in="processes"`, for plain functions at the top level of a
        module, in processes of their own. `concurrency`: how many at a time (default: the
        Worker's). `retry`: a policy (`exponential(1)`), or policies by class of error.
        `time_limit_seconds`: how long a run may take, in tasks and processes. Raises ValueError
        (TypeError) for what makes no sense, and for a queue that has a handler already.
        """
        if not isinstance(name, str):  # as where the brackets are missing: nothing is registered
            raise TypeError(f'expected @handlers.queue("NAME"), got {name!r} for a name')

        def register(function: _Function) -> _Function:
            place = run_in or ("tasks" if _is(inspect.iscoroutinefunction, function) else "threads")
            handler = QueueHandler(
                name, function, place, self, concurrency, retry, time_limit_seconds
            )
            _check(handler)
            if name in self._of_queues:
                raise ValueError(
                    f"queue {name!r} has a handler already: {_name(self._of_queues[name].function)}"
                )
            self._of_queues[name] = handler
            return function

        return register


def _check(handler: QueueHandler) -> None:
    what = f"handler {_name(handler.function)} of queue {handler.queue!r}"
    if not QUEUE_NAME.match(handler.queue):
        raise ValueError(f"{what}: a queue's name holds letters, digits and underscores only")
    if handler.concurrency is not None and handler.concurrency < 1:
        raise ValueError(f"{what}: concurrency must be at least 1, got {handler.concurrency}")
    _check_run_in(f"{what}: run_in={handler.run_in!r}", handler)
    limit_seconds = handler.time_limit_seconds
    if limit_seconds is not None and not limit_seconds > 0:
        raise ValueError(f"{what}: time_limit_seconds must be above 0, got {limit_seconds}")
    if limit_seconds is not None and handler.run_in == "threads":
        raise ValueError(
            f"{what}: time_limit_seconds: a thread can't be ended; make the function `async def`, "
            'or run it with run_in="processes"'
        )
    retries = handler.retries
    for policy in retries.values() if isinstance(retries, Mapping) else [retries]:
        if not callable(policy):
            raise TypeError(
                f"{what}: retry: {policy!r} is no policy; expected one like exponential(1), or "
                "{ExceptionClass: policy}"
            )
        check_plain(f"{what}: retry", policy)


def _check_run_in(what: str, handler: QueueHandler) -> None:
    if handler.run_in not in get_args(RunIn):
        raise ValueError(f"{what}: expected one of {', '.join(map(repr, get_args(RunIn)))}")
    if not callable(handler.function) or inspect.isclass(handler.function):
        raise TypeError(
            f"{what}: expected a function, or an object whose class has `__call__`, got "
            f"{handler.function!r}"
        )
    is_async = _is(inspect.iscoroutinefunction, handler.function)
    if _is(_yields, handler.function):
        raise ValueError(f"{what}: it has a `yield`, so a call runs nothing of it; return instead")
    if is_async and handler.run_in != "tasks":
        raise ValueError(
            f"{what}: an `async def` runs in tasks; what is to run in {handler.run_in} is a plain "
            "function, which may call asyncio.run"
        )
    if handler.run_in == "tasks" and not is_async:
        raise ValueError(
            f"{what}: a plain function would hold up all the others; make it `async def`"
        )


def _is(kind: Callable[[object], bool], function: Callable[..., object]) -> bool:
    """Return whether a function, or the call of an object, is of a kind that `inspect` knows."""
    while isinstance(function, partial | staticmethod):
        function = function.func if isinstance(function, partial) else function.__func__
    if kind(function):
        return True
    # The call of a class makes an object, whatever the call of that does.
    return not inspect.isclass(function) and kind(getattr(function, "__call__", None))  # noqa: B004


# The code of all functions that `contextlib` makes of one with `yield`: a call runs nothing of it.
_CONTEXT_MANAGERS = tuple(
    getattr(contextlib, name)(iter).__code__ for name in ("contextmanager", "asynccontextmanager")
)


def _yields(function: object) -> bool:
    return (
        inspect.isgeneratorfunction(function)
        or inspect.isasyncgenfunction(function)
        or getattr(function, "__code__", None) in _CONTEXT_MANAGERS
    )


def check_plain(what: str, function: Callable[..., object]) -> None:
    """Raise TypeError for what can't be called, and ValueError if a call runs nothing of it."""
    if not callable(function):
        raise TypeError(f"{what}: expected a function, got {function!r}")
    if _is(inspect.iscoroutinefunction, function) or _is(_yields, function):
        raise ValueError(
            f"{what}: {_name(function)} is `async def` or has a `yield`, so a call runs nothing of "
            "it; expected a plain function"
        )


def _name(function: Callable[..., object]) -> str:
    return cast("str", getattr(function, "__qualname__", None) or type(function).__qualname__)


def _call(hook: Callable[..., object], job: RunningJob, *more: object) -> None:
    try:
        check_has_begun(hook(job, *more))
    except BaseException:  # noqa: BLE001 - a user's code
        text = "a hook failed: %s, for job %s"
        log_guarded(log.exception, text, _name(hook), job.descriptor)


# --- executors --------------------------------------------------------------------------------


def executor_of(
    handler: QueueHandler,
    concurrency: int,
    client: Client,
    set_up_process: Callable[[], object] | None,
) -> Executor:
    """Make an executor. Raises ValueError if the handler can't run where it is to run."""
    if handler.run_in == "tasks":
        return LoopExecutor(handler, concurrency)
    if handler.run_in == "threads":
        return ThreadExecutor(handler, concurrency)
    return ProcessExecutor(
        handler, concurrency, ChildPlan.of(handler.queue, handler.function, client, set_up_process)
    )


def start_thread(
    name: str, work: Callable[[], None], fail: Callable[[BaseException], object]
) -> threading.Thread:
    """Start a daemon that calls `work`, and `fail` with what that raises."""

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - the worker raises it in the thread of `run`
            fail(error)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


class Executor(ABC):
    """Runs the jobs of one queue, up to its concurrency at a time. Each that it begins it finishes
    exactly once, whatever becomes of its claim."""

    def __init__(self, handler: QueueHandler, concurrency: int) -> None:
        self._handler = handler
        self._concurrency = concurrency

    @abstractmethod
    def start(self, work: InFlight, fail: Callable[[BaseException], object]) -> None:
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

    def start(self, work: InFlight, fail: Callable[[BaseException], object]) -> None:
        for number in range(1, self._concurrency + 1):
            name = f"{self._handler.queue}-{number}"
            self._threads.append(start_thread(name, partial(self._run_jobs, work, name), fail))

    def _run_jobs(self, work: InFlight, name: str) -> None:
        while (job := work.wait()) is not None:
            self._run(work, job, self._handler.run)

    def _run(
        self, work: InFlight, job: RunningJob, handler: Callable[[RunningJob], Outcome]
    ) -> None:
        """Run a job and finish it, whatever breaks: at worst as unfinished."""
        outcome, hooks = unfinished(job), self._handler.hooks
        hooks.begin(job)
        try:
            outcome = handler(job)
        finally:
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
        with contextlib.closing(place):
            place.prepare()
            while (job := work.wait()) is not None:
                self._run(work, job, place.run)
                place.prepare()


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
        if self._child is not None and self._child.has_died():
            self.close()
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
            self.prepare()
            if self._child is None:
                return unfinished(job)  # the worker ends
            answer = self._child.apply(job, self._handler.time_limit_seconds or math.inf)
        except ProcessNotStarted:  # `prepare` will say why
            self.close()
            return unfinished(job)
        except (ProcessDied, TimeoutError, ClaimLost) as error:
            self.close()
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


# --- tasks ------------------------------------------------------------------------------------


class TaskExecutor(Executor):
    """Tasks of the event loop that starts it; one whose claim is lost is cancelled."""

    def __init__(self, handler: QueueHandler, concurrency: int) -> None:
        super().__init__(handler, concurrency)
        self._function = cast("AsyncFunction", handler.function)
        # Each with the job in whose handler it is.
        self._tasks: dict[asyncio.Task[None], RunningJob | None] = {}
        self._closing = False

    def start(self, work: InFlight, fail: Callable[[BaseException], object]) -> None:
        self._loop, self._work, self._fail = asyncio.get_running_loop(), work, fail
        work.when_ready(self._begin_jobs)

    def _tell(self, function: Callable[..., object], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # it is closed: nobody is there to be told
            self._loop.call_soon_threadsafe(function, *arguments)

    # --- in the loop's thread ---------------------------------------------------------------

    def _begin_jobs(self) -> None:
        while len(self._tasks) < self._concurrency and (job := self._work.begin()) is not None:
            task = self._loop.create_task(self._run_jobs(job))
            self._tasks[task] = job
            task.add_done_callback(self._ended)

    async def _run_jobs(self, first: RunningJob) -> None:
        """Run `first`, and what waits then: one task for many jobs costs less than one for each."""
        task, hooks = asyncio.current_task(), self._handler.hooks
        assert task is not None
        job: RunningJob | None = first
        while job is not None:
            hooks.begin(job)
            outcome = await self._run(task, job)
            hooks.end(job, outcome)
            self._tasks[task] = None
            self._work.finish(job, outcome, time.monotonic())
            await asyncio.sleep(0)  # a handler that never waits must not hold up the others
            self._tasks[task] = job = self._work.begin()
        del self._tasks[task]  # at once: a job that comes now finds the place free

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Free the place of a task, whatever has ended it, such as a handler that cancels all."""
        job = self._tasks.pop(task, None)
        if job is not None:
            self._work.finish(job, unfinished(job), time.monotonic())
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)
        self._begin_jobs()
        if self._closing and not self._tasks:
            self._loop.stop()

    async def _run(self, task: asyncio.Task[None], job: RunningJob) -> Outcome:
        job.when_lost(lambda: self._tell(self._cancel, task, job))
        try:
            async with asyncio.timeout(self._handler.time_limit_seconds):
                value = await self._function(job)
                while value is not None and inspect.isawaitable(value):
                    value = await value
                return self._handler.outcome_of_value(job, value)
        except BaseException as error:
            if issubclass(type(error), GeneratorExit) and self._loop.is_closed():
                raise
            return self._handler.outcome_of(job, error)
        finally:
            # It is too late to be cancelled.
            job.when_lost(None)
            while task.cancelling():
                task.uncancel()

    def _cancel(self, task: asyncio.Task[None], job: RunningJob) -> None:
        if self._tasks.get(task) is job:
            task.cancel()


class LoopExecutor(TaskExecutor):
    """Tasks of an event loop in a thread of its own. If a child task or a callback ends with
    SystemExit, asyncio stops the loop: it is started again, for the other jobs in it."""

    def start(self, work: InFlight, fail: Callable[[BaseException], object]) -> None:
        self._loop, self._work, self._fail = asyncio.new_event_loop(), work, fail
        self._loop.set_default_executor(ThreadPoolExecutor(thread_name_prefix=TO_THREAD))
        HANDLER_LOOPS.add(self._loop)
        self._thread = start_thread(f"{self._handler.queue}-loop", self._run_loop, fail)
        work.when_ready(lambda: self._tell(self._begin_jobs))

    def close(self) -> None:
        """End the loop; handlers that were cancelled may clean up, but not for long."""
        self._closing = True
        self._tell(self._loop.stop)
        self._thread.join(CLEAN_UP_SECONDS)

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            while self._tasks or not self._closing:
                try:
                    self._loop.run_forever()  # a handler may stop it, too
                except Exception:
                    raise
                except BaseException:  # noqa: BLE001 - of a task's, or of what logs that
                    text = "queue %s: the event loop was stopped"
                    log_guarded(log.exception, text, self._handler.queue)
            self._loop.run_until_complete(self._work.client.leave_loop())
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()
        finally:  # if the loop has broken down, so have the handlers in it
            for job in filter(None, self._tasks.values()):
                self._work.finish(job, unfinished(job), time.monotonic())
