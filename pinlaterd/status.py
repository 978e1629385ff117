"""The view of the service that an operator has: its status, its figures, and what both show.

Pure: figures in, an operator's view out. The coordinator's pages, `status`, `top`, `shard list` and
whatever else shows the service use it, so that all show the same.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Container, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypedDict

import msgspec
from msgspec.structs import asdict, replace

from pinlaterd.config.layout import shard_program
from pinlaterd.stats import Histogram, StatsSnapshot, empty, natural, percentiles, since
from pinlaterd.verdict import SILENT_SECONDS, WORST_FIRST, QueueVerdict, QueueView, judge

SILENT = "silent"  # states of a process that it does not report itself
STOPPED = "stopped"
# Every queue that a shard has, and nothing else, has a peak whose name ends so.
_AGE = "_oldest_ready_age_ms"
_LIMITED = "_dequeue_requests_rate_limited"
_LIMITS = ("rate_limit", "in_progress_limit", "pending_limit")
_COUNTING = "shard_queues_counting"  # every shard that has looked at its store has it

_PAUSED_AT = re.compile(r"[0-9]{4}-([0-9]{2}-[0-9]{2})T([0-9]{2}:[0-9]{2}):[0-9]{2}Z")

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
    """The coordinator's own facts."""

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
        program = program_of(shard, sample.stats)
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


def program_of(shard: ShardStatus, known: Container[str]) -> str:
    """Return the name of its process among those that are `known`, of one server or of all."""
    program = shard_program(shard["name"])
    named_with_server = f"{shard['server']}/{program}"
    return named_with_server if named_with_server in known else program


def _queue_names(stats: StatsSnapshot) -> list[str]:
    ages = (name for name in stats["peaks"] if name.endswith(_AGE))
    return sorted((name.removesuffix(_AGE) for name in ages), key=natural)


def _jobs_of(stats: StatsSnapshot) -> Mapping[str, int] | None:
    """Return how many jobs a shard holds; None if it does not serve, or counts them."""
    gauges = stats["gauges"]
    if gauges.get(_COUNTING, 1):
        return None

    queues = _queue_names(stats)

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


# --- totals of queues, as all processes together report them --------------------------------------


class _Names(NamedTuple):
    """The names of a queue's figures in a shard's statistics."""

    enqueue: str
    dequeue: str
    ack_succeeded: str
    ack_failed: str
    timeout_retry: str
    timeout_done: str
    enqueue_rejected: str
    pending: str
    scheduled: str
    in_progress: str
    succeeded: str
    failed: str
    held_by_limit: str
    dequeue_delay_ms: str


@lru_cache(maxsize=20_000)
def _names(queue: str) -> _Names:
    return _Names(*[f"{queue}_{name}" for name in _Names._fields])


class QueueTotals(msgspec.Struct):
    """The totals of one queue. Counters: since processes began; states: as it is now."""

    enqueued: int = 0
    dequeued: int = 0
    succeeded: int = 0  # attempts, as are the failed ones
    failed: int = 0
    timed_out: int = 0  # claims
    refused: int = 0  # dequeues over the rate
    rejected: int = 0  # enqueues beyond max_pending
    ready: int = 0
    scheduled: int = 0
    in_progress: int = 0
    kept_succeeded: int = 0  # jobs that have ended, and are kept
    kept_failed: int = 0
    held_by_limit: int = 0
    oldest_ms: float = 0
    counted: int = 0  # shards that know how many of its jobs they hold
    rate_limit: float | None = None  # jobs/s, this server's part
    in_progress_limit: float | None = None
    pending_limit: float | None = None
    waits: dict[str, Histogram] = {}  # how long jobs waited until they were handed out, by process


class Recent(msgspec.Struct):
    """The activity of a queue between two times, per second."""

    seconds: float
    enqueued: float = 0
    dequeued: float = 0
    succeeded: float = 0
    failed: float = 0
    timed_out: float = 0
    refused: float = 0
    rejected: float = 0
    wait: Histogram | None = None  # how long jobs waited that were handed out, if any were

    def add_waits(self, waits: Histogram | None) -> None:
        """Add waits to those that are known."""
        if waits is not None and waits.count:
            self.wait = self.wait or Histogram()
            self.wait.add_all(waits)


_RATES = ("enqueued", "dequeued", "succeeded", "failed", "timed_out", "refused", "rejected")


