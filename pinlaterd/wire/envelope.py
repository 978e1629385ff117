"""The messages between a router and a shard: many calls in one ZeroMQ message, and back; and the
shard's end, a ROUTER socket to which all routers connect.

Each message is one of the frames below, as MessagePack. The Thrift bytes within a call or a reply
are the client's own, without transport framing, always TBinaryProtocol; the reply bears the
client's seqid, so it goes back untouched.

    router -> shard   Hello, Calls, GoodbyeAck
    shard -> router   Welcome, Refused, Replies, Pulse, Goodbye

Every Calls names the incarnation it is meant for: ZeroMQ hands what was sent to a dead shard to
its successor, which discards it. Only so may a router, once a shard has gone, send an enqueue
elsewhere without making a job twice.

Deadlines are CLOCK_MONOTONIC seconds of the shard's machine. Over tcp the router converts its own,
by the time that the shard's latest Welcome or Pulse bears. A frame is received after it was sent,
so that a converted deadline is early by the frame's time under way, and never late.

ROUTER_MANDATORY makes a shard's send to a router that has gone, or that does not read, fail at
once, so that what it would have delivered can be taken back.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import msgspec
import zmq

from pinlaterd.model import QueueKey
from pinlaterd.wire.curve import ClusterKey


class Op(IntEnum):
    """The operations that a router asks of a shard, each on the bytes of one entry."""

    CALL = 0  # a Thrift call, as a client sent it or as the router wrote it
    RELEASE = 1  # a dequeue's Thrift reply that could not be delivered: end its claims
    OLDEST_FAILED = 2  # a retryFailedJobs call: answer when its candidates failed, change nothing
    ENSURE_QUEUES = 3  # JSON list of names: create those that are missing
    VALIDATE = 4  # an enqueueJobs call: DONE if it would be accepted, else FAILED; store nothing
    ACK_SCHEDULED = 5  # an ackDequeuedJobs call: claim its jobs first, where they are not due soon
    END_SEARCH = 6  # the id of an earlier call of this router, in digits: nobody waits for it
    FIND_KEYS = 7  # a KeyQuestion: raise the fence, then answer the descriptors, "" for none
    RELEASE_SENT = 8  # RELEASE, but a byte may have left: jobs with one attempt stay claimed


RELEASES = (Op.RELEASE, Op.RELEASE_SENT)
# How often a shard pulses; and how often, to spare the processor, once no router has sent anything
# for so many pulses.
PULSE_SECONDS, QUIET_PULSE_SECONDS, PULSES_UNTIL_QUIET = 0.25, 1.0, 40
# Of a number of bytes in an entry.
NO_BOUND = 0xFFFFFFFF
# Of the custom statuses in a shard's answer to one scan: routers count on it.
SCAN_BYTES = 2 * 1024 * 1024


class Status(IntEnum):
    """The outcome of a call. Shards send the first five; a link itself sets the others."""

    DONE = 0  # the payload is the Thrift reply that bears the result
    FAILED = 1  # the payload is the Thrift reply that bears an exception
    # Nothing was done and nothing will be: another shard may serve. The payload is what to tell a
    # caller whom none serves, UTF-8; empty: nothing in particular.
    REFUSED = 2
    # Nothing was done: it names jobs of other shards, asks for more than one shard, or has keys and
    # was not routed by them.
    FOREIGN = 3
    STALE = 4  # nothing was done: keys were routed by a placement that the shard does not follow
    LOST = 8  # the shard went away with the call in flight: whether it was carried out is unknown
    LATE = 9  # no answer by the deadline: unknown, too
    SILENT = 10  # given up before its deadline, because others can serve: unknown, too


# To look a member of an enum up costs as much as a call (Python 3.11): these are for the job path.
CALL: Final = Op.CALL
DONE: Final = Status.DONE


class CallEntry(NamedTuple):
    call_id: int
    deadline: float
    message: bytes
    op: Op = Op.CALL
    max_jobs: int = -1  # dequeue: take at most so many; -1: what the request says
    lowest_priority: int = 0  # dequeue: take none below it; 0: any
    whole: bool = True  # whether FOREIGN may be the answer; False: the router fanned it out
    most_bytes: int = NO_BOUND  # dequeue: end the answer before it is larger, but not before a job
    placement: int = 0  # of keys: the number of that by which the router chose this shard; 0: none
    router: bytes = b""  # where it came from: not sent, the shard notes it


class GiveUp(IntEnum):
    """The sweeps of silence after which a call is answered without its shard, if others answer."""

    SILENT = 4  # a dequeue: what it claims in vain is released later
    STALLED = 12  # calls that may be repeated
    NEVER = 1 << 30  # an enqueue: only its answer tells whether the jobs are stored


class ShardCall:
    """A call to one shard as its sender keeps it until it is answered; the shard gets a CallEntry.

    Defaults belong to the class, so that a call costs only what it sets."""

    call_id: int = -1  # set by the link that sends it
    size: int = 0  # likewise: of the message, which need not be kept once there is a reply
    op: Op = Op.CALL
    max_jobs: int = -1
    lowest_priority: int = 0
    whole: bool = True
    most_bytes: int = NO_BOUND
    placement: int = 0
    on_reply: OnReply | None = None  # None: not sent, answered or given up
    # Whether it waits for a shard that is returning; others are REFUSED at once.
    patient: bool = True
    # When the reply is SILENT, if others can serve.
    give_up: GiveUp = GiveUp.STALLED
    # How long after the deadline an answer is waited for.
    grace_seconds: float = 0.0

    def __init__(
        self,
        message: bytes,
        deadline: float,
        op: Op = Op.CALL,
        *,
        whole: bool = True,
        patient: bool = True,
        give_up: GiveUp = GiveUp.STALLED,
    ) -> None:
        self.message = message
        self.deadline = deadline
        self.op = op
        self.whole = whole
        self.patient = patient
        self.give_up = give_up


class KeyQuestion(NamedTuple):
    """A question for the jobs that hold keys, on behalf of enqueues under a placement."""

    placement: int
    keys: Sequence[QueueKey]


pack_keys: Callable[[KeyQuestion], bytes] = msgspec.msgpack.Encoder().encode
unpack_keys: Callable[[bytes], KeyQuestion] = msgspec.msgpack.Decoder(KeyQuestion).decode


class ReplyEntry(NamedTuple):
    call_id: int
    status: Status
    payload: bytes = b""
    jobs: int = 0  # dequeue: how many it carries


OnReply = Callable[[Any, Any, ReplyEntry], None]  # with the call, and the link that it was made on


class ReadyCounts(NamedTuple):
    """Jobs of one queue that are ready now, by priority (index 0 is priority 1): hints.

    A count may stop at what the shard holds in memory. An empty tuple: the queue is gone."""

    queue: str
    counts: tuple[int, ...]


class ShardFacts(NamedTuple):
    """The facts with which a shard welcomes a router."""

    queue_name_chars: int
    queues: tuple[str, ...]
    counts: tuple[ReadyCounts, ...]


# --- frames ---------------------------------------------------------------------------------


# What this process speaks, and the oldest that it understands. Hello and Welcome are only ever
# extended at their end, so that processes of any two versions can read each other's versions.
WIRE_VERSION, LEAST_WIRE_VERSION = 3, 3


class _Frame(msgspec.Struct, array_like=True): ...


class Hello(_Frame, tag=1):
    """`queues`: those that the router knows; the shard creates what it lacks of them. `server`,
    `member`: over tcp, the router's server and that one's member node; "" over ipc."""

    queues: frozenset[str]
    version: int = WIRE_VERSION
    least_version: int = LEAST_WIRE_VERSION
    server: str = ""
    member: str = ""


class Calls(_Frame, tag=2):
    incarnation: int
    calls: Sequence[CallEntry]


class Welcome(_Frame, tag=3):
    incarnation: int
    facts: ShardFacts
    version: int = WIRE_VERSION
    least_version: int = LEAST_WIRE_VERSION
    now: float = 0.0  # monotonic


class Replies(_Frame, tag=4):
    """`counts`: of the queues that they touched."""

    incarnation: int
    entries: Sequence[ReplyEntry]
    counts: Sequence[ReadyCounts]


class Pulse(_Frame, tag=5):
    """Sent when either changes, and four times a second."""

    incarnation: int
    counts: Sequence[ReadyCounts]
    degraded: bool = False  # what the shard says of its store
    now: float = 0.0  # monotonic


class Goodbye(_Frame, tag=6):
    """The shard stops in order, or its store is closed: it has answered all that it carried out,
    and will carry out nothing more."""

    incarnation: int


class GoodbyeAck(_Frame, tag=7):
    """The router has its Goodbye, and all that came before."""

    incarnation: int


class Refused(_Frame, tag=8):
    """The shard does not serve this router. `reason` is for its log."""

    reason: str


Frame = Hello | Calls | Welcome | Replies | Pulse | Goodbye | GoodbyeAck | Refused

pack: Callable[[Frame], bytes] = msgspec.msgpack.Encoder().encode
unpack: Callable[[bytes], Frame] = msgspec.msgpack.Decoder(Frame).decode
# What it raises for bytes that no pinlaterd process of this version sends.
MALFORMED: Final = (msgspec.DecodeError, UnicodeDecodeError)


def misunderstanding(frame: Hello | Welcome) -> str:
    """Say why this process and the frame's sender must not go on; return "" if they may."""
    if frame.version >= LEAST_WIRE_VERSION and frame.least_version <= WIRE_VERSION:
        return ""
    return (
        f"it speaks wire version {frame.version} and understands those from {frame.least_version}, "
        f"this process {WIRE_VERSION} and those from {LEAST_WIRE_VERSION}"
    )


