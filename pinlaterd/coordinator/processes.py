"""The processes that report: the state of each, all figures, and what `status` and /health say.

Without sockets and timers: whether a process has ended or gone silent is determined when it is
asked for, CPU and memory are the kernel's figures. Figures are totals: when a process is replaced
by a new one of its name, its counters and histograms stay in that name's totals. A fact whose name
ends in `warning` is a warning (a store that keeps commits less well than acknowledged, for one).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from pinlaterd import __version__
from pinlaterd.clock import Clock
from pinlaterd.config import kinds
from pinlaterd.config.kinds import ProcessKind
from pinlaterd.config.layout import shard_program
from pinlaterd.config.schema import Config, ShardSettings
from pinlaterd.coordinator.placement import ShardState
from pinlaterd.errors import address_of
from pinlaterd.stats import StatsSnapshot, apply, empty, forget, merge, natural, raised, totals
from pinlaterd.status import SILENT, STOPPED, About, ProcessStatus, ShardStatus, Status, warnings_of
from pinlaterd.wire.control import TAKES_JOBS, UNHEALTHY_SHARDS, ProcessState, Report

SILENT_SECONDS = 3.0  # three reports missed

_WARNING = "warning"
# In /proc/PID/stat, counted from the state, which follows the program's name.
_USER_TICKS, _SYSTEM_TICKS, _PAGES = 11, 12, 21
_TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_DURABILITY_WARNING = "durability warning"


class ProcessView(NamedTuple):
    """A process as others are told of it. `state`: as it reported, or silent, or stopped."""

    report: Report  # the last one
    state: str

    @property
    def gone(self) -> bool:
        return self.state in (SILENT, STOPPED)


@dataclass(slots=True)
class _Member:
    report: Report  # the last one, with all figures so far, `earlier` included
    heard_at: float
    earlier: StatsSnapshot | None = None  # totals of those that it has replaced


class Registry:
    """The reports of processes, by the peers (connections) that they came through."""

    def __init__(self, clock: Clock, is_alive: Callable[[int], bool]) -> None:
        """`is_alive`: whether a process of that pid exists."""
        self._clock = clock
        self._is_alive = is_alive
        self._members: dict[bytes, _Member] = {}

    def heard(self, peer: bytes, report: Report | None) -> bool:
        """Note a report, or a heartbeat (None). False: `peer` has to tell all, since what it
        sent says nothing without what went before."""
        now = self._clock.monotonic()
        member = self._members.get(peer)
        if report is None:
            if member is not None:
                member.heard_at = now
            return member is not None
        if report.full:
            earlier = self._end_earlier_connection(report)
            if earlier is not None:
                report = replace(report, stats=merge([earlier, report.stats]))
            self._members[peer] = _Member(report, now, earlier)
            return True
        if member is None:
            return False
        self._forget_earlier(report)
        changes = report.changes
        if member.earlier is not None:
            changes = changes._replace(now=raised(changes.now, member.earlier))
        stats = member.report.stats
        apply(stats, changes)
        member.report = replace(report, stats=stats, full=True, dropped=())
        member.heard_at = now
        return True

    def knows(self, peer: bytes) -> bool:
        return peer in self._members

    def peers(self) -> Sequence[bytes]:
        """Return the peers that a new snapshot has to be sent to."""
        return list(self._members)

    def peers_of(self, *chosen: ProcessKind) -> Sequence[bytes]:
        """Return the peers of the processes of some kinds that have not gone."""
        names = {kind.name for kind in chosen}
        return [
            peer
            for peer, member in self._members.items()
            if member.report.kind in names and self._state(member) not in (SILENT, STOPPED)
        ]

    def serving(self, process: str) -> Report | None:
        """Return the last report of the process of that name that serves; None if there is none."""
        for member in self._members.values():
            if member.report.process == process and self._state(member) == ProcessState.SERVING:
                return member.report
        return None

    def views(self) -> Sequence[ProcessView]:
        """Return every process that was heard of and not replaced, by name."""
        states = self._retire_replaced()
        found = [ProcessView(self._members[peer].report, state) for peer, state in states.items()]
        return sorted(found, key=lambda it: (natural(it.report.process), it.report.started_at_ms))

    def stats(self) -> Mapping[str, StatsSnapshot]:
        """Return figures by process name, not to be changed. Of processes that have gone only
        totals are left."""
        found: dict[str, list[StatsSnapshot]] = {}
        for view in self.views():
            stats = view.report.stats
            found.setdefault(view.report.process, []).append(totals(stats) if view.gone else stats)
        return {
            name: snapshots[0] if len(snapshots) == 1 else merge(snapshots)
            for name, snapshots in sorted(found.items())
        }

    def _forget_earlier(self, report: Report) -> None:
        """Forget figures of a deleted queue in the totals of earlier processes, too."""
        for member in self._members.values():
            if member.report.process == report.process:
                for name in report.dropped:
                    forget(member.report.stats, name)
                    if member.earlier is not None:
                        forget(member.earlier, name)

    def _end_earlier_connection(self, report: Report) -> StatsSnapshot | None:
        """End the earlier connection of a process; return the totals that it had taken over."""
        identity = (report.process, report.pid, report.started_at_ms)
        for peer, member in self._members.items():
            known = member.report
            if (known.process, known.pid, known.started_at_ms) == identity:
                del self._members[peer]
                return member.earlier
        return None

    def _retire_replaced(self) -> Mapping[bytes, str]:
        """Let a live process take the place of those of its name that have gone; return the states
        of all left. Live ones stay side by side: a shard's owner and its standby bear one name."""
        states = {peer: self._state(one) for peer, one in self._members.items()}
        gone = [peer for peer, state in states.items() if state in (SILENT, STOPPED)]
        live = {one.report.process: one for peer, one in self._members.items() if peer not in gone}
        for peer in gone:
            old = self._members[peer]
            heir = live.get(old.report.process)
            if heir is not None:
                del self._members[peer], states[peer]
                left = totals(old.report.stats)
                heir.earlier = merge([heir.earlier or empty(), left])
                heir.report = replace(heir.report, stats=merge([left, heir.report.stats]))
        return states

    def _state(self, member: _Member) -> str:
        if not self._is_alive(member.report.pid):
            return STOPPED
        if self._clock.monotonic() - member.heard_at > SILENT_SECONDS:
            return SILENT
        return member.report.state


