"""`pinlaterd coordinator`: wires the coordinator's parts together and runs them until told to stop.

It has no timer: it wakes up for a report, a request or a signal.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import uvloop
from aiohttp import web

from pinlaterd import log as logs
from pinlaterd.clock import Clock, SystemClock
from pinlaterd.config import layout
from pinlaterd.config.load import load_config
from pinlaterd.config.schema import Config
from pinlaterd.coordinator.pages import make_application
from pinlaterd.coordinator.rates import RateControl
from pinlaterd.coordinator.roster import ProcessView, Roster
from pinlaterd.coordinator.status import About, Status, status, usage_of
from pinlaterd.errors import ConfigError
from pinlaterd.lifecycle import ExitCode, StopSignal, set_title
from pinlaterd.stats import Stats, StatsSnapshot
from pinlaterd.wire.control import (
    ControlServer,
    ProcessState,
    ShardEntry,
    Snapshot,
    read_snapshot,
    unpack_report,
    write_snapshot,
)
from pinlaterd.wire.envelope import MalformedEnvelope
from pinlaterd.wire.rates import TAG as RATES

log = logging.getLogger(__name__)

_NAME = "coordinator"
_STOP_SECONDS = 2.0  # for HTTP requests in hand


def run(etc: Path) -> int:
    """Serve until SIGTERM. Returns the exit code."""
    set_title(_NAME)
    etc = layout.enter(etc)
    try:
        config = load_config(etc)
    except ConfigError as error:
        logs.set_up(_NAME, "info")
        for problem in error.problems:
            log.error("%s", problem)
        return ExitCode.CONFIG
    logs.set_up(_NAME, config.server.log_level)
    with _sole_coordinator() as sole:
        if not sole:
            log.error("another coordinator runs in %s; only one may", Path.cwd())
            return ExitCode.FAILURE
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_serve(config))


async def _serve(config: Config) -> int:
    stop = StopSignal()
    stop.catch_in(asyncio.get_running_loop())
    coordinator = Coordinator(config, SystemClock())
    try:
        await coordinator.start()
    except OSError as error:
        log.error("can't listen: %s", error.strerror or error)
        await coordinator.stop()
        return ExitCode.FAILURE
    await stop.wait()
    await coordinator.stop()
    return ExitCode.OK


@contextlib.contextmanager
def _sole_coordinator() -> Iterator[bool]:
    """Whether no other coordinator has this deployment; keeps others out meanwhile."""
    descriptor = os.open(layout.COORDINATOR_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


class Coordinator:
    """The coordinator's process: the control channel, the snapshot, the pages (a Service)."""

    def __init__(self, config: Config, clock: Clock) -> None:
        self._config = config
        self._clock = clock
        self._started_at_ms = clock.now_ms()
        self._started = clock.monotonic()
        self._stats = Stats()
        self._roster = Roster(clock, psutil.pid_exists)
        self._rates = RateControl(config, clock, self._stats, psutil.pid_exists)
        self._snapshot = self._next_snapshot()
        self._control: ControlServer | None = None
        self._web = web.AppRunner(make_application(self), access_log=None)
        self._loop = asyncio.get_running_loop()

    async def start(self) -> None:
        """Raises OSError if a port or socket can't be had."""
        write_snapshot(self._snapshot)
        self._control = ControlServer()
        self._loop.add_reader(self._control.fileno(), self._hear)
        self._hear()
        await self._web.setup()
        # before the port: whoever shares this folder can always be asked, whatever has the port
        layout.STATS_SOCKET.unlink(missing_ok=True)
        await web.UnixSite(self._web, os.fspath(layout.STATS_SOCKET)).start()
        layout.STATS_SOCKET.chmod(0o600)
        server = self._config.server
        await web.TCPSite(
            self._web, server.stats_host, server.stats_port, shutdown_timeout=_STOP_SECONDS
        ).start()
        log.info(
            "serving statistics on http://%s:%d; shards %s",
            server.stats_host,
            server.stats_port,
            ", ".join(self._config.shards),
        )

    async def stop(self) -> None:
        log.info("stopping")
        await self._web.cleanup()
        if self._control is not None:
            self._loop.remove_reader(self._control.fileno())
            self._control.close()
            self._control = None

    # --- what the pages ask --------------------------------------------------------------------

    def status(self) -> Status:
        about = About(
            str(Path.cwd()),
            self._clock.monotonic() - self._started,
            self._snapshot.version,
            config_problems=self._rates.problems(),
        )
        return status(self._config, [self._view(), *self._roster.views()], about)

    def stats(self) -> Mapping[str, StatsSnapshot]:
        found = {_NAME: self._stats.snapshot(), **self._roster.stats()}
        for view in (self._view(), *self._roster.views()):
            usage = None if view.gone else usage_of(view.pid)
            gauges = found[view.process]["gauges"]
            gauges["process_up"] = gauges.get("process_up", 0) + (not view.gone)
            if usage is not None:
                cpu, rss = "process_cpu_seconds", "process_rss_bytes"
                gauges[cpu] = gauges.get(cpu, 0.0) + usage.cpu_seconds
                gauges[rss] = gauges.get(rss, 0.0) + usage.rss_bytes
        return found

    def _view(self) -> ProcessView:
        """The coordinator itself."""
        serving = ProcessState.SERVING
        return ProcessView(_NAME, _NAME, os.getpid(), self._started_at_ms, serving, 0.0, {})

    # --- the control channel -------------------------------------------------------------------

    def _hear(self) -> None:
        assert self._control is not None
        self._take_messages()
        while self._rates.act(self._control):
            self._take_messages()  # that came while we sent: the descriptor says nothing of them

    def _take_messages(self) -> None:
        """Take all that has come; answer those who are new or out of step with the snapshot."""
        assert self._control is not None
        while (arrived := self._control.receive()) is not None:
            peer, message = arrived
            try:
                if message.startswith(RATES):
                    self._rates.heard(peer, message)
                    continue
                report = unpack_report(message)
            except MalformedEnvelope:
                self._stats.count("reports_malformed")
                log.warning("a report that can't be read; is another version running here?")
                continue
            self._stats.count("reports")
            self._rates.heartbeat(peer)
            newcomer = not self._roster.knows(peer)
            understood = self._roster.heard(peer, report)
            if newcomer and report is not None and understood:
                log.info("%s reports, pid %d: %s", report.process, report.pid, report.state)
            if newcomer or not understood:
                self._control.send(peer, self._snapshot)

    def _next_snapshot(self) -> Snapshot:
        """Its version is greater than that of any coordinator before, whatever the clock says."""
        before = read_snapshot()
        now_ms = self._clock.now_ms()
        version = max(now_ms, before.version + 1) if before is not None else now_ms
        shards = self._config.shards.values()
        entries = tuple(ShardEntry(shard.name, shard.dequeue_only) for shard in shards)
        return Snapshot(version, entries, rates={}, generated_at_ms=now_ms)
