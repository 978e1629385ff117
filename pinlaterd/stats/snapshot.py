"""Figures at one moment, as JSON: what processes send, and what adds up over processes.

Counters and histograms are totals since a process started; a reader who wants figures of the
last minute takes two snapshots and the difference.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, TypedDict

from pinlaterd.stats.histogram import Histogram, HistogramData, recorded_since


class StatsSnapshot(TypedDict):
    counters: dict[str, int]
    gauges: dict[str, int | float]  # added up over processes
    peaks: dict[str, int | float]  # gauges too, but of several processes the highest counts
    labels: dict[str, str]
    histograms: dict[str, HistogramData]


class Changes(NamedTuple):
    """What has become of a snapshot: first `dropped` went, then came what is in `now`."""

    now: StatsSnapshot
    dropped: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.dropped) or any(self.now.values())


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
            merged["gauges"][name] = merged["gauges"].get(name, 0) + value
        for name, value in snapshot["peaks"].items():
            merged["peaks"][name] = max(merged["peaks"].get(name, value), value)
        for name, text in snapshot["labels"].items():
            labels.setdefault(name, set()).add(text)
        for name, data in snapshot["histograms"].items():
            histograms.setdefault(name, Histogram()).merge(data)
    merged["labels"] = {name: ", ".join(sorted(texts)) for name, texts in labels.items()}
    merged["histograms"] = {name: histogram.data() for name, histogram in histograms.items()}
    return merged


def raised(changed: StatsSnapshot, earlier: StatsSnapshot) -> StatsSnapshot:
    """The totals of `changed` with those that `earlier` has of the same names."""
    counters, histograms = earlier["counters"], earlier["histograms"]
    return merge(
        [
            changed,
            empty()
            | {
                "counters": {
                    name: counters[name] for name in changed["counters"] if name in counters
                },
                "histograms": {
                    name: histograms[name] for name in changed["histograms"] if name in histograms
                },
            },
        ]
    )


def totals(snapshot: StatsSnapshot) -> StatsSnapshot:
    """What stays true of a process that has ended: its counters and histograms."""
    return empty() | {"counters": snapshot["counters"], "histograms": snapshot["histograms"]}


def forget(snapshot: StatsSnapshot, name: str) -> None:
    snapshot["counters"].pop(name, None)
    snapshot["gauges"].pop(name, None)
    snapshot["peaks"].pop(name, None)
    snapshot["histograms"].pop(name, None)


def apply(before: StatsSnapshot, changes: Changes) -> None:
    """Turn `before` into what it has become."""
    for name in changes.dropped:
        forget(before, name)
    before["counters"].update(changes.now["counters"])
    before["gauges"].update(changes.now["gauges"])
    before["peaks"].update(changes.now["peaks"])
    before["labels"].update(changes.now["labels"])
    before["histograms"].update(changes.now["histograms"])


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