def totals_of(
    stats: Mapping[str, StatsSnapshot], shards: Collection[str]
) -> dict[str, QueueTotals]:
    """Return the totals of all queues. `stats`: by process; `shards`: names of shards' processes.

    What a process reports later does not change them."""
    found: dict[str, QueueTotals] = {}
    own = {process: snapshot for process, snapshot in stats.items() if process in shards}
    for snapshot in own.values():
        for name, age_ms in snapshot["peaks"].items():
            if name.endswith(_AGE):
                known = found.setdefault(name.removesuffix(_AGE), QueueTotals(waits={}))
                known.oldest_ms = max(known.oldest_ms, age_ms)
    # A process that has ended has no peaks, but its counters count.
    for process, snapshot in own.items():
        _add_shard(found, process, snapshot)
    for process, snapshot in stats.items():
        if process not in shards:
            _add_limits(found, snapshot)
    return found


def _add_limits(found: Mapping[str, QueueTotals], snapshot: StatsSnapshot) -> None:
    """Add what routers and the coordinator report of queues with limits, which are few."""
    for name, count in snapshot["counters"].items():
        if name.endswith(_LIMITED) and (queue := found.get(name.removesuffix(_LIMITED))):
            queue.refused += count
    for name, value in snapshot["gauges"].items():
        for limit in _LIMITS:
            if name.endswith(f"_{limit}") and (queue := found.get(name.removesuffix(f"_{limit}"))):
                setattr(queue, limit, value)


def _add_shard(found: Mapping[str, QueueTotals], process: str, snapshot: StatsSnapshot) -> None:
    count, gauge = snapshot["counters"].get, snapshot["gauges"].get
    histograms = snapshot["histograms"]
    for queue, known in found.items():
        names = _names(queue)
        known.enqueued += count(names.enqueue, 0)
        known.dequeued += count(names.dequeue, 0)
        known.succeeded += count(names.ack_succeeded, 0)
        known.failed += count(names.ack_failed, 0)
        known.timed_out += count(names.timeout_retry, 0) + count(names.timeout_done, 0)
        known.rejected += count(names.enqueue_rejected, 0)
        wait = histograms.get(names.dequeue_delay_ms)
        if wait is not None:
            known.waits[process] = wait  # a later one takes its place; it does not change
        pending = gauge(names.pending)
        if pending is None:
            continue
        known.counted += 1
        scheduled = round(gauge(names.scheduled, 0))
        known.ready += max(0, round(pending) - scheduled)
        known.scheduled += scheduled
        known.in_progress += round(gauge(names.in_progress, 0))
        known.kept_succeeded += round(gauge(names.succeeded, 0))
        known.kept_failed += round(gauge(names.failed, 0))
        known.held_by_limit += round(gauge(names.held_by_limit, 0))


def recent(
    before: QueueTotals | None, now: QueueTotals, seconds: float, *, with_waits: bool = True
) -> Recent:
    """Return what happened between two totals of a queue. One that was not there had nothing; of a
    counter that has become less nothing is known."""
    found = Recent(seconds)
    if before is now:
        return found
    earlier = before or _NOTHING
    for name in _RATES:
        gained = getattr(now, name) - getattr(earlier, name)
        if gained > 0:
            setattr(found, name, gained / seconds)
    for process, wait in now.waits.items() if with_waits else ():
        known = earlier.waits.get(process)
        if wait is not known:
            found.add_waits(wait.since(known))
    return found


def has_lost(before: QueueTotals, now: QueueTotals) -> bool:
    """Tell whether a process has ended, or was restarted, that had counted for a queue."""
    return any(getattr(now, name) < getattr(before, name) for name in _RATES)


def unreadable(totals: QueueTotals) -> QueueTotals:
    """Return the totals of a queue while no shard says what it holds: its counters stay."""
    return QueueTotals(**{name: getattr(totals, name) for name in _RATES}, waits=totals.waits)


def merged_recent(parts: Sequence[Recent]) -> Recent:
    """Add up what happened on several servers."""
    if len(parts) == 1:
        return parts[0]
    whole = Recent(max(part.seconds for part in parts))
    for part in parts:
        for name in _RATES:
            setattr(whole, name, getattr(whole, name) + getattr(part, name))
        whole.add_waits(part.wait)
    return whole


def merged_totals(parts: Sequence[QueueTotals]) -> QueueTotals:
    """Add up the totals of several servers; of ages the greatest counts."""
    if len(parts) == 1:
        return parts[0]
    whole = QueueTotals()
    for part in parts:
        for name in _ADDED:
            setattr(whole, name, getattr(whole, name) + getattr(part, name))
        for name in _LIMITS:
            limit = getattr(part, name)
            if limit is not None:
                setattr(whole, name, (getattr(whole, name) or 0) + limit)
        whole.oldest_ms = max(whole.oldest_ms, part.oldest_ms)
    return whole


