"""Thrift frames encoded before the clock starts, and what a load generator reads of the replies.

A load generator must cost little: an enqueue is the same frame again and again, and a dequeue
with acks is joined from bytes, with the descriptors cut out of the last reply by one regular
expression instead of being decoded.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Sequence
from random import Random
from typing import Protocol

from pinlaterd.model import (
    AckInfo,
    AckRequest,
    CallContext,
    DequeueRequest,
    EnqueueRequest,
    Job,
    Method,
    Request,
)
from pinlaterd.rpc import codec

BODY_BYTES = 200

_LENGTH = struct.Struct(">I")
_STRING = b"\x0b\x00\x01"  # the head of field 1, a string
_CONTEXT = CallContext("bench:load")
_RESULT_FIELD = b"\x00\x00"  # the field of a result that holds the answer; exceptions have 1


def framed(message: bytes) -> bytes:
    return _LENGTH.pack(len(message)) + message


def call_frame(method: Method, request: Request) -> bytes:
    return framed(codec.encode_call(method, 1, _CONTEXT, request))


def body(size: int = BODY_BYTES) -> bytes:
    """No descriptor may be found in it."""
    return (b"0123456789abcdef" * (size // 16 + 1))[:size]


def _result_field(method: Method) -> slice:
    """Where a reply says whether it is the answer or an exception: the id of its first field."""
    at = 4 + 4 + 4 + len(method) + 4 + 1  # lengths and version, name, seqid, the field's type
    return slice(at, at + len(_RESULT_FIELD))


class Script(Protocol):
    """What one connection says: one call at a time, the next made from the last reply."""

    def first(self) -> bytes: ...

    def following(self, reply: bytes) -> bytes: ...

    def jobs(self, reply: bytes) -> int:
        """How many jobs that reply stands for; -1 if it is not the answer hoped for."""
        ...


class SameCall:
    """One frame, again and again. Any reply that is no exception is worth `jobs_per_call`."""

    def __init__(self, method: Method, request: Request, jobs_per_call: int) -> None:
        self._frame = call_frame(method, request)
        self._jobs = jobs_per_call
        self._field = _result_field(method)

    def first(self) -> bytes:
        return self._frame

    def following(self, reply: bytes) -> bytes:
        return self._frame

    def jobs(self, reply: bytes) -> int:
        return self._jobs if reply[self._field] == _RESULT_FIELD else -1


def enqueue(queue: str, jobs_per_call: int, body_bytes: int = BODY_BYTES) -> SameCall:
    jobs = [Job(body(body_bytes))] * jobs_per_call
    return SameCall(Method.ENQUEUE, EnqueueRequest(queue, jobs), jobs_per_call)


class InTurn:
    """A call for each of the queues queueFIRST, …, again and again; with `chance` from any of them
    on. Encoded as it goes: not for loads near saturation."""

    def __init__(
        self,
        method: Method,
        request: Callable[[str], Request],
        first: int,
        queues: int,
        chance: Random | None = None,
    ) -> None:
        self._method = method
        self._request = request
        self._numbers = range(first, queues)
        self._next = chance.randrange(len(self._numbers)) if chance else 0
        self._field = _result_field(method)

    def first(self) -> bytes:
        number = self._numbers[self._next % len(self._numbers)]
        self._next += 1
        return call_frame(self._method, self._request(f"queue{number}"))

    def following(self, reply: bytes) -> bytes:
        return self.first()

    def jobs(self, reply: bytes) -> int:
        return 1 if reply[self._field] == _RESULT_FIELD else -1


class DequeueWithAcks:
    """Dequeues up to `limit` jobs, and acks those of the last reply in the same call."""

    def __init__(self, queue: str, limit: int) -> None:
        self._field = _result_field(Method.DEQUEUE)
        self._find = re.compile(rf"{queue}:s[A-Za-z0-9-]+:p[0-9]+:[0-9]+".encode()).findall
        self._first = call_frame(Method.DEQUEUE, DequeueRequest(queue, limit))
        self._last_reply: bytes | None = None
        self._last: Sequence[bytes] = ()
        self._learn_frame(queue, limit)

    def _learn_frame(self, queue: str, limit: int) -> None:
        """Cut a frame with one ack into what stands before, in and after its list of acks.

        How long an ack is beside its descriptor is seen from a frame that has two.
        """
        sample = f"{queue}:s1:p1:1"
        one, two = (
            codec.encode_call(
                Method.DEQUEUE,
                1,
                _CONTEXT,
                DequeueRequest(queue, limit, AckRequest(queue, [AckInfo(sample)] * count)),
            )
            for count in (1, 2)
        )
        at = one.index(sample.encode())
        begin = at - _LENGTH.size - len(_STRING)
        end = begin + len(two) - len(one)
        self._before = one[: begin - _LENGTH.size]
        self._ack_tail = one[at + len(sample) : end]
        self._after = one[end:]
        if self.with_acks([sample.encode()] * 2) != framed(two):
            raise AssertionError("the frame of a dequeue with acks is not laid out as expected")

    def with_acks(self, descriptors: Sequence[bytes]) -> bytes:
        tail = self._ack_tail
        parts = [self._before, _LENGTH.pack(len(descriptors))]
        for descriptor in descriptors:
            parts += (_STRING, _LENGTH.pack(len(descriptor)), descriptor, tail)
        parts.append(self._after)
        return framed(b"".join(parts))

    def first(self) -> bytes:
        return self._first

    def following(self, reply: bytes) -> bytes:
        descriptors = self._descriptors(reply)
        return self.with_acks(descriptors) if descriptors else self._first

    def jobs(self, reply: bytes) -> int:
        return len(self._descriptors(reply)) if reply[self._field] == _RESULT_FIELD else -1

    def _descriptors(self, reply: bytes) -> Sequence[bytes]:
        if reply is not self._last_reply:
            # Each stands in the reply twice: as a key of `jobs`, and then of `jobMetadata`.
            found = self._find(reply)
            self._last_reply, self._last = reply, found[: len(found) // 2]
        return self._last


class Cycle:
    """Enqueues jobs, then dequeues as many along with the acks of the dequeue before, in turn. A
    job counts when it is dequeued: once in its life."""

    def __init__(self, queue: str, jobs_per_call: int) -> None:
        self._enqueue = enqueue(queue, jobs_per_call)
        self._dequeue = DequeueWithAcks(queue, jobs_per_call)
        self._next_dequeue = self._dequeue.first()
        self._is_enqueued = False  # whether the call in flight is a dequeue

    def first(self) -> bytes:
        return self._enqueue.first()

    def following(self, reply: bytes) -> bytes:
        self._is_enqueued = not self._is_enqueued
        if self._is_enqueued:
            return self._next_dequeue
        self._next_dequeue = self._dequeue.following(reply)
        return self._enqueue.following(reply)

    def jobs(self, reply: bytes) -> int:
        if self._is_enqueued:
            return self._dequeue.jobs(reply)
        return min(0, self._enqueue.jobs(reply))
