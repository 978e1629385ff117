"""The head of a Thrift message: which method, which kind, which sequence number, which form.

Pure; standard library only. A message here is TBinaryProtocol without transport framing, strict
(it begins with a version) or not (it begins with the method's name); a reply has its call's form.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Final, NamedTuple

from pinlaterd.errors import ProtocolError
from pinlaterd.rpc.thrift_types import STRICT_CALL, VERSION_1, MessageType

U32: Final = struct.Struct(">I").unpack_from
I32: Final = struct.Struct(">i").unpack_from
_pack_i32: Final = struct.Struct(">i").pack
# Longer names are what a client made up; they are not remembered.
_USUAL_NAME_CHARS: Final = 64
_LOOSE_TAIL: Final = struct.Struct(">Bi")
_CUT_OFF: Final = "the message ends within its head"
_new: Final = tuple.__new__  # half the cost of calling a NamedTuple, for each call of each client


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
            return MessageHead(name, first & 0xFF, seqid, True, at + 4)
        if first >> 31:
            raise ProtocolError(f"unknown version {first >> 16:#06x}; Thrift's is {VERSION_1:#06x}")
        at = 4 + first
        kind, seqid = _LOOSE_TAIL.unpack_from(message, at)
        name = message[4:at].decode("utf-8", "replace")
        return MessageHead(name, kind, seqid, False, at + _LOOSE_TAIL.size)
    except struct.error as error:
        raise ProtocolError(_CUT_OFF) from error


def read_call_head(message: bytes) -> tuple[Head, int]:
    """The head of a call, and where its arguments begin."""
    if message.startswith(STRICT_CALL):
        try:
            (length,) = U32(message, 4)
            at = 8 + length
            (seqid,) = I32(message, at)
        except struct.error as error:
            raise ProtocolError(_CUT_OFF) from error
        name = message[8:at].decode("utf-8", "replace")
        return _new(Head, (name, seqid, False, True)), at + 4
    name, kind, seqid, strict, at = read_message_head(message)
    if kind not in (MessageType.CALL, MessageType.ONEWAY):
        raise ProtocolError(f"expected a call, got a message of type {kind}")
    return Head(name, seqid, kind == MessageType.ONEWAY, strict), at


def is_oneway(message: bytes) -> bool:
    """Whether this is a call that expects no answer; False for what is no call at all."""
    if message.startswith(STRICT_CALL):
        return False
    try:
        return read_message_head(message).kind == MessageType.ONEWAY
    except ProtocolError:
        return False


def message_head(head: Head, kind: MessageType) -> bytes:
    """The head of a message about the same call, in the same form."""
    usual = len(head.method_name) <= _USUAL_NAME_CHARS
    before = _remembered_before_seqid if usual else _before_seqid
    return before(head.method_name, kind, head.strict) + _pack_i32(head.seqid)


def _before_seqid(method_name: str, kind: MessageType, strict: bool) -> bytes:  # noqa: FBT001
    name = method_name.encode("utf-8", "replace")
    if strict:
        return struct.pack(f">HBBI{len(name)}s", VERSION_1, 0, kind, len(name), name)
    return struct.pack(f">I{len(name)}sB", len(name), name, kind)


_remembered_before_seqid = lru_cache(maxsize=256)(_before_seqid)
