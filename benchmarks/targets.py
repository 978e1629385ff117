"""The figures to reach, judged from the medians of all runs; what was left out is not judged."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks import idle, interference, many_queues, sections, worker
from benchmarks.engine_alone import Work
from benchmarks.report import Measurement, Report, Target

# By engine: whole / engine alone, at 100 jobs a call and 16 connections.
RATIO_OF_ENQUEUE = {"sqlite": 0.85, "mysql": 0.85, "redis": 0.5, "redis-always": 0.5}
RATIO_OF_DEQUEUE = {"sqlite": 0.8, "mysql": 0.9, "redis": 0.75, "redis-always": 0.75}
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
DELAY_RATIO = 5.0
SHARD_GROWTH_MB = 32 * 1024 * 1024 / 1e6  # shard_buffer_bytes


def judged(report: Report, engine: str) -> list[Target]:
    return [
        *_ratios(report, engine),
        *_statements(report),
        *_echo(report),
        *_interference(report),
        *_idle(report),
        *_many_queues(report),
        *_worker(report),
    ]


def _ratios(report: Report, engine: str) -> list[Target]:
    enqueue, dequeue = sections.enqueue_case, sections.dequeue_case
    wanted = [
        (
            "enqueue of 100, 16 connections: whole / engine alone",
            enqueue(100, 16),
            enqueue(100),
            RATIO_OF_ENQUEUE[engine],
        ),
        (
            "dequeue of 100 with acks, 16 connections: whole / engine alone",
            dequeue(16),
            dequeue(),
            RATIO_OF_DEQUEUE[engine],
        ),
        (
            "enqueue of 1: 64 connections / 1 connection",
            enqueue(1, 64),
            enqueue(1, 1),
            GROUP_COMMIT_GAIN[engine],
        ),
    ]
    return [
        Target(name, ratio, "at least", limit)
        for name, above, below, limit in wanted
        if (ratio := report.ratio(above, below, _jobs)) is not None
    ]


def _statements(report: Report) -> list[Target]:
    case = sections.statements_case
    return [
        Target(
            f"{sections.STATEMENTS_WORK[work]}, 100 a batch: engine alone / PinLater's statements",
            ratio,
            "at least",
            limit,
        )
        for work, limit in GAIN_OVER_PINLATER.items()
        if (
            ratio := report.ratio(
                case(work, 100, sections.ENGINE), case(work, 100, sections.PINLATER), _jobs
            )
        )
        is not None
    ]


def _echo(report: Report) -> list[Target]:
    median = report.median(sections.echo_case(16))
    if median is None:
        return []
    name = "no storage, 1 job a call, 16 connections"
    return [Target(name, median.calls_per_second, "at least", ECHO_CALLS_PER_SECOND, " calls/s")]


def _interference(report: Report) -> list[Target]:
    return [
        Target(f"dequeue p99 with {name} / without", ratio, "at most", INTERFERENCE_RATIO)
        for name in interference.DISTURBANCES
        if (ratio := report.ratio(interference.disturbed(name), interference.quiet(name), _p99))
        is not None
    ]


def _idle(report: Report) -> list[Target]:
    targets = []
    quiet, deep = report.median(idle.IDLE), report.median(idle.DEEP_QUEUE)
    if quiet is not None:
        share = quiet.figures[idle.CPU_PERCENT]
        targets.append(
            Target("idle: the whole service", share, "at most", IDLE_CPU_PERCENT, " % of a core")
        )
        for kind, limit in RSS_MB.items():
            largest = max(mb for name, mb in quiet.rss_mb.items() if name.startswith(kind))
            targets.append(Target(f"idle: RSS of a {kind}", largest, "at most", limit, " MB"))
    if deep is not None:
        growth = deep.figures[idle.GROWTH_MB]
        name = "deep queue under load: growth of the largest shard"
        targets.append(Target(name, growth, "at most", SHARD_GROWTH_MB, " MB"))
    return targets


def _many_queues(report: Report) -> list[Target]:
    many = report.median(many_queues.WITH_MANY)
    slower = report.ratio(many_queues.WITH_MANY, many_queues.WITH_FEW, _p99)
    if many is None or slower is None:
        return []
    return [
        Target("many queues: enqueue p99 / that with ten", slower, "at most", MANY_QUEUES_RATIO),
        *(
            Target(f"many queues: {name}", many.figures[name], "at most", limit)
            for name, limit in (
                (many_queues.CPU_PERCENT, MANY_QUEUES_CPU_PERCENT),
                (many_queues.METRICS_MS, MANY_QUEUES_METRICS_MS),
            )
        ),
    ]


def _worker(report: Report) -> list[Target]:
    targets = []
    for connections in worker.CONNECTIONS_BY_HAND:
        by_hand = report.ratio(worker.WORKER, worker.by_hand(connections), _jobs)
        if by_hand is not None:
            name = f"no-op jobs: worker / the same calls by hand, {connections} connections"
            targets.append(Target(name, by_hand, "at least", RATIO_OF_WORKER))
    for round_trip in (worker.ROUTER_ROUND_TRIP, worker.SHARD_ROUND_TRIP):
        delay = report.ratio(worker.DELAY, round_trip, _p99)
        if delay is not None:
            name = f"enqueue called to handler begun, p99 / that of {round_trip.what}"
            targets.append(Target(name, delay, "at most", DELAY_RATIO))
    return targets


def _jobs(measurement: Measurement) -> float:
    return measurement.jobs_per_second


def _p99(measurement: Measurement) -> float:
    return measurement.p99_ms
