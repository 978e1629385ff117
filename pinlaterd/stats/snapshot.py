"""Figures at one moment, as JSON: what processes send, and what adds up over processes.

Counters and histograms are totals since a process started; a reader who wants figures of the
last minute takes two snapshots and the difference.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypedDict, TypeVar

from pinlaterd.stats.histogram import Histogram, HistogramData, recorded_since

_T = TypeVar("_T")


class StatsSnapshot(TypedDict):
    counters: dict[str, int]
    gauges: dict[str, float]  # added up over processes
    peaks: dict[str, float]  # gauges too, but of several processes the highest counts
    labels: dict[str, str]
    histograms: dict[str, HistogramData]


def empty() -> StatsSnapshot:
    return {"counters": {}, "gauges": {}, "peaks": {}, "labels": {}, "histograms": {}}


def merge(snapshots: Iterable[StatsSnapshot]) -> StatsSnapshot:
    """One snapshot for all: counters, gauges and histograms add up; labels that differ are
    joined by a comma."""
    merged = empty()
    histograms: dict[str, Histogram] = {}
    labels: dict[str, set[str]] = {}
    for snapshot in snapshots:
        for name, count in snapshot["counters"].items():
            merged["counters"][name] = merged["counters"].get(name, 0) + count
        for name, value in snapshot["gauges"].items():
            merged["gauges"][name] = merged["gauges"].get(name, 0.0) + value
        for name, value in snapshot["peaks"].items():
            merged["peaks"][name] = max(merged["peaks"].get(name, value), value)
        for name, text in snapshot["labels"].items():
            labels.setdefault(name, set()).add(text)
        for name, data in snapshot["histograms"].items():
            histograms.setdefault(name, Histogram()).merge(data)
    merged["labels"] = {name: ", ".join(sorted(texts)) for name, texts in labels.items()}
    merged["histograms"] = {name: histogram.data() for name, histogram in histograms.items()}
    return merged


def totals(snapshot: StatsSnapshot) -> StatsSnapshot:
    """What stays true of a process that has ended: its counters and histograms."""
    return empty() | {"counters": snapshot["counters"], "histograms": snapshot["histograms"]}


def changes(before: StatsSnapshot, now: StatsSnapshot) -> StatsSnapshot | None:
    """What `apply` needs to turn `before` into `now`; None if a name went away."""
    if not (before["gauges"].keys() <= now["gauges"].keys()) or not (
        before["peaks"].keys() <= now["peaks"].keys()
    ):
        return None
    return {
        "counters": _changed(before["counters"], now["counters"]),
        "gauges": _changed(before["gauges"], now["gauges"]),
        "peaks": _changed(before["peaks"], now["peaks"]),
        "labels": _changed(before["labels"], now["labels"]),
        "histograms": _changed(before["histograms"], now["histograms"]),
    }


def apply(before: StatsSnapshot, changed: StatsSnapshot) -> StatsSnapshot:
    return {
        "counters": before["counters"] | changed["counters"],
        "gauges": before["gauges"] | changed["gauges"],
        "peaks": before["peaks"] | changed["peaks"],
        "labels": before["labels"] | changed["labels"],
        "histograms": before["histograms"] | changed["histograms"],
    }


def since(before: StatsSnapshot, now: StatsSnapshot) -> StatsSnapshot:
    """What was counted and recorded after `before`; the rest is as it is now.

    A total that has become less began anew meanwhile: all of it is later than `before`."""
    counters = {
        name: count - earlier if (earlier := before["counters"].get(name, 0)) <= count else count
        for name, count in now["counters"].items()
    }
    histograms = {
        name: recorded_since(before["histograms"].get(name), data)
        for name, data in now["histograms"].items()
    }
    return now | {"counters": counters, "histograms": histograms}


def _changed(before: dict[str, _T], now: dict[str, _T]) -> dict[str, _T]:
    return {name: value for name, value in now.items() if before.get(name) != value}
