"""`pinlater-admin job-type`: the job types of Rickover's interface (etc/job_types.yaml)."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import partial

import click

from pinlaterd.cli import command
from pinlaterd.cli.shards import carry_out
from pinlaterd.config import edit
from pinlaterd.config.layout import ETC, JOB_TYPES_FILE
from pinlaterd.config.schema import (
    DEFAULT_ARCHIVE_HOURS,
    DELIVERY_STRATEGIES,
    HOURS_A_CENTURY,
    MOST_INT16,
    JobType,
    queue_of_type,
)

_POSITIVE = click.IntRange(1, MOST_INT16)
_archive_option = partial(
    command.option,
    "--archive-hours",
    type=click.FloatRange(0, HOURS_A_CENTURY),
    help="How long its ended jobs are kept.",
)


@click.group("job-type", cls=command.Group)
def job_type() -> None:
    """Add, list, change and remove job types, whose jobs clients of Rickover enqueue.

    A job type has a queue of its own, which other commands know as any queue.
    """


@job_type.command()
@click.argument("name")
@command.option(
    "--strategy",
    type=click.Choice(DELIVERY_STRATEGIES),
    default=DELIVERY_STRATEGIES[0],
    help="How often a job may run.",
)
@command.option("--attempts", type=_POSITIVE, default=1, help="Attempts of a job.")
@command.option("--concurrency", type=_POSITIVE, default=1, help="Jobs that run at a time.")
@_archive_option(default=DEFAULT_ARCHIVE_HOURS)
@command.files_options
def add(*, name: str, strategy: str, attempts: int, concurrency: int, archive_hours: float) -> None:
    """Add the job type NAME, which may be any text.

    Example: pinlater-admin job-type add invoice-shipped --attempts 5 --concurrency 3
    """
    if attempts > 1 and strategy != DELIVERY_STRATEGIES[0]:
        raise click.UsageError(f"a job type that is {strategy} has one attempt")
    queue, now = queue_of_type(name), datetime.now(UTC)
    made = JobType(name, queue, now, strategy, attempts, concurrency, archive_hours)
    etc, done = command.directory() / ETC, f"job type {name} is added"
    carry_out(lambda: edit.add_job_type(etc, made), JOB_TYPES_FILE, done)
    command.show({"job_type": name, "queue": made.queue})


@job_type.command("set")
@click.argument("name")
@command.option("--attempts", type=_POSITIVE, help="Attempts of jobs enqueued from now on.")
@command.option("--concurrency", type=_POSITIVE, help="Jobs that run at a time.")
@_archive_option()
@command.files_options
def set_settings(*, name: str, **given: float | None) -> None:
    """Change settings of the job type NAME; those that are not given stay.

    Example: pinlater-admin job-type set invoice-shipped --concurrency 10
    """
    settings = {key: value for key, value in given.items() if value is not None}
    if not settings:
        raise click.UsageError("give at least one setting")
    etc, done = command.directory() / ETC, f"job type {name} is changed"
    carry_out(lambda: edit.set_job_type(etc, name, settings), JOB_TYPES_FILE, done)


@job_type.command()
@click.argument("name")
@command.files_options
def remove(*, name: str) -> None:
    """Remove the job type NAME. Its queue stays, with the jobs in it.

    Example: pinlater-admin job-type remove invoice-shipped
    """
    etc, done = command.directory() / ETC, f"job type {name} is removed"
    carry_out(lambda: edit.remove_job_type(etc, name), JOB_TYPES_FILE, done)


@job_type.command("list")
@command.files_options
def list_job_types() -> None:
    """List the job types, the newest first.

    Example: pinlater-admin job-type list
    """
    from pinlaterd.config.load import load_config

    found = load_config(command.directory() / ETC).newest_job_types()
    rows = [
        {
            "name": one.name,
            "queue": one.queue,
            "delivery_strategy": one.delivery_strategy,
            "attempts": one.attempts,
            "concurrency": one.concurrency,
            "archive_hours": one.archive_hours,
        }
        for one in found
    ]
    columns: list[command.Column] = [
        ("job type", "name"),
        ("queue", "queue"),
        ("strategy", "delivery_strategy"),
        ("#attempts", "attempts"),
        ("#concurrency", "concurrency"),
        ("#archive hours", "archive_hours"),
    ]
    command.show(rows, lambda: command.print_table(columns, rows))
