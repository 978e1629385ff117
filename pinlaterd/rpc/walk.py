"""Where a Thrift value ends, without reading it: for unframed messages, and for unknown fields.

A Walk can stop anywhere, for want of bytes, and go on from there: no byte is looked at twice
however small the pieces in which they come. It neither recurses nor allocates by what the bytes
claim: its memory is one small entry for each level of nesting, of which there are at most
MAX_DEPTH. Pure; standard library only.
"""

from __future__ import annotations

import struct
from typing import Final

from pinlaterd.errors import ProtocolError
from pinlaterd.rpc.thrift_types import FIXED_SIZE, LEAST_SIZE, MAX_DEPTH, VERSION_1, TType

_U32: Final = struct.Struct(">I").unpack_from
_I32: Final = struct.Struct(">i").unpack_from
_VERSION_AND_LENGTH: Final = struct.Struct(">HxxI").unpack_from

_STRING: Final = int(TType.STRING)
_STRUCT: Final = int(TType.STRUCT)
_MAP: Final = int(TType.MAP)
_SIZES: Final = {int(code): size for code, size in FIXED_SIZE.items()}
_LEAST: Final = {int(code): size for code, size in LEAST_SIZE.items()}

# An unknown field may hold no more values than this, so that nobody buys much time with few bytes.
MAX_UNKNOWN_VALUES: Final = 100_000


class BeyondEnd(ProtocolError):
    """The value is longer than it may be."""


class Walk:
    """One value, or one message, from `at` on.

    `at` is the next byte to look at; it may lie behind what has come so far, when a string does.
    `max_end` is where the value has to end at the latest.
    """

    __slots__ = ("_levels", "_max_values", "_values", "at", "max_end")

    def __init__(self, at: int, max_end: int, max_values: int | None = None) -> None:
        self.at = at
        self.max_end = max_end
        self._max_values = max_end if max_values is None else max_values
        self._values = 0
        # What is still open, innermost last. A struct: [None]. A list, set or map: [values to
        # come, type of the next, type of the one after that].
        self._levels: list[list[int] | None] = []

    def enter(self, code: int) -> None:
        """Begin with a value of this type."""
        self._levels.append([1, code, code])

    def enter_struct(self) -> None:
        """Begin inside a struct: its first field, or its end, comes next."""
        self._levels.append(None)

    def skip(self, size: int) -> None:
        """Go past bytes that are no value."""
        self._skip(size, 0)

    def advance(self, data: bytes | bytearray) -> bool:
        """Go on as far as `data` (what has come so far, from its start) allows.

        True once the value has ended: then `at` is right behind it.
        """
        levels = self._levels
        available = len(data)
        while levels:
            level = levels[-1]
            if level is None:
                if self.at >= available:
                    return False
                code = data[self.at]
                if code == 0:
                    self._skip(1, 0)
                    levels.pop()
                    continue
                if self.at + 3 > available:
                    return False
                # Header and value are taken together, or, for want of bytes, neither.
                if not self._value(data, available, code, 3):
                    return False
            else:
                to_come, code, other = level
                if to_come == 0:
                    levels.pop()
                    continue
                if code in _SIZES and code == other:
                    self._skip(_SIZES[code] * to_come, 1)
                    levels.pop()
                    continue
                # Before going deeper: what is left here once this value has ended.
                level[0], level[1], level[2] = to_come - 1, other, code
                if not self._value(data, available, code, 0):
                    level[0], level[1], level[2] = to_come, code, other
                    return False
        return self.at <= available

    def _value(self, data: bytes | bytearray, available: int, code: int, header: int) -> bool:
        """Go past a value, or into it. False, and nothing changed, if its bytes are missing."""
        at = self.at + header
        size = _SIZES.get(code)
        if size is not None:
            self._skip(header + size, 1)
        elif code == _STRING:
            if at + 4 > available:
                return False
            self._skip(header + 4 + _U32(data, at)[0], 1)
        elif code == _STRUCT:
            self._skip(header, 1)
            self._open(None)
        elif code == _MAP:
            if at + 6 > available:
                return False
            self._open_container(data[at], data[at + 1], _I32(data, at + 2)[0], header + 6, 2)
        elif code in _LEAST:
            if at + 5 > available:
                return False
            self._open_container(data[at], data[at], _I32(data, at + 1)[0], header + 5, 1)
        else:
            raise ProtocolError(f"there is no type {code} in Thrift's binary protocol")
        return True

    def _open_container(self, code: int, other: int, count: int, header: int, each: int) -> None:
        self._skip(header, 1)
        if count == 0:
            return  # some writers leave the types of an empty map out
        if count < 0 or code not in _LEAST or other not in _LEAST:
            raise ProtocolError(f"a collection claims {count} values of types {code} and {other}")
        least = _LEAST[code] + (_LEAST[other] if each == 2 else 0)
        if self.at + count * least > self.max_end:
            raise BeyondEnd(f"a collection claims {count} values, more than its message holds")
        self._open([count * each, code, other])

    def _open(self, level: list[int] | None) -> None:
        if len(self._levels) >= MAX_DEPTH:
            raise ProtocolError(f"values are nested more than {MAX_DEPTH} levels deep")
        self._levels.append(level)

    def _skip(self, size: int, values: int) -> None:
        self.at += size
        self._values += values
        if self.at > self.max_end:
            raise BeyondEnd(f"a value claims {self.at - self.max_end} bytes more than there are")
        if self._values > self._max_values:
            raise ProtocolError(f"an unknown field holds more than {self._max_values} values")


def skip_value(data: bytes, at: int, code: int) -> int:
    """The end of a value of which all bytes must be there, in a field that nobody knows."""
    walk = Walk(at, len(data), MAX_UNKNOWN_VALUES)
    walk.enter(code)
    if not walk.advance(data):
        raise ProtocolError("the message ends within a value")
    return walk.at


class MessageWalk:
    """The end of an unframed strict message that begins at `start`, of `max_bytes` at most."""

    __slots__ = ("_in_body", "_start", "_walk")

    def __init__(self, start: int, max_bytes: int) -> None:
        self._start = start
        self._walk = Walk(start, start + max_bytes)
        self._in_body = False

    @property
    def at(self) -> int:
        """How far the message goes at least."""
        return self._walk.at

    def end(self, data: bytes | bytearray) -> int | None:
        """Where the message ends, or None if more bytes have to come."""
        walk = self._walk
        if not self._in_body:
            if len(data) < self._start + 8:
                return None
            version, name_length = _VERSION_AND_LENGTH(data, self._start)
            if version != VERSION_1:
                raise ProtocolError("an unframed message does not begin with Thrift's version 1")
            walk.skip(8 + name_length + 4)
            walk.enter_struct()
            self._in_body = True
        return walk.at if walk.advance(data) else None
