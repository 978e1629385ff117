"""Counting jobs beside the owner, and checking that each is in exactly one state's table.

A commit never leaves the tables in disagreement; a damaged disk and `.recover` do. The state of a
job is then what `job_records` shows: claims come before ended, ended before pending.
"""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path
from typing import NamedTuple

from pinlaterd.engines.counts import Depths
from pinlaterd.engines.sqlite.file import connect_reader, reading
from pinlaterd.model import JobState

# Each walks over an index, and reads no job.
_COUNT_PENDING = "SELECT priority, 0, count(*) FROM pending WHERE queue = ? GROUP BY priority"
_COUNT_CLAIMS = (
    "SELECT priority, 1, count(*) FROM claims INDEXED BY claims_by_age WHERE queue = ?"
    " GROUP BY priority"
)
_COUNT_ENDED = (
    "SELECT priority, state, count(*) FROM ended INDEXED BY ended_by_age WHERE queue = ?"
    " GROUP BY state, priority"
)


def count_jobs(db: sqlite3.Connection, queue_id: int) -> Depths:
    return {
        (priority, JobState(state)): jobs
        for statement in (_COUNT_PENDING, _COUNT_CLAIMS, _COUNT_ENDED)
        for priority, state, jobs in db.execute(statement, (queue_id,))
    }


class FileSnapshot:
    """What jobs are counted in (see counts.py): a read transaction on a connection of its own."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with reading(path):
            self._db = connect_reader(path)
            self._db.execute("BEGIN")
            self._db.execute("SELECT 1 FROM meta").fetchone()  # the first read fixes what it sees

    def count(self, queue_id: int) -> Depths:
        with reading(self._path):
            return count_jobs(self._db, queue_id)

    def find_damage(self) -> str:
        with reading(self._path):
            found = find(self._db)
        return "; ".join(f"{jobs:,} {problem}" for _, problem, jobs in found)

    def cancel(self) -> None:
        with contextlib.suppress(sqlite3.Error):  # closed
            self._db.interrupt()

    def close(self) -> None:
        self._db.close()


# --- disagreements --------------------------------------------------------------------------

_NO_JOB = """NOT EXISTS (SELECT 1 FROM jobs WHERE jobs.local_id = {0}.local_id
    AND jobs.queue = {0}.queue AND jobs.priority = {0}.priority)"""
_CLAIMED = "EXISTS (SELECT 1 FROM claims WHERE claims.local_id = {0}.local_id)"
_ENDED = "EXISTS (SELECT 1 FROM ended WHERE ended.local_id = {0}.local_id)"
_PENDING = """EXISTS (
    SELECT 1 FROM pending WHERE pending.queue = {0}.queue AND pending.priority = {0}.priority
    AND pending.run_after = {0}.run_after AND pending.local_id = {0}.local_id)"""
_LOST = f"NOT {_CLAIMED} AND NOT {_ENDED} AND NOT {_PENDING}".format("jobs")
_IN_ONE_STATE = f"{_CLAIMED} + {_ENDED} + {_PENDING} = 1".format("jobs")
_STRAY_PENDING = f"""NOT EXISTS (
    SELECT 1 FROM jobs WHERE jobs.local_id = pending.local_id AND jobs.queue = pending.queue
    AND jobs.priority = pending.priority AND jobs.run_after = pending.run_after)
    OR {_CLAIMED} OR {_ENDED}""".format("pending")  # noqa: S608


class _Disagreement(NamedTuple):
    problem: str
    table: str
    where: str
    repair: str


# In the order in which they are repaired.
_DISAGREEMENTS = (
    _Disagreement(
        "claims of jobs that are not there",
        "claims",
        _NO_JOB.format("claims"),
        "DELETE FROM claims WHERE {where}",
    ),
    _Disagreement(
        "ends of jobs that are not there, or are claimed",
        "ended",
        f"{_NO_JOB} OR {_CLAIMED}".format("ended"),
        "DELETE FROM ended WHERE {where}",
    ),
    _Disagreement(
        "pending entries of jobs that are not there, or not pending",
        "pending",
        _STRAY_PENDING,
        "DELETE FROM pending WHERE {where}",
    ),
    _Disagreement(
        "jobs in no state, which are never handed out",
        "jobs",
        _LOST,
        "INSERT INTO pending (queue, priority, run_after, local_id)"
        " SELECT queue, priority, run_after, local_id FROM jobs WHERE {where}",
    ),
)


class Disagreeing(NamedTuple):
    queue_id: int
    problem: str
    jobs: int


def find(db: sqlite3.Connection) -> list[Disagreeing]:
    """Walks over all jobs."""
    if _is_sound(db):
        return []
    return [
        Disagreeing(queue_id, problem, jobs)
        for problem, table, where, _ in _DISAGREEMENTS
        for queue_id, jobs in db.execute(
            f"SELECT queue, count(*) FROM {table} WHERE {where} GROUP BY queue"  # noqa: S608
        )
    ]


def _is_sound(db: sqlite3.Connection) -> bool:
    """Whether each job has one entry, and there are no more entries than jobs. One walk in the
    order of the file: a fifth of the time that the entries take that lead to jobs anywhere."""
    [jobs, of_one_state] = db.execute(
        f"SELECT count(*), coalesce(sum({_IN_ONE_STATE}), 0) FROM jobs"  # noqa: S608
    ).fetchone()
    [entries] = db.execute(
        "SELECT (SELECT count(*) FROM pending) + (SELECT count(*) FROM claims)"
        " + (SELECT count(*) FROM ended)"
    ).fetchone()
    return bool(jobs == of_one_state == entries)


def repair(db: sqlite3.Connection) -> None:
    """Within a transaction. The depths have to be counted again afterwards."""
    for _, _, where, statement in _DISAGREEMENTS:
        db.execute(statement.format(where=where))
