"""`pinlaterd coordinator`: runs the coordinator until told to stop.

On a server of a cluster that is a MemberCoordinator; only there ZooKeeper's client is imported. Its
session goes on before anything else is: to others a coordinator that was restarted was never away.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

from pinlaterd.clock import Clock
from pinlaterd.config import layout
from pinlaterd.config.active import NO_VERSION, ActiveConfig, activate
from pinlaterd.config.kinds import COORDINATOR_KIND
from pinlaterd.lifecycle import ExitCode, StopSignal
from pinlaterd.wire.control import read_snapshot
from pinlaterd.wire.process import start_process

if TYPE_CHECKING:
    from pinlaterd.coordinator.process import Coordinator
    from pinlaterd.coordinator.zookeeper import View

log = logging.getLogger(__name__)


def run(etc: Path) -> int:
    """Serve until SIGTERM. Returns the exit code; raises ConfigError."""
    _, etc, active, _ = start_process(COORDINATOR_KIND, etc)
    try:
        sole = layout.lock(layout.COORDINATOR_LOCK, patient=False)
    except BlockingIOError:
        log.error("another coordinator runs in %s; only one may", Path.cwd())
        return ExitCode.FAILURE
    with sole:
        if active.version == NO_VERSION:
            active = activate(active.config)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_serve(etc, active))


async def _serve(etc: Path, active: ActiveConfig) -> int:
    """Raises ConfigError."""
    stop = StopSignal()
    stop.catch_in(asyncio.get_running_loop())
    coordinator = _new_coordinator(etc, active)
    try:
        await coordinator.start()
    except OSError as error:
        log.error("can't listen: %s", error.strerror or error)
        await coordinator.stop()
        return ExitCode.FAILURE
    stopping = asyncio.create_task(stop.wait())
    following = asyncio.create_task(coordinator.follow())
    await asyncio.wait({stopping, following}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    following.cancel()
    try:
        await following  # raises what ended it, if that was not the cancellation
    except asyncio.CancelledError:
        pass
    finally:
        await coordinator.stop()
    return ExitCode.OK


def _new_coordinator(etc: Path, active: ActiveConfig) -> Coordinator:
    """Raises ConfigError."""
    clock, settings = Clock(), active.config.server
    if not settings.cluster:
        from pinlaterd.coordinator.process import Coordinator

        return Coordinator(etc, active, clock)
    from pinlaterd.coordinator.cluster import Cluster

    def on_view(view: View) -> None:
        coordinator.follow_view(view)

    cluster = Cluster(settings, read_snapshot(), clock, on_view)
    cluster.start()
    from pinlaterd.coordinator.member import MemberCoordinator

    coordinator = MemberCoordinator(etc, active, clock, cluster)
    return coordinator
