"""Values as SQL literals: the only place where a value becomes part of a statement.

Statements are bytes. A literal is safe in them because the session pins what it relies on
(connection.py): character set utf8mb4, in which no byte of a longer character can be taken for a
quote or a backslash, and an sql_mode without NO_BACKSLASH_ESCAPES and ANSI_QUOTES. Then a quote
and a backslash are all that has to be escaped; every other byte, zero included, stands for itself.

The driver's own formatting of arguments costs several times as much for each value.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from functools import lru_cache

# What DATETIME can hold, and Python's datetime too.
EARLIEST_MS = -62_135_596_800_000  # 0001-01-01
LATEST_MS = 253_402_300_799_999  # 9999-12-31 23:59:59.999
_EPOCH = datetime(1970, 1, 1)  # noqa: DTZ001  the session's time zone is UTC, and literals bear none


def _escaped(value: bytes) -> bytes:
    return value.replace(b"\\", b"\\\\").replace(b"'", b"\\'")


def quote_bytes(value: bytes) -> bytes:
    """A binary string: no character set is ever applied to it."""
    return b"_binary'" + _escaped(value) + b"'"


def quote_text(value: str) -> bytes:
    """UnicodeEncodeError for what is no text (lone surrogates)."""
    return b"'" + _escaped(value.encode()) + b"'"


def quote_name(*parts: str) -> bytes:
    """The name of a database, or of a table in it."""
    return b".".join(b"`" + part.replace("`", "``").encode() + b"`" for part in parts)


@lru_cache(maxsize=1024)  # a batch names a few times again and again
def quote_time(time_ms: int) -> bytes:
    """A time in UTC; what is beyond all that can be stored becomes the first or last of it."""
    time_ms = min(max(time_ms, EARLIEST_MS), LATEST_MS)
    moment = _EPOCH + timedelta(milliseconds=time_ms)
    return b"'" + moment.isoformat(" ", "milliseconds").encode() + b"'"


def id_list(local_ids: Iterable[int]) -> bytes:
    """What stands within the brackets of IN."""
    return ",".join(map(str, local_ids)).encode()
