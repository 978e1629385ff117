"""Permits over the servers of a cluster: the leader divides, others pass on, a new leader asks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import pytest

from pinlaterd.config.schema import Config, ServerSettings, ShardSettings, default_queue_settings
from pinlaterd.coordinator.peers import Peers
from pinlaterd.coordinator.permit_control import PermitControl
from pinlaterd.model import JobState
from pinlaterd.shard.permits import Permits
from pinlaterd.stats import Stats
from pinlaterd.wire.control import ControlServer, PermitGrant, PermitReport
from tests.clocks import FakeClock

LIMIT = 4
NODES = {"a": "m-0000000001", "b": "m-0000000002"}


class Server:
    """A server with one shard. It is the Peers and the ControlServer of its coordinator."""

    def __init__(self, name: str, cluster: dict[str, Server], clock: FakeClock) -> None:
        self.name, self.cluster, self.clock = name, cluster, clock
        settings = ServerSettings(cluster="c", server=name)
        limited = replace(default_queue_settings(settings), max_in_progress=LIMIT)
        shards = {each: ShardSettings(each) for each in NODES}
        config = Config(settings, shards, {"mail": limited})
        self.control = PermitControl(config, clock, lambda _pid: True, Stats())
        self.ready = self.used = 0
        self.permits = Permits(JobState.IN_PROGRESS, lambda *_: self.used, clock.monotonic)
        self.permits.follow(["mail"])
        self.permits.begin()
        self.is_cut_off = False

    def tell(self, node: str, report: PermitReport) -> bool:
        for name, server in self.cluster.items():
            if NODES[name] == node and not self.is_cut_off:
                server.control.heard_elsewhere(self.name.encode(), report)
        return True

    def reply(self, peer: bytes, grant: PermitGrant) -> None:
        self.cluster[peer.decode()].control.heard_grant(NODES[self.name], grant)

    def send(self, _peer: bytes, grant: PermitGrant) -> None:
        self.permits.grant(grant.queues)

    def step(self) -> None:
        """Let the shard report, and its coordinator act."""
        self.permits.look("mail", waiting=self.ready)
        held = self.permits.report()
        if held:
            report = PermitReport(self.name, 1, 1, JobState.IN_PROGRESS, held)
            self.control.heard(b"shard", report)
        self.control.heartbeat(b"shard")
        self.control.act(cast("ControlServer", self))

    def claim_all(self) -> None:
        while self.ready and self.permits.free("mail"):
            self.ready, self.used = self.ready - 1, self.used + 1


def lead(cluster: dict[str, Server], leader: str) -> None:
    for name, server in cluster.items():
        server.control.follow(NODES[leader], NODES[name], cast("Peers", server))


def pass_time(servers: Sequence[Server]) -> None:
    for _ in range(40):
        servers[0].clock.advance(0.1)
        for server in servers:
            server.step()
            server.claim_all()
        assert sum(server.used for server in servers[0].cluster.values()) <= LIMIT


@pytest.fixture
def cluster() -> dict[str, Server]:
    clock, found = FakeClock(), dict[str, Server]()
    for name in NODES:
        found[name] = Server(name, found, clock)
    lead(found, "a")
    return found


def test_the_leader_divides_over_the_shards_of_all_servers(cluster: dict[str, Server]):
    cluster["b"].ready = 10

    pass_time([*cluster.values()])

    assert cluster["b"].used == LIMIT


def test_a_new_leader_waits_for_all_shards_and_the_one_before_is_not_followed(
    cluster: dict[str, Server],
):
    first, second = cluster["a"], cluster["b"]
    first.ready = 3
    pass_time([*cluster.values()])
    assert first.used == 3

    first.is_cut_off = True  # and believes that it leads
    second.control.follow(NODES["b"], NODES["b"], cast("Peers", second))
    second.ready = 10
    pass_time([second])
    assert second.used <= 1

    first.is_cut_off = False
    first.control.follow(NODES["b"], NODES["a"], cast("Peers", first))
    pass_time([*cluster.values()])
    first.used = 0
    pass_time([*cluster.values()])
    assert second.used == LIMIT
