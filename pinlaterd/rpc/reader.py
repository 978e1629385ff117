"""Any struct of the interface from bytes, field by field, whatever the order of the fields.

It is the reference for what bytes mean: the fast readers decline what they do not know well and
leave it to this one. It believes no length before it has compared it with what is there, and
says where what is wrong. What is wrong first, in the order of the bytes, is what is reported.
"""

from __future__ import annotations

import struct
from typing import Any, Final

from pinlaterd.errors import ProtocolError
from pinlaterd.rpc.binding import Bound, BoundType
from pinlaterd.rpc.thrift_types import LEAST_SIZE, TType, type_name
from pinlaterd.rpc.walk import skip_value

_BOOL: Final = int(TType.BOOL)
_I32_CODE: Final = int(TType.I32)
_STRING: Final = int(TType.STRING)
_STRUCT: Final = int(TType.STRUCT)
_MAP: Final = int(TType.MAP)
_SET: Final = int(TType.SET)
_LIST: Final = int(TType.LIST)

_NUMBERS: Final = {
    int(TType.BYTE): struct.Struct(">b"),
    int(TType.DOUBLE): struct.Struct(">d"),
    int(TType.I16): struct.Struct(">h"),
    _I32_CODE: struct.Struct(">i"),
    int(TType.I64): struct.Struct(">q"),
}
# What the length of a list can't exceed.
UNLIMITED: Final = 1 << 31
_FIELD: Final = struct.Struct(">h")
_LENGTH: Final = struct.Struct(">i")
_LIST_HEAD: Final = struct.Struct(">Bi")
_MAP_HEAD: Final = struct.Struct(">BBi")


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


class Reader:
    """Reads one message from `at` on; all of its bytes must be there."""

    __slots__ = ("_data", "_end", "_most_elements", "at")

    def __init__(self, data: bytes, at: int, most_elements: int = UNLIMITED) -> None:
        """A list of more than `most_elements` is a Mismatch, before any of them is read."""
        self._data = data
        self._end = len(data)
        self._most_elements = most_elements
        self.at = at

    def read_struct(self, bound: Bound) -> Any:
        """What `bound` makes of the struct here. Raises Mismatch or ProtocolError."""
        try:
            return self._struct(bound)
        except (struct.error, IndexError) as error:
            raise ProtocolError("the message ends within a struct") from error

    def finish(self) -> None:
        if self.at != self._end:
            raise ProtocolError(f"{self._end - self.at} bytes follow the end of the message")

    def _struct(self, bound: Bound) -> Any:
        data = self._data
        values: dict[str, object] = {}
        missing = set(bound.required)
        while True:
            code = data[self.at]
            if code == 0:
                self.at += 1
                break
            (number,) = _FIELD.unpack_from(data, self.at + 1)
            self.at += 3
            field = bound.fields.get(number)
            if field is None:
                self.at = skip_value(data, self.at, code)
                continue
            try:
                if code != field.type.code:
                    raise Mismatch(f"is of type {type_name(code)}; expected {field.type.name}")
                if field.key in values:
                    raise Mismatch("is given twice; expected it once")
                values[field.key] = self._value(field.type)
            except Mismatch as mismatch:
                raise mismatch.within(field.name) from None
            missing.discard(number)
        if missing:
            field = bound.fields[min(missing)]
            raise Mismatch(
                f"is missing; {bound.name} requires a {field.type.name} in field {field.id}"
            ).within(field.name)
        return bound.make(**{**bound.defaults, **values})

    def _value(self, expected: BoundType) -> Any:
        code = expected.code
        if code == _STRING:
            raw = self._bytes()
            return raw if expected.binary else _text(raw)
        if code == _STRUCT:
            assert expected.struct is not None
            return self._struct(expected.struct)
        if code == _BOOL:
            self.at += 1
            return self._data[self.at - 1] != 0
        if code == _LIST:
            return self._list(expected)
        if code == _SET:
            return frozenset(self._list(expected))
        if code == _MAP:
            return self._map(expected)
        number = _NUMBERS[code]
        (value,) = number.unpack_from(self._data, self.at)
        self.at += number.size
        return value if expected.enum is None else _enum(expected, value)

    def _bytes(self) -> bytes:
        (length,) = _LENGTH.unpack_from(self._data, self.at)
        begin = self.at + 4
        if not 0 <= length <= self._end - begin:
            raise ProtocolError(f"a string claims {length} bytes, more than its message holds")
        self.at = begin + length
        return self._data[begin : self.at]

    def _list(self, expected: BoundType) -> list[Any]:
        element = expected.element
        assert element is not None
        code, count = _LIST_HEAD.unpack_from(self._data, self.at)
        self.at += _LIST_HEAD.size
        if count == 0:
            return []
        if code != element.code:
            raise Mismatch(f"holds values of type {type_name(code)}; expected {element.name}")
        self._check_count(count, LEAST_SIZE[TType(code)])
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

    def _map(self, expected: BoundType) -> dict[Any, Any]:
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
        self._check_count(count, LEAST_SIZE[TType(key_code)] + LEAST_SIZE[TType(code)])
        values: dict[Any, Any] = {}
        try:
            for _ in range(count):
                name = self._value(key)
                values[name] = self._value(element)
        except Mismatch as mismatch:
            raise mismatch.within(f"[{len(values)}]") from None
        return values

    def _check_count(self, count: int, least: int) -> None:
        if not 0 <= count * least <= self._end - self.at:
            raise ProtocolError(f"a collection claims {count} values, more than its message holds")


def _text(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise Mismatch(f"is not valid UTF-8 at byte {error.start}; text has to be UTF-8") from None


def _enum(expected: BoundType, value: int) -> int:
    assert expected.enum is not None
    try:
        return expected.enum(value)
    except ValueError:
        choices = ", ".join(f"{each.value} {each.name}" for each in expected.enum)
        raise Mismatch(f"is {value}; choose from {choices}") from None
