"""The load generator: the calls of several connections, measured, each kind by itself.

A connection is a thread with a caller. The pace says when it calls; calls of the warm-up are made
and not counted. Counts, slow calls and maxima are exact; percentiles are those of the histogram.
Latencies are those of calls that did not wait for jobs to come.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple, Protocol

from pinlaterd.cli.pace import Pace
from pinlaterd.errors import (
    ConnectionFailed,
    DequeueRateLimited,
    PinLaterError,
    RequestError,
)
from pinlaterd.lifecycle import StopSignal
from pinlaterd.stats.histogram import Histogram, percentiles

_TICK_SECONDS = 0.02
_LINE_EVERY_SECONDS = 1.0
# A service that is away is not asked at full speed. In an open loop the schedule goes on meanwhile.
_PAUSE_AFTER_ERROR_SECONDS = 0.2
# Counted for each connection that was given up: what becomes of its call is not known.
_GIVEN_UP = "GivenUp"


class Kind(StrEnum):
    """A kind of call that is measured by itself."""

    ENQUEUE = "enqueue"
    DEQUEUE = "dequeue"
    ACK = "ack"


class LoadStopped(Exception):
    """An error after which the load can't go on."""


class OutOfJobs(Exception):
    """A dequeue brought nothing, and nothing was pending."""


class Answered(NamedTuple):
    """One call's result: jobs moved, and whether it waited for them to come."""

    jobs: int
    waited: bool = False


class Caller(Protocol):
    """The calls of one connection."""

    kind: Kind  # of the call that comes next

    def call(self) -> Answered | None:
        """Make it; None if nothing is left to do. Raises OutOfJobs, LoadStopped."""
        ...

    def finish(self) -> None:
        """End the claims that there still are; not measured."""
        ...


class Figures:
    """The calls of one kind, or of a second. `slow_ms`: what takes longer is counted as slow."""

    def __init__(self, slow_ms: float = math.inf) -> None:
        self.began_at = time.monotonic()
        self.calls = 0
        self.jobs = 0
        self.slow = 0
        self.errors: Counter[str] = Counter()
        self._slow_ms = slow_ms
        self._latency_ms = Histogram()

    def answered(self, answer: Answered, seconds: float) -> None:
        self.calls += 1
        self.jobs += answer.jobs
        if not answer.waited:
            self.took(seconds)

    def took(self, seconds: float) -> None:
        """A latency; also of a call that never started, which takes this long at least."""
        self._latency_ms.add(seconds * 1000)
        self.slow += seconds * 1000 > self._slow_ms

    def facts(self, seconds: float, shown: dict[str, float]) -> dict[str, object]:
        """For JSON, in a run of `seconds`, with the `shown` percentiles by their names."""
        seconds = max(seconds, 1e-9)
        values = percentiles(self._latency_ms.data(), tuple(shown.values()))
        return {
            "calls": self.calls,
            "jobs": self.jobs,
            "calls_per_second": round(self.calls / seconds, 1),
            "jobs_per_second": round(self.jobs / seconds, 1),
            **{name: round(value, 3) for name, value in zip(shown, values, strict=True)},
        }

    @property
    def max_ms(self) -> float:
        return round(self._latency_ms.data()["maximum"], 3)

    def line(self, seconds: float) -> str:
        """For people."""
        facts = self.facts(seconds, {"p50_ms": 0.5, "p99_ms": 0.99})
        errors = ", ".join(f"{count} {name}" for name, count in self.errors.items()) or "0"
        return (
            f"{facts['calls_per_second']:>10,} calls/s  {facts['jobs_per_second']:>12,} jobs/s  "
            f"p50 {facts['p50_ms']:>8} ms  p99 {facts['p99_ms']:>8} ms  errors {errors}"
        )


@dataclass(frozen=True)
class Outcome:
    """A run's figures, of its measured part. `cpu_share`: of one CPU, taken by this process.

    `left_claimed`: why claims could not be ended, of each connection where they could not.
    """

    seconds: float
    cpu_share: float
    ran_out: bool
    left_claimed: Sequence[PinLaterError | ConnectionFailed]
    kinds: dict[Kind, Figures]

    @property
    def has_errors(self) -> bool:
        return bool(self.left_claimed) or any(figures.errors for figures in self.kinds.values())


class _Meter:
    """Wall and CPU time since the measured part began, until its calls had ended."""

    def __init__(self, measured_from: float) -> None:
        self._measured_from = measured_from
        self._cpu_from: tuple[float, float] | None = None
        self._ended: tuple[float, float] | None = None

    def look(self) -> None:
        """To be called often: the CPU time before the first look after the warm-up is not seen."""
        if self._cpu_from is None and time.monotonic() >= self._measured_from:
            self._cpu_from = time.monotonic(), time.process_time()

    def end(self) -> None:
        self._ended = self._ended or (time.monotonic(), time.process_time())

    def read(self) -> tuple[float, float]:
        """Seconds, and the share of a CPU. 0.0 if the warm-up was not over."""
        assert self._ended is not None
        ended_at, cpu_seconds = self._ended
        seconds = max(0.0, ended_at - self._measured_from)
        if self._cpu_from is None or ended_at <= self._cpu_from[0]:
            return seconds, 0.0
        looked_at, cpu_before = self._cpu_from
        return seconds, (cpu_seconds - cpu_before) / (ended_at - looked_at)


