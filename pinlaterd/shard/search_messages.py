"""What a shard and its searcher send each other: length-prefixed pickles, between two processes of
ours. Neither end's own module may define these classes: the searcher's is its `__main__`."""

from __future__ import annotations

import pickle
import struct
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from pinlaterd.engines.base import Search, StoredJob

_LENGTH = struct.Struct(">I")

MOST_SEARCHES = 64


class SearchCall(NamedTuple):
    """A call of one method of Searcher."""

    method: Literal["count", "scan", "find"]
    search: Search
    source: str  # who asks for it


class ScanPart(NamedTuple):
    """The result of a scan; `more`: whether there may be more than fit, or were found in time."""

    jobs: Sequence[StoredJob]
    more: bool


class EndSearch(NamedTuple):
    """Nobody waits any more for the search of that number."""

    number: int


def framed(message: object) -> bytes:
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(data)) + data


def take_message(received: bytearray) -> Any:
    """The first whole message, taken out of `received`; None if there is none."""
    if len(received) < _LENGTH.size:
        return None
    end = _LENGTH.size + _LENGTH.unpack_from(received)[0]
    if len(received) < end:
        return None
    message = pickle.loads(bytes(received[_LENGTH.size : end]))  # noqa: S301
    del received[:end]
    return message
