"""What travels between a router and a shard: many calls in one ZeroMQ message, and back.

Each message is one of the frames below, as MessagePack. The Thrift bytes within a call or a reply
are the client's own, without transport framing, always TBinaryProtocol; the reply bears the
client's seqid, so it goes back untouched.

    router -> shard   Hello, Calls, GoodbyeAck
    shard -> router   Welcome, Replies, Pulse, Goodbye

Every Calls names the incarnation it is meant for: ZeroMQ hands what was sent to a dead shard to
its successor, which discards it. Only so may a router, once a shard has gone, send an enqueue
elsewhere without making a job twice. Deadlines are CLOCK_MONOTONIC seconds: one machine, one scale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import Any, Final, NamedTuple, cast

import msgspec


class Op(IntEnum):
    """What a shard is asked to do with an entry's bytes."""

    CALL = 0  # a Thrift call, as a client sent it or as the router wrote it
    RELEASE = 1  # a dequeue's Thrift reply that could not be delivered: end its claims
    OLDEST_FAILED = 2  # a retryFailedJobs call: answer when its candidates failed, change nothing
    ENSURE_QUEUES = 3  # JSON list of names: create those that are missing
    VALIDATE = 4  # an enqueueJobs call: DONE if it would be accepted, else FAILED; store nothing
    ACK_SCHEDULED = 5  # an ackDequeuedJobs call: claim its jobs first, where they are not due soon
    END_SEARCH = 6  # the id of an earlier call of this router, in digits: nobody waits for it


# How often a shard pulses; and how often, to spare the processor, once no router has sent anything
# for so many pulses.
PULSE_SECONDS, QUIET_PULSE_SECONDS, PULSES_UNTIL_QUIET = 0.25, 1.0, 40
# Of a number of bytes in an entry.
NO_BOUND = 0xFFFFFFFF
# Of the custom statuses in a shard's answer to one scan: routers count on it.
SCAN_BYTES = 2 * 1024 * 1024


class Status(IntEnum):
    """What became of a call. Shards say the first four; the others are what a link knows itself."""

    DONE = 0  # the payload is the Thrift reply that bears the result
    FAILED = 1  # the payload is the Thrift reply that bears an exception
    # Nothing was done and nothing will be: another shard may serve. The payload is what to tell a
    # caller whom none serves, UTF-8; empty: nothing in particular.
    REFUSED = 2
    FOREIGN = 3  # nothing was done: it names jobs of other shards, or asks for more than one shard
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
    """What a shard says of itself to a router that greets it."""

    queue_name_chars: int
    queues: tuple[str, ...]
    counts: tuple[ReadyCounts, ...]


# --- frames ---------------------------------------------------------------------------------


class _Frame(msgspec.Struct, array_like=True): ...


class Hello(_Frame, tag=1):
    """`queues`: those that the router knows; the shard creates what it lacks of them."""

    queues: frozenset[str]


class Calls(_Frame, tag=2):
    incarnation: int
    calls: Sequence[CallEntry]


class Welcome(_Frame, tag=3):
    incarnation: int
    facts: ShardFacts


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


class Goodbye(_Frame, tag=6):
    """The shard stops in order, or its store is closed: it has answered all that it carried out,
    and will carry out nothing more."""

    incarnation: int


class GoodbyeAck(_Frame, tag=7):
    """The router has its Goodbye, and all that came before."""

    incarnation: int


Frame = Hello | Calls | Welcome | Replies | Pulse | Goodbye | GoodbyeAck

pack: Callable[[Frame], bytes] = msgspec.msgpack.Encoder().encode
unpack: Callable[[bytes], Frame] = msgspec.msgpack.Decoder(Frame).decode
# What it raises for bytes that no pinlaterd process of this version sends.
MALFORMED: Final = (msgspec.DecodeError, UnicodeDecodeError)


def pack_calls(incarnation: int, calls: Iterable[ShardCall]) -> bytes:
    # Plain tuples are packed alike, and a NamedTuple costs three times as much. Of an entry the
    # defaults at the end can be left out.
    entries = [
        (call.call_id, call.deadline, call.message)
        if call.max_jobs < 0 and call.whole and call.op is CALL
        else (
            call.call_id,
            call.deadline,
            call.message,
            call.op,
            call.max_jobs,
            call.lowest_priority,
            call.whole,
            call.most_bytes,
        )
        for call in calls
    ]
    return pack(Calls(incarnation, cast("list[CallEntry]", entries)))
