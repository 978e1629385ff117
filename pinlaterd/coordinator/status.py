"""What `status` shows and /health judges: the configuration against what processes report.

Pure but for the CPU and memory figures, which the kernel gives, and the locks of moves. A fact
whose name ends in `warning` is a warning (a store that keeps commits less well than acknowledged,
for one).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypedDict

import psutil

from pinlaterd import __version__
from pinlaterd.config.layout import counterpart, is_handover_peer, shard_program
from pinlaterd.config.schema import Config, ShardSettings
from pinlaterd.coordinator.registry import STOPPED, ProcessView
from pinlaterd.wire.control import ProcessState

_WARNING = "warning"
_DURABILITY_WARNING = "durability warning"


class Usage(NamedTuple):
    """What the kernel says of a process, without its children."""

    cpu_seconds: float
    rss_bytes: int


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
    warnings: Sequence[str]


class Status(TypedDict):
    """The body of /status.json."""

    version: str
    deployment: str
    healthy: bool
    problems: Sequence[str]
    config_problems: Sequence[str]  # what the files say wrong; what is active stays so
    refused_removals: Mapping[str, str]  # those of them that are about one shard, by its name
    needs_restart: Sequence[str]
    warnings: Sequence[str]
    uptime_seconds: float
    thrift: str
    stats: str
    snapshot_version: int
    config_version: int
    config_judged: str  # digest of the files that were carried out, or refused
    processes: Sequence[ProcessStatus]
    shards: Sequence[ShardStatus]


class About(NamedTuple):
    """What the coordinator knows of itself."""

    deployment: str
    uptime_seconds: float
    snapshot_version: int
    config_version: int
    config_problems: Sequence[str]
    refused_removals: Mapping[str, str]
    needs_restart: Sequence[str]
    config_judged: str  # digest of the files that were carried out, or refused
    warnings: Sequence[str] = ()


def router_programs(routers: int) -> Sequence[str]:
    """What supervisord calls the routers."""
    return ["router"] if routers == 1 else [f"router-{n}" for n in range(1, routers + 1)]


def expected_processes(config: Config) -> Mapping[str, str]:
    """The processes that should report, and of what kind each is."""
    routers = dict.fromkeys(router_programs(config.server.routers), "router")
    return routers | {shard_program(name): "shard" for name in config.shards}


def status(config: Config, views: Sequence[ProcessView], about: About) -> Status:
    processes = _processes(config, views)
    shards = [_shard(shard, processes) for shard in config.shards.values()]
    problems = _problems(config, processes)
    return {
        "version": __version__,
        "deployment": about.deployment,
        "healthy": not problems,
        "problems": problems,
        "config_problems": about.config_problems,
        "refused_removals": about.refused_removals,
        "needs_restart": about.needs_restart,
        "warnings": [*_warnings(processes), *about.warnings],
        "uptime_seconds": round(about.uptime_seconds, 1),
        "thrift": f"{config.server.host}:{config.server.port}",
        "stats": f"{config.server.stats_host}:{config.server.stats_port}",
        "snapshot_version": about.snapshot_version,
        "config_version": about.config_version,
        "config_judged": about.config_judged,
        "processes": processes,
        "shards": shards,
    }


def usage_of(pid: int) -> Usage | None:
    """None if there is no such process (any more)."""
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            times, memory = process.cpu_times(), process.memory_info()
    except psutil.Error:
        return None
    return Usage(round(times.user + times.system, 2), memory.rss)


def _processes(config: Config, views: Sequence[ProcessView]) -> list[ProcessStatus]:
    """Those expected first, in their order; then any other that reported and has not ended."""
    expected = expected_processes(config)
    found = []
    for name, kind in expected.items():
        known = [view for view in views if view.process == name]
        never_heard_of = ProcessView(name, kind, 0, 0, STOPPED, 0.0, {})
        found += [_process(config, view) for view in known or (never_heard_of,)]
    others = (view for view in views if view.process not in expected and view.state != STOPPED)
    return found + [_process(config, view) for view in others]


def _process(config: Config, view: ProcessView) -> ProcessStatus:
    accepted = _DURABILITY_WARNING if config.server.accept_weak_durability else ""
    warnings = [
        text
        for key, text in view.facts.items()
        if key.endswith(_WARNING) and key != accepted and text
    ]
    usage = None if view.state == STOPPED else usage_of(view.pid)
    uptime = max(0.0, time.time() - view.started_at_ms / 1000)
    return {
        "name": view.process,
        "kind": view.kind,
        "pid": view.pid or None,
        "state": view.state,
        "uptime_seconds": 0.0 if view.state == STOPPED else round(uptime, 1),
        "config_version": view.config_version,
        "facts": view.facts,
        "warnings": warnings,
        "cpu_seconds": usage.cpu_seconds if usage else 0.0,
        "rss_bytes": usage.rss_bytes if usage else 0,
    }


def _shard(shard: ShardSettings, processes: Sequence[ProcessStatus]) -> ShardStatus:
    mine = [process for process in processes if process["name"] == shard_program(shard.name)]
    serving = [process for process in mine if process["state"] == ProcessState.SERVING]
    return {
        "name": shard.name,
        "engine": shard.engine,
        "state": (serving or mine)[0]["state"],
        "healthy": bool(serving),
        "dequeue_only": shard.dequeue_only,
        "warnings": [text for process in mine for text in process["warnings"]],
    }


def _warnings(processes: Sequence[ProcessStatus]) -> list[str]:
    """Each once: what one store lacks, the others on the same server lack too."""
    names: dict[str, list[str]] = {}
    for process in processes:
        for text in process["warnings"]:
            names.setdefault(text, []).append(process["name"])
    return [f"{', '.join(of)}: {text}" for text, of in names.items()]


def _problems(config: Config, processes: Sequence[ProcessStatus]) -> list[str]:
    """Each expected process that does not serve, and that no handover peer serves for."""
    serving = {p["name"] for p in processes if p["state"] == ProcessState.SERVING}
    handed_over = {counterpart(name) for name in serving if is_handover_peer(name)}
    problems = []
    for name in expected_processes(config):
        states = [process["state"] for process in processes if process["name"] == name]
        if name not in serving | handed_over:
            problems.append(f"{name} is {', '.join(states)}")
    return problems
