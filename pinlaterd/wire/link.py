"""The router's end of the wire: one ZeroMQ DEALER to each shard process, raw and non-blocking.

A ShardLink gathers all calls of a loop turn into one message, matches replies to calls, notices
when its shard is gone, frozen or new, and keeps the hints that the shard publishes. It relies on
`wire.envelope` and on asyncio's `add_reader`; it knows nothing of Thrift but that a reply is bytes.

Silence is counted in sweeps of this loop, not in seconds: a router that was stopped itself has
made no sweep meanwhile, and does not take its own pause for that of its shards.

A shard that has gone is expected back for a while (`LinkLimits.return_seconds`). Calls that it
certainly did not carry out wait for its successor meanwhile, if their callers are patient.

ZeroMQ's file descriptor is edge-triggered: it becomes readable once, whatever is to be read.
So after every send and every receive the socket's EVENTS are looked at again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable
from enum import IntEnum
from typing import NamedTuple, Protocol

import zmq
from zmq.utils.monitor import recv_monitor_message

from pinlaterd.clock import Clock
from pinlaterd.wire import envelope
from pinlaterd.wire.envelope import (
    PULSE_SECONDS,
    PULSES_UNTIL_QUIET,
    QUIET_PULSE_SECONDS,
    CallEntry,
    Kind,
    Op,
    ReadyCounts,
    ShardFacts,
    Status,
)

log = logging.getLogger(__name__)

# Sweeps come as often as a shard's pulses. They get rare before the pulses do, so that a shard that
# has become quiet is not taken for a silent one.
_SWEEPS_UNTIL_QUIET = PULSES_UNTIL_QUIET * 3 // 4
_QUIET_SWEEP = 2  # counts for so many in GiveUp
_GREET_AGAIN_SECONDS = 0.05
_RECONNECT_MS = 50
# How long an answer is waited for after its caller was told that it is late.
_FORGET_AFTER_SECONDS = 60.0
_SEND_HIGH_WATER_MESSAGES = 1000
# Plain numbers: arithmetic with pyzmq's enums costs as much as the calls that take them.
_NOBLOCK = int(zmq.NOBLOCK)
_READABLE = int(zmq.POLLIN)
_new = tuple.__new__  # half the cost of calling a NamedTuple, for each call of each client


class Outcome(IntEnum):
    """What became of a call: a shard's Status, or what the link itself knows of it."""

    DONE = Status.DONE
    FAILED = Status.FAILED
    REFUSED = Status.REFUSED
    FOREIGN = Status.FOREIGN
    LOST = 8  # the shard went away with the call in hand: whether it was carried out is unknown
    LATE = 9  # no answer by the deadline: unknown, too
    SILENT = 10  # given up before its deadline, because others can serve: unknown, too


class GiveUp(IntEnum):
    """The sweeps of silence after which a call is answered without its shard, if others answer."""

    SILENT = 4  # a dequeue: what it claims in vain is released later
    STALLED = 12  # calls that may be repeated
    NEVER = 1 << 30  # an enqueue: only its answer tells whether the jobs are stored


# By number: making an IntEnum member from an int costs more than the rest of a reply.
_OUTCOMES = {outcome.value: outcome for outcome in Outcome}


class ShardReply(NamedTuple):
    outcome: Outcome
    payload: bytes = b""
    jobs: int = 0


_DOWN = ShardReply(Outcome.REFUSED, b"is down")
_FULL = ShardReply(Outcome.REFUSED, b"has as many calls in hand as it may have")
_LOST = ShardReply(Outcome.LOST)
_LATE = ShardReply(Outcome.LATE)
_SILENT = ShardReply(Outcome.SILENT)

OnReply = Callable[[ShardReply], None]


class ShardCall(NamedTuple):
    """One call to a shard: a `CallEntry` that has no id yet."""

    deadline: float
    message: bytes
    op: Op = Op.CALL
    max_jobs: int = -1
    lowest_priority: int = 0
    whole: bool = True
    most_bytes: int = envelope.NO_BOUND


