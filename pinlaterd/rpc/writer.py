"""Any struct of the interface to bytes, field by field, in the order of the ids.

None is a field that is not given. Elements of one list, jobs or acks, mostly differ in their first
field alone: what follows it is written once, and repeated.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, Final

from pinlaterd.rpc.binary import FIXED_SIZE, FORMATS, TType, pack_u32
from pinlaterd.rpc.interface import Struct, Type

# Appends what it writes of a value.
Write = Callable[[list[bytes], Any], None]

_STRING: Final = int(TType.STRING)
_WHOLE_NUMBERS: Final = (TType.BYTE, TType.I16, TType.I32, TType.I64)

# The length of a short text as the four bytes in front of it: as text, so that ASCII texts can be
# put together as text and encoded at once (which is why it stops at 127).
SHORT_TEXT: Final = tuple("\0\0\0" + chr(length) for length in range(128))


@cache
def struct_writer(declared: Struct) -> Write:
    """Raises one of UNFIT for a value that the types cannot hold; `problem` says where it is."""
    fields = [(field.place, _writer(field.type, field.header)) for field in declared.fields]

    def write(parts: list[bytes], value: Sequence[Any]) -> None:
        for index, write_field in fields:
            content = value[index]
            if content is not None:
                write_field(parts, content)
        parts.append(b"\0")

    return write


def _writer(declared: Type, head: bytes = b"") -> Write:
    """Writes values of this type, with `head` in front."""
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
    """A list or set of texts, which are mostly short and ASCII."""

    def write(parts: list[bytes], values: Collection[str]) -> None:
        parts += (head, pack_u32(len(values)))
        try:
            joined = "".join([SHORT_TEXT[len(value)] + value for value in values])
            # Lengths in characters are lengths in bytes only where all is ASCII.
            parts.append(joined.encode("ascii"))
        except (IndexError, UnicodeEncodeError):
            parts += map(sized, values)

    return write


def sized(text: str) -> bytes:
    raw = text.encode()
    return pack_u32(len(raw)) + raw


def _structs_writer(head: bytes, declared: Struct) -> Write:
    """A list of structs. If they begin with a text or bytes, and have their fields in the model's
    order, what equals the one before is not written again: jobs of one call mostly differ in the
    first field alone, acks in the first and the last."""
    first, *others = declared.fields
    places = [field.place for field in declared.fields]
    if first.type.code != _STRING or places != sorted(places):
        return _plain_structs_writer(head, struct_writer(declared))
    is_text, first_head = not first.type.binary, first.header
    pack_first = struct.Struct(">3sI").pack
    *inner, (_, write_last) = [(field.place, _writer(field.type, field.header)) for field in others]

    def write(parts: list[bytes], values: Sequence[Sequence[Any]]) -> None:
        parts += (head, pack_u32(len(values)))
        rest: Sequence[Any] = ()  # the fields behind the first one
        middle = written = b""  # those but for the last; all of those
        for value in values:
            raw = value[0].encode() if is_text else value[0]
            if value[1:] != rest:
                if value[1:-1] != rest[:-1]:
                    middle = _written(inner, value)
                rest = value[1:]
                end = [middle]
                if rest[-1] is not None:
                    write_last(end, rest[-1])
                end.append(b"\0")
                written = b"".join(end)
            parts += (pack_first(first_head, len(raw)), raw, written)

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


def problem(declared: Struct, value: object, where: str = "") -> str | None:
    """What of `value` can't be written, as in "jobs[2].body: expected bytes, got 'x'"; None if all
    of it can."""
    for field in declared.fields:
        content = getattr(value, field.key, None)
        if content is not None:
            found = _problem(field.type, content, f"{where}.{field.key}" if where else field.key)
            if found is not None:
                return found
    return None


def _problem(declared: Type, value: object, where: str) -> str | None:
    if declared.struct is not None:
        if isinstance(value, tuple):
            return problem(declared.struct, value, where)
        return _expected(declared.name, value, where)
    if declared.key is not None:
        return None if isinstance(value, Mapping) else _expected("a mapping", value, where)
    if declared.element is not None:
        if not isinstance(value, Iterable):
            return _expected("a list", value, where)
        for at, each in enumerate(value):
            found = _problem(declared.element, each, f"{where}[{at}]")
            if found is not None:
                return found
        return None
    if declared.code == _STRING:
        return _problem_of_text(value, where, binary=declared.binary)
    if declared.code in _WHOLE_NUMBERS:
        return _problem_of_number(8 * FIXED_SIZE[declared.code], value, where)
    return None


def _problem_of_text(value: object, where: str, *, binary: bool) -> str | None:
    if binary:
        fits = isinstance(value, bytes | bytearray | memoryview)
        return None if fits else _expected("bytes", value, where)
    if not isinstance(value, str):
        return _expected("str", value, where)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        return f"{where}: a text that can't be UTF-8: {error.reason}"
    return None


def _problem_of_number(bits: int, value: object, where: str) -> str | None:
    if not isinstance(value, int):
        return _expected("a whole number", value, where)
    end = 1 << (bits - 1)
    if -end <= value < end:
        return None
    return f"{where}: expected {-end} to {end - 1}, got {value}"


def _expected(what: str, value: object, where: str) -> str:
    shown = repr(value)
    if len(shown) > _SHOWN_CHARS:
        shown = shown[:_SHOWN_CHARS] + "…"
    return f"{where}: expected {what}, got {shown}"
