"""Thrift messages written by hand: any order of fields, unknown fields, any form.

Independent of `pinlaterd.rpc`, so that both can be held against each other.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

BOOL, BYTE, DOUBLE, I16, I32, I64 = 2, 3, 4, 6, 8, 10
STRING, STRUCT, MAP, SET, LIST = 11, 12, 13, 14, 15
# Calls that one shard may answer.
PASSED_THROUGH = {
    "enqueueJobs",
    "dequeueJobs",
    "ackDequeuedJobs",
    "ackJobs",
    "checkpointJobs",
    "applyCheckpoints",
    "finishJobs",
    "lookupJobs",
}
FORMATS = {BOOL: ">b", BYTE: ">b", DOUBLE: ">d", I16: ">h", I32: ">i", I64: ">q"}


class Field(NamedTuple):
    """`value`: a number; bytes; fields of a struct; (type, values); (type, type, pairs)."""

    id: int
    type: int
    value: Any


def write_value(code: int, value: Any) -> bytes:
    if code == STRING:
        assert isinstance(value, bytes)
        return struct.pack(">i", len(value)) + value
    if code == STRUCT:
        return write_struct(value)
    if code in (LIST, SET):
        element, values = value
        head = struct.pack(">Bi", element, len(values))
        return head + b"".join(write_value(element, each) for each in values)
    if code == MAP:
        key, element, pairs = value
        head = struct.pack(">BBi", key, element, len(pairs))
        return head + b"".join(
            write_value(key, name) + write_value(element, each) for name, each in pairs
        )
    return struct.pack(FORMATS[code], value)


def write_struct(fields: Sequence[Field]) -> bytes:
    parts = [
        struct.pack(">Bh", field.type, field.id) + write_value(field.type, field.value)
        for field in fields
    ]
    return b"".join(parts) + b"\0"


def write_message(
    name: str, fields: Sequence[Field], *, kind: int = 1, seqid: int = 7, strict: bool = True
) -> bytes:
    raw = name.encode()
    named = struct.pack(">i", len(raw)) + raw
    if strict:
        head = struct.pack(">HBB", 0x8001, 0, kind) + named + struct.pack(">i", seqid)
    else:
        head = named + struct.pack(">bi", kind, seqid)
    return head + write_struct(fields)


# --- TCompactProtocol -----------------------------------------------------------------------

_TYPES = (BOOL, BYTE, I16, I32, I64, DOUBLE, STRING, LIST, SET, MAP, STRUCT)
COMPACT_TYPES = dict(zip(_TYPES, (1, *range(3, 13)), strict=True))


def varint(number: int) -> bytes:
    low, rest = number & 0x7F, number >> 7
    return bytes([low | 0x80]) + varint(rest) if rest else bytes([low])


def zigzag(number: int) -> bytes:
    return varint(2 * number if number >= 0 else -2 * number - 1)


def write_compact_value(code: int, value: Any) -> bytes:
    if code == STRING:
        assert isinstance(value, bytes)
        return varint(len(value)) + value
    if code == STRUCT:
        return write_compact_struct(value)
    if code in (LIST, SET):
        element, values = value
        count, kind = len(values), COMPACT_TYPES[element]
        head = bytes([count << 4 | kind]) if count < 15 else bytes([0xF0 | kind]) + varint(count)
        return head + b"".join(write_compact_value(element, each) for each in values)
    if code == MAP:
        key, element, pairs = value
        if not pairs:
            return b"\0"
        types = bytes([COMPACT_TYPES[key] << 4 | COMPACT_TYPES[element]])
        return (
            varint(len(pairs))
            + types
            + b"".join(
                write_compact_value(key, name) + write_compact_value(element, each)
                for name, each in pairs
            )
        )
    if code == BOOL:
        return b"\1" if value else b"\2"
    if code == BYTE:
        return struct.pack(">b", value)
    return struct.pack("<d", value) if code == DOUBLE else zigzag(value)


def write_compact_struct(fields: Sequence[Field]) -> bytes:
    parts = []
    last = 0
    for field in fields:
        kind = COMPACT_TYPES[field.type]
        if field.type == BOOL and not field.value:
            kind = 2
        distance, last = field.id - last, field.id
        if 0 < distance < 16:
            parts.append(bytes([distance << 4 | kind]))
        else:
            parts.append(bytes([kind]) + zigzag(field.id))
        if field.type != BOOL:
            parts.append(write_compact_value(field.type, field.value))
    return b"".join(parts) + b"\0"


def write_compact_message(
    name: str, fields: Sequence[Field], *, kind: int = 1, seqid: int = 7
) -> bytes:
    raw = name.encode()
    head = bytes([0x82, kind << 5 | 1]) + varint(seqid & 0xFFFFFFFF) + varint(len(raw)) + raw
    return head + write_compact_struct(fields)


# --- calls ----------------------------------------------------------------------------------


def framed(message: bytes) -> bytes:
    return struct.pack(">I", len(message)) + message


def context(source: bytes = b"test:here") -> Field:
    return Field(1, STRUCT, [Field(1, STRING, source)])


def enqueue(*jobs: Sequence[Field], queue: bytes = b"mail", **form: Any) -> bytes:
    request = [Field(1, STRING, queue), Field(2, LIST, (STRUCT, jobs))]
    return write_message("enqueueJobs", [context(), Field(2, STRUCT, request)], **form)


def job(body: bytes = b"body", *fields: Field) -> list[Field]:
    return [Field(1, STRING, body), *fields]


def queue_names(**form: Any) -> bytes:
    return write_message("getQueueNames", [context()], **form)
