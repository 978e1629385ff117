"""What an operator sees of the service: its status, its figures, and what both show.

Pure: figures in, an operator's view out. The coordinator's pages, `status`, `top`, `shard list` and
whatever else shows the service use it, so that all show the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import msgspec

from pinlaterd.config.layout import shard_program
from pinlaterd.stats import Histogram, StatsSnapshot, empty, merge, natural, percentiles, since

SILENT = "silent"  # states of a process that it does not report itself
STOPPED = "stopped"
# Every queue that a shard has, and nothing else, has a peak whose name ends so.
_QUEUE_AGE = "_oldest_ready_age_ms"
_COUNTING = "shard_queues_counting"  # every shard that has looked at its store has it
_ENDED_BADLY = ("ack_failed", "timeout_retry", "timeout_done")

Facts = dict[str, Any]  # a row of what is shown, as JSON has it


class ProcessStatus(TypedDict):
    name: str
    kind: str
    pid: int | None  # None: never heard of
    state: str
    uptime_seconds: float
    config_version: int  # that it follows
    facts: Mapping[str, str]
    warnings: Sequence[str]
    cpu_seconds: float
    rss_bytes: int


class ShardStatus(TypedDict):
    name: str
    engine: str
    state: str
    healthy: bool
    dequeue_only: bool
    degraded: str  # why its store can't be relied on, or takes no jobs
    takes_jobs: bool
    warnings: Sequence[str]
    server: str  # that owns it, "" if there is only this one


class ServerStatus(TypedDict):
    """A server of the cluster."""

    name: str
    state: str  # alive, gone
    leads: bool
    maintenance: bool
    thrift: str
    version: str
    config: int  # the number of what it follows
    shards: Sequence[str]  # that it owns


class About(TypedDict):
    """What the coordinator knows of itself."""

    deployment: str
    uptime_seconds: float
    snapshot_version: int
    config_version: int
    config_number: int  # of a cluster's configuration
    config_problems: Sequence[str]  # what the files say wrong; what is active stays so
    refused_removals: Mapping[str, str]  # those of them that are about one shard, by its name
    needs_restart: Sequence[str]
    config_judged: str  # digest of the files that were carried out, or refused
    warnings: Sequence[str]


class Status(About):
    """The body of /status.json."""

    version: str
    healthy: bool
    problems: Sequence[str]
    thrift: str
    stats: str
    processes: Sequence[ProcessStatus]
    shards: Sequence[ShardStatus]
    cluster: str  # its name, "" if there is only this server
    server: str
    servers: Sequence[ServerStatus]
    shards_to_leave: Sequence[str]  # that this server owns and others could


class Sample(msgspec.Struct, frozen=True):
    """The status and the figures of one server, or of all of a cluster together."""

    status: Status
    stats: Mapping[str, StatsSnapshot]  # by process
    at: float = 0.0  # monotonic seconds of the process that asked for it


def warnings_of(processes: Sequence[ProcessStatus]) -> list[str]:
    """Return each reason once: what one store lacks, others mostly lack, too."""
    names: dict[str, list[str]] = {}
    for process in processes:
        for text in process["warnings"]:
            names.setdefault(text, []).append(process["name"])
    return [f"{', '.join(of)}: {text}" for text, of in names.items()]


# --- all servers of a cluster -------------------------------------------------------------------


def together(own: Sample, others: Mapping[str, Sample | None]) -> Sample:
    """Merge the samples of all servers into one. None stands for a server that does not answer in
    time, which is a problem. Processes are named with their server: `jobs-1/router`."""
    found = {own.status["server"]: own, **{name: one for name, one in others.items() if one}}
    statuses = {name: found[name].status for name in sorted(found, key=natural)}
    shards = [_of_owner(shard, statuses) for shard in own.status["shards"]]
    processes: list[ProcessStatus] = []
    without_processes: dict[str, Status] = {}
    for name, status in statuses.items():
        there = status["processes"]
        processes += [{**process, "name": f"{name}/{process['name']}"} for process in there]
        rest = [text for text in status["warnings"] if text not in warnings_of(there)]
        without_processes[name] = {**status, "warnings": rest}
    problems = [
        *_from_each(statuses, "problems"),
        *(f"{name}: does not answer" for name, one in others.items() if one is None),
        *(f"shard {s['name']} has no owner" for s in shards if s["server"] not in found),
    ]
    whole: Status = {
        **own.status,
        "healthy": not problems,
        "problems": problems,
        "config_problems": _from_each(statuses, "config_problems"),
        "needs_restart": _from_each(statuses, "needs_restart"),
        "warnings": [*warnings_of(processes), *_from_each(without_processes, "warnings")],
        "processes": processes,
        "shards": shards,
    }
    stats = {
        f"{name}/{process}": snapshot
        for name in statuses
        for process, snapshot in found[name].stats.items()
    }
    return Sample(whole, stats)


def _from_each(statuses: Mapping[str, Status], key: str) -> Sequence[str]:
    """Collect the texts of all servers, with names in front of what not all of them report."""
    texts: dict[str, list[str]] = {}
    for name, status in statuses.items():
        for text in status[key]:  # type: ignore[literal-required]
            texts.setdefault(text, []).append(name)
    return [
        text if len(names) == len(statuses) else f"{', '.join(names)}: {text}"
        for text, names in texts.items()
    ]


def _of_owner(shard: ShardStatus, statuses: Mapping[str, Status]) -> ShardStatus:
    """Return the status of the shard as the server that owns it reports it."""
    known = statuses[shard["server"]]["shards"] if shard["server"] in statuses else ()
    return next((one for one in known if one["name"] == shard["name"]), shard)


# --- shards -----------------------------------------------------------------------------------


def shards_of(sample: Sample) -> list[Facts]:
    """List the shards as `shard list` shows them."""
    processes = sample.status["processes"]
    facts = {process["name"]: process["facts"] for process in processes if process["facts"]}
    found: list[Facts] = []
    for shard in sample.status["shards"]:
        program = _program_of(shard)
        about = facts.get(program, {})
        stats = sample.stats.get(program, empty())
        found.append(
            {
                "name": shard["name"],
                "server": shard["server"],
                "engine": shard["engine"],
                "where": about.get("master") or about.get("file") or "",
                "state": shard["state"],
                "dequeue_only": shard["dequeue_only"],
                "degraded": shard["degraded"],
                "jobs": _jobs_of(stats),
            }
        )
    return found


def _program_of(shard: ShardStatus) -> str:
    """Return the name of its process, as all servers together have it."""
    program = shard_program(shard["name"])
    return f"{shard['server']}/{program}" if shard["server"] else program


def _queue_names(stats: StatsSnapshot) -> list[str]:
    ages = (name for name in stats["peaks"] if name.endswith(_QUEUE_AGE))
    return sorted((name.removesuffix(_QUEUE_AGE) for name in ages), key=natural)


def jobs_in(now: Sample, queue: str) -> Mapping[str, int]:
    """Return how many jobs of a queue all shards hold, by state; nothing while one counts them."""
    stats = [now.stats.get(_program_of(shard), empty()) for shard in now.status["shards"]]
    found = [jobs for one in stats if (jobs := _jobs_of(one, queue)) is not None]
    states = found[0] if len(found) == len(stats) else ()
    return {state.upper(): sum(jobs[state] for jobs in found) for state in states}


def _jobs_of(stats: StatsSnapshot, only: str = "") -> Mapping[str, int] | None:
    """Return how many jobs a shard holds, in all queues or in the `only` one; None if it does not
    serve, or counts them."""
    gauges = stats["gauges"]
    if gauges.get(_COUNTING, 1):
        return None

    queues = [only] if only else _queue_names(stats)

    def total(state: str) -> int:
        return round(sum(gauges.get(f"{queue}_{state}", 0) for queue in queues))

    scheduled = total("scheduled")
    return {
        "pending": max(0, total("pending") - scheduled),  # due by now
        "scheduled": scheduled,
        "in_progress": total("in_progress"),
        "succeeded": total("succeeded"),
        "failed": total("failed"),
    }


# --- rates between two samples ----------------------------------------------------------------


def between(before: Sample, now: Sample) -> Mapping[str, StatsSnapshot]:
    """Return what has changed between two samples, by process."""
    return {name: since(before.stats.get(name, empty()), s) for name, s in now.stats.items()}


def frame(before: Sample, now: Sample) -> Facts:
    """Return what `top` shows of the time between two samples."""
    seconds = max(now.at - before.at, 1e-3)
    recent = between(before, now)
    figures = merge(recent.values())
    used = {(one["name"], one["pid"]): one["cpu_seconds"] for one in before.status["processes"]}
    return {
        "seconds": round(seconds, 3),
        "healthy": bool(now.status["healthy"]),
        "problems": now.status["problems"],
        "warnings": now.status["warnings"],
        "queues": [_queue(queue, figures, seconds) for queue in _queue_names(figures)],
        "shards": [
            {**shard, **_commits(recent.get(_program_of(of), empty()), seconds)}
            for of, shard in zip(now.status["shards"], shards_of(now), strict=True)
        ],
        "processes": [
            _process(one, used.get((one["name"], one["pid"]), one["cpu_seconds"]), seconds)
            for one in now.status["processes"]
        ],
    }


def _queue(queue: str, recent: StatsSnapshot, seconds: float) -> Facts:
    counters, gauges = recent["counters"], recent["gauges"]
    scheduled = round(gauges.get(f"{queue}_scheduled", 0))

    def per_second(*names: str) -> float:
        return round(sum(counters.get(f"{queue}_{name}", 0) for name in names) / seconds, 2)

    return {
        "name": queue,
        "enqueues_per_second": per_second("enqueue"),
        "dequeues_per_second": per_second("dequeue"),
        "acks_per_second": per_second("ack_succeeded"),
        "failures_per_second": per_second(*_ENDED_BADLY),  # attempts
        "limited_per_second": per_second("dequeue_requests_rate_limited"),
        "jobs_per_second_limit": gauges.get(f"{queue}_rate_limit"),
        "pending": max(0, round(gauges.get(f"{queue}_pending", 0)) - scheduled),  # due by now
        "scheduled": scheduled,
        "in_progress": round(gauges.get(f"{queue}_in_progress", 0)),
        "in_progress_limit": gauges.get(f"{queue}_in_progress_limit"),
        "pending_limit": gauges.get(f"{queue}_pending_limit"),
        "held_by_limit": round(gauges.get(f"{queue}_held_by_limit", 0)),
        "oldest_ready_age_ms": recent["peaks"].get(f"{queue}{_QUEUE_AGE}", 0),
        "dequeue_delay_p99_ms": _p99(recent["histograms"].get(f"{queue}_dequeue_delay_ms")),
    }


def _commits(recent: StatsSnapshot, seconds: float) -> Facts:
    """Return how a shard commits."""
    batches = recent["histograms"].get("shard_batch_jobs")
    commits = recent["histograms"].get("shard_commit_ms")
    jobs = batches.sum if batches is not None else 0.0
    count = commits.count if commits is not None else 0
    return {
        "jobs_per_second": round(jobs / seconds, 2),
        "commits_per_second": round(count / seconds, 2),
        "jobs_per_commit": round(jobs / count, 2) if count else None,
        "commit_p99_ms": _p99(commits),
    }


def _process(process: ProcessStatus, cpu_seconds_before: float, seconds: float) -> Facts:
    cpu_seconds = process["cpu_seconds"] - cpu_seconds_before
    return {
        "name": process["name"],
        "state": process["state"],
        "pid": process["pid"],
        "cpu_percent": round(max(0.0, cpu_seconds) / seconds * 100, 1),  # of one core
        "rss_bytes": process["rss_bytes"],
    }


def _p99(data: Histogram | None) -> float | None:
    """Return the 99th percentile; None if nothing was measured."""
    if data is None or not data.count:
        return None
    return round(percentiles(data, (0.99,))[0], 3)