def pack_calls(incarnation: int, calls: Iterable[ShardCall], ahead: float = 0.0) -> bytes:
    """Pack calls. `ahead`: by how much the shard's clock is before this one; 0.0: the same."""
    # Plain tuples are packed alike, and a NamedTuple costs three times as much. Of an entry the
    # defaults at the end can be left out.
    entries = [
        (call.call_id, call.deadline, call.message)
        if call.max_jobs < 0 and call.whole and call.op is CALL and not call.placement
        else (
            call.call_id,
            call.deadline,
            call.message,
            call.op,
            call.max_jobs,
            call.lowest_priority,
            call.whole,
            call.most_bytes,
            call.placement,
        )
        for call in calls
    ]
    if ahead:
        entries = [(call_id, at + ahead, *others) for call_id, at, *others in entries]
    return pack(Calls(incarnation, cast("list[CallEntry]", entries)))


# --- the shard's end ------------------------------------------------------------------------


_IPC = "ipc://"
# Messages in transit between a router and a shard; each holds many calls or answers.
HIGH_WATER_MESSAGES = 1000
# How long the answers of a shard that stops are still being sent.
_LINGER_MS = 1000
# How soon a watched descriptor is looked at while frames keep coming: by then a grant is taken up.
_LOOK_SECONDS = 0.01
# Plain numbers: arithmetic with pyzmq's enums costs as much as the calls that take them.
NOBLOCK = int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
READABLE = int(zmq.POLLIN)
_NONE_READABLE: frozenset[int] = frozenset()
_UNREACHABLE = (errno.EHOSTUNREACH, errno.EAGAIN)


