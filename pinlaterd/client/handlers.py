"""Handlers: which function works on which queue, how many at a time, and what to do when it fails.

A decorated function stays what it is: it can be called, and pickled by its name. Nothing here
does I/O.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeVar, cast, get_args

from pinlaterd.client.running_job import (
    DEFAULT_POLICY,
    LOST,
    Outcome,
    Retries,
    RunningJob,
    raised,
    returned,
)
from pinlaterd.model import QUEUE_NAME

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


@dataclass(frozen=True)
class Hooks:
    """What is called around each job, in the worker's process. A hook that raises is logged; it
    changes nothing about the job."""

    before: list[Before] = field(default_factory=list)
    after: list[After] = field(default_factory=list)
    on_error: list[OnError] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.before or self.after or self.on_error)

    def begin(self, job: RunningJob) -> None:
        for hook in self.before:
            _call(hook, job)

    def end(self, job: RunningJob, outcome: Outcome) -> None:
        if outcome.error is not None:
            for on_error in self.on_error:
                _call(on_error, job, outcome.error)
        for after in self.after:
            _call(after, job, outcome)


@dataclass(frozen=True)
class QueueHandler:
    """How the jobs of one queue are worked on. `concurrency` None: as the worker says."""

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
        """What becomes of a job whose handler returned `value`."""
        return LOST if job.lost else returned(value)

    def outcome_of(self, job: RunningJob, error: BaseException, text: str | None = None) -> Outcome:
        """What becomes of a job whose handler raised `error`; `text` as for `raised`."""
        if job.lost:
            return LOST
        try:
            outcome = raised(error, job, self.retries, text)
        except Exception as mistake:  # as in a subclass of Retry that forgets its base
            log.exception("job %s: what its handler raised makes no outcome", job.descriptor)
            outcome = raised(mistake, job, self.retries)
        if outcome.error is not None:
            log.info("job %s failed", job.descriptor, exc_info=error)
        return outcome


class Handlers:
    """The handlers of a program, one for each queue, and the hooks around all of them."""

    def __init__(self) -> None:
        self.hooks = Hooks()
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

        def register(function: _Function) -> _Function:
            place = run_in or ("tasks" if _is_async(function) else "threads")
            handler = QueueHandler(
                name, function, place, self.hooks, concurrency, retry, time_limit_seconds
            )
            _check(handler)
            if name in self._of_queues:
                raise ValueError(
                    f"queue {name!r} has a handler already: {_name(self._of_queues[name].function)}"
                )
            self._of_queues[name] = handler
            return function

        return register

    def before(self, hook: _Before) -> _Before:
        """Decorate a function to be called with each job before its handler is."""
        self.hooks.before.append(hook)
        return hook

    def after(self, hook: _After) -> _After:
        """Decorate a function to be called with each job and its Outcome after its handler was."""
        self.hooks.after.append(hook)
        return hook

    def on_error(self, hook: _OnError) -> _OnError:
        """Decorate a function to be called, before those of `after`, with each job whose handler
        failed, and with what it raised, unless that was Retry, Discard or Later."""
        self.hooks.on_error.append(hook)
        return hook


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


def _check_run_in(what: str, handler: QueueHandler) -> None:
    if handler.run_in not in get_args(RunIn):
        raise ValueError(f"{what}: expected one of {', '.join(map(repr, get_args(RunIn)))}")
    is_async = _is_async(handler.function)
    if is_async and handler.run_in != "tasks":
        raise ValueError(
            f"{what}: an `async def` runs in tasks; what is to run in {handler.run_in} is a plain "
            "function, which may call asyncio.run"
        )
    if handler.run_in == "tasks" and not is_async:
        raise ValueError(
            f"{what}: a plain function would hold up all the others; make it `async def`"
        )


def _is_async(function: Callable[[RunningJob], object]) -> bool:
    """Whether it is `async def`, or an object whose call is."""
    call = getattr(function, "__call__", None)  # noqa: B004 - an object's own
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def _name(function: Callable[[RunningJob], object]) -> str:
    return cast("str", getattr(function, "__qualname__", repr(function)))


def _call(hook: Callable[..., object], job: RunningJob, *more: object) -> None:
    try:
        hook(job, *more)
    except BaseException:
        log.exception("a hook failed: %s, for job %s", _name(hook), job.descriptor)
