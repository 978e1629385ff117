"""A worker's figures for Prometheus, by queue: a collector of prometheus_client, and a server of
its own. Nothing imports this module: a program without metrics loads no library."""

from __future__ import annotations

import errno
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from pinlaterd.client.in_flight import BOUNDS_SECONDS
from pinlaterd.client.worker import Worker
from pinlaterd.errors import address_of

_PREFIX = "pinlaterd_worker_"
_SILENT_SECONDS = 10.0  # of a connection

log = logging.getLogger(__name__)

_GAUGE, _COUNTER = GaugeMetricFamily, CounterMetricFamily
# Name, field of QueueFigures.
_FIGURES = (
    (_GAUGE, "concurrency", "concurrency", "Jobs that may run at a time."),
    (_GAUGE, "jobs_running", "running", "Jobs that run now."),
    (_GAUGE, "jobs_waiting", "waiting", "Jobs that are claimed and not begun."),
    (_COUNTER, "dequeues", "dequeues", "Dequeues."),
    (_COUNTER, "dequeue_errors", "dequeue_errors", "Dequeues that failed, and were repeated."),
    (_COUNTER, "claims_lost", "claims_lost", "Claims that ended before their jobs did."),
)


class WorkerMetrics(Collector):
    """The figures of a worker, as a collector of Prometheus."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def text(self) -> bytes:
        """The figures in Prometheus' text format."""
        return generate_latest(self._registry())

    @contextmanager
    def served(self, port: int, *, host: str = "127.0.0.1") -> Iterator[str]:
        """Serve the figures over HTTP, from a thread; yields the URL. Port 0: any free one.

        Raises OSError if it can't listen there.
        """
        try:
            server, thread = start_http_server(port, addr=host, registry=self._registry())
        except UnicodeError as error:
            raise OSError(errno.EINVAL, f"no host has such a name ({error})") from error
        handler = cast("type", server.RequestHandlerClass)
        server.RequestHandlerClass = type("Handler", (handler,), {"timeout": _SILENT_SECONDS})
        server.handle_error = _log_error  # type: ignore[method-assign, assignment]
        try:
            yield f"http://{address_of(host, server.server_port)}/metrics"
        finally:
            server.shutdown()
            server.server_close()
            thread.join()

    def collect(self) -> Iterator[Metric]:
        figures = self._worker.queue_figures()
        for family, name, field, about in _FIGURES:
            metric = family(_PREFIX + name, about, labels=["queue"])
            for facts in figures:
                metric.add_metric([facts.queue], getattr(facts, field))
            yield metric
        about = "Runs of handlers, by how they ended."
        jobs = CounterMetricFamily(f"{_PREFIX}jobs", about, labels=["queue", "ending"])
        about = "How long handlers ran."
        seconds = HistogramMetricFamily(f"{_PREFIX}run_seconds", about, labels=["queue"])
        for facts in figures:
            runs = facts.runs
            for ending, count in runs.endings.items():
                jobs.add_metric([facts.queue, ending], count)
            buckets = [(str(b), float(n)) for b, n in zip(BOUNDS_SECONDS, runs.within, strict=True)]
            seconds.add_metric([facts.queue], [*buckets, ("+Inf", float(runs.total))], runs.seconds)
        yield jobs
        yield seconds

    def _registry(self) -> CollectorRegistry:
        registry = CollectorRegistry(auto_describe=True)  # for `?name[]=`
        registry.register(self)
        return registry


def _log_error(_request: object, client_address: tuple[str, int]) -> None:
    """Log at debug level what broke a connection: anybody could fill the log with it."""
    log.debug("metrics: connection of %s: %r", client_address[0], sys.exception())
