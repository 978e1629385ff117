"""A worker's figures for Prometheus, by queue: a collector of prometheus_client, and a server of
its own. Nothing imports this module: a program without metrics loads no library."""

from __future__ import annotations

import errno
import logging
import socket
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from prometheus_client import CollectorRegistry, make_wsgi_app
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
from pinlaterd.hosts import is_ours, name_in, names_of_machine

_PREFIX = "pinlaterd_worker_"
# Each has a thread, for a single request. Scrapers are few, and answered within milliseconds.
_MOST_CONNECTIONS = 20
_CONNECTION_SECONDS = 10.0  # for the request and its answer
_HANG_UP_SECONDS = 1.0  # for the thread of a connection that was ended
_NAMES_SECONDS = 60.0  # for which this machine's names in DNS are believed

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
        """Return the figures in Prometheus' text format."""
        return generate_latest(self._registry())

    @contextmanager
    def served(
        self, port: int, *, host: str = "127.0.0.1", names: Sequence[str] = ()
    ) -> Iterator[str]:
        """Serve the figures over HTTP, from threads; yields the URL. Port 0: any free one. `names`:
        those that clients may call it by, in addition to its addresses and the machine's names.

        Raises OSError if it can't listen there.
        """
        application = _for_names((host, *names), make_wsgi_app(self._registry()))
        try:
            server = _MetricsServer(host, port, application)
        except UnicodeError as error:
            raise OSError(errno.EINVAL, f"no host has such a name ({error})") from error
        thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
        with server:
            thread.start()
            try:
                yield f"http://{address_of(host, server.server_port)}/metrics"
            finally:
                server.shutdown()
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


# --- the server -------------------------------------------------------------------------------
# `http_port` needs aiohttp, which a client does without. Its rules hold here, too.


def _for_names(names: Sequence[str], application: WSGIApplication) -> WSGIApplication:
    """Return `application` for requests whose Host is ours: browsers always send one."""

    def answer(environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        for host in environ.get("HTTP_HOST", "localhost").split(","):  # several are joined so
            minute = int(time.monotonic() / _NAMES_SECONDS)
            if not (is_ours(host, names) or name_in(host) in _names_of_machine(minute)):
                start("421 Misdirected Request", [("Content-Type", "text/plain; charset=utf-8")])
                about = f"this worker has no name {name_in(host)[:255]!r}: add it as --metrics-name"
                return [f"{about}, or use the worker's address\n".encode()]
        return application(environ, start)

    return answer


@lru_cache(maxsize=1)
def _names_of_machine(_minute: int) -> Iterable[str]:
    return names_of_machine()


class _Handler(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base's name
        pass


class _MetricsServer(ThreadingMixIn, WSGIServer):
    """Answers a request on each connection. One that is full ends the oldest connection, so that
    those that send half a request keep nobody out."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, host: str, port: int, application: WSGIApplication) -> None:
        [(self.address_family, *_, address), *_] = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        # With when each is to end, the oldest first; a thread that has ended takes its own away.
        self._open: dict[object, float] = {}
        self._changed = threading.Condition()
        super().__init__(address, _Handler)  # type: ignore[arg-type]
        self.set_app(application)

    def verify_request(self, request: Any, _client_address: object) -> bool:
        """Make room for a connection; False if there is none."""
        with self._changed:
            if len(self._open) >= _MOST_CONNECTIONS:
                _hang_up(next(iter(self._open)))
            has_room = self._changed.wait_for(
                lambda: len(self._open) < _MOST_CONNECTIONS, _HANG_UP_SECONDS
            )
            if has_room:
                self._open[request] = time.monotonic() + _CONNECTION_SECONDS
            return has_room

    def shutdown_request(self, request: Any) -> None:
        """End a connection, in its own thread."""
        with self._changed:
            self._open.pop(request, None)
            self._changed.notify()
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """End what takes too long. To be called now and then: each half a second at most."""
        with self._changed:
            for request, until in self._open.items():
                if time.monotonic() >= until:
                    _hang_up(request)

    def server_close(self) -> None:
        super().server_close()
        with self._changed:
            for request in self._open:
                _hang_up(request)

    def handle_error(self, _request: object, client_address: Any) -> None:
        """Log at debug level what broke a connection: anybody could fill the log with it."""
        log.debug("metrics: connection of %s: %r", client_address[0], sys.exception())


def _hang_up(connection: Any) -> None:
    """Wake the thread that reads or writes there."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
