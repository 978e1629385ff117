"""What in a request can't be written: looked for once writing has failed, to say where it is.

Relies on the same Bounds that `writer` writes by.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from pinlaterd.rpc.binding import Bound, BoundType
from pinlaterd.rpc.thrift_types import TType

_BITS: Final = {TType.BYTE: 8, TType.I16: 16, TType.I32: 32, TType.I64: 64}
_LISTS: Final = (TType.LIST, TType.SET)
_SHOWN_CHARS: Final = 60


def misfit(bound: Bound, value: object, where: str = "") -> str | None:
    """What is wrong, as in "jobs[2].body: expected bytes, got 'x'"; None if all of it fits."""
    for field in bound.fields.values():
        content = getattr(value, field.key, None)
        if content is None:
            continue
        name = f"{where}.{field.key}" if where else field.key
        problem = _misfit(field.type, content, name)
        if problem is not None:
            return problem
    return None


def _misfit(declared: BoundType, value: object, where: str) -> str | None:
    code = TType(declared.code)
    if code is TType.STRING:
        return _misfit_of_text(value, where, binary=declared.binary)
    if code is TType.STRUCT:
        assert declared.struct is not None
        if not isinstance(value, tuple):
            return _expected(declared.name, value, where)
        return misfit(declared.struct, value, where)
    if code is TType.MAP:
        return None if isinstance(value, Mapping) else _expected("a mapping", value, where)
    if code in _LISTS:
        return _misfit_of_list(declared, value, where)
    if code in _BITS:
        return _misfit_of_number(_BITS[code], value, where)
    return None


def _misfit_of_text(value: object, where: str, *, binary: bool) -> str | None:
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


def _misfit_of_list(declared: BoundType, value: object, where: str) -> str | None:
    if not isinstance(value, Iterable):
        return _expected("a list", value, where)
    assert declared.element is not None
    for index, content in enumerate(value):
        problem = _misfit(declared.element, content, f"{where}[{index}]")
        if problem is not None:
            return problem
    return None


def _misfit_of_number(bits: int, value: object, where: str) -> str | None:
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
