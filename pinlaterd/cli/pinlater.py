"""The command line `pinlater`."""

from __future__ import annotations

import click

from pinlaterd import __version__
from pinlaterd.cli import command, load_commands
from pinlaterd.cli.bench import bench
from pinlaterd.cli.worker import worker


@click.group("pinlater", cls=command.CommandLine, context_settings=command.WIDTH)
@click.version_option(__version__, prog_name="pinlater")
def cli() -> None:
    """Use and load a PinLater service from the command line.

    Examples:
      pinlater create --queue mail
      pinlater enqueue --queue mail --num-queries 1000 --batch-size 100 --concurrency 8
      pinlater dequeue --queue mail --num-queries -1 --batch-size 100
      printf 'one\\ntwo\\n' | pinlater enqueue --queue mail --from-file -
    """


for each in (
    load_commands.enqueue,
    load_commands.dequeue,
    load_commands.check_dequeue,
    bench,
    worker,
):
    cli.add_command(each)


@cli.command()
@load_commands.queue_option
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
    required=True,
    multiple=True,
    metavar="DESCRIPTOR",
    help="A job; may be given several times.",
)
@command.service_options
def lookup(*, descriptors: tuple[str, ...]) -> None:
    """Show all that is known of jobs. Exit 1 if one of them is unknown.

    Example: pinlater lookup --job-descriptor mail:s1:p1:1 --job-descriptor mail:s2:p1:7
    """
    command.show_jobs(descriptors)


@cli.command("get-queue-names")
@command.service_options
def get_queue_names() -> None:
    """List the queues.

    Example: pinlater get-queue-names --host queue.example.com
    """
    command.show_queue_names()


@cli.command("get-job-count")
@load_commands.queue_option
@command.option("--job-state", type=command.STATE, default="pending", help="The state.")
@load_commands.priority_option
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
    with command.connect() as client:
        count = client.count(
            queue, command.state_of(job_state), priority=priority, future=count_future_jobs
        )
    command.show({"count": count}, str(count))


if __name__ == "__main__":
    cli(prog_name="pinlater")
