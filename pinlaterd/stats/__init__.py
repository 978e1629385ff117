"""What is counted and measured: one Stats object a process, passed in, never global."""

from pinlaterd.stats.histogram import Histogram, HistogramData
from pinlaterd.stats.registry import Stats, StatsSnapshot, empty, merge

__all__ = ["Histogram", "HistogramData", "Stats", "StatsSnapshot", "empty", "merge"]
