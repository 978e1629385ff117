"""TBinaryProtocol: the types of values and messages, and where a value ends.

Pure; standard library only.
"""

from __future__ import annotations

import struct
from collections.abc import Generator
from enum import IntEnum
from typing import Final

from pinlaterd.errors import ProtocolError


class TType(IntEnum):
    """The types of values on the wire that TBinaryProtocol can carry."""

    STOP = 0
    BOOL = 2
    BYTE = 3
    DOUBLE = 4
    I16 = 6
    I32 = 8
    I64 = 10
    STRING = 11
    STRUCT = 12
    MAP = 13
    SET = 14
    LIST = 15


class MessageType(IntEnum):
    CALL = 1
    REPLY = 2
    EXCEPTION = 3
    ONEWAY = 4


# By type; numbers and booleans have as many bytes always.
FORMATS: Final = {
    int(TType.BOOL): "?",
    int(TType.BYTE): "b",
    int(TType.DOUBLE): "d",
    int(TType.I16): "h",
    int(TType.I32): "i",
    int(TType.I64): "q",
}
FIXED_SIZE: Final = {code: struct.calcsize(f">{letter}") for code, letter in FORMATS.items()}
# The fewest bytes that a value of each type takes: no more values than that can follow.
LEAST_SIZE: Final = {
    **FIXED_SIZE,
    int(TType.STRING): 4,
    int(TType.STRUCT): 1,
    int(TType.MAP): 6,
    int(TType.SET): 5,
    int(TType.LIST): 5,
}

MAX_DEPTH: Final = 64
# An unknown field may hold no more values than this, so that nobody buys much time with few bytes.
MAX_UNKNOWN_VALUES: Final = 100_000

VERSION_1: Final = 0x8001
STRICT_CALL: Final = b"\x80\x01\x00\x01"
STRICT_REPLY: Final = b"\x80\x01\x00\x02"

U32: Final = struct.Struct(">I").unpack_from
I32: Final = struct.Struct(">i").unpack_from
pack_u32: Final = struct.Struct(">I").pack
pack_i32: Final = struct.Struct(">i").pack
_VERSION_AND_LENGTH: Final = struct.Struct(">HxxI").unpack_from
_STRING: Final = int(TType.STRING)
_STRUCT: Final = int(TType.STRUCT)
_MAP: Final = int(TType.MAP)


def type_name(code: int) -> str:
    """As the interface language calls it, for messages to people."""
    try:
        return TType(code).name.lower()
    except ValueError:
        return f"type {code}"


# --- where a value ends ---------------------------------------------------------------------


class BeyondEnd(ProtocolError):
    """The value is longer than it may be."""


# Yields how many bytes, from the start of the data, it needs to go on; is sent what has come by
# then; returns where the value ends.
Walk = Generator[int, "bytes | bytearray", int]
# What is open, innermost last. A struct: None. A list, set or map: [values to come, type of the
# next, type of the one after that].
_Levels = list[list[int] | None]


def skip_value(data: bytes, at: int, code: int) -> int:
    """The end of a value of which all bytes must be there, in a field that nobody knows."""
    if code in FIXED_SIZE:
        end = at + FIXED_SIZE[code]
        _check_end(end, len(data))
        return end
    try:
        next(_walk(data, at, [[1, code, code]], len(data), MAX_UNKNOWN_VALUES))
    except StopIteration as ended:
        return int(ended.value)
    raise ProtocolError("the message ends within a value")


def walk_message(data: bytes | bytearray, start: int, max_bytes: int) -> Walk:
    """To the end of the strict message that begins at `start`, of `max_bytes` at most."""
    while len(data) < start + 8:
        data = yield start + 8
    version, name_length = _VERSION_AND_LENGTH(data, start)
    if version != VERSION_1:
        raise ProtocolError("an unframed message does not begin with Thrift's version 1")
    at, max_end = start + 12 + name_length, start + max_bytes
    _check_end(at, max_end)
    return (yield from _walk(data, at, [None], max_end, max_bytes))


def _walk(  # noqa: C901, PLR0912 - one step for each kind of value
    data: bytes | bytearray, at: int, levels: _Levels, max_end: int, max_values: int
) -> Walk:
    """To the end of what is open, without reading it.

    It looks at no byte twice, however small the pieces in which they come. It neither recurses nor
    allocates by what the bytes claim: its memory is one small entry for each level of nesting.
    """
    values = 0
    while levels:
        level = levels[-1]
        times = 1
        if level is None:
            while len(data) <= at:
                data = yield at + 1
            code = data[at]
            if code == 0:
                at += 1
                _check_end(at, max_end)
                levels.pop()
                continue
            at += 3
            while len(data) < at:
                data = yield at
        elif level[0] == 0:
            levels.pop()
            continue
        else:
            to_come, code, other = level
            if code == other and code in FIXED_SIZE:
                times = to_come
            level[:] = to_come - times, other, code
        values += 1
        if code in FIXED_SIZE:
            at += FIXED_SIZE[code] * times
        elif code == _STRING:
            while len(data) < at + 4:
                data = yield at + 4
            at += 4 + U32(data, at)[0]
        elif code == _STRUCT:
            _open(levels, None)
        elif code in LEAST_SIZE:
            size = LEAST_SIZE[code]
            while len(data) < at + size:
                data = yield at + size
            at += size
            _check_end(at, max_end)
            inner = _collection(data, at, max_end, is_map=code == _MAP)
            if inner is not None:
                _open(levels, inner)
        else:
            raise ProtocolError(f"there is no type {code} in Thrift's binary protocol")
        _check_end(at, max_end)
        if values > max_values:
            raise ProtocolError(f"an unknown field holds more than {max_values} values")
    while len(data) < at:
        data = yield at
    return at


def _collection(
    data: bytes | bytearray, at: int, max_end: int, *, is_map: bool
) -> list[int] | None:
    """The level of a list, set or map whose head ends at `at`; None if it is empty."""
    (count,) = I32(data, at - 4)
    code = data[at - 5]
    key = data[at - 6] if is_map else code
    if count == 0:
        return None  # some writers leave the types of an empty map out
    if count < 0 or code not in LEAST_SIZE or key not in LEAST_SIZE:
        raise ProtocolError(f"a collection claims {count} values of types {key} and {code}")
    least = LEAST_SIZE[code] + (LEAST_SIZE[key] if is_map else 0)
    if at + count * least > max_end:
        raise BeyondEnd(f"a collection claims {count} values, more than its message holds")
    return [2 * count if is_map else count, key, code]


def _open(levels: _Levels, level: list[int] | None) -> None:
    if len(levels) >= MAX_DEPTH:
        raise ProtocolError(f"values are nested more than {MAX_DEPTH} levels deep")
    levels.append(level)


def _check_end(at: int, max_end: int) -> None:
    if at > max_end:
        raise BeyondEnd(f"a value claims {at - max_end} bytes more than there are")
