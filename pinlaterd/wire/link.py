"""The client's end of the wire: a link to each shard.

A ShardLink gathers all calls of a loop turn into one message, matches replies to calls, notices
when its shard is gone, frozen or new, and keeps the hints that the shard publishes. It relies on
`wire.connection` and on asyncio; it knows nothing of Thrift but that a reply is bytes.

Silence is counted in sweeps of this loop, not in seconds: a router that was stopped itself has
made no sweep meanwhile, and does not take its own pause for that of its shards.

A shard that has gone is expected back for a while (`return_seconds`). Calls that it
certainly did not carry out wait for its successor meanwhile, if they are patient. That one may
have another address, and be another server's (`move_to`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

import zmq

from pinlaterd.clock import Clock, until_full
from pinlaterd.wire.connection import LinkConnection
from pinlaterd.wire.curve import ClusterKey
from pinlaterd.wire.envelope import (
    PULSE_SECONDS,
    PULSES_UNTIL_QUIET,
    QUIET_PULSE_SECONDS,
    Frame,
    GiveUp,
    Goodbye,
    GoodbyeAck,
    Hello,
    Op,
    Pulse,
    ReadyCounts,
    Refused,
    Replies,
    ReplyEntry,
    ShardCall,
    ShardFacts,
    Status,
    Welcome,
    misunderstanding,
    pack,
    pack_calls,
    unpack,
)

log = logging.getLogger(__name__)

C = TypeVar("C", bound=ShardCall)

# Sweeps come as often as a shard's pulses. They get rare before the pulses do, so that a shard that
# has become quiet is not taken for a silent one.
_SWEEPS_UNTIL_QUIET = PULSES_UNTIL_QUIET * 3 // 4
_QUIET_SWEEP = 2  # counts for so many in GiveUp
_REFUSED_SECONDS = 0.25  # until it greets again
# How long an answer is waited for after its caller was told that it is late.
_FORGET_AFTER_SECONDS = 60.0
_RELEASE_SECONDS = 60.0

_DOWN = ReplyEntry(0, Status.REFUSED, b"is down")
_FULL = ReplyEntry(0, Status.REFUSED, b"has as many calls in flight as it may have")
_LOST = ReplyEntry(0, Status.LOST)
_LATE = ReplyEntry(0, Status.LATE)
_SILENT = ReplyEntry(0, Status.SILENT)


class LinkListener(Protocol):
    """The events that a link reports. Called on the event loop; must not raise."""

    def welcomed(self, link: ShardLink, facts: ShardFacts) -> None:
        """Note that the shard serves (again)."""

    def counted(self, link: ShardLink, counts: Iterable[ReadyCounts]) -> None:
        """Note that hints have changed."""
        return

    def assessed(self) -> None:
        """Note that a link's `healthy`, `answering` or `preferred` has changed."""
        return

    def others_can_serve(self, link: ShardLink) -> bool:
        """Tell whether calls that this link holds up may be given up."""
        return False

    def queues_known(self) -> Iterable[str]:
        """Return the queues that a shard must have before it serves this router."""
        return ()

    def membership(self) -> tuple[str, str]:
        """Return this server's name and member node, by which other servers' shards judge it."""


