"""A snapshot as text: Ostrich's layout and plain JSON, and Prometheus' format for collectors.

In Prometheus' format queue, method, code and process are labels. The figures of queues and of
calls become metrics with labels; any other name becomes a metric of its own, with what Prometheus
does not allow replaced by `_`. With 10,000 queues there are more than 100,000 lines: they are kept,
and made again where their figure has changed.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import compress, islice
from operator import is_not
from typing import TypedDict

from pinlaterd.stats.registry import (
    BODY_SIZE,
    COUNTERS,
    GAUGES,
    HISTOGRAMS,
    SHOWN_PERCENTILES,
    STATES,
    Histogram,
    StatsSnapshot,
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
    """Makes the page /metrics."""

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
