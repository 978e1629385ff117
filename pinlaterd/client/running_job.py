"""A job as its handler sees it, how a run may end, and when a failed one is tried again.

A retry policy is any function of the attempt that failed (1 is the first) and the error, which
returns the seconds until the next attempt, or None: the job has failed for good, whatever attempts
remain. Nothing here does I/O but what a handler asks of its job.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import math
import random
import threading
import time
import traceback
from collections import deque
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    Awaitable,
    Callable,
    Coroutine,
    Generator,
    ItemsView,
    Iterator,
    Mapping,
    ValuesView,
)
from concurrent.futures import Future
from contextlib import AsyncContextDecorator, ContextDecorator
from dataclasses import dataclass
from enum import StrEnum
from multiprocessing.pool import AsyncResult
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from pinlaterd.client.client import AsyncClient, Client
from pinlaterd.model import CheckpointInfo, ClaimedJob, JobRecord, JobState

RetryPolicy = Callable[[int, BaseException], float | None]
Retries = RetryPolicy | Mapping[type[BaseException], RetryPolicy]
Redact = Callable[[str], str]

# What a store is asked to hold as a run-after stays within what each can hold.
LONGEST_DELAY_SECONDS = 366 * 86_400.0
MAX_ERROR_CHARS = 500
_MAX_PLACES = 3
# A claim is renewed when this part of its time-out is over, so that two renewals may fail.
_RENEW_AFTER = 1 / 3

# Nothing of these has run when a call returns them. Not every context manager is one of them: the
# answer to an HTTP request is a result. What `contextlib` makes of a function with `yield` is not.
_NOT_BEGUN = (Coroutine, Generator, AsyncGenerator, ContextDecorator, AsyncContextDecorator)
# What a handler may return by mistake.
_TO_BE_RUN = (
    *(*_NOT_BEGUN, Awaitable, AsyncIterable, Iterator),
    *(Future, AsyncResult, functools.partial),
)
_HOLDERS = (dict, list, tuple, set, frozenset, deque, ValuesView, ItemsView)

log = logging.getLogger(__name__)


# --- the job -----------------------------------------------------------------------------------


class RunningJob:
    """A job in the hands of its handler. Any thread may use it while the handler runs. The
    attributes are the worker's, but for `queue`, `body`, `client` (the worker's, as to enqueue what
    is to be done next) and `lost`; times are monotonic seconds."""

    __slots__ = (
        *("_tell", "began_at", "body", "claimed", "claimed_at", "client", "ended_at"),
        *("expires_at", "lost", "outcome", "queue", "renew_at"),
    )

    def __init__(self, queue: str, claimed: ClaimedJob, client: Client, now: float) -> None:
        self.queue = queue
        self.body = claimed.body  # after `save(body=…)` that one
        self.lost = False  # whether the claim has ended: another worker may run the job now
        self.claimed = claimed
        self.claimed_at = self.began_at = self.ended_at = now
        self.outcome: Outcome | None = None  # once it has ended
        self.client = client
        self._tell: Callable[[], None] | None = None
        self.renewed(now)

    def __repr__(self) -> str:
        return f"RunningJob({self.descriptor!r}, attempt={self.attempt})"

    @property
    def descriptor(self) -> str:
        return self.claimed.descriptor

    @property
    def claim_descriptor(self) -> str:
        return self.claimed.claim_descriptor

    @property
    def attempts_allowed(self) -> int:
        return self.claimed.attempts_allowed

    @property
    def attempts_remaining(self) -> int:
        """Return how many attempts are left, including this one."""
        return self.claimed.attempts_remaining

    @property
    def attempt(self) -> int:
        """Return the number of this attempt; 1 is the first."""
        return self.attempts_allowed - self.attempts_remaining + 1

    def raise_if_lost(self) -> None:
        """Raise ClaimLost if the claim has ended. Long handlers ask between their steps."""
        if self.lost:
            raise ClaimLost(f"the claim on {self.descriptor} has ended while it ran")

    def save(self, body: bytes | None = None, status: str | None = None) -> None:
        """Store progress: an attempt after this one begins with `body`; `status` is put in front of
        the custom status. It renews the claim, too.

        Returns once that is durable. Raises ClaimLost if the claim has ended (nothing was stored),
        and what Client.checkpoint raises. It blocks: in `async def` handlers await `asave`.
        """
        asked_at, progress = time.monotonic(), self._progress(body, status)
        self.client.checkpoint(self.queue, [progress])
        self._saved(self.client.lookup([self.descriptor]), asked_at, body)

    async def asave(self, body: bytes | None = None, status: str | None = None) -> None:
        """Store progress as `save` does, without blocking the event loop."""
        asked_at, progress = time.monotonic(), self._progress(body, status)
        await self.aclient.checkpoint(self.queue, [progress])
        self._saved(await self.aclient.lookup([self.descriptor]), asked_at, body)

    @property
    def aclient(self) -> AsyncClient:
        """Return the AsyncClient with the settings of `client` that all jobs in this loop share."""
        return self.client.of_running_loop()

    def _progress(self, body: bytes | None, status: str | None) -> CheckpointInfo:
        self.raise_if_lost()
        return CheckpointInfo(
            self.descriptor,
            new_body=body,
            prepend_custom_status=None if status is None else sayable(status),
            claim_descriptor=self.claim_descriptor,
        )

    def _saved(self, records: Mapping[str, JobRecord], asked_at: float, body: bytes | None) -> None:
        # A checkpoint whose claim has ended changes nothing and is no error.
        if not self.is_held(records.get(self.descriptor)):
            self.lose()
        self.raise_if_lost()
        self.renewed(asked_at)
        if body is not None:
            self.body = body

    # --- the worker's ---------------------------------------------------------------------

    def is_held(self, record: JobRecord | None) -> bool:
        """Tell whether the job, as the service knows it, is still held under this claim."""
        return (
            record is not None
            and record.state is JobState.IN_PROGRESS
            and record.claim_descriptor == self.claim_descriptor
        )

    def renewed(self, now: float) -> None:
        """Note that the server counts the claim's time-out from `now` on."""
        timeout_seconds = self.claimed.claim_timeout_seconds
        if timeout_seconds <= 0:  # it never ends
            self.expires_at = self.renew_at = math.inf
            return
        self.expires_at = now + timeout_seconds
        self.renew_at = now + timeout_seconds * _RENEW_AFTER

    def not_renewed(self, now: float) -> None:
        """Try again soon, since a renewal failed."""
        self.renew_at = now + self.claimed.claim_timeout_seconds * _RENEW_AFTER / 4

    def lose(self) -> None:
        """Note that the claim is gone, and call what `when_lost` was given."""
        self.lost = True
        tell = self._tell
        if tell is not None:
            tell()

    def when_lost(self, tell: Callable[[], None] | None) -> None:
        """Call `tell` once the claim is lost, from any thread, and at once if it is already."""
        self._tell = tell
        if self.lost and tell is not None:
            tell()


