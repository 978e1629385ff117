"""What `pinlater bench` measures: the calls of several connections, each kind by itself.

A connection is a thread with a client of its own, connected before the run. The pace says when
it calls. Counts, slow calls and maxima are exact; percentiles are those of the histogram.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from pinlaterd.client.client import Client
from pinlaterd.errors import ConnectionFailed, DequeueRateLimited, PinLaterError, RequestError
from pinlaterd.lifecycle import StopSignal
from pinlaterd.model import ClaimedJob, Job, JobState
from pinlaterd.stats.histogram import Histogram, percentiles
from pinlaterd.tool.load import Answered, Figures
from pinlaterd.tool.pace import Pace

SHOWN_PERCENTILES = {"p50_ms": 0.5, "p90_ms": 0.9, "p99_ms": 0.99, "p99_9_ms": 0.999}
_TICK_SECONDS = 0.02
_LINE_EVERY_SECONDS = 1.0
# A service that is away is not asked at full speed. In an open loop the schedule goes on meanwhile.
_PAUSE_AFTER_ERROR_SECONDS = 0.2


class Kind(StrEnum):
    """A kind of call that is measured by itself."""

    ENQUEUE = "enqueue"
    DEQUEUE = "dequeue"
    ACK = "ack"


class OutOfJobs(Exception):
    """A dequeue brought nothing, and nothing was pending."""


class Caller(Protocol):
    """The calls of one connection."""

    kind: Kind  # of the call that comes next

    def call(self) -> int:
        """Make it; the number of jobs it moved. Raises OutOfJobs."""
        ...

    def finish(self) -> None:
        """Acknowledge what is still claimed; not measured."""
        ...


class EnqueueCaller:
    """The same batch again and again: making up jobs must not be what is measured."""

    kind = Kind.ENQUEUE

    def __init__(self, client: Client, queue: str, jobs: Sequence[Job]) -> None:
        self._client = client
        self._queue = queue
        self._jobs = jobs

    def call(self) -> int:
        return len(self._client.enqueue(self._queue, self._jobs))

    def finish(self) -> None:
        pass


class DequeueCaller:
    """Dequeues, and acknowledges the jobs of the call before in the same call."""

    kind = Kind.DEQUEUE

    def __init__(self, client: Client, queue: str, batch_size: int) -> None:
        self._client = client
        self._queue = queue
        self._batch_size = batch_size
        self._claimed: list[ClaimedJob] = []

    def call(self) -> int:
        self._claimed = self._client.dequeue(
            self._queue, limit=self._batch_size, succeeded=self._claimed
        )
        # A dequeue may find none while the router has not yet heard of jobs just enqueued.
        if not self._claimed and self._client.count(self._queue, JobState.PENDING) == 0:
            raise OutOfJobs
        return len(self._claimed)

    def finish(self) -> None:
        if self._claimed:
            self._client.ack(self._queue, succeeded=self._claimed)


class CycleCaller:
    """A job's whole life in three calls: enqueue, dequeue, ack. One that fails is made again."""

    def __init__(self, client: Client, queue: str, jobs: Sequence[Job]) -> None:
        self.kind = Kind.ENQUEUE
        self._client = client
        self._queue = queue
        self._jobs = jobs
        self._claimed: list[ClaimedJob] = []

    def call(self) -> int:
        if self.kind is Kind.ENQUEUE:
            self._client.enqueue(self._queue, self._jobs)
            self.kind = Kind.DEQUEUE
            return len(self._jobs)
        if self.kind is Kind.DEQUEUE:
            self._claimed = self._client.dequeue(self._queue, limit=len(self._jobs))
            self.kind = Kind.ACK if self._claimed else Kind.ENQUEUE
            return len(self._claimed)
        return self._acknowledge()

    def finish(self) -> None:
        if self._claimed:
            self._acknowledge()

    def _acknowledge(self) -> int:
        self._client.ack(self._queue, succeeded=self._claimed)
        acknowledged, self._claimed = len(self._claimed), []
        self.kind = Kind.ENQUEUE
        return acknowledged


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
    """A run's figures. `cpu_seconds`: of this process, all threads."""

    seconds: float
    cpu_seconds: float
    ran_out: bool
    kinds: dict[Kind, KindFigures]

    @property
    def has_errors(self) -> bool:
        return any(figures.errors for figures in self.kinds.values())


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
        self._ran_out = False
        self._fatal: BaseException | None = None

    def run(
        self, seconds: float, stop: StopSignal, show: Callable[[str], None] | None = None
    ) -> Outcome:
        """Run for `seconds`, or until stopped; calls under way are finished. `show` gets a line a
        second. Raises the first error after which there is no going on."""
        threads = [
            threading.Thread(target=self._call_all, args=(caller,), daemon=True)
            for caller in self._callers
        ]
        self._last_second = Figures()
        self._pace.begin()
        began_at, cpu_began_at = time.monotonic(), time.process_time()
        for thread in threads:
            thread.start()
        running = threads
        while running:
            left_seconds = began_at + seconds - time.monotonic()
            if left_seconds <= 0 or stop.requested:
                self._pace.end()
            running[0].join(min(_TICK_SECONDS, left_seconds) if left_seconds > 0 else _TICK_SECONDS)
            running = [thread for thread in running if thread.is_alive()]
            if show is not None:
                self._show_second(show)
        ran_seconds, cpu_ended_at = time.monotonic() - began_at, time.process_time()
        if self._fatal is not None:
            raise self._fatal
        for caller in self._callers:
            caller.finish()
        return Outcome(ran_seconds, cpu_ended_at - cpu_began_at, self._ran_out, self._kinds)

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
        except (PinLaterError, OSError) as error:
            self._fatal = self._fatal or error
            self._pace.end()

    def _call_once(self, caller: Caller, counts_from: float) -> None:
        """Make a call and count it. An error that the next call may not meet is counted, too."""
        kind = caller.kind
        try:
            jobs = caller.call()
        except (PinLaterError, ConnectionFailed) as error:
            if isinstance(error, RequestError) and not isinstance(error, DequeueRateLimited):
                raise
            name = error.code.name if isinstance(error, PinLaterError) else type(error).__name__
            with self._lock:
                self._kinds[kind].errors[name] += 1
                self._last_second.errors[name] += 1
            time.sleep(_PAUSE_AFTER_ERROR_SECONDS)
            return
        seconds = time.monotonic() - counts_from
        with self._lock:
            self._kinds[kind].answered(jobs, seconds)
            self._last_second.answered(Answered(jobs), seconds)
