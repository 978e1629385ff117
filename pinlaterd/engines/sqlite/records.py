"""How jobs are read: rows of the view job_records as StoredJobs, of the table jobs as Payloads."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence

from pinlaterd.engines.base import StoredJob
from pinlaterd.engines.sqlite.store import id_list
from pinlaterd.model import JobKey, JobState, Payload

_new = tuple.__new__  # half the cost of calling a NamedTuple, for each job of a batch

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


def read_payloads(
    db: sqlite3.Connection,
    queue_id: int,
    priority: int,
    local_ids: Sequence[int],
    *,
    most_bytes: int,
) -> list[Payload | None]:
    """As StorageEngine.payloads."""
    payloads: list[Payload | None] = []
    append = payloads.append
    # One row for each id, in their order, so that the read can end anywhere.
    rows = db.execute(
        "SELECT jobs.body, jobs.attempts_allowed, jobs.attempts_remaining"
        " FROM json_each(?) AS wanted LEFT JOIN jobs ON jobs.local_id = wanted.value"
        " AND jobs.queue = ? AND jobs.priority = ?",
        (id_list(local_ids), queue_id, priority),
    )
    met = False
    for row in rows:
        body = row[0]
        if body is None:
            append(None)
            continue
        most_bytes -= len(body)
        if most_bytes < 0 and met:
            rows.close()
            break
        append(_new(Payload, row))
        met = True
    return payloads
