"""What `top` and `shard list` show: two samples of everybody's figures, and what came in between.

Pure. A sample is what the coordinator answers; a Frame is facts, as `--json` prints them. Rates
are per second between the two samples, and so are percentiles; the rest is as the later one has it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypedDict

from pinlaterd.cli import options
from pinlaterd.config.layout import shard_program
from pinlaterd.stats import HistogramData, StatsSnapshot, empty, merge
from pinlaterd.stats.histogram import percentiles
from pinlaterd.stats.registry import since

# every queue that a shard has, and nothing else, has a gauge whose name ends so
_AGE = "_oldest_ready_age_ms"
_COUNTING = "shard_queues_counting"  # every shard that has looked at its store has it
_ENDED_BADLY = ("ack_failed", "timeout_retry", "timeout_done")


class Sample(NamedTuple):
    """What the coordinator said at one moment; `at` in monotonic seconds."""

    at: float
    status: Mapping[str, Any]  # /status.json
    stats: Mapping[str, StatsSnapshot]  # /snapshot.json: by process


class QueueFrame(TypedDict):
    name: str
    enqueues_per_second: float
    dequeues_per_second: float
    acks_per_second: float
    failures_per_second: float  # attempts that failed or timed out
    limited_per_second: float  # dequeues that were refused by the rate limit
    jobs_per_second_limit: float | None
    pending: int  # whose run-after has come
    scheduled: int
    in_progress: int
    oldest_ready_age_ms: float
    dequeue_delay_p99_ms: float | None  # None: nothing was dequeued


class ShardJobs(TypedDict):
    """How many jobs a shard holds."""

    pending: int  # whose run-after has come
    scheduled: int
    in_progress: int
    succeeded: int
    failed: int


class ListedShard(TypedDict):
    """A shard as `shard list` shows it."""

    name: str
    engine: str
    where: str  # file or address
    state: str
    dequeue_only: bool
    ailing: bool
    jobs: ShardJobs | None  # None: it does not serve, or counts them


class ShardFrame(ListedShard):
    jobs_per_second: float
    commits_per_second: float
    jobs_per_commit: float | None  # None: there were no commits
    commit_p99_ms: float | None


class ProcessFrame(TypedDict):
    name: str
    state: str
    pid: int | None
    cpu_percent: float  # of one core
    rss_bytes: int


class Frame(TypedDict):
    seconds: float  # between the two samples
    healthy: bool
    problems: Sequence[str]
    warnings: Sequence[str]
    queues: Sequence[QueueFrame]
    shards: Sequence[ShardFrame]
    processes: Sequence[ProcessFrame]


def frame(before: Sample, now: Sample) -> Frame:
    seconds = max(now.at - before.at, 1e-3)
    nothing = empty()
    recent = {name: since(before.stats.get(name, nothing), s) for name, s in now.stats.items()}
    status = now.status
    return {
        "seconds": round(seconds, 3),
        "healthy": bool(status["healthy"]),
        "problems": status["problems"],
        "warnings": status["warnings"],
        "queues": _queues(merge(recent.values()), seconds),
        "shards": [_shard(shard, recent, seconds) for shard in shards_of(now)],
        "processes": _processes(before.status, status, seconds),
    }


def shards_of(sample: Sample) -> list[ListedShard]:
    nothing = empty()
    facts = {
        process["name"]: process["facts"]
        for process in sample.status["processes"]
        if process["kind"] == "shard" and process["facts"]
    }
    found: list[ListedShard] = []
    for shard in sample.status["shards"]:
        program = shard_program(shard["name"])
        about = facts.get(program, {})
        stats = sample.stats.get(program, nothing)
        found.append(
            {
                "name": shard["name"],
                "engine": shard["engine"],
                "where": about.get("master") or about.get("file") or "",
                "state": shard["state"],
                "dequeue_only": shard["dequeue_only"],
                "ailing": bool(stats["gauges"].get("shard_ailing")),
                "jobs": _jobs_of_all(stats),
            }
        )
    return found


def queue_names(stats: StatsSnapshot) -> list[str]:
    return sorted(name.removesuffix(_AGE) for name in stats["peaks"] if name.endswith(_AGE))


def _jobs_of_all(stats: StatsSnapshot) -> ShardJobs | None:
    gauges = stats["gauges"]
    if gauges.get(_COUNTING, 1):
        return None

    def total(state: str) -> int:
        return round(sum(gauges.get(f"{queue}_{state}", 0) for queue in queue_names(stats)))

    scheduled = total("scheduled")
    return {
        "pending": max(0, total("pending") - scheduled),
        "scheduled": scheduled,
        "in_progress": total("in_progress"),
        "succeeded": total("succeeded"),
        "failed": total("failed"),
    }


def _queues(recent: StatsSnapshot, seconds: float) -> list[QueueFrame]:
    counters, gauges = recent["counters"], recent["gauges"]

    def per_second(queue: str, names: Iterable[str]) -> float:
        return round(sum(counters.get(f"{queue}_{name}", 0) for name in names) / seconds, 2)

    def one(queue: str) -> QueueFrame:
        scheduled = round(gauges.get(f"{queue}_scheduled", 0))
        return {
            "name": queue,
            "enqueues_per_second": per_second(queue, ("enqueue",)),
            "dequeues_per_second": per_second(queue, ("dequeue",)),
            "acks_per_second": per_second(queue, ("ack_succeeded",)),
            "failures_per_second": per_second(queue, _ENDED_BADLY),
            "limited_per_second": per_second(queue, ("dequeue_requests_rate_limited",)),
            "jobs_per_second_limit": gauges.get(f"{queue}_rate_limit"),
            "pending": max(0, round(gauges.get(f"{queue}_pending", 0)) - scheduled),
            "scheduled": scheduled,
            "in_progress": round(gauges.get(f"{queue}_in_progress", 0)),
            "oldest_ready_age_ms": recent["peaks"].get(f"{queue}{_AGE}", 0),
            "dequeue_delay_p99_ms": _p99(recent["histograms"].get(f"{queue}_dequeue_delay_ms")),
        }

    return [one(queue) for queue in queue_names(recent)]


def _shard(shard: ListedShard, recent: Mapping[str, StatsSnapshot], seconds: float) -> ShardFrame:
    histograms = recent.get(shard_program(shard["name"]), empty())["histograms"]
    batches, commits = histograms.get("shard_batch_jobs"), histograms.get("shard_commit_ms")
    jobs = batches["sum"] if batches is not None else 0.0
    count = commits["count"] if commits is not None else 0
    return {
        **shard,
        "jobs_per_second": round(jobs / seconds, 2),
        "commits_per_second": round(count / seconds, 2),
        "jobs_per_commit": round(jobs / count, 2) if count else None,
        "commit_p99_ms": _p99(commits),
    }


def _processes(
    before: Mapping[str, Any], now: Mapping[str, Any], seconds: float
) -> list[ProcessFrame]:
    used = {process["pid"]: process["cpu_seconds"] for process in before["processes"]}

    def one(process: Mapping[str, Any]) -> ProcessFrame:
        cpu_seconds = process["cpu_seconds"] - used.get(process["pid"], process["cpu_seconds"])
        return {
            "name": process["name"],
            "state": process["state"],
            "pid": process["pid"],
            "cpu_percent": round(max(0.0, cpu_seconds) / seconds * 100, 1),
            "rss_bytes": process["rss_bytes"],
        }

    return [one(process) for process in now["processes"]]


def _p99(data: HistogramData | None) -> float | None:
    if data is None or not data["count"]:
        return None
    return round(percentiles(data, (0.99,))[0], 3)


def take_sample() -> Sample:
    """Raises ConnectionFailed."""
    status, stats = options.ask_coordinator("/status.json", "/snapshot.json")
    return Sample(time.monotonic(), status, stats)
