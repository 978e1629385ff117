"""What an application declares: which function handles the jobs of which queue, and how.

    handlers = Handlers()

    @handlers.queue("mail", concurrency=4, retry={ConnectionError: exponential(1, most=300)})
    def send(job: RunningJob) -> str | None:
        ...

A `Worker` runs them. Nothing here does I/O.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from pinlaterd.client.outcomes import Outcome
from pinlaterd.client.retries import DEFAULT, RetryRule
from pinlaterd.client.running_job import RunningJob

log = logging.getLogger(__name__)

Before = Callable[[RunningJob], object]
After = Callable[[RunningJob, Outcome], object]
OnError = Callable[[RunningJob, BaseException], object]

_Function = TypeVar("_Function", bound=Callable[..., Any])


class QueueHandler(NamedTuple):
    """A queue's handler. `concurrency`: None leaves it to the worker."""

    queue: str
    function: Callable[[RunningJob], Any]
    concurrency: int | None
    retry: RetryRule

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.function)


class Handlers:
    """The handlers of an application by queue, and the hooks around each job."""

    def __init__(self) -> None:
        self._by_queue: dict[str, QueueHandler] = {}
        self._before: list[Before] = []
        self._after: list[After] = []
        self._on_error: list[OnError] = []

    @property
    def by_queue(self) -> Mapping[str, QueueHandler]:
        return self._by_queue

    def queue(
        self, name: str, *, concurrency: int | None = None, retry: RetryRule = DEFAULT
    ) -> Callable[[_Function], _Function]:
        """Decorator: this function handles the jobs of queue `name`.

        A plain function runs in one of `concurrency` threads, an `async def` as one of so many
        tasks of an event loop. `retry`: when a failed job is tried again: one policy, or one for
        each class of exceptions (others: after a second, then two, four, … 300).
        """
        if concurrency is not None and concurrency < 1:
            raise ValueError(f"queue {name}: concurrency is {concurrency}; it must be at least 1")

        def register(function: _Function) -> _Function:
            if name in self._by_queue:
                raise ValueError(f"queue {name} has two handlers; it can have one")
            self._by_queue[name] = QueueHandler(name, function, concurrency, retry)
            return function

        return register

    # --- hooks: decorators ----------------------------------------------------------------

    def before(self, hook: Before) -> Before:
        """Called with each job before its handler, in the handler's thread or event loop."""
        self._before.append(hook)
        return hook

    def after(self, hook: After) -> After:
        """Called with each job and how it ended (`Outcome`), after its handler."""
        self._after.append(hook)
        return hook

    def on_error(self, hook: OnError) -> OnError:
        """Called with each job and the exception that its handler raised, but for Retry, Later
        and Discard, which are no errors."""
        self._on_error.append(hook)
        return hook

    # --- for the worker: an exception in a hook is logged, and harms no job ------------------

    def call_before(self, job: RunningJob) -> None:
        for hook in self._before:
            _safely(hook, job)

    def call_after(self, job: RunningJob, outcome: Outcome) -> None:
        for hook in self._after:
            _safely(hook, job, outcome)

    def call_on_error(self, job: RunningJob, error: BaseException) -> None:
        for hook in self._on_error:
            _safely(hook, job, error)


def _safely(hook: Callable[..., object], *arguments: object) -> None:
    try:
        hook(*arguments)
    except Exception:
        log.exception("hook %s failed", getattr(hook, "__name__", hook))