# --- retry policies ----------------------------------------------------------------------------


def _check(name: str, seconds: float) -> None:
    if not 0 <= seconds < math.inf:
        raise ValueError(f"{name}: expected seconds, 0 or more, got {seconds!r}")


def constant(seconds: float) -> RetryPolicy:
    """Wait for the same delay each time."""
    _check("seconds", seconds)
    return lambda _attempt, _error: seconds


def linear(seconds: float, *, most: float = 3600.0) -> RetryPolicy:
    """Wait `seconds` after the first attempt, twice that after the second, …, `most` at most."""
    _check("seconds", seconds)
    _check("most", most)
    return lambda attempt, _error: min(most, seconds * attempt)


def exponential(
    first: float = 1.0, *, factor: float = 2.0, most: float = 3600.0, jitter: bool = True
) -> RetryPolicy:
    """Wait `first` seconds after the first attempt, then `factor` times as long each time, up to
    `most`. With `jitter` a random time between half and all of that, so that jobs that failed
    together do not come back together."""
    _check("first", first)
    _check("most", most)
    if not 1 <= factor < math.inf:
        raise ValueError(f"factor: expected at least 1, got {factor!r}")

    def delay(attempt: int, _error: BaseException) -> float:
        try:
            longest = min(most, first * factor ** (attempt - 1))
        except OverflowError:
            longest = most
        return random.uniform(longest / 2, longest) if jitter else longest

    return delay


