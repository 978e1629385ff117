"""A service that nobody calls, and the memory of shards with deep queues under load."""

from __future__ import annotations

import time
from concurrent.futures import Future
from functools import partial

from benchmarks import frames
from benchmarks.deployment import Deployment, cpu_seconds_between, rss_mb
from benchmarks.load import Load, Outcome
from benchmarks.report import Case, Measurement
from benchmarks.sections import WHOLE, Bench
from pinlaterd.config import layout

SHARDS = 3
SHARD_PROCESSES = [layout.shard_program(str(number)) for number in range(1, SHARDS + 1)]
SETTLE_SECONDS = 15.0  # after the start: first reports, first maintenance, frequent pulses
SAMPLE_SECONDS = 0.25
DEEP_JOBS = 1_000_000
CONNECTIONS = 64
JOBS_A_CALL = 100
DEEP = "deep"

IDLE = Case("idle", "no calls", 0, WHOLE)
DEEP_QUEUE = Case("idle", "deep queue", CONNECTIONS, WHOLE)
CPU_PERCENT = "CPU % of a core"
GROWTH_MB = "growth of the largest shard, MB"


def idle(bench: Bench, run: int) -> None:
    with Deployment(bench.folder, shards=SHARDS) as service:
        time.sleep(SETTLE_SECONDS)
        before, began = service.usage(), time.monotonic()
        time.sleep(bench.idle_seconds)
        after, seconds = service.usage(), time.monotonic() - began
        used = sum(cpu_seconds_between(before, after).values())
        figures = {CPU_PERCENT: 100.0 * used / seconds}
        bench.report.add(Measurement(IDLE, run, rss_mb=rss_mb(after), figures=figures))
        _deep_queues(bench, run, service, rss_mb(after))


def _deep_queues(
    bench: Bench, run: int, service: Deployment, idle_rss_mb: dict[str, float]
) -> None:
    """Fill a queue far beyond the shards' buffers, then empty it for a while; watch memory."""
    jobs = round(DEEP_JOBS * bench.scale)
    with service.client() as client:
        client.create_queue(DEEP)
    peaks_mb: dict[str, float] = {}
    script = partial(frames.enqueue, DEEP, JOBS_A_CALL)
    _watch(service, bench.make_calls(service, CONNECTIONS, script, jobs // JOBS_A_CALL), peaks_mb)
    takes = partial(frames.DequeueWithAcks, DEEP, JOBS_A_CALL)
    drain = Load(service.port, CONNECTIONS, takes, bench.window())
    _watch(service, bench.generators.start(drain), peaks_mb)
    growth = max(mb - idle_rss_mb[name] for name, mb in peaks_mb.items() if name in SHARD_PROCESSES)
    note = f"{jobs:,} jobs; the largest sizes seen"
    bench.report.add(
        Measurement(DEEP_QUEUE, run, rss_mb=peaks_mb, figures={GROWTH_MB: growth}, note=note)
    )


def _watch(service: Deployment, load: Future[Outcome], peaks_mb: dict[str, float]) -> None:
    while not load.done():
        for name, mb in service.rss_mb().items():
            peaks_mb[name] = max(peaks_mb.get(name, 0.0), mb)
        time.sleep(SAMPLE_SECONDS)
    load.result()
