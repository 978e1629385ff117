"""TCompactProtocol to strict TBinaryProtocol and back, message by message.

It goes by the types on the wire and knows no struct, so that fields which nobody here knows pass
through. What is within the server is binary; only the clients that speak compact pay for it.

Where the two differ, for who reads on:

    numbers      varints, zigzag where they are signed; doubles are little-endian
    field ids    the distance to the last one, in the upper half of the byte that has the type
    booleans     a field's value is its type, 1 true or 2 false; within a collection it is a byte
    counts       of up to 14 in the upper half of the byte that has the type, else 15 and a varint

A message is bounded before it is expanded (values, depth) and after (bytes): a value of one byte
becomes up to eleven. Pure; standard library only.
"""

from __future__ import annotations

import struct
from typing import Final

from pinlaterd.errors import ProtocolError
from pinlaterd.rpc.message import read_message_head
from pinlaterd.rpc.thrift_types import MAX_DEPTH, VERSION_1, TType

PROTOCOL_ID: Final = 0x82  # the first byte of each message
_VERSION: Final = 1
_VERSION_BITS: Final = 5  # below the three of the message's type

_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _STRING, _LIST, _SET, _MAP, _STRUCT = range(1, 13)
_BINARY_TYPES: Final = {
    _TRUE: int(TType.BOOL),
    _FALSE: int(TType.BOOL),
    _BYTE: int(TType.BYTE),
    _I16: int(TType.I16),
    _I32: int(TType.I32),
    _I64: int(TType.I64),
    _DOUBLE: int(TType.DOUBLE),
    _STRING: int(TType.STRING),
    _LIST: int(TType.LIST),
    _SET: int(TType.SET),
    _MAP: int(TType.MAP),
    _STRUCT: int(TType.STRUCT),
}
_COMPACT_TYPES: Final = {
    binary: compact for compact, binary in _BINARY_TYPES.items() if compact != _FALSE
}
_BINARY_BOOL: Final = int(TType.BOOL)
_BINARY_STRING: Final = int(TType.STRING)

_MOST_SHORT: Final = 0x7F  # of the numbers that have one byte
_MOST_VARINT_BITS: Final = 64
_MOST_SHORT_DISTANCE: Final = 15
_LONG_COUNT: Final = 15

_U32: Final = struct.Struct(">I")
_INTEGERS: Final = {
    _I16: struct.Struct(">h"),
    _I32: struct.Struct(">i"),
    _I64: struct.Struct(">q"),
}
_FIELD: Final = struct.Struct(">Bh")
_BOOL_FIELD: Final = struct.Struct(">Bh?")
_LIST_HEAD: Final = struct.Struct(">BI")
_MAP_HEAD: Final = struct.Struct(">BBI")
_BINARY_HEAD: Final = struct.Struct(">HBBI")
_DOUBLE_BYTES: Final = 8

# Six and more for each of the 100,000 jobs that a call may have; so many cost about a second.
MAX_VALUES: Final = 1_000_000
_MOST_FIELDS: Final = 1_000  # of one struct, which is counted at its end


