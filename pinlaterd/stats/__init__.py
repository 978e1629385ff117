"""What is counted and measured: one Stats object a process, passed in, never global."""

from pinlaterd.stats.registry import Histogram, Stats, StatsSnapshot, empty, merge

__all__ = ["Histogram", "Stats", "StatsSnapshot", "empty", "merge"]