def never(_attempt: int, _error: BaseException) -> None:
    """Make no further attempt: the job has FAILED for good."""


DEFAULT_POLICY = exponential(1, most=300)


def delay_after(error: BaseException, attempt: int, retries: Retries) -> float | None:
    """Return the seconds until the next attempt, or None for none, by the policy of the error's
    class, or of the nearest base class that has one.

    If a policy fails, or returns what is no delay, the default takes its place: the error that it
    was asked about must not be hidden by one of its own.
    """
    try:
        policy = retries
        if isinstance(policy, Mapping):
            kinds = (kind for kind in type(error).__mro__ if kind in policy)
            policy = policy.get(next(kinds, BaseException), DEFAULT_POLICY)
        seconds = policy(attempt, error)
        if seconds is None:
            return None
        _check("delay", seconds)
        seconds = float(seconds)  # an array of one passes the check, and can not be rounded
    except BaseException:  # noqa: BLE001 - a user's code
        text = "the retry policy for %s failed; the default is used"
        log_guarded(log.exception, text, type(error).__name__)
        seconds = DEFAULT_POLICY(attempt, error)
        assert seconds is not None
    return min(seconds, LONGEST_DELAY_SECONDS)


# --- what a handler may raise --------------------------------------------------------------------


class Retry(Exception):
    """Raised by a handler: this attempt failed; try again, if an attempt is left, after
    `delay_seconds` (None: as the queue's retry policy says). `status` is appended to the job's
    custom status."""

    def __init__(self, delay_seconds: float | None = None, status: str = "") -> None:
        super().__init__(delay_seconds, status)
        _check_delay(delay_seconds)
        _check_type("status", status, str)
        self.delay_seconds = delay_seconds
        self.status = status


class Discard(Exception):
    """Raised by a handler: the job has FAILED for good, whatever attempts remain. `reason` is
    appended to its custom status."""

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason)
        _check_type("reason", reason, str)
        self.reason = reason


class Later(Exception):
    """Raised by a handler: go on at another time, at no attempt's cost.

    Either after `delay_seconds`, or at `run_after_ms` (since the epoch). `body` replaces the job's,
    `status` is put in front of its custom status, and `attempts` becomes both the attempts allowed
    and the attempts remaining; None leaves them as they are.
    """

    def __init__(
        self,
        delay_seconds: float | None = None,
        *,
        run_after_ms: int | None = None,
        body: bytes | None = None,
        status: str = "",
        attempts: int | None = None,
    ) -> None:
        super().__init__(delay_seconds, run_after_ms, body, status, attempts)
        if (delay_seconds is None) == (run_after_ms is None):
            raise ValueError("Later: expected either delay_seconds or run_after_ms")
        _check_delay(delay_seconds)
        _check_type("run_after_ms", run_after_ms, int, optional=True)
        _check_type("body", body, bytes, optional=True)
        _check_type("status", status, str)
        _check_type("attempts", attempts, int, optional=True)
        if attempts is not None and attempts < 1:
            raise ValueError(f"attempts: expected at least 1, got {attempts}")
        self.delay_seconds = delay_seconds
        self.run_after_ms = run_after_ms
        self.body = body
        self.status = status
        self.attempts = attempts


class ClaimLost(Exception):
    """The claim on a job has ended while its handler ran: another worker may run the job now, and
    what the handler returns or raises will change nothing about it any more."""


# --- outcomes ------------------------------------------------------------------------------------


