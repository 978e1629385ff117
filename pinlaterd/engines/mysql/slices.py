"""Writes in slices: retries, deletes, time-outs, garbage.

Each function does at most `limit` jobs within a Transaction, and finds them by an index. PinLater's
tables have none by the time of a change. There, claims that timed out are looked for among all that
are IN_PROGRESS, the longest failed among all that FAILED, and garbage by run-after, as it did.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from pinlaterd.engines.base import Expired, Requeued
from pinlaterd.engines.mysql.attempts import (
    FailedAttempt,
    fail_attempts,
    held_in,
    oldest_claims,
    to_pending,
)
from pinlaterd.engines.mysql.statements import delete, select_locked, update
from pinlaterd.engines.mysql.store import Store, Transaction
from pinlaterd.engines.mysql.tables import Table
from pinlaterd.model import JobKey, JobState, PendingKey


def retry_failed(
    store: Store,
    tx: Transaction,
    queue: str,
    priority: int,
    *,
    attempts: int,
    run_after_ms: int,
    limit: int,
) -> list[Requeued]:
    table = store.tables_of(queue).get(priority)
    if table is None:
        return []
    statement = oldest_failed(table, b"local_id", limit) + b" FOR UPDATE"
    local_ids = [local_id for (local_id,) in tx.read([statement])]
    common = to_pending(tx, table) + (
        b", attempts_allowed = GREATEST(COALESCE(attempts_allowed, 0), %d),"
        b" attempts_remaining = %d, run_after = %b"
        % (attempts, attempts, table.run_after.literal(run_after_ms))
    )
    most_bytes = store.db.statement_bytes
    tx.run(update(table, local_ids, JobState.FAILED, common, most_bytes=most_bytes))
    tx.moved(queue, table, local_ids, JobState.FAILED, JobState.PENDING)
    at_ms = table.run_after.floor(run_after_ms)
    return [Requeued(priority, PendingKey(at_ms, local_id)) for local_id in local_ids]


def oldest_failed(table: Table, columns: bytes, limit: int) -> bytes:
    return (
        b"SELECT " + columns + b" FROM " + table.name + table.by_updated_at
        + b" WHERE state = 3 ORDER BY updated_at, local_id LIMIT %d" % limit
    )  # fmt: skip


def release_expired(
    store: Store, tx: Transaction, queue: str, *, claimed_ms: tuple[int, int], limit: int
) -> Expired:
    """`claimed_ms`: after and before which time."""
    retried: list[Requeued] = []
    done = 0
    for table in store.tables_to_sweep(queue, JobState.IN_PROGRESS):
        if done == limit:
            break
        held = held_in(tx.read([oldest_claims(table, *claimed_ms, limit - done)]))
        attempts = [FailedAttempt(claim, tx.now_ms) for claim in held.values()]
        retried += fail_attempts(tx, queue, table, attempts, store.db.statement_bytes)
        done += len(attempts)
    return Expired(retried, failed=done - len(retried))


def collect_garbage(
    store: Store,
    tx: Transaction,
    queue: str,
    state: JobState,
    *,
    updated_before_ms: int,
    limit: int,
) -> int:
    deleted = 0
    for table in store.tables_to_sweep(queue, state):
        if deleted == limit:
            break
        bound = table.updated_at.bound(updated_before_ms)
        index, where, order = table.by_updated_at, b"updated_at < " + bound, b"updated_at"
        if not index:
            index, order = table.by_run_after, b"run_after"
            where = b"run_after < " + bound + b" AND " + where
        rows = tx.read(
            [
                b"SELECT local_id FROM %b%b WHERE state = %d AND %b ORDER BY %b, local_id LIMIT %d"
                b" FOR UPDATE" % (table.name, index, state, where, order, limit - deleted)
            ]
        )
        local_ids = [local_id for (local_id,) in rows]
        tx.run(delete(table, local_ids, state))
        tx.moved(queue, table, local_ids, state, None)
        deleted += len(local_ids)
    return deleted


# --- deletes --------------------------------------------------------------------------------


def delete_jobs(
    store: Store, tx: Transaction, queue: str, state: JobState, priority: int, limit: int
) -> list[JobKey]:
    table = store.tables_of(queue).get(priority)
    if table is None:
        return []
    rows = tx.read(
        [
            b"SELECT local_id FROM %b%b WHERE state = %d ORDER BY run_after, local_id LIMIT %d"
            b" FOR UPDATE" % (table.name, table.by_run_after, state, limit)
        ]
    )
    local_ids = [local_id for (local_id,) in rows]
    tx.run(delete(table, local_ids, state))
    tx.moved(queue, table, local_ids, state, None)
    return [JobKey(priority, local_id) for local_id in local_ids]


def delete_keys(
    store: Store, tx: Transaction, queue: str, state: JobState, keys: Sequence[JobKey]
) -> list[JobKey]:
    """Each of them once, in their order."""
    by_priority: defaultdict[int, list[int]] = defaultdict(list)
    for priority, local_id in dict.fromkeys(keys):
        by_priority[priority].append(local_id)
    found: set[JobKey] = set()
    for priority, local_ids in by_priority.items():
        table = store.tables_of(queue).get(priority)
        if table is None:
            continue
        rows = tx.read(select_locked(table, b"local_id", local_ids, state))
        there = [local_id for (local_id,) in rows]
        tx.run(delete(table, there, state))
        tx.moved(queue, table, there, state, None)
        found.update(JobKey(priority, local_id) for local_id in there)
    return [key for key in dict.fromkeys(keys) if key in found]
