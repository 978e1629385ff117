"""What coordinators tell each other, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import cast

import pytest

from pinlaterd.clock import Clock
from pinlaterd.config.schema import Config, ServerSettings
from pinlaterd.coordinator.peers import Peers
from pinlaterd.coordinator.permit_control import PermitControl
from pinlaterd.coordinator.placement import Member
from pinlaterd.coordinator.server_rates import ClusterView, ServerRates
from pinlaterd.lifecycle import process_exists
from pinlaterd.stats import Stats
from pinlaterd.wire.control import (
    HoldingQuestion,
    PeerClient,
    RateGrant,
    RateReport,
    RouterId,
    ServerGrant,
    ServerReport,
    StatusQuestion,
)
from pinlaterd.wire.curve import ClusterKey
from tests.deployment import unused_port

KEY = ClusterKey(bytes(32), "c")
HOST = "127.0.0.1"
SECONDS = 60.0
SILENCE_SECONDS = 0.5
REPORT = ServerReport("", RateReport(RouterId("a", 1, 0), 0, {"mail": 1.5}, {}, {}), {}, ("m-1",))
GRANT = ServerGrant("a term", "m-1", RateGrant(8, {"mail": 3.5}, {}))


class Rates:
    """Answers each report with a grant, and notes what is heard."""

    def __init__(self, peers: Peers) -> None:
        self.peers = peers
        self.reports: list[ServerReport] = []
        self.grants: list[tuple[str, ServerGrant]] = []

    def follow(self, view: ClusterView) -> None:
        assert view.members == {"m-2": "b"}

    def heard_report(self, peer: bytes, report: ServerReport) -> None:
        self.reports.append(report)
        self.peers.reply(peer, GRANT)

    def heard_grant(self, member: str, grant: ServerGrant) -> None:
        self.grants.append((member, grant))


class Coordinator:
    def __init__(self, port: int, key: ClusterKey = KEY) -> None:
        self.heard = 0
        self.closed = False
        self.stats = Stats()
        settings = ServerSettings(peer_host=HOST, peer_port=port)
        loop = asyncio.get_running_loop()
        permits = PermitControl(Config(settings), Clock(), process_exists, self.stats)
        self.peers = Peers(
            settings, key, loop, self.stats, self.answer, self.on_heard, self.new_rates, permits
        )

    def close(self) -> None:
        if not self.closed:
            self.peers.close()
        self.closed = True

    def new_rates(self, peers: Peers) -> ServerRates:
        self.rates = Rates(peers)
        return cast("ServerRates", self.rates)

    def follow(self, other: int) -> None:
        """Another, which has the port `other`, is the member m-2."""
        address = f"{HOST}:{other}"
        member = Member("b", HOST, address, 9100, f"{HOST}:9010", "0")
        self.peers.follow({"m-2": member}, "m-1", frozenset(), served=True)

    async def answer(self, question: object) -> object:
        return {"asked": str(question)}

    def on_heard(self) -> None:
        self.heard += 1


@contextlib.asynccontextmanager
async def two(key: ClusterKey = KEY) -> AsyncIterator[tuple[Coordinator, Coordinator, int]]:
    """One, which knows the other as the member m-2; and that one, which has `key`."""
    port = unused_port()
    one, other = Coordinator(unused_port()), Coordinator(port, key)
    one.follow(port)
    try:
        async with asyncio.timeout(SECONDS):
            yield one, other, port
    finally:
        one.close()
        other.close()


async def successor_at(port: int) -> Coordinator:
    """The system has the port for a moment longer."""
    while True:
        try:
            return Coordinator(port)
        except OSError:
            await asyncio.sleep(0.05)


def run(scenario: Callable[[], Coroutine[None, None, None]]) -> None:
    asyncio.run(scenario())


def test_a_question_is_answered():
    async def scenario() -> None:
        async with two() as (one, _, _):
            answers = await asyncio.gather(
                one.peers.ask("m-2", StatusQuestion(statistics=True), SECONDS),
                one.peers.ask("m-2", HoldingQuestion("7"), SECONDS),
            )
        assert [json.loads(answer or "")["asked"] for answer in answers] == [
            "StatusQuestion(statistics=True)",
            "HoldingQuestion(shard='7')",
        ]

    run(scenario)


def test_one_that_does_not_answer_in_time_is_not_waited_for():
    async def scenario() -> None:
        async with two() as (one, other, _):
            other.close()
            assert await one.peers.ask("m-2", StatusQuestion(), SILENCE_SECONDS) is None
            assert await one.peers.ask("m-3", StatusQuestion(), SILENCE_SECONDS) is None

    run(scenario)


def test_one_that_is_restarted_is_asked_again_also_at_another_address():
    async def scenario() -> None:
        async with two() as (one, other, port):
            assert await one.peers.ask("m-2", StatusQuestion(), SECONDS)
            other.close()
            for again in (port, unused_port()):
                successor = await successor_at(again)
                one.follow(again)
                while await one.peers.ask("m-2", StatusQuestion(), SILENCE_SECONDS) is None:
                    pass
                successor.close()

    run(scenario)


def test_reports_get_to_another_and_its_grants_come_back():
    async def scenario() -> None:
        async with two() as (one, other, _):
            while not one.rates.grants:
                one.peers.tell("m-2", REPORT)
                await asyncio.sleep(0.05)
            one.peers.tell("m-3", REPORT)  # nobody of that name

            assert other.rates.reports[0] == REPORT
            assert one.rates.grants[0] == ("m-2", GRANT)
            assert other.heard
            assert one.heard

    run(scenario)


@pytest.mark.parametrize("key", [ClusterKey(b"1" * 32, "c"), ClusterKey(bytes(32), "d")])
def test_one_of_another_cluster_hears_nothing_and_is_not_heard(key):
    async def scenario() -> None:
        async with two(key) as (one, other, _):
            assert await one.peers.ask("m-2", StatusQuestion(), SILENCE_SECONDS) is None
            assert other.rates.reports == []

    run(scenario)


def test_what_can_not_be_read_is_counted_and_nothing_worse():
    async def scenario() -> None:
        async with two() as (one, other, port):
            unread = PeerClient(f"tcp://{HOST}:{port}", key=KEY)
            while not other.stats.snapshot()["counters"].get("reports_malformed"):
                unread.send(b"{}")
                await asyncio.sleep(0.05)
            unread.close()
            assert await one.peers.ask("m-2", StatusQuestion(), SECONDS)

    run(scenario)


def test_a_port_that_another_has_is_an_error():
    async def scenario() -> None:
        async with two() as (_, _, port):
            with pytest.raises(OSError, match=f"can't listen on tcp://{HOST}:{port}"):
                Coordinator(port)

    run(scenario)