class Ending(StrEnum):
    """The ways in which a run can end for its job."""

    SUCCEEDED = "succeeded"
    RETRIED = "retried"  # the attempt failed; PENDING again
    FAILED = "failed"  # the last attempt failed
    DISCARDED = "discarded"  # FAILED for good
    POSTPONED = "postponed"  # PENDING again for later
    LOST = "lost"  # nothing: the claim was gone before
    HANDED_OVER = "handed_over"  # nothing yet: another program will report it under the claim


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a run, as hooks see it and as it is acknowledged. `delay_seconds` counts from when
    the service receives it (RETRIED, POSTPONED). `error` is what was raised, unless that was one of
    Retry, Discard, Later and ClaimLost."""

    ending: Ending
    status: str = ""
    delay_seconds: float = 0.0
    run_after_ms: int | None = None
    body: bytes | None = None
    attempts: int | None = None
    error: BaseException | None = None


SUCCEEDED = Outcome(Ending.SUCCEEDED)
LOST = Outcome(Ending.LOST)
HANDED_OVER = Outcome(Ending.HANDED_OVER)
# A job that goes back unbegun, or unfinished when the grace is over: PENDING at no attempt's cost.
RELEASED = Outcome(Ending.POSTPONED)


def unfinished(job: RunningJob) -> Outcome:
    """Return what becomes of a job that its holder gives up, and may have begun: it is released;
    one with a single attempt has failed, as it must not be handed out again."""
    if job.attempts_allowed > 1:
        return RELEASED
    return Outcome(Ending.FAILED, "its worker ended before it had")


def returned(value: object) -> Outcome:
    """Return what becomes of a job by what its handler returned; TypeError if that is to be run."""
    if value is None:
        return SUCCEEDED
    _check_has_run(value)
    return Outcome(Ending.SUCCEEDED, sayable(str(value)))


def _check_has_run(value: object, levels: int = 3) -> None:
    """Raise TypeError if `value`, or what it holds down to some `levels`, has still to be run."""
    if isinstance(value, _TO_BE_RUN) or inspect.isroutine(value) or _is_not_started(value):
        raise TypeError(
            f"the handler returned a {type(value).__name__}, which nobody runs: await or call it "
            "in the handler, or make that `async def`"
        )
    if levels and isinstance(value, _HOLDERS):
        for part in value.values() if isinstance(value, dict) else value:
            _check_has_run(part, levels - 1)


def _is_not_started(value: object) -> bool:
    """Return whether a thread or a process, of the kind that only `start` begins, is not begun."""
    with contextlib.suppress(ValueError):  # of a process that was closed, as one that has ended is
        return isinstance(value, threading.Thread | BaseProcess) and value.ident is None
    return False


def check_has_begun(value: object) -> None:
    """Raise TypeError if `value` is what a hook's call has made instead of running the hook."""
    if value is not None and isinstance(value, _NOT_BEGUN):
        raise TypeError(f"it returned a {type(value).__name__}, which nobody runs")


def log_guarded(write: Callable[..., None], message: str, *values: object, **about: object) -> None:
    """Log with `write`, and never raise. An exception of a user's class may run any code when its
    traceback is formatted, and so may a filter of a log: that ends no thread of ours."""
    try:
        write(message, *values, **about)
    except BaseException:  # noqa: BLE001 - a user's code
        with contextlib.suppress(BaseException):
            log.error("%s (what was raised can't be shown)", message % values)


def raised(
    error: BaseException,
    job: RunningJob,
    retries: Retries,
    summary: ErrorSummary | None = None,
    redact: Redact | None = None,
) -> Outcome:
    """Return the outcome of a handler that raised `error`. `summary`: of `error`, where that was
    made in the process that has its traceback."""
    match error:
        case Retry():
            seconds = error.delay_seconds
            _check_delay(seconds)  # a subclass may have set it after ours had checked it
            if seconds is None:
                seconds = delay_after(error, job.attempt, retries)
            if seconds is None:  # by `never`, which is for errors
                seconds = DEFAULT_POLICY(job.attempt, error) or 0.0
            return Outcome(_failed(job), sayable(error.status), seconds)
        case Discard():
            return Outcome(Ending.DISCARDED, sayable(error.reason))
        case Later():
            return Outcome(
                Ending.POSTPONED,
                sayable(error.status),
                error.delay_seconds or 0.0,
                error.run_after_ms,
                error.body,
                error.attempts,
            )
        case ClaimLost():
            return LOST
    return broken_off(error, job, retries, summary, redact)


