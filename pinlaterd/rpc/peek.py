"""What the router must know of a call, from the first bytes of it, however many jobs follow.

Looks only at the layout in which all common clients write: fields in the order of their ids. A
call in another layout is peeked at as not canonical, and the router decodes it whole. What is
peeked is what decoding would give, if decoding succeeds: a field given twice is refused there.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Final, NamedTuple

from pinlaterd.model import Method
from pinlaterd.rpc.binary import U32, Head, read_call_head
from pinlaterd.rpc.interface import headers


class Unusual(Exception):
    """Not in the usual layout, or not well formed: decoding the whole will tell."""


# What reading beyond the end, or text that is none, looks like.
UNUSUAL: Final = (Unusual, struct.error, IndexError, UnicodeDecodeError)

# Headers of fields, type and id; with that of the struct which they begin, or the type of a list's
# elements.
CONTEXT_SOURCE: Final = b"\x0c\x00\x01\x0b\x00\x01"
REQUEST_TEXT: Final = b"\x0c\x00\x02\x0b\x00\x01"
_REQUEST_TEXTS: Final = b"\x0c\x00\x02\x0f\x00\x01\x0b"
_ARGUMENT_TEXT: Final = b"\x0b\x00\x02"
FIRST_TEXT: Final = b"\x0b\x00\x01"  # of a job, an ack, a checkpoint
JOBS: Final = b"\x0f\x00\x02\x0c"  # of an enqueue; the checkpoints of a call
SUCCEEDED: Final = b"\x0f\x00\x02\x0c"
FAILED: Final = b"\x0f\x00\x03\x0c"
_, REQUEST_ID = headers("RequestContext")
_, LIMIT, _acks, DRY_RUN, COVERAGE, MAX_WAIT = headers("PinLaterDequeueRequest")
ACKS: Final = _acks + FIRST_TEXT

_TAG3_U32: Final = struct.Struct(">3sI").unpack_from
_TAG3_I32: Final = struct.Struct(">3si").unpack_from
_TAG4_U32: Final = struct.Struct(">4sI").unpack_from
_TAG6_U32: Final = struct.Struct(">6sI").unpack_from

_new: Final = tuple.__new__  # a NamedTuple's own constructor costs three times as much


class Peek(NamedTuple):
    """The head of a call and the fields that choose its way.

    The fields behind `canonical` mean something only if it is True. `method` is None if there is
    none of that name. `items`: how many jobs of an enqueue, checkpoints, descriptors of a look-up,
    or acks, of which there may be a second list; else 0. `limit`: of a dequeue; else 0.
    `first_descriptor`: of the acks (succeeded before failed), checkpoints or look-up; None if there
    are none.
    """

    head: Head
    method: Method | None
    canonical: bool
    queue: str | None
    items: int
    limit: int
    first_descriptor: str | None


_Found = tuple[str | None, int, int, str | None]  # queue, items, limit, first descriptor


def peek(message: bytes) -> Peek:
    """Raises ProtocolError if not even the head is that of a call."""
    head, method, at = read_call_head(message)
    if method is None:
        return _new(Peek, (head, None, False, None, 0, 0, None))
    try:
        tag, length = _TAG6_U32(message, at)
        at += 10 + length
        if tag != CONTEXT_SOURCE:
            raise Unusual
        if message[at]:
            tag, length = _TAG3_U32(message, at)
            at += 7 + length
            if tag != REQUEST_ID or message[at]:
                raise Unusual
        queue, items, limit, first = _FINDERS[method](message, at + 1)
        return _new(Peek, (head, method, True, queue, items, limit, first))
    except UNUSUAL:
        return _new(Peek, (head, method, False, None, 0, 0, None))


def _text(message: bytes, at: int) -> str:
    """The text whose length begins at `at`."""
    begin = at + 4
    end = begin + U32(message, at)[0]
    if end > len(message):
        raise Unusual
    return message[begin:end].decode()


def _nothing(message: bytes, at: int) -> _Found:
    if message[at]:
        raise Unusual
    return None, 0, 0, None


def _queue_argument(message: bytes, at: int) -> _Found:
    if not message.startswith(_ARGUMENT_TEXT, at):
        raise Unusual
    return _text(message, at + 3), 0, 0, None


def _queue(message: bytes, at: int) -> tuple[str, int]:
    """The first field of a request."""
    if not message.startswith(REQUEST_TEXT, at):
        raise Unusual
    begin = at + 10
    end = begin + U32(message, at + 6)[0]
    return message[begin:end].decode(), end


def _queue_only(message: bytes, at: int) -> _Found:
    queue, end = _queue(message, at)
    if end >= len(message):
        raise Unusual
    return queue, 0, 0, None


def _enqueue(message: bytes, at: int) -> _Found:
    queue, at = _queue(message, at)
    tag, count = _TAG4_U32(message, at)
    if tag != JOBS:
        raise Unusual
    return queue, count, 0, None


def _checkpoint(message: bytes, at: int) -> _Found:
    queue, at = _queue(message, at)
    tag, count = _TAG4_U32(message, at)
    if tag != JOBS:
        raise Unusual
    return queue, count, 0, _first_descriptor(message, at + 8) if count else None


def _first_descriptor(message: bytes, at: int) -> str:
    if not message.startswith(FIRST_TEXT, at):
        raise Unusual
    begin = at + 7
    end = begin + U32(message, at + 3)[0]
    if end > len(message):
        raise Unusual
    return message[begin:end].decode()


def _ack(message: bytes, at: int) -> _Found:
    queue, at = _queue(message, at)
    first, items, _ = _first_acked(message, at)
    return queue, items, 0, first


def _first_acked(message: bytes, at: int) -> tuple[str | None, int, int]:
    """The first descriptor of an ack request, from the end of its queue name on, and how many its
    list has. If there is none: where the ack request ends."""
    for tag in (SUCCEEDED, FAILED):
        if message.startswith(tag, at):
            (count,) = U32(message, at + 4)
            at += 8
            if count:
                return _first_descriptor(message, at), count, at
    if message[at]:
        raise Unusual
    return None, 0, at + 1


def _dequeue(message: bytes, at: int) -> _Found:
    queue, at = _queue(message, at)
    tag, limit = _TAG3_I32(message, at)
    if tag != LIMIT:
        raise Unusual
    at += 7
    if message.startswith(ACKS, at):
        first, items, at = _first_acked(message, at + 10 + U32(message, at + 6)[0])
        if first is not None:
            return queue, items, limit, first
    # No acks so far: none may come later, out of order.
    if message.startswith(DRY_RUN, at):
        at += 4
    if message.startswith(COVERAGE, at):
        at += 11
    if message.startswith(MAX_WAIT, at):
        at += 7
    if message[at]:
        raise Unusual
    return queue, 0, limit, None


def _lookup(message: bytes, at: int) -> _Found:
    if not message.startswith(_REQUEST_TEXTS, at):
        raise Unusual
    (count,) = U32(message, at + 7)
    return None, count, 0, _text(message, at + 11) if count else None


_FINDERS: Final[dict[Method, Callable[[bytes, int], _Found]]] = {
    Method.CREATE_QUEUE: _queue_argument,
    Method.DELETE_QUEUE: _queue_argument,
    Method.ENQUEUE: _enqueue,
    Method.DEQUEUE: _dequeue,
    Method.ACK: _ack,
    Method.CHECKPOINT: _checkpoint,
    Method.LOOKUP: _lookup,
    Method.COUNT: _queue_only,
    Method.QUEUE_NAMES: _nothing,
    Method.SCAN: _queue_only,
    Method.RETRY_FAILED: _queue_only,
    Method.DELETE_JOBS: _queue_only,
}
