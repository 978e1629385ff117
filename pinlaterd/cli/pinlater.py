"""The command line `pinlater`."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Sequence
from typing import IO

import click

from pinlaterd import __version__
from pinlaterd.cli.audit import DeliveryAudit, Verdict
from pinlaterd.cli.bench import bench
from pinlaterd.cli.callers import (
    Batches,
    DequeueCaller,
    EnqueueCaller,
    Taking,
    alike_batches,
    line_batches,
    stamped_batches,
)
from pinlaterd.cli.command_line import STATE, CommandLine, check_service, fail, show_jobs, state_of
from pinlaterd.cli.load import Caller, Load, LoadStopped, Outcome, name_of
from pinlaterd.cli.options import (
    body_bytes_option,
    load_options,
    num_queries_option,
    priority_option,
    queue_option,
    service_options,
    success_option,
)
from pinlaterd.cli.pace import ClosedLoop
from pinlaterd.cli.rendering import print_facts, print_json, printable
from pinlaterd.cli.worker import worker
from pinlaterd.client.client import Client
from pinlaterd.lifecycle import ExitCode, StopSignal
from pinlaterd.model import Job
from pinlaterd.wording import how_many


@click.group("pinlater", cls=CommandLine, context_settings={"max_content_width": 100})
@click.version_option(__version__, prog_name="pinlater")
def cli() -> None:
    """Use and load a PinLater service from the command line.

    \b
    Examples:
      pinlater create --queue mail
      pinlater enqueue --queue mail --num-queries 1000 --batch-size 100 --concurrency 8
      pinlater dequeue --queue mail --num-queries -1 --batch-size 100
      printf 'one\\ntwo\\n' | pinlater enqueue --queue mail --from-file -
    """


cli.add_command(bench)
cli.add_command(worker)


# --- loading --------------------------------------------------------------------------------


@cli.command()
@queue_option
@num_queries_option(None, "until stopped  [default: 1; with --from-file: to its end]")
@load_options
@priority_option
@click.option(
    "--from-file",
    type=click.File("rb"),
    metavar="F|-",
    help="Make a job of each line of this file (-: standard input).",
)
@click.option("--body", metavar="TEXT", help="The body of each job.")
@body_bytes_option
@service_options
def enqueue(  # noqa: PLR0913  one parameter for each option
    *,
    host: str,
    port: int,
    queue: str,
    num_queries: int | None,
    batch_size: int,
    concurrency: int,
    priority: int | None,
    from_file: IO[bytes] | None,
    body: str | None,
    body_bytes: int,
    progress: bool | None,
    as_json: bool,
) -> None:
    """Enqueue jobs with a given body, one for each line of a file, or made-up ones.

    Made-up bodies are numbered and carry a checksum, for `pinlater check-dequeue`. A batch of
    lines that can't be stored for sure stops the run, and is named; made-up ones are counted as
    errors.

    \b
    Examples:
      pinlater enqueue --queue mail --body 'to: ada'
      pinlater enqueue --queue mail --num-queries -1 --batch-size 100 --concurrency 16
      pinlater enqueue --queue mail --from-file addresses.txt --batch-size 500
    """
    priority = priority if priority is not None else 1
    if from_file is not None and body is not None:
        raise click.UsageError("--body and --from-file exclude each other; give one of them")
    if from_file is not None:
        batches = line_batches(from_file, batch_size=batch_size, priority=priority)
    elif body is not None:
        text = body.encode("utf-8", "surrogateescape")  # the very bytes of the command line
        batches = alike_batches(Job(text, priority=priority), batch_size=batch_size)
    else:
        batches = stamped_batches(batch_size=batch_size, body_bytes=body_bytes, priority=priority)
    if num_queries is None:
        num_queries = -1 if from_file is not None else 1
    source = Batches(batches)
    with Client(host, port, max_connections=concurrency) as client:
        callers = [
            EnqueueCaller(client, queue, source, all_or_stop=from_file is not None)
            for _ in range(concurrency)
        ]
        outcome = _run(client, callers, num_queries, progress=progress)
    _report("enqueued", outcome, as_json=as_json)


@cli.command()
@queue_option
@num_queries_option(1, "until stopped  [default: 1]")
@load_options
@success_option
@service_options
def dequeue(
    *,
    host: str,
    port: int,
    queue: str,
    num_queries: int,
    batch_size: int,
    concurrency: int,
    dequeue_success_percent: int,
    progress: bool | None,
    as_json: bool,
) -> None:
    """Dequeue jobs and acknowledge them: each call's jobs in the next call.

    \b
    Examples:
      pinlater dequeue --queue mail --num-queries 10 --batch-size 100
      pinlater dequeue --queue mail --num-queries -1 --dequeue-success-percent 95
    """
    taking = Taking(queue, batch_size, dequeue_success_percent)
    with Client(host, port, max_connections=concurrency) as client:
        callers = [DequeueCaller(client, taking) for _ in range(concurrency)]
        outcome = _run(client, callers, num_queries, progress=progress)
    _report("dequeued", outcome, as_json=as_json)


@cli.command("check-dequeue")
@queue_option
@num_queries_option(-1, "until no job has come for a second  [default: -1]")
@load_options
@success_option
@service_options
def check_dequeue(
    *,
    host: str,
    port: int,
    queue: str,
    num_queries: int,
    batch_size: int,
    concurrency: int,
    dequeue_success_percent: int,
    progress: bool | None,
    as_json: bool,
) -> None:
    """Dequeue, and check that what `pinlater enqueue` put in comes out.

    Verifies each body's checksum, reports what comes out twice, and at the end what is missing
    of each run of `enqueue`. Jobs are acknowledged as by `dequeue`. Exit 1 if anything is wrong.

    \b
    Examples:
      pinlater enqueue --queue check --num-queries 100 --batch-size 100
      pinlater check-dequeue --queue check --batch-size 100 --concurrency 4
    """
    audit = DeliveryAudit()
    taking = Taking(queue, batch_size, dequeue_success_percent, inspect=audit.enter)
    with Client(host, port, max_connections=concurrency) as client:
        callers = [DequeueCaller(client, taking, until_empty=True) for _ in range(concurrency)]
        outcome = _run(client, callers, num_queries, progress=progress)
    verdict = audit.verdict()
    _report("dequeued", outcome, as_json=as_json, verdict=verdict)
    if verdict.faults:
        sys.exit(ExitCode.FAILURE)


def _run(
    client: Client, callers: Sequence[Caller], num_queries: int, *, progress: bool | None
) -> Outcome:
    check_service(client)
    stop = StopSignal()
    stop.catch()
    # Not before the figures are shown: one more signal shall not cost them.
    click.get_current_context().call_on_close(stop.close)
    show = functools.partial(click.echo, err=True)
    wanted = progress if progress is not None else sys.stderr.isatty()
    pace = ClosedLoop(None if num_queries == -1 else num_queries)
    try:
        return Load(callers, [callers[0].kind], pace).run(stop=stop, show=show if wanted else None)
    except LoadStopped as error:
        fail(str(error))


def _report(did: str, outcome: Outcome, *, as_json: bool, verdict: Verdict | None = None) -> None:
    [figures] = outcome.kinds.values()
    figures.errors.update(map(name_of, outcome.left_claimed))
    if as_json:
        facts = {
            "seconds": round(outcome.seconds, 3),
            **figures.facts(outcome.seconds, {"p50_ms": 0.5, "p99_ms": 0.99}),
            "errors": dict(figures.errors),
        }
        if verdict is not None:
            facts["check"] = vars(verdict)
        print_json(facts)
    else:
        click.echo(f"{did} {how_many(figures.jobs, 'job')} in {how_many(figures.calls, 'call')}")
        click.echo(figures.line(outcome.seconds))
        for line in _verdict_lines(verdict):
            click.echo(line)
    if figures.errors:
        sys.exit(ExitCode.FAILURE)


def _verdict_lines(verdict: Verdict | None) -> Iterator[str]:
    if verdict is None:
        return
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
        yield f"  {printable(example)}"


# --- single calls ---------------------------------------------------------------------------


@cli.command()
@queue_option
@service_options
def create(*, host: str, port: int, queue: str, as_json: bool) -> None:
    """Create a queue. One that exists is left as it is.

    \b
    Example:
      pinlater create --queue mail
    """
    with Client(host, port) as client:
        client.create_queue(queue)
    print_facts({"created": queue}, f"queue {queue} is there", as_json=as_json)


@cli.command()
@click.option(
    "--job-descriptor",
    "descriptors",
    required=True,
    multiple=True,
    metavar="DESCRIPTOR",
    help="A job; may be given several times.",
)
@service_options
def lookup(*, host: str, port: int, descriptors: tuple[str, ...], as_json: bool) -> None:
    """Show all that is known of jobs. Exit 1 if one of them is unknown.

    \b
    Example:
      pinlater lookup --job-descriptor mail:s1:p1:1 --job-descriptor mail:s2:p1:7
    """
    with Client(host, port) as client:
        show_jobs(client, descriptors, as_json=as_json)


@cli.command("get-queue-names")
@service_options
def get_queue_names(*, host: str, port: int, as_json: bool) -> None:
    """List the queues.

    \b
    Example:
      pinlater get-queue-names --host queue.example.com
    """
    with Client(host, port) as client:
        names = sorted(client.queue_names())
    if as_json:
        print_json(names)
    else:
        for name in names:
            click.echo(printable(name))


@cli.command("get-job-count")
@queue_option
@click.option("--job-state", type=STATE, default="pending", show_default=True, help="The state.")
@priority_option
@click.option(
    "--count-future-jobs", is_flag=True, help="Count jobs whose run-after is still to come."
)
@service_options
def get_job_count(
    *,
    host: str,
    port: int,
    queue: str,
    job_state: str,
    priority: int | None,
    count_future_jobs: bool,
    as_json: bool,
) -> None:
    """Count the jobs of a queue in a state.

    \b
    Examples:
      pinlater get-job-count --queue mail --job-state failed
      pinlater get-job-count --queue mail --count-future-jobs
    """
    with Client(host, port) as client:
        count = client.count(
            queue, state_of(job_state), priority=priority, future=count_future_jobs
        )
    print_facts({"count": count}, str(count), as_json=as_json)


if __name__ == "__main__":
    cli(prog_name="pinlater")