class Load:
    """One run, one thread a caller."""

    def __init__(
        self,
        callers: Sequence[Caller],
        kinds: Iterable[Kind],
        pace: Pace,
        *,
        slow_ms: float = math.inf,
    ) -> None:
        self._callers = callers
        self._pace = pace
        self._lock = threading.Lock()
        self._kinds = {kind: Figures(slow_ms) for kind in kinds}
        self._last_second = Figures()
        self._measured_from = math.inf
        self._meter = _Meter(math.inf)
        self._calling = len(callers)  # connections that may make another call
        self._ran_out = False
        self._left_claimed: list[PinLaterError | ConnectionFailed] = []
        self._fatal: Exception | None = None

    def run(
        self,
        *,
        warm_up_seconds: float = 0.0,
        seconds: float = math.inf,
        stop: StopSignal,
        show: Callable[[str], None] | None = None,
    ) -> Outcome:
        """Warm up, and measure for `seconds`, or until stopped or the pace ends. `show` gets a line
        a second, of the warm-up too. Raises the first error after which there is no going on.

        When asked to stop, the calls in flight and the last acks are waited for; when asked again,
        they are given up, and counted as errors."""
        threads = [
            threading.Thread(target=self._run_connection, args=(caller,), daemon=True)
            for caller in self._callers
        ]
        self._last_second = Figures()
        began_at = time.monotonic()
        self._measured_from = began_at + warm_up_seconds
        self._meter = _Meter(self._measured_from)
        self._pace.begin(began_at, self._measured_from)
        for thread in threads:
            thread.start()
        running = threads
        stopping = is_told = False
        while running and not stop.insisted:
            self._meter.look()
            if stopping and show is not None and not is_told:
                is_told = True
                show("waits for the calls in flight; interrupt it again to abandon them")
            stopping = stop.requested
            left_seconds = self._measured_from + seconds - time.monotonic()
            if left_seconds <= 0 or stopping:
                self._pace.end()
            running[0].join(min(_TICK_SECONDS, left_seconds) if left_seconds > 0 else _TICK_SECONDS)
            running = [thread for thread in running if thread.is_alive()]
            if show is not None:
                self._show_second(show)
        if self._fatal is not None:
            raise self._fatal
        return self._end(given_up=len(running))

    def _end(self, *, given_up: int) -> Outcome:
        """The figures as they are now, whatever a connection that was given up does later."""
        self._meter.end()
        with self._lock:
            kinds, self._kinds = self._kinds, {kind: Figures() for kind in self._kinds}
        if given_up:
            next(iter(kinds.values())).errors[_GIVEN_UP] += given_up
        return Outcome(*self._meter.read(), self._ran_out, self._left_claimed, kinds)

    def _show_second(self, show: Callable[[str], None]) -> None:
        seconds = time.monotonic() - self._last_second.began_at
        if seconds < _LINE_EVERY_SECONDS:
            return
        with self._lock:
            second, self._last_second = self._last_second, Figures()
        show(second.line(seconds))

    # --- a connection ---------------------------------------------------------------------------

    def _run_connection(self, caller: Caller) -> None:
        try:
            while (counts_from := self._pace.next_start()) is not None:
                if not self._call_once(caller, counts_from):
                    break
        except OutOfJobs:
            self._ran_out = True
            self._pace.end()
        except (LoadStopped, PinLaterError, ConnectionFailed, OSError) as error:
            self._fatal = self._fatal or error
            self._pace.end()
        with self._lock:
            self._calling -= 1
            if not self._calling:
                self._meter.end()
        try:
            caller.finish()
        except (PinLaterError, ConnectionFailed) as error:
            self._left_claimed.append(error)

    def _call_once(self, caller: Caller, counts_from: float) -> bool:
        """Make a call and count it, or an error that the next call may not meet. False if nothing
        was left to do."""
        kind = caller.kind
        is_measured = counts_from >= self._measured_from
        try:
            answer = caller.call()
        except (PinLaterError, ConnectionFailed) as error:
            if not _is_passing(error):
                raise
            with self._lock:
                self._last_second.errors[name_of(error)] += 1
                if is_measured:
                    self._kinds[kind].errors[name_of(error)] += 1
            time.sleep(_PAUSE_AFTER_ERROR_SECONDS)
            return True
        if answer is None:
            return False
        seconds = time.monotonic() - counts_from
        with self._lock:
            self._last_second.answered(answer, seconds)
            if is_measured:
                self._kinds[kind].answered(answer, seconds)
        return True


def _is_passing(error: PinLaterError | ConnectionFailed) -> bool:
    """Whether the next call may not meet it."""
    return not isinstance(error, RequestError) or isinstance(error, DequeueRateLimited)


def name_of(error: PinLaterError | ConnectionFailed) -> str:
    """What the error is counted as."""
    return error.code.name if isinstance(error, PinLaterError) else type(error).__name__
