"""The history of a queue: what its plots draw, and the same as a table."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode

import msgspec
from aiohttp import web

from pinlaterd.status import Facts
from pinlaterd.web import text
from pinlaterd.web.refusals import PageProblem
from pinlaterd.web.site import Site

RANGES: Mapping[str, str] = {"1h": "1 h", "6h": "6 h", "24h": "24 h", "7d": "7 d"}
_USUAL_RANGE = "1h"
_ROW_MINUTES: Mapping[str, int] = {"1h": 1, "6h": 10, "24h": 30, "7d": 180}  # of the table


class Plot(NamedTuple):
    """A plot: the names of its lines by their series, which have a unit in common."""

    title: str
    about: str
    unit: str  # rate, jobs or time
    lines: Mapping[str, str]

    def column(self, label: str) -> str:
        """Return the title of a line's column in a table without the plots' titles."""
        if self.unit == "time":
            return f"{self.title.partition(' ')[0].lower()} {label}"
        return f"{label}/s" if self.unit == "rate" else label


_RATES = {"in": "in", "out": "out", "failed_attempts": "failed"}
_WAITS = {"wait_p50_ms": "p50", "wait_p95_ms": "p95", "wait_p99_ms": "p99"}
PLOTS = (
    Plot("In, out, failed", "jobs a second", "rate", _RATES),
    Plot("Depth", "jobs", "jobs", {name: name for name in ("ready", "scheduled", "running")}),
    Plot("Wait", "until handed out", "time", _WAITS),
    Plot("Oldest ready job", "how long it has waited", "time", {"oldest_ms": "age"}),
)
_WORDS = {"rate": text.rate, "jobs": text.number, "time": text.duration}


def values_of(request: web.Request, queue: str) -> Mapping[str, Any]:
    """Return what plots.html shows for a request: the range that its query asks for. A link to
    another range keeps the rest of the query, but the place in a list."""
    asked = request.query.get("range", _USUAL_RANGE)
    others = [
        (name, value) for name, value in request.query.items() if name not in ("range", "cursor")
    ]
    return {
        "plots": PLOTS,
        "ranges": RANGES,
        "range": asked if asked in RANGES else _USUAL_RANGE,
        "kept": urlencode(others) + "&" if others else "",
        "history": f"/q/{quote(queue)}/history",
    }


def routes(site: Site) -> list[web.RouteDef]:
    """Return the routes of the figures, and of their table."""

    async def figures(request: web.Request) -> web.StreamResponse:
        body = msgspec.json.encode(await _fetch(site, request))
        answer = web.Response(body=body, content_type="application/json", charset="utf-8")
        answer.enable_compression()
        return answer

    async def table(request: web.Request) -> web.StreamResponse:
        found, queue = await _fetch(site, request), request.match_info["queue"]
        values = values_of(request, queue)
        row_ms = row_ms_of(values["range"], found)
        return site.render(
            request,
            "history.html",
            name=queue,
            rows=table_rows(found, row_ms),
            row_ms=row_ms,
            marks=list(reversed(found["events"])),
            unanswered=found["unanswered"],
            command=shlex.join(["pinlater-admin", "history", queue, "--range", values["range"]]),
            **values,
        )

    path = "/q/{queue}/history"
    return [site.page(f"{path}.json", figures), site.page(path, table)]


async def _fetch(site: Site, request: web.Request) -> Facts:
    """Ask the coordinator for a queue's history. Raises ConnectionFailed, or PageProblem."""
    queue, asked = request.match_info["queue"], request.query.get("range", _USUAL_RANGE)
    if asked not in RANGES:
        cure = f"Choose from {', '.join(RANGES)}."
        raise PageProblem(HTTPStatus.BAD_REQUEST, f"There is no range {asked[:20]!r}.", cure)
    return without_other_marks(await site.frames.fetch(page_of(queue, asked)), queue)


def page_of(queue: str, asked: str) -> str:
    """Return the coordinator's page of a queue's history over a range."""
    return f"/history.json?queue={quote(queue)}&since={asked}&servers=all"


def without_other_marks(found: Facts, queue: str) -> Facts:
    """Return a history without what was done to other queues, which is no matter of this one."""
    marks = [
        mark
        for mark in found["events"]
        if mark["kind"] not in ("config", "mend") or mark["about"] in ("", queue)
    ]
    return {**found, "events": marks}


def row_ms_of(asked: str, found: Facts) -> int:
    """Return how long a row of the table is, of a history over a range."""
    return max(int(found["step_ms"]), _ROW_MINUTES[asked] * 60_000)


def table_rows(found: Facts, row_ms: int) -> Sequence[tuple[int, Sequence[str]]]:
    """Return a history as words, the newest first, in rows of so many milliseconds: of rates their
    mean, of all else the greatest."""
    series, step_ms = found["series"], found["step_ms"]
    lines = [(series[line], plot.unit) for plot in PLOTS for line in plot.lines]
    places: dict[int, list[int]] = {}  # of a row's points, by its time
    for place in range(max(map(len, series.values()), default=0)):
        at_ms = found["from_ms"] + place * step_ms
        places.setdefault(at_ms - at_ms % row_ms, []).append(place)
    rows = [
        (at_ms, [_whole([values[place] for place in of_row], unit) for values, unit in lines])
        for at_ms, of_row in reversed(places.items())
    ]
    while rows and set(rows[-1][1]) == {text.UNKNOWN}:  # before the first that is known
        rows.pop()
    return rows


def _whole(values: Sequence[float | None], unit: str) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return text.UNKNOWN
    return _WORDS[unit](sum(known) / len(known) if unit == "rate" else max(known))
