"""A snapshot in Prometheus' text format: queue, method, code and process as labels.

What the names below describe becomes one metric with labels; any other name becomes a metric of
its own, with what Prometheus does not allow replaced by `_`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from pinlaterd.stats.histogram import SHOWN_PERCENTILES, HistogramData, percentiles
from pinlaterd.stats.snapshot import StatsSnapshot

CONTENT_TYPE = CONTENT_TYPE_LATEST
PREFIX = "pinlaterd_"


class _Shape(NamedTuple):
    """Names that share a metric. Groups of `pattern` are its labels, but for `event`, which is
    put into the metric's name."""

    kinds: str
    pattern: re.Pattern[str]
    metric: str


_QUEUE_EVENTS = (
    "enqueue|dequeue|ack_succeeded|ack_failed|ack_noop|checkpoint|checkpoint_noop|"
    "dequeue_requests_rate_limited|timeout_done|timeout_retry|succeeded_gc|failed_gc|"
    "first_dequeue_delay_ms|dequeue_delay_ms"
)
_SHAPES = (
    _Shape("summary", re.compile(r"PinLaterService\.(?P<method>\w+)_msec"), "call_msec"),
    _Shape("counter", re.compile(r"PinLater\.(?P<method>\w+)\.errors\.(?P<code>\w+)"), "errors"),
    _Shape("summary", re.compile(r"job_body_size_(?P<queue>\w+)"), "job_body_size_bytes"),
    _Shape(
        "counter summary",
        re.compile(rf"(?P<queue>\w+?)_(?P<event>{_QUEUE_EVENTS})"),
        "queue_{event}",
    ),
    _Shape(
        "gauge",
        re.compile(r"(?P<queue>\w+?)_(?P<state>pending|in_progress|succeeded|failed)"),
        "queue_depth",
    ),
    _Shape(
        "gauge",
        re.compile(
            r"(?P<queue>\w+?)_(?P<event>oldest_ready_age_ms|rate_limit|rate_share|rate_demand)"
        ),
        "queue_{event}",
    ),
)
_NOT_ALLOWED = re.compile(r"[^a-zA-Z0-9_]")


def prometheus_text(stats: Mapping[str, StatsSnapshot]) -> bytes:
    """The figures of all processes in `stats`, each with its process as a label."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Figures(stats))
    return generate_latest(registry)


class _Figures(Collector):
    def __init__(self, stats: Mapping[str, StatsSnapshot]) -> None:
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        families: dict[tuple[str, str], Metric] = {}
        added: set[tuple[str, ...]] = set()
        for process, snapshot in self._stats.items():
            for kind, name, value in _figures_of(snapshot):
                metric, labels = _shape(name, kind)
                values = [*labels.values(), process]
                # a queue's name may make two names look alike; one series twice is no valid text
                if (kind, metric, *values) in added:
                    continue
                added.add((kind, metric, *values))
                if (kind, metric) not in families:
                    families[kind, metric] = _family(kind, metric, [*labels, "process"])
                _add(families[kind, metric], values, value)
        return families.values()


def _figures_of(
    snapshot: StatsSnapshot,
) -> Iterator[tuple[str, str, float | HistogramData]]:
    for name, count in sorted(snapshot["counters"].items()):
        yield "counter", name, count
    for name, value in sorted((snapshot["gauges"] | snapshot["peaks"]).items()):
        yield "gauge", name, value
    for name, data in sorted(snapshot["histograms"].items()):
        yield "summary", name, data


def _shape(name: str, kind: str) -> tuple[str, Mapping[str, str]]:
    """The metric that `name` belongs to, and its labels."""
    for shape in _SHAPES:
        match = shape.pattern.fullmatch(name)
        if match is not None and kind in shape.kinds:
            labels = match.groupdict()
            return PREFIX + shape.metric.format(event=labels.pop("event", "")), labels
    return PREFIX + _NOT_ALLOWED.sub("_", name), {}


def _family(kind: str, metric: str, labels: list[str]) -> Metric:
    about = metric.removeprefix(PREFIX).replace("_", " ")
    if kind == "counter":
        return CounterMetricFamily(metric, about, labels=labels)
    if kind == "gauge":
        return GaugeMetricFamily(metric, about, labels=labels)
    return SummaryMetricFamily(metric, about, labels=labels)


def _add(family: Metric, labels: list[str], value: float | HistogramData) -> None:
    if not isinstance(value, dict):
        assert isinstance(family, CounterMetricFamily | GaugeMetricFamily)
        family.add_metric(labels, value)
        return
    assert isinstance(family, SummaryMetricFamily)
    family.add_metric(labels, count_value=value["count"], sum_value=value["sum"])
    names = dict(zip(family._labelnames, labels, strict=True))  # noqa: SLF001
    shown = percentiles(value, tuple(SHOWN_PERCENTILES.values()))
    for fraction, found in zip(SHOWN_PERCENTILES.values(), shown, strict=True):
        family.add_sample(family.name, names | {"quantile": str(fraction)}, found)
