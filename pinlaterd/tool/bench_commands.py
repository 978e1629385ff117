"""`pinlater bench`: its command lines, and what they print."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import click

from pinlaterd.client.cli import fail, printable
from pinlaterd.client.client import Client
from pinlaterd.lifecycle import ExitCode, StopSignal
from pinlaterd.model import Job
from pinlaterd.tool.bench import (
    Bench,
    Caller,
    CycleCaller,
    DequeueCaller,
    EnqueueCaller,
    Kind,
    Outcome,
)
from pinlaterd.tool.options import (
    Amount,
    body_bytes_option,
    load_options,
    queue_option,
    service_options,
    together,
)
from pinlaterd.tool.pace import (
    LATE_AFTER_SECONDS,
    ClosedLoop,
    OpenLoop,
    Punctuality,
)

_MAX_SECONDS = 86_400.0
_MAX_CALLS_PER_SECOND = 10_000.0  # more than one Python process can make
_CLOSED_LOOP_FILL_JOBS = 20_000
_FILL_CALL_JOBS = 1000
_FILL_CALL_BYTES = 1_000_000
# From here on a run that falls behind is held up by this process: it has one interpreter.
_BUSY_CPU_FRACTION = 0.8

_bench_options = together(
    click.option(
        "--slow-ms",
        type=Amount(_MAX_SECONDS * 1000),
        default=100.0,
        show_default=True,
        help="Calls that take longer are counted as slow.",
    ),
    click.option("--create", is_flag=True, help="Make the queue if it does not exist."),
    load_options,
    click.option(
        "--rate",
        type=Amount(_MAX_CALLS_PER_SECOND),
        metavar="R",
        help="Open loop: R calls a second over all connections, by schedule  [default: closed "
        "loop, as fast as they are answered]",
    ),
    click.option(
        "--seconds",
        type=Amount(_MAX_SECONDS),
        default=10.0,
        show_default=True,
        help="How long to measure. Ctrl-C ends it sooner.",
    ),
    queue_option,
)


class Plan(NamedTuple):
    """What every bench is told on the command line."""

    host: str
    port: int
    queue: str
    create: bool
    seconds: float
    rate: float | None
    slow_ms: float
    batch_size: int
    concurrency: int
    progress: bool | None
    as_json: bool

    @property
    def show(self) -> Callable[[str], None] | None:
        wanted = self.progress if self.progress is not None else sys.stderr.isatty()
        return functools.partial(click.echo, err=True) if wanted else None


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
def enqueue(*, body_bytes: int, **plan: object) -> None:
    """Measure enqueues. The jobs stay in the queue.

    \b
    Examples:
      pinlater bench enqueue --queue bench --create --batch-size 100 --concurrency 8
      pinlater bench enqueue --queue bench --rate 500 --concurrency 16 --json
    """
    told = Plan(**plan)  # type: ignore[arg-type]  # click has checked each option
    jobs = [_job(body_bytes)] * told.batch_size
    _measure(told, [Kind.ENQUEUE], lambda client: EnqueueCaller(client, told.queue, jobs))


@bench.command("dequeue")
@click.option(
    "--fill",
    "fill_jobs",
    type=click.IntRange(min=0),
    metavar="JOBS",
    help="Enqueue so many jobs before measuring; 0: take what is there  [default: with --rate what "
    f"the schedule can take, else {_CLOSED_LOOP_FILL_JOBS:,}]",
)
@body_bytes_option
@_bench_options
@service_options
def dequeue(*, body_bytes: int, fill_jobs: int | None, **plan: object) -> None:
    """Measure dequeues, each with the acks of the one before.

    Whatever jobs the queue holds are taken and acknowledged as succeeded: use a queue of its own.
    Ends early, and says so, once there are no more.

    \b
    Examples:
      pinlater bench dequeue --queue bench --create --fill 200000 --batch-size 100
      pinlater bench dequeue --queue bench --rate 500 --concurrency 16
    """
    told = Plan(**plan)  # type: ignore[arg-type]  # click has checked each option
    if fill_jobs is None and told.rate is not None:
        fill_jobs = math.ceil(told.rate * told.seconds) * told.batch_size
    _measure(
        told,
        [Kind.DEQUEUE],
        lambda client: DequeueCaller(client, told.queue, told.batch_size),
        fill_jobs=_CLOSED_LOOP_FILL_JOBS if fill_jobs is None else fill_jobs,
        fill_with=_job(body_bytes),
    )


@bench.command("cycle")
@body_bytes_option
@_bench_options
@service_options
def cycle(*, body_bytes: int, **plan: object) -> None:
    """Measure the life of jobs: each connection enqueues, dequeues and acknowledges in turn.

    Whatever jobs the queue holds are taken and acknowledged as succeeded: use a queue of its own.
    --rate counts calls, of which three make a cycle.

    \b
    Examples:
      pinlater bench cycle --queue bench --create --concurrency 8
      pinlater bench cycle --queue bench --rate 300 --concurrency 16 --seconds 60
    """
    told = Plan(**plan)  # type: ignore[arg-type]  # click has checked each option
    jobs = [_job(body_bytes)] * told.batch_size
    _measure(told, list(Kind), lambda client: CycleCaller(client, told.queue, jobs))


# --- a run ------------------------------------------------------------------------------------


def _measure(
    plan: Plan,
    kinds: Sequence[Kind],
    caller: Callable[[Client], Caller],
    *,
    fill_jobs: int = 0,
    fill_with: Job | None = None,
) -> None:
    with contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(Client(plan.host, plan.port, max_connections=1))
            for _ in range(plan.concurrency)
        ]
        _check_queue(clients[0], plan.queue, create=plan.create)
        stop = stack.enter_context(contextlib.closing(StopSignal()))
        stop.catch()
        if fill_with is not None:
            _fill(clients[0], plan, fill_jobs, fill_with, stop)
        for client in clients:
            client.queue_names()  # connects: a connection's set-up is no call's latency
        pace = ClosedLoop() if plan.rate is None else OpenLoop(plan.rate, plan.seconds)
        run = Bench([caller(client) for client in clients], kinds, pace, slow_ms=plan.slow_ms)
        outcome = run.run(plan.seconds, stop, plan.show)
    punctuality = pace.punctuality() if isinstance(pace, OpenLoop) else None
    if punctuality is not None:
        _count_unstarted(outcome, punctuality)
    _report(plan, outcome, punctuality)


def _check_queue(client: Client, queue: str, *, create: bool) -> None:
    if create:
        client.create_queue(queue)
    elif queue not in client.queue_names():
        fail(f"queue {printable(queue)!r} does not exist; --create makes it")


def _fill(client: Client, plan: Plan, jobs: int, job: Job, stop: StopSignal) -> None:
    if plan.show is not None and jobs:
        plan.show(f"filling queue {printable(plan.queue)} with {jobs:,} jobs")
    at_once = max(1, min(_FILL_CALL_JOBS, _FILL_CALL_BYTES // len(job.body)))
    while jobs > 0 and not stop.requested:
        client.enqueue(plan.queue, [job] * min(jobs, at_once))
        jobs -= at_once


def _job(body_bytes: int) -> Job:
    return Job(b"x" * body_bytes)


def _count_unstarted(outcome: Outcome, punctuality: Punctuality) -> None:
    """Calls that were due and never started have waited, too: leaving them out would make an
    overloaded service look fast. The kinds take turns, so each gets its share of them."""
    figures = list(outcome.kinds.values())
    for number, seconds in enumerate(punctuality.waited_seconds):
        figures[number % len(figures)].waited(seconds)


# --- the report -------------------------------------------------------------------------------


def _report(plan: Plan, outcome: Outcome, punctuality: Punctuality | None) -> None:
    if plan.as_json:
        click.echo(json.dumps(_facts(plan, outcome, punctuality)))
    else:
        for line in _lines(plan, outcome, punctuality):
            click.echo(line)
    if outcome.has_errors:
        sys.exit(ExitCode.FAILURE)


def _facts(plan: Plan, outcome: Outcome, punctuality: Punctuality | None) -> dict[str, object]:
    return {
        "seconds": round(outcome.seconds, 3),
        "batch_size": plan.batch_size,
        "concurrency": plan.concurrency,
        "slow_ms": plan.slow_ms,
        "cpu_percent": round(100 * outcome.cpu_seconds / outcome.seconds, 1),
        "ran_out": outcome.ran_out,
        "kinds": {kind: figures.facts(outcome.seconds) for kind, figures in outcome.kinds.items()},
        "schedule": None if punctuality is None else _schedule_facts(plan, punctuality),
    }


def _schedule_facts(plan: Plan, punctuality: Punctuality) -> dict[str, object]:
    return {
        "rate": plan.rate,
        "due": punctuality.due,
        "started": punctuality.started,
        "late_all_busy": punctuality.late_all_busy,
        "late_to_wake": punctuality.late_to_wake,
        "latest_ms": round(1000 * punctuality.latest_seconds, 3),
        "behind_ms": round(1000 * punctuality.behind_seconds, 3),
        "kept_up": punctuality.kept_up,
    }


def _lines(plan: Plan, outcome: Outcome, punctuality: Punctuality | None) -> Iterator[str]:
    loop = "closed loop" if plan.rate is None else f"open loop, {plan.rate:,g} calls/s"
    yield (
        f"{outcome.seconds:.2f} s, {loop}, {plan.concurrency} connections, "
        f"{plan.batch_size} jobs a call"
    )
    yield (
        f"{'':8}{'calls/s':>11}{'jobs/s':>12}{'p50 ms':>10}{'p90 ms':>10}{'p99 ms':>10}"
        f"{'p99.9 ms':>10}{'max ms':>10}  slow (> {plan.slow_ms:g} ms)"
    )
    for kind, figures in outcome.kinds.items():
        facts = figures.facts(outcome.seconds)
        yield (
            f"{kind:8}{facts['calls_per_second']:>11,}{facts['jobs_per_second']:>12,}"
            f"{facts['p50_ms']:>10}{facts['p90_ms']:>10}{facts['p99_ms']:>10}"
            f"{facts['p99_9_ms']:>10}{facts['max_ms']:>10}  {facts['slow']:,}"
        )
    for kind, figures in outcome.kinds.items():
        for name, count in figures.errors.items():
            yield f"errors: {count:,} of {kind}: {name}; latencies are those of the other calls"
    if outcome.ran_out:
        yield from _ran_out_lines(plan, outcome)
    if punctuality is not None:
        yield from _schedule_lines(outcome, punctuality)


def _ran_out_lines(plan: Plan, outcome: Outcome) -> Iterator[str]:
    jobs = outcome.kinds[Kind.DEQUEUE].jobs
    enough = math.ceil(1.2 * jobs * plan.seconds / outcome.seconds)
    cure = f"--fill {enough} may be enough for {plan.seconds:g} s" if jobs else "--fill makes some"
    yield f"ran out of jobs after {outcome.seconds:.2f} s, which the figures are of: {cure}"


def _schedule_lines(outcome: Outcome, punctuality: Punctuality) -> Iterator[str]:
    yield (
        f"schedule: {punctuality.due:,} calls were due, {punctuality.started:,} started. More than "
        f"{1000 * LATE_AFTER_SECONDS:g} ms late: {punctuality.late_all_busy:,} as all connections "
        f"were busy, {punctuality.late_to_wake:,} as this process woke up late; the latest by "
        f"{1000 * punctuality.latest_seconds:,.1f} ms"
    )
    behind = f"{1000 * punctuality.behind_seconds:,.1f} ms behind schedule"
    if punctuality.kept_up:
        yield f"ended {behind}"
        return
    cpu = outcome.cpu_seconds / outcome.seconds
    if cpu > _BUSY_CPU_FRACTION:
        reason = f"this process could not: it used {cpu:.0%} of a CPU; share the rate among several"
    else:
        reason = (
            f"all connections were busy while this process used {cpu:.0%} of a CPU; the service or "
            "the machine is the limit, or --concurrency is too low"
        )
    yield f"NOT KEPT UP, ended {behind}: {reason}"
