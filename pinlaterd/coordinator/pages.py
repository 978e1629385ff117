"""The HTTP pages: /stats.txt, /stats.json, /metrics, /health, /status.json, /snapshot.json.

Read-only, on the statistics port and on run/stats.sock. `?process=shard-1` narrows figures down to
one process: /stats.txt in Ostrich's layout, /metrics in Prometheus' format, with queue, method,
code and process as labels. /snapshot.json has them by process and with their histograms' buckets:
the difference of two is what happened in between. With `?servers=all` it and /status.json are of
all servers of the cluster.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from http import HTTPStatus
from itertools import compress, islice
from operator import is_not
from typing import Protocol, TypedDict

import msgspec
from aiohttp import web

from pinlaterd.coordinator.processes import Status
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

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "pinlaterd_"
_CALL = re.compile(r"PinLaterService\.(\w+)_msec")
_CALL_ERROR = re.compile(r"PinLater\.(\w+)\.errors\.(\w+)")
_NOT_ALLOWED = re.compile(r"[^a-zA-Z0-9_]")
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
_SUFFIXES = {"counter": "_total", "gauge": "", "summary": ""}
# So that each part of a page takes few milliseconds, also where everything has changed.
_FIGURES_AT_ONCE = {"counter": 2_000, "gauge": 2_000, "summary": 200}
_LINES_AT_ONCE = 5_000


class Whole(Protocol):
    async def __call__(self, *, statistics: bool) -> tuple[Status, Mapping[str, StatsSnapshot]]: ...


_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Pages:
    def __init__(
        self,
        status: Callable[[], Status],
        stats: Callable[[], Mapping[str, StatsSnapshot]],
        whole: Whole,
    ) -> None:
        """`stats`: figures by process. `whole`: both, of all servers of the cluster."""
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
        body = figures(merge(chosen.values())) | {
            "processes": {name: figures(snapshot) for name, snapshot in chosen.items()}
        }
        return web.json_response(body)

    async def _metrics(self, request: web.Request) -> web.Response:
        parts = self._parts(self._chosen(request))
        return web.Response(body=parts, headers={"Content-Type": CONTENT_TYPE})

    async def _parts(self, stats: Mapping[str, StatsSnapshot]) -> AsyncIterator[bytes]:
        """In turns of the loop with others: with many queues the page is long."""
        for part in self._prometheus.of(stats):
            if part:
                yield part
            await asyncio.sleep(0)

    async def _health(self, _request: web.Request) -> web.Response:
        found = self._status()
        return web.json_response(
            {"healthy": found["healthy"], "problems": found["problems"]},
            status=HTTPStatus.OK if found["healthy"] else HTTPStatus.SERVICE_UNAVAILABLE,
        )

    async def _status_json(self, request: web.Request) -> web.Response:
        if not _is_whole(request):
            return web.json_response(self._status())
        found, _ = await self._whole(statistics=False)
        return web.json_response(found)

    async def _snapshot_json(self, request: web.Request) -> web.Response:
        stats = self._chosen(request)
        if _is_whole(request):
            _, stats = await self._whole(statistics=True)
        body = msgspec.json.encode(stats)
        return web.Response(body=body, content_type="application/json", charset="utf-8")

    def _chosen(self, request: web.Request) -> Mapping[str, StatsSnapshot]:
        stats = self._stats()
        process = request.query.get("process")
        if process is None:
            return stats
        if process not in stats:
            names = ", ".join(stats)
            raise web.HTTPNotFound(text=f"no process {process!r}; choose from {names}\n")
        return {process: stats[process]}


def _is_whole(request: web.Request) -> bool:
    return request.query.get("servers") == "all"


@web.middleware
async def _plain_errors(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Say in JSON what is wrong, and what there is instead."""
    try:
        return await handler(request)
    except web.HTTPMethodNotAllowed as error:
        return _error(error, "only GET and HEAD are answered here")
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


class Figures(TypedDict):
    """What /stats.json shows: Ostrich's four sections, of which we have no use for labels."""

    counters: Mapping[str, int]
    gauges: Mapping[str, float]
    labels: Mapping[str, str]
    metrics: Mapping[str, Mapping[str, float]]


def figures(snapshot: StatsSnapshot) -> Figures:
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
    """The text that PinLater's /stats.txt had."""
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
    """Whole numbers without a point, others with three digits behind it."""
    if isinstance(value, int) or value.is_integer():
        return int(value)
    return round(value, 3)


def _one_line(text: str) -> str:
    return "".join(character if character.isprintable() else "?" for character in text)


# --- Prometheus ------------------------------------------------------------------------------

# The figures of queues and of calls become metrics with labels; any other name becomes a metric of
# its own, with what Prometheus does not allow replaced by `_`.

Figure = float | Histogram


# Of every queue's figure: what its name ends with, its metric, and labels beside the queue.
_Ending = tuple[str, str, str]


def _by_last_word(figures: Sequence[_Ending]) -> Mapping[str, Sequence[_Ending]]:
    """The longest first: `mail_checkpoint_noop` is no figure of a queue `mail_checkpoint`."""
    found: dict[str, list[_Ending]] = {}
    for figure in sorted(figures, key=lambda figure: -len(figure[0])):
        found.setdefault(_last_word(figure[0]), []).append(figure)
    return found


