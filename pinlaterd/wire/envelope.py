"""What travels between a router and a shard: many calls in one ZeroMQ message, and back.

Pure: bytes to tuples and back. A message is one frame: a kind byte, a header, then its entries.
The Thrift bytes within an entry are the client's own, without transport framing, always
TBinaryProtocol; the reply bears the client's seqid, so it goes back untouched.

    router -> shard   HELLO      JSON {names: the queues that the router knows}
                      CALLS      incarnation, then entries (CallEntry)
                      GOODBYE_ACK   incarnation: has its GOODBYE, and all that came before
    shard -> router   WELCOME    incarnation, JSON ShardFacts
                      REPLIES    incarnation, entries (ReplyEntry), then counts (ReadyCounts)
                      PULSE      incarnation, whether it is degraded, counts: sent when either
                                 changes, and four times a second
                      GOODBYE    incarnation: it stops in order, or its store is closed; it has
                                 answered all that it carried out, and will carry out nothing more

Every CALLS names the incarnation it is meant for: ZeroMQ hands what was sent to a dead shard to
its successor, which discards it. Only so may a router, once a shard has gone, send an enqueue
elsewhere without making a job twice. Deadlines are CLOCK_MONOTONIC seconds: one machine, one scale.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import NamedTuple


class Kind(IntEnum):
    HELLO = 1
    CALLS = 2
    WELCOME = 3
    REPLIES = 4
    PULSE = 5
    GOODBYE = 6
    GOODBYE_ACK = 7


class Op(IntEnum):
    """What a shard is asked to do with an entry's bytes."""

    CALL = 0  # a Thrift call, as a client sent it or as the router wrote it
    RELEASE = 1  # a dequeue's Thrift reply that could not be delivered: end its claims
    OLDEST_FAILED = 2  # a retryFailedJobs call: answer when its candidates failed, change nothing
    ENSURE_QUEUES = 3  # JSON list of names: create those that are missing
    VALIDATE = 4  # an enqueueJobs call: DONE if it would be accepted, else FAILED; store nothing
    ACK_SCHEDULED = 5  # an ackDequeuedJobs call: claim its jobs first, where they are not due soon
    END_SEARCH = 6  # the id of an earlier call of this router: nobody waits for its answer


# How often a shard pulses; and how often, to spare the processor, once no router has sent anything
# for so many pulses.
PULSE_SECONDS, QUIET_PULSE_SECONDS, PULSES_UNTIL_QUIET = 0.25, 1.0, 40
# Of a number of bytes in an entry.
NO_BOUND = 0xFFFFFFFF
# Of the custom statuses in a shard's answer to one scan: routers count on it.
SCAN_BYTES = 2 * 1024 * 1024

# By number: calling the enum costs more than the rest of an entry.
_OPS = tuple(Op)


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


class CallEntry(NamedTuple):
    call_id: int
    deadline: float
    message: bytes
    op: Op = Op.CALL
    max_jobs: int = -1  # dequeue: take at most so many; -1: what the request says
    lowest_priority: int = 0  # dequeue: take none below it; 0: any
    whole: bool = True  # whether FOREIGN may be the answer; False: the router fanned it out
    most_bytes: int = NO_BOUND  # dequeue: end the answer before it is larger, but not before a job


class GiveUp(IntEnum):
    """The sweeps of silence after which a call is answered without its shard, if others answer."""

    SILENT = 4  # a dequeue: what it claims in vain is released later
    STALLED = 12  # calls that may be repeated
    NEVER = 1 << 30  # an enqueue: only its answer tells whether the jobs are stored


class ShardCall:
    """A call to one shard as its sender keeps it until it is answered; the shard gets a CallEntry.

    Defaults belong to the class, so that a call costs only what it sets."""

    call_id: int = -1  # set by the link that sends it
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


OnReply = Callable[[ReplyEntry], None]
_STATUSES = (Status.DONE, Status.FAILED, Status.REFUSED, Status.FOREIGN)


class ReadyCounts(NamedTuple):
    """Jobs of one queue that are ready now, by priority (index 0 is priority 1): hints.

    A count may stop at what the shard holds in memory. An empty tuple: the queue is gone."""

    queue: str
    counts: tuple[int, ...]


class ShardFacts(NamedTuple):
    """What a shard says of itself to a router that greets it."""

    shard: str
    priorities: int
    queue_name_chars: int
    queues: tuple[str, ...]
    counts: tuple[ReadyCounts, ...]


class MalformedEnvelope(Exception):
    """Bytes that no pinlaterd process of this version sends."""


_new = tuple.__new__  # half the cost of calling a NamedTuple, for each call of each client
_HEAD = struct.Struct(">BQI")  # kind, incarnation, entries
# call id, deadline, op, max jobs, lowest priority, whole, most bytes, length
_CALL = struct.Struct(">IdBiBBII")
_REPLY = struct.Struct(">IBII")  # call id, status, jobs, length
_CALL_ID = struct.Struct(">I")
_COUNTS = struct.Struct(">BB")  # length of the name, how many priorities


def pack_hello(names: Iterable[str]) -> bytes:
    return bytes((Kind.HELLO,)) + json.dumps({"names": sorted(names)}).encode()


def unpack_hello(frame: bytes) -> frozenset[str]:
    try:
        return frozenset(str(name) for name in json.loads(frame[1:])["names"])
    except (ValueError, KeyError, TypeError) as error:
        raise MalformedEnvelope("hello") from error


