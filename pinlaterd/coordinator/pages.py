"""The HTTP pages: figures, status, what happened lately, and history.

Read-only, on the statistics port and on run/stats.sock. `?process=shard-1` narrows figures down to
one process: /stats.txt in Ostrich's layout, /metrics in Prometheus' format, with queue, method,
code and process as labels. /snapshot.json has them by process and with their histograms' buckets:
the difference of two is what happened in between. /frame.json has what `top` shows of the last
seconds. With `?servers=all` these and /status.json are of all servers of the cluster.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from http import HTTPStatus
from typing import Any, NamedTuple, Protocol

import msgspec
from aiohttp import web

from pinlaterd.coordinator.overview import Overview, QuestionError, is_whole
from pinlaterd.stats import (
    BODY_SIZE,
    COUNTERS,
    GAUGES,
    HISTOGRAMS,
    SHOWN_PERCENTILES,
    STATES,
    Histogram,
    StatsSnapshot,
    merge,
    percentiles,
    summary,
)
from pinlaterd.status import Sample, Status

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "pinlaterd_"
_CALL = re.compile(r"PinLaterService\.(\w+)_msec")
_CALL_ERROR = re.compile(r"PinLater\.(\w+)\.errors\.(\w+)")
_NOT_ALLOWED = re.compile(r"[^a-zA-Z0-9_]")
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
_SUFFIXES = {"counter": "_total", "gauge": "", "summary": ""}
# So that each part of a page takes a few milliseconds, also where everything has changed.
_FIGURES_AT_ONCE = {"counter": 2_000, "gauge": 2_000, "summary": 200}
_LINES_AT_ONCE = 5_000


class Whole(Protocol):
    async def __call__(self, *, statistics: bool) -> Sample: ...


_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Pages:
    def __init__(
        self,
        status: Callable[[], Status],
        stats: Callable[[], Mapping[str, StatsSnapshot]],
        whole: Whole,
        overview: Overview,
    ) -> None:
        """`whole`: both, of all servers of the cluster."""
        self._status = status
        self._stats = stats
        self._whole = whole
        self._prometheus = PrometheusText()
        self._handlers: Mapping[str, _Handler] = {
            "/stats.txt": self._stats_text,
            "/stats.json": self._stats_json,
            "/metrics": self._metrics,
            "/health": self._health,
            "/status.json": self._status_json,
            "/snapshot.json": self._snapshot_json,
            "/frame.json": _answers(overview.read_frame),
            "/history.json": _answers(overview.read_history),
            "/outlines.json": _answers(overview.read_outlines),
            "/events.json": _answers(overview.read_events),
            "/workers.json": _answers(overview.read_workers),
            "/failures.json": _answers(overview.read_failures),
        }

    def application(self) -> web.Application:
        application = web.Application(middlewares=[_plain_errors])
        for path, handler in {"/": self._index, **self._handlers}.items():
            application.router.add_get(path, handler)
        return application

    async def _index(self, _request: web.Request) -> web.Response:
        return web.Response(text="".join(f"{page}\n" for page in self._handlers))

    async def _stats_text(self, request: web.Request) -> web.Response:
        return web.Response(text=ostrich(merge(self._chosen(request).values())))

    async def _stats_json(self, request: web.Request) -> web.Response:
        chosen = self._chosen(request)
        each = {name: figures(snapshot) for name, snapshot in chosen.items()}
        body = {**figures(merge(chosen.values())), "processes": each}
        return web.json_response(body)

    async def _metrics(self, request: web.Request) -> web.Response:
        parts = self._parts(self._chosen(request))
        return web.Response(body=parts, headers={"Content-Type": CONTENT_TYPE})

    async def _parts(self, stats: Mapping[str, StatsSnapshot]) -> AsyncIterator[bytes]:
        """Yield the parts in turns of the loop with others: with many queues the page is long."""
        for part in self._prometheus.of(stats):
            if part:
                yield part
            await asyncio.sleep(0)

    async def _health(self, _request: web.Request) -> web.Response:
        found = self._status()
        return web.json_response(
            {
                "healthy": found["healthy"],
                "problems": found["problems"],
                "degraded": {s["name"]: s["degraded"] for s in found["shards"] if s["degraded"]},
            },
            status=HTTPStatus.OK if found["healthy"] else HTTPStatus.SERVICE_UNAVAILABLE,
        )

    async def _status_json(self, request: web.Request) -> web.Response:
        if not is_whole(request.query):
            return web.json_response(self._status())
        return web.json_response((await self._whole(statistics=False)).status)

    async def _snapshot_json(self, request: web.Request) -> web.Response:
        if is_whole(request.query):
            stats = (await self._whole(statistics=True)).stats
        else:
            stats = self._chosen(request)
        return _json(stats)

    def _chosen(self, request: web.Request) -> Mapping[str, StatsSnapshot]:
        stats = self._stats()
        process = request.query.get("process")
        if process is None:
            return stats
        if process not in stats:
            names = ", ".join(stats)
            raise web.HTTPNotFound(text=f"no process {process!r}; choose from {names}\n")
        return {process: stats[process]}


def _json(found: object) -> web.Response:
    body = msgspec.json.encode(found)
    return web.Response(body=body, content_type="application/json", charset="utf-8")


def _answers(read: Callable[[Mapping[str, str]], Awaitable[object]]) -> _Handler:
    """Make the handler that answers with what `read` returns for a request's query."""

    async def handler(request: web.Request) -> web.Response:
        return _json(await read(request.query))

    return handler