_NOTHING = QueueTotals()
_ADDED = sorted({*QueueTotals.__struct_fields__} - {*_LIMITS, "oldest_ms", "waits"})


# --- what happened between two times ----------------------------------------------------------


def between(before: Sample, now: Sample) -> Mapping[str, StatsSnapshot]:
    """Return what has changed between two samples, by process."""
    return {name: since(before.stats.get(name, empty()), s) for name, s in now.stats.items()}


class Moment(NamedTuple):
    """The totals at one time, of one server, or of all that a sample has. They do not change."""

    at: float  # monotonic seconds
    queues: Mapping[str, QueueTotals]
    commits: Mapping[str, Histogram]  # how long commits took, by the shard's process
    batches: Mapping[str, Histogram]  # how many jobs each had
    cpu_seconds: Mapping[tuple[str, int | None], float]  # by process and pid
    processes: frozenset[str]  # that have reported
    missing: Sequence[str]  # shards of this server of which it is not known what they hold


def moment_of(sample: Sample) -> Moment:
    """Take the totals out of a sample."""
    stats = sample.stats
    programs = {shard["name"]: program_of(shard, stats) for shard in _own_shards(sample)}
    found = {name: stats[name] for name in programs.values() if name in stats}
    commits = {name: one["histograms"].get("shard_commit_ms") for name, one in found.items()}
    batches = {name: one["histograms"].get("shard_batch_jobs") for name, one in found.items()}
    return Moment(
        sample.at,
        totals_of(stats, found.keys()),
        {name: one for name, one in commits.items() if one is not None},
        {name: one for name, one in batches.items() if one is not None},
        {(one["name"], one["pid"]): one["cpu_seconds"] for one in sample.status["processes"]},
        frozenset(stats),
        [
            shard
            for shard, program in programs.items()
            if program not in found or found[program]["gauges"].get(_COUNTING, 1)
        ],
    )


def _own_shards(sample: Sample) -> Sequence[ShardStatus]:
    """List the shards whose figures the sample has to have: those of its server, or of all servers
    that are in it. A standby here of another server's shard has none."""
    own = ("", sample.status.get("server", ""))
    return [
        shard
        for shard in sample.status["shards"]
        if shard["server"] in own or program_of(shard, sample.stats) != shard_program(shard["name"])
    ]


class QueuePart(msgspec.Struct):
    """The figures that one server has of a queue."""

    totals: QueueTotals  # without waits, of which `recent` has what is needed
    recent: Recent
    minute: Recent
    oldest_before_ms: float | None = None  # a minute ago; None: not known
    silent_seconds: float | None = None  # since a job was handed out; None: not known
    silent_is_least: bool = False  # whether none was since that began to be known
    unasked_seconds: float | None = None  # since a worker asked; None: none has
    watched_seconds: float | None = None  # since all routers know who asks; None: not known
    failures: dict[str, int] = {}  # attempts that failed lately, by what they said
    failed_in_hour: int = 0  # attempts
    hour_is_partial: bool = False  # whether a shard counts them only since it began


class ServerFrame(msgspec.Struct):
    """The figures of one server for the time between two moments."""

    status: Status
    seconds: float
    queues: dict[str, QueuePart]
    shards: dict[str, Facts]
    cpu_percent: dict[str, float]  # of one core, by process


class PauseNote(msgspec.Struct, frozen=True):
    """A note of the person who paused a queue, the time and the reason, if they are known."""

    by: str = ""
    at: str = ""  # as 2026-11-26T02:10:00Z
    reason: str = ""


def server_frame(sample: Sample, now: Moment, before: Moment, minute: Moment) -> ServerFrame:
    """Return what has happened on a server since `before`, and since `minute`, a minute ago."""
    seconds, minute_seconds = max(now.at - before.at, 1e-3), max(now.at - minute.at, 1e-3)
    queues: dict[str, QueuePart] = {}
    for queue, totals in now.queues.items():
        earlier = minute.queues.get(queue)
        part = queues[queue] = QueuePart(
            replace(totals, waits={}),
            recent(before.queues.get(queue), totals, seconds),
            recent(earlier, totals, minute_seconds, with_waits=False),
        )
        if earlier is not None and minute is not now:
            part.oldest_before_ms = earlier.oldest_ms
    return ServerFrame(
        sample.status,
        seconds,
        queues,
        shard_frames(sample, now, before),
        cpu_of(sample, now, before),
    )


def shard_frames(sample: Sample, now: Moment, before: Moment) -> dict[str, Facts]:
    """Return what shards hold, and how they have committed since `before`, by name."""
    seconds = max(now.at - before.at, 1e-3)
    own = {shard["name"]: program_of(shard, sample.stats) for shard in _own_shards(sample)}
    return {
        row["name"]: {**row, **_commits(own[row["name"]], now, before, seconds)}
        for row in shards_of(sample)
        if row["name"] in own
    }


