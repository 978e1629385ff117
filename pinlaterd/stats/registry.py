"""Where a process counts. Used by one thread; every call costs well under a microsecond."""

from __future__ import annotations

from pinlaterd.stats.histogram import Histogram
from pinlaterd.stats.snapshot import StatsSnapshot


class Stats:
    """Counters, gauges, labels and histograms by name, since the process started."""

    def __init__(self) -> None:
        self._counters: dict[str, int] = {}
        self._gauges: dict[str, float] = {}
        self._peaks: dict[str, float] = {}
        self._labels: dict[str, str] = {}
        self._histograms: dict[str, Histogram] = {}

    def count(self, name: str, by: int = 1) -> None:
        counters = self._counters
        if name in counters:
            counters[name] += by
        else:
            counters[name] = by

    def gauge(self, name: str, value: float) -> None:
        """A figure as it is now; over several processes it is added up."""
        self._gauges[name] = value

    def peak(self, name: str, value: float) -> None:
        """A gauge of which, over several processes, the highest counts: ages, lags."""
        self._peaks[name] = value

    def drop_gauge(self, name: str) -> None:
        """Forget a gauge or peak whose subject has gone. None of that name is no error."""
        self._gauges.pop(name, None)
        self._peaks.pop(name, None)

    def label(self, name: str, text: str) -> None:
        self._labels[name] = text

    def record(self, name: str, value: float) -> None:
        """One sample of the histogram `name`."""
        try:
            histogram = self._histograms[name]
        except KeyError:
            histogram = self._histograms[name] = Histogram()
        histogram.add(value)

    def record_many(self, name: str, value: float, times: int) -> None:
        """`times` equal samples, at the cost of one."""
        if times > 0:
            self._histograms.setdefault(name, Histogram()).add(value, times)

    def snapshot(self) -> StatsSnapshot:
        return {
            "counters": dict(self._counters),
            "gauges": dict(self._gauges),
            "peaks": dict(self._peaks),
            "labels": dict(self._labels),
            "histograms": {name: found.data() for name, found in self._histograms.items()},
        }
