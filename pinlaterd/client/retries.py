"""When a job that failed is tried again: policies for `Handlers.queue(retry=...)`.

A policy is any function of the attempt that failed (1 is the first) and its exception. It returns
the seconds to wait, or None to give the job up. Pure, but for the jitter's random numbers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

RetryPolicy = Callable[[int, BaseException], float | None]
RetryRule = RetryPolicy | Mapping[type[BaseException], RetryPolicy]

# Beyond this many doublings every delay is longer than any `most` in use.
_MOST_STEPS = 64


def constant(seconds: float) -> RetryPolicy:
    """Always the same delay."""
    return lambda _attempt, _error: seconds


def linear(seconds: float, *, most: float = 3600.0) -> RetryPolicy:
    """`seconds` after the first attempt, twice as many after the second, …, up to `most`."""
    return lambda attempt, _error: min(most, seconds * attempt)


def exponential(
    first: float = 1.0, *, factor: float = 2.0, most: float = 3600.0, jitter: bool = True
) -> RetryPolicy:
    """`first` seconds after the first attempt, each time `factor` times as many, up to `most`.

    With `jitter` the delay is a random one between a half and the whole of that, so that jobs that
    failed together do not come back together ("equal jitter": Brooker, Exponential Backoff And
    Jitter, 2015).
    """

    def policy(attempt: int, _error: BaseException) -> float:
        delay = min(most, first * factor ** min(attempt - 1, _MOST_STEPS))
        return random.uniform(delay / 2, delay) if jitter else delay

    return policy


def never(_attempt: int, _error: BaseException) -> None:
    """The job has failed for good, whatever attempts it has left."""


def policy_for(rule: RetryRule, error: BaseException) -> RetryPolicy:
    """The policy of the exception's class, or of its nearest base class that has one."""
    if not isinstance(rule, Mapping):
        return rule
    for kind in type(error).__mro__:
        if kind in rule:
            return rule[kind]
    return DEFAULT


DEFAULT = exponential(1.0, most=300.0)
