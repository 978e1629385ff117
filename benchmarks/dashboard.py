"""The dashboard with many queues: its overview, its memory, and what it costs while people watch.

Each queue gets jobs all the time and hands none out, so that all of them stand on the overview and
their cells change. Pages are loaded one after the other, compressed, with all queues shown.
"""

from __future__ import annotations

import http.client
import select
import socket
import time
from contextlib import ExitStack, closing
from functools import partial

from benchmarks import frames
from benchmarks.deployment import Deployment, Usages, cpu_seconds_between
from benchmarks.load import Load, Window, percentile
from benchmarks.report import Case, Measurement
from benchmarks.sections import SHARDS, WHOLE, Bench, sleep_until
from pinlaterd.model import CreateQueueRequest, EnqueueRequest, Job, Method

SECTION = "dashboard"
QUEUES = (100, 1_000)
VIEWERS = 50
WEB = "web"
P95_MS = "p95, ms"
PAGE_KB = "kB compressed"
CPU_PERCENT = "CPU % of a core, web"
COORDINATOR_PERCENT = "coordinator"
IDLE = Case(SECTION, "nobody looks", 0, WHOLE)

_ENQUEUES_PER_SECOND = 200.0


def overview_case(queues: int) -> Case:
    """Loads of the overview of so many queues."""
    return Case(SECTION, f"overview, {queues:,} queues", 1, WHOLE)


def watched_case(queues: int) -> Case:
    """Viewers of the overview of so many queues."""
    return Case(SECTION, f"watched, {queues:,} queues", VIEWERS, WHOLE)


def dashboard(bench: Bench, run: int) -> None:
    """Measure the overview and its viewers with each number of queues; first, without either."""
    with Deployment(bench.folder, shards=SHARDS, web=True) as service:
        made, window = 0, Window.soon(bench.idle_seconds, bench.warm_up_seconds)
        sleep_until(window.measure_from)
        before = service.usage()
        sleep_until(window.until)
        used = cpu_seconds_between(before, service.usage())
        figures = {CPU_PERCENT: 100.0 * used[WEB] / bench.idle_seconds}
        bench.report.add(Measurement(IDLE, run, rss_mb=service.rss_mb(), figures=figures))
        for queues in QUEUES:
            create = partial(frames.InTurn, Method.CREATE_QUEUE, CreateQueueRequest, made, queues)
            bench.make_calls(service, 1, create, queues - made).result()
            made = queues
            for measure, case in ((_overview, overview_case), (_viewers, watched_case)):
                window = bench.window()
                script = partial(frames.InTurn, Method.ENQUEUE, _enqueue, 0, queues)
                load = Load(service.port, 4, script, window, _ENQUEUES_PER_SECOND)
                enqueues = bench.generators.start(load)
                bench.report.add(measure(service, case(queues), run, window))
                enqueues.result()


def _enqueue(queue: str) -> EnqueueRequest:
    return EnqueueRequest(queue, [Job(frames.body())])


def _overview(service: Deployment, case: Case, run: int, window: Window) -> Measurement:
    """Load the page with all its queues, again and again."""
    seconds: list[float] = []
    size = 0
    sleep_until(window.measure_from)
    address = ("127.0.0.1", service.web_port)
    with closing(http.client.HTTPConnection(*address, timeout=30.0)) as connection:
        before = service.usage()
        while time.monotonic() < window.until or not seconds:
            began = time.monotonic()
            connection.request("GET", "/?all=1", headers={"Accept-Encoding": "gzip"})
            size = len(connection.getresponse().read())
            seconds.append(time.monotonic() - began)
        used = cpu_seconds_between(before, service.usage())
    p50, p95, p99 = (1000 * percentile(seconds, percent) for percent in (50, 95, 99))
    cpu = f"{1000 * used[WEB] / len(seconds):.1f} ms of CPU a page"
    figures = {P95_MS: p95, PAGE_KB: size / 1000}
    return Measurement(
        case, run, p50_ms=p50, p99_ms=p99, rss_mb=service.rss_mb(), figures=figures, note=cpu
    )


def _viewers(service: Deployment, case: Case, run: int, window: Window) -> Measurement:
    """Keep the streams of so many viewers open, and read them."""
    events = 0
    request = b"GET /live?of=overview HTTP/1.1\r\nHost: localhost\r\n\r\n"
    before: Usages = {}
    with ExitStack() as opened:
        address = ("127.0.0.1", service.web_port)
        streams = [
            opened.enter_context(socket.create_connection(address)) for _ in range(case.connections)
        ]
        for stream in streams:
            stream.sendall(request)
        while (now := time.monotonic()) < window.until:
            if not before and now >= window.measure_from:
                before, events = service.usage(), 0
            for stream in select.select(streams, (), (), 0.1)[0]:
                events += stream.recv(1 << 20).count(b"data: ")
        used = cpu_seconds_between(before, service.usage())
    measured = window.until - window.measure_from
    percent = {name: 100.0 * seconds / measured for name, seconds in used.items()}
    figures = {CPU_PERCENT: percent[WEB], COORDINATOR_PERCENT: percent["coordinator"]}
    return Measurement(
        case,
        run,
        calls_per_second=events / measured,
        rss_mb=service.rss_mb(),
        figures=figures,
    )