class CompactTranscoder:
    """A framing.Transcoder. A message of more than `max_bytes`, as binary, is refused."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes

    def to_binary(self, message: bytes) -> bytes:
        """Raises ProtocolError for what is no compact message, or too large a one."""
        try:
            binary = _Expansion(message).message()
        except IndexError as error:
            raise ProtocolError("a compact message ends within a value") from error
        except struct.error as error:
            raise ProtocolError(f"a number in a compact message is too large: {error}") from error
        if len(binary) > self._max_bytes:
            raise ProtocolError(
                f"a compact message has {len(binary)} bytes as binary; max_frame_bytes is "
                f"{self._max_bytes}: send fewer jobs a call, or raise it in etc/pinlaterd.yaml"
            )
        return binary

    def from_binary(self, message: bytes) -> bytes:
        """Raises ProtocolError for what is no binary message."""
        try:
            return _Contraction(message).message()
        except (IndexError, struct.error) as error:
            raise ProtocolError("a binary message ends within a value") from error


class _Expansion:
    """One message of compact, on its way to binary. Each method goes on `at` a byte, and returns
    where it stopped; most lengths and numbers have one byte."""

    __slots__ = ("_data", "_out", "_values_left")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._out = bytearray()
        self._values_left = MAX_VALUES

    def message(self) -> bytes:
        data, out = self._data, self._out
        if data[0] != PROTOCOL_ID:
            raise ProtocolError(
                f"a message begins with {data[0]:02x}; on this connection, whose first one was "
                f"TCompactProtocol, each begins with {PROTOCOL_ID:02x}"
            )
        version = data[1] & ((1 << _VERSION_BITS) - 1)
        if version != _VERSION:
            raise ProtocolError(f"version {version} of TCompactProtocol; only 1 is known")
        seqid, at = _varint(data, 2)
        length, at = _varint(data, at)
        name = self._take(at, length)
        out += _BINARY_HEAD.pack(VERSION_1, 0, data[1] >> _VERSION_BITS, length)
        out += name
        out += _U32.pack(seqid)
        at = self._struct(at + length, 1)
        if at != len(data):
            raise ProtocolError(f"{len(data) - at} bytes follow the end of the message")
        return bytes(out)

    def _struct(self, at: int, depth: int) -> int:
        _check_depth(depth)
        data, out = self._data, self._out
        field_id = 0
        for fields in range(_MOST_FIELDS + 1):
            head = data[at]
            at += 1
            if head == 0:
                out.append(0)
                self._count(fields)
                return at
            distance, code = head >> 4, head & 0x0F
            if distance:
                field_id += distance
            else:
                field_id, at = _zigzag(data, at)
            if code == _STRING:
                out += _FIELD.pack(_BINARY_STRING, field_id)
                at = self._string(at)
            elif code <= _FALSE and code:
                out += _BOOL_FIELD.pack(_BINARY_BOOL, field_id, code == _TRUE)
            else:
                out += _FIELD.pack(_binary_type(code), field_id)
                at = self._value(at, code, depth)
        raise ProtocolError(f"a struct has more than {_MOST_FIELDS} fields")

    def _value(self, at: int, code: int, depth: int) -> int:
        """A field's value, or one within a collection."""
        out = self._out
        if code in _INTEGERS:
            number, at = _zigzag(self._data, at)
            out += _INTEGERS[code].pack(number)
            return at
        if code == _STRUCT:
            return self._struct(at, depth + 1)
        if code == _STRING:
            return self._string(at)
        if code in (_LIST, _SET):
            return self._list(at, depth + 1)
        if code == _MAP:
            return self._map(at, depth + 1)
        if code == _DOUBLE:
            out += self._take(at, _DOUBLE_BYTES)[::-1]
            return at + _DOUBLE_BYTES
        if code == _BYTE:
            out.append(self._data[at])
        else:
            out.append(self._data[at] == _TRUE)  # for false some write 2, some 0
        return at + 1

    def _string(self, at: int) -> int:
        length = self._data[at]
        at += 1
        if length > _MOST_SHORT:
            length, at = _varint(self._data, at - 1)
        self._out += _U32.pack(length)
        self._out += self._take(at, length)
        return at + length

    def _list(self, at: int, depth: int) -> int:
        _check_depth(depth)
        head = self._data[at]
        at += 1
        count, code = head >> 4, head & 0x0F
        if count == _LONG_COUNT:
            count, at = _varint(self._data, at)
        self._count(count)
        self._out += _LIST_HEAD.pack(_binary_type(code), count)
        for _ in range(count):
            at = self._value(at, code, depth)
        return at

    def _map(self, at: int, depth: int) -> int:
        _check_depth(depth)
        count, at = _varint(self._data, at)
        if not count:
            self._out += _MAP_HEAD.pack(0, 0, 0)  # an empty map has no types here
            return at
        types = self._data[at]
        at += 1
        self._count(2 * count)
        key, element = types >> 4, types & 0x0F
        self._out += _MAP_HEAD.pack(_binary_type(key), _binary_type(element), count)
        for _ in range(count):
            at = self._value(at, key, depth)
            at = self._value(at, element, depth)
        return at

    def _count(self, values: int) -> None:
        """So many values are to come, of a byte each at least, or have just come."""
        if values > len(self._data):
            raise ProtocolError(f"a collection claims {values} values, more than its message holds")
        self._values_left -= values
        if self._values_left < 0:
            raise ProtocolError(
                f"a compact message holds more than {MAX_VALUES} values; send fewer jobs a call"
            )

    def _take(self, at: int, size: int) -> bytes:
        taken = self._data[at : at + size]
        if len(taken) != size:
            raise ProtocolError(f"a value claims {size} bytes, more than its message holds")
        return taken


