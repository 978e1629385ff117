"""Any struct of the interface from bytes, field by field, whatever the order of the fields.

It is the reference for what bytes mean: the tuned readers (`tuned`, `answers`) decline what they do
not know well and leave it to this one. It believes no length before it has compared it with what is
there, and says where what is wrong. What is wrong first, in the order of the bytes, is reported.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import cache
from typing import Any, Final

from pinlaterd.errors import ProtocolError
from pinlaterd.rpc.binary import FIXED_SIZE, FORMATS, LEAST_SIZE, U32, TType, skip_value, type_name
from pinlaterd.rpc.interface import Struct, Type

# What the length of a list can't exceed.
UNLIMITED: Final = 1 << 31

# What begins at a byte, and where it ends; the last is how many elements a list may have.
Read = Callable[[bytes, int, int], tuple[Any, int]]

_FIELD_ID: Final = struct.Struct(">xh").unpack_from
_LIST_HEAD: Final = struct.Struct(">BI").unpack_from
_MAP_HEAD: Final = struct.Struct(">BBI").unpack_from
_new: Final = tuple.__new__  # a NamedTuple's own constructor costs three times as much


class Mismatch(Exception):
    """Well formed, but not what the interface says. `path` grows outwards as this is raised."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.path: list[str] = []

    def within(self, step: str) -> Mismatch:
        self.path.append(step)
        return self

    def __str__(self) -> str:
        where = ""
        for step in reversed(self.path):
            where += step if step.startswith("[") or not where else f".{step}"
        return f"{where} {self.problem}" if where else self.problem


def read_struct(data: bytes, at: int, declared: Struct, most_elements: int = UNLIMITED) -> Any:
    """What `declared` makes of the struct that begins at `at` and ends with `data`.

    Raises Mismatch, for a list of more than `most_elements` before any of them is read, or
    ProtocolError."""
    try:
        value, end = _struct_reader(declared)(data, at, most_elements)
    except (struct.error, IndexError) as error:
        raise ProtocolError("the message ends within a struct") from error
    if end != len(data):
        raise ProtocolError(f"{len(data) - end} bytes follow the end of the message")
    return value


@cache
def _struct_reader(declared: Struct) -> Read:
    readers = {
        field.header: (1 << at, field.place, _reader(field.type), field.name)
        for at, field in enumerate(declared.fields)
    }
    required = sum(bit for bit, field in _bits(declared) if field.required)

    def read(data: bytes, at: int, most: int) -> tuple[Any, int]:
        values = declared.defaults.copy()
        given = 0
        while True:
            found = readers.get(data[at : at + 3])
            if found is None:
                if data[at] == 0:
                    break
                at = _skip_field(declared, data, at)
                continue
            bit, place, read_value, name = found
            try:
                if given & bit:
                    raise Mismatch("is given twice; expected it once")
                given |= bit
                values[place], at = read_value(data, at + 3, most)
            except Mismatch as mismatch:
                raise mismatch.within(name) from None
        if required & ~given:
            field = next(field for bit, field in _bits(declared) if bit & required & ~given)
            raise Mismatch(
                f"is missing; {declared.name} requires a {field.type.name} in field {field.id}"
            ).within(field.name)
        return _new(declared.make, values), at + 1

    return read


def _bits(declared: Struct) -> list[tuple[int, Any]]:
    """Of each field, in the set of those that were given."""
    return [(1 << at, field) for at, field in enumerate(declared.fields)]


def _skip_field(declared: Struct, data: bytes, at: int) -> int:
    """A field that is not in the interface, or not of this type."""
    code = data[at]
    (number,) = _FIELD_ID(data, at)
    for field in declared.fields:
        if field.id == number:
            raise Mismatch(f"is of type {type_name(code)}; expected {field.type.name}").within(
                field.name
            )
    return skip_value(data, at + 3, code)


