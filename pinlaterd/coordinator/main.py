"""`pinlaterd coordinator`: wires the coordinator's parts together and runs them until told to stop.

It wakes up for a report, a request or a signal, and four times a second to look whether the
configuration has changed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import psutil
import uvloop
from aiohttp import web

from pinlaterd.clock import Clock
from pinlaterd.config import layout
from pinlaterd.config.active import NO_VERSION, ActiveConfig, Superseded, activate, load_active
from pinlaterd.config.schema import Config, ServerSettings
from pinlaterd.coordinator.pages import Pages
from pinlaterd.coordinator.peers import Peers
from pinlaterd.coordinator.processes import (
    About,
    ProcessView,
    Registry,
    Status,
    admitted_members,
    routers_serve,
    shard_states,
    status,
    unreached_shards,
    usage_of,
)
from pinlaterd.coordinator.programs import ShardPrograms, changed_programs
from pinlaterd.coordinator.rates import RateControl, limits_of
from pinlaterd.coordinator.reload import LOOK_SECONDS, Holding, Reload
from pinlaterd.coordinator.server_rates import ServerRates
from pinlaterd.errors import ConfigError
from pinlaterd.lifecycle import ExitCode, StopSignal, count_dropped_lines, set_title, set_up_log
from pinlaterd.stats import Stats, StatsSnapshot, empty
from pinlaterd.wire.control import (
    ControlServer,
    HoldingQuestion,
    MalformedMessage,
    ProcessState,
    RateReport,
    Report,
    ShardEntry,
    Snapshot,
    StatusQuestion,
    read_snapshot,
    unpack,
    write_snapshot,
)

if TYPE_CHECKING:
    from pinlaterd.coordinator.cluster import Cluster
    from pinlaterd.coordinator.shared_config import SharedConfig
    from pinlaterd.coordinator.zookeeper import View

log = logging.getLogger(__name__)

_NAME = "coordinator"
_SUPERVISED = "SUPERVISOR_ENABLED"  # supervisord sets it for those whom it runs
_SNAPSHOTS = 100  # the last, of which it is known who follows them
_STOP_SECONDS = 2.0  # for HTTP requests in flight


def run(etc: Path) -> int:
    """Serve until SIGTERM. Returns the exit code."""
    set_title(_NAME)
    etc = layout.enter(etc)
    try:
        active = load_active(etc)
    except ConfigError as error:
        set_up_log(_NAME, "info")
        for problem in error.problems:
            log.error("%s", problem)
        return ExitCode.CONFIG
    set_up_log(_NAME, active.config.server.log_level)
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
    stop = StopSignal()
    stop.catch_in(asyncio.get_running_loop())
    coordinator = Coordinator(etc, active, Clock())
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


class Coordinator:
    """The coordinator's process: the control channel, the snapshot, the pages (a Service)."""

    def __init__(self, etc: Path, active: ActiveConfig, clock: Clock) -> None:
        self._etc = etc
        self._config = active.config
        self._config_version = active.version
        self._clock = clock
        self._started_at_ms = clock.now_ms()
        self._started = clock.monotonic()
        self._stats = Stats()
        self._registry = Registry(clock, psutil.pid_exists)
        self._cluster = _cluster(active.config.server, clock, self._follow_view)
        self._woken = asyncio.Event()  # something of the cluster may have to be told or decided
        self._joining = self._shards_since(read_snapshot())
        self._shared: SharedConfig | None = None
        if self._cluster is not None:
            found = self._cluster.shared_config(etc, active, self._activate, self._ask_holdings)
            self._shared = found
        self._reload = self._shared or Reload(etc, active, self._holding, self._activate)
        self._programs = ShardPrograms(clock.monotonic) if _SUPERVISED in os.environ else None
        self._failure = ""  # why the configuration can't be followed
        self._rates = RateControl(self._config, clock, self._stats, psutil.pid_exists)
        self._peers: Peers | None = None
        self._published: dict[int, Sequence[str]] = {}  # members by the snapshot's version
        self._snapshot = self._next_snapshot()
        self._control: ControlServer | None = None
        self._web = web.AppRunner(Pages(self.status, self.stats).application(), access_log=None)
        self._loop = asyncio.get_running_loop()

    async def start(self) -> None:
        """Raises OSError if a port or socket can't be had."""
        write_snapshot(self._snapshot)
        self._control = ControlServer()
        self._loop.add_reader(self._control.fileno(), self._hear)
        if self._cluster is not None:
            self._peers = self._new_peers(self._cluster)
        self._hear()
        await self._web.setup()
        # Before the port: through the socket commands reach this coordinator whatever has the port.
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
        if self._peers is not None:
            self._peers.close()
        if self._control is not None:
            self._loop.remove_reader(self._control.fileno())
            self._control.close()
            self._control = None
        if self._cluster is not None:
            await asyncio.to_thread(self._cluster.stop)
        if self._programs is not None:
            await self._programs.stop()

    # --- the configuration ---------------------------------------------------------------------

    async def follow(self) -> None:
        """Activate what changes in etc/ and in the cluster, for as long as this runs."""
        await asyncio.gather(self._follow_files(), self._follow_cluster())

    async def _follow_files(self) -> NoReturn:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            failure = ""
            self._rates.look()
            if self._peers is not None:
                self._hear()  # also while no router has anything to say
            try:
                await self._reload.step()
                if self._programs is not None:
                    self._programs.step(self._hosted())
            except (OSError, ConfigError) as error:
                failure = f"the configuration can't be activated: {error}; trying again"
                if failure != self._failure:
                    log.error("%s", failure)
            self._failure = failure
            self._stats.gauge("config_problems", len(self._config_problems()))
            count_dropped_lines(self._stats.count)

    def _activate(self, config: Config) -> ActiveConfig:
        """For all processes: first what they start from, then what they follow. Returns what is
        active by then: what another command has activated meanwhile goes before."""
        if self._programs is not None:
            before, after = self._hosted(), self._hosted(config)
            self._programs.want(changed_programs(before, after))
        try:
            active = activate(config, after=self._config_version)
        except Superseded:
            active = load_active(self._etc)
        self._take_on(active)
        return active

    def _take_on(self, active: ActiveConfig) -> None:
        config = active.config
        newcomers = config.shards.keys() - self._config.shards.keys()
        self._joining = (self._joining | newcomers) & config.shards.keys()
        self._config, self._config_version = config, active.version
        set_up_log(_NAME, config.server.log_level)
        self._rates.configure(config.queues)
        if self._peers is not None:
            self._peers.rates.configure(limits_of(config.queues))
        self._publish()  # and what follows for rates
        log.info("a changed configuration is active, version %d", active.version)

    def _config_problems(self) -> Sequence[str]:
        programs = "" if self._programs is None else self._programs.problem
        cluster = "" if self._cluster is None else self._cluster.problem
        return [text for text in (*self._reload.problems, programs, cluster, self._failure) if text]

    @property
    def _converged(self) -> bool:
        """Whether nothing is under way any more."""
        return self._reload.converged and (self._programs is None or self._programs.converged)

    def _holding(self, shard: str) -> Holding | None:
        report = self._registry.serving(layout.shard_program(shard))
        if report is None:
            return None
        gauges = report.stats["gauges"]

        def jobs(state: str) -> int:
            return int(sum(n for name, n in gauges.items() if name.endswith(state)))

        # What it holds is not known before it has counted it; it is asked again.
        version = 0 if gauges.get("shard_queues_counting") else report.config_version
        return Holding(version, jobs("_pending"), jobs("_in_progress"))

    # --- the cluster ---------------------------------------------------------------------------

    def _hosted(self, config: Config | None = None) -> Config:
        """The active configuration, or `config`, with those shards only that have a process here:
        all of them, if there is no other server."""
        config = config or self._config
        return config if self._cluster is None else self._cluster.here(config)

    async def _follow_cluster(self) -> None:
        """Tell what has changed here, and decide what this server has to, as long as this runs."""
        cluster = self._cluster
        if cluster is None:
            return
        await cluster.start()
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._woken.wait(), LOOK_SECONDS)
            self._woken.clear()
            cluster.leaving = layout.LEAVING.exists()
            views = self._registry.views()
            cluster.weight = self._config.server.weight
            cluster.config = self._followed(views)
            cluster.describe(shard_states(views), unreached_shards(views))
            if (serving := routers_serve(views)) is not None:
                cluster.announce(serving=serving)
            if self._peers is not None and cluster.members:
                admitted = admitted_members(views, self._published)
                served = cluster.serves(self._config.shards)
                own = cluster.place.member
                self._peers.follow(cluster.members, own, admitted, served=served)
                self._hear()
            await cluster.lead(self._config.shards)

    def _followed(self, views: Sequence[ProcessView]) -> tuple[int, int]:
        """The number of the cluster's configuration that all processes here follow."""
        assert self._shared is not None
        versions = [one.report.config_version for one in views if not one.gone]
        return self._shared.followed(min([self._config_version, *versions]))

    async def _ask_holdings(self, shards: Collection[str]) -> Mapping[str, Holding]:
        """What shards hold that are to be removed, those that say it."""
        return {} if self._peers is None else await self._peers.holdings(shards)

    def _new_peers(self, cluster: Cluster) -> Peers:
        config, (server, member, _) = self._config, cluster.place
        about = (server, member, limits_of(config.queues), self._clock, self._rates)
        ends = (self._loop, self._stats, self._answer, self._hear)
        return Peers(config.server, cluster.key, *ends, lambda peers: ServerRates(*about, peers))

    def _answer(self, question: StatusQuestion | HoldingQuestion) -> object:
        """What another server's coordinator asks."""
        if isinstance(question, HoldingQuestion):
            here = self._holding(question.shard)
            return here and self._shared and self._shared.holding(here)
        return {"status": self.status(), "stats": self.stats() if question.statistics else {}}

    def _follow_view(self, view: View) -> None:
        """Start and stop the processes that follow from what ZooKeeper says by now."""
        assert self._cluster is not None
        assert self._shared is not None
        self._shared.see(view)
        before = self._hosted()
        if self._cluster.follow(view):
            self._publish()
            try:
                if self._programs is not None:
                    self._programs.want(changed_programs(before, self._hosted()))
                    self._programs.step(self._hosted())
            except OSError as error:
                log.error("the programs to change can't be noted: %s", error)
        self._admit()
        self._woken.set()

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
            "warnings": [
                *self._reload.warnings,
                *(p.rates.problems() if (p := self._peers) else ()),
            ],
        }
        if self._cluster is None:
            return status(self._config, self._views(), about)
        found = status(self._cluster.owned(self._config), self._views(), about)
        return self._cluster.add_to(found, self._config)

    def stats(self) -> Mapping[str, StatsSnapshot]:
        figures = {_NAME: self._stats.snapshot(), **self._registry.stats()}
        gauges: dict[str, defaultdict[str, float]] = {name: defaultdict(float) for name in figures}
        for view in self._views():
            usage = None if view.gone else usage_of(view.report.pid)
            found = gauges[view.report.process]
            found["process_up"] += not view.gone
            if usage is not None:
                found["process_cpu_seconds"] += usage.cpu_seconds
                found["process_rss_bytes"] += usage.rss_bytes
        if self._cluster is not None:
            gauges[_NAME].update(self._cluster.figures(self._config))
        return {
            name: {**snapshot, "gauges": {**snapshot["gauges"], **gauges[name]}}
            for name, snapshot in figures.items()
        }

    def _views(self) -> Sequence[ProcessView]:
        """The coordinator itself, and all that report."""
        own = Report(
            _NAME,
            _NAME,
            os.getpid(),
            self._started_at_ms,
            ProcessState.SERVING,
            facts={"server set warning": "; ".join(self._rates.problems())},
            stats=empty(),
            config_version=self._config_version,
        )
        return [ProcessView(own, own.state), *self._registry.views()]

    # --- the control channel -------------------------------------------------------------------

    def _hear(self) -> None:
        if self._control is None:
            return
        self._take_messages()
        while self._rates.act(self._control):
            self._take_messages()  # that came while we sent: the descriptor says nothing of them
        if self._peers is not None and self._peers.rates.step():
            self._publish()  # who we are now

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
            report = message if isinstance(message, Report) else None
            self._stats.count("reports")
            self._rates.allocator.heartbeat(peer)
            newcomer = not self._registry.knows(peer)
            understood = self._registry.heard(peer, report)
            if newcomer and report is not None and understood:
                log.info("%s reports, pid %d: %s", report.process, report.pid, report.state)
            if newcomer or not understood:
                self._control.send(peer, self._snapshot)
            if report is not None:
                self._woken.set()
        self._admit()

    def _admit(self) -> None:
        """A new shard counts once it serves: calls that need all shards go on until then."""
        serving = {shard for shard in self._joining if self._is_served(shard)}
        if serving:
            self._joining -= serving
            self._publish()

    def _is_served(self, shard: str) -> bool:
        if self._cluster is not None:
            return self._cluster.state_of(shard) == ProcessState.SERVING
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
        """Those that no router knows yet; none where nothing ran before."""
        if before is None or not before.shards:
            return frozenset()
        return self._config.shards.keys() - {shard.name for shard in before.shards}

    def _next_snapshot(self) -> Snapshot:
        """Its version is greater than that of any coordinator before, whatever the clock says."""
        before = read_snapshot()
        now_ms = self._clock.now_ms()
        version = max(now_ms, before.version + 1) if before is not None else now_ms
        shards, cluster = self._config.shards.values(), self._cluster
        if cluster is None:
            known = (shard for shard in shards if shard.name not in self._joining)
            entries = tuple(ShardEntry(shard.name, shard.dequeue_only) for shard in known)
            return Snapshot(version, entries, now_ms, self._config_version)
        entries = tuple(
            cluster.entry(shard, joining=shard.name in self._joining) for shard in shards
        )
        place = cluster.place
        if self._peers is not None:
            place = place._replace(member=self._peers.rates.member)
        self._published[version] = place.members
        if len(self._published) > _SNAPSHOTS:
            del self._published[min(self._published)]
        return Snapshot(version, entries, now_ms, self._config_version, *place)


def _cluster(
    settings: ServerSettings, clock: Clock, on_view: Callable[[View], None]
) -> Cluster | None:
    """None if there is no other server. Raises ConfigError."""
    if not settings.cluster:
        return None
    # Only here: a single machine needs no ZooKeeper.
    from pinlaterd.coordinator.cluster import Cluster

    return Cluster(settings, read_snapshot(), clock, on_view)
