"""A kind of process that tests add to the table: it reports, and does nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

from pinlaterd.clock import Clock
from pinlaterd.config.active import ActiveConfig
from pinlaterd.config.kinds import KINDS, ProcessKind, RestartRule
from pinlaterd.lifecycle import ExitCode, StopSignal
from pinlaterd.stats import Stats
from pinlaterd.wire.control import ProcessState, Snapshot
from pinlaterd.wire.process import ProcessStart, ReportingProcess, start_process

QUEUE = "made_up"  # while it is configured there are two such processes

KIND = ProcessKind(
    "made-up",
    main=__name__,
    purpose="Run a made-up process.",
    priority=400,
    members=lambda config: {"1": None, "2": None} if QUEUE in config.queues else {},
    restart=RestartRule.HANDOVER,
    is_live=True,
)


def register() -> None:
    """Add the row, in this process."""
    KINDS.append(KIND)


def run(etc: Path) -> int:
    return asyncio.run(_serve(start_process(KIND, etc)))


class _MadeUp(ReportingProcess):
    _shards = ""

    async def run(self) -> int:
        stop = StopSignal()
        stop.catch_in(self._loop)
        self._start_reporting()
        self._enter(ProcessState.SERVING)
        await stop.wait()
        self._enter(ProcessState.STOPPING)
        self._stop_reporting()
        return ExitCode.OK

    def facts(self) -> Mapping[str, str]:
        return {"shards": self._shards}

    def follow(self, snapshot: Snapshot, active: ActiveConfig | None) -> None:
        self._shards = ", ".join(entry.name for entry in snapshot.shards)

    def tick(self) -> None:
        self._stats.count("made_up_ticks")


async def _serve(start: ProcessStart) -> int:
    return await _MadeUp(KIND, start.name, start.active, Clock(), Stats()).run()
