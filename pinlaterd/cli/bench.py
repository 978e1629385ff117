"""What `pinlater bench` measures: the calls of several connections, each kind by itself.

A connection is a thread with a caller and a client of its own, connected before the run. The pace
says when it calls; calls of the warm-up are made and not counted. Counts, slow calls and maxima are
exact; percentiles are those of the histogram.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pinlaterd.cli.callers import Caller, Kind, OutOfJobs, StrangerFound
from pinlaterd.cli.load import Answered, Figures, name_of_passing
from pinlaterd.cli.pace import Pace
from pinlaterd.errors import ConnectionFailed, PinLaterError
from pinlaterd.lifecycle import StopSignal
from pinlaterd.stats.histogram import Histogram, percentiles

SHOWN_PERCENTILES = {"p50_ms": 0.5, "p90_ms": 0.9, "p99_ms": 0.99, "p99_9_ms": 0.999}
_TICK_SECONDS = 0.02
_LINE_EVERY_SECONDS = 1.0
# A service that is away is not asked at full speed. In an open loop the schedule goes on meanwhile.
_PAUSE_AFTER_ERROR_SECONDS = 0.2


class KindFigures:
    """The calls of one kind. `slow_ms`: what takes longer is counted as slow."""

    def __init__(self, slow_ms: float) -> None:
        self.calls = 0
        self.jobs = 0
        self.slow = 0
        self.errors: Counter[str] = Counter()
        self._slow_ms = slow_ms
        self._latency_ms = Histogram()

    def answered(self, jobs: int, seconds: float) -> None:
        self.calls += 1
        self.jobs += jobs
        self.waited(seconds)

    def waited(self, seconds: float) -> None:
        """A latency; also of a call that never started, which takes this long at least."""
        self._latency_ms.add(seconds * 1000)
        self.slow += seconds * 1000 > self._slow_ms

    def facts(self, seconds: float) -> dict[str, object]:
        """For JSON, in a run of `seconds`."""
        data = self._latency_ms.data()
        values = percentiles(data, tuple(SHOWN_PERCENTILES.values()))
        return {
            "calls": self.calls,
            "jobs": self.jobs,
            "calls_per_second": round(self.calls / seconds, 1),
            "jobs_per_second": round(self.jobs / seconds, 1),
            **{
                name: round(value, 3) for name, value in zip(SHOWN_PERCENTILES, values, strict=True)
            },
            "max_ms": round(data["maximum"], 3),
            "slow": self.slow,
            "errors": dict(self.errors),
        }


@dataclass(frozen=True)
class Outcome:
    """A run's figures, of its measured part. `cpu_share`: of one CPU, taken by this process.

    `left_claimed`: why claims could not be ended; None if all were.
    """

    seconds: float
    cpu_share: float
    ran_out: bool
    left_claimed: str | None
    kinds: dict[Kind, KindFigures]

    @property
    def has_errors(self) -> bool:
        return self.left_claimed is not None or any(
            figures.errors for figures in self.kinds.values()
        )


class _Meter:
    """Wall and CPU time since the measured part began."""

    def __init__(self, measured_from: float) -> None:
        self._measured_from = measured_from
        self._cpu_from: tuple[float, float] | None = None

    def look(self) -> None:
        """To be called often: the CPU time before the first look after the warm-up is not seen."""
        if self._cpu_from is None and time.monotonic() >= self._measured_from:
            self._cpu_from = time.monotonic(), time.process_time()

    def read(self) -> tuple[float, float]:
        """Seconds, and the share of a CPU. 0.0 if the warm-up is not over."""
        now, cpu_seconds = time.monotonic(), time.process_time()
        seconds = max(0.0, now - self._measured_from)
        if self._cpu_from is None or now <= self._cpu_from[0]:
            return seconds, 0.0
        looked_at, cpu_before = self._cpu_from
        return seconds, (cpu_seconds - cpu_before) / (now - looked_at)


class Bench:
    """One run, one thread a caller."""

    def __init__(
        self, callers: Sequence[Caller], kinds: Iterable[Kind], pace: Pace, *, slow_ms: float
    ) -> None:
        self._callers = callers
        self._pace = pace
        self._lock = threading.Lock()
        self._kinds = {kind: KindFigures(slow_ms) for kind in kinds}
        self._last_second = Figures()
        self._measured_from = math.inf
        self._ran_out = False
        self._fatal: Exception | None = None

    def run(
        self,
        *,
        warm_up_seconds: float,
        seconds: float,
        stop: StopSignal,
        show: Callable[[str], None] | None = None,
    ) -> Outcome:
        """Warm up, and measure for `seconds`, or until stopped or the pace ends; calls under way
        are finished. `show` gets a line a second, of the warm-up too. Raises the first error after
        which there is no going on."""
        threads = [
            threading.Thread(target=self._call_all, args=(caller,), daemon=True)
            for caller in self._callers
        ]
        self._last_second = Figures()
        began_at = time.monotonic()
        self._measured_from = began_at + warm_up_seconds
        meter = _Meter(self._measured_from)
        self._pace.begin(began_at, self._measured_from)
        for thread in threads:
            thread.start()
        running = threads
        while running:
            meter.look()
            left_seconds = self._measured_from + seconds - time.monotonic()
            if left_seconds <= 0 or stop.requested:
                self._pace.end()
            running[0].join(min(_TICK_SECONDS, left_seconds) if left_seconds > 0 else _TICK_SECONDS)
            running = [thread for thread in running if thread.is_alive()]
            if show is not None:
                self._show_second(show)
        measured_seconds, cpu_share = meter.read()
        left_claimed = self._end_claims()
        if self._fatal is not None:
            raise self._fatal
        return Outcome(measured_seconds, cpu_share, self._ran_out, left_claimed, self._kinds)

    def _end_claims(self) -> str | None:
        """What prevented it, if anything did: the figures are to be had all the same."""
        failure: str | None = None
        for caller in self._callers:
            try:
                caller.finish()
            except (PinLaterError, ConnectionFailed) as error:
                failure = failure or str(error)
        return failure

    def _show_second(self, show: Callable[[str], None]) -> None:
        if time.monotonic() - self._last_second.began_at < _LINE_EVERY_SECONDS:
            return
        with self._lock:
            second, self._last_second = self._last_second, Figures()
        show(second.line())

    def _call_all(self, caller: Caller) -> None:
        try:
            while (counts_from := self._pace.next_start()) is not None:
                self._call_once(caller, counts_from)
        except OutOfJobs:
            self._ran_out = True
            self._pace.end()
        except (StrangerFound, PinLaterError, OSError) as error:
            self._fatal = self._fatal or error
            self._pace.end()

    def _call_once(self, caller: Caller, counts_from: float) -> None:
        """Make a call and count it. An error that the next call may not meet is counted, too."""
        kind = caller.kind
        is_measured = counts_from >= self._measured_from
        try:
            jobs = caller.call()
        except (PinLaterError, ConnectionFailed) as error:
            name = name_of_passing(error)
            with self._lock:
                self._last_second.errors[name] += 1
                if is_measured:
                    self._kinds[kind].errors[name] += 1
            time.sleep(_PAUSE_AFTER_ERROR_SECONDS)
            return
        seconds = time.monotonic() - counts_from
        with self._lock:
            self._last_second.answered(Answered(jobs), seconds)
            if is_measured:
                self._kinds[kind].answered(jobs, seconds)
