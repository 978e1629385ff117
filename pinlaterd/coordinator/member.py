"""The coordinator of a server of a cluster: what it does beyond that of a single machine.

It is a member of the cluster (`cluster`), follows a configuration that all servers share
(`shared_config`), and talks to the other coordinators (`peers`) of rates and of what the whole
service is like. Its processes are those of the shards that this server owns, or prepares to own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NoReturn, TypeVar

import msgspec

from pinlaterd.clock import Clock, until_full
from pinlaterd.config.active import ActiveConfig
from pinlaterd.config.layout import LEAVING, shard_program
from pinlaterd.config.schema import Config
from pinlaterd.coordinator.cluster import Cluster
from pinlaterd.coordinator.peers import Peers
from pinlaterd.coordinator.process import Coordinator, takers
from pinlaterd.coordinator.processes import (
    SILENT_SECONDS,
    ProcessView,
    admitted_members,
    routers_serve,
    shard_states,
    unreached_shards,
)
from pinlaterd.coordinator.programs import changed_programs
from pinlaterd.coordinator.rates import limits_of
from pinlaterd.coordinator.reload import HeldJobs
from pinlaterd.coordinator.server_rates import ServerRates
from pinlaterd.coordinator.shared_config import SharedConfig
from pinlaterd.coordinator.zookeeper import View
from pinlaterd.stats import StatsSnapshot
from pinlaterd.status import Sample, Status, together
from pinlaterd.wire.control import (
    DetailsQuestion,
    EventsQuestion,
    FrameQuestion,
    HistoryQuestion,
    HoldingQuestion,
    OutlinesQuestion,
    PeerQuestion,
    ProcessState,
    ShardEntry,
    Snapshot,
    StatusQuestion,
)
from pinlaterd.wire.key_placement import KeyPlacement

log = logging.getLogger(__name__)

_SNAPSHOTS = 100  # the last, of which it is known who follows them
_ANSWER_SECONDS = 2.0
_LOOK_SECONDS = 1.0  # at what time alone changes; reports and ZooKeeper wake it up
_TOGETHER_SECONDS = 0.02  # processes report at full seconds: one look at all of them

T = TypeVar("T")


class MemberCoordinator(Coordinator):
    def __init__(self, etc: Path, active: ActiveConfig, clock: Clock, cluster: Cluster) -> None:
        """Follow what `cluster` sees: it calls `follow_view`."""
        self._cluster = cluster
        self._woken = asyncio.Event()  # something may have to be told or decided
        self._published: dict[int, Sequence[str]] = {}  # members by the snapshot's version
        self._peers: Peers | None = None
        super().__init__(etc, active, clock)

    def _new_reload(self, active: ActiveConfig) -> SharedConfig:
        self._shared = self._cluster.shared_config(
            self._etc, active, self._activate, self._ask_holdings
        )
        return self._shared

    async def start(self) -> None:
        cluster, config = self._cluster, self._config
        server, member, _ = cluster.place
        about = (server, member, limits_of(config.queues), self._clock, self._rates)
        ends = (self._loop, self._stats, self._answer, self._hear)
        self._peers = Peers(
            config.server,
            cluster.key,
            *ends,
            lambda peers: ServerRates(*about, peers),
            self._permits,
        )
        await super().start()

    async def stop(self) -> None:
        if self._peers is not None:
            self._peers.close()
        await super().stop()
        self._cluster.leaving = LEAVING.exists()  # a server without shards is down before a look
        await asyncio.to_thread(self._cluster.stop)

    # --- what is followed ------------------------------------------------------------------------

    async def follow(self) -> None:
        await asyncio.gather(super().follow(), self._follow_cluster())

    async def _follow_cluster(self) -> NoReturn:
        """Tell what has changed here, and decide what this server has to, as long as this runs."""
        cluster = self._cluster
        while True:
            with contextlib.suppress(TimeoutError):
                seconds = until_full(_LOOK_SECONDS, self._clock.monotonic())
                async with asyncio.timeout(seconds):
                    await self._woken.wait()
                await asyncio.sleep(_TOGETHER_SECONDS)
            self._woken.clear()
            config, views = self._config, self._registry.views()
            cluster.leaving, cluster.weight = LEAVING.exists(), config.server.weight
            cluster.config = self._followed(views)
            is_followed = self._followed_by_routers(views) == self._config_version
            cluster.keys_followed = cluster.keys.number if is_followed else 0
            if self._knows_processes(views):
                cluster.describe(shard_states(views), unreached_shards(views))
            if (serving := routers_serve(views)) is not None:
                cluster.announce(serving=serving)
            if self._peers is not None and cluster.members:
                admitted = admitted_members(views, self._published)
                served = cluster.serves(config.shards)
                self._peers.follow(cluster.members, cluster.place.member, admitted, served=served)
            self._hear()
            await cluster.register()
            await cluster.lead(config.shards)
            await cluster.place_keys(takers(self._entries()), self._config.keys_kept_ms())

    def _knows_processes(self, views: Sequence[ProcessView]) -> bool:
        """Tell whether the shards' processes here have reported. Until then what a coordinator
        before this one said of them holds; nothing moves because a coordinator was restarted."""
        reported = {view.report.process for view in views}
        expected = {shard_program(shard) for shard in self._served_here().shards}
        is_new = self._clock.monotonic() - self._started < SILENT_SECONDS
        return expected <= reported or not is_new

    def follow_view(self, view: View) -> None:
        """Start and stop the processes that follow from what ZooKeeper says by now."""
        self._shared.see(view)
        before = self._hosted(self._config)
        if self._cluster.follow(view):
            self._publish()
            hosted = self._hosted(self._config)
            try:
                if self._programs is not None:
                    self._programs.want(changed_programs(before, hosted))
                    self._programs.step(hosted)
            except OSError as error:
                log.error("the programs to change can't be noted: %s", error)
        self._admit()
        self._woken.set()

    def _heard(self) -> None:
        self._woken.set()

    def _hear(self) -> None:
        super()._hear()
        if self._peers is not None and self._peers.rates.step():
            self._publish()  # who we are now

    def _followed(self, views: Sequence[ProcessView]) -> int:
        """Return the number of the cluster's configuration that all processes here follow."""
        versions = [one.report.config_version for one in views if not one.gone]
        return self._shared.followed(min([self._config_version, *versions]))

    def _take_on(self, active: ActiveConfig) -> None:
        if self._peers is not None:
            self._peers.rates.configure(limits_of(active.config.queues))
        super()._take_on(active)

    # --- which shards are here -------------------------------------------------------------------

    def _hosted(self, config: Config) -> Config:
        return self._cluster.here(config)

    def _served_here(self) -> Config:
        return self._cluster.owned(self._config)

    def _is_served(self, shard: str) -> bool:
        return self._cluster.state_of(shard) == ProcessState.SERVING

    def _entries(self) -> tuple[ShardEntry, ...]:
        return tuple(
            self._cluster.entry(shard, joining=shard.name in self._joining)
            for shard in self._config.shards.values()
        )

    def _placement_of_keys(self, entries: Sequence[ShardEntry]) -> KeyPlacement:
        return self._cluster.keys

    def _next_snapshot(self) -> Snapshot:
        found, place = super()._next_snapshot(), self._cluster.place
        if self._peers is not None:
            place = place._replace(member=self._peers.rates.member)
        self._published[found.version] = place.members
        if len(self._published) > _SNAPSHOTS:
            del self._published[min(self._published)]
        return msgspec.structs.replace(found, **place._asdict())

    # --- what this server says, and all ----------------------------------------------------------

    def status(self) -> Status:
        found = self._cluster.add_to(super().status(), self._config)
        problems = [] if self._peers is None else self._peers.rates.problems()
        return {**found, "warnings": [*found["warnings"], *problems]}

    def _config_problems(self) -> Sequence[str]:
        return [text for text in (*super()._config_problems(), self._cluster.problem) if text]

    def stats(self) -> Mapping[str, StatsSnapshot]:
        for name, figure in self._cluster.figures(self._config).items():
            self._stats.gauge(name, figure)
        return super().stats()

    async def whole(self, *, statistics: bool) -> Sample:
        own = self._own(statistics=statistics)
        return together(own, await self._ask_others(StatusQuestion(statistics), Sample))

    async def _ask_others(self, question: PeerQuestion, kind: type[T]) -> Mapping[str, T | None]:
        """Ask all other servers; None stands for one that does not answer."""
        others = {
            member.server: node
            for node, member in self._cluster.members.items()
            if member.server != self._cluster.place.server
        }
        asked = (self._ask(node, question, kind) for node in others.values())
        found = await asyncio.gather(*asked)
        return dict(zip(others, found, strict=True))

    async def _ask(self, node: str, question: PeerQuestion, kind: type[T]) -> T | None:
        """Ask a server; None if it does not answer, or as no release up to this one does."""
        assert self._peers is not None
        answer = await self._peers.ask(node, question, _ANSWER_SECONDS)
        try:
            found = answer or b"null"
            return None if found == b"null" else msgspec.json.decode(found, type=kind)
        except ValueError as error:
            log.error("what server %s says can't be read: %s", node, error)
            return None

    async def _ask_holdings(self, shards: Collection[str]) -> Mapping[str, HeldJobs]:
        """Ask owners what shards hold that are to be removed; leave out those that fail."""
        members = self._cluster.members.values()
        followed = min([member.config for member in members], default=0)
        if any(member.keys < self._cluster.keys.number for member in members):
            followed = 0
        nodes = {member.server: node for node, member in self._cluster.members.items()}
        owners = {shard: self._cluster.assigned.get(shard) for shard in shards}
        asked = {s: nodes[o.server] for s, o in owners.items() if o and o.server in nodes}
        answers = await asyncio.gather(
            *(self._ask(node, HoldingQuestion(shard), HeldJobs) for shard, node in asked.items())
        )
        return {
            shard: one._replace(config_version=min(one.config_version, followed))
            for shard, one in zip(asked, answers, strict=True)
            if one is not None
        }

    async def _answer(self, question: PeerQuestion) -> object:
        """Answer a question of another server's coordinator."""
        if isinstance(question, HoldingQuestion):
            here = self._holding(question.shard)
            return here and self._shared.holding(here)
        if isinstance(question, FrameQuestion):
            return self._overview.server_frame()
        if isinstance(question, DetailsQuestion):
            return await self._details.gather()
        if isinstance(question, HistoryQuestion):
            return self._overview.series(question)
        if isinstance(question, OutlinesQuestion):
            return self._overview.outlines(question)
        if isinstance(question, EventsQuestion):
            return self._overview.events.since(question.since_ms)
        return self._own(statistics=question.statistics)