# --- what a cluster's other servers are told -----------------------------------------------------


def shard_states(views: Sequence[ProcessView]) -> Mapping[str, ShardState]:
    """Return the shard processes here, by shard; of one name, one that serves before others."""
    found: dict[str, ShardState] = {}
    for view in views:
        report = view.report
        if report.kind != kinds.SHARD.name or view.gone:
            continue
        shard = report.process.removeprefix(f"{kinds.SHARD.name}-")
        superseded = "superseded by epoch"
        if superseded in report.facts:
            found.setdefault(shard, ShardState("superseded", int(report.facts[superseded])))
        elif shard not in found or view.state == ProcessState.SERVING:
            found[shard] = ShardState(view.state, int(report.facts.get("epoch") or 0))
    return found


def admitted_members(
    views: Sequence[ProcessView], published: Mapping[int, Sequence[str]]
) -> frozenset[str]:
    """Return the member nodes whose routers a shard process here may still serve; "" for those of a
    snapshot that is not in `published`, the members by version of the snapshot."""
    versions = {
        view.report.snapshot_version
        for view in views
        if view.report.kind == kinds.SHARD.name and view.state != STOPPED
    }
    return frozenset().union(*(published.get(version, ("",)) for version in versions))


def unreached_shards(views: Sequence[ProcessView]) -> Sequence[str]:
    """List the shards that no router here reaches; none while no router serves."""
    unreached = [
        {*view.report.facts.get(UNHEALTHY_SHARDS, "").split(", ")} - {""}
        for view in views
        if view.report.kind == kinds.ROUTER.name and view.state == ProcessState.SERVING
    ]
    return sorted(set.intersection(*unreached)) if unreached else ()


def routers_serve(views: Sequence[ProcessView]) -> bool | None:
    """Tell whether any router serves; None: none was heard yet."""
    states = [view.state for view in views if view.report.kind == kinds.ROUTER.name]
    return ProcessState.SERVING in states if states else None


# --- status -----------------------------------------------------------------------------------


class Usage(NamedTuple):
    """The resources that a process uses, by the kernel, without its children."""

    cpu_seconds: float
    rss_bytes: int


