"""The figures to reach, judged from the medians of all runs; what was left out is not judged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Literal

from benchmarks import (
    dashboard,
    failures,
    http,
    idle,
    interference,
    many_queues,
    push,
    sections,
    worker,
)
from benchmarks.engine_alone import Work
from benchmarks.report import Case, Report, Target

# By engine: whole / engine alone, at 100 jobs a call and 16 connections.
RATIO_OF_ENQUEUE = {"sqlite": 0.85, "mysql": 0.85, "redis": 0.5, "redis-always": 0.5}
RATIO_OF_DEQUEUE = {"sqlite": 0.8, "mysql": 0.9, "redis": 0.75, "redis-always": 0.75}
RATIO_OF_CYCLE = 0.5  # of any engine
# The MySQL engine / PinLater's statements, at 100 jobs a batch.
GAIN_OVER_PINLATER: Mapping[Work, float] = {"dequeue": 3.0, "full cycle": 2.5}
GROUP_COMMIT_GAIN = {"sqlite": 10.0, "mysql": 4.0, "redis": 4.0, "redis-always": 4.0}
ECHO_CALLS_PER_SECOND = 25_000
INTERFERENCE_RATIO = 2.0
IDLE_CPU_PERCENT = 0.5
MANY_QUEUES_CPU_PERCENT = 1.0
MANY_QUEUES_METRICS_MS = 300.0
MANY_QUEUES_RATIO = 2.0  # of the p99 of enqueues, which is a few ms
RSS_MB = {"router": 45.0, "shard": 45.0, "coordinator": 70.0}
RATIO_OF_WORKER = 0.6
PUSHED_JOBS_PER_SECOND = 5_000
FAILURES_PAGE_MS, FAILURES_GROUPS_MS = 100.0, 1_000.0
OVERVIEW_P95_MS = {100: 100.0, 1_000: 400.0}  # by queues
WEB_RSS_MB, WEB_IDLE_PERCENT, WEB_VIEWERS_PERCENT = 60.0, 0.1, 5.0
RATIO_OF_HTTP = {1: 0.35, 100: 0.4}  # by jobs a call
DELAY_RATIO = 5.0
SHARD_GROWTH_MB = 32 * 1024 * 1024 / 1e6  # shard_buffer_bytes

_JOBS, _P99 = attrgetter("jobs_per_second"), attrgetter("p99_ms")


def judged(report: Report, engine: str) -> list[Target]:
    return [
        Target(name, value, bound, limit, unit)
        for name, value, bound, limit, unit in _wanted(report, engine)
        if value is not None
    ]


Wanted = tuple[str, float | None, Literal["at least", "at most"], float, str]


def _wanted(report: Report, engine: str) -> Iterator[Wanted]:
    """Each figure, None if it was not measured, and its limit with the unit."""

    def jobs(name: str, above: Case, below: Case, least: float) -> Wanted:
        return name, report.ratio(above, below, _JOBS), "at least", least, ""

    def p99(name: str, above: Case, below: Case, most: float) -> Wanted:
        return name, report.ratio(above, below, _P99), "at most", most, ""

    enqueue, dequeue, case = sections.enqueue_case, sections.dequeue_case, sections.statements_case
    name = "enqueue of 100, 16 connections: whole / engine alone"
    yield jobs(name, enqueue(100, 16), enqueue(100), RATIO_OF_ENQUEUE[engine])
    name = "dequeue of 100 with acks, 16 connections: whole / engine alone"
    yield jobs(name, dequeue(16), dequeue(), RATIO_OF_DEQUEUE[engine])
    name = "cycle of 100, 16 connections: whole / engine alone"
    yield jobs(name, sections.CYCLE, sections.CYCLE_OF_ENGINE, RATIO_OF_CYCLE)
    name = "enqueue of 1: 64 connections / 1 connection"
    yield jobs(name, enqueue(1, 64), enqueue(1, 1), GROUP_COMMIT_GAIN[engine])
    for work, gain in GAIN_OVER_PINLATER.items():
        name = (
            f"{sections.STATEMENTS_WORK[work]}, 100 a batch: engine alone / PinLater's statements"
        )
        ours, theirs = case(work, 100, sections.ENGINE), case(work, 100, sections.PINLATER)
        yield jobs(name, ours, theirs, gain)
    name = "no storage, 1 job a call, 16 connections"
    echo = report.median(sections.echo_case(16))
    calls = None if echo is None else echo.calls_per_second
    yield name, calls, "at least", ECHO_CALLS_PER_SECOND, " calls/s"
    for each in interference.DISTURBANCES:
        quiet, disturbed = interference.quiet(each), interference.disturbed(each)
        yield p99(f"dequeue p99 with {each} / without", disturbed, quiet, INTERFERENCE_RATIO)
    yield from _failures(report)
    yield from _dashboard(report)
    yield from _idle(report)
    for size, ratio in RATIO_OF_HTTP.items():
        over_http, over_thrift = http.case(http.OVER_HTTP, size), http.case(http.OVER_THRIFT, size)
        yield jobs(f"enqueue of {size}: HTTP / Thrift", over_http, over_thrift, ratio)
    found = report.median(push.PUSHED)
    pushed = None if found is None else found.jobs_per_second
    yield "jobs pushed by one process", pushed, "at least", PUSHED_JOBS_PER_SECOND, " jobs/s"
    few, many = many_queues.WITH_FEW, many_queues.WITH_MANY
    yield p99("many queues: enqueue p99 / that with ten", many, few, MANY_QUEUES_RATIO)
    found = report.median(many)
    for figure, limit in (
        (many_queues.CPU_PERCENT, MANY_QUEUES_CPU_PERCENT),
        (many_queues.METRICS_MS, MANY_QUEUES_METRICS_MS),
    ):
        value = None if found is None else found.figures[figure]
        yield f"many queues: {figure}", value, "at most", limit, ""
    for connections in worker.CONNECTIONS_BY_HAND:
        name = f"no-op jobs: worker / the same calls by hand, {connections} connections"
        yield jobs(name, worker.WORKER, worker.by_hand(connections), RATIO_OF_WORKER)
    for round_trip in (worker.ROUTER_ROUND_TRIP, worker.SHARD_ROUND_TRIP):
        name = f"enqueue called to handler begun, p99 / that of {round_trip.what}"
        yield p99(name, worker.DELAY, round_trip, DELAY_RATIO)


def _failures(report: Report) -> Iterator[Wanted]:
    for case, most_ms in (
        (failures.PAGE, FAILURES_PAGE_MS),
        (failures.GROUPS, FAILURES_GROUPS_MS),
    ):
        found = report.median(case)
        took = None if found is None else found.p50_ms
        yield (
            f"{case.name} of {failures.FAILED_JOBS:,} failed jobs",
            took,
            "at most",
            most_ms,
            " ms",
        )
    ratio = report.ratio(failures.SEARCHED, failures.QUIET, _P99)
    name = "dequeue p99 with two searches / without"
    yield name, ratio, "at most", INTERFERENCE_RATIO, ""


def _dashboard(report: Report) -> Iterator[Wanted]:
    for queues, most_ms in OVERVIEW_P95_MS.items():
        found = report.median(dashboard.overview_case(queues))
        took = None if found is None else found.figures[dashboard.P95_MS]
        yield f"overview of {queues:,} queues, p95", took, "at most", most_ms, " ms"
    watched = report.median(dashboard.watched_case(dashboard.QUEUES[0]))
    for found, limit in (
        (report.median(dashboard.IDLE), WEB_IDLE_PERCENT),
        (watched, WEB_VIEWERS_PERCENT),
    ):
        if found is not None:
            name = f"web, {found.case.name}"
            share = found.figures[dashboard.CPU_PERCENT]
            yield name, share, "at most", limit, " % of a core"
    if watched is not None:
        yield "RSS of web", watched.rss_mb[dashboard.WEB], "at most", WEB_RSS_MB, " MB"


def _idle(report: Report) -> Iterator[Wanted]:
    quiet, deep = report.median(idle.IDLE), report.median(idle.DEEP_QUEUE)
    if quiet is not None:
        share = quiet.figures[idle.CPU_PERCENT]
        yield "idle: the whole service", share, "at most", IDLE_CPU_PERCENT, " % of a core"
        for kind, limit in RSS_MB.items():
            largest = max(mb for name, mb in quiet.rss_mb.items() if name.startswith(kind))
            yield f"idle: RSS of a {kind}", largest, "at most", limit, " MB"
    if deep is not None:
        name = "deep queue under load: growth of the largest shard"
        yield name, deep.figures[idle.GROWTH_MB], "at most", SHARD_GROWTH_MB, " MB"