class Received(NamedTuple):
    """A frame, and the router that it came from."""

    router: bytes
    frame: bytes


def new_context() -> zmq.Context[zmq.Socket[bytes]]:
    """Make a process's one context; its input/output thread serves any number of peers."""
    return zmq.Context()


class ShardEnd:
    """Takes frames from routers and sends frames to them. Blocking only in `wait`."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.SNDHWM, HIGH_WATER_MESSAGES)
        self._socket.setsockopt(zmq.RCVHWM, HIGH_WATER_MESSAGES)
        self._socket.setsockopt(zmq.LINGER, _LINGER_MS)
        self._endpoint = ""
        self._file: os.stat_result | None = None
        self._look_at = 0.0  # monotonic
        self._readable = False  # as `wait` has just seen
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)

    def bind(self, endpoint: str) -> None:
        """Take calls at `endpoint`. Only the owner of the shard may: a file of that name that a
        predecessor has left is removed."""
        path = _socket_file(endpoint)
        if path is not None:
            path.unlink(missing_ok=True)
        self._socket.bind(endpoint)
        self._endpoint = endpoint
        self._file = path.stat() if path is not None else None

    def listen(self, endpoint: str, key: ClusterKey) -> None:
        """Take calls of other servers, too: of holders of `key`, at the tcp address `endpoint`.

        Raises OSError if it can't be had."""
        key.listen(self._socket, endpoint)

    def bind_again(self) -> None:
        """Take calls at the same endpoint after this process has become the owner again: if another
        one owned the shard meanwhile, the file is that one's, and new routers would not get here.
        Connections stay."""
        path = _socket_file(self._endpoint)
        if path is None or self._is_bound_to(path):
            return
        self._socket.unbind(self._endpoint)
        self.bind(self._endpoint)

    def _is_bound_to(self, path: Path) -> bool:
        try:
            return self._file is not None and os.path.samestat(self._file, path.stat())
        except FileNotFoundError:
            return False

    def watch(self, descriptor: int) -> None:
        """Have `wait` look at `descriptor` too."""
        self._poller.register(descriptor, zmq.POLLIN)

    def forget(self, descriptor: int) -> None:
        self._poller.unregister(descriptor)

    def wait(self, until: Callable[[], float]) -> frozenset[int]:
        """Wait until a frame is there, or a watched descriptor is readable, or `until()` seconds
        have passed.

        Returns the watched descriptors that are readable. While frames keep coming, those are
        looked at only now and then: a look costs as much as taking a call."""
        if time.monotonic() < self._look_at and (
            self._socket.getsockopt(zmq.EVENTS) & READABLE  # type: ignore[operator]
        ):
            self._readable = True
            return _NONE_READABLE
        seconds = until()
        events = self._poller.poll(round(seconds * 1000 + 0.5) if seconds > 0 else 0)
        self._look_at = time.monotonic() + _LOOK_SECONDS
        readable = frozenset([found for found, _ in events if isinstance(found, int)])
        self._readable = len(events) > len(readable)
        return readable

    def receive(self, most_frames: int, most_bytes: int) -> list[Received]:
        """Receive what has arrived, without waiting; stop once either bound is reached."""
        received: list[Received] = []
        size = 0
        socket = self._socket
        readable, self._readable = self._readable, False
        # What was there may go with the connection that it came from.
        with contextlib.suppress(zmq.Again):
            while len(received) < most_frames and size < most_bytes:
                # To ask costs less than the exception of a receive in vain.
                if not (readable or socket.getsockopt(zmq.EVENTS) & READABLE):  # type: ignore[operator]
                    break
                readable = False
                router = socket.recv(NOBLOCK)
                frame = socket.recv(NOBLOCK)
                while socket.getsockopt(zmq.RCVMORE):  # nothing of ours has more parts
                    socket.recv(NOBLOCK)
                received.append(Received(router, frame))
                size += len(frame)
        return received

    def send(self, router: bytes, frame: bytes) -> bool:
        """Send a frame; False if `router`, which has gone or does not read, gets nothing of it."""
        try:
            self._socket.send(router, _MORE)
            self._socket.send(frame, NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno in _UNREACHABLE:
                return False
            raise
        return True

    def close(self) -> None:
        self._socket.close()


def _socket_file(endpoint: str) -> Path | None:
    return Path(endpoint.removeprefix(_IPC)) if endpoint.startswith(_IPC) else None
