"""How a whole job is read: the columns of the view job_records as a StoredJob."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator

from pinlaterd.engines.base import StoredJob
from pinlaterd.engines.sqlite.store import id_list
from pinlaterd.model import JobKey, JobState

_WITHOUT_BODY = (
    "SELECT priority, local_id, state, attempts_allowed, attempts_remaining, custom_status,"
    " created_at, run_after, updated_at, claim_descriptor, NULL"
    " FROM job_records WHERE local_id IN (SELECT value FROM json_each(?)) AND queue = ?"
)
_WITH_BODY = _WITHOUT_BODY.replace("NULL", "body")


def stored_jobs(
    db: sqlite3.Connection, queue_id: int, local_ids: Iterable[int], *, with_body: bool
) -> Iterator[StoredJob]:
    """A queue's jobs of these ids, in no order, read one at a time."""
    statement = _WITH_BODY if with_body else _WITHOUT_BODY
    rows = db.execute(statement, (id_list(local_ids), queue_id))
    for priority, local_id, state, *rest in rows:
        yield StoredJob(JobKey(priority, local_id), JobState(state), *rest)
