"""A process as a part of its deployment: it starts from the active configuration, follows the
snapshot, and reports to the coordinator.

Every kind of process (config.kinds) uses this; what it does beyond that is its own. A process with
an event loop is a ReportingProcess, which `serve` runs. A blocking loop calls its ControlClient
itself, `newer_config` for each snapshot.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import zmq

from pinlaterd.clock import Clock, until_full
from pinlaterd.config import layout
from pinlaterd.config.active import ActiveConfig, load_active, read_active
from pinlaterd.config.kinds import ProcessKind
from pinlaterd.errors import ConfigError, ConnectionFailed, PinLaterError, address_of
from pinlaterd.lifecycle import ExitCode, StopSignal, begin_process, count_dropped_lines, set_up_log
from pinlaterd.stats import Stats
from pinlaterd.wire.control import (
    ControlClient,
    Details,
    ProcessState,
    Snapshot,
    read_snapshot,
)
from pinlaterd.wire.curve import ClusterKey

log = logging.getLogger(__name__)

REPORT_SECONDS = 1.0
_AGAIN_SECONDS = 0.05  # between calls of routers that do not listen yet


class ProcessStart(NamedTuple):
    """A process that is about to serve. The current folder is the deployment's by then."""

    name: str  # of its program, its title, its log and its reports
    etc: Path
    active: ActiveConfig
    key: ClusterKey | None  # of the cluster that the server belongs to, if any


def start_process(kind: ProcessKind, etc: Path, member: str = "") -> ProcessStart:
    """Make this process one of a kind, by the active configuration of the deployment of `etc`.

    Raises ConfigError, DeploymentError, OSError."""
    name = layout.program_name(kind.name, member)
    if not kind.has_named_members:
        # supervisord tells each of several, and handover peers, what it is called.
        name = os.environ.get("SUPERVISOR_PROCESS_NAME", name)
    begin_process(name)
    etc = layout.enter(etc)
    active = load_active(etc)
    set_up_log(name, active.config.server.log_level)
    cluster = active.config.server.cluster
    key = ClusterKey.load(etc / layout.CLUSTER_KEY_FILE, cluster) if cluster else None
    return ProcessStart(name, etc, active, key)


def newer_config(control: ControlClient, snapshot: Snapshot) -> ActiveConfig | None:
    """Return the active configuration if it is another than `control` reports, as it does from now
    on; None if it is the same, or can't be read. What is not live is the same in both."""
    if snapshot.config_version == control.config_version:
        return None
    active, why = None, f"{layout.CONFIG_FILE} can't be read; keeping the last configuration"
    try:
        active = read_active()
    except ConfigError as error:
        why = str(error)
    if active is None:
        log.error("%s", why)
        return None
    set_up_log(control.process, active.config.server.log_level)
    control.config_version = active.version
    return active


async def wait_until_served(ask: Callable[[], Awaitable[object]], stop: StopSignal) -> None:
    """Return once `ask`, a call of this server's routers, is answered, or `stop` is set."""
    while not stop.requested:
        try:
            await ask()
        except ConnectionFailed:
            await asyncio.sleep(_AGAIN_SECONDS)
        except PinLaterError:
            return
        else:
            return


