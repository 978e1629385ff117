"""The page of workers: the sources that call for jobs, and the jobs that each holds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from aiohttp import web

from pinlaterd.access import may
from pinlaterd.status import Facts
from pinlaterd.web import text
from pinlaterd.web.site import USER, Site

_PAGE = "/workers.json"
_SILENT_SECONDS = 60.0  # without a call for jobs: it is idle, stuck or gone
_MANY_FAILED = 0.05  # of a worker's jobs
_MOST_ROWS = 500


class WorkerColumn(NamedTuple):
    """A column of figures."""

    key: str
    title: str
    value: Callable[[Facts], str]


COLUMNS = (
    WorkerColumn("called", "asked", lambda one: _ago(one["dequeue_seconds"])),
    WorkerColumn("acked", "acked", lambda one: _ago(one["ack_seconds"])),
    WorkerColumn("rate", "jobs/s", lambda one: text.rate(one["jobs_per_second"])),
    WorkerColumn("failing", "failed", lambda one: _percent(one["failed_share"])),
    WorkerColumn("held", "holds", lambda one: text.number(one["held"])),
    WorkerColumn("renewed", "oldest renewal", lambda one: _ago(one["oldest_renewal_seconds"])),
    WorkerColumn("near", "near time-out", lambda one: text.number(one["near_time_out"])),
)


class WorkerRow(NamedTuple):
    """A worker of a queue. `state` has the mark and the colour, `words` say it."""

    queue: str
    source: str
    state: str
    words: str
    cells: Sequence[tuple[WorkerColumn, str]]


# The worst first.
_ORDER = ("timing_out", "failing", "behind", "well", "idle")


def row_of(worker: Facts) -> WorkerRow:
    """Return the row of a worker, with the judgement of it."""
    silent = worker["dequeue_seconds"]
    if worker["near_time_out"]:
        state, words = "timing_out", "Claims near time-out"
    elif silent is None or silent >= _SILENT_SECONDS:
        # Its share of failures is of a time that is over.
        state, words = "idle", "Asks no more"
        if silent is not None and worker["held"]:
            state, words = "behind", "Asks no more, holds jobs"
    elif (worker["failed_share"] or 0) >= _MANY_FAILED:
        state, words = "failing", f"Fails {_percent(worker['failed_share'])}"
    else:
        state, words = "well", "Well"
    cells = [(column, column.value(worker)) for column in COLUMNS]
    return WorkerRow(worker["queue"], worker["source"], state, words, cells)


def routes(site: Site) -> list[web.RouteDef]:
    """Return the route of the page."""

    async def show(request: web.Request) -> web.StreamResponse:
        queue, user = request.query.get("queue", ""), request.get(USER)
        site.check_right(request, "view", queue)
        found = await site.frames.fetch(_PAGE)
        rows = [
            row_of(worker)
            for worker in found["workers"]
            if may(user, "view", worker["queue"]) and queue in ("", worker["queue"])
        ]
        rows.sort(key=lambda row: _ORDER.index(row.state))
        return site.render(
            request,
            "workers.html",
            queue=queue,
            columns=COLUMNS,
            rows=rows[:_MOST_ROWS],
            left_out=max(0, len(rows) - _MOST_ROWS),
            all_claims=found["all_claims"],
        )

    return [site.page("/workers", show)]


def _percent(share: float | None) -> str:
    return text.UNKNOWN if share is None else text.percent(100 * share)


def _ago(seconds: float | None) -> str:
    return text.UNKNOWN if seconds is None else f"{text.duration(seconds * 1000)} ago"
