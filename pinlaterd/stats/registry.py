"""Where a process counts. Used by one thread; every call costs well under a microsecond."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pinlaterd.stats.histogram import Histogram
from pinlaterd.stats.names import names_of
from pinlaterd.stats.snapshot import Changes, StatsSnapshot


class Stats:
    """Counters, gauges, labels and histograms by name, since the process started."""

    def __init__(self) -> None:
        self._counters: dict[str, int] = {}
        self._gauges: dict[str, float] = {}
        self._peaks: dict[str, float] = {}
        self._labels: dict[str, str] = {}
        self._histograms: dict[str, Histogram] = {}
        # Names since `take_changes`, so that a report costs what has changed, not what there is.
        self._changed: set[str] = set()
        self._dropped: set[str] = set()

    def count(self, name: str, by: int = 1) -> None:
        counters = self._counters
        if name in counters:
            counters[name] += by
        else:
            counters[name] = by
        self._changed.add(name)

    def gauge(self, name: str, value: float) -> None:
        """A figure as it is now; over several processes it is added up."""
        if self._gauges.get(name) != value:
            self._gauges[name] = value
            self._changed.add(name)

    def peak(self, name: str, value: float) -> None:
        """A gauge of which, over several processes, the highest counts: ages, lags."""
        if self._peaks.get(name) != value:
            self._peaks[name] = value
            self._changed.add(name)

    def drop_gauge(self, name: str) -> None:
        """Forget a gauge or peak whose subject has gone. None of that name is no error."""
        self._drop((name,))

    def drop_queue(self, queue: str) -> None:
        """Forget all figures of a queue that was deleted, also those of earlier processes."""
        self._drop(names_of(queue))

    def _drop(self, names: Iterable[str]) -> None:
        for name in names:
            self._dropped.add(name)
            for section in (self._counters, self._gauges, self._peaks, self._histograms):
                section.pop(name, None)

    def label(self, name: str, text: str) -> None:
        self._labels[name] = text
        self._changed.add(name)

    def record(self, name: str, value: float) -> None:
        """One sample of the histogram `name`."""
        self._changed.add(name)
        histogram = self._histograms.get(name)
        if histogram is None:
            histogram = self._histograms[name] = Histogram()
        histogram.add(value)

    def record_each(self, names: Iterable[str], values: Sequence[int]) -> None:
        """A sample for each of `values` in each of `names`: several times faster than `record`."""
        if len(values) == 1:
            for name in names:
                self._histogram(name).add(values[0])
        elif values:
            samples = Histogram.of(values)
            for name in names:
                self._histogram(name).add_all(samples)

    def _histogram(self, name: str) -> Histogram:
        self._changed.add(name)
        try:
            return self._histograms[name]
        except KeyError:
            histogram = self._histograms[name] = Histogram()
            return histogram

    def snapshot(self) -> StatsSnapshot:
        return {
            "counters": dict(self._counters),
            "gauges": dict(self._gauges),
            "peaks": dict(self._peaks),
            "labels": dict(self._labels),
            "histograms": {name: found.data() for name, found in self._histograms.items()},
        }

    def take_changes(self) -> Changes:
        """What has changed since the last time; the first time, all."""
        changed, self._changed = self._changed, set()
        dropped, self._dropped = self._dropped, set()
        counters, gauges, peaks = self._counters, self._gauges, self._peaks
        labels, histograms = self._labels, self._histograms
        now: StatsSnapshot = {
            "counters": {name: counters[name] for name in changed if name in counters},
            "gauges": {name: gauges[name] for name in changed if name in gauges},
            "peaks": {name: peaks[name] for name in changed if name in peaks},
            "labels": {name: labels[name] for name in changed if name in labels},
            "histograms": {name: histograms[name].data() for name in changed if name in histograms},
        }
        return Changes(now, tuple(sorted(dropped)))