class LinkListener(Protocol):
    """Who wants to know what a link hears. Called on the event loop; must not raise."""

    def welcomed(self, link: ShardLink, facts: ShardFacts) -> None:
        """The shard serves (again)."""
        ...

    def counted(self, link: ShardLink, counts: Iterable[ReadyCounts]) -> None:
        """Hints have changed."""
        ...

    def others_can_serve(self, link: ShardLink) -> bool:
        """Whether calls that this link holds up may be given up."""
        ...

    def queues_known(self) -> Iterable[str]:
        """The queues that a shard must have before it serves this router."""
        ...


class LinkLimits(NamedTuple):
    """What a link may hold, and for how long."""

    bytes_in_flight: int  # calls sent or kept, of which no answer has come
    return_seconds: float  # how long a shard that has gone is expected back


class _InFlight(NamedTuple):
    on_reply: OnReply | None  # None: given up at its deadline; a late answer's claims are released
    call: ShardCall
    patient: bool
    give_up: GiveUp


class ShardLink:
    """One shard, as the router reaches it. All methods are called on the event loop."""

    def __init__(
        self,
        name: str,
        address: str,
        context: zmq.Context[zmq.Socket[bytes]],
        listener: LinkListener,
        clock: Clock,
        limits: LinkLimits,
    ) -> None:
        self.name = name
        self.incarnation = 0  # 0: not welcomed on the present connection
        self.facts: ShardFacts | None = None
        self.ailing = False
        self.healthy = False  # whether calls can be expected to be answered
        self.answering = False  # whether it has been heard within about a second
        self.calls_unsent = 0
        self.ready: dict[str, tuple[int, ...]] = {}
        self._listener = listener
        self._clock = clock
        self._max_bytes = limits.bytes_in_flight
        self._return_seconds = limits.return_seconds
        self._expected_until = 0.0  # monotonic; of use while not welcomed
        self._bytes_in_flight = 0
        self._in_flight: dict[int, _InFlight] = {}
        self._outbox: list[CallEntry] = []  # of those in flight, what is not sent yet
        self._kept: deque[_InFlight] = deque()  # for the shard's successor
        self._next_call_id = 0
        self._silent_sweeps = 0
        self._flush_scheduled = False
        self._loop = asyncio.get_running_loop()
        self._swept_at = clock.monotonic()
        self._sweep_seconds = PULSE_SECONDS
        self._unused_sweeps = 0  # since there was a call for it
        self._sweeping = self._loop.call_later(self._sweep_seconds, self._sweep)
        self._socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        # Only onto a finished connection, so that a send that fails was never sent.
        self._socket.setsockopt(zmq.IMMEDIATE, 1)
        self._socket.setsockopt(zmq.SNDHWM, _SEND_HIGH_WATER_MESSAGES)
        # Always as often: to look for a socket that is not there costs next to nothing, and calls
        # wait for a shard that comes back.
        self._socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        )
        self._socket.connect(address)
        self._loop.add_reader(_descriptor(self._socket), self._readable)
        self._loop.add_reader(_descriptor(self._monitor), self._monitor_readable)
        # What came before the descriptors were watched has raised its edge already.
        self._loop.call_soon(self._monitor_readable)
        self._loop.call_soon(self._readable)

    def close(self) -> None:
        """Let go of the shard; calls in hand are LOST."""
        self._loop.remove_reader(_descriptor(self._socket))
        self._loop.remove_reader(_descriptor(self._monitor))
        self._expected_until = 0.0
        self.incarnation = 0
        self._assess()
        self._lose_calls(_LOST)
        self._refuse_kept()
        self._sweeping.cancel()
        self._socket.disable_monitor()
        self._socket.close(linger=0)

    def _assess(self) -> None:
        """After the incarnation or the silence has changed."""
        self.healthy = self.incarnation != 0 and self._silent_sweeps < GiveUp.STALLED
        self.answering = self.incarnation != 0 and self._silent_sweeps < GiveUp.SILENT

    @property
    def returning(self) -> bool:
        """Whether it has gone so short a time ago that it is expected back: calls can wait."""
        return self.incarnation == 0 and self._clock.monotonic() < self._expected_until

    @property
    def calls_in_flight(self) -> int:
        return len(self._in_flight) + len(self._kept)

    def ready_counts(self, queue: str) -> tuple[int, ...]:
        """How many jobs are ready by priority, as last heard: a hint."""
        return self.ready.get(queue, ())

    def call(
        self,
        call: ShardCall,
        on_reply: OnReply,
        *,
        patient: bool = True,
        give_up: GiveUp = GiveUp.STALLED,
    ) -> int | None:
        """Send `call` with all others of this turn; `on_reply` is called once, later or now.

        While the shard is returning, and if it goes without having carried out the call, a
        `patient` one waits for its successor; else the reply is REFUSED. If the shard falls silent
        while others can serve, the reply is SILENT as soon as `give_up` allows. Returns the id
        under which the call was sent, if it was."""
        if self._unused_sweeps:
            self._sweep_often()
        size = len(call.message)
        if self._bytes_in_flight + size > self._max_bytes and self._bytes_in_flight:
            on_reply(_FULL)
            return None
        if self.incarnation == 0:
            if patient and self.returning:
                self._bytes_in_flight += size
                self._kept.append(_InFlight(on_reply, call, patient, give_up))
            else:
                on_reply(_DOWN)
            return None
        self._bytes_in_flight += size
        return self._post(_new(_InFlight, (on_reply, call, patient, give_up)))

    def _post(self, pending: _InFlight) -> int:
        call_id = self._next_call_id
        self._next_call_id = (call_id + 1) & 0xFFFFFFFF
        self._in_flight[call_id] = pending
        self._outbox.append(_new(CallEntry, (call_id, *pending.call)))
        self.calls_unsent += 1
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self._flush)
        return call_id

    def ask(
        self, call: ShardCall, *, patient: bool = True, give_up: GiveUp = GiveUp.STALLED
    ) -> asyncio.Future[ShardReply]:
        """`call`, to be awaited. A reply with claims that nobody awaits any more is released, and a
        search is ended."""
        future: asyncio.Future[ShardReply] = self._loop.create_future()

        def arrived(reply: ShardReply) -> None:
            if not future.cancelled():
                future.set_result(reply)
            elif reply.jobs:
                self.release(reply.payload)

        call_id = self.call(call, arrived, patient=patient, give_up=give_up)

        def ended(future: asyncio.Future[ShardReply]) -> None:
            if future.cancelled() and call_id in self._in_flight:
                message = envelope.pack_call_id(call_id)
                self.call(ShardCall(call.deadline, message, Op.END_SEARCH), lambda _reply: None)

        future.add_done_callback(ended)
        return future

    def release(self, dequeue_reply: bytes) -> None:
        """End the claims in a dequeue's answer that could not be delivered.

        If the shard has gone meanwhile and does not come back soon, they end by their time-out."""
        deadline = self._clock.monotonic() + 60.0
        self.call(ShardCall(deadline, dequeue_reply, Op.RELEASE), lambda _reply: None)

    # --- sending -----------------------------------------------------------------------

    def _flush(self) -> None:
        self._flush_scheduled = False
        entries, self._outbox, self.calls_unsent = self._outbox, [], 0
        if not entries:
            return
        if self.incarnation == 0 or not self._send(envelope.pack_calls(self.incarnation, entries)):
            for entry in entries:
                self._not_carried_out(entry.call_id)

    def _send(self, frame: bytes) -> bool:
        try:
            self._socket.send(frame, _NOBLOCK)
        except zmq.Again:
            return False
        # What came in while we sent raises no new edge on the descriptor.
        if self._socket.getsockopt(zmq.EVENTS) & _READABLE:  # type: ignore[operator]
            self._loop.call_soon(self._readable)
        return True

    # --- receiving ---------------------------------------------------------------------

    def _readable(self) -> None:
        socket = self._socket
        # To ask costs less than the exception of a receive in vain.
        while not socket.closed and socket.getsockopt(zmq.EVENTS) & _READABLE:  # type: ignore[operator]
            frame = socket.recv(_NOBLOCK)
            if self._silent_sweeps:
                self._heard()
            try:
                self._take(frame)
            except envelope.MalformedEnvelope:
                log.error("shard-%s sent a message that cannot be read; ignored", self.name)

    def _heard(self) -> None:
        was_silent = self._silent_sweeps >= GiveUp.SILENT
        self._silent_sweeps = 0
        self._assess()
        if was_silent and self.incarnation:
            log.warning("shard-%s answers again", self.name)
            self._count_all()

    def _count_all(self) -> None:
        """Others came first; now its jobs count again, and those who wait have to hear of them."""
        self._listener.counted(self, [ReadyCounts(*found) for found in self.ready.items()])

    def _take(self, frame: bytes) -> None:
        kind = frame[0] if frame else 0
        if kind == Kind.REPLIES:
            incarnation, entries, counts = envelope.unpack_replies(frame)
            if incarnation != self.incarnation:
                return  # from before the connection was lost; its calls have been given up
            # Counts first: whoever acts on a reply acts on the hints that came with it.
            self._count(counts)
            for call_id, status, payload, jobs in entries:
                self._finish(call_id, _new(ShardReply, (_OUTCOMES[status], payload, jobs)))
            return
        if kind == Kind.WELCOME:
            self._welcome(envelope.incarnation_of(frame), envelope.unpack_welcome(frame))
            return
        if kind == Kind.GOODBYE:
            # Also where it never served us: it waits to be heard.
            self._send(envelope.pack_goodbye_ack(envelope.incarnation_of(frame)))
        if envelope.incarnation_of(frame) != self.incarnation:
            return
        if kind == Kind.PULSE:
            counts, ails = envelope.unpack_pulse(frame)
            if ails != self.ailing:
                self.ailing = ails
                log.warning("shard-%s %s", self.name, "ails" if ails else "is well again")
                self._count_all()
            self._count(counts)
        elif kind == Kind.GOODBYE:
            self._take_goodbye()

    def _welcome(self, incarnation: int, facts: ShardFacts) -> None:
        if self.incarnation:
            # A successor; or the same one, which could not tell us all that it had to say.
            self._lose_calls(_LOST)
        self.incarnation = incarnation
        self._assess()
        self.facts = facts
        self.ready = dict(facts.counts)
        log.info("shard-%s serves (incarnation %d)", self.name, incarnation)
        # First of all: this creates the queues that the shard lacks.
        self._listener.welcomed(self, facts)
        kept, self._kept = self._kept, deque()
        for pending in kept:
            self._post(pending)

    def _take_goodbye(self) -> None:
        """The shard ends in order, or its store is closed: what it has not answered by now it will
        never carry out."""
        log.info("shard-%s does not serve for now; waiting for it to come back", self.name)
        self._part(None)

    def _part(self, reply: ShardReply | None) -> None:
        """Not welcomed any more: `reply` is the answer to all calls that were sent, None if they
        were not carried out."""
        self.incarnation = 0
        self._assess()
        self._expected_until = self._clock.monotonic() + self._return_seconds
        self.ailing = False
        self.ready = {}
        self._lose_calls(reply)

    def _count(self, counts: list[ReadyCounts]) -> None:
        if not counts:
            return
        for queue, numbers in counts:
            if numbers:
                self.ready[queue] = numbers
            else:
                self.ready.pop(queue, None)
        self._listener.counted(self, counts)

    def _finish(self, call_id: int, reply: ShardReply) -> None:
        call = self._in_flight.pop(call_id, None)
        if call is None:
            return
        self._bytes_in_flight -= len(call.call.message)
        if call.on_reply is not None:
            call.on_reply(reply)
        elif reply.jobs:
            self.release(reply.payload)

    def _not_carried_out(self, call_id: int) -> None:
        """The shard has gone, or can't be reached: keep the call for its successor, or refuse."""
        pending = self._in_flight.get(call_id)
        if pending is None:
            return
        if pending.patient and pending.on_reply is not None and self.returning:
            del self._in_flight[call_id]
            self._kept.append(pending)
        else:
            self._finish(call_id, _DOWN)

    def _refuse_kept(self) -> None:
        kept, self._kept = self._kept, deque()
        for pending in kept:
            self._refuse(pending)

    def _refuse(self, pending: _InFlight) -> None:
        self._bytes_in_flight -= len(pending.call.message)
        if pending.on_reply is not None:
            pending.on_reply(_DOWN)

    # --- what goes wrong ---------------------------------------------------------------

    def _monitor_readable(self) -> None:
        while not self._socket.closed:
            try:
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"]
            except zmq.Again:
                return
            if event == zmq.EVENT_DISCONNECTED:
                if self.incarnation:
                    log.warning("shard-%s has gone; waiting for it to come back", self.name)
                    self._part(_LOST)
            else:
                self._greet()

    def _greet(self) -> None:
        """Greet until it is sent: the handshake is reported a moment before sends go through."""
        if self._socket.closed or self.incarnation:
            return
        if not self._send(envelope.pack_hello(self._listener.queues_known())):
            self._loop.call_later(_GREET_AGAIN_SECONDS, self._greet)

    def _lose_calls(self, reply: ShardReply | None) -> None:
        """What was handed to ZeroMQ is answered with `reply`: LOST if it may have been carried out,
        None if it was not. What is still in the outbox was not."""
        unsent, self._outbox, self.calls_unsent = self._outbox, [], 0
        for entry in unsent:
            self._not_carried_out(entry.call_id)
        for call_id in list(self._in_flight):
            if reply is None:
                self._not_carried_out(call_id)
            else:
                self._finish(call_id, reply)

    def _sweep(self) -> None:
        """Give up calls past their deadline, and those that a silent shard holds up; forget those
        whose late answers will not come."""
        now, waited = self._clock.monotonic(), self._sweep_seconds
        # After a pause of this process answers may be there that have not been read yet.
        judged_until = min(now, self._swept_at + 2 * waited)
        self._swept_at = now
        self._unused_sweeps += 1
        if self._unused_sweeps >= _SWEEPS_UNTIL_QUIET:
            self._sweep_seconds = QUIET_PULSE_SECONDS
        self._sweeping = self._loop.call_later(self._sweep_seconds, self._sweep)
        self._sweep_kept(now)
        for call_id, pending in list(self._in_flight.items()):
            if pending.call.deadline + _FORGET_AFTER_SECONDS <= now:
                self._finish(call_id, _LATE)
        self._give_up(lambda pending: pending.call.deadline <= judged_until, _LATE)
        self._silent_sweeps += 1 if waited == PULSE_SECONDS else _QUIET_SWEEP
        self._assess()
        if self._silent_sweeps < GiveUp.SILENT or not self.incarnation:
            return
        if self._silent_sweeps == GiveUp.SILENT:
            log.warning("shard-%s does not answer; others come first", self.name)
        if self._in_flight and self._listener.others_can_serve(self):
            self._give_up(lambda pending: pending.give_up <= self._silent_sweeps, _SILENT)

    def _sweep_often(self) -> None:
        """There is a call for the shard, which pulses often from its receipt on."""
        self._unused_sweeps = 0
        if self._sweep_seconds != PULSE_SECONDS:
            self._sweep_seconds = PULSE_SECONDS
            self._sweeping.cancel()
            self._sweeping = self._loop.call_later(PULSE_SECONDS, self._sweep)

    def _give_up(self, is_due: Callable[[_InFlight], bool], reply: ShardReply) -> None:
        """Answer those calls with `reply`. The claims of late answers are released."""
        due = [
            (call_id, pending)
            for call_id, pending in self._in_flight.items()
            if pending.on_reply is not None and is_due(pending)
        ]
        for call_id, pending in due:
            self._in_flight[call_id] = pending._replace(on_reply=None)
        for _, pending in due:
            assert pending.on_reply is not None
            pending.on_reply(reply)

    def _sweep_kept(self, now: float) -> None:
        if not self._kept:
            return
        if not self.returning:
            log.warning("shard-%s is not back; refusing %d calls", self.name, len(self._kept))
            self._refuse_kept()
            return
        kept, self._kept = self._kept, deque()
        for pending in kept:
            if pending.call.deadline > now:
                self._kept.append(pending)
            else:
                self._refuse(pending)


def _descriptor(socket: zmq.Socket[bytes]) -> int:
    return int(socket.getsockopt(zmq.FD))
