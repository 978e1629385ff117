"""Writes in slices: retries, deletes, time-outs, garbage, the rows of deleted queues.

Each function does at most `limit` jobs within a Transaction, and finds them by an index: its cost
is bounded by `limit`, however deep the queues.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from pinlaterd.engines.base import Expired, Requeued
from pinlaterd.engines.sqlite.attempts import FailedAttempt, HeldClaim, fail_attempts, make_pending
from pinlaterd.engines.sqlite.store import Store, Transaction, id_list
from pinlaterd.model import JobKey, JobState, PendingKey

_DELETE_JOBS = "DELETE FROM jobs WHERE local_id IN (SELECT value FROM json_each(?))"
_DELETE_PENDING = (
    "DELETE FROM pending WHERE queue = ? AND priority = ? AND run_after = ? AND local_id = ?"
)
_DELETE_CLAIMS = "DELETE FROM claims WHERE local_id IN (SELECT value FROM json_each(?))"
_DELETE_ENDED = "DELETE FROM ended WHERE local_id IN (SELECT value FROM json_each(?))"

_FIRST_PENDING = (
    "SELECT local_id FROM pending WHERE queue = :queue AND priority = :priority"
    " ORDER BY run_after, local_id LIMIT :limit"
)
_OLDEST_CLAIMS = (
    "SELECT local_id FROM claims INDEXED BY claims_by_age"
    " WHERE queue = :queue AND priority = :priority"
    " ORDER BY claimed_at, local_id LIMIT :limit"
)
_OLDEST_ENDED = (
    "SELECT local_id FROM ended INDEXED BY ended_by_age"
    " WHERE queue = :queue AND state = :state AND priority = :priority"
    " ORDER BY ended_at, local_id LIMIT :limit"
)


def retry_failed(
    tx: Transaction, queue_id: int, priority: int, *, attempts: int, run_after_ms: int, limit: int
) -> list[Requeued]:
    local_ids = [
        local_id
        for (local_id,) in tx.db.execute(
            "SELECT local_id FROM ended WHERE queue = ? AND state = 3 AND priority = ?"
            " ORDER BY ended_at, local_id LIMIT ?",
            (queue_id, priority, limit),
        )
    ]
    ids = id_list(local_ids)
    tx.db.execute(
        "UPDATE jobs SET attempts_allowed = max(attempts_allowed, ?), attempts_remaining = ?,"
        " run_after = ?, updated_at = ? WHERE local_id IN (SELECT value FROM json_each(?))",
        (attempts, attempts, run_after_ms, tx.now_ms, ids),
    )
    tx.db.execute(_DELETE_ENDED, (ids,))
    requeued = [Requeued(priority, PendingKey(run_after_ms, local_id)) for local_id in local_ids]
    make_pending(tx, queue_id, requeued)
    tx.moved(queue_id, [priority] * len(requeued), JobState.FAILED, JobState.PENDING)
    return requeued


def release_expired(
    store: Store, tx: Transaction, queue_id: int, *, claimed_ms: tuple[int, int], limit: int
) -> Expired:
    """`claimed_ms`: after and before which time."""
    attempts: list[FailedAttempt] = []
    for priority in store.priorities_holding(queue_id, JobState.IN_PROGRESS):
        rows = tx.db.execute(
            "SELECT claims.local_id, claims.claim_descriptor, jobs.attempts_remaining,"
            " jobs.run_after, jobs.custom_status"
            " FROM claims INDEXED BY claims_by_age"
            " CROSS JOIN jobs ON jobs.local_id = claims.local_id"
            " WHERE claims.queue = ? AND claims.priority = ?"
            " AND claims.claimed_at > ? AND claims.claimed_at < ?"
            " ORDER BY claims.claimed_at, claims.local_id LIMIT ?",
            (queue_id, priority, *claimed_ms, limit - len(attempts)),
        )
        for local_id, *rest in rows:
            claim = HeldClaim(JobKey(priority, local_id), *rest)
            attempts.append(FailedAttempt(claim, tx.now_ms, claim.custom_status))
    if not attempts:
        return Expired([], failed=0)
    retried = fail_attempts(tx, queue_id, attempts)
    return Expired(retried, failed=len(attempts) - len(retried))


def collect_garbage(
    store: Store,
    tx: Transaction,
    queue_id: int,
    state: JobState,
    *,
    updated_before_ms: int,
    limit: int,
) -> int:
    deleted = 0
    for priority in store.priorities_holding(queue_id, state):
        rows = tx.db.execute(
            "SELECT local_id FROM ended"
            " WHERE queue = ? AND state = ? AND priority = ? AND ended_at < ?"
            " ORDER BY ended_at LIMIT ?",
            (queue_id, int(state), priority, updated_before_ms, limit - deleted),
        ).fetchall()
        keys = [JobKey(priority, local_id) for (local_id,) in rows]
        delete_known(tx, queue_id, state, keys)
        deleted += len(keys)
    return deleted


# --- deletes --------------------------------------------------------------------------------


def first_jobs(
    db: sqlite3.Connection, queue_id: int, state: JobState, priority: int, limit: int
) -> list[JobKey]:
    """Up to `limit` jobs of a state: the first to be handed out, or the oldest."""
    statement = {
        JobState.PENDING: _FIRST_PENDING,
        JobState.IN_PROGRESS: _OLDEST_CLAIMS,
    }.get(state, _OLDEST_ENDED)
    rows = db.execute(
        statement,
        {"queue": queue_id, "state": int(state), "priority": priority, "limit": limit},
    )
    return [JobKey(priority, local_id) for (local_id,) in rows]


def still_in_state(
    db: sqlite3.Connection, queue_id: int, state: JobState, keys: Sequence[JobKey]
) -> list[JobKey]:
    """Those of `keys` that are in `state`, each once, in their order."""
    rows = db.execute(
        "SELECT priority, local_id FROM job_records"
        " WHERE local_id IN (SELECT value FROM json_each(?)) AND queue = ? AND state = ?",
        (id_list(key.local_id for key in keys), queue_id, int(state)),
    )
    found = {JobKey(*row) for row in rows}
    return [key for key in dict.fromkeys(keys) if key in found]


def delete_known(tx: Transaction, queue_id: int, state: JobState, keys: Sequence[JobKey]) -> None:
    """Delete jobs that are known to be in `state`."""
    if not keys:
        return
    ids = id_list(key.local_id for key in keys)
    if state is JobState.PENDING:
        pending_rows = tx.db.execute(
            "SELECT queue, priority, run_after, local_id FROM jobs"
            " WHERE local_id IN (SELECT value FROM json_each(?))",
            (ids,),
        ).fetchall()
        tx.db.executemany(_DELETE_PENDING, pending_rows)
    elif state is JobState.IN_PROGRESS:
        tx.db.execute(_DELETE_CLAIMS, (ids,))
    else:
        tx.db.execute(_DELETE_ENDED, (ids,))
    tx.db.execute(_DELETE_JOBS, (ids,))
    tx.moved(queue_id, [key.priority for key in keys], state, None)


def remove_dropped_rows(tx: Transaction, limit: int) -> bool:
    """Remove up to `limit` jobs of a deleted queue, or the queue itself once it is empty.

    True if there is more to do."""
    row = tx.db.execute("SELECT id FROM queues WHERE dropped LIMIT 1").fetchone()
    if row is None:
        return False
    which = (row[0], limit)
    rows = tx.db.execute(
        "SELECT queue, priority, run_after, local_id FROM pending WHERE queue = ? LIMIT ?", which
    ).fetchall()
    if rows:
        tx.db.executemany(_DELETE_PENDING, rows)
        tx.db.execute(_DELETE_JOBS, (id_list(row[-1] for row in rows),))
        return True
    for select, delete in (
        ("SELECT local_id FROM claims WHERE queue = ? LIMIT ?", _DELETE_CLAIMS),
        ("SELECT local_id FROM ended WHERE queue = ? LIMIT ?", _DELETE_ENDED),
    ):
        ids = id_list(local_id for (local_id,) in tx.db.execute(select, which))
        if ids != id_list(()):
            tx.db.execute(delete, (ids,))
            tx.db.execute(_DELETE_JOBS, (ids,))
            return True
    tx.db.execute("DELETE FROM queues WHERE id = ?", (row[0],))
    return tx.db.execute("SELECT 1 FROM queues WHERE dropped LIMIT 1").fetchone() is not None
