"""When the calls of `pinlater bench` start: as fast as they are answered, or by a schedule.

In a closed loop a connection makes its next call once the last is answered: while the service
stands still, nothing is asked of it, and nothing is measured. In an open loop calls are due
whatever became of those before, as they are with users who know nothing of each other. Latency
counts from when a call was due, so that a call which found all connections busy has waited. Calls
that were due and had not started when the run ended have waited until then.

A run begins with its warm-up: calls that are due (in a closed loop: start) before it is over are
made and not counted, anywhere. Rates are calls per second; times are monotonic seconds.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from random import Random
from typing import Final, Protocol

# What a thread takes to wake up on an idle machine is not late.
LATE_AFTER_SECONDS = 0.001
# A run that ends further behind than this had no connection free when calls were due.
BEHIND_AFTER_SECONDS = 0.1


# When calls are due: seconds since the begin of `seconds`, in rising order, at a rate.
Arrivals = Callable[[float, float], Iterator[float]]


def even_arrivals(rate: float, seconds: float) -> Iterator[float]:
    """One call after the other at the same distance."""
    due = (number / rate for number in itertools.count())
    return itertools.takewhile(lambda at: at < seconds, due)


def poisson_arrivals(rate: float, seconds: float) -> Iterator[float]:
    """As callers come that know nothing of each other: sometimes several at once."""
    chance = Random()
    gaps = (chance.expovariate(rate) for _ in itertools.count())
    return itertools.takewhile(lambda at: at < seconds, itertools.accumulate(gaps))


ARRIVALS: Final[Mapping[str, Arrivals]] = {
    "poisson": poisson_arrivals,
    "even": even_arrivals,
}


class Pace(Protocol):
    """Says to all threads of a run when to make calls."""

    def begin(self, began_at: float, measured_from: float) -> None:
        """The run began at `began_at`; its warm-up is over at `measured_from`."""
        ...

    def next_start(self) -> float | None:
        """Wait until a call is to be made; the time its latency counts from. None: no more."""
        ...

    def end(self) -> None:
        """The run ends now: `next_start` returns None from here on, also to those that wait."""
        ...


class ClosedLoop:
    """The next call when the last one is answered. `calls`: end after so many measured ones."""

    def __init__(self, calls: int | None = None) -> None:
        self._calls_left = math.inf if calls is None else calls
        self._lock = threading.Lock()
        self._measured_from = math.inf
        self._ended = threading.Event()

    def begin(self, began_at: float, measured_from: float) -> None:
        self._measured_from = measured_from

    def next_start(self) -> float | None:
        if self._ended.is_set():
            return None
        now = time.monotonic()
        if now >= self._measured_from:
            with self._lock:
                if self._calls_left == 0:
                    return None
                self._calls_left -= 1
        return now

    def end(self) -> None:
        self._ended.set()


@dataclass(frozen=True)
class Punctuality:
    """How well a schedule was kept. `waited_seconds`: of each call that never started."""

    due: int
    started: int
    late_all_busy: int
    late_to_wake: int
    latest_seconds: float
    waited_seconds: tuple[float, ...]

    @property
    def behind_seconds(self) -> float:
        """How long the oldest call that never started had been due."""
        return max(self.waited_seconds, default=0.0)

    @property
    def kept_up(self) -> bool:
        return self.behind_seconds <= BEHIND_AFTER_SECONDS


class OpenLoop:
    """`rate` calls a second, for `seconds` after the warm-up, or until `calls` were measured."""

    def __init__(
        self,
        arrivals: Arrivals,
        rate: float,
        *,
        warm_up_seconds: float,
        seconds: float,
        calls: int | None = None,
    ) -> None:
        measured = (warm_up_seconds + at for at in arrivals(rate, seconds))
        self._due = itertools.chain(
            arrivals(rate, warm_up_seconds), itertools.islice(measured, calls)
        )
        self._ends_with_schedule = calls is not None
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._began_at = self._measured_from = self._ended_at = math.inf
        self._started = 0
        self._given_back: list[float] = []
        self._late_all_busy = self._late_to_wake = 0
        self._latest_seconds = 0.0

    def begin(self, began_at: float, measured_from: float) -> None:
        self._began_at, self._measured_from = began_at, measured_from

    def next_start(self) -> float | None:
        due_at = self._take()
        if due_at is None:
            if not self._ends_with_schedule:
                self._ended.wait()  # the run lasts as long as it was told to
            return None
        early_seconds = due_at - time.monotonic()
        if early_seconds > 0:
            self._ended.wait(early_seconds)
        with self._lock:
            if self._ended.is_set():
                self._given_back.append(due_at)
                return None
            if due_at >= self._measured_from:
                self._started += 1
                self._note_lateness(time.monotonic() - due_at, had_to_wait=early_seconds > 0)
        return due_at

    def end(self) -> None:
        with self._lock:
            self._ended_at = min(self._ended_at, time.monotonic())
            self._ended.set()

    def punctuality(self) -> Punctuality:
        """Once all threads have ended."""
        never_taken = itertools.takewhile(
            lambda due_at: due_at <= self._ended_at, (self._began_at + at for at in self._due)
        )
        waited = tuple(
            self._ended_at - due_at
            for due_at in itertools.chain(self._given_back, never_taken)
            if self._measured_from <= due_at <= self._ended_at
        )
        return Punctuality(
            due=self._started + len(waited),
            started=self._started,
            late_all_busy=self._late_all_busy,
            late_to_wake=self._late_to_wake,
            latest_seconds=self._latest_seconds,
            waited_seconds=waited,
        )

    def _take(self) -> float | None:
        with self._lock:
            after_begin = None if self._ended.is_set() else next(self._due, None)
            return None if after_begin is None else self._began_at + after_begin

    def _note_lateness(self, late_seconds: float, *, had_to_wait: bool) -> None:
        """A thread that waited for the time and is late was woken late; one that came late had
        been busy with another call, as had all others."""
        self._latest_seconds = max(self._latest_seconds, late_seconds)
        if late_seconds > LATE_AFTER_SECONDS:
            if had_to_wait:
                self._late_to_wake += 1
            else:
                self._late_all_busy += 1
