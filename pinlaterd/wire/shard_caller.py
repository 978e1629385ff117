"""A shard called by a command: blocking, one call at a time, past the routers.

A command that has to know for sure what became of a call uses this: the shard drops a call that is
past its deadline before it commits anything, so that once the deadline has passed, and the shard
answers others, nothing can happen any more that can't be seen in its store. Relies on
`wire.envelope`; a reply is bytes. The current folder has to stay the deployment's.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import zmq

from pinlaterd.wire import envelope
from pinlaterd.wire.envelope import CallEntry, Kind, MalformedEnvelope, Op, ReplyEntry, Status
from pinlaterd.wire.socket import new_context

# What a late answer may take beyond the deadline: the shard judges it when it takes the call up.
_GRACE_SECONDS = 5.0
_GREET_AGAIN_SECONDS = 0.05
_GREET_WHILE_WAITING_SECONDS = 0.5
_UNAVAILABLE = ReplyEntry(0, Status.REFUSED, b"is down")


class ShardCallers:
    """The shards that a command calls, each once it is asked for."""

    def __init__(self, endpoint_of: Callable[[str], str]) -> None:
        self._endpoint_of = endpoint_of
        self._context = new_context()
        self._callers: dict[str, ShardCaller] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for caller in self._callers.values():
            caller.close()
        self._context.term()

    def __getitem__(self, shard: str) -> ShardCaller:
        caller = self._callers.get(shard)
        if caller is None:
            caller = ShardCaller(shard, self._endpoint_of(shard), self._context)
            self._callers[shard] = caller
        return caller


class ShardCaller:
    """One shard. Each call is answered by its outcome; none raises."""

    def __init__(self, name: str, address: str, context: zmq.Context[Any]) -> None:
        self.name = name
        self._incarnation = 0  # 0: not welcomed
        self._next_call_id = 0
        self._context = context
        self._address = address
        self._socket = self._connect()

    def close(self) -> None:
        self._socket.close(linger=0)

    def call(self, message: bytes, *, seconds: float, op: Op = Op.CALL) -> ReplyEntry:
        """Have the shard do it within `seconds`, or not at all.

        REFUSED: nothing was done. LOST or LATE: nobody knows, until the deadline has passed and
        the shard answers again."""
        deadline = time.monotonic() + seconds
        if not self._greet(deadline):
            return _UNAVAILABLE
        self._next_call_id += 1
        entry = CallEntry(self._next_call_id, deadline, message, op, whole=False)
        frame = envelope.pack_calls(self._incarnation, [entry])
        try:
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            self._start_anew()
            return _UNAVAILABLE
        return self._await_reply(entry.call_id, deadline + _GRACE_SECONDS)

    def _await_reply(self, call_id: int, until: float) -> ReplyEntry:
        incarnation = self._incarnation
        while (now := time.monotonic()) < until:
            frame = self._receive(min(until, now + _GREET_WHILE_WAITING_SECONDS))
            if frame is None:
                # A successor knows nothing of the call, and would leave us waiting for its answer.
                self._send_hello()
                continue
            if frame[0] == Kind.REPLIES and envelope.incarnation_of(frame) == incarnation:
                for reply in envelope.unpack_replies(frame)[1]:
                    if reply.call_id == call_id:
                        return reply
            if self._incarnation != incarnation:
                # It took its store anew, or has ended in order: then it did not do it.
                goodbye = frame[0] == Kind.GOODBYE
                return _UNAVAILABLE if goodbye else ReplyEntry(0, Status.LOST)
        self._start_anew()
        return ReplyEntry(0, Status.LATE)

    def _greet(self, deadline: float) -> bool:
        """Whether it serves; waits for it until `deadline`."""
        while self._incarnation == 0:
            if not self._send_hello():
                if time.monotonic() >= deadline:
                    return False
                time.sleep(_GREET_AGAIN_SECONDS)
                continue
            if self._receive(min(deadline, time.monotonic() + 1.0)) is None:
                self._start_anew()
                if time.monotonic() >= deadline:
                    return False
        return True

    def _send_hello(self) -> bool:
        """False if there is no connection."""
        try:
            self._socket.send(envelope.pack_hello(()), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _receive(self, until: float) -> bytes | None:
        """The next message; None if none came in time. Notes in what state it shows the shard."""
        left_ms = round((until - time.monotonic()) * 1000)
        if not self._socket.poll(max(0, left_ms)):
            return None
        frame = self._socket.recv()
        if not frame:
            raise MalformedEnvelope("empty")
        if frame[0] == Kind.WELCOME:
            self._incarnation = envelope.incarnation_of(frame)
        elif frame[0] == Kind.GOODBYE:
            self._incarnation = 0
            ack = envelope.pack_goodbye_ack(envelope.incarnation_of(frame))
            with contextlib.suppress(zmq.Again):  # it has gone already, and waits for nobody
                self._socket.send(ack, zmq.NOBLOCK)
        return frame

    def _start_anew(self) -> None:
        """What may still come on this connection is for nobody."""
        self._socket.close(linger=0)
        self._incarnation = 0
        self._socket = self._connect()

    def _connect(self) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IMMEDIATE, 1)  # a send that fails was never sent
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.connect(self._address)
        return socket
