"""The command line `pinlater`: single calls and loads; `bench` and `worker` are modules of their
own."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any

import click

from pinlaterd import __version__
from pinlaterd.cli import callers, command, load
from pinlaterd.cli.callers import AtEmpty, Kind, Plan
from pinlaterd.client import Client, calls
from pinlaterd.config.schema import ServerSettings
from pinlaterd.errors import how_many
from pinlaterd.lifecycle import ExitCode
from pinlaterd.model import QUEUE_DEFAULT, JobOptions

_MAX_CONCURRENCY = 1000
_USUAL_COUNT_LIMIT = ServerSettings().count_limit
_NAMED_JOBS = 10  # of so many at most each has its descriptor printed

queue_option = command.option("--queue", required=True, metavar="NAME", help="The queue.")
priority_option = command.option(
    "--priority", type=command.PRIORITY, help="Priority of the jobs; 1 is the highest."
)
body_bytes_option = command.option(
    "--body-bytes",
    type=click.IntRange(min=callers.MIN_BODY_BYTES),
    default=200,
    help="Size of a made-up body.",
)
load_options = command.together(
    command.option("--batch-size", type=command.COUNT, default=1, help="Jobs in a call."),
    command.option(
        "--concurrency",
        type=click.IntRange(1, _MAX_CONCURRENCY),
        default=1,
        help="Connections that make calls at the same time.",
    ),
    command.option(
        "--progress/--no-progress",
        default=None,
        help="A line a second on stderr  [default: if that is a terminal]",
    ),
)
success_option = command.option(
    "--dequeue-success-percent",
    "success_percent",
    type=click.IntRange(0, 100),
    default=100,
    help="So many of the jobs, chosen at random, are acknowledged as succeeded, the rest as "
    "failed.",
)


def num_queries_option(
    default: int | None, meaning: str
) -> Callable[[command.Decorated], command.Decorated]:
    """Make the option; `meaning`: of -1, and the default."""
    return click.option(
        "--num-queries",
        type=click.IntRange(min=-1),
        default=default,
        help=f"Calls to make over all connections; -1: {meaning}",
    )


@click.group(
    "pinlater",
    cls=command.CommandLine,
    modules={"bench": ["bench"], "worker": ["worker"]},
    context_settings=command.WIDTH,
)
@click.version_option(__version__, prog_name="pinlater")
def cli() -> None:
    """Use and load a PinLater service from the command line.

    Examples:
      pinlater create --queue mail
      pinlater enqueue --queue mail --num-queries 1000 --batch-size 100 --concurrency 8
      pinlater dequeue --queue mail --num-queries -1 --batch-size 100
      printf 'one\\ntwo\\n' | pinlater enqueue --queue mail --from-file -
    """


# --- loads ------------------------------------------------------------------------------------


@cli.command()
@queue_option
@num_queries_option(None, "until stopped  [default: 1; with --from-file: to its end]")
@load_options
@priority_option
@command.option(
    "--from-file",
    type=click.File("rb"),
    metavar="F|-",
    help="Make a job of each line of this file (-: standard input).",
)
@command.option("--body", metavar="TEXT", help="The body of each job.")
@body_bytes_option
@command.option(
    "--delay",
    type=command.Amount(command.MAX_DELAY_SECONDS, least=0),
    metavar="SECONDS",
    help="Run the jobs so much later.",
)
@command.option(
    "--run-after",
    "run_after_ms",
    type=command.moment,
    metavar="TIME",
    help="Run the jobs not before this time, such as 2026-11-21T03:00:00Z.",
)
@command.option(
    "--expires-at",
    type=command.expiry,
    metavar="TIME|SECONDS",
    help="Hand the jobs out no more from this time on, or so many seconds from now.",
)
@command.option(
    "--attempts",
    type=command.COUNT,
    default=QUEUE_DEFAULT,
    help="Attempts that each job gets  [default: the queue's, or 2]",
)
@command.option("--status", metavar="TEXT", default="", help="The jobs' custom status.")
@command.option(
    "--key", metavar="KEY", help="Store the job unless one that the queue keeps holds this key."
)
@command.service_options
def enqueue(
    *, from_file: IO[bytes] | None, body: str | None, key: str | None, **options: Any
) -> None:
    """Enqueue jobs with a given body, one for each line of a file, or made-up ones.

    Prints the jobs' descriptors if there are at most 10, else how fast they were enqueued. Made-up
    bodies are numbered and carry a checksum, for `pinlater check-dequeue`. A batch of lines that
    can't be stored for sure stops the run, and is named; made-up ones are counted as errors.

    Examples:
      pinlater enqueue --queue mail --body 'to: ada'
      pinlater enqueue --queue mail --body 'to: ada' --delay 60 --attempts 5
      pinlater enqueue --queue mail --body 'to: ada' --key order-17 --expires-at 3600
      pinlater enqueue --queue mail --num-queries -1 --batch-size 100 --concurrency 16
      pinlater enqueue --queue mail --from-file addresses.txt --batch-size 500
    """
    if from_file is not None and body is not None:
        raise click.UsageError("--body and --from-file exclude each other; give one of them")
    if options["delay"] is not None and options["run_after_ms"] is not None:
        raise click.UsageError("--delay and --run-after exclude each other; give one of them")
    if options["num_queries"] is None and from_file is None:
        options["num_queries"] = 1
    plan = Plan(**options)
    if key is not None:
        _enqueue_keyed(plan, body, key)
        return
    if from_file is not None:
        batches = callers.line_batches(plan, from_file)
    elif body is not None:
        # the very bytes of the command line
        batches = callers.alike_batches(plan, body.encode("utf-8", "surrogateescape"))
    else:
        batches = callers.stamped_batches(plan)
    source, is_file = callers.JobBatches(batches), from_file is not None
    named: list[str] = []

    def name(descriptors: Sequence[str]) -> None:
        if len(named) <= _NAMED_JOBS:
            named.extend(descriptors)

    done = _run(plan, Kind.ENQUEUE, batches=source, all_or_stop=is_file, enqueued=name)
    _report("enqueued", done, None, *(named if len(named) <= _NAMED_JOBS else ()))


def _enqueue_keyed(plan: Plan, body: str | None, key: str) -> None:
    if body is None or plan.num_queries != 1 or plan.batch_size != 1:
        raise click.UsageError("--key is of one job, with its --body")
    job = plan.job(body.encode("utf-8", "surrogateescape"))
    with command.connect() as client:
        options = (job.options or JobOptions())._replace(key=key)
        [done] = client.enqueue_keyed(plan.queue, [job._replace(options=options)])
    text = "existed, nothing was stored" if done.existed else "enqueued 1 job"
    command.show(done._asdict(), f"{done.descriptor}\n{text}")


@cli.command()
@queue_option
@num_queries_option(1, "until stopped  [default: 1]")
@load_options
@success_option
@command.service_options
def dequeue(**options: Any) -> None:
    """Dequeue jobs and acknowledge them: each call's jobs in the next call.

    Examples:
      pinlater dequeue --queue mail --num-queries 10 --batch-size 100
      pinlater dequeue --queue mail --num-queries -1 --dequeue-success-percent 95
    """
    done = _run(Plan(**options), Kind.DEQUEUE, at_empty=AtEmpty.WAIT)
    _report("dequeued", done)


@cli.command("check-dequeue")
@queue_option
@num_queries_option(-1, "until no job has come for a second  [default: -1]")
@load_options
@success_option
@command.service_options
def check_dequeue(**options: Any) -> None:
    """Dequeue, and check that what `pinlater enqueue` put in comes out.

    Verifies each body's checksum, reports what comes out twice, and at the end what is missing
    of each run of `enqueue`. Jobs are acknowledged as by `dequeue`. Exit 1 if anything is wrong.

    Examples:
      pinlater enqueue --queue check --num-queries 100 --batch-size 100
      pinlater check-dequeue --queue check --batch-size 100 --concurrency 4
    """
    audit = callers.DeliveryAudit()
    done = _run(Plan(**options), Kind.DEQUEUE, at_empty=AtEmpty.WAIT_AND_END, inspect=audit.enter)
    verdict = audit.verdict()
    _report("dequeued", done, verdict)
    if verdict.faults:
        sys.exit(ExitCode.FAILURE)


def _run(plan: Plan, kind: Kind, **calls: Any) -> load.Load:
    make = functools.partial(callers.Caller, plan=plan, kinds=[kind], **calls)
    return load.run_load(plan, make)


def _report(did: str, done: load.Load, verdict: callers.Verdict | None = None, *named: str) -> None:
    """Print the figures of a load, or of few jobs their descriptors, `named`, in place of rates."""
    [figures] = done.kinds.values()
    figures.errors.update(map(load.name_of, done.left_claimed))
    facts = {
        **({"descriptors": named} if named else {}),
        "seconds": round(done.seconds, 3),
        **figures.facts(done.seconds, {"p50_ms": 0.5, "p99_ms": 0.99}),
    }
    lines = [*named]
    lines.append(f"{did} {how_many(figures.jobs, 'job')} in {how_many(figures.calls, 'call')}")
    if figures.errors or not named:
        lines.append(figures.line(done.seconds))
    if verdict is not None:
        facts["check"] = vars(verdict)
        lines += _verdict_lines(verdict)
    command.show(facts, "\n".join(lines))
    if figures.errors:
        sys.exit(ExitCode.FAILURE)


def _verdict_lines(verdict: callers.Verdict) -> Iterator[str]:
    yield (
        f"checked {how_many(verdict.distinct, 'job')} of {how_many(verdict.runs, 'run')}: "
        f"{how_many(verdict.duplicates, 'duplicate')}, {verdict.missing:,} missing, "
        f"{verdict.damaged:,} damaged"
    )
    if verdict.redelivered:
        again = how_many(verdict.redelivered, "time")
        yield f"{again} a job came again after it had failed or timed out"
    if verdict.unstamped:
        yield f"not made by `pinlater enqueue`: {how_many(verdict.unstamped, 'job')}"
    for example in verdict.examples:
        yield f"  {command.printable(example)}"


# --- single calls -----------------------------------------------------------------------------


@cli.command()
@queue_option
@command.service_options
def create(*, queue: str) -> None:
    """Create a queue. One that exists is left as it is.

    Example: pinlater create --queue mail
    """
    with command.connect() as client:
        client.create_queue(queue)
    command.show({"created": queue}, f"queue {queue} is there")


@cli.command()
@command.option(
    "--job-descriptor",
    "descriptors",
    multiple=True,
    metavar="DESCRIPTOR",
    help="A job; may be given several times.",
)
@command.key_options
@command.service_options
def lookup(*, descriptors: tuple[str, ...], queue: str | None, keys: tuple[str, ...]) -> None:
    """Show all that is known of jobs. Exit 1 if one of them is unknown.

    Examples:
      pinlater lookup --job-descriptor mail:s1:p1:1 --job-descriptor mail:s2:p1:7
      pinlater lookup --queue mail --key order-17
    """
    command.show_jobs(descriptors, queue, keys)


@cli.command("get-queue-names")
@command.service_options
def get_queue_names() -> None:
    """List the queues.

    Example: pinlater get-queue-names --host queue.example.com
    """
    command.show_queue_names()


@cli.command("get-job-count")
@queue_option
@command.option("--job-state", type=command.STATE, default="pending", help="The state.")
@priority_option
@command.option(
    "--count-future-jobs", is_flag=True, help="Count jobs whose run-after is still to come."
)
@command.service_options
def get_job_count(
    *, queue: str, job_state: str, priority: int | None, count_future_jobs: bool
) -> None:
    """Count the jobs of a queue in a state.

    Examples:
      pinlater get-job-count --queue mail --job-state failed
      pinlater get-job-count --queue mail --count-future-jobs
    """
    which: dict[str, Any] = {"state": command.state_of(job_state), "priority": priority}
    with command.connect() as client, command.waiting("counting"):
        jobs = client.count(queue, future=count_future_jobs, **which)
        at_least = _is_least(client, queue, jobs, which, future=count_future_jobs)
    command.show({"count": jobs, "at_least": at_least}, f"{'>=' if at_least else ''}{jobs}")


def _is_least(
    client: Client, queue: str, jobs: int, which: dict[str, Any], *, future: bool
) -> bool:
    """Return whether a count of `jobs` may have ended at the service's count_limit, which no call
    tells: shards hold more jobs in that state than the count and that of the other run-afters."""
    held = client.run(calls.scan(queue, page_size=1, max_ms=1, **which)).in_state
    if held is None:
        return jobs >= _USUAL_COUNT_LIMIT
    if held <= jobs:
        return False
    others = client.count(queue, future=not future, **which)
    # A much larger count of those was the one to end. Where jobs came meanwhile, this one changes.
    is_short = held > jobs + others and jobs >= min(others, _USUAL_COUNT_LIMIT)
    return is_short and client.count(queue, future=future, **which) == jobs


if __name__ == "__main__":
    cli(prog_name="pinlater")
