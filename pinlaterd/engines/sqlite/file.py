"""The file of a shard: its limits, who owns it, opening it, and what its faults mean.

A file is made or recognised when it is opened. Sole ownership is an exclusive flock on a file
beside it: SQLite's own exclusive locking mode would shut out our searcher. The kernel releases it
when its holder ends, however that happens. The lock file itself stays: removing it would let two
processes hold locks on two files of one name.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from importlib import resources
from itertools import chain
from pathlib import Path
from typing import BinaryIO

from pinlaterd.config.layout import lock
from pinlaterd.engines.base import Limits
from pinlaterd.errors import (
    ShardOwned,
    StorageCorrupt,
    StorageError,
    StorageFull,
    StorageNotCommitted,
)

LIMITS = Limits(
    queue_name_chars=64,
    body_bytes=512 << 20,  # SQLite ends at 1,000,000,000 bytes a row
    run_after_ms=2**63 - 1,
    custom_status_chars=5000,
)

_APPLICATION_ID = 0x504C4A31  # "PLJ1": what `file` and others may know our files by
_VERSION = 3  # of schema.sql

_CACHE_KIB = 8 * 1024
# A checkpoint runs within the commit that passes this mark and takes as long as it is far: 4 MiB
# keep that at a few milliseconds. While a reader holds it up the log grows; it is cut later.
_CHECKPOINT_PAGES = 1000
_LOG_KEPT_BYTES = 64 << 20
_CACHED_STATEMENTS = 512
# Nobody else writes, so a lock that lasts is a foreign writer's: the shard must not wait for it.
_BUSY_TIMEOUT_SECONDS = 1.0

# All that sqlite3 raises: its own tree, MemoryError for SQLITE_NOMEM, and, for values that SQLite
# cannot hold, OverflowError (integers over 64 bits) and UnicodeError (lone surrogates).
FAULTS = (sqlite3.Error, OSError, MemoryError, OverflowError, UnicodeError)

_PRIMARY_CODE = 0xFF  # extended result codes carry the primary one in their low byte
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
# A COMMIT that ends so has written no commit frame: the last thing it would have written.
_NEVER_COMMITTED = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_BUSY)


# Of each of these sizes, and of one row, a statement is compiled once. 16: small enqueues that a
# router sends together.
_ROWS_OF_A_STATEMENT = (100, 16)


def insert_rows(db: sqlite3.Connection, head: str, rows: Sequence[tuple[object, ...]]) -> None:
    """Insert rows by statements of many, which take a third of the time that executemany takes.
    `head`: the statement up to the values."""
    at = 0
    for size in _ROWS_OF_A_STATEMENT:
        while len(rows) - at >= size:
            statement = _insert(head, len(rows[at]), size)
            db.execute(statement, list(chain.from_iterable(rows[at : at + size])))
            at += size
    if at < len(rows):
        db.executemany(_insert(head, len(rows[at]), 1), rows[at:])


@lru_cache(maxsize=64)
def _insert(head: str, columns: int, rows: int) -> str:
    row = f"({', '.join('?' * columns)})"
    return f"{head} VALUES {', '.join([row] * rows)}"


def id_list(local_ids: Iterable[int]) -> str:
    """Write the argument of `IN (SELECT value FROM json_each(?))`.

    One statement for any number of ids, compiled once; an id of over 64 bits matches nothing.
    """
    return f"[{','.join(map(str, local_ids))}]"


# --- faults: where SQLite's and the operating system's exceptions become pinlaterd's own -----


def _code(fault: BaseException) -> int:
    return int(getattr(fault, "sqlite_errorcode", 0) or 0) & _PRIMARY_CODE


def is_damage(fault: BaseException) -> bool:
    return _code(fault) in _DAMAGED


def never_committed(fault: BaseException) -> bool:
    """Tell whether a COMMIT that raised `fault` is known to have kept nothing."""
    return _code(fault) in _NEVER_COMMITTED


_UNREACHED = "; check that the folder exists, and that this user may read and write both"


def storage_error(fault: BaseException, path: Path, *, undone: bool) -> StorageError:
    """Make the StorageError that stands for `fault`; `undone`: nothing changed, beyond doubt."""
    name = getattr(fault, "sqlite_errorname", None) or type(fault).__name__
    message = f"{path}: {fault} ({name})"
    if is_damage(fault):
        return StorageCorrupt(f"{message}; restore the file from a backup")
    if undone and _code(fault) == sqlite3.SQLITE_FULL:
        return StorageFull(f"{message}; make room on that disk")
    if undone and _code(fault) == sqlite3.SQLITE_CANTOPEN:
        reaches = os.access(path.parent, os.R_OK | os.W_OK | os.X_OK)
        if reaches and path.exists() and not path.is_file():
            message += "; it is no file"
        elif not reaches or (path.exists() and not os.access(path, os.R_OK | os.W_OK)):
            message += _UNREACHED
        return StorageNotCommitted(message)
    if undone:
        return StorageNotCommitted(message)
    return StorageError(f"{message}; whether the last commit was kept is not known")


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Guard what changes nothing: faults leave it as StorageNotCommitted or StorageCorrupt."""
    try:
        yield
    except FAULTS as fault:
        raise storage_error(fault, path, undone=True) from fault


