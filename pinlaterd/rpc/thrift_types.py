"""The numbers of TBinaryProtocol: types of values, types of messages, sizes.

Standard library only.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final


class TType(IntEnum):
    """The types of values on the wire that TBinaryProtocol can carry."""

    STOP = 0
    BOOL = 2
    BYTE = 3
    DOUBLE = 4
    I16 = 6
    I32 = 8
    I64 = 10
    STRING = 11
    STRUCT = 12
    MAP = 13
    SET = 14
    LIST = 15


class MessageType(IntEnum):
    CALL = 1
    REPLY = 2
    EXCEPTION = 3
    ONEWAY = 4


class ApplicationError(IntEnum):
    """The types of a TApplicationException that we send."""

    UNKNOWN_METHOD = 1


FIXED_SIZE: Final = {
    TType.BOOL: 1,
    TType.BYTE: 1,
    TType.DOUBLE: 8,
    TType.I16: 2,
    TType.I32: 4,
    TType.I64: 8,
}

# The fewest bytes that a value of each type takes: no more values than that can follow.
LEAST_SIZE: Final = {
    **FIXED_SIZE,
    TType.STRING: 4,
    TType.STRUCT: 1,
    TType.MAP: 6,
    TType.SET: 5,
    TType.LIST: 5,
}

MAX_DEPTH: Final = 64

VERSION_1: Final = 0x8001
STRICT_CALL: Final = b"\x80\x01\x00\x01"


def type_name(code: int) -> str:
    """As the interface language calls it, for messages to people."""
    try:
        return TType(code).name.lower()
    except ValueError:
        return f"type {code}"
