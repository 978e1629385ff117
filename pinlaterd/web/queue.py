"""The page of a queue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import NamedTuple

from aiohttp import web

from pinlaterd.access import may
from pinlaterd.client import calls
from pinlaterd.config.schema import QueueSettings, UserSettings
from pinlaterd.status import Facts
from pinlaterd.web import text
from pinlaterd.web.live import Cells, LiveFrame
from pinlaterd.web.overview import row_cells, rows_of
from pinlaterd.web.refusals import PageProblem
from pinlaterd.web.site import Site


class Figure(NamedTuple):
    """A large number with what it counts below. `key`: of its cell."""

    key: str
    value: str
    label: str


def figures_of(queue: Facts, settings: QueueSettings) -> Sequence[Figure]:
    """Return the queue's jobs by state."""
    oldest = text.duration(queue["oldest_ready_age_ms"])
    succeeded = text.duration(settings.job_succeeded_ttl_hours * 3_600_000)
    failed = text.duration(settings.job_failed_ttl_hours * 3_600_000)
    return [
        Figure("ready", text.number(queue["pending"]), f"ready, oldest {oldest}"),
        Figure("scheduled", text.number(queue["scheduled"]), "scheduled"),
        Figure("running", text.number(queue["in_progress"]), "running"),
        Figure("succeeded", text.short(queue["succeeded"]), f"succeeded, kept {succeeded}"),
        Figure("failed", text.number(queue["failed"]), f"failed, kept {failed}"),
    ]


def settings_of_queue(settings: QueueSettings) -> Mapping[str, str]:
    """Return the queue's limits and times in words."""
    claim = text.duration(settings.job_claimed_timeout_seconds * 1000)
    found = {
        "dequeues": (settings.max_jobs_per_second, "at most {} jobs/s"),
        "running at a time": (settings.max_in_progress, "at most {} jobs"),
        "pending": (settings.max_pending, "at most {} jobs"),
    }
    limits = {
        name: words.format(text.number(limit))
        for name, (limit, words) in found.items()
        if limit is not None
    }
    return {"claims end after": claim, **limits}


def routes(site: Site) -> list[web.RouteDef]:
    """Return the route of the page."""

    async def show(request: web.Request) -> web.StreamResponse:
        name = request.match_info["queue"]
        frame = await site.frames.now()
        queue = _find(frame.facts, name)
        if queue is None:
            # It may be newer than the last figures, or hold nothing yet.
            if name not in await site.client.run(calls.queue_names()):
                cure = "The overview lists all queues."
                raise PageProblem(HTTPStatus.NOT_FOUND, f"There is no queue {name}.", cure)
            return site.render(request, "queue_unknown.html", name=name)
        settings = site.config.queue(name)
        [row] = rows_of(frame._replace(facts={"queues": [queue]}), None)
        return site.render(
            request,
            "queue.html",
            name=name,
            row=row,
            figures=figures_of(queue, settings),
            settings=settings_of_queue(settings),
        )

    def cells(frame: LiveFrame, name: str, user: UserSettings | None) -> Cells:
        found = _find(frame.facts, name)
        if found is None or not may(user, "view", name):
            return {}
        rows = rows_of(frame._replace(facts={"queues": [found]}), None)
        figures = figures_of(found, site.config.queue(name))
        numbers = {f"figure {one.key}": one.value for one in figures}
        labels = {f"label {one.key}": one.label for one in figures}
        return {**row_cells(rows[0]), **numbers, **labels}

    site.live.add("queue", cells)
    return [site.page("/q/{queue}", show)]


def _find(facts: Facts, name: str) -> Facts | None:
    return next((queue for queue in facts["queues"] if queue["name"] == name), None)
