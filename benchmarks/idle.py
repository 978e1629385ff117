"""A service that nobody calls, and the memory of shards with deep queues under load."""

from __future__ import annotations

import time
from concurrent.futures import Future
from functools import partial

from benchmarks import frames, usage
from benchmarks.deployment import Deployment
from benchmarks.load import Load, Outcome, Window
from benchmarks.report import MB, Case, Measurement
from benchmarks.sections import FILL_SECONDS_AT_MOST, WHOLE, Bench
from pinlaterd.config import layout

SHARDS = 3
SHARD_PROCESSES = [layout.shard_program(str(number)) for number in range(1, SHARDS + 1)]
SETTLE_SECONDS = 15.0  # after the start: first reports, first upkeep, frequent pulses
SAMPLE_SECONDS = 0.25
DEEP_JOBS = 1_000_000
CONNECTIONS = 64
JOBS_A_CALL = 100
DEEP = "deep"

IDLE = Case("idle", "no calls", 0, WHOLE)
DEEP_QUEUE = Case("idle", "deep queue", CONNECTIONS, WHOLE)
CPU_PERCENT = "CPU % of a core"
GROWTH_MB = "growth of the largest shard, MB"


def idle(bench: Bench, run: int, *, idle_seconds: float, scale: float) -> None:
    with Deployment(bench.folder, shards=SHARDS) as service:
        time.sleep(SETTLE_SECONDS)
        before = service.usage()
        began = time.monotonic()
        time.sleep(idle_seconds)
        after = service.usage()
        seconds = time.monotonic() - began
        used = sum(usage.cpu_seconds_between(before, after).values())
        rss = {name: u.rss_bytes / MB for name, u in after.items()}
        figures = {CPU_PERCENT: 100.0 * used / seconds}
        bench.report.add(Measurement(IDLE, run, rss_mb=rss, figures=figures))
        _deep_queues(bench, run, service, rss, round(DEEP_JOBS * scale))


def _deep_queues(
    bench: Bench, run: int, service: Deployment, idle_rss: dict[str, float], jobs: int
) -> None:
    """Fill a queue far beyond the shards' buffers, then empty it for a while; watch memory."""
    with service.client() as client:
        client.create_queue(DEEP)
    window = Window.soon(FILL_SECONDS_AT_MOST, 0.0)
    peaks: dict[str, float] = {}
    script = partial(frames.enqueue, DEEP, JOBS_A_CALL)
    fill = Load(service.port, CONNECTIONS, script, window, max_calls=jobs // JOBS_A_CALL)
    _watch(service, bench.generators.start(fill), peaks)
    drain = Load(
        service.port,
        CONNECTIONS,
        partial(frames.DequeueWithAcks, DEEP, JOBS_A_CALL),
        bench.window(),
    )
    _watch(service, bench.generators.start(drain), peaks)
    growth = max(mb - idle_rss[name] for name, mb in peaks.items() if name in SHARD_PROCESSES)
    note = f"{jobs:,} jobs; the largest sizes seen"
    bench.report.add(
        Measurement(DEEP_QUEUE, run, rss_mb=peaks, figures={GROWTH_MB: growth}, note=note)
    )


def _watch(service: Deployment, load: Future[Outcome], peaks: dict[str, float]) -> None:
    while not load.done():
        for name, process in service.usage().items():
            peaks[name] = max(peaks.get(name, 0.0), process.rss_bytes / MB)
        time.sleep(SAMPLE_SECONDS)
    load.result()
