"""The command line `pinlater`."""

from __future__ import annotations

import click

from pinlaterd import __version__
from pinlaterd.cli.bench import bench
from pinlaterd.cli.command_line import (
    STATE,
    WIDTH,
    CommandLine,
    connect,
    option,
    service_options,
    show,
    show_jobs,
    show_queue_names,
    state_of,
)
from pinlaterd.cli.load_commands import (
    check_dequeue,
    dequeue,
    enqueue,
    priority_option,
    queue_option,
)
from pinlaterd.cli.worker import worker


@click.group("pinlater", cls=CommandLine, context_settings=WIDTH)
@click.version_option(__version__, prog_name="pinlater")
def cli() -> None:
    """Use and load a PinLater service from the command line.

    Examples:
      pinlater create --queue mail
      pinlater enqueue --queue mail --num-queries 1000 --batch-size 100 --concurrency 8
      pinlater dequeue --queue mail --num-queries -1 --batch-size 100
      printf 'one\\ntwo\\n' | pinlater enqueue --queue mail --from-file -
    """


for command in (enqueue, dequeue, check_dequeue, bench, worker):
    cli.add_command(command)


@cli.command()
@queue_option
@service_options
def create(*, queue: str) -> None:
    """Create a queue. One that exists is left as it is.

    Example: pinlater create --queue mail
    """
    with connect() as client:
        client.create_queue(queue)
    show({"created": queue}, f"queue {queue} is there")


@cli.command()
@option(
    "--job-descriptor",
    "descriptors",
    required=True,
    multiple=True,
    metavar="DESCRIPTOR",
    help="A job; may be given several times.",
)
@service_options
def lookup(*, descriptors: tuple[str, ...]) -> None:
    """Show all that is known of jobs. Exit 1 if one of them is unknown.

    Example: pinlater lookup --job-descriptor mail:s1:p1:1 --job-descriptor mail:s2:p1:7
    """
    show_jobs(descriptors)


@cli.command("get-queue-names")
@service_options
def get_queue_names() -> None:
    """List the queues.

    Example: pinlater get-queue-names --host queue.example.com
    """
    show_queue_names()


@cli.command("get-job-count")
@queue_option
@option("--job-state", type=STATE, default="pending", help="The state.")
@priority_option
@option("--count-future-jobs", is_flag=True, help="Count jobs whose run-after is still to come.")
@service_options
def get_job_count(
    *, queue: str, job_state: str, priority: int | None, count_future_jobs: bool
) -> None:
    """Count the jobs of a queue in a state.

    Examples:
      pinlater get-job-count --queue mail --job-state failed
      pinlater get-job-count --queue mail --count-future-jobs
    """
    with connect() as client:
        count = client.count(
            queue, state_of(job_state), priority=priority, future=count_future_jobs
        )
    show({"count": count}, str(count))


if __name__ == "__main__":
    cli(prog_name="pinlater")
