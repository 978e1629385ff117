"""Retry policies: how long a job waits after an attempt that failed.

A policy is any function of the attempt that failed (1 is the first) and the error, which returns
the seconds until the next attempt, or None: the job has failed for good, whatever attempts remain.

    constant(30)                       30 s each time
    linear(10, most=60)                10, 20, … 60 s
    exponential(1, most=300)           about 1, 2, 4, … 300 s
    never                              no further attempt
    {ConnectionError: exponential(1), ValueError: never}      by the class of the error

Everything here is pure but for the jitter, and needs the standard library only.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Callable, Mapping

RetryPolicy = Callable[[int, BaseException], float | None]
Retries = RetryPolicy | Mapping[type[BaseException], RetryPolicy]

# What a store is asked to hold as a run-after stays within what each can hold.
LONGEST_DELAY_SECONDS = 366 * 86_400.0

log = logging.getLogger(__name__)


def _check(name: str, seconds: float) -> None:
    if not 0 <= seconds < math.inf:
        raise ValueError(f"{name}: expected seconds, 0 or more, got {seconds!r}")


def constant(seconds: float) -> RetryPolicy:
    """The same delay each time."""
    _check("seconds", seconds)
    return lambda _attempt, _error: seconds


def linear(seconds: float, *, most: float = 3600.0) -> RetryPolicy:
    """`seconds` after the first attempt, twice that after the second, …, `most` at most."""
    _check("seconds", seconds)
    _check("most", most)
    return lambda attempt, _error: min(most, seconds * attempt)


def exponential(
    first: float = 1.0, *, factor: float = 2.0, most: float = 3600.0, jitter: bool = True
) -> RetryPolicy:
    """`first` seconds after the first attempt, then `factor` times as long each time, up to `most`.

    With `jitter` the delay is a random one between a half and the whole of that, so that jobs that
    failed together do not come back together.
    """
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
    """No further attempt: the job has FAILED for good."""


DEFAULT_POLICY = exponential(1, most=300)


def policy_for(error: BaseException, retries: Retries) -> RetryPolicy:
    """The policy of the error's class, or of the nearest base class that has one."""
    if not isinstance(retries, Mapping):
        return retries
    for kind in type(error).__mro__:
        if kind in retries:
            return retries[kind]
    return DEFAULT_POLICY


def delay_after(error: BaseException, attempt: int, retries: Retries) -> float | None:
    """Seconds until the next attempt, or None for no further one.

    A policy that fails, or returns what is no delay, is logged, and the default takes its place:
    the error that it was asked about must not be hidden by one of its own.
    """
    try:
        seconds = policy_for(error, retries)(attempt, error)
        if seconds is None:
            return None
        _check("delay", seconds)
    except Exception:
        log.exception("the retry policy for %s failed; the default is used", type(error).__name__)
        seconds = DEFAULT_POLICY(attempt, error)
        assert seconds is not None
    return min(seconds, LONGEST_DELAY_SECONDS)
