"""Values as SQL literals, and the names and limits of what a shard stores.

This is the only place where a value becomes part of a statement.

Statements are bytes. A literal is safe in them because the session pins what it relies on
(connection.py): character set utf8mb4, in which no byte of a longer character can be taken for a
quote or a backslash, and an sql_mode without NO_BACKSLASH_ESCAPES and ANSI_QUOTES. Then a quote
and a backslash are all that has to be escaped; every other byte, zero included, stands for itself.

The driver's own formatting of arguments costs several times as much for each value.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from datetime import datetime, timedelta
from functools import lru_cache
from typing import TypeVar

from pinlaterd.engines.base import Limits

T = TypeVar("T")

# What DATETIME can hold, and Python's datetime too.
EARLIEST_MS = -62_135_596_800_000  # 0001-01-01
LATEST_MS = 253_402_300_799_999  # 9999-12-31 23:59:59.999
# Fewer ids that follow one another are listed.
_SHORTEST_RANGE = 8
_EPOCH = datetime(1970, 1, 1)  # noqa: DTZ001  the session's time zone is UTC, and literals bear none


def escaped(value: bytes) -> bytes:
    return value.replace(b"\\", b"\\\\").replace(b"'", b"\\'")


def quote_bytes(value: bytes) -> bytes:
    """A binary string: no character set is ever applied to it."""
    return b"_binary'" + escaped(value) + b"'"


def quote_text(value: str) -> bytes:
    """UnicodeEncodeError for what is no text (lone surrogates)."""
    return b"'" + escaped(value.encode()) + b"'"


def quote_name(*parts: str) -> bytes:
    """The name of a database, or of a table in it."""
    return b".".join(b"`" + part.replace("`", "``").encode() + b"`" for part in parts)


@lru_cache(maxsize=1024)  # a batch names a few times again and again
def quote_time(time_ms: int) -> bytes:
    """A time in UTC; what is beyond all that can be stored becomes the first or last of it."""
    time_ms = min(max(time_ms, EARLIEST_MS), LATEST_MS)
    moment = _EPOCH + timedelta(milliseconds=time_ms)
    return b"'" + moment.isoformat(" ", "milliseconds").encode() + b"'"


def among(local_ids: Collection[int]) -> bytes:
    """The condition that `local_id` is one of these. Ids that follow one another, as those of most
    batches do, are a range: for a server that costs a tenth of what a list of them does."""
    ids = sorted(set(local_ids))
    if ids[-1] - ids[0] == len(ids) - 1:
        return b"local_id BETWEEN %d AND %d" % (ids[0], ids[-1])
    listed: list[int] = []
    ranges: list[bytes] = []
    first = 0
    for at in range(1, len(ids) + 1):
        if at < len(ids) and ids[at] == ids[at - 1] + 1:
            continue
        if at - first < _SHORTEST_RANGE:
            listed += ids[first:at]
        else:
            ranges.append(b"local_id BETWEEN %d AND %d" % (ids[first], ids[at - 1]))
        first = at
    if listed:
        ranges.append(b"local_id IN (" + ",".join(map(str, listed)).encode() + b")")
    return b"(" + b" OR ".join(ranges) + b")"


def pieces(listed: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    if len(listed) <= size:
        if listed:
            yield listed
        return
    for first in range(0, len(listed), size):
        yield listed[first : first + size]


# --- what a shard can hold; a table that PinLater made may hold less: `Table.narrower` -------

_DATABASE_NAME_CHARS = 64
STATUS_CHARS = 5000
BODY_BYTES = 512 << 20  # as a literal at most twice that: the largest packet is 1 GiB


def database_prefix(shard: str) -> str:
    """Of the queues of a shard. A shard's name has no underscore, so it ends at the second one."""
    return f"plq_{shard}_"


def owner_database(shard: str) -> str:
    return f"plm_{shard}"


def lock_name(shard: str) -> str:
    """Of the server's lock that the owner of a shard holds."""
    return f"pinlaterd:{shard}"


def limits_of(shard: str) -> Limits:
    return Limits(
        queue_name_chars=_DATABASE_NAME_CHARS - len(database_prefix(shard)),
        body_bytes=BODY_BYTES,
        run_after_ms=LATEST_MS,
        custom_status_chars=STATUS_CHARS,
    )
