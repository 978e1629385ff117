"""The page of the system: shards, processes, configuration, job types, what happened lately."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

from aiohttp import web

from pinlaterd.access import may, may_with_all_queues
from pinlaterd.config.schema import UserSettings
from pinlaterd.status import Facts
from pinlaterd.web import text
from pinlaterd.web.live import Cells, LiveFrame
from pinlaterd.web.refusals import HIDDEN_MISTAKES
from pinlaterd.web.site import ALL_QUEUES, USER, Site

_SERVING = "serving"
_MOST_EVENTS = 50
_OF_QUEUES = ("config", "mend")  # kinds of events that name queues
# Rickover's variable: a page that operators want to see here, too.
_FRAME_VARIABLE = "HOMEPAGE_IFRAME_URL"


class PartColumn(NamedTuple):
    """A column of the tables of shards and of processes."""

    key: str
    title: str
    value: Callable[[Facts], str]
    is_figure: bool = False


SHARD_COLUMNS = (
    PartColumn("state", "state", lambda shard: shard_state(shard)[1]),
    PartColumn("server", "server", lambda shard: shard["server"] or "this one"),
    PartColumn("store", "store", lambda shard: f"{shard['engine']} {shard['where']}".strip()),
    PartColumn("ready", "ready", lambda shard: _jobs(shard, "pending"), is_figure=True),
    PartColumn("scheduled", "scheduled", lambda shard: _jobs(shard, "scheduled"), is_figure=True),
    PartColumn("running", "running", lambda shard: _jobs(shard, "in_progress"), is_figure=True),
    PartColumn("failed", "failed", lambda shard: _jobs(shard, "failed"), is_figure=True),
    PartColumn("jobs", "jobs/s", lambda shard: text.rate(shard["jobs_per_second"]), is_figure=True),
    PartColumn(
        "commit", "commit p99", lambda shard: text.duration(shard["commit_p99_ms"]), is_figure=True
    ),
)
PROCESS_COLUMNS = (
    PartColumn("state", "state", lambda process: process["state"]),
    PartColumn("cpu", "CPU", lambda process: _if_up(process, "cpu_percent", "{:.1f} %"), True),
    PartColumn("memory", "memory", lambda process: text.size(process["rss_bytes"] or None), True),
    PartColumn("pid", "pid", lambda process: _if_up(process, "pid", "{}"), True),
)


def shard_state(shard: Facts) -> tuple[str, str]:
    """Return the state of a shard for the style, and in words."""
    if shard["state"] != _SERVING:
        return "stopped", shard["state"]
    if shard["degraded"]:
        return "behind", f"degraded: {shard['degraded']}"
    return ("paused", "dequeue-only") if shard["dequeue_only"] else ("well", _SERVING)


def process_state(process: Facts) -> tuple[str, str]:
    """Return the state of a process for the style, and in words."""
    return ("well" if process["state"] == _SERVING else "stopped"), process["state"]


def _if_up(process: Facts, fact: str, words: str) -> str:
    """Return a figure of a running process, or UNKNOWN if it has ended: its last pid would
    mislead."""
    return words.format(process[fact]) if process["rss_bytes"] else text.UNKNOWN


def _jobs(shard: Facts, state: str) -> str:
    return text.number(shard["jobs"][state] if shard["jobs"] is not None else None)


def cells_of(frame: LiveFrame, _name: str, _user: UserSettings | None) -> Cells:
    """Return the texts of the page that change."""
    cells: dict[str, str] = {}
    for kind, columns, state_of in (
        ("shard", SHARD_COLUMNS, shard_state),
        ("process", PROCESS_COLUMNS, process_state),
    ):
        for part in frame.facts["shards" if kind == "shard" else "processes"]:
            cells[f"{kind} {part['name']} mark"] = state_of(part)[0]
            cells |= {
                f"{kind} {part['name']} {column.key}": column.value(part) for column in columns
            }
    return cells


def routes(site: Site) -> list[web.RouteDef]:
    """Return the route of the page."""

    async def show(request: web.Request) -> web.StreamResponse:
        frame, user = await site.frames.now(), request.get(USER)
        status = await site.frames.ask("/status.json?servers=all") or {}
        marks = await site.frames.ask("/events.json?servers=all")
        events = [
            one
            for one in (marks or {}).get("events", ())
            if one["kind"] not in _OF_QUEUES or may(user, "view", one["about"])
        ]
        processes = frame.facts["processes"]
        frame_url = os.environ.get(_FRAME_VARIABLE, "")
        answer = site.render(
            request,
            "system.html",
            queue=ALL_QUEUES,
            cells=cells_of(frame, "", None),
            shards=frame.facts["shards"],
            processes=processes,
            shard_columns=SHARD_COLUMNS,
            process_columns=PROCESS_COLUMNS,
            restarts={
                one["name"]: _restarts(one["name"], marks, site.clock.now_ms()) for one in processes
            },
            notes=_notes(status, may_name_queues=may_with_all_queues(user, "view")),
            events=list(reversed(events))[:_MOST_EVENTS],
            is_known=marks is not None,
            job_types=[
                one for one in site.config.newest_job_types() if may(user, "view", one.queue)
            ],
            frame_url=frame_url,
        )
        if frame_url:
            site.allow_frame(answer, "{0.scheme}://{0.netloc}".format(urlsplit(frame_url)))
        return answer

    site.live.add("system", cells_of)
    return [site.page("/system", show)]


def _restarts(process: str, marks: Facts | None, now_ms: int) -> str:
    """Return how often a process was restarted in the last day, as far as marks of that are
    kept."""
    if marks is None:
        return text.UNKNOWN
    # Of several servers both begin with the server's name.
    begin = f"{process.replace('/', ': ')} restarted"
    of_day = (one for one in marks["events"] if one["at_ms"] >= now_ms - text.DAY_MS)
    return text.number(sum(one["text"].startswith(begin) for one in of_day))


class Note(NamedTuple):
    """A remark of the service about itself."""

    state: str
    title: str
    text: str


def _notes(status: Facts, *, may_name_queues: bool) -> Sequence[Note]:
    """Return what is wrong, and what waits for somebody."""
    if status.get("config_problems") and not may_name_queues:
        status = {**status, "config_problems": [HIDDEN_MISTAKES]}
    kinds = (
        ("stopped", "Problem", "problems"),
        ("behind", "Configuration", "config_problems"),
        ("behind", "Needs a restart", "needs_restart"),
        ("behind", "Warning", "warnings"),
    )
    return [Note(state, title, each) for state, title, key in kinds for each in status.get(key, ())]