def _failed(job: RunningJob) -> Ending:
    return Ending.RETRIED if job.attempts_remaining > 1 else Ending.FAILED


def broken_off(
    error: BaseException,
    job: RunningJob,
    retries: Retries,
    summary: ErrorSummary | None = None,
    redact: Redact | None = None,
) -> Outcome:
    """Return the outcome of a handler that raised `error`, which says nothing about the job. Of a
    user's class it calls only `__str__`, guarded."""
    text = (summary or ErrorSummary.of(error)).text(redact)
    delay_seconds = delay_after(error, job.attempt, retries)
    if delay_seconds is None:
        return Outcome(Ending.DISCARDED, text, error=error)
    failed = _failed(job)
    if failed is Ending.RETRIED:  # what the next attempt has to say is appended to it
        text = text[: MAX_ERROR_CHARS - 2] + "; "
    return Outcome(failed, text, delay_seconds, error=error)


def sayable(text: str) -> str:
    """Remove halves of surrogate pairs, which UTF-8 can't express and messages may hold."""
    return text if text.isascii() else text.encode(errors="replace").decode()


class ErrorSummary(NamedTuple):
    """An exception as a custom status describes it."""

    class_name: str
    message: str | None  # None: it could not be had
    where: str

    @classmethod
    def of(cls, error: BaseException) -> ErrorSummary:
        """Summarize `error`; its message in full, so that it can be redacted before it is cut."""
        frames = traceback.extract_tb(handlers_frames(error))
        places = [f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}" for frame in frames]
        where = f" ({' < '.join(reversed(places[-_MAX_PLACES:]))})" if places else ""
        try:
            message = str(error)
        except BaseException:  # noqa: BLE001 - a user's exception may have code of its own
            message = None
        return cls(type(error).__name__, message, where[: MAX_ERROR_CHARS // 2])

    def text(self, redact: Redact | None = None) -> str:
        """Return `ValueError: no such address (smtp.py:30 in lookup < mail.py:12 in send)`, in at
        most MAX_ERROR_CHARS characters, with the message as `redact` leaves it."""
        message = self.message
        if redact is not None and message is not None:
            try:
                message = redact(message)
                _check_type("what redact returns", message, str)
            except BaseException:  # noqa: BLE001 - a user's code
                text = "redact failed; the text of a %s is left out"
                log_guarded(log.exception, text, self.class_name)
                message = None
        said = self.class_name if message is None else f"{self.class_name}: {message}"
        return sayable(said[: MAX_ERROR_CHARS - len(self.where)] + self.where)


def handlers_frames(error: BaseException) -> TracebackType | None:
    """Return the traceback of an error from the handler's first frame on: without our own."""
    # A user's class may have a property of this name.
    frames: TracebackType | None = vars(BaseException)["__traceback__"].__get__(error)
    while frames and Path(frames.tb_frame.f_code.co_filename).parent == Path(__file__).parent:
        frames = frames.tb_next
    return frames


def _check_type(name: str, value: object, expected: type, *, optional: bool = False) -> None:
    """Raise TypeError here, so that the handler's own line is in the status, not at the report."""
    if not isinstance(value, expected) and not (optional and value is None):
        raise TypeError(f"{name}: expected {expected.__name__}, got {value!r}")


def _check_delay(seconds: float | None) -> None:
    if seconds is None:
        return
    if not isinstance(seconds, int | float):
        raise TypeError(f"delay_seconds: expected a number, got {seconds!r}")
    if not 0 <= seconds <= LONGEST_DELAY_SECONDS:
        raise ValueError(
            f"delay_seconds: expected 0 to {LONGEST_DELAY_SECONDS:.0f}, got {seconds!r}"
        )
