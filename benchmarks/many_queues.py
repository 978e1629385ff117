"""A service with thousands of queues, beside the same one with ten: calls, figures, idleness."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from random import Random
from statistics import median
from urllib.request import urlopen

from benchmarks import frames
from benchmarks.deployment import Deployment, cpu_seconds_between
from benchmarks.load import Load
from benchmarks.report import Case, Measurement
from benchmarks.sections import SHARDS, Bench
from pinlaterd.model import (
    CreateQueueRequest,
    DeleteQueueRequest,
    EnqueueRequest,
    Job,
    Method,
    Request,
)

SECTION = "queues"
FEW, MANY = 10, 10_000
CONNECTIONS = 16
CALLS_PER_SECOND = 300.0  # well below saturation
SETTLE_SECONDS = 12.0  # a round of maintenance and more
PAGES = 5
CPU_PERCENT = "CPU % of a core, the busiest process"
METRICS_MS = "/metrics, ms"
PASSWORD = "bench"
# Of no worth: it takes next to no time to check, which is not what is measured.
PASSWORD_HASH = "scrypt$16$8$1$bWFueQ==$8IIaYWMZcPxKHvqSp7SJ0L0nK/inyh31mLtcFo4Jt58="

WITH_FEW = Case(SECTION, f"enqueues at {CALLS_PER_SECOND:.0f}/s", CONNECTIONS, "few queues")
WITH_MANY = WITH_FEW._replace(what="many queues")
DELETED = Case(SECTION, "all but the few deleted", 0, "many queues")


def many_queues(bench: Bench, run: int) -> None:
    settings = {"max_queues": MANY, "admin_password_hash": PASSWORD_HASH}
    with Deployment(bench.folder, shards=SHARDS, settings=settings) as service:

        def each(
            method: Method, request: Callable[[str], Request], first: int, queues: int
        ) -> None:
            """One call for each queue from number `first` on."""
            script = partial(frames.InTurn, method, request, first, queues)
            bench.make_calls(service, 1, script, queues - first).result()

        each(Method.CREATE_QUEUE, CreateQueueRequest, 0, FEW)
        _measure(bench, run, service, WITH_FEW, FEW)
        queues = round(MANY * bench.scale)
        each(Method.CREATE_QUEUE, CreateQueueRequest, FEW, queues)
        each(Method.ENQUEUE, _enqueue, 0, queues)
        _measure(bench, run, service, WITH_MANY, queues)
        each(Method.DELETE_QUEUE, _delete, FEW, queues)
        time.sleep(SETTLE_SECONDS)
        figures = {METRICS_MS: _metrics_ms(service)}
        bench.report.add(Measurement(DELETED, run, rss_mb=service.rss_mb(), figures=figures))


def _measure(bench: Bench, run: int, service: Deployment, case: Case, queues: int) -> None:
    script = partial(frames.InTurn, Method.ENQUEUE, _enqueue, 0, queues, Random(run))
    window = bench.window()
    load = Load(service.port, CONNECTIONS, script, window, calls_per_second=CALLS_PER_SECOND)
    outcome = bench.generators.start(load).result()
    time.sleep(SETTLE_SECONDS)
    before, began = service.usage(), time.monotonic()
    time.sleep(bench.idle_seconds)
    used = cpu_seconds_between(before, service.usage())
    percent = 100.0 * max(used.values()) / (time.monotonic() - began)
    bench.report.add(
        replace(
            Measurement.of(case, run, outcome),
            rss_mb=service.rss_mb(),
            generator_cpu_share=0.0,
            figures={CPU_PERCENT: percent, METRICS_MS: _metrics_ms(service)},
            note=f"{queues:,} queues; {outcome.errors} errors",
        )
    )


def _enqueue(queue: str) -> Request:
    return EnqueueRequest(queue, [Job(frames.body())])


def _delete(queue: str) -> Request:
    return DeleteQueueRequest(queue, PASSWORD)


def _metrics_ms(service: Deployment) -> float:
    """As a scraper has it: the first one after many changes takes longer."""
    times = []
    for _ in range(PAGES):
        began = time.monotonic()
        with urlopen(f"http://127.0.0.1:{service.stats_port}/metrics") as page:
            page.read()
        times.append((time.monotonic() - began) * 1000)
    return median(times)