def _last_word(name: str) -> str:
    return name[name.rfind("_") + 1 :]


_FIGURES = {
    "counter": _by_last_word([(f"_{name}", f"queue_{name}", "") for name in COUNTERS]),
    "gauge": _by_last_word(
        [(f"_{state}", "queue_depth", f',state="{state}"') for state in STATES]
        + [(f"_{name}", f"queue_{name}", "") for name in GAUGES]
    ),
    "summary": _by_last_word([(f"_{name}", f"queue_{name}", "") for name in HISTOGRAMS]),
}


class PrometheusText:
    """Makes the page /metrics. With 10,000 queues it has over 100,000 lines: they are kept, and
    made again where their figure has changed."""

    def __init__(self) -> None:
        self._sections: dict[tuple[str, str], _Section] = {}  # by process and kind

    def of(self, stats: Mapping[str, StatsSnapshot]) -> Iterator[bytes]:
        """The figures of all processes in `stats`, each with its process as a label. In parts, of
        which none takes longer than a few milliseconds; some are empty. Others may be made
        meanwhile, and `stats` may change."""
        sections: list[_Section] = []
        for process, snapshot in stats.items():
            gauges = snapshot["gauges"] | snapshot["peaks"]
            for kind, figures in (
                ("counter", snapshot["counters"].copy()),
                ("gauge", gauges),
                ("summary", snapshot["histograms"].copy()),
            ):
                section = self._section(process, kind)
                sections.append(section)
                for _ in section.update(figures):
                    yield b""
        page: defaultdict[tuple[str, str], list[bytes]] = defaultdict(list)
        shown: set[tuple[str, str]] = set()
        for section in sections:
            section.add_to(page, shown)
        for (kind, metric), lines in sorted(page.items()):
            name = f"{PREFIX}{metric}{_SUFFIXES[kind]}"
            yield f"# HELP {name} {metric.replace('_', ' ')}\n# TYPE {name} {kind}\n".encode()
            for first in range(0, len(lines), _LINES_AT_ONCE):
                yield b"".join(lines[first : first + _LINES_AT_ONCE])

    def _section(self, process: str, kind: str) -> _Section:
        if (process, kind) not in self._sections:
            self._sections[process, kind] = _Section(process, kind)
        return self._sections[process, kind]


class _Section:
    """The lines of one process and kind, made again only where their figure has changed."""

    def __init__(self, process: str, kind: str) -> None:
        self._process = process
        self._label = f'process="{process.translate(_ESCAPES)}"'
        self._kind = kind
        self._shown: dict[str, Figure] = {}
        # By metric, and whether it has labels of its own; then by name.
        self._lines: defaultdict[tuple[str, bool], dict[str, bytes]] = defaultdict(dict)

    def update(self, figures: Mapping[str, Figure]) -> Iterator[None]:
        """In steps. An unchanged figure is nearly always the same object: what has changed is found
        without a line of Python for each."""
        shown, at_once = self._shown, _FIGURES_AT_ONCE[self._kind]
        names, differ = iter(figures), map(is_not, figures.values(), map(shown.get, figures))
        for _ in range(0, len(figures), at_once):
            for name in compress(islice(names, at_once), islice(differ, at_once)):
                if name not in shown or shown[name] != figures[name]:
                    self._show(name, figures[name])
            yield
        gone = iter(shown.keys() - figures.keys() if len(shown) > len(figures) else ())
        while names_gone := list(islice(gone, at_once)):
            for name in names_gone:
                if shown.pop(name, None) is not None:
                    self._forget_line(name)
            yield

    def _show(self, name: str, figure: Figure) -> None:
        self._shown[name] = figure
        metric, labels = _place(self._kind, name)
        full_name, all_labels = f"{PREFIX}{metric}{_SUFFIXES[self._kind]}", labels + self._label
        if isinstance(figure, Histogram):
            text = _summary(full_name, all_labels, figure)
        else:
            text = f"{full_name}{{{all_labels}}} {figure}\n"
        self._lines[metric, bool(labels)][name] = text.encode()

    def _forget_line(self, name: str) -> None:
        metric, labels = _place(self._kind, name)
        self._lines[metric, bool(labels)].pop(name, None)

    def add_to(
        self, page: defaultdict[tuple[str, str], list[bytes]], shown: set[tuple[str, str]]
    ) -> None:
        """By kind and metric. Names that differ in what is not allowed look alike without labels:
        `shown` has what is on the page already."""
        for (metric, labelled), lines in self._lines.items():
            found = list(lines.values())
            if found and not labelled:
                series = (self._process, metric + _SUFFIXES[self._kind])
                found = [] if series in shown else found[:1]
                shown.add(series)
            if found:
                page[self._kind, metric] += found


def _place(kind: str, name: str) -> tuple[str, str]:
    """The metric of a figure, and its labels but for the process."""
    for ending, metric, labels in _FIGURES[kind].get(_last_word(name), ()):
        if name.endswith(ending):
            queue = name[: -len(ending)].translate(_ESCAPES)
            return (metric, f'queue="{queue}"{labels},')
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
