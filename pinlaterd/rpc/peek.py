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
from pinlaterd.rpc.message import U32, Head, read_call_head
from pinlaterd.rpc.thrift_types import STRICT_CALL


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


class Uncanonical(Exception):
    """Not in the usual layout, or not well formed: who reads all of it will tell."""


# What reading beyond the end, or text that is none, looks like.
UNUSUAL: Final = (Uncanonical, struct.error, IndexError, UnicodeDecodeError)

# Each name as it stands on the wire, to the method and the name as text.
NAMES: Final = {method.value.encode(): (method, method.value) for method in Method}

CONTEXT_SOURCE: Final = b"\x0c\x00\x01\x0b\x00\x01"  # field 1 struct, its field 1 string
REQUEST_ID: Final = b"\x0b\x00\x02"
REQUEST_TEXT: Final = b"\x0c\x00\x02\x0b\x00\x01"  # field 2 struct, its field 1 string
_END_REQUEST_TEXT: Final = b"\0" + REQUEST_TEXT
_END_ARGUMENT_TEXT: Final = b"\0\x0b\x00\x02"
_REQUEST_TEXTS: Final = b"\0\x0c\x00\x02\x0f\x00\x01\x0b"  # ... its field 1 list of strings

_TEXT: Final = b"\x0b\x00\x01"
_JOBS: Final = b"\x0f\x00\x02\x0c"  # field 2, list of structs
_FAILED: Final = b"\x0f\x00\x03\x0c"
_LIMIT: Final = b"\x08\x00\x02"
_ACKS: Final = b"\x0c\x00\x03"
_DRY_RUN: Final = b"\x02\x00\x04"
_COVERAGE: Final = b"\x04\x00\x05"
_MAX_WAIT: Final = b"\x08\x00\x64"

_SEQID_SOURCE: Final = struct.Struct(">i6sI").unpack_from
_TAG4_U32: Final = struct.Struct(">4sI").unpack_from
_TAG3_I32: Final = struct.Struct(">3si").unpack_from
_TAG3_U32: Final = struct.Struct(">3sI").unpack_from

# A tuple's own constructor: a NamedTuple's costs three times as much.
_new: Final = tuple.__new__

_Found = tuple[str | None, int, int, str | None]  # queue, items, limit, first descriptor


def peek(message: bytes) -> Peek:
    """Raises ProtocolError if not even the head is that of a call."""
    head, known, at = _head(message)
    if known is None:
        return _new(Peek, (head, None, False, None, 0, 0, None))
    try:
        if at < 0:
            raise Uncanonical
        if message[at]:  # a request id follows
            tag, length = _TAG3_U32(message, at)
            at += 7 + length
            if tag != REQUEST_ID or message[at]:
                raise Uncanonical
        queue, items, limit, first = _FINDERS[known](message, at)
        return _new(Peek, (head, known, True, queue, items, limit, first))
    except UNUSUAL:
        return _new(Peek, (head, known, False, None, 0, 0, None))


def _head(message: bytes) -> tuple[Head, Method | None, int]:
    """The head, the method, and the end of the context's source (-1: not where expected)."""
    if message.startswith(STRICT_CALL):
        try:
            (length,) = U32(message, 4)
            at = 8 + length
            known = NAMES.get(message[8:at])
            if known is not None:
                seqid, tag, length = _SEQID_SOURCE(message, at)
                end = at + 14 + length if tag == CONTEXT_SOURCE else -1
                return _new(Head, (known[1], seqid, False, True)), known[0], end
        except struct.error:
            pass  # too short for what is usual; the careful way says what it is
    head, at = read_call_head(message)
    known = NAMES.get(head.method_name.encode())
    if known is None:
        return head, None, -1
    end = -1
    if message.startswith(CONTEXT_SOURCE, at) and len(message) >= at + 10:
        end = at + 10 + U32(message, at + 6)[0]
    return head, known[0], end


def _text(message: bytes, at: int, length: int) -> str:
    end = at + length
    if end > len(message):
        raise Uncanonical
    return message[at:end].decode()


def _queue(message: bytes, at: int) -> tuple[str, int]:
    """The request's first field, from the end of the context on."""
    if not message.startswith(_END_REQUEST_TEXT, at):
        raise Uncanonical
    begin = at + 11
    (length,) = U32(message, at + 7)
    end = begin + length
    return message[begin:end].decode(), end


def _queue_only(message: bytes, at: int) -> _Found:
    queue, end = _queue(message, at)
    if end >= len(message):
        raise Uncanonical
    return queue, 0, 0, None


def _queue_argument(message: bytes, at: int) -> _Found:
    if not message.startswith(_END_ARGUMENT_TEXT, at):
        raise Uncanonical
    return _text(message, at + 8, U32(message, at + 4)[0]), 0, 0, None


def _nothing(message: bytes, at: int) -> _Found:
    if message[at + 1]:
        raise Uncanonical
    return None, 0, 0, None


def _enqueue(message: bytes, at: int) -> _Found:
    queue, end = _queue(message, at)
    tag, count = _TAG4_U32(message, end)
    if tag != _JOBS:
        raise Uncanonical
    return queue, count, 0, None


def _checkpoint(message: bytes, at: int) -> _Found:
    queue, end = _queue(message, at)
    tag, count = _TAG4_U32(message, end)
    if tag != _JOBS:
        raise Uncanonical
    return queue, count, 0, _first_descriptor(message, end + 8) if count else None


def _first_descriptor(message: bytes, at: int) -> str:
    tag, length = _TAG3_U32(message, at)
    if tag != _TEXT:
        raise Uncanonical
    return _text(message, at + 7, length)


def _ack(message: bytes, at: int) -> _Found:
    queue, end = _queue(message, at)
    first, items, _ = _first_acked(message, end)
    return queue, items, 0, first


def _first_acked(message: bytes, at: int) -> tuple[str | None, int, int]:
    """The first descriptor of an ack request, from the end of its queue name on, and how many its
    list has. If there is none: where the ack request ends."""
    for tag in (_JOBS, _FAILED):
        if message.startswith(tag, at):
            (count,) = U32(message, at + 4)
            if count:
                return _first_descriptor(message, at + 8), count, -1
            at += 8
    if message[at]:
        raise Uncanonical
    return None, 0, at + 1


def _dequeue(message: bytes, at: int) -> _Found:
    queue, end = _queue(message, at)
    tag, limit = _TAG3_I32(message, end)
    if tag != _LIMIT:
        raise Uncanonical
    end += 7
    if message.startswith(_ACKS, end):
        tag, length = _TAG3_U32(message, end + 3)
        if tag != _TEXT:
            raise Uncanonical
        first, items, end = _first_acked(message, end + 10 + length)
        if first is not None:
            return queue, items, limit, first
    # No acks so far: none may come later, out of order.
    if message.startswith(_DRY_RUN, end):
        end += 4
    if message.startswith(_COVERAGE, end):
        end += 11
    if message.startswith(_MAX_WAIT, end):
        end += 7
    if message[end]:
        raise Uncanonical
    return queue, 0, limit, None


def _lookup(message: bytes, at: int) -> _Found:
    if not message.startswith(_REQUEST_TEXTS, at):
        raise Uncanonical
    (count,) = U32(message, at + 8)
    if not count:
        return None, 0, 0, None
    return None, count, 0, _text(message, at + 16, U32(message, at + 12)[0])


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