class ReportingProcess:
    """A process on an event loop, as the coordinator sees it. A kind of process derives from this.

    It reports once a second, after each snapshot, and when its state changes."""

    def __init__(
        self,
        kind: ProcessKind,
        name: str,
        active: ActiveConfig,
        clock: Clock,
        stats: Stats,
        context: zmq.Context[Any] | None = None,
    ) -> None:
        self._clock = clock
        self._stats = stats
        self._loop = asyncio.get_running_loop()
        self._started_at_ms = clock.now_ms()
        self._control = ControlClient(name, kind.name, stats, self._started_at_ms, context=context)
        self._control.config_version = active.version
        self._state = ProcessState.STARTING
        self._next_report: asyncio.TimerHandle | None = None
        self.exit_code = ExitCode.OK

    def facts(self) -> Mapping[str, str]:
        """Return what `status` shows of it. A fact whose name ends in "warning" is a warning."""
        return {}

    def follow(self, snapshot: Snapshot, active: ActiveConfig | None) -> None:
        """Follow a snapshot that came, and `active`, the configuration if that has changed."""

    def tick(self) -> None:
        """Bring statistics up to date, once a second: they are reported next."""

    def hear(self, *, is_newcomer: bool) -> bool:
        """Take what else the coordinator has sent; return whether anything was sent in answer.

        `is_newcomer`: a snapshot came before it, so the coordinator may know nothing of us."""
        return False

    def details(self, *, whole: bool) -> Details | None:
        """Return what is known of callers, `whole` or as far as frames show it; None: nothing."""
        return None

    def _start_reporting(self) -> None:
        """Follow the last snapshot, if there is one; report from now on."""
        self._loop.add_reader(self._control.fileno(), self._hear)
        snapshot = read_snapshot()
        if snapshot is not None:
            self.follow(snapshot, newer_config(self._control, snapshot))
        self._report_regularly()

    def _stop_reporting(self) -> None:
        if self._next_report is not None:
            self._next_report.cancel()
        self._loop.remove_reader(self._control.fileno())
        self._control.close()

    def _enter(self, state: ProcessState) -> None:
        """Report a new state at once."""
        self._state = state
        self._report()

    def _report(self) -> None:
        self._control.report(self._state, self.facts())
        self._hear()

    def _report_regularly(self) -> None:
        seconds = until_full(REPORT_SECONDS, self._clock.monotonic())
        self._next_report = self._loop.call_later(seconds, self._report_regularly)
        count_dropped_lines(self._stats.count)
        self.tick()
        self._report()

    def _hear(self) -> None:
        """Follow what has come and answer, also what comes meanwhile: the descriptor says nothing
        of that."""
        more = True
        while more:
            snapshot = self._control.receive()
            if snapshot is not None:
                self.follow(snapshot, newer_config(self._control, snapshot))
                self._control.report(self._state, self.facts())
            question = self._control.take_question()
            details = None if question is None else self.details(whole=question.whole)
            if details is not None:
                self._control.tell(details)
            more = self.hear(is_newcomer=snapshot is not None) or snapshot is not None
            more = more or details is not None


class ServingProcess(Protocol):
    """A process that `serve` runs; it is made in the event loop."""

    exit_code: ExitCode

    async def start(self, stop: StopSignal) -> None:
        """Serve, unless `stop` is set before. Raises OSError if an address can't be had."""

    async def stop(self) -> None:
        """Take nothing new, and finish what is in progress."""


def serve(
    kind: ProcessKind,
    etc: Path,
    make: Callable[[ProcessStart], ServingProcess],
    loop_factory: Callable[[], asyncio.AbstractEventLoop],
) -> int:
    """Run a process of a kind until SIGTERM, and return its exit code.

    Raises ConfigError, DeploymentError, OSError."""
    start = start_process(kind, etc)
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        try:
            return runner.run(_serve(kind, start, make))
        except SystemExit:  # of a task that code of the deployment's own has begun
            log.exception("the process ends")
            return ExitCode.FAILURE


async def _serve(
    kind: ProcessKind, start: ProcessStart, make: Callable[[ProcessStart], ServingProcess]
) -> int:
    stop = StopSignal()
    stop.catch_in(asyncio.get_running_loop())
    process = make(start)
    try:
        await process.start(stop)
    except OSError as error:
        if kind.address is None:
            raise
        host, port = (getattr(start.active.config.server, setting) for setting in kind.address)
        log.error("can't listen on %s: %s", address_of(host, port), error.strerror)
        return ExitCode.FAILURE
    await stop.wait()
    await process.stop()
    return process.exit_code