def _reader(declared: Type) -> Read:
    if declared.code == TType.STRING:
        return _read_bytes if declared.binary else _read_text
    if declared.code in FORMATS:
        return _number_reader(declared)
    if declared.struct is not None:
        return _struct_reader(declared.struct)
    if declared.key is not None:
        return _map_reader(declared)
    read_list = _list_reader(declared)
    if declared.code == TType.LIST:
        return read_list

    def read_set(data: bytes, at: int, most: int) -> tuple[Any, int]:
        values, at = read_list(data, at, most)
        return frozenset(values), at

    return read_set


def _read_bytes(data: bytes, at: int, _most: int) -> tuple[bytes, int]:
    begin = at + 4
    end = begin + U32(data, at)[0]
    if end > len(data):
        raise ProtocolError(f"a string claims {end - begin} bytes, more than its message holds")
    return data[begin:end], end


def _read_text(data: bytes, at: int, most: int) -> tuple[str, int]:
    raw, end = _read_bytes(data, at, most)
    try:
        return raw.decode(), end
    except UnicodeDecodeError as error:
        raise Mismatch(f"is not valid UTF-8 at byte {error.start}; text has to be UTF-8") from None


def _number_reader(declared: Type) -> Read:
    size, enum = FIXED_SIZE[declared.code], declared.enum
    unpack = struct.Struct(f">{FORMATS[declared.code]}").unpack_from

    def read_enum(data: bytes, at: int, _most: int) -> tuple[Any, int]:
        assert enum is not None
        (value,) = unpack(data, at)
        try:
            return enum(value), at + size
        except ValueError:
            choices = ", ".join(f"{each.value} {each.name}" for each in enum)
            raise Mismatch(f"is {value}; choose from {choices}") from None

    return (lambda data, at, _: (unpack(data, at)[0], at + size)) if enum is None else read_enum


def _list_reader(declared: Type) -> Read:
    element = declared.element
    assert element is not None
    code, name, read_element = element.code, element.name, _reader(element)

    def read(data: bytes, at: int, most: int) -> tuple[Any, int]:
        values: list[Any] = []
        found, count = _LIST_HEAD(data, at)
        at += 5
        if count == 0:
            return values, at
        if found != code:
            raise Mismatch(f"holds values of type {type_name(found)}; expected {name}")
        _check_count(count, LEAST_SIZE[code], data, at)
        if count > most:
            raise Mismatch(
                f"has {count} elements; at most {most} are allowed in a call: "
                "split it, or raise max_jobs_per_call in etc/pinlaterd.yaml"
            )
        try:
            for _ in range(count):
                value, at = read_element(data, at, most)
                values.append(value)
        except Mismatch as mismatch:
            raise mismatch.within(f"[{len(values)}]") from None
        return values, at

    return read


def _map_reader(declared: Type) -> Read:
    key, element = declared.key, declared.element
    assert key is not None
    assert element is not None
    read_key, read_element = _reader(key), _reader(element)
    types = key.code, element.code
    least = LEAST_SIZE[key.code] + LEAST_SIZE[element.code]

    def read(data: bytes, at: int, most: int) -> tuple[Any, int]:
        values: dict[Any, Any] = {}
        *found, count = _MAP_HEAD(data, at)
        at += 6
        if count == 0:
            return values, at
        if tuple(found) != types:
            a, b = map(type_name, found)
            raise Mismatch(f"maps type {a} to {b}; expected {declared.name}")
        _check_count(count, least, data, at)
        try:
            for _ in range(count):
                name, at = read_key(data, at, most)
                values[name], at = read_element(data, at, most)
        except Mismatch as mismatch:
            raise mismatch.within(f"[{len(values)}]") from None
        return values, at

    return read


def _check_count(count: int, least: int, data: bytes, at: int) -> None:
    """No more values than could follow in so few bytes."""
    if count * least > len(data) - at:
        raise ProtocolError(f"a collection claims {count} values, more than its message holds")