def pack_calls(incarnation: int, calls: Sequence[ShardCall | CallEntry]) -> bytes:
    parts = [_HEAD.pack(Kind.CALLS, incarnation, len(calls))]
    for call in calls:
        message = call.message
        head = _CALL.pack(
            call.call_id,
            call.deadline,
            call.op,
            call.max_jobs,
            call.lowest_priority,
            call.whole,
            call.most_bytes,
            len(message),
        )
        parts += (head, message)
    return b"".join(parts)


def incarnation_of(frame: bytes) -> int:
    try:
        return int(_HEAD.unpack_from(frame)[1])
    except struct.error as error:
        raise MalformedEnvelope("header") from error


def unpack_calls(frame: bytes) -> tuple[int, list[CallEntry]]:
    """The incarnation that is called, and the calls."""
    entries = []
    try:
        _, incarnation, count = _HEAD.unpack_from(frame)
        at = _HEAD.size
        for _ in range(count):
            call_id, deadline, op, max_jobs, lowest, whole, most_bytes, length = _CALL.unpack_from(
                frame, at
            )
            at += _CALL.size
            message = frame[at : at + length]
            at += length
            fields = (
                call_id,
                deadline,
                message,
                _OPS[op],
                max_jobs,
                lowest,
                bool(whole),
                most_bytes,
            )
            entries.append(_new(CallEntry, fields))
    except (struct.error, IndexError) as error:
        raise MalformedEnvelope("calls") from error
    if at != len(frame):
        raise MalformedEnvelope("calls")
    return incarnation, entries


def pack_welcome(incarnation: int, facts: ShardFacts) -> bytes:
    return _HEAD.pack(Kind.WELCOME, incarnation, 0) + json.dumps(facts).encode()


def unpack_welcome(frame: bytes) -> ShardFacts:
    try:
        shard, priorities, name_chars, queues, counts = json.loads(frame[_HEAD.size :])
        return ShardFacts(
            shard,
            priorities,
            name_chars,
            tuple(queues),
            tuple(ReadyCounts(queue, tuple(numbers)) for queue, numbers in counts),
        )
    except (ValueError, TypeError) as error:
        raise MalformedEnvelope("welcome") from error


def pack_call_id(call_id: int) -> bytes:
    return _CALL_ID.pack(call_id)


def unpack_call_id(message: bytes) -> int:
    try:
        (call_id,) = _CALL_ID.unpack(message)
    except struct.error as error:
        raise MalformedEnvelope("call id") from error
    return int(call_id)


def pack_replies(
    incarnation: int, entries: Sequence[ReplyEntry], counts: Iterable[ReadyCounts]
) -> bytes:
    parts = [_HEAD.pack(Kind.REPLIES, incarnation, len(entries))]
    for call_id, status, payload, jobs in entries:
        parts.append(_REPLY.pack(call_id, status, jobs, len(payload)))
        parts.append(payload)
    _append_counts(parts, counts)
    return b"".join(parts)


def unpack_replies(frame: bytes) -> tuple[int, list[ReplyEntry], list[ReadyCounts]]:
    """The incarnation that replied, its replies, and its counts."""
    entries = []
    try:
        _, incarnation, count = _HEAD.unpack_from(frame)
        at = _HEAD.size
        for _ in range(count):
            call_id, status, jobs, length = _REPLY.unpack_from(frame, at)
            at += _REPLY.size
            fields = (call_id, _STATUSES[status], frame[at : at + length], jobs)
            entries.append(_new(ReplyEntry, fields))
            at += length
        return incarnation, entries, _read_counts(frame, at)
    except (struct.error, ValueError, IndexError) as error:
        raise MalformedEnvelope("replies") from error


def pack_pulse(incarnation: int, counts: Iterable[ReadyCounts], *, degraded: bool = False) -> bytes:
    parts = [_HEAD.pack(Kind.PULSE, incarnation, degraded)]
    _append_counts(parts, counts)
    return b"".join(parts)


def pack_goodbye(incarnation: int) -> bytes:
    return _HEAD.pack(Kind.GOODBYE, incarnation, 0)


def pack_goodbye_ack(incarnation: int) -> bytes:
    return _HEAD.pack(Kind.GOODBYE_ACK, incarnation, 0)


def unpack_pulse(frame: bytes) -> tuple[list[ReadyCounts], bool]:
    """The counts, and whether the shard is degraded."""
    try:
        return _read_counts(frame, _HEAD.size), bool(_HEAD.unpack_from(frame)[2])
    except (struct.error, ValueError, IndexError) as error:
        raise MalformedEnvelope("pulse") from error


def _append_counts(parts: list[bytes], counts: Iterable[ReadyCounts]) -> None:
    for queue, numbers in counts:
        name = queue.encode()
        parts.append(_COUNTS.pack(len(name), len(numbers)))
        parts.append(name)
        parts.append(struct.pack(f">{len(numbers)}I", *numbers))


def _read_counts(frame: bytes, at: int) -> list[ReadyCounts]:
    counts = []
    while at < len(frame):
        name_length, levels = _COUNTS.unpack_from(frame, at)
        at += _COUNTS.size
        queue = frame[at : at + name_length].decode()
        at += name_length
        numbers = struct.unpack_from(f">{levels}I", frame, at)
        counts.append(_new(ReadyCounts, (queue, numbers)))
        at += 4 * levels
    return counts