class ShardLink:
    """One shard, as the router reaches it. All methods are called on the event loop."""

    def __init__(
        self,
        name: str,
        endpoint: str,
        context: zmq.Context[zmq.Socket[bytes]],
        listener: LinkListener,
        clock: Clock,
        *,
        max_bytes: int,
        return_seconds: float,
        key: ClusterKey | None = None,
    ) -> None:
        """`max_bytes`: of calls that are sent or kept and have no answer. `return_seconds`: how
        long a shard that has gone is expected back. `key`: for endpoints of tcp."""
        self.name = name
        self.incarnation = 0  # 0: not welcomed on the present connection
        self.facts: ShardFacts | None = None
        self.healthy = False  # whether calls can be expected to be answered
        self.answering = False  # whether it has been heard within about a second
        self.preferred = False  # whether it is answering, and its store can be relied on
        self.degraded = False  # what it says of its store
        self.ready: dict[str, tuple[int, ...]] = {}  # ready jobs by queue and priority: hints
        # In flight: goes out after this turn, or to the successor of a shard that has gone.
        self.unsent: list[ShardCall] = []
        self._next_endpoint = ""  # where to go once the owner before has said its last
        self._ahead = 0.0  # by how much its clock is before ours, at least
        self._listener = listener
        self._clock = clock
        self._max_bytes = max_bytes
        self._return_seconds = return_seconds
        # Monotonic; of use while not welcomed. A shard that is new here serves already.
        self._expected_until = clock.monotonic() + return_seconds
        self._bytes_in_flight = 0
        self._in_flight: dict[int, ShardCall] = {}
        self._next_call_id = 0
        self._silent_sweeps = 0
        self._loop = asyncio.get_running_loop()
        self._swept_at = clock.monotonic()
        self._sweep_seconds = PULSE_SECONDS
        self._unused_sweeps = 0  # since there was a call for it
        self._sweeping = self._loop.call_later(self._sweep_seconds, self._sweep)
        self._connection = LinkConnection(
            name, endpoint, context, key, self._hello, self._take, self._gone
        )

    def close(self) -> None:
        """Let go of the shard; calls in flight are LOST."""
        self._return_seconds, self._next_endpoint = 0.0, ""
        self._leave(_LOST)
        self._sweeping.cancel()
        self._connection.close()

    def move_to(self, endpoint: str) -> None:
        """Move to `endpoint`, where the owner is now, or soon. Calls that are kept go there.

        An owner before that still serves this link may answer what it has, for as long as it is
        not silent, until it says Goodbye."""
        self._next_endpoint = "" if endpoint == self._connection.endpoint else endpoint
        if self._next_endpoint and not self.incarnation:
            self._move()

    def _move(self) -> None:
        endpoint, self._next_endpoint = self._next_endpoint, ""
        self._expected_until = self._clock.monotonic() + self._return_seconds
        self._connection.move(endpoint)

    def _assess(self) -> None:
        """Assess the link, whose incarnation, silence or store may have changed."""
        before = (self.healthy, self.answering, self.preferred)
        self.healthy = self.incarnation != 0 and self._silent_sweeps < GiveUp.STALLED
        self.answering = self.incarnation != 0 and self._silent_sweeps < GiveUp.SILENT
        self.preferred = self.answering and not self.degraded
        if (self.healthy, self.answering, self.preferred) != before:
            self._listener.assessed()

    @property
    def returning(self) -> bool:
        """Whether it has gone so short a time ago that it is expected back: calls can wait."""
        return self.incarnation == 0 and self._clock.monotonic() < self._expected_until

    @property
    def calls_in_flight(self) -> int:
        return len(self._in_flight)

    def ready_counts(self, queue: str) -> tuple[int, ...]:
        """Return how many jobs are ready by priority: a hint; () if the shard has sent none yet."""
        return self.ready.get(queue, ())

    def call(self, call: C, on_reply: Callable[[C, ShardLink, ReplyEntry], None]) -> None:
        """Send `call` with all others of this turn; `on_reply` is called with it, this link and the
        reply once, later or now.

        While the shard is returning, and if it goes without having carried out the call, a
        patient one waits for its successor (a part of a dequeue, until others can serve); else the
        reply is REFUSED. If the shard falls silent while others can serve, the reply is SILENT as
        soon as `call.give_up` allows."""
        if self._unused_sweeps:
            self._sweep_often()
        size = call.size = len(call.message)
        if self._bytes_in_flight + size > self._max_bytes and self._bytes_in_flight:
            on_reply(call, self, _FULL)
            return
        if self.incarnation == 0 and not (call.patient and self.returning):
            on_reply(call, self, _DOWN)
            return
        call.on_reply = on_reply
        call.call_id = call_id = self._next_call_id
        self._next_call_id = (call_id + 1) & 0xFFFFFFFF
        self._bytes_in_flight += size
        self._in_flight[call_id] = call
        if not self.unsent:
            self._loop.call_soon(self._flush)
        self.unsent.append(call)

    def ask(self, call: ShardCall) -> asyncio.Future[ReplyEntry]:
        """Make `call`, to be awaited. A reply with claims that nobody awaits any more is released,
        and a search is ended."""
        future: asyncio.Future[ReplyEntry] = self._loop.create_future()

        def arrived(_call: ShardCall, _link: ShardLink, reply: ReplyEntry) -> None:
            if not future.cancelled():
                future.set_result(reply)
            elif reply.jobs:
                self.release(reply.payload)

        def ended(future: asyncio.Future[ReplyEntry]) -> None:
            if future.cancelled() and self._in_flight.get(call.call_id) is call:
                message = b"%d" % call.call_id
                self.call(ShardCall(message, call.deadline, Op.END_SEARCH), _ignore)

        self.call(call, arrived)
        future.add_done_callback(ended)
        return future

    def release(self, dequeue_reply: bytes, may_have_left: bool = False) -> None:  # noqa: FBT001, FBT002 - as a callback
        """End the claims in a dequeue's answer that could not be delivered; `may_have_left`: a byte
        of it.

        If the shard has gone meanwhile and does not come back soon, they end by their time-out."""
        deadline = self._clock.monotonic() + _RELEASE_SECONDS
        op = Op.RELEASE_SENT if may_have_left else Op.RELEASE
        self.call(ShardCall(dequeue_reply, deadline, op), _ignore)

    # --- messages -----------------------------------------------------------------------

    def _flush(self) -> None:
        if self.incarnation == 0 or not self.unsent:
            return
        calls, self.unsent = self.unsent, []
        if not self._connection.send(pack_calls(self.incarnation, calls, self._ahead)):
            for call in calls:
                self._finish(call.call_id, _DOWN)

    def _heard(self) -> None:
        was_silent = self._silent_sweeps >= GiveUp.SILENT
        self._silent_sweeps = 0
        self._assess()
        if was_silent and self.incarnation:
            log.warning("shard-%s answers again", self.name)
            self._count_all()

    def _count_all(self) -> None:
        """Count its jobs again, after others came first: those who wait have to hear of them."""
        self._listener.counted(self, [ReadyCounts(*found) for found in self.ready.items()])

    def _take(self, data: bytes) -> None:
        if self._silent_sweeps:
            self._heard()
        frame = unpack(data)
        if not isinstance(frame, Replies):
            self._follow(frame)
        elif frame.incarnation == self.incarnation:
            # Counts first: what acts on a reply acts on the hints that came with it.
            if frame.counts:
                self._count(frame.counts)
            for reply in frame.entries:
                self._finish(reply.call_id, reply)

    def _follow(self, frame: Frame) -> None:
        if isinstance(frame, Welcome):
            self._welcome(frame)
        elif isinstance(frame, Refused):
            self._refused(frame.reason)
        elif isinstance(frame, Goodbye):
            # Also where it never served us: it waits until it is acknowledged.
            self._connection.send(pack(GoodbyeAck(frame.incarnation)))
            if frame.incarnation == self.incarnation:
                # What it has not answered by now it will never carry out.
                log.info("shard-%s does not serve for now; waiting for it to come back", self.name)
                self._lose(None)
        elif isinstance(frame, Pulse) and frame.incarnation == self.incarnation:
            self._measure(frame.now)
            if frame.degraded != self.degraded:
                self.degraded = frame.degraded
                self._assess()
                health = "is degraded" if frame.degraded else "has recovered"
                log.warning("shard-%s %s", self.name, health)
                self._count_all()
            if frame.counts:
                self._count(frame.counts)

    def _finish(self, call_id: int, reply: ReplyEntry) -> None:
        call = self._in_flight.pop(call_id, None)
        if call is not None:
            self._bytes_in_flight -= call.size
            self._tell(call, reply)

    def _tell(self, call: ShardCall, reply: ReplyEntry) -> None:
        """Deliver a reply. A caller's failure is its own: the others of this message get theirs."""
        on_reply, call.on_reply = call.on_reply, None
        if on_reply is None:  # it was given up
            if reply.jobs:
                self.release(reply.payload)
            return
        try:
            on_reply(call, self, reply)
        except Exception:
            log.exception("a reply of a shard could not be used")

    def _count(self, counts: Sequence[ReadyCounts]) -> None:
        for queue, numbers in counts:
            if numbers:
                self.ready[queue] = numbers
            else:
                self.ready.pop(queue, None)
        self._listener.counted(self, counts)

    def _welcome(self, welcome: Welcome) -> None:
        if reason := misunderstanding(welcome):
            self._refused(reason)
            return
        if self.incarnation:
            # A successor; or the same one, of which we have missed a message.
            self._leave(_LOST)
        kept, self.unsent = self.unsent, []
        self.incarnation, self.facts = welcome.incarnation, welcome.facts
        self._connection.complaint = ""
        self._measure(welcome.now)
        self._assess()
        self.ready = dict(welcome.facts.counts)
        log.info("shard-%s serves (incarnation %d)", self.name, self.incarnation)
        # First of all: this creates the queues that the shard lacks.
        self._listener.welcomed(self, welcome.facts)
        self.unsent += kept
        self._flush()

    def _measure(self, now: float) -> None:
        self._ahead = now - self._clock.monotonic() if self._connection.is_remote else 0.0

    def _refused(self, reason: str) -> None:
        """Greet again in a while: it may have been told of this server a moment too late."""
        self._connection.complain(f"refuses this router: {reason}")
        if self.incarnation:
            self._lose(_LOST)
        self._connection.greet_in(_REFUSED_SECONDS)

    # --- what goes wrong ---------------------------------------------------------------

    def _lose(self, reply: ReplyEntry | None) -> None:
        self._leave(reply)
        if self._next_endpoint:
            self._move()

    def _leave(self, reply: ReplyEntry | None) -> None:
        """Leave the owner: answer all calls that were sent with `reply`; None if they were not
        carried out. Patient calls that were not carried out wait for the successor."""
        self.incarnation = 0
        self.degraded = False
        self._assess()
        self._expected_until = self._clock.monotonic() + self._return_seconds
        self.ready = {}
        unsent = {call.call_id for call in self.unsent}
        self.unsent = []
        for call in list(self._in_flight.values()):
            if reply is not None and call.call_id not in unsent:
                self._finish(call.call_id, reply)
            elif call.patient and call.on_reply is not None and self.returning:
                self.unsent.append(call)
            else:
                self._finish(call.call_id, _DOWN)

    def _gone(self) -> None:
        if self.incarnation:
            log.warning("shard-%s has gone; waiting for it to come back", self.name)
            self._lose(_LOST)

    def _hello(self) -> bytes:
        if self.incarnation:
            return b""
        server, member = self._listener.membership() if self._connection.is_remote else ("", "")
        queues = frozenset(self._listener.queues_known())
        return pack(Hello(queues, server=server, member=member))

    # --- silence and deadlines ---------------------------------------------------------

    def _sweep(self) -> None:
        """Give up calls past their deadline or of a silent shard; forget what comes too late."""
        now, waited = self._clock.monotonic(), self._sweep_seconds
        # After a pause of this process answers may be there that have not been read yet.
        judged_until = min(now, self._swept_at + 2 * waited)
        self._swept_at = now
        self._unused_sweeps += 1
        seconds = waited
        if self._unused_sweeps >= _SWEEPS_UNTIL_QUIET:
            self._sweep_seconds = QUIET_PULSE_SECONDS
            # Amid the pulses of shards here, so that one comes between two sweeps.
            seconds = until_full(QUIET_PULSE_SECONDS, now) + QUIET_PULSE_SECONDS / 2
        self._sweeping = self._loop.call_later(seconds, self._sweep)
        if self.incarnation == 0:
            self._sweep_kept(now)
        self._flush()  # what is given up has been sent: its message may be gone afterwards
        for call in list(self._in_flight.values()):
            if call.deadline + _FORGET_AFTER_SECONDS <= now:
                self._finish(call.call_id, _LATE)
        self._give_up(lambda call: call.deadline + call.grace_seconds <= judged_until, _LATE)
        self._silent_sweeps += 1 if waited == PULSE_SECONDS else _QUIET_SWEEP
        self._assess()
        self._connection.retry_handshake()
        if self._silent_sweeps < GiveUp.SILENT or not self.incarnation:
            return
        if self._next_endpoint:
            self._lose(_LOST)
            return
        if self._silent_sweeps == GiveUp.SILENT:
            log.warning("shard-%s does not answer; others come first", self.name)
        if self._in_flight and self._listener.others_can_serve(self):
            self._give_up(lambda call: call.give_up <= self._silent_sweeps, _SILENT)

    def _sweep_often(self) -> None:
        """Sweep often: there is a call for the shard, which pulses often from its receipt on."""
        self._unused_sweeps = 0
        if self._sweep_seconds != PULSE_SECONDS:
            self._sweep_seconds = PULSE_SECONDS
            self._sweeping.cancel()
            self._sweeping = self._loop.call_later(PULSE_SECONDS, self._sweep)

    def _give_up(self, is_due: Callable[[ShardCall], bool], reply: ReplyEntry) -> None:
        """Answer those calls with `reply`. The claims of late answers are released."""
        for call in [c for c in self._in_flight.values() if c.on_reply is not None and is_due(c)]:
            self._tell(call, reply)

    def _sweep_kept(self, now: float) -> None:
        """Refuse what has waited for a successor for too long, and parts of dequeues as soon as
        others can serve: what those have handed out is not to wait."""
        if self.unsent and not self.returning:
            log.warning("shard-%s is not back; refusing %d calls", self.name, len(self.unsent))
        kept, self.unsent = self.unsent, []
        least = GiveUp.STALLED if self._listener.others_can_serve(self) else GiveUp.SILENT
        for call in kept:
            if self.returning and call.deadline > now and call.give_up >= least:
                self.unsent.append(call)
            else:
                self._finish(call.call_id, _DOWN)


def _ignore(_call: ShardCall, _link: ShardLink, _reply: ReplyEntry) -> None:
    pass
