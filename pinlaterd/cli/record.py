"""The service's past: `pinlater-admin events`, `audit`, `history`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import click

from pinlaterd.cli import command
from pinlaterd.cli.operations import call_dashboard
from pinlaterd.client.coordinator import fetch_json
from pinlaterd.status import Facts

_since_option = command.option(
    "--since",
    "since_ms",
    type=command.past_moment,
    metavar="TIME",
    help="Only what happened at this time or later, such as 03:08:00 (UTC).",
)
_limit_option = command.option(
    "--limit", type=command.COUNT, default=50, help="At most so many, the latest."
)
_WHEN: command.Column = ("when", lambda row: command.shown_time(row["at_ms"]))
_EVENT_COLUMNS: Sequence[command.Column] = (_WHEN, ("what", "text"))


def _ask(page: str) -> Any:
    """Fetch a page of the coordinator. Raises ConnectionFailed."""
    return fetch_json(page, directory=command.directory(), url=command.stats_url())


@click.command(cls=command.Command)
@_since_option
@_limit_option
@command.files_options
def events(*, since_ms: int | None, limit: int) -> None:
    """Show what has happened to the service, the latest first: restarts of processes, states of
    shards, changes of the configuration, retries and deletes of jobs.

    The coordinator keeps the last 500 marks of each server; plots of the dashboard show them, too.

    Examples:
      pinlater-admin events
      pinlater-admin events --since 02:40:00 --limit 500
    """
    found = _ask(f"/events.json?servers=all&since={since_ms or 0}")["events"]
    shown = found[::-1][:limit]
    command.show(shown, lambda: command.print_table(_EVENT_COLUMNS, shown))


_AUDIT_COLUMNS: Sequence[command.Column] = (
    ("#number", "number"),
    _WHEN,
    ("who", "who"),
    ("what", "words"),
    ("reason", "reason"),
    ("outcome", lambda row: row["outcome"] or "not known: it was cut short"),
    ("undone by", "undo"),
)


@click.command(cls=command.Command)
@_since_option
@command.option("--queue", metavar="QUEUE", help="Only changes of one queue.")
@_limit_option
@command.files_options
def audit(*, since_ms: int | None, queue: str | None, limit: int) -> None:
    """Show what was changed from the dashboard and by `job delete`, the latest first: who, what,
    why, the outcome, and the command that undoes it.

    The dashboard of each server has an audit log of its own, data/audit.jsonl, which is read from
    its end, up to a MiB.

    Examples:
      pinlater-admin audit
      pinlater-admin audit --queue mail --since 02:40:00
    """
    found = [
        row
        for row in call_dashboard("GET", "/audit")
        if row["at_ms"] >= (since_ms or 0) and queue in (None, _queue_of(row["facts"]))
    ][:limit]
    command.show(found, lambda: command.print_table(_AUDIT_COLUMNS, found))


def _queue_of(facts: Facts) -> str | None:
    """Return the queue that a change is of; None for a shard's."""
    of_setting = facts.get("name") if facts.get("setting") != "dequeue_only" else None
    found: str | None = facts.get("queue", of_setting)
    return found


def _figure(at: int, row: tuple[int, Sequence[str]]) -> str:
    return row[1][at]


@click.command(cls=command.Command)
@click.argument("queue")
@command.option("--range", "span", default="1h", metavar="1h|6h|24h|7d", help="Up to now.")
@command.files_options
def history(*, queue: str, span: str) -> None:
    """Show the figures of QUEUE over time, the latest first, and what happened meanwhile.

    A row has the mean of rates, and the greatest of all else, from its time (UTC) on: of a minute,
    10 min (6h), 30 min (24h) or 3 h (7d). --json has every point that is known.

    Examples:
      pinlater-admin history mail
      pinlater-admin history mail --range 7d
    """
    from pinlaterd.web import history as plots

    if span not in plots.RANGES:
        raise click.BadParameter(f"--range: choose from {', '.join(plots.RANGES)}")
    found = plots.without_other_marks(_ask(plots.page_of(queue, span)), queue)
    lines = [(plot, label) for plot in plots.PLOTS for label in plot.lines.values()]
    columns: list[command.Column] = [("time", lambda row: command.shown_time(row[0]))]
    columns += [
        (f"#{plot.column(label)}", partial(_figure, at)) for at, (plot, label) in enumerate(lines)
    ]

    def print_tables() -> None:
        command.print_table(columns, plots.table_rows(found, plots.row_ms_of(span, found)))
        if found["events"]:
            click.echo()
            command.print_table(_EVENT_COLUMNS, found["events"][::-1])

    command.show(found, print_tables)
    for server in found["unanswered"]:
        click.echo(f"warning: without what server {server} knows: it does not answer", err=True)
