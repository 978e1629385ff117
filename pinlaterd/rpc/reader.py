"""Any struct of the interface from bytes, field by field, whatever the order of the fields.

It is the reference for what bytes mean: the tuned readers (`tuned`) decline what they do not know
well and leave it to this one. It believes no length before it has compared it with what is there,
and says where what is wrong. What is wrong first, in the order of the bytes, is what is reported.
"""

from __future__ import annotations

import struct
from typing import Any, Final

from pinlaterd.errors import ProtocolError
from pinlaterd.rpc.binary import FIXED_SIZE, FORMATS, I32, LEAST_SIZE, TType, skip_value, type_name
from pinlaterd.rpc.interface import Struct, Type

_STRING: Final = int(TType.STRING)
_STRUCT: Final = int(TType.STRUCT)
_MAP: Final = int(TType.MAP)
_SET: Final = int(TType.SET)
_LIST: Final = int(TType.LIST)

_UNPACK: Final = {code: struct.Struct(f">{letter}").unpack_from for code, letter in FORMATS.items()}
_FIELD_ID: Final = struct.Struct(">xh").unpack_from
_LIST_HEAD: Final = struct.Struct(">Bi")
_MAP_HEAD: Final = struct.Struct(">BBi")
# What the length of a list can't exceed.
UNLIMITED: Final = 1 << 31


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
    reader = _Reader(data, at, most_elements)
    try:
        value = reader.struct(declared)
    except (struct.error, IndexError) as error:
        raise ProtocolError("the message ends within a struct") from error
    if reader.at != len(data):
        raise ProtocolError(f"{len(data) - reader.at} bytes follow the end of the message")
    return value


class _Reader:
    """Each method reads what begins `at` a byte, and goes on to its end."""

    __slots__ = ("_data", "_most_elements", "at")

    def __init__(self, data: bytes, at: int, most_elements: int) -> None:
        self._data = data
        self._most_elements = most_elements
        self.at = at

    def struct(self, declared: Struct) -> Any:
        data = self._data
        values = declared.defaults.copy()
        given = 0
        while True:
            at = self.at
            found = declared.by_header.get(data[at : at + 3])
            if found is None:
                if data[at] == 0:
                    self.at = at + 1
                    break
                self._skip_field(declared)
                continue
            field, bit = found
            self.at = at + 3
            try:
                if given & bit:
                    raise Mismatch("is given twice; expected it once")
                given |= bit
                values[field.place] = self._value(field.type)
            except Mismatch as mismatch:
                raise mismatch.within(field.name) from None
        missing = declared.required & ~given
        if missing:
            field = next(field for field, bit in declared.by_header.values() if missing & bit)
            raise Mismatch(
                f"is missing; {declared.name} requires a {field.type.name} in field {field.id}"
            ).within(field.name)
        return tuple.__new__(declared.make, values)

    def _skip_field(self, declared: Struct) -> None:
        """A field that is not in the interface, or not of this type."""
        code = self._data[self.at]
        (number,) = _FIELD_ID(self._data, self.at)
        field = declared.by_id.get(number)
        if field is not None:
            raise Mismatch(f"is of type {type_name(code)}; expected {field.type.name}").within(
                field.name
            )
        self.at = skip_value(self._data, self.at + 3, code)

    def _value(self, expected: Type) -> Any:
        code = expected.code
        if code == _STRING:
            raw = self._bytes()
            return raw if expected.binary else _text(raw)
        if code in FIXED_SIZE:
            (value,) = _UNPACK[code](self._data, self.at)
            self.at += FIXED_SIZE[code]
            return value if expected.enum is None else _enum(expected, value)
        if code == _STRUCT:
            assert expected.struct is not None
            return self.struct(expected.struct)
        if code == _LIST:
            return self._list(expected)
        if code == _SET:
            return frozenset(self._list(expected))
        return self._map(expected)

    def _bytes(self) -> bytes:
        (length,) = I32(self._data, self.at)
        begin = self.at + 4
        if not 0 <= length <= len(self._data) - begin:
            raise ProtocolError(f"a string claims {length} bytes, more than its message holds")
        self.at = begin + length
        return self._data[begin : self.at]

    def _list(self, expected: Type) -> list[Any]:
        element = expected.element
        assert element is not None
        code, count = _LIST_HEAD.unpack_from(self._data, self.at)
        self.at += _LIST_HEAD.size
        if count == 0:
            return []
        if code != element.code:
            raise Mismatch(f"holds values of type {type_name(code)}; expected {element.name}")
        self._check_count(count, LEAST_SIZE[code])
        if count > self._most_elements:
            raise Mismatch(
                f"has {count} elements; at most {self._most_elements} are allowed in a call: "
                "split it, or raise max_jobs_per_call in etc/pinlaterd.yaml"
            )
        values: list[Any] = []
        try:
            for _ in range(count):
                values.append(self._value(element))  # noqa: PERF401 - an error counts them
        except Mismatch as mismatch:
            raise mismatch.within(f"[{len(values)}]") from None
        return values

    def _map(self, expected: Type) -> dict[Any, Any]:
        key, element = expected.key, expected.element
        assert key is not None
        assert element is not None
        key_code, code, count = _MAP_HEAD.unpack_from(self._data, self.at)
        self.at += _MAP_HEAD.size
        if count == 0:
            return {}
        if (key_code, code) != (key.code, element.code):
            raise Mismatch(
                f"maps type {type_name(key_code)} to {type_name(code)}; expected {expected.name}"
            )
        self._check_count(count, LEAST_SIZE[key_code] + LEAST_SIZE[code])
        values: dict[Any, Any] = {}
        try:
            for _ in range(count):
                name = self._value(key)
                values[name] = self._value(element)
        except Mismatch as mismatch:
            raise mismatch.within(f"[{len(values)}]") from None
        return values

    def _check_count(self, count: int, least: int) -> None:
        if not 0 <= count * least <= len(self._data) - self.at:
            raise ProtocolError(f"a collection claims {count} values, more than its message holds")


def _text(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise Mismatch(f"is not valid UTF-8 at byte {error.start}; text has to be UTF-8") from None


def _enum(expected: Type, value: int) -> int:
    assert expected.enum is not None
    try:
        return expected.enum(value)
    except ValueError:
        choices = ", ".join(f"{each.value} {each.name}" for each in expected.enum)
        raise Mismatch(f"is {value}; choose from {choices}") from None
