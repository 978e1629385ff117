"""Any struct of the interface to bytes, field by field, in the order of the ids.

None is a field that is not given. Writes what `reader` reads: the same Bound says how.
"""

from __future__ import annotations

import struct
from typing import Any, Final

from pinlaterd.rpc.binding import Bound, BoundType
from pinlaterd.rpc.thrift_types import TType

_STRING: Final = int(TType.STRING)
_STRUCT: Final = int(TType.STRUCT)
_MAP: Final = int(TType.MAP)
_COLLECTIONS: Final = (int(TType.SET), int(TType.LIST))

_FORMATS: Final = {
    int(TType.BOOL): struct.Struct(">?"),
    int(TType.BYTE): struct.Struct(">b"),
    int(TType.DOUBLE): struct.Struct(">d"),
    int(TType.I16): struct.Struct(">h"),
    int(TType.I32): struct.Struct(">i"),
    int(TType.I64): struct.Struct(">q"),
}
_LENGTH: Final = struct.Struct(">i")
_LIST_HEAD: Final = struct.Struct(">Bi")
_MAP_HEAD: Final = struct.Struct(">BBi")


def write_struct(parts: list[bytes], bound: Bound, value: object) -> None:
    for field in bound.fields.values():
        content = getattr(value, field.key)
        if content is not None:
            parts.append(field.header)
            write_value(parts, field.type, content)
    parts.append(b"\0")


def write_value(parts: list[bytes], declared: BoundType, value: Any) -> None:
    """May raise struct.error for a number that is out of its type's range, UnicodeEncodeError
    for text with lone surrogates."""
    code = declared.code
    if code == _STRING:
        raw = value if declared.binary else value.encode()
        parts.append(_LENGTH.pack(len(raw)))
        parts.append(raw)
    elif code == _STRUCT:
        assert declared.struct is not None
        write_struct(parts, declared.struct, value)
    elif code == _MAP:
        key, element = declared.key, declared.element
        assert key is not None
        assert element is not None
        parts.append(_MAP_HEAD.pack(key.code, element.code, len(value)))
        for name, content in value.items():
            write_value(parts, key, name)
            write_value(parts, element, content)
    elif code in _COLLECTIONS:
        element = declared.element
        assert element is not None
        parts.append(_LIST_HEAD.pack(element.code, len(value)))
        for content in value:
            write_value(parts, element, content)
    else:
        parts.append(_FORMATS[code].pack(value))
