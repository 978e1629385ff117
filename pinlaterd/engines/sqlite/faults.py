"""Where SQLite's and the operating system's exceptions become pinlaterd's own: nowhere else."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pinlaterd.errors import StorageCorrupt, StorageError, StorageFull, StorageNotCommitted

# All that sqlite3 raises: its own tree, MemoryError for SQLITE_NOMEM, and, for values that SQLite
# cannot hold, OverflowError (integers over 64 bits) and UnicodeError (lone surrogates).
FAULTS = (sqlite3.Error, OSError, MemoryError, OverflowError, UnicodeError)

_PRIMARY_CODE = 0xFF  # extended result codes carry the primary one in their low byte
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
# A COMMIT that ends so has written no commit frame: the last thing it would have written.
_NEVER_COMMITTED = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_BUSY)


def _code(fault: BaseException) -> int:
    return int(getattr(fault, "sqlite_errorcode", 0) or 0) & _PRIMARY_CODE


def is_damage(fault: BaseException) -> bool:
    return _code(fault) in _DAMAGED


def never_committed(fault: BaseException) -> bool:
    """Whether a COMMIT that raised `fault` is known to have kept nothing."""
    return _code(fault) in _NEVER_COMMITTED


def storage_error(fault: BaseException, path: Path, *, undone: bool) -> StorageError:
    """The StorageError that stands for `fault`; `undone`: nothing changed, beyond doubt."""
    name = getattr(fault, "sqlite_errorname", None) or type(fault).__name__
    message = f"{path}: {fault} ({name})"
    if is_damage(fault):
        return StorageCorrupt(f"{message}; restore the file from a backup")
    if undone and _code(fault) == sqlite3.SQLITE_FULL:
        return StorageFull(f"{message}; make room on that disk")
    if undone:
        return StorageNotCommitted(message)
    return StorageError(f"{message}; whether the last commit was kept is not known")


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Around what changes nothing: faults leave it as StorageNotCommitted or StorageCorrupt."""
    try:
        yield
    except FAULTS as fault:
        raise storage_error(fault, path, undone=True) from fault
