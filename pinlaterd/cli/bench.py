"""`pinlater bench`: its command lines, and the course of a run."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import click

from pinlaterd.cli.audit import bench_body
from pinlaterd.cli.bench_report import Report, Schedule
from pinlaterd.cli.callers import (
    Batches,
    BenchDequeueCaller,
    CycleCaller,
    EnqueueCaller,
    Taking,
    alike_batches,
    check_for_foreign_jobs,
)
from pinlaterd.cli.command_line import MAX_SECONDS, Amount, fail
from pinlaterd.cli.load import Caller, Kind, Load, LoadStopped, Outcome
from pinlaterd.cli.options import (
    body_bytes_option,
    load_options,
    num_queries_option,
    priority_option,
    queue_option,
    service_options,
    success_option,
    together,
)
from pinlaterd.cli.pace import ARRIVALS, ClosedLoop, OpenLoop, Punctuality
from pinlaterd.cli.rendering import print_json, printable
from pinlaterd.client.client import Client
from pinlaterd.lifecycle import ExitCode, StopSignal
from pinlaterd.model import Job
from pinlaterd.wording import how_many

_MAX_CALLS_PER_SECOND = 10_000.0  # more than one Python process can make
_DEFAULT_SECONDS = 10.0
# Connections stand before a run. This is for what else is slow at first: code that has not run yet,
# files that have not grown, hints that routers do not have.
_DEFAULT_WARM_UP_SECONDS = 0.5
_DEFAULT_ARRIVALS = "poisson"
_CLOSED_LOOP_FILL_CALLS = 20_000
_CLOSED_LOOP_FILL_JOBS_AT_MOST = 200_000
_FILL_CALL_JOBS = 1000
_FILL_CALL_BYTES = 1_000_000

_bench_options = together(
    click.option(
        "--slow-ms",
        type=Amount(MAX_SECONDS * 1000),
        default=100.0,
        show_default=True,
        help="Calls that take longer are counted as slow.",
    ),
    click.option("--create", is_flag=True, help="Make the queue if it does not exist."),
    load_options,
    click.option(
        "--arrivals",
        type=click.Choice(list(ARRIVALS)),
        help="With --rate: calls are due at random, as those of callers who know nothing of each "
        f"other, or at even intervals  [default: {_DEFAULT_ARRIVALS}]",
    ),
    click.option(
        "--rate",
        type=Amount(_MAX_CALLS_PER_SECOND),
        metavar="R",
        help="Open loop: R calls a second over all connections, by schedule  [default: closed "
        "loop, as fast as they are answered]",
    ),
    num_queries_option(None, "until stopped. Those of the warm-up are not among them"),
    click.option(
        "--seconds",
        type=Amount(MAX_SECONDS),
        help="How long to measure. Ctrl-C ends it sooner  "
        f"[default: {_DEFAULT_SECONDS:g}, unless --num-queries says when to end]",
    ),
    click.option(
        "--warm-up",
        "warm_up_seconds",
        type=Amount(MAX_SECONDS, least=0),
        default=_DEFAULT_WARM_UP_SECONDS,
        show_default=True,
        metavar="SECONDS",
        help="Make calls for so long before measuring.",
    ),
    priority_option,
    queue_option,
)
_taking_options = together(
    click.option(
        "--all-jobs",
        is_flag=True,
        help="Take and acknowledge jobs that the bench did not make, too.",
    ),
    success_option,
)


class Plan(NamedTuple):
    """What every bench is told on the command line."""

    host: str
    port: int
    queue: str
    priority: int | None
    body_bytes: int
    create: bool
    warm_up_seconds: float
    seconds: float | None
    num_queries: int | None
    rate: float | None
    arrivals: str | None
    slow_ms: float
    batch_size: int
    concurrency: int
    progress: bool | None
    as_json: bool

    @property
    def show(self) -> Callable[[str], None] | None:
        wanted = self.progress if self.progress is not None else sys.stderr.isatty()
        return functools.partial(click.echo, err=True) if wanted else None

    @property
    def job(self) -> Job:
        return Job(bench_body(self.body_bytes), priority=self.priority or 1)

    @property
    def calls(self) -> int | None:
        """How many to measure; None: as many as the time allows."""
        return None if self.num_queries in (None, -1) else self.num_queries

    @property
    def measured_seconds(self) -> float:
        if self.seconds is not None:
            return self.seconds
        return _DEFAULT_SECONDS if self.num_queries is None else math.inf

    def batches(self) -> Batches:
        return Batches(alike_batches(self.job, batch_size=self.batch_size))

    def pace(self) -> ClosedLoop | OpenLoop:
        if self.rate is None:
            return ClosedLoop(self.calls)
        return OpenLoop(
            ARRIVALS[self.arrivals or _DEFAULT_ARRIVALS],
            self.rate,
            warm_up_seconds=self.warm_up_seconds,
            seconds=self.measured_seconds,
            calls=self.calls,
        )

    def jobs_to_take(self) -> int:
        """Jobs that dequeues find enough of, as far as that can be known."""
        most_calls = math.inf if self.calls is None else self.calls
        if self.rate is not None:
            measured = min(self.rate * self.measured_seconds, most_calls)
            calls = self.rate * self.warm_up_seconds + measured
            if math.isfinite(calls):
                # Five standard deviations of a Poisson count: more hardly ever come.
                return math.ceil(calls + 5 * math.sqrt(calls)) * self.batch_size
        by_default = min(_CLOSED_LOOP_FILL_CALLS * self.batch_size, _CLOSED_LOOP_FILL_JOBS_AT_MOST)
        return by_default + (self.calls or 0) * self.batch_size


@click.group()
def bench() -> None:
    """Measure calls: how many, and how long they take.

    Closed loop: each connection makes its next call once the last is answered. Open loop
    (--rate): calls are due by a schedule, and latency counts from when they were due.

    \b
    Examples:
      pinlater bench enqueue --queue bench --create --batch-size 100 --concurrency 8
      pinlater bench cycle --queue bench --rate 500 --concurrency 16 --seconds 60
    """


@bench.command("enqueue")
@body_bytes_option
@_bench_options
@service_options
def enqueue(**plan: object) -> None:
    """Measure enqueues. The jobs stay in the queue.

    \b
    Examples:
      pinlater bench enqueue --queue bench --create --batch-size 100 --concurrency 8
      pinlater bench enqueue --queue bench --rate 500 --concurrency 16 --json
    """
    told = _plan(plan)
    batches = told.batches()
    _measure(told, [Kind.ENQUEUE], lambda client: EnqueueCaller(client, told.queue, batches))


@bench.command("dequeue")
@click.option(
    "--fill",
    "fill_jobs",
    type=click.IntRange(min=0),
    metavar="JOBS",
    help="Enqueue so many jobs before measuring; 0: take what is there  [default: with --rate what "
    f"the schedule can take, else enough for {_CLOSED_LOOP_FILL_CALLS:,} calls, up to "
    f"{_CLOSED_LOOP_FILL_JOBS_AT_MOST:,} jobs]",
)
@body_bytes_option
@_taking_options
@_bench_options
@service_options
def dequeue(
    *, fill_jobs: int | None, dequeue_success_percent: int, all_jobs: bool, **plan: object
) -> None:
    """Measure dequeues, each with the acks of the one before.

    A queue with jobs that the bench did not make is refused: use one of its own. Ends early, and
    says so, once there are no more.

    \b
    Examples:
      pinlater bench dequeue --queue bench --create --fill 200000 --batch-size 100
      pinlater bench dequeue --queue bench --rate 500 --concurrency 16
    """
    told = _plan(plan)
    taking = Taking(told.queue, told.batch_size, dequeue_success_percent, not all_jobs)
    _measure(
        told,
        [Kind.DEQUEUE],
        lambda client: BenchDequeueCaller(client, taking),
        taking=taking,
        fill_jobs=told.jobs_to_take() if fill_jobs is None else fill_jobs,
    )


@bench.command("cycle")
@body_bytes_option
@_taking_options
@_bench_options
@service_options
def cycle(*, dequeue_success_percent: int, all_jobs: bool, **plan: object) -> None:
    """Measure the life of jobs: each connection enqueues, dequeues and acknowledges in turn.

    A queue with jobs that the bench did not make is refused: use one of its own. --rate and
    --num-queries count calls, of which three make a cycle.

    \b
    Examples:
      pinlater bench cycle --queue bench --create --concurrency 8
      pinlater bench cycle --queue bench --rate 300 --concurrency 16 --seconds 60
    """
    told = _plan(plan)
    taking = Taking(told.queue, told.batch_size, dequeue_success_percent, not all_jobs)
    batches = told.batches()
    _measure(told, list(Kind), lambda client: CycleCaller(client, taking, batches), taking=taking)


def _plan(options: dict[str, object]) -> Plan:
    told = Plan(**options)  # type: ignore[arg-type]  # click has checked each option
    if told.arrivals is not None and told.rate is None:
        raise click.UsageError("--arrivals: a closed loop has no schedule; give --rate, too")
    return told


# --- a run ------------------------------------------------------------------------------------


def _measure(
    plan: Plan,
    kinds: Sequence[Kind],
    caller: Callable[[Client], Caller],
    *,
    taking: Taking | None = None,
    fill_jobs: int = 0,
) -> None:
    pace = plan.pace()
    with contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(Client(plan.host, plan.port, max_connections=1))
            for _ in range(plan.concurrency)
        ]
        _check_queue(clients[0], plan.queue, create=plan.create)
        stop = stack.enter_context(contextlib.closing(StopSignal()))
        stop.catch()
        try:
            if taking is not None and taking.bench_jobs_only:
                check_for_foreign_jobs(clients[0], plan.queue)
            _fill(clients[0], plan, fill_jobs, stop)
            for client in clients:
                client.queue_names()  # connects: a connection's set-up is no call's latency
            load = Load([caller(client) for client in clients], kinds, pace, slow_ms=plan.slow_ms)
            outcome = load.run(
                warm_up_seconds=plan.warm_up_seconds,
                seconds=plan.measured_seconds,
                stop=stop,
                show=plan.show,
            )
        except LoadStopped as error:
            fail(str(error))
    if not outcome.seconds:
        why = "ran out of jobs; --fill makes more" if outcome.ran_out else "stopped"
        fail(
            f"nothing was measured, as the warm-up of {plan.warm_up_seconds:g} s did not end: {why}"
        )
    schedule = None
    if isinstance(pace, OpenLoop) and plan.rate is not None:
        schedule = Schedule(plan.rate, plan.arrivals or _DEFAULT_ARRIVALS, pace.punctuality())
        _count_unstarted(outcome, schedule.kept)
    _print_report(plan, outcome, schedule)


def _check_queue(client: Client, queue: str, *, create: bool) -> None:
    if create:
        client.create_queue(queue)
    elif queue not in client.queue_names():
        fail(f"queue {printable(queue)!r} does not exist; --create makes it")


def _fill(client: Client, plan: Plan, jobs: int, stop: StopSignal) -> None:
    if plan.show is not None and jobs:
        plan.show(f"filling queue {printable(plan.queue)} with {how_many(jobs, 'job')}")
    at_once = max(1, min(_FILL_CALL_JOBS, _FILL_CALL_BYTES // plan.body_bytes))
    while jobs > 0 and not stop.requested:
        client.enqueue(plan.queue, [plan.job] * min(jobs, at_once))
        jobs -= at_once


def _count_unstarted(outcome: Outcome, punctuality: Punctuality) -> None:
    """Calls that were due and never started have waited, too: leaving them out would make an
    overloaded service look fast. The kinds take turns, so each gets its share of them."""
    figures = list(outcome.kinds.values())
    for number, seconds in enumerate(punctuality.waited_seconds):
        figures[number % len(figures)].took(seconds)


def _print_report(plan: Plan, outcome: Outcome, schedule: Schedule | None) -> None:
    report = Report(
        outcome,
        schedule,
        batch_size=plan.batch_size,
        concurrency=plan.concurrency,
        warm_up_seconds=plan.warm_up_seconds,
        seconds=plan.measured_seconds,
        slow_ms=plan.slow_ms,
    )
    if plan.as_json:
        print_json(report.facts())
    else:
        for line in report.lines():
            click.echo(line)
    if outcome.has_errors:
        sys.exit(ExitCode.FAILURE)
