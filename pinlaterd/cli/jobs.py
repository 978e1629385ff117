"""`pinlater-admin job …`."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable

import click

from pinlaterd.cli import options
from pinlaterd.cli.command_line import (
    COUNT,
    PRIORITY,
    STATE,
    Amount,
    show_jobs,
    state_of,
    yes_option,
)
from pinlaterd.cli.rendering import (
    NUMBER_COLUMN,
    print_facts,
    print_json,
    print_table,
    record_facts,
    shown_time,
)
from pinlaterd.model import JobRecord
from pinlaterd.wording import how_many

_MAX_DELAY_SECONDS = 100 * 366 * 86_400.0

_priority_option = click.option(
    "--priority",
    type=PRIORITY,
    default=1,
    show_default=True,
    help="Jobs of this priority only.",
)
_regex_option = click.option(
    "--body-regex", metavar="RE2", help="Only jobs whose body this is found in."
)


def _limit_option(default: int) -> Callable[[options.Command], options.Command]:
    return click.option(
        "--limit",
        type=COUNT,
        default=default,
        show_default=True,
        help="At most so many jobs.",
    )


@click.group()
def job() -> None:
    """Look at jobs, retry them, delete them."""


@job.command()
@click.argument("descriptors", nargs=-1, required=True, metavar="DESCRIPTOR...")
@options.json_option
@options.target_options
def lookup(*, descriptors: tuple[str, ...], as_json: bool) -> None:
    """Show all that is known of jobs. Exit 1 if one of them is unknown.

    \b
    Example:
      pinlater-admin job lookup mail:s1:p1:1 mail:s2:p1:7
    """
    with options.connect() as client:
        show_jobs(client, descriptors, as_json=as_json)


@job.command()
@click.argument("queue")
@click.argument("state", type=STATE)
@click.option("--priority", type=PRIORITY, help="Jobs of this priority only  [default: all]")
@click.option("--future", is_flag=True, help="Jobs whose run-after is still to come.")
@_regex_option
@_limit_option(100)
@options.json_option
@options.target_options
def scan(
    *,
    queue: str,
    state: str,
    priority: int | None,
    future: bool,
    body_regex: str | None,
    limit: int,
    as_json: bool,
) -> None:
    """List jobs of QUEUE in STATE, the latest run-after first.

    \b
    Examples:
      pinlater-admin job scan mail failed --limit 20
      pinlater-admin job scan mail pending --future --body-regex '^to: ada'
    """
    with options.connect() as client:
        found = client.scan(
            queue,
            state_of(state),
            priority=priority,
            future=future,
            body_regex=body_regex,
            page_size=min(limit, 1000),
        )
        records = list(itertools.islice(found, limit))
    if as_json:
        print_json([record_facts(record) for record in records])
    else:
        print_table(
            ("descriptor", "run after", f"{NUMBER_COLUMN}attempts left", "custom status"),
            [_row(record) for record in records],
        )


@job.command()
@click.argument("queue")
@_priority_option
@click.option(
    "--attempts",
    type=COUNT,
    default=1,
    show_default=True,
    help="Attempts that each job gets.",
)
@click.option(
    "--delay-seconds",
    type=Amount(_MAX_DELAY_SECONDS, least=0),
    help="Run them so much later  [default: now]",
)
@_limit_option(1000)
@options.json_option
@options.target_options
def retry(
    *,
    queue: str,
    priority: int,
    attempts: int,
    delay_seconds: float | None,
    limit: int,
    as_json: bool,
) -> None:
    """Make failed jobs of QUEUE pending again, the oldest first.

    \b
    Example:
      pinlater-admin job retry mail --attempts 3 --limit 10000
    """
    run_after_ms = None
    if delay_seconds:
        run_after_ms = round((time.time() + delay_seconds) * 1000)
    with options.connect() as client:
        retried = client.retry_failed(
            queue,
            priority=priority,
            attempts_to_allow=attempts,
            run_after_ms=run_after_ms,
            limit=limit,
        )
    shown = f"{how_many(retried, 'job')} made pending again"
    print_facts({"retried": retried}, shown, as_json=as_json)


@job.command()
@click.argument("queue")
@click.argument("state", type=STATE)
@_priority_option
@_regex_option
@_limit_option(1000)
@yes_option
@options.json_option
@options.target_options
def delete(
    *,
    queue: str,
    state: str,
    priority: int,
    body_regex: str | None,
    limit: int,
    yes: bool,
    as_json: bool,
) -> None:
    """Delete jobs of QUEUE in STATE.

    \b
    Examples:
      pinlater-admin job delete mail failed --limit 100
      pinlater-admin job delete mail pending --body-regex '@example[.]com' --yes
    """
    if not yes:
        if not sys.stdin.isatty():
            raise click.UsageError("nobody can be asked whether to delete; give --yes if so")
        matching = f" whose body matches {body_regex!r}" if body_regex is not None else ""
        click.confirm(
            f"Delete up to {how_many(limit, 'job')} of {queue}, priority {priority}, in state "
            f"{state_of(state).name}{matching}?",
            abort=True,
            err=True,
        )
    with options.connect() as client:
        deleted = client.delete_jobs(
            queue, state_of(state), priority=priority, body_regex=body_regex, limit=limit
        )
    shown = f"{how_many(deleted, 'job')} deleted"
    print_facts({"deleted": deleted}, shown, as_json=as_json)


def _row(record: JobRecord) -> tuple[str, str, str, str]:
    return (
        record.descriptor,
        shown_time(record.run_after_ms),
        f"{record.attempts_remaining} of {record.attempts_allowed}",
        record.custom_status,
    )