def _zigzag(data: bytes, at: int) -> tuple[int, int]:
    """A signed number, and where it ends."""
    number = data[at]
    at += 1
    if number > _MOST_SHORT:
        number, at = _varint(data, at - 1)
    return (number >> 1) ^ -(number & 1), at


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """An unsigned number, and where it ends."""
    number = shift = 0
    while shift < _MOST_VARINT_BITS:
        byte = data[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte <= _MOST_SHORT:
            return number, at
        shift += 7
    raise ProtocolError("a number in a compact message has more than 10 bytes")


class _Contraction:
    """One message of binary, on its way to compact. It comes from this server."""

    __slots__ = ("_at", "_data", "_out")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0
        self._out = bytearray()

    def message(self) -> bytes:
        head = read_message_head(self._data)
        self._out += bytes((PROTOCOL_ID, head.kind << _VERSION_BITS | _VERSION))
        self._varint(head.seqid & 0xFFFFFFFF)
        name = head.method_name.encode()
        self._varint(len(name))
        self._out += name
        self._at = head.at
        self._struct(1)
        return bytes(self._out)

    def _struct(self, depth: int) -> None:
        _check_depth(depth)
        data, out = self._data, self._out
        last_id = 0
        while True:
            binary = data[self._at]
            if binary == 0:
                self._at += 1
                out.append(0)
                return
            _, field_id = _FIELD.unpack_from(data, self._at)
            self._at += _FIELD.size
            code = _compact_type(binary)
            if binary == _BINARY_BOOL:
                code = _TRUE if data[self._at] else _FALSE
                self._at += 1
            distance = field_id - last_id
            if 0 < distance <= _MOST_SHORT_DISTANCE:
                out.append(distance << 4 | code)
            else:
                out.append(code)
                self._zigzag(field_id)
            last_id = field_id
            if binary != _BINARY_BOOL:
                self._value(code, depth)

    def _value(self, code: int, depth: int) -> None:
        data, at, out = self._data, self._at, self._out
        if code == _STRING:
            (length,) = _U32.unpack_from(data, at)
            self._varint(length)
            self._at = at + 4
            out += self._take(length)
        elif code in _INTEGERS:
            (number,) = _INTEGERS[code].unpack_from(data, at)
            self._at = at + _INTEGERS[code].size
            self._zigzag(number)
        elif code == _STRUCT:
            self._struct(depth + 1)
        elif code in (_LIST, _SET):
            self._list(depth + 1)
        elif code == _MAP:
            self._map(depth + 1)
        elif code == _DOUBLE:
            out += self._take(_DOUBLE_BYTES)[::-1]
        elif code == _BYTE:
            out += self._take(1)
        else:
            out.append(_FALSE if self._take(1) == b"\0" else _TRUE)

    def _list(self, depth: int) -> None:
        _check_depth(depth)
        binary, count = _LIST_HEAD.unpack_from(self._data, self._at)
        self._at += _LIST_HEAD.size
        code = _compact_type(binary)
        if count < _LONG_COUNT:
            self._out.append(count << 4 | code)
        else:
            self._out.append(_LONG_COUNT << 4 | code)
            self._varint(count)
        for _ in range(count):
            self._value(code, depth)

    def _map(self, depth: int) -> None:
        _check_depth(depth)
        key, element, count = _MAP_HEAD.unpack_from(self._data, self._at)
        self._at += _MAP_HEAD.size
        self._varint(count)
        if not count:
            return
        key, element = _compact_type(key), _compact_type(element)
        self._out.append(key << 4 | element)
        for _ in range(count):
            self._value(key, depth)
            self._value(element, depth)

    def _take(self, size: int) -> bytes:
        begin = self._at
        self._at = begin + size
        if self._at > len(self._data):
            raise IndexError
        return self._data[begin : self._at]

    def _zigzag(self, number: int) -> None:
        self._varint(number << 1 if number >= 0 else ~(number << 1))

    def _varint(self, number: int) -> None:
        out = self._out
        while number > _MOST_SHORT:
            out.append(number & 0x7F | 0x80)
            number >>= 7
        out.append(number)


def _check_depth(depth: int) -> None:
    if depth > MAX_DEPTH:
        raise ProtocolError(f"values are nested more than {MAX_DEPTH} levels deep")


def _binary_type(code: int) -> int:
    try:
        return _BINARY_TYPES[code]
    except KeyError:
        raise ProtocolError(f"there is no type {code} in Thrift's compact protocol") from None


def _compact_type(code: int) -> int:
    try:
        return _COMPACT_TYPES[code]
    except KeyError:
        raise ProtocolError(f"there is no type {code} in Thrift's binary protocol") from None
