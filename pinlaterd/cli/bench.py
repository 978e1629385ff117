"""`pinlater bench`: its command lines, the course of a run, and its report."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Iterator
from typing import Any

import click

from pinlaterd.cli import command, load, pinlater
from pinlaterd.cli.callers import (
    AtEmpty,
    Caller,
    JobBatches,
    Kind,
    Plan,
    alike_batches,
    bench_body,
    check_for_foreign_jobs,
)
from pinlaterd.client import Client
from pinlaterd.errors import how_many
from pinlaterd.lifecycle import ExitCode, StopSignal

_MAX_CALLS_PER_SECOND = 10_000.0  # more than one Python process can make
_DEFAULT_SECONDS = 10.0
# Connections stand before a run. This is for what else is slow at first: code that has not run yet,
# files that have not grown, hints that routers do not have.
_DEFAULT_WARM_UP_SECONDS = 0.5
_CLOSED_LOOP_FILL_CALLS = 20_000
_CLOSED_LOOP_FILL_JOBS_AT_MOST = 200_000
_FILL_CALL_JOBS = 1000
_FILL_CALL_BYTES = 1_000_000
_SHOWN_PERCENTILES = {"p50_ms": 0.5, "p90_ms": 0.9, "p99_ms": 0.99, "p99_9_ms": 0.999}

_bench_options = command.together(
    pinlater.queue_option,
    pinlater.priority_option,
    command.option(
        "--warm-up",
        "warm_up_seconds",
        type=command.Amount(command.MAX_SECONDS, least=0),
        default=_DEFAULT_WARM_UP_SECONDS,
        metavar="SECONDS",
        help="Make calls for so long before measuring.",
    ),
    command.option(
        "--seconds",
        type=command.Amount(command.MAX_SECONDS),
        help="How long to measure. Ctrl-C ends it sooner  "
        f"[default: {_DEFAULT_SECONDS:g}, unless --num-queries says when to end]",
    ),
    pinlater.num_queries_option(None, "until stopped. Those of the warm-up are not among them"),
    command.option(
        "--rate",
        type=command.Amount(_MAX_CALLS_PER_SECOND),
        metavar="R",
        help="Open loop: R calls a second over all connections, at even intervals  [default: "
        "closed loop, as fast as they are answered]",
    ),
    pinlater.load_options,
    command.option("--create", is_flag=True, help="Make the queue if it does not exist."),
    command.option(
        "--slow-ms",
        type=command.Amount(command.MAX_SECONDS * 1000),
        default=100.0,
        help="Calls that take longer are counted as slow.",
    ),
    command.service_options,
)


def _plan(*, seconds: float | None, **options: Any) -> Plan:
    if seconds is None:
        seconds = _DEFAULT_SECONDS if options["num_queries"] is None else math.inf
    return Plan(seconds=seconds, all_jobs=False, **options)


def _jobs_to_take(plan: Plan) -> int:
    """Return how many jobs dequeues find enough of, as far as that can be known."""
    most_calls = math.inf if plan.calls is None else plan.calls
    if plan.rate is not None:
        calls = plan.rate * plan.warm_up_seconds + min(plan.rate * plan.seconds, most_calls)
        if math.isfinite(calls):
            return math.ceil(calls + 1) * plan.batch_size
    by_default = min(_CLOSED_LOOP_FILL_CALLS * plan.batch_size, _CLOSED_LOOP_FILL_JOBS_AT_MOST)
    return by_default + (plan.calls or 0) * plan.batch_size


def _batches(plan: Plan) -> JobBatches:
    return JobBatches(alike_batches(plan, bench_body(plan.body_bytes)))


@click.group(cls=command.Group)
def bench() -> None:
    """Measure calls: how many, and how long they take.

    Closed loop: each connection makes its next call once the last is answered. Open loop
    (--rate): calls are due by a schedule, and latency counts from when they were due.

    Examples:
      pinlater bench enqueue --queue bench --create --batch-size 100 --concurrency 8
      pinlater bench cycle --queue bench --rate 500 --concurrency 16 --seconds 60
    """


@bench.command()
@pinlater.body_bytes_option
@_bench_options
def enqueue(**options: Any) -> None:
    """Measure enqueues. The jobs stay in the queue.

    Examples:
      pinlater bench enqueue --queue bench --create --batch-size 100 --concurrency 8
      pinlater bench enqueue --queue bench --rate 500 --concurrency 16 --json
    """
    plan = _plan(**options)
    _measure(plan, Kind.ENQUEUE, batches=_batches(plan))


@bench.command()
@command.option(
    "--fill",
    "fill_jobs",
    type=click.IntRange(min=0),
    metavar="JOBS",
    help="Enqueue so many jobs before measuring; 0: take what is there  [default: with --rate what "
    f"the schedule can take, else enough for {_CLOSED_LOOP_FILL_CALLS:,} calls, up to "
    f"{_CLOSED_LOOP_FILL_JOBS_AT_MOST:,} jobs]",
)
@pinlater.body_bytes_option
@pinlater.success_option
@_bench_options
def dequeue(*, fill_jobs: int | None, **options: Any) -> None:
    """Measure dequeues, each with the acks of the one before.

    A queue with jobs that the bench did not make is refused: use one of its own. Ends early, and
    says so, once there are no more.

    Examples:
      pinlater bench dequeue --queue bench --create --fill 200000 --batch-size 100
      pinlater bench dequeue --queue bench --rate 500 --concurrency 16
    """
    plan = _plan(**options)
    fill_jobs = _jobs_to_take(plan) if fill_jobs is None else fill_jobs
    _measure(plan, Kind.DEQUEUE, fill_jobs=fill_jobs, at_empty=AtEmpty.END)


@bench.command()
@pinlater.body_bytes_option
@pinlater.success_option
@_bench_options
def cycle(**options: Any) -> None:
    """Measure the life of jobs: each connection enqueues, dequeues and acknowledges in turn.

    A queue with jobs that the bench did not make is refused: use one of its own. --rate and
    --num-queries count calls, of which three make a cycle.

    Examples:
      pinlater bench cycle --queue bench --create --concurrency 8
      pinlater bench cycle --queue bench --rate 300 --concurrency 16 --seconds 60
    """
    plan = _plan(**options)
    _measure(plan, *Kind, batches=_batches(plan))


# --- a run ------------------------------------------------------------------------------------


def _measure(plan: Plan, *kinds: Kind, fill_jobs: int = 0, **calls: Any) -> None:
    """Measure a run and report it. `calls`: what a Caller gets besides."""
    checks = Kind.DEQUEUE in kinds
    done = load.run_load(
        plan,
        functools.partial(Caller, plan=plan, kinds=kinds, **calls),
        functools.partial(_prepare, plan, checks=checks, fill_jobs=fill_jobs),
    )
    if not done.seconds:
        why = "ran out of jobs; --fill makes more" if done.ran_out else "stopped"
        command.fail(
            f"nothing was measured, as the warm-up of {plan.warm_up_seconds:g} s did not end: {why}"
        )
    facts = report_facts(plan, done)
    command.show(facts, lambda: click.echo("\n".join(report_lines(facts))))
    if done.has_errors:
        sys.exit(ExitCode.FAILURE)


def _prepare(plan: Plan, client: Client, stop: StopSignal, *, checks: bool, fill_jobs: int) -> None:
    if plan.create:
        client.create_queue(plan.queue)
    elif plan.queue not in client.queue_names():
        command.fail(f"queue {command.printable(plan.queue)!r} does not exist; --create makes it")
    if checks:
        check_for_foreign_jobs(client, plan.queue)
    if plan.tell is not None and fill_jobs:
        plan.tell(
            f"filling queue {command.printable(plan.queue)} with {how_many(fill_jobs, 'job')}"
        )
    job = plan.job(bench_body(plan.body_bytes))
    at_once = max(1, min(_FILL_CALL_JOBS, _FILL_CALL_BYTES // plan.body_bytes))
    while fill_jobs > 0 and not stop.requested:
        client.enqueue(plan.queue, [job] * min(fill_jobs, at_once))
        fill_jobs -= at_once


# --- its report -------------------------------------------------------------------------------


def report_facts(plan: Plan, done: load.Load) -> dict[str, Any]:
    """Report a run, for JSON."""
    return {
        "seconds": round(done.seconds, 3),
        "warm_up_seconds": plan.warm_up_seconds,
        "batch_size": plan.batch_size,
        "concurrency": plan.concurrency,
        "slow_ms": plan.slow_ms,
        "ran_out": done.ran_out,
        "left_claimed": str(done.left_claimed[0]) if done.left_claimed else None,
        "kinds": {
            kind: {
                **found.facts(done.seconds, _SHOWN_PERCENTILES),
                "max_ms": found.max_ms,
                "slow": found.slow,
            }
            for kind, found in done.kinds.items()
        },
        "schedule": done.pace.facts(),
    }


def report_lines(facts: dict[str, Any]) -> Iterator[str]:
    """Report a run, for people."""
    schedule = facts["schedule"]
    loop = "closed loop"
    if schedule is not None:
        loop = f"open loop, {schedule['rate']:,g} calls/s"
    yield (
        f"{facts['seconds']:.2f} s after {facts['warm_up_seconds']:g} s of warm-up, {loop}, "
        f"{how_many(facts['concurrency'], 'connection')}, "
        f"{how_many(facts['batch_size'], 'job')} a call"
    )
    yield (
        f"{'':8}{'calls/s':>11}{'jobs/s':>12}{'p50 ms':>10}{'p90 ms':>10}{'p99 ms':>10}"
        f"{'p99.9 ms':>10}{'max ms':>10}  slow (> {facts['slow_ms']:g} ms)"
    )
    for kind, found in facts["kinds"].items():
        yield (
            f"{kind:8}{found['calls_per_second']:>11,}{found['jobs_per_second']:>12,}"
            f"{found['p50_ms']:>10}{found['p90_ms']:>10}{found['p99_ms']:>10}"
            f"{found['p99_9_ms']:>10}{found['max_ms']:>10}  {found['slow']:,}"
        )
    for kind, found in facts["kinds"].items():
        for name, count in found["errors"].items():
            yield f"errors: {count:,} of {kind}: {name}; latencies are those of the other calls"
    if facts["left_claimed"] is not None:
        yield (
            f"some claims could not be ended: {facts['left_claimed']}; those jobs come out again "
            "when their claims time out"
        )
    if facts["ran_out"]:
        yield (
            f"ran out of jobs after {facts['seconds']:.2f} s, which the figures are of: "
            "--fill makes more"
        )
    if schedule is not None:
        yield from _schedule_lines(schedule)


def _schedule_lines(schedule: dict[str, Any]) -> Iterator[str]:
    were = "was" if schedule["due"] == 1 else "were"
    yield (
        f"schedule: {how_many(schedule['due'], 'call')} {were} due, {schedule['started']:,} started"
    )
    behind = f"{schedule['behind_ms']:,.1f} ms behind schedule"
    if schedule["kept_up"]:
        yield f"ended {behind}"
        return
    yield (
        f"NOT KEPT UP, ended {behind}: all connections were busy; the service, the machine or this "
        "process is the limit, or --concurrency is too low"
    )
