"""Calls in threads, measured: how many, how fast, what went wrong, and a line a second.

An issuer makes the calls of one thread; the load says when. Latencies are those of calls that
did not wait for jobs to come.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from pinlaterd.errors import (
    ConnectionFailed,
    DequeueRateLimited,
    PinLaterError,
    RequestError,
)
from pinlaterd.lifecycle import StopSignal
from pinlaterd.stats.histogram import Histogram, percentiles

_TICK_SECONDS = 0.05
_LINE_EVERY_SECONDS = 1.0
_PAUSE_AFTER_ERROR_SECONDS = 0.2
# Counted for each thread that was given up: what becomes of its call is not known.
_GIVEN_UP = "GivenUp"


class LoadStopped(Exception):
    """An error after which the load can't go on."""


class Answered(NamedTuple):
    """One call's result: jobs moved, and whether it waited for them to come."""

    jobs: int
    waited: bool = False


class Issuer(Protocol):
    """One thread's calls."""

    def call(self) -> Answered | None:
        """Make one call; None if there is nothing left to do."""
        ...

    def finish(self) -> None:
        """Say what is left to say (acks) once no more calls are made."""
        ...


class Figures:
    """What a stretch of time held. The meter's lock guards it."""

    def __init__(self) -> None:
        self.began_at = time.monotonic()
        self.calls = 0
        self.jobs = 0
        self.errors: Counter[str] = Counter()
        self._latency_ms = Histogram()

    def answered(self, answer: Answered, seconds: float) -> None:
        self.calls += 1
        self.jobs += answer.jobs
        if not answer.waited:
            self._latency_ms.add(seconds * 1000)

    def facts(self) -> dict[str, object]:
        """For JSON."""
        seconds = max(time.monotonic() - self.began_at, 1e-9)
        p50_ms, p99_ms = percentiles(self._latency_ms.data(), (0.5, 0.99))
        return {
            "seconds": round(seconds, 3),
            "calls": self.calls,
            "jobs": self.jobs,
            "calls_per_second": round(self.calls / seconds, 1),
            "jobs_per_second": round(self.jobs / seconds, 1),
            "p50_ms": round(p50_ms, 3),
            "p99_ms": round(p99_ms, 3),
            "errors": dict(self.errors),
        }

    def line(self) -> str:
        """For people."""
        facts = self.facts()
        errors = ", ".join(f"{count} {name}" for name, count in self.errors.items()) or "0"
        return (
            f"{facts['calls_per_second']:>10,} calls/s  {facts['jobs_per_second']:>12,} jobs/s  "
            f"p50 {facts['p50_ms']:>8} ms  p99 {facts['p99_ms']:>8} ms  errors {errors}"
        )


def name_of_passing(error: PinLaterError | ConnectionFailed) -> str:
    """What an error that the next call may not meet is counted as. Raises any other."""
    if isinstance(error, RequestError) and not isinstance(error, DequeueRateLimited):
        raise error
    return error.code.name if isinstance(error, PinLaterError) else type(error).__name__


class Load:
    """Makes up to `num_queries` calls (None: until stopped), one thread an issuer."""

    def __init__(self, issuers: Sequence[Issuer], *, num_queries: int | None) -> None:
        self._issuers = issuers
        self._calls_left = num_queries
        self._lock = threading.Lock()
        self._stopping = False
        self._total = Figures()
        self._last_second = Figures()
        self._fatal: BaseException | None = None

    def run(self, show: Callable[[str], None] | None, stop: StopSignal) -> Figures:
        """Run to the end; `show` gets a line a second. Raises the first fatal error.

        When asked to stop, the calls in hand and the last acks are waited for; when asked again,
        they are given up, and counted as errors."""
        threads = [
            threading.Thread(target=self._issue, args=(issuer,), daemon=True)
            for issuer in self._issuers
        ]
        self._total = Figures()
        self._last_second = Figures()
        for thread in threads:
            thread.start()
        running = threads
        is_told = False
        while running and not stop.insisted:
            running[0].join(_TICK_SECONDS)
            running = [thread for thread in running if thread.is_alive()]
            if running and self._stopping and stop.requested and not is_told:
                is_told = True
                if show is not None:
                    show("waits for the calls in hand; interrupt it again to give them up")
            self._stopping = self._stopping or stop.requested
            second_over = time.monotonic() - self._last_second.began_at >= _LINE_EVERY_SECONDS
            if second_over and show is not None:
                self._show_second(show)
        if self._fatal is not None:
            raise self._fatal
        return self._end(given_up=len(running))

    def _end(self, *, given_up: int) -> Figures:
        """The figures as they are now, whatever a thread that was given up does later."""
        with self._lock:
            total, self._total = self._total, Figures()
        if given_up:
            total.errors[_GIVEN_UP] += given_up
        return total

    def _show_second(self, show: Callable[[str], None]) -> None:
        with self._lock:
            second, self._last_second = self._last_second, Figures()
        show(second.line())

    def _issue(self, issuer: Issuer) -> None:
        try:
            while self._take_turn():
                if not self._call_once(issuer):
                    break
            self._finish(issuer)
        except (LoadStopped, PinLaterError, ConnectionFailed, OSError) as error:
            self._fatal = self._fatal or error
            self._stopping = True

    def _take_turn(self) -> bool:
        with self._lock:
            if self._stopping or self._calls_left == 0:
                return False
            if self._calls_left is not None:
                self._calls_left -= 1
            return True

    def _call_once(self, issuer: Issuer) -> bool:
        """Make a call and count it, or its passing error."""
        began = time.perf_counter()
        try:
            answer = issuer.call()
        except (PinLaterError, ConnectionFailed) as error:
            self._count_passing(error)
            time.sleep(_PAUSE_AFTER_ERROR_SECONDS)
            return True
        if answer is None:
            return False
        seconds = time.perf_counter() - began
        with self._lock:
            self._total.answered(answer, seconds)
            self._last_second.answered(answer, seconds)
        return True

    def _finish(self, issuer: Issuer) -> None:
        try:
            issuer.finish()
        except (PinLaterError, ConnectionFailed) as error:
            self._count_passing(error)

    def _count_passing(self, error: PinLaterError | ConnectionFailed) -> None:
        """Count an error that the next call may not meet; raise any other."""
        name = name_of_passing(error)
        with self._lock:
            self._total.errors[name] += 1
            self._last_second.errors[name] += 1