def status(config: Config, views: Sequence[ProcessView], about: About) -> Status:
    expected = {one.program: one.kind.name for one in kinds.reporting(config)}
    processes = _processes(config, expected, views)
    shards = [_shard(shard, processes) for shard in config.shards.values()]
    problems = _problems(expected, processes)
    if not config.server.cluster and not any(shard["takes_jobs"] for shard in shards):
        degraded = [shard for shard in shards if shard["degraded"]]
        problems += [f"shard-{s['name']} takes no jobs: {s['degraded']}" for s in degraded]
    return {
        **about,
        "version": __version__,
        "healthy": not problems,
        "problems": problems,
        "warnings": [*warnings_of(processes), *about["warnings"]],
        "thrift": address_of(config.server.host, config.server.port),
        "stats": address_of(config.server.stats_host, config.server.stats_port),
        "processes": processes,
        "shards": shards,
        "cluster": config.server.cluster,
        "server": config.server.server,
        "servers": [],
        "shards_to_leave": [],
    }


def usage_of(pid: int) -> Usage | None:
    """Return None if there is no such process (any more), or no file can be opened."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The name of the program, in parentheses, may hold anything.
    fields = stat.rpartition(") ")[2].split()
    ticks = int(fields[_USER_TICKS]) + int(fields[_SYSTEM_TICKS])
    return Usage(round(ticks / _TICKS_A_SECOND, 2), int(fields[_PAGES]) * _PAGE_BYTES)


def _processes(
    config: Config, expected: Mapping[str, str], views: Sequence[ProcessView]
) -> list[ProcessStatus]:
    """List the expected processes in their order, then others that reported and go on."""
    found = []
    for name, kind in expected.items():
        known = [view for view in views if view.report.process == name]
        never_heard_of = Report(name, kind, 0, 0, ProcessState.STARTING, {}, empty())
        found += known or [ProcessView(never_heard_of, STOPPED)]
    others = (view for view in views if view.report.process not in expected)
    found += [view for view in others if view.state != STOPPED]
    return [_process(config, view) for view in found]


def _process(config: Config, view: ProcessView) -> ProcessStatus:
    report, has_ended = view.report, view.state == STOPPED
    accepted = _DURABILITY_WARNING if config.server.accept_weak_durability else ""
    warnings = [
        text
        for key, text in report.facts.items()
        if key.endswith(_WARNING) and key != accepted and text
    ]
    usage = None if has_ended else usage_of(report.pid)
    uptime = max(0.0, time.time() - report.started_at_ms / 1000)
    return {
        "name": report.process,
        "kind": report.kind,
        "pid": report.pid or None,
        "state": view.state,
        "uptime_seconds": 0.0 if has_ended else round(uptime, 1),
        "config_version": report.config_version,
        "facts": report.facts,
        "warnings": warnings,
        "cpu_seconds": usage.cpu_seconds if usage else 0.0,
        "rss_bytes": usage.rss_bytes if usage else 0,
    }


def _shard(shard: ShardSettings, processes: Sequence[ProcessStatus]) -> ShardStatus:
    mine = [process for process in processes if process["name"] == shard_program(shard.name)]
    serving = [process for process in mine if process["state"] == ProcessState.SERVING]
    takes_jobs = any(process["facts"].get(TAKES_JOBS) != "no" for process in serving)
    return {
        "name": shard.name,
        "engine": shard.engine,
        "state": (serving or mine)[0]["state"],
        "healthy": bool(serving),
        "dequeue_only": shard.dequeue_only,
        "degraded": next(filter(None, [p["facts"].get("health warning") for p in serving]), ""),
        "takes_jobs": takes_jobs and not shard.dequeue_only,
        "warnings": [text for process in mine for text in process["warnings"]],
        "server": "",
    }


def _problems(expected: Iterable[str], processes: Sequence[ProcessStatus]) -> list[str]:
    """Name each process that should serve, and does not, nor does a handover peer for it."""
    serving = {p["name"] for p in processes if p["state"] == ProcessState.SERVING}
    handed_over = {kinds.counterpart(name) for name in serving if kinds.is_handover_peer(name)}
    problems = []
    for name in expected:
        states = [process["state"] for process in processes if process["name"] == name]
        if name not in serving | handed_over:
            problems.append(f"{name} is {', '.join(states)}")
    return problems
