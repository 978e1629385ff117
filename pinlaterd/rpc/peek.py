"""The head of a message, and what the router must know of a call, however many jobs follow.

A message is TBinaryProtocol without transport framing, strict (it begins with a version) or not (it
begins with the method's name); a reply has its call's form.

Peeking looks only at the layout in which all common clients write: fields in the order of their
ids. A call in another layout is peeked at as not canonical, and the router decodes it whole. What
is peeked is what decoding would give, if decoding succeeds: a field given twice is refused there.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from pinlaterd.errors import ProtocolError
from pinlaterd.model import Method, ScanRequest, new_record
from pinlaterd.rpc.interface import (
    I32,
    METHODS,
    STRICT_CALL,
    STRICT_REPLY,
    U32,
    VERSION_1,
    MessageType,
    headers,
    pack_i32,
    pack_u32,
)


class Unusual(Exception):
    """Not in the usual layout, or not well formed: decoding the whole will tell."""


# What reading beyond the end, or text that is none, looks like.
UNUSUAL: Final = (Unusual, struct.error, IndexError, UnicodeDecodeError)

# Headers of fields, type and id; with that of the struct which they begin, or the type of a list's
# elements.
CONTEXT_SOURCE: Final = b"\x0c\x00\x01\x0b\x00\x01"
REQUEST_TEXT: Final = b"\x0c\x00\x02\x0b\x00\x01"
_REQUEST_TEXTS: Final = b"\x0c\x00\x02\x0f\x00\x01\x0b"
FIRST_TEXT: Final = b"\x0b\x00\x01"  # of a job, an ack, a checkpoint
JOBS: Final = b"\x0f\x00\x02\x0c"  # of an enqueue; the checkpoints of a call
SUCCEEDED: Final = b"\x0f\x00\x02\x0c"
FAILED: Final = b"\x0f\x00\x03\x0c"
(REQUEST_ID,) = headers("RequestContext", "request_id")
LIMIT, _acks, DRY_RUN, COVERAGE, MAX_WAIT, CLAIM_TIMEOUT = headers(
    "PinLaterDequeueRequest",
    *("limit", "acks", "dry_run", "coverage", "max_wait_ms", "claim_timeout_ms"),
)
ACKS: Final = _acks + FIRST_TEXT
(KEY,) = headers("PinLaterJob", "key")
(_RENEWED_FOR,) = headers("PinLaterCheckpointJobsRequest", "claim_timeout_ms")

_LOOSE_TAIL: Final = struct.Struct(">Bi")
_TAG3_U32: Final = struct.Struct(">3sI").unpack_from
TAG3_I32: Final = struct.Struct(">3si").unpack_from
TAG4_U32: Final = struct.Struct(">4sI").unpack_from
TAG6_U32: Final = struct.Struct(">6sI").unpack_from

# Strict calls and replies as they begin, up to the sequence number.
CALL_HEADS: Final = {
    method: STRICT_CALL + pack_u32(len(method)) + method.encode() for method in Method
}
_REPLY_HEADS: Final[Mapping[str, bytes]] = {
    method: STRICT_REPLY + head.removeprefix(STRICT_CALL) for method, head in CALL_HEADS.items()
}
_USUAL_CALLS: Final = {head: method for method, head in CALL_HEADS.items()}
_LOOKUP: Final = Method.LOOKUP  # to look a member up costs as much as a call
_METHODS: Final = {method.value: method for method in Method}


# --- the head of a message ------------------------------------------------------------------


class Head(NamedTuple):
    """The head of a call."""

    method_name: str
    seqid: int
    oneway: bool
    strict: bool


class MessageHead(NamedTuple):
    """The head of any message; `at` is where its struct begins."""

    method_name: str
    kind: int
    seqid: int
    strict: bool
    at: int


def read_message_head(message: bytes) -> MessageHead:
    """Raises ProtocolError for bytes that begin no message."""
    try:
        (first,) = U32(message, 0)
        if first >> 16 == VERSION_1:
            (length,) = U32(message, 4)
            at = 8 + length
            (seqid,) = I32(message, at)
            # A name that is no text is no method either: it is answered like one that is unknown.
            name = message[8:at].decode("utf-8", "replace")
            return new_record(MessageHead, (name, first & 0xFF, seqid, True, at + 4))
        if first >> 31:
            raise ProtocolError(f"unknown version {first >> 16:#06x}; Thrift's is {VERSION_1:#06x}")
        at = 4 + first
        kind, seqid = _LOOSE_TAIL.unpack_from(message, at)
        name = message[4:at].decode("utf-8", "replace")
        return MessageHead(name, kind, seqid, False, at + _LOOSE_TAIL.size)
    except struct.error as error:
        raise ProtocolError("the message ends within its head") from error


def read_call_head(message: bytes) -> tuple[Head, Method | None, int]:
    """Read the head of a call, its method (None: there is none of that name), and where its
    arguments begin."""
    try:
        at = message[7] + 8
        method = _USUAL_CALLS.get(message[:at])
        if method is not None:
            (seqid,) = I32(message, at)
            return new_record(Head, (method, seqid, False, True)), method, at + 4
    except (IndexError, struct.error):
        pass  # too short: the careful way says what it is
    found = read_message_head(message)
    if found.kind not in (MessageType.CALL, MessageType.ONEWAY):
        raise ProtocolError(f"expected a call, got a message of type {found.kind}")
    oneway = found.kind == MessageType.ONEWAY
    head = Head(found.method_name, found.seqid, oneway, found.strict)
    return head, _METHODS.get(found.method_name), found.at


def reply_head(head: Head) -> bytes:
    """Write the head of a reply to the call, in the same form."""
    usual = _REPLY_HEADS.get(head.method_name) if head.strict else None
    return message_head(head, MessageType.REPLY) if usual is None else usual + pack_i32(head.seqid)


def message_head(head: Head, kind: MessageType) -> bytes:
    """Write the head of a message about the same call, in the same form."""
    name = head.method_name.encode("utf-8", "replace")
    if head.strict:
        layout = f">HBBI{len(name)}si"
        return struct.pack(layout, VERSION_1, 0, kind, len(name), name, head.seqid)
    return struct.pack(f">I{len(name)}sBi", len(name), name, kind, head.seqid)


# --- the way of a call ---------------------------------------------------------------------


class Peek(NamedTuple):
    """A call, and the fields that choose its way if one shard may answer it.

    The fields behind `canonical` mean something only if it is True; of other calls it never is.
    `method` is None if there is none of that name. `items`: how many jobs of an enqueue,
    checkpoints, descriptors of a look-up, or acks, of which there may be a second list; else 0.
    `limit`: of a dequeue; else 0. `first_descriptor`: of the acks (succeeded before failed),
    checkpoints or look-up; None if there are none.
    """

    head: Head
    method: Method | None
    canonical: bool
    queue: str | None
    items: int
    limit: int
    first_descriptor: str | None


_Found = tuple[int, int, str | None]  # items, limit, first descriptor


def peek(message: bytes) -> Peek:
    """Raises ProtocolError if not even the head is that of a call."""
    head, method, at = read_call_head(message)
    find = _FINDERS.get(method)
    if find is None:
        return Peek(head, method, False, None, 0, 0, None)
    try:
        tag, length = TAG6_U32(message, at)
        at += 10 + length
        if tag != CONTEXT_SOURCE:
            raise Unusual
        if message[at]:
            tag, length = _TAG3_U32(message, at)
            at += 7 + length
            if tag != REQUEST_ID or message[at]:
                raise Unusual
        at += 1
        queue = None
        if method is not _LOOKUP:
            tag, length = TAG6_U32(message, at)
            if tag != REQUEST_TEXT:
                raise Unusual
            begin = at + 10
            at = begin + length
            queue = message[begin:at].decode()
        items, limit, first = find(message, at)
        return new_record(Peek, (head, method, True, queue, items, limit, first))
    except UNUSUAL:
        return Peek(head, method, False, None, 0, 0, None)


def source_of(message: bytes) -> bytes:
    """Return the source of a call that was peeked at as canonical."""
    # A strict head has a version before the name's length, a loose one the type behind the name.
    at = message[7] + 12 if message[0] else message[3] + 9
    return message[at + 10 : at + 10 + TAG6_U32(message, at)[1]]


# Each reads a request behind its queue, if it has one.


def _jobs(message: bytes, at: int) -> _Found:
    tag, count = TAG4_U32(message, at)
    if tag != JOBS:
        raise Unusual
    return count, 0, None


def _lists(message: bytes, at: int) -> _Found:
    first, items, _ = _first_descriptor(message, at)
    return items, 0, first


def _dequeue(message: bytes, at: int) -> _Found:
    tag, limit = TAG3_I32(message, at)
    if tag != LIMIT:
        raise Unusual
    at += 7
    if message.startswith(ACKS, at):
        end = at + 10 + U32(message, at + 6)[0]
        first, items, at = _first_descriptor(message, end)
        if first is not None:
            return items, limit, first
    # No acks so far: none may come later, out of order.
    if message.startswith(DRY_RUN, at):
        at += 4
    if message.startswith(COVERAGE, at):
        at += 11
    if message.startswith(MAX_WAIT, at):
        at += 7
    if message.startswith(CLAIM_TIMEOUT, at):
        at += 7
    if message[at]:
        raise Unusual
    return 0, limit, None


def _descriptors(message: bytes, at: int) -> _Found:
    if not message.startswith(_REQUEST_TEXTS, at):
        raise Unusual
    (count,) = U32(message, at + 7)
    return count, 0, _text(message, at + 11) if count else None


def _first_descriptor(message: bytes, at: int) -> tuple[str | None, int, int]:
    """Read the first field of the first element of a list, or of one of two, and how many elements
    that has. If there is none: where the request ends."""
    for tag in (SUCCEEDED, FAILED):
        if message.startswith(tag, at):
            (count,) = U32(message, at + 4)
            at += 8
            if count:
                if not message.startswith(FIRST_TEXT, at):
                    raise Unusual
                return _text(message, at + 3), count, at
    if message.startswith(_RENEWED_FOR, at):
        at += 7
    if message[at]:
        raise Unusual
    return None, 0, at + 1


def _text(message: bytes, at: int) -> str:
    """Read the text whose length begins at `at`."""
    begin = at + 4
    end = begin + U32(message, at)[0]
    if end > len(message):
        raise Unusual
    return message[begin:end].decode()


# --- what else a call asks for, as far as its bytes show --------------------------------------

# Longer messages are not searched: they might be made so that it takes long.
_SEARCHED_BYTES: Final = 64 * 1024
# Of a dequeue, from dryRun on: that, coverage, two times, and the ends of two structs.
DEQUEUE_END_BYTES: Final = 4 + 11 + 7 + 7 + 2
(_INCLUDE_BODY,) = headers("PinLaterLookupJobRequest", "include_body")
(_KEYS,) = headers("PinLaterLookupJobRequest", "keys")
(_SCAN_LIMIT,) = headers("PinLaterScanJobsRequest", "limit")
# What the options of a usual job take at most.
_LAST_JOB_BYTES: Final = 256
_DEFAULT_SCAN_LIMIT: int = ScanRequest._field_defaults["limit"]
_SCAN_LIMITS: Final = re.compile(re.escape(_SCAN_LIMIT) + rb"(.{4})", re.DOTALL).findall
_LARGEST_I32: Final = b"\x7f\xff\xff\xff"


def _finder(header: bytes, value: bytes) -> Callable[[bytes], bool]:
    """Make what tells whether a field may have such a value: a text may look like it."""
    search = re.compile(re.escape(header) + value, re.DOTALL).search
    return lambda message: len(message) > _SEARCHED_BYTES or search(message) is not None


may_be_dry_run: Final = _finder(DRY_RUN, rb"[^\0]")
may_wait: Final = _finder(MAX_WAIT, rb"(?!\0{4})")
may_include_bodies: Final = _finder(_INCLUDE_BODY, rb"[^\0]")
may_name_keys: Final = _finder(_KEYS, b"")


def may_have_keys(enqueue: bytes) -> bool:
    """Tell whether the last job of an enqueue may have a key, which then ends the message. Where
    only others have one, a shard finds it."""
    return enqueue.rfind(KEY, -_LAST_JOB_BYTES) >= 0  # find takes twice as long


def holds_key(enqueue: bytes) -> bool:
    """Tell whether any job of an enqueue may have a key: a body may look like one."""
    return KEY in enqueue


def most_scanned(message: bytes, most: int) -> int:
    """Return how many jobs a scan may ask for, at most `most`."""
    found = _SCAN_LIMITS(message) if len(message) <= _SEARCHED_BYTES else [_LARGEST_I32]
    asked: list[int] = [I32(limit, 0)[0] for limit in found]
    return min(most, max([_DEFAULT_SCAN_LIMIT, *asked]))


def names_one_shard(message: bytes, peek: Peek) -> bool:
    """Tell whether as many descriptors as a call has begin as its first one, up to the shard."""
    if peek.first_descriptor is None:
        return True
    return message.count(peek.first_descriptor.encode().rpartition(b":p")[0]) >= peek.items


def _has_lists(method: Method) -> bool:
    """Tell whether a request is a queue and lists of what begins with a job's descriptor."""
    request = METHODS[method].arguments.fields[-1].type.struct
    listed = request.fields[1].type.element if request and len(request.fields) > 1 else None
    return bool(listed and listed.struct and not listed.struct.fields[0].type.binary)


_FINDERS: Final[Mapping[Method | None, Callable[[bytes, int], _Found]]] = {
    Method.ENQUEUE: _jobs,
    Method.DEQUEUE: _dequeue,
    Method.LOOKUP: _descriptors,
    **{method: _lists for method in Method if _has_lists(method)},
}