# --- opening --------------------------------------------------------------------------------


def connect_owner(path: Path) -> sqlite3.Connection:
    """Open the connection that writes: transactions are begun by hand, commits are durable."""
    db = sqlite3.connect(
        path,
        timeout=_BUSY_TIMEOUT_SECONDS,
        isolation_level=None,
        cached_statements=_CACHED_STATEMENTS,
    )
    try:
        db.text_factory = _text
        _check_ours(db, path)
        _configure(db, path)
        _create_schema(db)
    except BaseException:
        db.close()
        raise
    return db


def connect_reader(path: Path) -> sqlite3.Connection:
    """Open a connection that can't write, for another process or thread than the owner's."""
    db = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode=ro",
        uri=True,
        isolation_level=None,
        check_same_thread=False,
    )
    db.text_factory = _text
    db.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
    db.execute("PRAGMA temp_store = MEMORY")
    db.execute("PRAGMA query_only = ON")
    return db


def _text(raw: bytes) -> str:
    """Decode what may be no UTF-8: a hand can put anything into a file."""
    return raw.decode(errors="replace")


def _check_ours(db: sqlite3.Connection, path: Path) -> None:
    """Raise StorageCorrupt, with the file untouched, unless it is empty or of our version."""
    application_id = _pragma(db, "application_id")
    version = _pragma(db, "user_version")
    if application_id != _APPLICATION_ID:
        [tables] = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if application_id or version or tables:
            raise StorageCorrupt(
                f"{path} is an SQLite file of another application; give the shard another file"
            )
    elif version != _VERSION:
        cure = "it was written by a later release of pinlaterd: use that one"
        if version < _VERSION:
            cure = (
                "it was written by a build before release 0.1.0: let that build finish its jobs, "
                "then give the shard another file"
            )
        raise StorageCorrupt(f"{path} has schema version {version}, expected {_VERSION}; {cure}")


def _configure(db: sqlite3.Connection, path: Path) -> None:
    mode = db.execute("PRAGMA journal_mode = WAL").fetchone()[0]
    if mode != "wal":
        raise StorageError(
            f"{path}: the file system does not allow a write-ahead log (journal mode {mode!r}); "
            "put the file on a local disk"
        )
    db.execute("PRAGMA synchronous = FULL")
    db.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
    db.execute("PRAGMA temp_store = MEMORY")
    db.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}")
    db.execute(f"PRAGMA journal_size_limit = {_LOG_KEPT_BYTES}")
    # Some builds zero what is deleted: twice the writing, for bodies most of all.
    db.execute("PRAGMA secure_delete = OFF")


def _create_schema(db: sqlite3.Connection) -> None:
    """Make an empty file ours, in one transaction; leave any other as it is."""
    if _pragma(db, "user_version") == _VERSION:
        return
    schema = resources.files(__package__).joinpath("schema.sql").read_text("utf-8")
    try:
        db.executescript(f"BEGIN IMMEDIATE;\n{schema}")
        db.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
        db.execute(f"PRAGMA user_version = {_VERSION}")
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise


def _pragma(db: sqlite3.Connection, name: str) -> int:
    return int(db.execute(f"PRAGMA {name}").fetchone()[0])


# --- ownership ------------------------------------------------------------------------------


class OwnerLock:
    """The lock of one shard. Do not fork while it is held: a child would share it."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._held: BinaryIO | None = None

    def acquire(self) -> None:
        """Take the lock, or raise ShardOwned at once, naming the holder. OSError if unusable."""
        # Beside the file itself, whichever symbolic links lead to it.
        path = Path(f"{self._file.resolve()}.lock")
        try:
            self._held = lock(path, patient=False)
        except BlockingIOError:
            pid = path.read_bytes().strip()
            holder = f"process {int(pid)}" if pid.isdigit() else "another process"
            raise ShardOwned(f"{path} is locked by {holder}, which owns this shard") from None
        # The pid is only for the message above: a full disk must not keep the shard down.
        with contextlib.suppress(OSError):
            os.ftruncate(self._held.fileno(), 0)
            os.pwrite(self._held.fileno(), f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Let go, for children that may have inherited it too. Safe to repeat."""
        held, self._held = self._held, None
        if held is not None:
            fcntl.flock(held, fcntl.LOCK_UN)
            held.close()
