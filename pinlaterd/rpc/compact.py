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
import sys
from abc import ABC, abstractmethod
from typing import Final

from pinlaterd.errors import ProtocolError
from pinlaterd.rpc.interface import MAX_DEPTH, MAX_VALUES, U32, VERSION_1, TType, pack_u32
from pinlaterd.rpc.peek import read_message_head

PROTOCOL_ID: Final = 0x82  # the first byte of each message
_VERSION: Final = 1
_VERSION_BITS: Final = 5  # below the three of the message's type

_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _STRING, _LIST, _SET, _MAP, _STRUCT = range(1, 13)
_BINARY_TYPES: Final[dict[int, int]] = {
    _TRUE: TType.BOOL,
    _FALSE: TType.BOOL,
    _BYTE: TType.BYTE,
    _I16: TType.I16,
    _I32: TType.I32,
    _I64: TType.I64,
    _DOUBLE: TType.DOUBLE,
    _STRING: TType.STRING,
    _LIST: TType.LIST,
    _SET: TType.SET,
    _MAP: TType.MAP,
    _STRUCT: TType.STRUCT,
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

_INTEGERS: Final = {_I16: struct.Struct(">h"), _I32: struct.Struct(">i"), _I64: struct.Struct(">q")}
_FIELD: Final = struct.Struct(">Bh")
_BOOL_FIELD: Final = struct.Struct(">Bh?")
_LIST_HEAD: Final = struct.Struct(">BI")
_MAP_HEAD: Final = struct.Struct(">BBI")
_BINARY_HEAD: Final = struct.Struct(">HBBI")
_DOUBLE_BYTES: Final = 8

# A struct's first field, if it is a text, as that of a job or an ack is.
_COMPACT_FIRST_TEXT: Final = bytes((1 << 4 | _STRING,))
_BINARY_FIRST_TEXT: Final = b"\x0b\x00\x01"

_MOST_FIELDS: Final = 1_000  # of one struct, which is counted at its end


def to_binary(message: bytes, max_bytes: int) -> bytes:
    """Raises ProtocolError for what is no compact message, or more than `max_bytes` as binary."""
    try:
        binary = _Expansion(message, MAX_VALUES).message()
    except IndexError as error:
        raise ProtocolError("a compact message ends within a value") from error
    except struct.error as error:
        raise ProtocolError(f"a number in a compact message is too large: {error}") from error
    if len(binary) > max_bytes:
        raise ProtocolError(
            f"a compact message has {len(binary)} bytes as binary; max_frame_bytes is "
            f"{max_bytes}: send fewer jobs a call, or raise it in etc/pinlaterd.yaml"
        )
    return binary


def from_binary(message: bytes) -> bytes:
    """Raises ProtocolError for what is no binary message."""
    try:
        return _Contraction(message, sys.maxsize).message()
    except (IndexError, struct.error) as error:
        raise ProtocolError("a binary message ends within a value") from error


class _Conversion(ABC):
    """One message on its way from one form to the other.

    Each method goes on `at` a byte and returns where it stopped. Types are those of compact.
    """

    __slots__ = ("_data", "_out", "_values_left")
    # By whether a boolean is true, and a struct's first field: as they are written; as it comes.
    _booleans: tuple[int, int]
    _first_text: tuple[bytes, bytes]

    def __init__(self, data: bytes, most_values: int) -> None:
        self._data = data
        self._out = bytearray()
        self._values_left = most_values

    @abstractmethod
    def _fields(self, at: int, depth: int, last_id: int = 0) -> int:
        """Convert the fields of a struct behind the one of `last_id`, and its end."""

    @abstractmethod
    def _string(self, at: int) -> int: ...

    @abstractmethod
    def _integer(self, at: int, code: int) -> int: ...

    @abstractmethod
    def _list_head(self, at: int) -> tuple[int, int, int]:
        """Read the elements' type, how many they are, and where the first begins."""

    @abstractmethod
    def _map_head(self, at: int) -> tuple[int, int, int, int]:
        """Read the types of keys and values, how many pairs there are, and where they begin."""

    def _value(self, at: int, code: int, depth: int) -> int:
        """Convert a field's value, or one within a collection."""
        if code in _INTEGERS:
            return self._integer(at, code)
        if code == _STRING:
            return self._string(at)
        if code == _STRUCT:
            return self._fields(at, depth + 1)
        if code in (_LIST, _SET):
            return self._list(at, depth + 1)
        if code == _MAP:
            return self._map(at, depth + 1)
        if code == _DOUBLE:
            self._out += self._taken(at, _DOUBLE_BYTES)[::-1]
            return at + _DOUBLE_BYTES
        # A boolean of a collection is 1 if it is true; for false, writers of compact have 2 or 0.
        byte = self._data[at]
        self._out.append(byte if code == _BYTE else self._booleans[byte == _TRUE])
        return at + 1

    def _list(self, at: int, depth: int) -> int:
        _check_depth(depth)
        code, count, at = self._list_head(at)
        if code == _STRUCT:
            return self._structs(at, count, depth + 1)
        for _ in range(count):
            at = self._value(at, code, depth)
        return at

    def _structs(self, at: int, count: int, depth: int) -> int:
        """Convert the structs of a list, jobs or acks, which mostly differ in their first field
        alone: what follows it is converted once, and repeated as long as the same bytes follow."""
        data, out = self._data, self._out
        first, converted_first = self._first_text
        rest, converted, values = b"", bytearray(), 0
        for _ in range(count):
            if not data.startswith(first, at):
                at = self._fields(at, depth)
                continue
            out += converted_first
            end = self._string(at + len(first))
            if rest and data.startswith(rest, end):
                out += converted
                self._count(values)
                at = end + len(rest)
                continue
            begin, left = len(out), self._values_left
            at = self._fields(end, depth, 1)
            rest, converted = data[end:at], out[begin:]
            values = left - self._values_left
        return at

    def _map(self, at: int, depth: int) -> int:
        _check_depth(depth)
        key, element, count, at = self._map_head(at)
        for _ in range(count):
            at = self._value(at, key, depth)
            at = self._value(at, element, depth)
        return at

    def _taken(self, at: int, size: int) -> bytes:
        taken = self._data[at : at + size]
        if len(taken) != size:
            raise ProtocolError(f"a value claims {size} bytes, more than its message holds")
        return taken

    def _count(self, values: int) -> None:
        """Count values that are to come, of a byte each at least, or have just come."""
        if values > len(self._data):
            raise ProtocolError(f"a collection claims {values} values, more than its message holds")
        self._values_left -= values
        if self._values_left < 0:
            raise ProtocolError(
                f"a compact message holds more than {MAX_VALUES} values; send fewer jobs a call"
            )


class _Expansion(_Conversion):
    """One message of compact, on its way to binary; most lengths and numbers have one byte."""

    __slots__ = ()
    _booleans = (0, 1)
    _first_text = (_COMPACT_FIRST_TEXT, _BINARY_FIRST_TEXT)

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
        name = self._taken(at, length)
        out += _BINARY_HEAD.pack(VERSION_1, 0, data[1] >> _VERSION_BITS, length)
        out += name
        out += pack_u32(seqid)
        at = self._fields(at + length, 1)
        if at != len(data):
            raise ProtocolError(f"{len(data) - at} bytes follow the end of the message")
        return bytes(out)

    def _fields(self, at: int, depth: int, last_id: int = 0) -> int:
        _check_depth(depth)
        data, out = self._data, self._out
        for fields in range(1 if last_id else 0, _MOST_FIELDS + 1):
            head = data[at]
            at += 1
            if head == 0:
                out.append(0)
                self._count(fields)
                return at
            distance, code = head >> 4, head & 0x0F
            if distance:
                last_id += distance
            else:
                last_id, at = _zigzag(data, at)
            if code == _STRING:
                out += _FIELD.pack(_BINARY_STRING, last_id)
                at = self._string(at)
            elif code <= _FALSE and code:
                out += _BOOL_FIELD.pack(_BINARY_BOOL, last_id, code == _TRUE)
            else:
                out += _FIELD.pack(_binary_type(code), last_id)
                at = self._value(at, code, depth)
        raise ProtocolError(f"a struct has more than {_MOST_FIELDS} fields")

    def _string(self, at: int) -> int:
        length = self._data[at]
        at += 1
        if length > _MOST_SHORT:
            length, at = _varint(self._data, at - 1)
        self._out += pack_u32(length)
        self._out += self._taken(at, length)
        return at + length

    def _integer(self, at: int, code: int) -> int:
        number, at = _zigzag(self._data, at)
        self._out += _INTEGERS[code].pack(number)
        return at

    def _list_head(self, at: int) -> tuple[int, int, int]:
        count, code = self._data[at] >> 4, self._data[at] & 0x0F
        at += 1
        if count == _LONG_COUNT:
            count, at = _varint(self._data, at)
        self._count(count)
        self._out += _LIST_HEAD.pack(_binary_type(code), count)
        return code, count, at

    def _map_head(self, at: int) -> tuple[int, int, int, int]:
        count, at = _varint(self._data, at)
        if not count:
            self._out += _MAP_HEAD.pack(0, 0, 0)  # an empty map has no types here
            return 0, 0, 0, at
        key, element = self._data[at] >> 4, self._data[at] & 0x0F
        self._count(2 * count)
        self._out += _MAP_HEAD.pack(_binary_type(key), _binary_type(element), count)
        return key, element, count, at + 1


class _Contraction(_Conversion):
    """One message of binary, on its way to compact. It comes from this server."""

    __slots__ = ()
    _booleans = (_FALSE, _TRUE)
    _first_text = (_BINARY_FIRST_TEXT, _COMPACT_FIRST_TEXT)

    def message(self) -> bytes:
        head = read_message_head(self._data)
        name = head.method_name.encode()
        self._out += bytes((PROTOCOL_ID, head.kind << _VERSION_BITS | _VERSION))
        self._add_varint(head.seqid & 0xFFFFFFFF)
        self._add_varint(len(name))
        self._out += name
        self._fields(head.at, 1)
        return bytes(self._out)

    def _fields(self, at: int, depth: int, last_id: int = 0) -> int:
        _check_depth(depth)
        data, out = self._data, self._out
        while data[at]:
            binary, field_id = _FIELD.unpack_from(data, at)
            at += _FIELD.size
            code = _compact_type(binary)
            if code == _TRUE:
                code = _TRUE if data[at] else _FALSE
                at += 1
            distance = field_id - last_id
            if 0 < distance <= _MOST_SHORT_DISTANCE:
                out.append(distance << 4 | code)
            else:
                out.append(code)
                self._add_zigzag(field_id)
            last_id = field_id
            if code > _FALSE:
                at = self._value(at, code, depth)
        out.append(0)
        return at + 1

    def _string(self, at: int) -> int:
        length: int = U32(self._data, at)[0]
        self._add_varint(length)
        self._out += self._taken(at + 4, length)
        return at + 4 + length

    def _integer(self, at: int, code: int) -> int:
        (number,) = _INTEGERS[code].unpack_from(self._data, at)
        self._add_zigzag(number)
        return at + _INTEGERS[code].size

    def _list_head(self, at: int) -> tuple[int, int, int]:
        binary, count = _LIST_HEAD.unpack_from(self._data, at)
        code = _compact_type(binary)
        if count < _LONG_COUNT:
            self._out.append(count << 4 | code)
        else:
            self._out.append(_LONG_COUNT << 4 | code)
            self._add_varint(count)
        return code, count, at + _LIST_HEAD.size

    def _map_head(self, at: int) -> tuple[int, int, int, int]:
        binary_key, binary, count = _MAP_HEAD.unpack_from(self._data, at)
        at += _MAP_HEAD.size
        self._add_varint(count)
        if not count:
            return 0, 0, 0, at
        key, element = _compact_type(binary_key), _compact_type(binary)
        self._out.append(key << 4 | element)
        return key, element, count, at

    def _add_zigzag(self, number: int) -> None:
        self._add_varint(number << 1 if number >= 0 else ~(number << 1))

    def _add_varint(self, number: int) -> None:
        while number > _MOST_SHORT:
            self._out.append(number & 0x7F | 0x80)
            number >>= 7
        self._out.append(number)


def _zigzag(data: bytes, at: int) -> tuple[int, int]:
    """Read a signed number, and where it ends."""
    number = data[at]
    at += 1
    if number > _MOST_SHORT:
        number, at = _varint(data, at - 1)
    return (number >> 1) ^ -(number & 1), at


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Read an unsigned number, and where it ends."""
    number = shift = 0
    while shift < _MOST_VARINT_BITS:
        byte = data[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte <= _MOST_SHORT:
            return number, at
        shift += 7
    raise ProtocolError("a number in a compact message has more than 10 bytes")


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
