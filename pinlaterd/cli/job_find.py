"""`pinlater-admin job find`: jobs by descriptor, key or claim, else by text in their bodies.

It searches as the dashboard's page does, by the same code.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

import click

from pinlaterd.cli import command, service_status
from pinlaterd.clock import Clock
from pinlaterd.errors import ConnectionFailed
from pinlaterd.model import JobDescriptor, JobRecord, claim_source

if TYPE_CHECKING:
    from pinlaterd.client import AsyncClient
    from pinlaterd.web.find import JobSearch, SearchQuery

_PROGRESS_SECONDS = 1.0


@click.command(cls=command.Command)
@click.argument("text")
@command.option("--re2", "is_regex", is_flag=True, help="TEXT is an RE2 pattern.")
@command.option(
    "--queue",
    "globs",
    multiple=True,
    metavar="GLOB",
    help="Only queues whose names match; give it again for more  [default: all]",
)
@command.option(
    "--state",
    "states",
    multiple=True,
    metavar="STATE",
    help="Only failed, running, ready, scheduled or succeeded jobs; give it again for more.",
)
@command.option("--limit", type=command.COUNT, default=200, help="At most so many jobs.")
@command.progress_option
@command.admin_options
def find(
    *,
    text: str,
    is_regex: bool,
    globs: Sequence[str],
    states: Sequence[str],
    limit: int,
    progress: bool | None,
) -> None:
    """Find jobs in all queues.

    TEXT is a descriptor or a key, which names one job; a claim descriptor, for the jobs that its
    worker runs; else it is searched for in bodies. Ctrl-C ends the search, and shows what it has
    found. Shards that are unavailable are left out, and named on stderr.

    Examples:
      pinlater-admin job find mail:s1:p1:4711
      pinlater-admin job find ada@example.com --state failed --queue 'mail*'
      pinlater-admin job find --re2 '"order": *17[,}]'
    """
    from pinlaterd.web.find import STATES, SearchQuery

    if wrong := [state for state in states if state not in STATES]:
        raise click.BadParameter(f"{wrong[0]!r} is no state; choose from {', '.join(STATES)}")
    text, worker = text.strip(), claim_source(text)
    if not text:
        raise click.BadParameter("there is nothing to search for")
    of_states = ("running",) if worker is not None else tuple(states) or STATES
    query = SearchQuery(text, is_regex, of_states, worker=worker)
    asyncio.run(_find(query, globs, limit, shows=command.shows_progress(asked=progress)))


async def _find(query: SearchQuery, globs: Sequence[str], limit: int, *, shows: bool) -> None:
    """Show the job that a text names, or those that are found as far as it is searched."""
    from pinlaterd.web.find import JobSearch, holders_of, jobs_in

    with command.connect() as service:
        client = service.asynchronous()
    async with client:
        if JobDescriptor.parse(query.text) is not None:
            await _show_job(client, query.text)
            return
        names = sorted(await client.queue_names())
        patterns = globs or ["*"]
        queues = [one for one in names if any(fnmatchcase(one, each) for each in patterns)]
        if not queues:
            command.fail("no queue matches; `pinlater-admin queue list` shows those there are")
        holders = await holders_of(client, query.text, queues)
        if len(holders) == 1:
            await _show_job(client, holders[0])
            return
        about = None
        with suppress(ConnectionFailed):  # of the coordinator, which a search does not need
            about = jobs_in(service_status.take_frame(), query, queues)
        clock = Clock()
        search = JobSearch(query, queues, about, math.inf, limit)  # it may be paused
        await _search(search, client, clock, limit, shows=shows)


async def _show_job(client: AsyncClient, descriptor: str) -> None:
    records = await client.lookup([descriptor], include_body=True)
    if not records:
        command.fail(f"unknown: {command.printable(descriptor)}")
    [record] = records.values()
    command.show([command.record_facts(record)], command.record_text(record))


async def _search(
    search: JobSearch, client: AsyncClient, clock: Clock, limit: int, *, shows: bool
) -> None:
    """Search, and show what is found, also if it is interrupted or fails meanwhile."""
    task = asyncio.create_task(search.run(client, clock))
    try:
        while not task.done():
            await asyncio.wait({task}, timeout=_PROGRESS_SECONDS)
            far = search.progress(clock.monotonic())
            if shows:
                about = "?" if far["about"] is None else f"{far['about']:,}"
                click.echo(
                    f"looked at {far['looked_at']:,} of about {about} jobs, {far['queues']}, "
                    f"{far['found']:,} found",
                    err=True,
                )
        task.result()
    finally:
        task.cancel()
        await asyncio.wait({task})
        if search.found or not (task.cancelled() or task.exception()):
            _show_found(search.found[:limit])
    if search.problem:
        click.echo(f"it ended at {limit:,} jobs: --limit finds more", err=True)
    command.warn_without(search.missing_shards)


def _show_found(records: Sequence[JobRecord]) -> None:
    from pinlaterd.web.job import last_said, look_of

    now_ms = Clock().now_ms()
    columns: Sequence[command.Column] = (
        ("job", lambda job: job.descriptor),
        ("state", lambda job: look_of(job, now_ms).word),
        ("changed", lambda job: command.shown_time(job.updated_at_ms)),
        ("last status", lambda job: last_said(job, "")),
    )
    facts = [command.record_facts(record) for record in records]
    command.show(facts, lambda: command.print_table(columns, records))
