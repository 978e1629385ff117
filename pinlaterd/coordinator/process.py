"""The coordinator: wires its parts together, publishes the snapshot.

It wakes up for a report, a request or a signal, and a few times a second to look whether the
configuration has changed.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import TypeVar

from pinlaterd.clock import Clock
from pinlaterd.config import kinds, layout
from pinlaterd.config.active import ActiveConfig, ConfigSuperseded, activate, load_active
from pinlaterd.config.kinds import ROUTER
from pinlaterd.config.schema import Config
from pinlaterd.coordinator.events import changes_between
from pinlaterd.coordinator.overview import Overview
from pinlaterd.coordinator.pages import Pages
from pinlaterd.coordinator.permit_control import PermitControl
from pinlaterd.coordinator.processes import ProcessView, Registry, status, usage_of
from pinlaterd.coordinator.programs import LivePrograms, changed_programs
from pinlaterd.coordinator.rates import RateControl
from pinlaterd.coordinator.reload import HeldJobs, Reload
from pinlaterd.coordinator.workers import DetailsControl
from pinlaterd.errors import ConfigError, address_of
from pinlaterd.http_port import HttpPort
from pinlaterd.lifecycle import count_dropped_lines, process_exists, set_up_log
from pinlaterd.stats import Stats, StatsSnapshot, empty
from pinlaterd.status import STOPPED, About, Sample, Status
from pinlaterd.wire.control import (
    ControlServer,
    Details,
    DetailsQuestion,
    MalformedMessage,
    Mend,
    PeerQuestion,
    PermitReport,
    ProcessState,
    RateReport,
    Report,
    ShardEntry,
    Snapshot,
    read_snapshot,
    unpack,
    write_snapshot,
)
from pinlaterd.wire.key_placement import (
    KeyPlacement,
    read_key_placement,
    unknown_placement,
    write_key_placement,
)

log = logging.getLogger(__name__)

T = TypeVar("T")
_SUPERVISED = "SUPERVISOR_ENABLED"  # supervisord sets it for those whom it runs


class Coordinator:
    """The coordinator's process: the control channel, the snapshot, the pages (a Service). That of
    a cluster's server is a MemberCoordinator (member.py)."""

    def __init__(self, etc: Path, active: ActiveConfig, clock: Clock) -> None:
        self._etc = etc
        self._config = active.config
        self._config_version = active.version
        self._clock = clock
        self._started_at_ms = clock.now_ms()
        self._started = clock.monotonic()
        self._stats = Stats()
        self._registry = Registry(clock, process_exists)
        before = read_snapshot()
        self._joining = self._shards_since(before)
        self._keys = self._last_placement(before.keys if before else KeyPlacement())
        self._keys_problem = ""  # why the placement of keys can't be followed
        self._keys_since = 0  # the version of the first snapshot with the placement of keys
        self._reload = self._new_reload(active)
        self._programs = LivePrograms(clock.monotonic) if _SUPERVISED in os.environ else None
        self._failure = ""  # why the configuration can't be followed
        self._rates = RateControl(self._config, clock, self._stats, process_exists)
        self._permits = PermitControl(self._config, clock, process_exists, self._stats)
        self._permit_look: asyncio.TimerHandle | None = None
        self._snapshot = self._next_snapshot()
        self._control: ControlServer | None = None
        self._details = DetailsControl(clock, self._ask_details)
        self._overview = Overview(
            clock, self._totals, lambda: self._config, self._ask_others, self._details
        )
        pages = Pages(self.status, self.stats, self.whole, self._overview)
        # Two, so that commands reach this coordinator while clients hold all of the port.
        self._socket = HttpPort(pages.application())
        self._web = HttpPort(pages.application(), self._hosts)
        self._loop = asyncio.get_running_loop()

    async def start(self) -> None:
        """Raises OSError if a port or socket can't be had."""
        write_snapshot(self._snapshot)
        self._overview.start()
        self._control = ControlServer()
        self._loop.add_reader(self._control.fileno(), self._hear)
        self._hear()
        # Before the port: through the socket commands reach this coordinator whatever has the port.
        layout.STATS_SOCKET.unlink(missing_ok=True)
        await self._socket.listen(os.fspath(layout.STATS_SOCKET))
        layout.STATS_SOCKET.chmod(0o600)
        server = self._config.server
        await self._web.listen(server.stats_host, server.stats_port)
        log.info(
            "serving statistics on http://%s; shards %s",
            address_of(server.stats_host, server.stats_port),
            ", ".join(self._config.shards),
        )

    async def stop(self) -> None:
        log.info("stopping")
        await self._web.stop()
        await self._socket.stop()
        await self._overview.stop()
        if self._control is not None:
            self._loop.remove_reader(self._control.fileno())
            self._control.close()
            self._control = None
        if self._programs is not None:
            await self._programs.stop()

    # --- the configuration ---------------------------------------------------------------------

    def _new_reload(self, active: ActiveConfig) -> Reload:
        return Reload(self._etc, active, self._holding, self._activate)

    def _hosted(self, config: Config) -> Config:
        """Return `config` with those shards only that have a process here: all of them."""
        return config

    async def follow(self) -> None:
        """Activate what changes in etc/, for as long as this runs."""
        while True:
            await asyncio.sleep(self._reload.until_look(self._clock.monotonic()))
            failure = ""
            try:
                self._rates.look()
                await self._reload.step()
                if self._programs is not None and not self._programs.converged:
                    self._programs.step(self._hosted(self._config))
                if self._keys_problem:
                    self._publish()
            except (OSError, ConfigError) as error:
                failure = f"the configuration can't be activated: {error}; trying again"
                if failure != self._failure:
                    log.error("%s", failure)
            self._failure = failure
            self._stats.gauge("config_problems", len(self._config_problems()))
            count_dropped_lines(self._stats.count)

    def _activate(self, config: Config) -> ActiveConfig:
        """Activate a configuration: first what processes start from, then what they follow. Returns
        what is active by then: what another command has activated meanwhile goes before."""
        if self._programs is not None:
            before, after = self._hosted(self._config), self._hosted(config)
            self._programs.want(changed_programs(before, after))
        try:
            active = activate(config, after=self._config_version)
        except ConfigSuperseded:
            active = load_active(self._etc)
        self._take_on(active)
        return active

    def _take_on(self, active: ActiveConfig) -> None:
        config = active.config
        for queue, text in changes_between(self._config, config).items():
            self._overview.events.add(self._clock.now_ms(), "config", queue, text)
        newcomers = config.shards.keys() - self._config.shards.keys()
        self._joining = (self._joining | newcomers) & config.shards.keys()
        self._config, self._config_version = config, active.version
        set_up_log(layout.COORDINATOR, config.server.log_level)
        self._rates.configure(config.queues)
        self._permits.configure(config)
        self._publish()  # and what follows for rates
        log.info("a changed configuration is active, version %d", active.version)

    def _config_problems(self) -> Sequence[str]:
        programs = "" if self._programs is None else self._programs.problem
        problems = (*self._reload.problems, programs, self._failure, self._keys_problem)
        return [text for text in problems if text]

    @property
    def _converged(self) -> bool:
        """Whether nothing is under way any more."""
        return self._reload.converged and (self._programs is None or self._programs.converged)

    def _holding(self, shard: str) -> HeldJobs | None:
        report = self._registry.serving(layout.shard_program(shard))
        if report is None:
            return None
        gauges = report.stats["gauges"]

        def jobs(state: str) -> int:
            return int(sum(n for name, n in gauges.items() if name.endswith(state)))

        # What it holds is not known before it has counted it; it is asked again. Nor is it while a
        # router may send it jobs by what came before: it takes them after a restart with that.
        version = min(report.config_version, self._followed_by_routers(self._registry.views()))
        version = 0 if gauges.get("shard_queues_counting") else version
        return HeldJobs(version, jobs("_pending"), jobs("_in_progress"))

    def _followed_by_routers(self, views: Sequence[ProcessView]) -> int:
        """Return the version of the configuration that all routers follow, frozen ones included,
        with the placement of keys that belongs to it; 0 if it is not known, or some do not."""
        closed = {shard.name for shard in self._config.shards.values() if shard.dequeue_only}
        routers = [
            view.report
            for view in views
            if view.report.kind == ROUTER.name and view.state != STOPPED
        ]
        expected = set(ROUTER.programs(self._config))
        if not (
            closed.isdisjoint(self._snapshot.keys.enqueueable)
            and expected <= {router.process for router in routers}
            and all(router.snapshot_version >= self._keys_since for router in routers)
        ):
            return 0
        return min([router.config_version for router in routers], default=0)

    # --- what the pages ask --------------------------------------------------------------------

    def status(self) -> Status:
        about: About = {
            "deployment": str(Path.cwd()),
            "uptime_seconds": round(self._clock.monotonic() - self._started, 1),
            "snapshot_version": self._snapshot.version,
            "config_version": self._config_version,
            "config_number": self._reload.number,
            "config_problems": self._config_problems(),
            "refused_removals": self._reload.refusals,
            "needs_restart": self._reload.needs_restart,
            "config_judged": self._reload.validated if self._converged else "",
            "warnings": self._reload.warnings,
        }
        return status(self._served_here(), self._views(), about)

    def _served_here(self) -> Config:
        """Return the configuration with those shards only that this server is to serve: all."""
        return self._config

    def _hosts(self) -> Collection[str]:
        """Return the names that clients of the statistics port may call this server by."""
        own = self._config.server
        return [own.stats_host, own.host, own.advertised_host, *own.http_hosts.split(",")]

    async def whole(self, *, statistics: bool) -> Sample:
        """Return the status and the figures of all servers."""
        return self._own(statistics=statistics)

    def _own(self, *, statistics: bool) -> Sample:
        return Sample(self.status(), self.stats() if statistics else {})

    def _totals(self) -> Sample:
        """Return the status and the figures of this server, without those of its processes' use of
        the machine, which the status has."""
        stats = {layout.COORDINATOR: self._stats.snapshot(), **self._registry.stats()}
        return Sample(self.status(), stats, self._clock.monotonic())

    async def _ask_others(self, question: PeerQuestion, kind: type[T]) -> Mapping[str, T | None]:
        """Ask the other servers, of which there is none."""
        return {}

    def stats(self) -> Mapping[str, StatsSnapshot]:
        figures = {layout.COORDINATOR: self._stats.snapshot(), **self._registry.stats()}
        gauges: dict[str, defaultdict[str, float]] = {name: defaultdict(float) for name in figures}
        for view in self._views():
            usage = None if view.gone else usage_of(view.report.pid)
            found = gauges[view.report.process]
            found["process_up"] += not view.gone
            if usage is not None:
                found["process_cpu_seconds"] += usage.cpu_seconds
                found["process_rss_bytes"] += usage.rss_bytes
        return {
            name: {**snapshot, "gauges": {**snapshot["gauges"], **gauges[name]}}
            for name, snapshot in figures.items()
        }

    def _views(self) -> Sequence[ProcessView]:
        """Return the views of the coordinator itself, and of all that report."""
        own = Report(
            layout.COORDINATOR,
            layout.COORDINATOR,
            os.getpid(),
            self._started_at_ms,
            ProcessState.SERVING,
            facts={
                "server set warning": "; ".join(self._rates.problems()),
                "permits warning": "; ".join(self._permits.problems()),
            },
            stats=empty(),
            config_version=self._config_version,
        )
        return [ProcessView(own, own.state), *self._registry.views()]

    # --- the control channel -------------------------------------------------------------------

    def _hear(self) -> None:
        if self._control is None:
            return
        self._take_messages()
        while self._rates.act(self._control) | self._permits.act(self._control):
            self._take_messages()  # that came while we sent: the descriptor says nothing of them
        self._look_at_permits()

    def _look_at_permits(self) -> None:
        """Come back when permits may move without anything being heard."""
        if self._permit_look is not None:
            self._permit_look.cancel()
            self._permit_look = None
        at = self._permits.next_look
        if at < math.inf:
            seconds = max(0.0, at - self._clock.monotonic())
            self._permit_look = self._loop.call_later(seconds, self._hear)

    def _take_messages(self) -> None:
        """Take all that has come; send the snapshot to new processes, and to those out of step."""
        if self._control is None:
            return
        while (arrived := self._control.receive()) is not None:
            peer, data = arrived
            try:
                message = unpack(data)
            except MalformedMessage:
                self._stats.count("reports_malformed")
                log.warning("a report that can't be read; is another version running here?")
                continue
            if isinstance(message, RateReport):
                self._rates.allocator.heard(peer, message)
                continue
            if isinstance(message, Details):
                self._details.heard(peer, message)
                continue
            if isinstance(message, Mend):
                self._overview.events.add_mend(self._clock.now_ms(), message)
                continue
            if isinstance(message, PermitReport):
                self._permits.heard(peer, message)
                continue
            report = message if isinstance(message, Report) else None
            self._stats.count("reports")
            self._rates.allocator.heartbeat(peer)
            self._permits.heartbeat(peer)
            newcomer = not self._registry.knows(peer)
            understood = self._registry.heard(peer, report)
            if newcomer and report is not None and understood:
                log.info("%s reports, pid %d: %s", report.process, report.pid, report.state)
            if newcomer or not understood:
                self._control.send(peer, self._snapshot)
            if report is not None:
                self._heard()
        self._admit()

    def _ask_details(self, question: DetailsQuestion) -> int:
        """Ask the processes that know of callers or failures; return how many there are."""
        peers = self._registry.peers_of(kinds.ROUTER, kinds.SHARD)
        if self._control is None:
            return 0
        for peer in peers:
            self._control.send(peer, question)
        self._loop.call_soon(self._hear)  # sending uses up the descriptor's edge
        return len(peers)

    def _heard(self) -> None:
        """Note that a process has reported something."""

    def _admit(self) -> None:
        """Count a new shard once it serves: calls that need all shards go on until then."""
        serving = {shard for shard in self._joining if self._is_served(shard)}
        if serving:
            self._joining -= serving
            self._publish()

    def _is_served(self, shard: str) -> bool:
        return self._registry.serving(layout.shard_program(shard)) is not None

    def _publish(self) -> None:
        """Send the snapshot to all. A process that starts later reads the file, or gets it for its
        first report."""
        self._snapshot = self._next_snapshot()
        try:
            write_snapshot(self._snapshot)
        except OSError as error:
            log.error("the snapshot can't be written: %s", error)
        if self._control is not None:
            for peer in self._registry.peers():
                self._control.send(peer, self._snapshot)
            self._loop.call_soon(self._hear)  # sending uses up the descriptor's edge

    def _shards_since(self, before: Snapshot | None) -> AbstractSet[str]:
        """Return the shards that no router knows yet; none where nothing ran before."""
        if before is None or not before.shards:
            return frozenset()
        return self._config.shards.keys() - {shard.name for shard in before.shards}

    def _next_snapshot(self) -> Snapshot:
        """Make a snapshot with a greater version than any before, whatever the clock says."""
        before = read_snapshot()
        now_ms = self._clock.now_ms()
        version = max(now_ms, before.version + 1) if before is not None else now_ms
        entries = self._entries()
        keys = self._placement_of_keys(entries)
        if before is None or keys.number != before.keys.number or not self._keys_since:
            self._keys_since = version
        return Snapshot(version, entries, now_ms, self._config_version, keys=keys)

    def _last_placement(self, published: KeyPlacement) -> KeyPlacement:
        """Return the placement that was followed last: that of the file, or else of the last
        snapshot, which does not outlive the service."""
        try:
            return read_key_placement() or published
        except (OSError, ValueError) as error:
            log.error("the placement of keys in %s is lost: %s", layout.KEY_PLACEMENT_FILE, error)
        if published.number:
            return published
        log.error(
            "any shard may hold any key: enqueues with keys ask all shards for %.0f days",
            self._config.keys_kept_ms() / 86_400_000,
        )
        return unknown_placement(self._config.shards, self._clock.now_ms())

    def _placement_of_keys(self, entries: Sequence[ShardEntry]) -> KeyPlacement:
        """Return the placement with the shards that routers know. It is in its file before anybody
        follows it; while that can't be written, the one before goes on."""
        found = self._keys.followed_by(
            takers(entries), self._clock.now_ms(), self._config.keys_kept_ms()
        )
        self._keys_problem = ""
        if found is not self._keys:
            try:
                write_key_placement(found)
                self._keys = found
            except OSError as error:
                self._keys_problem = f"the placement of keys can't be written: {error}"
                log.error("%s; trying again", self._keys_problem)
        return self._keys

    def _entries(self) -> tuple[ShardEntry, ...]:
        return tuple(
            ShardEntry(shard.name, shard.dequeue_only)
            for shard in self._config.shards.values()
            if shard.name not in self._joining
        )


def takers(entries: Sequence[ShardEntry]) -> dict[str, bool]:
    """Return the shards that routers know, and whether each takes new jobs."""
    return {entry.name: not entry.dequeue_only for entry in entries if not entry.joining}
