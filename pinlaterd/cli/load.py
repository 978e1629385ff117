"""The load generator: the calls of several connections, measured, each kind by itself. What is
measured, and how, is in docs/commands.md.

A connection is a thread with a Caller; a pace says when it calls. Calls that are due (in a closed
loop: start) before the warm-up is over are made and not counted, anywhere. Rates are calls per
second; times are monotonic seconds.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import click

from pinlaterd.cli import command
from pinlaterd.cli.callers import Answered, Caller, LoadStopped, Plan
from pinlaterd.client import Client
from pinlaterd.errors import ConnectionFailed, DequeueRateLimited, PinLaterError, RequestError
from pinlaterd.lifecycle import StopSignal
from pinlaterd.stats import Histogram, percentiles

_TICK_SECONDS = 0.02
_LINE_EVERY_SECONDS = 1.0
# A service that is away is not asked at full speed. In an open loop the schedule goes on meanwhile.
_PAUSE_AFTER_ERROR_SECONDS = 0.2
# Counted for each connection that was given up: what becomes of its call is not known.
_GIVEN_UP = "GivenUp"
# A run that ends further behind than this had no connection free when calls were due.
_BEHIND_AFTER_SECONDS = 0.1

Prepare = Callable[[Client, StopSignal], None]


def run_load(
    plan: Plan,
    make_caller: Callable[[Client], Caller],
    prepare: Prepare = lambda _client, _stop: None,
) -> Load:
    """Make the load, from as many connections as wanted. `prepare` comes before."""
    stop = StopSignal()
    # Not before the figures are shown: one more signal shall not cost them.
    click.get_current_context().call_on_close(stop.close)
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(command.connect()) for _ in range(plan.concurrency)]
        clients[0].queue_names()  # fails at once if no service answers
        stop.catch()
        try:
            prepare(clients[0], stop)
            for client in clients:
                client.queue_names()  # connects: a connection's set-up is no call's latency
            load = Load(plan, [make_caller(client) for client in clients])
            load.run(stop)
        except LoadStopped as error:
            command.fail(str(error))
    return load


# --- when calls are due -----------------------------------------------------------------------


def even_arrivals(rate: float, seconds: float) -> Iterator[float]:
    """Yield seconds since the begin: one call after the other at the same distance."""
    due = (number / rate for number in itertools.count())
    return itertools.takewhile(lambda at: at < seconds, due)


class ClosedLoop:
    """The pace of a run: says to all its threads when to make calls. Here the next one when the
    last one is answered. `calls`: end after so many measured ones."""

    def __init__(self, calls: int | None = None) -> None:
        self._calls_left = math.inf if calls is None else calls
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._began_at = self._measured_from = math.inf

    def begin(self, began_at: float, measured_from: float) -> None:
        """Begin a run at `began_at`, whose warm-up is over at `measured_from`."""
        self._began_at, self._measured_from = began_at, measured_from

    def next_start(self) -> float | None:
        """Wait until a call is to be made; the time its latency counts from. None: no more."""
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
        """End the run: `next_start` returns None from here on, also to those that wait."""
        self._ended.set()

    def unstarted_seconds(self) -> Sequence[float]:
        """Return how long each due call has waited that was never started. Call it once, after all
        threads have ended."""
        return ()

    def facts(self) -> dict[str, object] | None:
        """Report for JSON how well the schedule was kept; None if there was none."""
        return None


class OpenLoop(ClosedLoop):
    """`rate` calls a second, for `seconds` after the warm-up, or until `calls` were measured."""

    def __init__(self, plan: Plan, rate: float) -> None:
        super().__init__(plan.calls)
        self._rate = rate
        measured = (plan.warm_up_seconds + at for at in even_arrivals(rate, plan.seconds))
        self._due = itertools.chain(
            even_arrivals(rate, plan.warm_up_seconds), itertools.islice(measured, plan.calls)
        )
        self._ends_with_schedule = plan.calls is not None
        self._ended_at = math.inf
        self._started = 0
        self._not_started: list[float] = []  # when calls were due that threads waited for
        self._unstarted_seconds: Sequence[float] = ()

    def next_start(self) -> float | None:
        with self._lock:
            after_begin = None if self._ended.is_set() else next(self._due, None)
        if after_begin is None:
            if not self._ends_with_schedule:
                self._ended.wait()  # the run lasts as long as it was told to
            return None
        due_at = self._began_at + after_begin
        self._ended.wait(max(0.0, due_at - time.monotonic()))
        with self._lock:
            if self._ended.is_set():
                self._not_started.append(due_at)
                return None
            self._started += due_at >= self._measured_from
        return due_at

    def end(self) -> None:
        with self._lock:
            self._ended_at = min(self._ended_at, time.monotonic())
            self._ended.set()

    def unstarted_seconds(self) -> Sequence[float]:
        never_taken = itertools.takewhile(
            lambda due_at: due_at <= self._ended_at, (self._began_at + at for at in self._due)
        )
        self._unstarted_seconds = [
            self._ended_at - due_at
            for due_at in itertools.chain(self._not_started, never_taken)
            if self._measured_from <= due_at <= self._ended_at
        ]
        return self._unstarted_seconds

    def facts(self) -> dict[str, object]:
        """Report the run. `behind_ms`: how long the oldest call that never started had been due."""
        behind_seconds = max(self._unstarted_seconds, default=0.0)
        return {
            "rate": self._rate,
            "due": self._started + len(self._unstarted_seconds),
            "started": self._started,
            "behind_ms": round(1000 * behind_seconds, 3),
            "kept_up": behind_seconds <= _BEHIND_AFTER_SECONDS,
        }


# --- figures ----------------------------------------------------------------------------------


class Figures:
    """The calls of one kind, or of a second. `slow_ms`: what takes longer is counted as slow."""

    def __init__(self, slow_ms: float = math.inf) -> None:
        self.began_at = time.monotonic()
        self.calls = self.jobs = self.slow = 0
        self.errors: Counter[str] = Counter()
        self._slow_ms = slow_ms
        self._latency_ms = Histogram()

    def answered(self, answer: Answered, seconds: float) -> None:
        self.calls += 1
        self.jobs += answer.jobs
        if not answer.waited:
            self.took(seconds)

    def took(self, seconds: float) -> None:
        """Count a latency; also of a call that never started, which takes this long at least."""
        self._latency_ms.add(seconds * 1000)
        self.slow += seconds * 1000 > self._slow_ms

    def facts(self, seconds: float, shown: dict[str, float]) -> dict[str, object]:
        """Report for JSON, in a run of `seconds`, with the `shown` percentiles by their names."""
        seconds = max(seconds, 1e-9)
        values = percentiles(self._latency_ms, tuple(shown.values()))
        return {
            "calls": self.calls,
            "jobs": self.jobs,
            "calls_per_second": round(self.calls / seconds, 1),
            "jobs_per_second": round(self.jobs / seconds, 1),
            **{name: round(value, 3) for name, value in zip(shown, values, strict=True)},
            "errors": dict(self.errors),
        }

    @property
    def max_ms(self) -> float:
        return round(max(0.0, self._latency_ms.maximum), 3)

    def line(self, seconds: float) -> str:
        """Report for people."""
        facts = self.facts(seconds, {"p50_ms": 0.5, "p99_ms": 0.99})
        errors = ", ".join(f"{count} {name}" for name, count in self.errors.items()) or "0"
        return (
            f"{facts['calls_per_second']:>10,} calls/s  {facts['jobs_per_second']:>12,} jobs/s  "
            f"p50 {facts['p50_ms']:>8} ms  p99 {facts['p99_ms']:>8} ms  errors {errors}"
        )


# --- a run ------------------------------------------------------------------------------------


class Load:
    """One run, one thread a caller; once it has ended, its measured part in figures.

    `left_claimed`: why claims could not be ended, of each connection where they could not.
    """

    def __init__(self, plan: Plan, callers: Sequence[Caller]) -> None:
        self._plan = plan
        self._callers = callers
        self.pace = ClosedLoop(plan.calls) if plan.rate is None else OpenLoop(plan, plan.rate)
        self.kinds = self._new_figures()
        self.seconds = 0.0
        self.ran_out = False
        self.left_claimed: list[PinLaterError | ConnectionFailed] = []
        self._lock = threading.Lock()
        self._counted = self._new_figures()
        self._last_second = Figures()
        self._measured_from = math.inf
        self._ended_at: float | None = None  # when the last call was answered
        self._calling = len(callers)  # connections that may make another call
        self._fatal: Exception | None = None

    def _new_figures(self) -> dict[str, Figures]:
        return {kind: Figures(self._plan.slow_ms) for kind in self._callers[0].kinds}

    @property
    def has_errors(self) -> bool:
        return bool(self.left_claimed) or any(figures.errors for figures in self.kinds.values())

    def run(self, stop: StopSignal) -> None:
        """Warm up, and measure, until it is told to stop or the plan is carried out. Raises the
        first error after which there is no going on.

        When asked to stop, the calls in flight and the last acks are waited for; when asked again,
        they are given up, and counted as errors."""
        running = [
            threading.Thread(target=self._run_connection, args=(caller,), daemon=True)
            for caller in self._callers
        ]
        began_at = time.monotonic()
        self._measured_from = began_at + self._plan.warm_up_seconds
        self.pace.begin(began_at, self._measured_from)
        for thread in running:
            thread.start()
        show, stopping, is_told = self._plan.tell, False, False
        while running and not stop.insisted:
            if stopping and show is not None and not is_told:
                is_told = True
                show("waits for the calls in flight; interrupt it again to abandon them")
            stopping = stop.requested
            left_seconds = self._measured_from + self._plan.seconds - time.monotonic()
            if left_seconds <= 0 or stopping:
                self.pace.end()
            running[0].join(min(_TICK_SECONDS, left_seconds) if left_seconds > 0 else _TICK_SECONDS)
            running = [thread for thread in running if thread.is_alive()]
            if show is not None:
                self._show_second(show)
        if self._fatal is not None:
            raise self._fatal
        self._conclude(given_up=len(running))

    def _conclude(self, *, given_up: int) -> None:
        """Keep the figures as they are now, whatever a connection that was given up does later."""
        self.seconds = max(0.0, (self._ended_at or time.monotonic()) - self._measured_from)
        with self._lock:
            self.kinds, self._counted = self._counted, self._new_figures()
        kinds = list(self.kinds.values())
        if given_up:
            kinds[0].errors[_GIVEN_UP] += given_up
        # Calls that were due and never started have waited, too: leaving them out would make an
        # overloaded service look fast. The kinds take turns, so each gets its share of them.
        for number, seconds in enumerate(self.pace.unstarted_seconds()):
            kinds[number % len(kinds)].took(seconds)

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
            while (counts_from := self.pace.next_start()) is not None:
                if not self._call_once(caller, counts_from):
                    self.ran_out = True
                    break
        except (LoadStopped, PinLaterError, ConnectionFailed, OSError) as error:
            self._fatal = self._fatal or error
            self.pace.end()
        with self._lock:
            self._calling -= 1
            if not self._calling:
                self._ended_at = time.monotonic()
        try:
            caller.finish()
        except (PinLaterError, ConnectionFailed) as error:
            self.left_claimed.append(error)

    def _call_once(self, caller: Caller, counts_from: float) -> bool:
        """Make one call and record its result, or a transient error. Return False once nothing is
        left to do."""
        kind = caller.kind
        is_measured = counts_from >= self._measured_from
        try:
            answer = caller.call()
        except (PinLaterError, ConnectionFailed) as error:
            if isinstance(error, RequestError) and not isinstance(error, DequeueRateLimited):
                raise
            with self._lock:
                self._last_second.errors[name_of(error)] += 1
                if is_measured:
                    self._counted[kind].errors[name_of(error)] += 1
            time.sleep(_PAUSE_AFTER_ERROR_SECONDS)
            return True
        if answer is None:
            return False
        seconds = time.monotonic() - counts_from
        with self._lock:
            self._last_second.answered(answer, seconds)
            if is_measured:
                self._counted[kind].answered(answer, seconds)
        return True


def name_of(error: PinLaterError | ConnectionFailed) -> str:
    """Return the name under which the error is counted."""
    return error.code.name if isinstance(error, PinLaterError) else type(error).__name__
