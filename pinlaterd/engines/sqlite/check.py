"""Counting jobs beside the owner, and checking that each is in exactly one run.

A commit never leaves the tables in disagreement; a damaged disk and `.recover` do. Of a job that is
in several runs then, IN_PROGRESS counts before SUCCEEDED, FAILED and PENDING, in this order.
"""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path
from typing import NamedTuple

from pinlaterd.engines.counts import Depths
from pinlaterd.engines.sqlite.file import connect_reader, reading
from pinlaterd.model import JobState


def count_jobs(db: sqlite3.Connection, queue_id: int) -> Depths:
    """Walks over an index, and reads no job."""
    rows = db.execute(
        "SELECT priority, state, sum(last_id - first_id + 1) FROM runs INDEXED BY runs_by_age"
        " WHERE queue = ? GROUP BY state, priority",
        (queue_id,),
    )
    return {(priority, JobState(state)): jobs for priority, state, jobs in rows}


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

_JOBS_OF_RUN = """jobs.local_id BETWEEN runs.first_id AND runs.last_id
    AND jobs.queue = runs.queue AND jobs.priority = runs.priority
    AND (runs.state <> 0 OR jobs.run_after = runs.at)"""
_OTHER_RUN = """SELECT 1 FROM runs AS other WHERE other.first_id > runs.first_id
    AND other.first_id <= runs.last_id"""
_WRONG_RUN = f"""(SELECT count(*) FROM jobs WHERE {_JOBS_OF_RUN}) <> last_id - first_id + 1
    OR EXISTS ({_OTHER_RUN})"""  # noqa: S608
_LOST_JOB = """NOT EXISTS (SELECT 1 FROM runs WHERE runs.last_id >= jobs.local_id
    AND runs.first_id = (SELECT max(first_id) FROM runs WHERE first_id <= jobs.local_id))"""

# What is wrong, and in which rows of which table.
_DISAGREEMENTS = (
    ("states of jobs that are not there, or are in another state, too", "runs", _WRONG_RUN),
    ("jobs in no state, which are never handed out", "jobs", _LOST_JOB),
)
# Each job of a wrong run gets its own; if several had it, by the state that counts first. What is
# in none then is PENDING.
_REPAIRS = (
    f"CREATE TEMP TABLE wrong AS SELECT * FROM runs WHERE {_WRONG_RUN}",  # noqa: S608
    """INSERT INTO wrong SELECT * FROM runs WHERE first_id NOT IN (SELECT first_id FROM wrong)
        AND EXISTS (SELECT 1 FROM wrong WHERE runs.first_id > wrong.first_id
                    AND runs.first_id <= wrong.last_id)""",
    "DELETE FROM runs WHERE first_id IN (SELECT first_id FROM wrong)",
    f"""INSERT OR IGNORE INTO runs
        SELECT local_id, local_id, runs.queue, runs.priority, runs.state, runs.at, runs.claimer,
            runs.claim_number + jobs.local_id - runs.first_id
        FROM wrong AS runs CROSS JOIN jobs ON {_JOBS_OF_RUN} ORDER BY state = 0, state""",  # noqa: S608
    f"""INSERT INTO runs
        SELECT local_id, local_id, queue, priority, 0, run_after, NULL, NULL
        FROM jobs WHERE {_LOST_JOB}""",  # noqa: S608
    "DROP TABLE wrong",
)


class Disagreeing(NamedTuple):
    queue_id: int
    problem: str
    jobs: int


def find(db: sqlite3.Connection) -> list[Disagreeing]:
    """Walks over all jobs."""
    jobs_of = {"runs": "sum(last_id - first_id + 1)", "jobs": "count(*)"}
    return [
        Disagreeing(queue_id, problem, jobs)
        for problem, table, where in _DISAGREEMENTS
        for queue_id, jobs in db.execute(
            f"SELECT queue, {jobs_of[table]} FROM {table} WHERE {where} GROUP BY queue"  # noqa: S608
        )
    ]


def repair(db: sqlite3.Connection) -> None:
    """Within a transaction. The depths have to be counted again afterwards."""
    for statement in _REPAIRS:
        db.execute(statement)
