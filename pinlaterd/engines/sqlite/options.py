"""The options of jobs (options.sql): a file gets their tables with the first job that has any."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from importlib import resources

from pinlaterd.engines.sqlite.keys import SCOPE_OF_ALL, hash_of
from pinlaterd.model import JobOptions

_PUT = (
    "INSERT INTO options (local_id, queue, scope, key, expires_at, check_at)"
    " VALUES (?1, ?2, ?3, ?4, ?5, ?5)"
)
_OF_QUEUE = "options of "  # in front of the queue's number
_WITHOUT_JOB = "local_id NOT IN (SELECT local_id FROM jobs)"
_NOT_FOUND = """key IS NOT NULL
    AND local_id <= (SELECT value FROM meta WHERE key = 'hashed_id')
    AND NOT EXISTS (SELECT 1 FROM key_hashes WHERE key_hash = hash_of(scope, key)
                    AND local_id = options.local_id)"""
Disagreement = tuple[str, str, str]  # what is wrong, and in which rows of which table


def has_options(db: sqlite3.Connection) -> bool:
    """Return whether the file has the tables."""
    found = db.execute("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'options'")
    return found.fetchone() is not None


def queues_with_options(db: sqlite3.Connection) -> set[int]:
    """Return the ids of the queues, deleted ones included, that may have jobs with options."""
    rows = db.execute("SELECT key FROM meta WHERE key GLOB ?", (f"{_OF_QUEUE}*",))
    return {int(key.removeprefix(_OF_QUEUE)) for (key,) in rows}


def make_tables(db: sqlite3.Connection) -> None:
    """Make the tables, within a transaction, unless the file has them."""
    script = resources.files(__package__).joinpath("options.sql").read_text("utf-8")
    for statement in script.split(";\n"):
        db.execute(statement)


def note_queue(db: sqlite3.Connection, queue_id: int) -> None:
    """Store that a queue has jobs with options."""
    db.execute("REPLACE INTO meta VALUES (?, 1)", (f"{_OF_QUEUE}{queue_id}",))


def forget_queue(db: sqlite3.Connection, queue_id: int) -> None:
    """Store that a queue has no jobs any more."""
    db.execute("DELETE FROM meta WHERE key = ?", (f"{_OF_QUEUE}{queue_id}",))


def scope_of(options: JobOptions, queue_id: int) -> int:
    """Return the scope within which a job's key is held once."""
    return SCOPE_OF_ALL if options.key_of_all_queues else queue_id


def put_options(
    db: sqlite3.Connection, queue_id: int, local_ids: Iterable[int], options: Sequence[JobOptions]
) -> None:
    """Store the options of jobs."""
    rows = [
        (local_id, queue_id, scope_of(each, queue_id), each.key, each.expires_at_ms)
        for local_id, each in zip(local_ids, options, strict=True)
    ]
    db.executemany(_PUT, rows)


def delete_options(db: sqlite3.Connection, spans: Iterable[tuple[int, int]]) -> None:
    """Delete the options of jobs with the local ids of `spans`, ends included."""
    db.executemany("DELETE FROM options WHERE local_id BETWEEN ? AND ?", spans)


def disagreements(db: sqlite3.Connection) -> Sequence[Disagreement]:
    """Return what may be wrong with options, for `find_damage`."""
    if not has_options(db):
        return []
    db.create_function("hash_of", 2, hash_of, deterministic=True)
    return [
        ("options of jobs that are not there", "options", _WITHOUT_JOB),
        ("keys that are not found", "options", _NOT_FOUND),
    ]


def repair_options(db: sqlite3.Connection) -> None:
    """Delete the options of jobs that are not there, and have all keys be found, within a
    transaction."""
    if has_options(db):
        db.execute(f"DELETE FROM options WHERE {_WITHOUT_JOB}")  # noqa: S608
        db.execute(
            "INSERT OR IGNORE INTO key_hashes SELECT hash_of(scope, key), local_id FROM options"  # noqa: S608
            f" WHERE {_NOT_FOUND} ORDER BY 1"
        )