def cpu_of(sample: Sample, now: Moment, before: Moment) -> dict[str, float]:
    """Return how much of a core processes have used since `before`, in percent, by name."""
    seconds = max(now.at - before.at, 1e-3)
    found: dict[str, float] = {}
    for process in sample.status["processes"]:
        used = now.cpu_seconds[process["name"], process["pid"]]
        used -= before.cpu_seconds.get((process["name"], process["pid"]), used)
        found[process["name"]] = round(max(0.0, used) / seconds * 100, 1)
    return found


def commits_between(program: str, now: Moment, before: Moment) -> Histogram:
    """Return how long the commits of a shard's process took since `before`."""
    commits = now.commits.get(program)
    return Histogram() if commits is None else commits.since(before.commits.get(program))


def _commits(program: str, now: Moment, before: Moment, seconds: float) -> Facts:
    """Return how a shard commits."""
    commits, batches = commits_between(program, now, before), now.batches.get(program)
    jobs = 0.0 if batches is None else batches.since(before.batches.get(program)).sum
    return {
        "jobs_per_second": round(jobs / seconds, 2),
        "commits_per_second": round(commits.count / seconds, 2),
        "jobs_per_commit": round(jobs / commits.count, 2) if commits.count else None,
        "commit_p99_ms": _percentile(commits, 0.99),
    }


# --- frames -------------------------------------------------------------------------------------


def frame(before: Sample, now: Sample) -> Facts:
    """Return what `top` shows of the time between two samples."""
    earlier, later = moment_of(before), moment_of(now)
    return whole_frame(server_frame(now, later, earlier, earlier))


def whole_frame(
    own: ServerFrame,
    others: Mapping[str, ServerFrame | None] | None = None,
    pauses: Mapping[str, PauseNote] | None = None,
) -> Facts:
    """Return what `top` and the dashboard show of all servers together. `others`: by name; None
    stands for a server that does not answer. `pauses`: of all queues that are paused."""
    found = {own.status["server"]: own} if "server" in own.status else {"": own}
    status, cpu_percent = own.status, own.cpu_percent
    if others:
        found |= {name: one for name, one in others.items() if one is not None}
        samples = {
            name: None if one is None else Sample(one.status, {}) for name, one in others.items()
        }
        status = together(Sample(own.status, {}), samples).status
        cpu_percent = {
            f"{server}/{process}": percent
            for server, one in found.items()
            for process, percent in one.cpu_percent.items()
        }
    shards = [_shard_row(shard, found) for shard in status["shards"]]
    missing = [shard["name"] for shard in shards if shard["jobs"] is None]
    parts: dict[str, list[QueuePart]] = {}
    for one in found.values():
        for queue, part in one.queues.items():
            parts.setdefault(queue, []).append(part)
    return {
        "seconds": round(max(one.seconds for one in found.values()), 3),
        "healthy": bool(status["healthy"]),
        "problems": status["problems"],
        "warnings": status["warnings"],
        "queues": [
            _queue(queue, parts[queue], missing, (pauses or {}).get(queue))
            for queue in sorted(parts, key=natural)
        ],
        "shards": shards,
        "processes": [
            {
                "name": one["name"],
                "state": one["state"],
                "pid": one["pid"],
                "cpu_percent": cpu_percent.get(one["name"], 0.0),
                "rss_bytes": one["rss_bytes"],
            }
            for one in status["processes"]
        ],
    }


def worst_first(queues: Sequence[Facts]) -> list[Facts]:
    """Sort rows of queues: those that need somebody first, of one verdict the most ready jobs."""
    return sorted(
        queues, key=lambda queue: (WORST_FIRST[queue["verdict"]["kind"]], -(queue["pending"] or 0))
    )


def _shard_row(shard: ShardStatus, found: Mapping[str, ServerFrame]) -> Facts:
    """Return the row of a shard from the server that owns it."""
    for one in found.values():
        row = one.shards.get(shard["name"])
        if row is not None and shard["server"] in ("", one.status.get("server", "")):
            return row
    [row] = shards_of(Sample({"processes": [], "shards": [shard]}, {}))  # type: ignore[typeddict-item]
    nothing = {"jobs_per_second": 0.0, "commits_per_second": 0.0, "jobs_per_commit": None}
    return {**row, **nothing, "commit_p99_ms": None}


