"""One client's connection: messages in, answers out in the order of the calls.

It reads no more while it works on as many calls as it may, while its client does not take its
answers, and while the server is short of memory. What a client does to its connection costs no
other one anything. Relies on asyncio (any event loop), `framing`, and Linux' TCP_INFO.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import sys
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, cast

from pinlaterd.errors import InvalidRequest, ProtocolError, address_of
from pinlaterd.lifecycle import ASIDE_BYTES, begin_aside
from pinlaterd.rpc import codec
from pinlaterd.rpc.compact import from_binary, to_binary
from pinlaterd.rpc.framing import FrameReader
from pinlaterd.rpc.interface import pack_u32
from pinlaterd.rpc.peek import read_call_head

if TYPE_CHECKING:
    from pinlaterd.rpc.server import ThriftServer

KIB: Final = 1024

# The transport's own buffer: beyond the first, no more calls are begun, until below the second.
_UNSENT_HIGH_BYTES: Final = 256 * KIB
_UNSENT_LOW_BYTES: Final = 64 * KIB
# No more calls are begun at a time than would fill this, if their answers are as large as the last.
_AHEAD_BYTES: Final = 8 * KIB * KIB
_FIRST_GUESS_BYTES: Final = 256 * KIB
# Answers up to this size are put together with others to be written at once.
_JOIN_BYTES: Final = 16 * KIB
# Calls that come one upon the other are converted from compact on the loop up to this size.
_PIPELINED_BYTES: Final = 512
# A dead peer is found out by TCP after about two minutes of silence.
_KEEPALIVE: Final = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
)
# Closing with unread input sends RST, and an HTTP client would lose our answer: delay the close.
_HTTP_CLOSE_SECONDS: Final = 2.0
_INFO_BYTES: Final = 128  # of struct tcp_info, as far as tcpi_bytes_acked
_BYTES_ACKED: Final = struct.Struct("120xQ").unpack_from
_ENDED: Final = (b"\x07", b"\x08")  # TCP_CLOSE (a reset), TCP_CLOSE_WAIT (an end), by the client
# What may be kept until the next look, before the kernel is asked: that is a system call.
_KEPT_ANSWERS: Final = 64
_KEPT_BYTES: Final = 32 * KIB
# Fewer bytes than this in a whole period are no progress, unless they complete something.
_PROGRESS_BYTES: Final = KIB


class Answer:
    """The answer to one call: `send` it once, at any later time. It takes its place in the line of
    its connection as it is made."""

    oneway: bool = False
    sent: bytes | None = None
    converted: asyncio.Future[bytes] | None = None  # a large one, to compact
    may_wait: bool = False
    # Called if the client goes before all of the answer has arrived: with it, and whether any byte
    # of it may have left.
    on_undelivered: Callable[[bytes, bool], None] | None = None
    is_written: bool = False  # of one with `on_undelivered`
    # Called if the client goes before there is an answer.
    on_gone: Callable[[], object] | None = None

    def __init__(self, connection: Connection, *, oneway: bool) -> None:
        self.connection = connection
        if oneway:
            self.oneway = True
            connection.oneway_calls += 1
        else:
            connection.slots.append(self)

    def expect_wait(self) -> None:
        """Count a call that may wait for long: its connection may have only so many of those."""
        if not self.oneway:
            self.may_wait = True
            self.connection.calls_that_may_wait += 1

    @property
    def client_gone(self) -> bool:
        return self.connection.is_lost()

    @property
    def is_next(self) -> bool:
        """Whether the client has read, but for little, all earlier answers."""
        return self.connection.is_next(self)

    def room(self) -> int:
        """Return how many bytes more may be held back for clients that do not read."""
        return self.connection.server.budget.room()

    def send(self, message: bytes) -> bool:
        """Send a message; False if the client has gone, or the call is oneway."""
        return self.connection.answered(self, message)

    def lost(self) -> None:
        """Tell that the client has gone before all of the answer has arrived."""
        if self.sent is None:
            if self.on_gone is not None:
                self.on_gone()
        elif self.on_undelivered is not None:
            self.on_undelivered(self.sent, self.is_written)


class _Progress:
    """The progress of something: how far it has got, and since when it has got no further."""

    def __init__(self) -> None:
        self.finished = 0
        self.bytes = 0
        self._since = 0.0
        self._reached: tuple[int, int] | None = None

    def idle_seconds(self, now: float, *, expected: bool) -> float:
        """Return since when it got no further, 0 if that is not `expected` of it."""
        reached = self._reached
        if not expected:
            self._reached = None
            return 0.0
        if (
            reached is None
            or self.finished != reached[0]
            or self.bytes - reached[1] >= _PROGRESS_BYTES
        ):
            self._since, self._reached = now, (self.finished, self.bytes)
        return now - self._since


class Connection(asyncio.Protocol):
    """See the module. `gone` once the client has gone or was closed."""

    def __init__(self, server: ThriftServer) -> None:
        self.server = server
        self._transport: asyncio.Transport = cast("asyncio.Transport", None)
        self.reader = FrameReader(server.max_frame_bytes)
        self.slots: deque[Answer] = deque()  # the calls in flight, oldest first
        self._waiting: deque[bytes] = deque()  # messages that are not begun yet
        self._converting_bytes = 0  # of the next call, on its way from compact
        self.oneway_calls = 0  # that have not ended
        self.calls_that_may_wait = 0  # for long, and have no answer yet
        self._deliveries: _Deliveries | None = None
        self._reading = True
        self._pumping = False
        self._ready_bytes = 0  # answers that came while pumping
        self._unsent_high = False
        self._answer_bytes = _FIRST_GUESS_BYTES  # what the next answers are expected to have
        self._held = False  # has to wait until the server has memory for it
        self._last_answer: Answer | None = None  # to a call that is too long
        self._last_message = b""
        self._retiring = False
        self._closing = False
        self._written_bytes = 0
        self._received = _Progress()  # from the client
        self._read = _Progress()  # by the client, of answers
        self.gone = False
        self.peer = "?"
        self.messages_seen: int | None = 0  # by the server's last look, if it was idle
        self.idle_since = 0.0

    # --- what asyncio calls ---------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self.peer = _address(transport.get_extra_info("peername"))
        if not self.server.opened(self):
            self.abort()
            return
        connected: socket.socket = transport.get_extra_info("socket")
        for level, option, value in _KEEPALIVE:
            connected.setsockopt(level, option, value)
        self._deliveries = _Deliveries(connected)
        self._transport.set_write_buffer_limits(_UNSENT_HIGH_BYTES, _UNSENT_LOW_BYTES)

    def data_received(self, data: bytes) -> None:
        if self._closing or self.gone:
            self._read_over(data)
            return
        reader = self.reader
        messages = reader.feed(data)
        self._received.finished += len(messages)
        if len(messages) == 1 and not (
            self.slots
            or self._waiting
            or self._converting_bytes
            or self.oneway_calls
            or self._unsent_high
            or reader.buffer
            or reader.failure is not None
            or self.server.max_calls == 1  # then no more is read as it begins
        ):
            self._begin(messages[0])  # nothing is before or behind it
            return
        self._received.bytes += len(data)
        self._waiting.extend(messages)
        if messages:
            self._pump()
        if reader.buffer or self._waiting:
            self.server.budget.charge(len(data))
        if reader.paused:
            asyncio.get_running_loop().call_soon(self.data_received, b"")
        self._update_reading()
        if reader.failure is not None and not self._closing:
            self._refuse(str(reader.failure), reader.http_answer)

    def pause_writing(self) -> None:
        self._unsent_high = True
        self._update_reading()

    def resume_writing(self) -> None:
        self._unsent_high = False
        self._pump()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.reader.buffer and not (self.gone or self._closing):
            self.server.ended_within_message(self)
        # If we close it ourselves, what the kernel has taken is still on its way.
        undelivered: list[Answer] = []
        if self._deliveries is not None:
            if self.gone or exc is not None or not self._closing:
                undelivered = self._deliveries.undelivered()
            self._deliveries.detach()
        self.gone = True
        slots, self.slots = self.slots, deque()
        self._waiting.clear()
        self.server.closed(self)
        for answer in (*undelivered, *slots):
            answer.lost()

    # --- calls and answers ----------------------------------------------------------------------

    def is_next(self, answer: Answer) -> bool:
        """Return whether the client has read all earlier answers, or none is awaited."""
        if self.gone or self._unsent_high:
            return False
        return answer.oneway or self.slots[0] is answer

    def is_lost(self) -> bool:
        """Tell whether nothing written now could arrive."""
        return self.gone or self._transport.is_closing()

    def answered(self, answer: Answer, message: bytes) -> bool:
        """Take `message`, the answer, which goes out once all earlier ones are. False if the client
        has gone."""
        assert answer.sent is None
        if answer.oneway:
            self.oneway_calls -= 1
            if self._waiting:
                self._pump()
            return False
        if self.gone or self._transport.is_closing():
            return False
        answer.sent = message
        size = len(message)
        if self.reader.compact and size > ASIDE_BYTES:
            answer.converted = begin_aside(from_binary, message)
            answer.converted.add_done_callback(lambda _: self._pump())
        if answer.may_wait:
            self.calls_that_may_wait -= 1
        # Few calls are begun whose answers are large, or a client that reads none could have
        # gigabytes of them made.
        half = self._answer_bytes // 2
        self._answer_bytes = size if size > half else half
        if self._pumping:
            self._ready_bytes += size
        elif self.slots[0] is answer:
            if self._waiting or self._retiring or self._closing or not self._reading:
                self._pump()
            else:
                self._write_answers()
        else:
            self.server.budget.charge(size)
            if self._waiting:  # more may be begun: answers are smaller than expected, say
                self._pump()
        return True

    def _pump(self) -> None:
        """Write what can be written and begin what may be begun, until neither is left."""
        if self._pumping or self.gone:
            return
        self._pumping = True
        try:
            while True:
                self._ready_bytes = 0
                if self.slots and self.slots[0].sent is not None:
                    self._write_answers()
                if not self._waiting or not self._begin_calls():
                    break
        finally:
            self._pumping = False
        if self._retiring and self._is_idle():
            self._closing = True
        if self._closing:
            self._close_if_done()
        elif self._waiting or not self._reading or len(self.slots) >= self.server.max_calls:
            self._update_reading()

    def _is_idle(self) -> bool:
        return not (self.slots or self._waiting or self._converting_bytes or self.reader.buffer)

    def _begin_calls(self) -> bool:
        """Begin the calls that wait, as many as may be in flight; whether there were any."""
        begun = False
        while (
            self._waiting
            and not self._converting_bytes
            and self._ready_bytes < _JOIN_BYTES
            and (calls := len(self.slots) + self.oneway_calls) < self.server.max_calls
            and calls * self._answer_bytes < _AHEAD_BYTES
            and self.calls_that_may_wait < self.server.max_waiting
            and not self._unsent_high
            and not self.gone
        ):
            begun = True
            self._begin(self._waiting.popleft())
        return begun

    def _begin(self, message: bytes) -> None:
        try:
            if self.reader.compact:
                size, most_bytes = len(message), self.server.max_frame_bytes
                if size > (_PIPELINED_BYTES if self._pumping else ASIDE_BYTES):
                    self._converting_bytes = size
                    aside = begin_aside(to_binary, message, most_bytes)
                    aside.add_done_callback(self._begin_converted)
                    self._update_reading()
                    return
                message = to_binary(message, most_bytes)
            self.server.handler(message, self)
        except ProtocolError as error:
            self._refuse(str(error))

    def _begin_converted(self, converted: asyncio.Future[bytes]) -> None:
        self._converting_bytes = 0
        if self.gone or self._closing:
            return
        try:
            self.server.handler(converted.result(), self)
        except ProtocolError as error:
            self._refuse(str(error))
        self._pump()

    def _write_answers(self) -> None:
        """Write the answers that no earlier call keeps waiting, of which there is one at least."""
        slots, reader = self.slots, self.reader
        written = self._written_bytes
        parts: list[bytes] = []
        while slots and (message := slots[0].sent) is not None:
            if reader.compact:
                converted = slots[0].converted
                if converted is not None and not converted.done():
                    break
                message = from_binary(message) if converted is None else converted.result()
            answer = slots.popleft()
            if reader.framed:
                parts.append(pack_u32(len(message)))
                written += 4
            parts.append(message)
            written += len(message)
            if answer.on_undelivered is not None and self._deliveries is not None:
                answer.is_written = True
                self._deliveries.written(written, answer)
        if self._retiring and self._is_idle():
            # This is the last answer: it leaves with the end of the connection, as one segment.
            connected: socket.socket = self._transport.get_extra_info("socket")
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 1)
        size = written - self._written_bytes
        self._written_bytes = written
        if size <= _JOIN_BYTES:
            self._transport.write(b"".join(parts))
        else:
            self._transport.writelines(parts)
        self.server.budget.charge(size)

    # --- reading, or not ------------------------------------------------------------------------

    def _update_reading(self) -> None:
        if self.gone or self._closing:
            return
        calls = len(self.slots)
        limit = self.server.max_calls
        # Once full, half of the calls have to be answered before more are read.
        busy = self._waiting or self._converting_bytes or self.reader.paused
        full = bool(busy) or calls >= (limit if self._reading else max(1, limit // 2))
        wanted = not (full or self._unsent_high or self._held)
        if wanted and not self._reading:
            self._transport.resume_reading()
        elif not wanted and self._reading:
            self._transport.pause_reading()
        self._reading = wanted

    def hold(self, held: bool) -> None:  # noqa: FBT001 - two states, and that is what it is about
        """Pause reading while the server is too short of memory to read from this one."""
        if held != self._held:
            self._held = held
            self._update_reading()

    def messages_if_idle(self) -> int | None:
        """Return how many messages have come, None while a call or an answer is under way."""
        busy = self.slots or self.oneway_calls or self._waiting or self._converting_bytes
        return None if busy or self._transport.get_write_buffer_size() else self._received.finished

    def held_bytes(self) -> int:
        """Count what is kept in memory: unfinished, not begun, answered but not sent."""
        answers = sum(len(answer.sent or b"") for answer in self.slots)
        waiting = sum(map(len, self._waiting))
        written = self._transport.get_write_buffer_size()
        if self._deliveries is not None:
            written = max(written, self._deliveries.held_bytes)
        waiting += self._converting_bytes
        return len(self.reader.buffer) + waiting + answers + written

    # --- ends -------------------------------------------------------------------------------------

    def _refuse(self, reason: str, answer: bytes = b"") -> None:
        """Answer the calls in flight, then close: nothing more can be understood.

        A client of HTTP, which never made a call, gets `answer`. One whose call is too long is told
        so, with the end of the connection, once all of that is read over: it reads nothing before.
        """
        self.server.refused(self, reason)
        if answer:
            self._closing = True
            self._transport.write(answer)
            self._transport.write_eof()
            asyncio.get_running_loop().call_later(_HTTP_CLOSE_SECONDS, self.abort)
            return
        if self.reader.head and not self._waiting:
            with contextlib.suppress(ProtocolError):
                head, _, _ = read_call_head(self.reader.head)
                self._last_answer = Answer(self, oneway=head.oneway)
                self._last_message = codec.encode_error(head, InvalidRequest(reason))
                self._retiring = True
        self.finish()
        self._read_over(b"")

    def _read_over(self, data: bytes) -> None:
        """Read what is left of a call that was too long, and then answer it."""
        if self._last_answer is None or self.gone:
            return
        self._received.bytes += len(data)
        self.reader.feed(data)
        if not self.reader.left:
            answer, self._last_answer = self._last_answer, None
            answer.send(self._last_message)

    def retire(self) -> None:
        """Close with the next answer after which no call is in flight.

        The answer and the end leave as one: a client that looks before it calls again sees it."""
        if self.gone or self._closing or self._retiring:
            return
        self._retiring = True

    def finish(self) -> None:
        """Take no more calls; close once those in flight are answered. Safe to repeat."""
        if self.gone or self._closing:
            return
        self._closing = True
        self._waiting.clear()
        # Reading goes on, into nowhere, so that a client that closes is noticed.
        if not self._reading:
            self._transport.resume_reading()
            self._reading = True
        if not self._pumping:
            self._close_if_done()

    def _close_if_done(self) -> None:
        if not self.slots and not self.gone:
            if self._retiring and self._transport.can_write_eof():
                # Closing alone would throw away what is corked if a call has come in unread.
                self._transport.write_eof()
            self._transport.close()

    def abort(self) -> None:
        """Close at once, whatever is in flight."""
        if not self.gone:
            self.gone = True
            self._transport.abort()

    def look(self) -> None:
        """Let go of answers that have arrived, and of a client that has gone while it is not read
        from: that end the transport does not see."""
        deliveries = self._deliveries
        if deliveries is None or self.gone:
            return
        deliveries.forget_delivered()
        if self.calls_that_may_wait and not self._reading and deliveries.client_has_ended():
            self.abort()

    def stalled(self, now: float, seconds: float) -> str | None:
        """Say why this connection should be closed: what has made no progress for so long."""
        is_unfinished = bool(self.reader.buffer or self.reader.left) and self._reading
        if self._received.idle_seconds(now, expected=is_unfinished) > seconds:
            return f"an unfinished message, and no more of it for {seconds:g} s"
        unsent = self._transport.get_write_buffer_size()
        self._read.bytes = self._written_bytes - unsent
        if self._read.idle_seconds(now, expected=unsent > 0) > seconds:
            return f"{unsent} bytes of answers were not read for {seconds:g} s"
        return None


def _address(peername: Any) -> str:
    if isinstance(peername, tuple) and len(peername) >= 2:
        return address_of(*peername[:2])
    return str(peername or "?")


class _Deliveries:
    """The answers of one connection that were written and may not have arrived, oldest first.

    The end of a connection does not say how far the client has read, but the kernel knows how many
    bytes the client's kernel has acknowledged. An answer counts as delivered once all its bytes are
    acknowledged; where TCP_INFO does not report that, once it is written.
    """

    def __init__(self, connected: socket.socket) -> None:
        # The transport's own descriptor: let go of with `detach`, never closed here.
        self._socket = socket.socket(fileno=connected.fileno())
        self._answers: deque[tuple[int, Answer]] = deque()
        self.held_bytes = 0

    def detach(self) -> None:
        """Let the descriptor go: the connection ends."""
        self._socket.detach()

    def written(self, end: int, answer: Answer) -> None:
        """Note that `answer` was written up to byte `end` of the connection."""
        self._answers.append((end, answer))
        self.held_bytes += len(answer.sent or b"")
        if len(self._answers) > _KEPT_ANSWERS or self.held_bytes > _KEPT_BYTES:
            self.forget_delivered()

    def forget_delivered(self) -> None:
        if not self._answers:
            return
        info = self._info()
        acknowledged = _BYTES_ACKED(info)[0] if len(info) == _INFO_BYTES else sys.maxsize
        while self._answers and self._answers[0][0] <= acknowledged:
            _, answer = self._answers.popleft()
            self.held_bytes -= len(answer.sent or b"")

    def undelivered(self) -> list[Answer]:
        """Return the answers of which a part at least was never acknowledged."""
        self.forget_delivered()
        return [answer for _, answer in self._answers]

    def client_has_ended(self) -> bool:
        """Tell whether the client has closed the connection, also while nothing is read."""
        return self._info()[:1] in _ENDED

    def _info(self) -> bytes:
        return self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
