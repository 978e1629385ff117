"""The keys of jobs (keys.sql): a file gets that table with the first job that has a key."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from importlib import resources

from pinlaterd.model import JobKey

# Keys of one statement: padded to so many, it is compiled once. A list in JSON, as of ids, would
# end a key at its first zero byte.
_LISTED_KEYS = 100
# The job has to be there: a build that knows no keys may have deleted it without its key.
_FIND = (
    "SELECT keys.key, jobs.priority, jobs.local_id"  # noqa: S608
    " FROM keys CROSS JOIN jobs ON jobs.local_id = keys.local_id"
    f" WHERE keys.queue = ? AND keys.key IN (?{', ?' * (_LISTED_KEYS - 1)})"
)
_WITHOUT_JOB = "local_id NOT IN (SELECT local_id FROM jobs)"
Disagreement = tuple[str, str, str]  # what is wrong, and in which rows of which table


def has_keys(db: sqlite3.Connection) -> bool:
    """Return whether the file has the table."""
    found = db.execute("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = 'keys'")
    return found.fetchone() is not None


def queues_with_keys(db: sqlite3.Connection) -> set[int]:
    """Return the ids of the queues, deleted ones included, that have jobs with keys."""
    if not has_keys(db):
        return set()
    rows = db.execute("SELECT id FROM queues WHERE EXISTS (SELECT 1 FROM keys WHERE queue = id)")
    return {queue_id for (queue_id,) in rows}


def find_keys(db: sqlite3.Connection, queue_id: int, keys: Sequence[str]) -> dict[str, JobKey]:
    """Return the jobs that hold those of `keys` that are held; the table is there."""
    found: dict[str, JobKey] = {}
    for first in range(0, len(keys), _LISTED_KEYS):
        some = keys[first : first + _LISTED_KEYS]
        padding = [None] * (_LISTED_KEYS - len(some))
        for key, *job_key in db.execute(_FIND, (queue_id, *some, *padding)):
            found[key] = JobKey(*job_key)
    return found


def make_table(db: sqlite3.Connection) -> None:
    """Make the table, within a transaction, unless the file has it."""
    db.execute(resources.files(__package__).joinpath("keys.sql").read_text("utf-8"))


def put_keys(db: sqlite3.Connection, rows: Iterable[tuple[int, int, str]]) -> None:
    """Store the keys of jobs: local id, queue, key. One left without its job gives way."""
    db.executemany("INSERT OR REPLACE INTO keys (local_id, queue, key) VALUES (?, ?, ?)", rows)


def delete_keys(db: sqlite3.Connection, spans: Iterable[tuple[int, int]]) -> None:
    """Delete the keys of jobs with the local ids of `spans`, ends included."""
    db.executemany("DELETE FROM keys WHERE local_id BETWEEN ? AND ?", spans)


def disagreements(db: sqlite3.Connection) -> Sequence[Disagreement]:
    """Return what may be wrong with keys, for `find_damage`."""
    return [("keys of jobs that are not there", "keys", _WITHOUT_JOB)] if has_keys(db) else []


def repair_keys(db: sqlite3.Connection) -> None:
    """Delete the keys of jobs that are not there, within a transaction."""
    if has_keys(db):
        db.execute(f"DELETE FROM keys WHERE {_WITHOUT_JOB}")  # noqa: S608