def _queue(
    queue: str, parts: Sequence[QueuePart], missing: Sequence[str], pause: PauseNote | None
) -> Facts:
    totals = merged_totals([part.totals for part in parts])
    recent_rates = merged_recent([part.recent for part in parts])
    wait = recent_rates.wait
    held = {
        "pending": totals.ready,  # due by now
        "scheduled": totals.scheduled,
        "in_progress": totals.in_progress,
        "held_by_limit": totals.held_by_limit,
        "succeeded": totals.kept_succeeded,
        "failed": totals.kept_failed,
        "oldest_ready_age_ms": totals.oldest_ms,
    }
    return {
        "name": queue,
        "verdict": _verdict(totals, parts, missing, pause)._asdict(),
        "pause": None if pause is None else asdict(pause),
        "enqueues_per_second": round(recent_rates.enqueued, 2),
        "dequeues_per_second": round(recent_rates.dequeued, 2),
        "acks_per_second": round(recent_rates.succeeded, 2),
        "failures_per_second": round(recent_rates.failed + recent_rates.timed_out, 2),  # attempts
        "limited_per_second": round(recent_rates.refused + recent_rates.rejected, 2),
        "jobs_per_second_limit": totals.rate_limit,
        "in_progress_limit": totals.in_progress_limit,
        "pending_limit": totals.pending_limit,
        **(held if totals.counted else dict.fromkeys(held)),  # None: no shard says what it holds
        "missing_shards": missing,  # whose jobs these figures lack
        "dequeue_delay_p50_ms": _percentile(wait, 0.5),
        "dequeue_delay_p95_ms": _percentile(wait, 0.95),
        "dequeue_delay_p99_ms": _percentile(wait, 0.99),
    }


def _verdict(
    totals: QueueTotals, parts: Sequence[QueuePart], missing: Sequence[str], pause: PauseNote | None
) -> QueueVerdict:
    minute = merged_recent([part.minute for part in parts])
    failures: dict[str, int] = {}
    for part in parts:
        for text, attempts in part.failures.items():
            failures[text] = failures.get(text, 0) + attempts
    top = max(failures, key=failures.__getitem__, default="")
    silent_seconds = _least([part.silent_seconds for part in parts])
    unasked_seconds, unasked_is_least = _unasked(parts)
    view = QueueView(
        ready=totals.ready,
        scheduled=totals.scheduled,
        in_progress=totals.in_progress,
        oldest_ms=totals.oldest_ms,
        oldest_before_ms=_most([part.oldest_before_ms for part in parts]),
        seconds=minute.seconds,
        enqueued=minute.enqueued,
        dequeued=minute.dequeued,
        succeeded=minute.succeeded,
        failed=minute.failed,
        timed_out=minute.timed_out,
        refused=minute.refused,
        rejected=minute.rejected,
        silent_seconds=silent_seconds,
        silent_is_least=any(
            part.silent_is_least for part in parts if part.silent_seconds == silent_seconds
        ),
        unasked_seconds=unasked_seconds,
        unasked_is_least=unasked_is_least,
        max_jobs_per_second=totals.rate_limit,
        max_in_progress=totals.in_progress_limit,
        max_pending=totals.pending_limit,
        top_failure=top,
        top_failure_share=failures[top] / sum(failures.values()) if top else 0.0,
        failed_in_hour=sum(part.failed_in_hour for part in parts),
        hour_is_partial=any(part.hour_is_partial for part in parts),
        shards_missing=missing,
        is_readable=totals.counted > 0,
    )
    if pause is not None:
        view = view._replace(
            is_paused=True,
            paused_by=pause.by,
            paused_at=_PAUSED_AT.sub(r"\1 \2", pause.at),
            pause_reason=pause.reason,
        )
    return judge(view)


def _unasked(parts: Sequence[QueuePart]) -> tuple[float | None, bool]:
    """Return since when no worker has asked for jobs, None if that is not known, and whether it may
    be longer: a router that was restarted has forgotten who asked before."""
    asked = min([math.inf if one.unasked_seconds is None else one.unasked_seconds for one in parts])
    watched = _least([part.watched_seconds for part in parts])
    if asked < SILENT_SECONDS or (watched is not None and asked <= watched):
        return asked, False
    return watched, True


def _most(found: Sequence[float | None]) -> float | None:
    return max((one for one in found if one is not None), default=None)


def _least(found: Sequence[float | None]) -> float | None:
    """Return the least; None if one of them is not known."""
    known = [one for one in found if one is not None]
    return min(known) if known and len(known) == len(found) else None


def _percentile(data: Histogram | None, fraction: float) -> float | None:
    """Return a percentile; None if nothing was measured."""
    return round(percentiles(data, (fraction,))[0], 3) if data and data.count else None
