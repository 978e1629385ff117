"""Messages between the coordinators of a cluster: rates, permits, questions. Never who has a shard.

Nothing here waits: what can't be sent is lost, but for a question, which is asked once the
connection is there. Only holders of the cluster's key can connect; they are trusted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping

import msgspec

from pinlaterd.config.schema import ServerSettings
from pinlaterd.coordinator.permit_control import PermitControl
from pinlaterd.coordinator.placement import Member
from pinlaterd.coordinator.server_rates import ClusterView, ServerRates
from pinlaterd.stats import Stats
from pinlaterd.wire.control import (
    ControlServer,
    MalformedMessage,
    PeerAnswer,
    PeerClient,
    PeerQuestion,
    PermitGrant,
    PermitReport,
    Question,
    ServerGrant,
    ServerReport,
    pack,
    unpack,
)
from pinlaterd.wire.curve import ClusterKey

log = logging.getLogger(__name__)

_AGAIN_SECONDS = 0.05  # after which a question that could not be sent is tried again


class Peers:
    """This coordinator's connections to the others, itself included. Used on the event loop."""

    def __init__(
        self,
        settings: ServerSettings,
        key: ClusterKey,
        loop: asyncio.AbstractEventLoop,
        stats: Stats,
        answer: Callable[[PeerQuestion], Awaitable[object]],
        on_heard: Callable[[], None],
        new_rates: Callable[[Peers], ServerRates],
        permits: PermitControl,
    ) -> None:
        """`answer`: what this server says to a question, for JSON. `on_heard` is called when
        anything of rates or permits was heard. `new_rates` makes what is told of rates, and tells
        others through this. Raises OSError if the port is not free."""
        self.rates = new_rates(self)
        self._permits = permits
        self._key = key
        self._loop = loop
        self._stats = stats
        self._answer = answer
        self._answering: set[asyncio.Task[None]] = set()
        self._on_heard = on_heard
        endpoint = f"tcp://{settings.peer_host}:{settings.peer_port}"
        self._server = ControlServer(endpoint=endpoint, key=key)
        self._addresses: Mapping[str, str] = {}  # of the members, by node
        self._links: dict[str, tuple[str, PeerClient]] = {}  # with the addresses they were made for
        self._waiting: dict[int, asyncio.Future[bytes]] = {}
        self._questions = 0
        self._hearing: asyncio.Handle | None = None
        self._loop.add_reader(self._server.fileno(), self._hear)
        self._hear_soon()

    def follow(
        self, members: Mapping[str, Member], own: str, admitted: frozenset[str], *, served: bool
    ) -> None:
        """Follow the members that live, the oldest first; for the rest see ClusterView."""
        servers = {node: member.server for node, member in members.items()}
        view = ClusterView(servers, own, admitted, served)
        self._addresses = {node: f"tcp://{member.peer}" for node, member in members.items()}
        self._disconnect(() if self._waiting else {view.leader})
        self._link(view.leader)
        self.rates.follow(view)
        self._permits.follow(view.leader, own, self)

    def _link(self, node: str) -> PeerClient | None:
        """Connect to a member; None if there is no such, or no further socket."""
        if node not in self._links and node in self._addresses:
            address = self._addresses[node]
            try:
                link = PeerClient(address, key=self._key)
            except OSError as error:
                log.error("no connection to %s: %s; trying again", address, error)
                return None
            self._links[node] = (address, link)
            self._loop.add_reader(link.fileno(), self._hear)
        return self._links[node][1] if node in self._links else None

    def _disconnect(self, kept: Collection[str]) -> None:
        """Disconnect from all but `kept`, if there are any, and from those that went or moved."""
        for node, (address, link) in list(self._links.items()):
            if self._addresses.get(node) != address or (kept and node not in kept):
                del self._links[node]
                self._loop.remove_reader(link.fileno())
                link.close()

    def close(self) -> None:
        self._addresses = {}
        for task in self._answering:
            task.cancel()
        self._disconnect(())
        self._loop.remove_reader(self._server.fileno())
        self._server.close()
        if self._hearing is not None:
            self._hearing.cancel()

    # --- what is sent --------------------------------------------------------------------------

    def tell(self, member: str, report: ServerReport | PermitReport) -> bool:
        """Return False if there is no connection yet: it is lost."""
        link = self._link(member)
        self._hear_soon()
        return link is not None and link.send(pack(report))

    def reply(self, peer: bytes, grant: ServerGrant | PermitGrant) -> None:
        self._server.send(peer, grant)
        self._hear_soon()

    async def ask(self, member: str, about: PeerQuestion, seconds: float) -> bytes | None:
        """Ask; return the answer, JSON, or None if it does not come within `seconds`."""
        self._questions += 1
        question = Question(self._questions, about)
        answered = self._waiting[question.number] = self._loop.create_future()
        self._put(member, question)
        try:
            return await asyncio.wait_for(answered, seconds)
        except TimeoutError:
            return None
        finally:
            del self._waiting[question.number]

    def _put(self, member: str, question: Question) -> None:
        if question.number not in self._waiting:
            return
        link = self._link(member)
        if link is None or not link.send(pack(question)):
            self._loop.call_later(_AGAIN_SECONDS, self._put, member, question)
        self._hear_soon()

    # --- what is heard -------------------------------------------------------------------------

    def _hear_soon(self) -> None:
        """Receive soon: sending uses up the descriptors' edges."""
        if self._hearing is None:
            self._hearing = self._loop.call_soon(self._hear)

    def _hear(self) -> None:
        self._hearing = None
        heard = False
        while (arrived := self._server.receive()) is not None:
            heard |= self._take(*arrived)
        for node, (_, link) in list(self._links.items()):
            for message in link.messages():
                if isinstance(message, PeerAnswer):
                    waiting = self._waiting.get(message.number)
                    if waiting is not None and not waiting.done():
                        waiting.set_result(bytes(message.body))
                elif isinstance(message, ServerGrant):
                    self.rates.heard_grant(node, message)
                    heard = True
                elif isinstance(message, PermitGrant):
                    self._permits.heard_grant(node, message)
                    heard = True
        if heard:
            self._on_heard()

    def _take(self, peer: bytes, data: bytes) -> bool:
        """Take a message; return whether it is of rates or permits."""
        try:
            message = unpack(data)
        except MalformedMessage:
            self._stats.count("reports_malformed")
            log.warning("what another server's coordinator says can't be read")
            return False
        if isinstance(message, ServerReport):
            self.rates.heard_report(peer, message)
            return True
        if isinstance(message, PermitReport):
            self._permits.heard_elsewhere(peer, message)
            return True
        if isinstance(message, Question):
            task = self._loop.create_task(self._reply_to(peer, message))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)
        return False

    async def _reply_to(self, peer: bytes, question: Question) -> None:
        body = msgspec.Raw(msgspec.json.encode(await self._answer(question.about)))
        self._server.send(peer, PeerAnswer(question.number, body))
        self._hear_soon()
