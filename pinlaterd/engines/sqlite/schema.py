"""Opening a shard's file: making it, recognising it, bringing it to this release's version.

May rely on sqlite3; lets its exceptions through to the caller, which translates them.
"""

from __future__ import annotations

import sqlite3
from importlib import resources
from pathlib import Path

from pinlaterd.errors import StorageCorrupt, StorageError

_APPLICATION_ID = 0x504C4A31  # "PLJ1": what `file` and others may know our files by
# Scripts that lead from each version to the next; the first one from an empty file to version 1.
_MIGRATIONS = ("schema.sql",)

_CACHE_KIB = 8 * 1024
# A checkpoint runs within the commit that passes this mark and takes as long as it is far: 4 MiB
# keep that at a few milliseconds. While a reader holds it up the log grows; it is cut later.
_CHECKPOINT_PAGES = 1000
_LOG_KEPT_BYTES = 64 << 20
_CACHED_STATEMENTS = 512
# Nobody else writes, so a lock that lasts is a stranger's: the shard must not stand still for it.
_BUSY_TIMEOUT_SECONDS = 1.0


def connect_owner(path: Path) -> sqlite3.Connection:
    """The connection that writes: transactions are begun by hand, commits are durable."""
    db = sqlite3.connect(
        path,
        timeout=_BUSY_TIMEOUT_SECONDS,
        isolation_level=None,
        cached_statements=_CACHED_STATEMENTS,
    )
    try:
        _check_ours(db, path)
        _configure(db, path)
        _migrate(db)
    except BaseException:
        db.close()
        raise
    return db


def connect_reader(path: Path) -> sqlite3.Connection:
    """A connection that can't write, for another process or thread than the owner's."""
    db = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode=ro",
        uri=True,
        isolation_level=None,
        check_same_thread=False,
    )
    db.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
    db.execute("PRAGMA temp_store = MEMORY")
    db.execute("PRAGMA query_only = ON")
    return db


def _check_ours(db: sqlite3.Connection, path: Path) -> None:
    """Raise StorageCorrupt, with the file untouched, unless it is empty or one we can read."""
    application_id = _pragma(db, "application_id")
    version = _pragma(db, "user_version")
    if application_id != _APPLICATION_ID:
        [tables] = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if application_id or version or tables:
            raise StorageCorrupt(
                f"{path} is an SQLite file of another application; give the shard another file"
            )
    elif version > len(_MIGRATIONS):
        raise StorageCorrupt(
            f"{path} has schema version {version}, expected {len(_MIGRATIONS)} at most; "
            "it was written by a later release of pinlaterd: use that one"
        )


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


def _migrate(db: sqlite3.Connection) -> None:
    found = _pragma(db, "user_version")
    for version, script in enumerate(_MIGRATIONS[found:], start=found + 1):
        statements = resources.files(__package__).joinpath(script).read_text("utf-8")
        try:
            db.executescript(
                f"BEGIN IMMEDIATE;\n{statements}\n"
                f"PRAGMA application_id = {_APPLICATION_ID};\n"
                f"PRAGMA user_version = {version};\nCOMMIT;"
            )
        except sqlite3.Error:
            if db.in_transaction:
                db.execute("ROLLBACK")
            raise


def _pragma(db: sqlite3.Connection, name: str) -> int:
    return int(db.execute(f"PRAGMA {name}").fetchone()[0])
