"""A snapshot in Prometheus' text format: queue, method, code and process as labels.

The figures of queues (`names`) and of calls become metrics with labels; any other name becomes a
metric of its own, with what Prometheus does not allow replaced by `_`. With 10,000 queues there are
more than 100,000 lines: each is made by one formatted string, and the quantiles of a histogram
that has not changed are not computed again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from pinlaterd.stats.histogram import SHOWN_PERCENTILES, HistogramData, percentiles
from pinlaterd.stats.names import BODY_SIZE, COUNTERS, GAUGES, HISTOGRAMS, STATES
from pinlaterd.stats.snapshot import StatsSnapshot

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "pinlaterd_"
_CALL = re.compile(r"PinLaterService\.(\w+)_msec")
_CALL_ERROR = re.compile(r"PinLater\.(\w+)\.errors\.(\w+)")
_NOT_ALLOWED = re.compile(r"[^a-zA-Z0-9_]")
_TO_ESCAPE = re.compile(r'["\\\n]')
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
_SUFFIXES = {"counter": "_total", "gauge": "", "summary": ""}


class _Figure(NamedTuple):
    """A figure of every queue: what its name ends with, and where it is shown."""

    ending: str
    metric: str
    labels: str = ""


class _Place(NamedTuple):
    metric: str
    labels: str  # but for the process


class _Line(NamedTuple):
    """What stands before and behind the queue in a line of one figure, and where lines go."""

    ending: str
    length: int  # of the ending
    head: str
    tail: str
    append: Callable[[str], None]


def _by_last_word(figures: Sequence[_Figure]) -> Mapping[str, Sequence[_Figure]]:
    """The longest first: `mail_checkpoint_noop` is no figure of a queue `mail_checkpoint`."""
    found: dict[str, list[_Figure]] = {}
    for figure in sorted(figures, key=lambda figure: -len(figure.ending)):
        found.setdefault(_last_word(figure.ending), []).append(figure)
    return found


def _last_word(name: str) -> str:
    return name[name.rfind("_") + 1 :]


_FIGURES = {
    "counter": _by_last_word([_Figure(f"_{name}", f"queue_{name}") for name in COUNTERS]),
    "gauge": _by_last_word(
        [_Figure(f"_{state}", "queue_depth", f',state="{state}"') for state in STATES]
        + [_Figure(f"_{name}", f"queue_{name}") for name in GAUGES]
    ),
    "summary": _by_last_word([_Figure(f"_{name}", f"queue_{name}") for name in HISTOGRAMS]),
}


class PrometheusText:
    """Makes the page /metrics."""

    def __init__(self) -> None:
        # Of the page before: text by process and name, and the very histogram that it shows.
        self._summaries: dict[tuple[str, str], tuple[HistogramData, str]] = {}

    def of(self, stats: Mapping[str, StatsSnapshot]) -> bytes:
        """The figures of all processes in `stats`, each with its process as a label."""
        page = _Page()
        before, self._summaries = self._summaries, {}
        for process, snapshot in stats.items():
            label = f'process="{process.translate(_ESCAPES)}"'
            page.add_numbers("counter", label, snapshot["counters"])
            page.add_numbers("gauge", label, {**snapshot["gauges"], **snapshot["peaks"]})
            for name, data in snapshot["histograms"].items():
                place = _place("summary", name)
                known = before.get((process, name))
                if known is None or known[0] is not data:
                    known = (data, _summary(place, label, data))
                if page.is_new("summary", place, label):
                    page.lines("summary", place.metric).append(known[1])
                    self._summaries[process, name] = known
        return page.text()


class _Page:
    """Lines by kind and metric: those of a metric have to stand together."""

    def __init__(self) -> None:
        self._lines: dict[tuple[str, str], list[str]] = {}
        self._shown: set[tuple[str, str]] = set()

    def lines(self, kind: str, metric: str) -> list[str]:
        found = self._lines.get((kind, metric))
        if found is None:
            name = f"{PREFIX}{metric}{_SUFFIXES[kind]}"
            about = metric.replace("_", " ")
            found = [f"# HELP {name} {about}\n# TYPE {name} {kind}\n"]
            self._lines[kind, metric] = found
        return found

    def is_new(self, kind: str, place: _Place, process: str) -> bool:
        """Whether it was not shown yet: names that differ in what is not allowed look alike."""
        key = (place.metric + _SUFFIXES[kind], place.labels + process)
        if key in self._shown:
            return False
        self._shown.add(key)
        return True

    def add_numbers(self, kind: str, process: str, figures: Mapping[str, float]) -> None:
        suffix = _SUFFIXES[kind]
        others = figures
        if not _TO_ESCAPE.search("".join(figures)):
            others = self._add_of_queues(kind, process, figures)
        for name, value in others.items():
            place = _place(kind, name)
            if self.is_new(kind, place, process):
                self.lines(kind, place.metric).append(
                    f"{PREFIX}{place.metric}{suffix}{{{place.labels}{process}}} {value}\n"
                )

    def _add_of_queues(
        self, kind: str, process: str, figures: Mapping[str, float]
    ) -> Mapping[str, float]:
        """Nearly all figures, if there are many queues; returns the others."""
        others: dict[str, float] = {}
        of_word = {
            word: [self._line(kind, figure, process) for figure in found]
            for word, found in _FIGURES[kind].items()
        }
        for name, value in figures.items():
            for ending, length, head, tail, append in of_word.get(name[name.rfind("_") + 1 :], ()):
                if name.endswith(ending):
                    append(f"{head}{name[:-length]}{tail}{value}\n")
                    break
            else:
                others[name] = value
        return others

    def _line(self, kind: str, figure: _Figure, process: str) -> _Line:
        head = f'{PREFIX}{figure.metric}{_SUFFIXES[kind]}{{queue="'
        tail = f'"{figure.labels},{process}}} '
        append = self.lines(kind, figure.metric).append
        return _Line(figure.ending, len(figure.ending), head, tail, append)

    def text(self) -> bytes:
        parts = [line for _, lines in sorted(self._lines.items()) if lines[1:] for line in lines]
        return "".join(parts).encode()


def _place(kind: str, name: str) -> _Place:
    for ending, metric, labels in _FIGURES[kind].get(_last_word(name), ()):
        if name.endswith(ending):
            queue = name[: -len(ending)].translate(_ESCAPES)
            return _Place(metric, f'queue="{queue}"{labels},')
    if kind == "summary" and name.startswith(BODY_SIZE):
        queue = name.removeprefix(BODY_SIZE).translate(_ESCAPES)
        return _Place("job_body_size_bytes", f'queue="{queue}",')
    if kind == "summary" and (call := _CALL.fullmatch(name)):
        return _Place("call_msec", f'method="{call[1]}",')
    if kind == "counter" and (error := _CALL_ERROR.fullmatch(name)):
        return _Place("errors", f'method="{error[1]}",code="{error[2]}",')
    return _Place(_NOT_ALLOWED.sub("_", name), "")


def _summary(place: _Place, process: str, data: HistogramData) -> str:
    name, labels = f"{PREFIX}{place.metric}", place.labels + process
    shown = percentiles(data, tuple(SHOWN_PERCENTILES.values()))
    lines = [
        f'{name}{{{labels},quantile="{fraction}"}} {value}\n'
        for fraction, value in zip(SHOWN_PERCENTILES.values(), shown, strict=True)
    ]
    lines.append(f"{name}_count{{{labels}}} {data['count']}\n")
    lines.append(f"{name}_sum{{{labels}}} {data['sum']}\n")
    return "".join(lines)