@web.middleware
async def _plain_errors(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Say in JSON what is wrong, and what there is instead."""
    try:
        return await handler(request)
    except web.HTTPMethodNotAllowed as error:
        return _error(error, "only GET and HEAD are answered here")
    except QuestionError as error:
        return _error(web.HTTPBadRequest(), str(error))
    except web.HTTPNotFound as error:
        text = (error.text or "").strip()
        return _error(error, text if "process" in text else "no such page; see /")


def _error(error: web.HTTPException, what: str) -> web.Response:
    headers = {key: value for key, value in error.headers.items() if key == "Allow"}
    body = json.dumps({"error": what})
    return web.Response(
        status=error.status, text=body, content_type="application/json", headers=headers
    )


# --- Ostrich's layout, and JSON ---------------------------------------------------------------


def figures(snapshot: StatsSnapshot) -> Mapping[str, Mapping[str, Any]]:
    """Return the content of /stats.json: Ostrich's four sections, of which labels stay empty."""
    gauges = snapshot["gauges"] | snapshot["peaks"]
    return {
        "counters": dict(sorted(snapshot["counters"].items())),
        "gauges": {name: _plain(value) for name, value in sorted(gauges.items())},
        "labels": {},
        "metrics": {
            name: {key: _plain(value) for key, value in summary(data).items()}
            for name, data in sorted(snapshot["histograms"].items())
        },
    }


def ostrich(snapshot: StatsSnapshot) -> str:
    """Write the text that PinLater's /stats.txt had."""
    shown = figures(snapshot)
    lines = ["counters:"]
    lines += [f"  {_one_line(name)}: {count}" for name, count in shown["counters"].items()]
    lines.append("gauges:")
    lines += [f"  {_one_line(name)}: {value}" for name, value in shown["gauges"].items()]
    lines.append("labels:")
    lines.append("metrics:")
    for name, metric in shown["metrics"].items():
        inner = ", ".join(f"{key}={value}" for key, value in metric.items())
        lines.append(f"  {_one_line(name)}: ({inner})")
    return "\n".join(lines) + "\n"


def _plain(value: float) -> float:
    """Round to three digits behind the point; whole numbers have no point."""
    if isinstance(value, int) or value.is_integer():
        return int(value)
    return round(value, 3)


def _one_line(text: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in text)


# --- Prometheus ------------------------------------------------------------------------------

# The figures of queues and of calls become metrics with labels; any other name becomes a metric of
# its own, with what Prometheus does not allow replaced by `_`.

Figure = float | Histogram


# Of a queue: its name, then the longest that fits: `mail_checkpoint_noop` is no figure of a queue
# `mail_checkpoint`.
_OF_QUEUES = {
    kind: re.compile(f"(.*?)_({'|'.join(names)})", re.DOTALL)
    for kind, names in (
        ("counter", COUNTERS),
        ("gauge", (*STATES, *GAUGES)),
        ("summary", HISTOGRAMS),
    )
}


class _Lines(NamedTuple):
    """The lines of one figure."""

    figure: Figure
    metric: str
    series: tuple[str, str] | None  # process and name, where they have no other label
    text: bytes


class PrometheusText:
    """Makes the page /metrics. With 10,000 queues it has over 100,000 lines: they are kept, and
    made again where their figure has changed."""

    def __init__(self) -> None:
        # by process and kind, then by name
        self._lines: defaultdict[tuple[str, str], dict[str, _Lines]] = defaultdict(dict)

    def of(self, stats: Mapping[str, StatsSnapshot]) -> Iterator[bytes]:
        """Yield the figures of all processes in `stats`, each with its process as a label. In parts
        that take a few milliseconds each; some are empty. Others may be made meanwhile, and `stats`
        may change."""
        page: defaultdict[tuple[str, str], list[bytes]] = defaultdict(list)
        shown: set[tuple[str, str]] = set()
        for process, snapshot in stats.items():
            kinds: Mapping[str, Mapping[str, Figure]] = {
                "counter": snapshot["counters"],
                "gauge": snapshot["gauges"] | snapshot["peaks"],
                "summary": snapshot["histograms"],
            }
            for kind, figures in kinds.items():
                kept = self._lines[process, kind]
                for number, (name, figure) in enumerate(list(figures.items())):
                    if number % _FIGURES_AT_ONCE[kind] == 0:
                        yield b""
                    lines = kept.get(name)
                    # An unchanged figure is nearly always the same object.
                    if lines is None or not (lines.figure is figure or lines.figure == figure):
                        lines = kept[name] = _lines(process, kind, name, figure)
                    # Names that differ in what is not allowed look alike without labels.
                    if lines.series not in shown:
                        page[kind, lines.metric].append(lines.text)
                    if lines.series is not None:
                        shown.add(lines.series)
                if len(kept) > len(figures):
                    for name in kept.keys() - figures.keys():
                        del kept[name]
        for (kind, metric), texts in sorted(page.items()):
            name = f"{PREFIX}{metric}{_SUFFIXES[kind]}"
            yield f"# HELP {name} {metric.replace('_', ' ')}\n# TYPE {name} {kind}\n".encode()
            for first in range(0, len(texts), _LINES_AT_ONCE):
                yield b"".join(texts[first : first + _LINES_AT_ONCE])


def _lines(process: str, kind: str, name: str, figure: Figure) -> _Lines:
    metric, labels = _place(kind, name)
    full_name = f"{PREFIX}{metric}{_SUFFIXES[kind]}"
    all_labels = f'{labels}process="{process.translate(_ESCAPES)}"'
    if isinstance(figure, Histogram):
        text = _summary(full_name, all_labels, figure)
    else:
        text = f"{full_name}{{{all_labels}}} {figure}\n"
    return _Lines(figure, metric, None if labels else (process, full_name), text.encode())


def _place(kind: str, name: str) -> tuple[str, str]:
    """Return the metric of a figure, and its labels but for the process."""
    if found := _OF_QUEUES[kind].fullmatch(name):
        queue, figure = found[1].translate(_ESCAPES), found[2]
        if kind == "gauge" and figure in STATES:
            return ("queue_depth", f'queue="{queue}",state="{figure}",')
        return (f"queue_{figure}", f'queue="{queue}",')
    if kind == "summary" and name.startswith(BODY_SIZE):
        queue = name.removeprefix(BODY_SIZE).translate(_ESCAPES)
        return ("job_body_size_bytes", f'queue="{queue}",')
    if kind == "summary" and (call := _CALL.fullmatch(name)):
        return ("call_msec", f'method="{call[1]}",')
    if kind == "counter" and (error := _CALL_ERROR.fullmatch(name)):
        return ("errors", f'method="{error[1]}",code="{error[2]}",')
    return (_NOT_ALLOWED.sub("_", name), "")


def _summary(name: str, labels: str, data: Histogram) -> str:
    shown = percentiles(data, tuple(SHOWN_PERCENTILES.values()))
    lines = [
        f'{name}{{{labels},quantile="{fraction}"}} {value}\n'
        for fraction, value in zip(SHOWN_PERCENTILES.values(), shown, strict=True)
    ]
    lines.append(f"{name}_count{{{labels}}} {data.count}\n")
    lines.append(f"{name}_sum{{{labels}}} {data.sum}\n")
    return "".join(lines)
