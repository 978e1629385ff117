"""Any struct of the interface from and to bytes, by the tables.

The readers take the fields in any order. They are the reference for what bytes mean: the tuned ones
(`tuned`, `answers`) decline what they do not know well and leave it to these. They believe no
length before they have compared it with what is there, and say where what is wrong. What is wrong
first, in the order of the bytes, is reported.

The writers put the fields in the order of their ids; None is a field that is not given. Elements of
one list, jobs or acks, mostly differ in their first field alone: what follows it is written once,
and repeated.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache
from operator import itemgetter
from typing import Any, Final

from pinlaterd.errors import ProtocolError
from pinlaterd.rpc.interface import (
    FIXED_SIZE,
    FORMATS,
    LEAST_SIZE,
    MAX_UNKNOWN_VALUES,
    MAX_VALUES,
    U32,
    Field,
    ReadLimits,
    Struct,
    TType,
    Type,
    pack_u32,
    skip_value,
    type_name,
)

# In addition to the first field: one that may change from element to element, and another.
_LEAST_OTHERS: Final = 2
# What the length of a list can't exceed.
UNLIMITED: Final = 1 << 31

# What begins at a byte, and where it ends.
Read = Callable[[bytes, int, ReadLimits], tuple[Any, int]]

_FIELD_ID: Final = struct.Struct(">xh").unpack_from
_LIST_HEAD: Final = struct.Struct(">BI").unpack_from
_MAP_HEAD: Final = struct.Struct(">BBI").unpack_from
# Appends what it writes of a value.
Write = Callable[[list[bytes], Any], None]

_STRING: Final = int(TType.STRING)
_WHOLE_NUMBERS: Final = (TType.BYTE, TType.I16, TType.I32, TType.I64)

# The length of a short text as the four bytes in front of it: as text, so that ASCII texts can be
# put together as text and encoded at once (which is why it stops at 127).
SHORT_TEXT: Final = tuple("\0\0\0" + chr(length) for length in range(128))


# --- reading --------------------------------------------------------------------------------


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
    """Read what `declared` makes of the struct that begins at `at` and ends with `data`.

    Raises Mismatch, for a list of more than `most_elements` before any of them is read, or
    ProtocolError."""
    # Servers that are newer than a client may add fields to each of many jobs.
    values = MAX_VALUES if most_elements == UNLIMITED else MAX_UNKNOWN_VALUES
    try:
        value, end = _struct_reader(declared)(data, at, ReadLimits(most_elements, values))
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

    def read(data: bytes, at: int, limits: ReadLimits) -> tuple[Any, int]:
        values = declared.defaults.copy()
        given = 0
        while True:
            found = readers.get(data[at : at + 3])
            if found is None:
                if data[at] == 0:
                    break
                at = _skip_field(declared, data, at, limits)
                continue
            bit, place, read_value, name = found
            try:
                if given & bit:
                    raise Mismatch("is given twice; expected it once")
                given |= bit
                values[place], at = read_value(data, at + 3, limits)
            except Mismatch as mismatch:
                raise mismatch.within(name) from None
        if required & ~given:
            field = next(field for bit, field in _bits(declared) if bit & required & ~given)
            raise Mismatch(
                f"is missing; {declared.name} requires a {field.type.name} in field {field.id}"
            ).within(field.name)
        return declared.made(values), at + 1

    return read


def _bits(declared: Struct) -> list[tuple[int, Any]]:
    """Return the bit of each field in the set of those that were given."""
    return [(1 << at, field) for at, field in enumerate(declared.fields)]


def _skip_field(declared: Struct, data: bytes, at: int, limits: ReadLimits) -> int:
    """Return the end of a field that is not in the interface, or not of this type."""
    code = data[at]
    (number,) = _FIELD_ID(data, at)
    for field in declared.fields:
        if field.id == number:
            raise Mismatch(f"is of type {type_name(code)}; expected {field.type.name}").within(
                field.name
            )
    return skip_value(data, at + 3, code, limits)


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

    def read_set(data: bytes, at: int, limits: ReadLimits) -> tuple[Any, int]:
        values, at = read_list(data, at, limits)
        return frozenset(values), at

    return read_set


def _read_bytes(data: bytes, at: int, _limits: ReadLimits) -> tuple[bytes, int]:
    begin = at + 4
    end = begin + U32(data, at)[0]
    if end > len(data):
        raise ProtocolError(f"a string claims {end - begin} bytes, more than its message holds")
    return data[begin:end], end


def _read_text(data: bytes, at: int, limits: ReadLimits) -> tuple[str, int]:
    raw, end = _read_bytes(data, at, limits)
    try:
        return raw.decode(), end
    except UnicodeDecodeError as error:
        raise Mismatch(f"is not valid UTF-8 at byte {error.start}; text has to be UTF-8") from None


def _number_reader(declared: Type) -> Read:
    size, enum = FIXED_SIZE[declared.code], declared.enum
    unpack = struct.Struct(f">{FORMATS[declared.code]}").unpack_from

    def read_enum(data: bytes, at: int, _limits: ReadLimits) -> tuple[Any, int]:
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

    def read(data: bytes, at: int, limits: ReadLimits) -> tuple[Any, int]:
        values: list[Any] = []
        found, count = _LIST_HEAD(data, at)
        at += 5
        if count == 0:
            return values, at
        if found != code:
            raise Mismatch(f"holds values of type {type_name(found)}; expected {name}")
        _check_count(count, LEAST_SIZE[code], data, at)
        if count > limits.elements:
            raise Mismatch(
                f"has {count} elements; at most {limits.elements} are allowed in a call: "
                "split it, or raise max_jobs_per_call in etc/pinlaterd.yaml"
            )
        try:
            for _ in range(count):
                value, at = read_element(data, at, limits)
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

    def read(data: bytes, at: int, limits: ReadLimits) -> tuple[Any, int]:
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
                name, at = read_key(data, at, limits)
                values[name], at = read_element(data, at, limits)
        except Mismatch as mismatch:
            raise mismatch.within(f"[{len(values)}]") from None
        return values, at

    return read


def _check_count(count: int, least: int, data: bytes, at: int) -> None:
    """Refuse more values than could follow in so few bytes."""
    if count * least > len(data) - at:
        raise ProtocolError(f"a collection claims {count} values, more than its message holds")


# --- writing --------------------------------------------------------------------------------


@cache
def struct_writer(declared: Struct) -> Write:
    """Raises one of UNFIT for a value that the types cannot hold; `problem` says where it is."""
    fields = _places(declared, declared.fields)

    def write(parts: list[bytes], value: Sequence[Any]) -> None:
        for index, write_field in fields:
            content = value[index]
            if content is not None:
                write_field(parts, content)
        parts.append(b"\0")

    return write


def _places(declared: Struct, fields: Sequence[Field]) -> list[tuple[int, Write]]:
    """Return the place of each field in the model's record, with what writes it. That of a field of
    `options` is theirs."""
    return [
        (field.place, _writer(field.type, field.header))
        if field.place < declared.size
        else (declared.options_at, _option_writer(declared, field))
        for field in fields
    ]


def _option_writer(declared: Struct, field: Field) -> Write:
    at = field.place - declared.size
    usual, write = declared.no_options[at], _writer(field.type, field.header)

    def write_option(parts: list[bytes], options: Sequence[Any]) -> None:
        if options[at] != usual:
            write(parts, options[at])

    return write_option


def _writer(declared: Type, head: bytes = b"") -> Write:
    """Make what writes values of this type, with `head` in front."""
    code, element = declared.code, declared.element
    if code in FORMATS:
        pack = struct.Struct(f">{len(head)}s{FORMATS[code]}").pack
        return lambda parts, value: parts.append(pack(head, value))
    if code == _STRING:
        return _bytes_writer(head) if declared.binary else _text_writer(head)
    if declared.struct is not None:
        return _part_writer(head, struct_writer(declared.struct))
    assert element is not None
    if declared.key is not None:
        head += bytes((declared.key.code, element.code))
        return _map_writer(head, _writer(declared.key), _writer(element))
    head += bytes((element.code,))
    if element.code in FORMATS:
        return _numbers_writer(head, FORMATS[element.code])
    return texts_writer(head) if element.struct is None else _structs_writer(head, element.struct)


def _bytes_writer(head: bytes) -> Write:
    return lambda parts, value: parts.extend((head, pack_u32(len(value)), value))


def _text_writer(head: bytes) -> Write:
    pack = struct.Struct(f">{len(head)}sI").pack

    def write(parts: list[bytes], value: str) -> None:
        raw = value.encode()
        parts += (pack(head, len(raw)), raw)

    return write


def _part_writer(head: bytes, write_struct: Write) -> Write:
    def write(parts: list[bytes], value: object) -> None:
        parts.append(head)
        write_struct(parts, value)

    return write


def _map_writer(head: bytes, write_key: Write, write_element: Write) -> Write:
    def write(parts: list[bytes], value: Mapping[Any, Any]) -> None:
        parts += (head, pack_u32(len(value)))
        for key, element in value.items():
            write_key(parts, key)
            write_element(parts, element)

    return write


def texts_writer(head: bytes) -> Write:
    """Make what writes a list or set of texts, which are mostly short and ASCII."""

    def write(parts: list[bytes], values: Collection[str]) -> None:
        parts += (head, pack_u32(len(values)))
        try:
            joined = "".join([SHORT_TEXT[len(value)] + value for value in values])
            # Lengths in characters are lengths in bytes only where all is ASCII.
            parts.append(joined.encode("ascii"))
        except (IndexError, UnicodeEncodeError):
            parts += map(sized, values)

    return write


def _numbers_writer(head: bytes, letter: str) -> Write:
    """Write a list of numbers or booleans; `letter`: what `struct` calls their type."""

    def write(parts: list[bytes], values: Sequence[Any]) -> None:
        parts += (head, pack_u32(len(values)), struct.pack(f">{len(values)}{letter}", *values))

    return write


def sized(text: str) -> bytes:
    raw = text.encode()
    return pack_u32(len(raw)) + raw


def _structs_writer(head: bytes, declared: Struct) -> Write:
    """Write a list of structs.

    If they begin with a text or bytes, what equals the one before is not written again: jobs of one
    call mostly differ in the first field alone, acks in the first and the last text, the claim.
    Options that come last are written for each."""
    first, *others = declared.fields
    of_options = [field for field in others if field.place >= declared.size]
    if others[len(others) - len(of_options) :] == of_options:
        del others[len(others) - len(of_options) :]
    else:
        of_options = []
    write_options = [write for _, write in _places(declared, of_options)]
    if first.type.code != _STRING or len(others) < _LEAST_OTHERS:
        return _plain_structs_writer(head, struct_writer(declared))
    is_text, first_head, first_place = not first.type.binary, first.header, first.place
    pack_first = struct.Struct(">3sI").pack
    places = _places(declared, others)
    texts = [
        at
        for at, field in enumerate(others)
        if field.type.code == _STRING and field.place < declared.size
    ]
    last = texts[-1] if texts else len(others) - 1
    inner, (last_place, write_last), behind = places[:last], places[last], places[last + 1 :]
    alike_of = itemgetter(*[place for place, _ in (*inner, *behind)])

    def write(parts: list[bytes], values: Sequence[Sequence[Any]]) -> None:
        parts += (head, pack_u32(len(values)))
        known: tuple[Any, ...] = ()  # all fields but the first and the last text
        known_last: object = None
        middle = end = written = b""  # those before and behind that text; with it
        for value in values:
            raw = value[first_place].encode() if is_text else value[first_place]
            alike, last_text = alike_of(value), value[last_place]
            if last_text != known_last or alike != known or not written:
                if alike != known or not written:
                    middle, end = _written(inner, value), _written(behind, value) + b"\0"
                known, known_last = alike, last_text
                rest = [middle]
                if last_text is not None:
                    write_last(rest, last_text)
                rest.append(end)
                written = b"".join(rest)
            options = value[declared.options_at] if write_options else None
            if options is None:
                parts += (pack_first(first_head, len(raw)), raw, written)
                continue
            parts += (pack_first(first_head, len(raw)), raw, written[:-1])
            for write_option in write_options:
                write_option(parts, options)
            parts.append(b"\0")

    return write


def _written(fields: Sequence[tuple[int, Write]], value: Sequence[Any]) -> bytes:
    parts: list[bytes] = []
    for index, write in fields:
        if value[index] is not None:
            write(parts, value[index])
    return b"".join(parts)


def _plain_structs_writer(head: bytes, write_struct: Write) -> Write:
    def write(parts: list[bytes], values: Sequence[Any]) -> None:
        parts += (head, pack_u32(len(values)))
        for value in values:
            write_struct(parts, value)

    return write


# --- what does not fit ----------------------------------------------------------------------

UNFIT: Final = (struct.error, ValueError, TypeError, AttributeError, IndexError)
_SHOWN_CHARS: Final = 60


def problem(declared: Type, value: object, where: str = "") -> str | None:
    """Say what of `value` can't be written, as in "jobs[2].body: expected bytes, got 'x'"; None if
    all of it can."""
    parts: list[bytes] = []
    try:
        _writer(declared)(parts, value)
        b"".join(parts)
        return None
    except UnicodeEncodeError as error:
        wrong = f"a text that can't be UTF-8: {error.reason}"
    except UNFIT:
        shown = repr(value)
        if len(shown) > _SHOWN_CHARS:
            shown = shown[:_SHOWN_CHARS] + "…"
        wrong = f"expected {_wanted(declared, value)}, got {shown}"
    inner: Iterable[tuple[Type, object, str]] = ()
    if declared.struct is not None and isinstance(value, tuple):
        inner = [
            (field.type, _named(value, field.key), f"{where}.{field.key}".lstrip("."))
            for field in declared.struct.fields
        ]
    elif declared.element is not None and declared.key is None and isinstance(value, Iterable):
        inner = [(declared.element, each, f"{where}[{at}]") for at, each in enumerate(value)]
    found = (problem(*each) for each in inner if each[1] is not None)
    return next(filter(None, found), f"{where}: {wrong}")


def _named(value: object, key: str) -> object:
    """Return a field of a record of the model or of its options."""
    return getattr(value, key, getattr(getattr(value, "options", None), key, None))


def _wanted(declared: Type, value: object) -> str:
    if declared.code in (TType.LIST, TType.SET):
        return "a list"
    if declared.code == _STRING:
        return "bytes" if declared.binary else "str"
    if declared.code in _WHOLE_NUMBERS:
        end = 1 << (8 * FIXED_SIZE[declared.code] - 1)
        return f"{-end} to {end - 1}" if isinstance(value, int) else "a whole number"
    return declared.name
