"""A snapshot as text for people and collectors: Ostrich's layout, and plain JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

from pinlaterd.stats.histogram import summary
from pinlaterd.stats.snapshot import StatsSnapshot


class Figures(TypedDict):
    """What /stats.json shows: Ostrich's four sections."""

    counters: Mapping[str, int]
    gauges: Mapping[str, float]
    labels: Mapping[str, str]
    metrics: Mapping[str, Mapping[str, float]]


def figures(snapshot: StatsSnapshot) -> Figures:
    gauges = snapshot["gauges"] | snapshot["peaks"]
    return {
        "counters": dict(sorted(snapshot["counters"].items())),
        "gauges": {name: _plain(value) for name, value in sorted(gauges.items())},
        "labels": dict(sorted(snapshot["labels"].items())),
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
    lines += [f"  {_one_line(name)}: {_one_line(text)}" for name, text in shown["labels"].items()]
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
