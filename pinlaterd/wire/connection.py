"""A link's connection to where its shard's owner is: one ZeroMQ DEALER at a time, non-blocking.

Over tcp it proves that it holds the cluster's key. ZeroMQ's file descriptor is edge-triggered; it
becomes readable once, whatever is to be read. So after every send and every receive the socket's
EVENTS are looked at again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import zmq
from zmq.utils.monitor import recv_monitor_message

from pinlaterd.wire.curve import ClusterKey
from pinlaterd.wire.envelope import HIGH_WATER_MESSAGES, MALFORMED, NOBLOCK, READABLE

log = logging.getLogger(__name__)

_GREET_AGAIN_SECONDS = 0.05
_RECONNECT_MS = 50
_LAST_WORD_MS = 1000  # for what was sent, on a connection that is left
_TCP = "tcp://"
_HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | _HANDSHAKE_FAILED


class LinkConnection:
    """Connects again by itself. All methods are called on the event loop."""

    def __init__(
        self,
        shard: str,
        endpoint: str,
        context: zmq.Context[zmq.Socket[bytes]],
        key: ClusterKey | None,
        hello: Callable[[], bytes],
        on_frame: Callable[[bytes], None],
        on_end: Callable[[], None],
    ) -> None:
        """`hello`: what to send on each new connection; b"" if it is not wanted any more."""
        self._shard = shard
        self.endpoint = endpoint
        self._context = context
        self._key = key
        self._hello = hello
        self._on_frame = on_frame
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._greeting: asyncio.TimerHandle | None = None
        self.complaint = ""  # the last that was logged, until the link is served
        self._open()

    def _open(self) -> None:
        self._handshake_failed = False
        self._socket = socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        # Only onto a finished connection, so that a send that fails was never sent.
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MESSAGES)
        # Always as often: to look for a socket that is not there costs next to nothing, and calls
        # wait for a shard that comes back.
        socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        if self.is_remote:
            assert self._key is not None
            self._key.call(socket)
        self._monitor = socket.get_monitor_socket(_EVENTS)
        if self.endpoint:
            socket.connect(self.endpoint)
        self._loop.add_reader(_descriptor(socket), self._readable)
        self._loop.add_reader(_descriptor(self._monitor), self._monitor_readable)
        # What came before the descriptors were watched has raised its edge already.
        self._loop.call_soon(self._monitor_readable)
        self._loop.call_soon(self._readable)

    @property
    def is_remote(self) -> bool:
        return self.endpoint.startswith(_TCP)

    def close(self, *, linger_ms: int = 0) -> None:
        if self._socket.closed:
            return
        self._loop.remove_reader(_descriptor(self._socket))
        self._loop.remove_reader(_descriptor(self._monitor))
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=linger_ms)

    def move(self, endpoint: str) -> None:
        """Go elsewhere. Nothing more is heard from here."""
        log.info("shard-%s: its owner is at %s", self._shard, endpoint)
        self.close(linger_ms=_LAST_WORD_MS)
        self.endpoint = endpoint
        self._open()

    def send(self, frame: bytes) -> bool:
        """Send a frame; False if there is no connection: nothing was sent."""
        try:
            self._socket.send(frame, NOBLOCK)
        except zmq.Again:
            return False
        # What came in while we sent raises no new edge on the descriptor.
        if self._socket.getsockopt(zmq.EVENTS) & READABLE:  # type: ignore[operator]
            self._loop.call_soon(self._readable)
        return True

    def greet(self) -> None:
        """Greet until it is sent: the handshake is reported a moment before sends go through."""
        if self._greeting is not None:
            # Of two greetings, the second Welcome would mean that the link has missed a message.
            self._greeting.cancel()
        hello = b"" if self._socket.closed else self._hello()
        if hello and not self.send(hello):
            self.greet_in(_GREET_AGAIN_SECONDS)

    def greet_in(self, seconds: float) -> None:
        if self._greeting is not None:
            self._greeting.cancel()
        self._greeting = self._loop.call_later(seconds, self.greet)

    def retry_handshake(self) -> None:
        """Connect again: libzmq does not try by itself where it found another protocol."""
        if self._handshake_failed:
            self.close()
            self._open()

    def complain(self, of: str) -> None:
        """Log what keeps the link from being served, once."""
        if of != self.complaint:
            self.complaint = of
            log.warning("shard-%s at %s %s", self._shard, self.endpoint, of)

    def _readable(self) -> None:
        socket = self._socket
        # A call in vain is rare, so that the first receive needs no question before it. To ask
        # costs less than the exception of another one.
        while not socket.closed:
            try:
                frame = socket.recv(NOBLOCK)
            except zmq.Again:
                return
            try:
                self._on_frame(frame)
            except MALFORMED:
                log.error("shard-%s sent a message that cannot be read; ignored", self._shard)
            if socket.closed or not socket.getsockopt(zmq.EVENTS) & READABLE:  # type: ignore[operator]
                return

    def _monitor_readable(self) -> None:
        while not self._socket.closed:
            try:
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)["event"]
            except zmq.Again:
                return
            if event == zmq.EVENT_DISCONNECTED:
                self._on_end()
            elif event & _HANDSHAKE_FAILED:
                self.complain("does not finish the handshake: is it frozen, or is its key another?")
                self._handshake_failed = True
            else:
                self.greet()


def _descriptor(socket: zmq.Socket[bytes]) -> int:
    return int(socket.getsockopt(zmq.FD))
