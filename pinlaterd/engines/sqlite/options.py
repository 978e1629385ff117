"""The options of jobs (options.sql): a file gets their tables with the first job that has any."""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Sequence
from importlib import resources
from itertools import repeat

from pinlaterd.engines.sqlite.file import id_list, insert_rows
from pinlaterd.engines.sqlite.keys import SCOPE_OF_ALL, KeysOfScope, hash_of
from pinlaterd.model import EXPIRED, AlikeJobs, Job, JobOptions

_PUT_KEYS = "INSERT INTO options (local_id, key, queue, scope)"
_EXACT = ("run_after_us", "expires_at_us")
_PUT = (
    f"INSERT INTO options (local_id, key, queue, scope, expires_at, check_at, {', '.join(_EXACT)})"
)
_USUAL = JobOptions()
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


def add_columns(db: sqlite3.Connection) -> None:
    """Add the columns that a file from before them lacks."""
    there = {name for _, name, *_ in db.execute("PRAGMA table_info(options)")}
    for column in _EXACT:
        if column not in there:
            db.execute(f"ALTER TABLE options ADD COLUMN {column} INTEGER")


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
    db: sqlite3.Connection, queue_id: int, jobs: Sequence[Job], local_ids: Sequence[int]
) -> list[KeysOfScope]:
    """Store the options of jobs; return the keys that they have."""
    alike = jobs.alike.options if isinstance(jobs, AlikeJobs) else None
    if isinstance(jobs, AlikeJobs) and jobs.keys and alike and _has_key_alone(alike):
        scope = scope_of(alike, queue_id)
        columns = (local_ids, jobs.keys, repeat(queue_id), repeat(scope))
        insert_rows(db, _PUT_KEYS, list(zip(*columns)))  # noqa: B905 - repeat has no end
        return [KeysOfScope(scope, jobs.keys, local_ids)]
    rows = []
    found: defaultdict[int, tuple[list[str], list[int]]] = defaultdict(lambda: ([], []))
    for local_id, options in zip(local_ids, [job.options for job in jobs], strict=True):
        if options:
            scope = scope_of(options, queue_id)
            expires_at_ms = options.expires_at_ms
            times = (expires_at_ms, expires_at_ms, options.run_after_us, options.expires_at_us)
            rows.append((local_id, options.key, queue_id, scope, *times))
            if options.key is not None:
                keys, ids = found[scope]
                keys.append(options.key)
                ids.append(local_id)
    insert_rows(db, _PUT, rows)
    return [KeysOfScope(scope, *columns) for scope, columns in found.items()]


def _has_key_alone(options: JobOptions) -> bool:
    return options._replace(key=None, key_of_all_queues=False) == _USUAL


def expired(db: sqlite3.Connection, local_ids: Iterable[int], now_ms: int) -> list[int]:
    """Return those of the jobs that are past their expiry."""
    rows = db.execute(
        "SELECT local_id FROM options WHERE expires_at <= ?"
        " AND local_id IN (SELECT value FROM json_each(?))",
        (now_ms, id_list(local_ids)),
    )
    return [local_id for (local_id,) in rows]


def note_expired(db: sqlite3.Connection, local_ids: Iterable[int]) -> None:
    """Store that jobs have failed since they have expired."""
    db.executemany(
        f"UPDATE options SET check_at = NULL, end_reason = '{EXPIRED}' WHERE local_id = ?",  # noqa: S608
        [(local_id,) for local_id in local_ids],
    )


def note_retried(db: sqlite3.Connection, spans: Iterable[tuple[int, int]]) -> bool:
    """Store that jobs have not ended after all; return whether any of them may expire."""
    retried = db.executemany(
        "UPDATE options SET check_at = expires_at, end_reason = NULL"
        " WHERE local_id BETWEEN ? AND ? AND expires_at IS NOT NULL",
        spans,
    )
    return retried.rowcount > 0


def may_expire(db: sqlite3.Connection, queue_id: int) -> bool:
    """Return whether a queue has jobs that maintenance has to look at."""
    found = db.execute(
        "SELECT 1 FROM options WHERE queue = ? AND check_at IS NOT NULL LIMIT 1", (queue_id,)
    )
    return found.fetchone() is not None


def to_check(db: sqlite3.Connection, queue_id: int, now_ms: int, limit: int) -> list[int]:
    """Return the first jobs of a queue that maintenance has to look at by now."""
    rows = db.execute(
        "SELECT local_id FROM options WHERE queue = ? AND check_at <= ? ORDER BY check_at LIMIT ?",
        (queue_id, now_ms, limit),
    )
    return [local_id for (local_id,) in rows]


def check_again(db: sqlite3.Connection, local_ids: Iterable[int], at_ms: int | None) -> None:
    """Have maintenance look at jobs at that time; None: never."""
    db.executemany(
        "UPDATE options SET check_at = ? WHERE local_id = ?", [(at_ms, i) for i in local_ids]
    )


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
