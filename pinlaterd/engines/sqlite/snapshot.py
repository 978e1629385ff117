"""A snapshot of a shard's file, in which jobs are counted (see engines/counts.py)."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

from pinlaterd.engines.counts import Depths
from pinlaterd.engines.sqlite import check
from pinlaterd.engines.sqlite.faults import reading
from pinlaterd.engines.sqlite.schema import connect_reader
from pinlaterd.model import JobState

# Each walks over an index, and reads no job.
_PENDING = "SELECT priority, 0, count(*) FROM pending WHERE queue = ? GROUP BY priority"
_CLAIMS = (
    "SELECT priority, 1, count(*) FROM claims INDEXED BY claims_by_age WHERE queue = ?"
    " GROUP BY priority"
)
_ENDED = (
    "SELECT priority, state, count(*) FROM ended INDEXED BY ended_by_age WHERE queue = ?"
    " GROUP BY state, priority"
)


def count_jobs(db: sqlite3.Connection, queue_id: int) -> Depths:
    return {
        (priority, JobState(state)): jobs
        for statement in (_PENDING, _CLAIMS, _ENDED)
        for priority, state, jobs in db.execute(statement, (queue_id,))
    }


class FileSnapshot:
    """A read transaction on a connection of its own."""

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
            found = check.find(self._db)
        return "; ".join(f"{jobs:,} {problem}" for _, problem, jobs in found)

    def cancel(self) -> None:
        with contextlib.suppress(sqlite3.Error):  # closed
            self._db.interrupt()

    def close(self) -> None:
        self._db.close()
