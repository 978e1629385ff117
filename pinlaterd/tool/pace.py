"""When the calls of `pinlater bench` start: as fast as they are answered, or by a schedule.

In a closed loop a connection makes its next call once the last is answered: while the service
stands still, nothing is asked of it, and nothing is measured. In an open loop calls are due at
even intervals, whatever became of those before, as they are with users who know nothing of each
other. Latency counts from when a call was due, so that a call which found all connections busy has
waited. Calls that were due and had not started when the run ended have waited until then.
Rates are calls per second; times are monotonic seconds.
"""

from __future__ import annotations

import itertools
import math
import threading
import time
from dataclasses import dataclass
from typing import Protocol

# What a thread takes to wake up on an idle machine is not late.
LATE_AFTER_SECONDS = 0.001
# A run that ends further behind than this had no connection free when calls were due.
BEHIND_AFTER_SECONDS = 0.1


class Pace(Protocol):
    """Says to all threads of a run when to make calls."""

    def begin(self) -> None:
        """The run starts now."""
        ...

    def next_start(self) -> float | None:
        """Wait until a call is to be made; the time its latency counts from. None: no more."""
        ...

    def end(self) -> None:
        """The run ends now: `next_start` returns None from here on, also to those that wait."""
        ...


class ClosedLoop:
    """The next call when the last one is answered."""

    def __init__(self) -> None:
        self._ended = threading.Event()

    def begin(self) -> None:
        pass

    def next_start(self) -> float | None:
        return None if self._ended.is_set() else time.monotonic()

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
    """`rate` calls a second, for `seconds`."""

    def __init__(self, rate: float, seconds: float) -> None:
        self._rate = rate
        self._calls = math.ceil(rate * seconds)
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._began_at = self._ended_at = math.inf
        self._next = 0
        self._started = 0
        self._given_back: list[float] = []
        self._late_all_busy = self._late_to_wake = 0
        self._latest_seconds = 0.0

    def begin(self) -> None:
        self._began_at = time.monotonic()

    def next_start(self) -> float | None:
        due_at = self._take()
        if due_at is None:
            self._ended.wait()  # the run lasts as long as it was told to
            return None
        early_seconds = due_at - time.monotonic()
        if early_seconds > 0:
            self._ended.wait(early_seconds)
        with self._lock:
            if self._ended.is_set():
                self._given_back.append(due_at)
                return None
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
            lambda due_at: due_at <= self._ended_at,
            (self._due_at(number) for number in range(self._next, self._calls)),
        )
        waited = tuple(
            self._ended_at - due_at
            for due_at in itertools.chain(self._given_back, never_taken)
            if due_at <= self._ended_at
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
            if self._ended.is_set() or self._next == self._calls:
                return None
            self._next += 1
            return self._due_at(self._next - 1)

    def _due_at(self, number: int) -> float:
        return self._began_at + number / self._rate

    def _note_lateness(self, late_seconds: float, *, had_to_wait: bool) -> None:
        """A thread that waited for the time and is late was woken late; one that came late had
        been busy with another call, as had all others."""
        self._latest_seconds = max(self._latest_seconds, late_seconds)
        if late_seconds > LATE_AFTER_SECONDS:
            if had_to_wait:
                self._late_to_wake += 1
            else:
                self._late_all_busy += 1
