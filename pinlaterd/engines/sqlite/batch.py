"""What `apply` does to the tables, within its one commit.

The order is the contract's: acks, checkpoints, releases, enqueues, claims. Of each kind, what all
ops have in common goes in one statement. Statements name ids by one JSON list, so that each is
compiled once, whatever the size of the batch; a unary plus keeps the planner on the primary key.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from itertools import count
from typing import NamedTuple

from pinlaterd.engines.base import (
    Acks,
    Batch,
    BatchResult,
    Checkpoint,
    CheckpointOp,
    CheckpointResult,
    EnqueueOp,
    ReleaseOp,
    Requeued,
)
from pinlaterd.engines.batches import (
    AckActions,
    Failed,
    apply_acks,
    first_claims,
    fitting_payloads,
    local_ids_of,
)
from pinlaterd.engines.sqlite.file import LIMITS, id_list
from pinlaterd.engines.sqlite.store import Store, Transaction
from pinlaterd.model import (
    JobKey,
    JobState,
    Payload,
    PendingKey,
    claim_source,
)

_new = tuple.__new__  # half the cost of calling a NamedTuple, for each job of a batch


def apply_batch(store: Store, tx: Transaction, batch: Batch) -> BatchResult:
    ends = AckActions(partial(_succeed, store, tx), partial(_fail, store, tx))
    return BatchResult(
        acks=apply_acks(batch.acks, ends) if batch.acks else (),
        checkpoints=[_checkpoint(store, tx, op) for op in batch.checkpoints],
        releases=[_release(store, tx, op) for op in batch.releases],
        enqueues=_enqueue(store, tx, batch.enqueues) if batch.enqueues else (),
        claims=_claim(store, tx, batch) if batch.claims else (),
    )


# --- claims that hold, and how they end -----------------------------------------------------


class HeldClaim(NamedTuple):
    """A job IN_PROGRESS."""

    key: JobKey
    claim_descriptor: str
    attempts_remaining: int
    run_after_ms: int
    custom_status: str


class FailedAttempt(NamedTuple):
    """An attempt that ends without success; `retry_at_ms` counts if attempts are left."""

    claim: HeldClaim
    retry_at_ms: int
    custom_status: str


def held_claims(
    tx: Transaction, queue_id: int, local_ids: Iterable[int]
) -> dict[JobKey, HeldClaim]:
    """Those of a queue's jobs that are IN_PROGRESS."""
    rows = tx.db.execute(
        "SELECT claims.priority, claims.local_id, claims.claim_descriptor,"
        " jobs.attempts_remaining, jobs.run_after, jobs.custom_status"
        " FROM claims CROSS JOIN jobs ON jobs.local_id = claims.local_id"
        " WHERE claims.local_id IN (SELECT value FROM json_each(?)) AND +claims.queue = ?",
        (id_list(local_ids), queue_id),
    )
    return {
        (key := JobKey(priority, local_id)): HeldClaim(key, *rest)
        for priority, local_id, *rest in rows
    }


def fail_attempts(
    tx: Transaction, queue_id: int, attempts: Sequence[FailedAttempt]
) -> list[Requeued]:
    """PENDING with one attempt less, or FAILED with none; returns those that are PENDING."""
    retried = [attempt for attempt in attempts if attempt.claim.attempts_remaining > 1]
    failed = [attempt for attempt in attempts if attempt.claim.attempts_remaining <= 1]
    tx.db.executemany(
        "UPDATE jobs SET attempts_remaining = attempts_remaining - 1, run_after = ?,"
        " updated_at = ?, custom_status = ? WHERE local_id = ?",
        [(a.retry_at_ms, tx.now_ms, a.custom_status, a.claim.key.local_id) for a in retried],
    )
    tx.db.executemany(
        "UPDATE jobs SET attempts_remaining = 0, custom_status = ? WHERE local_id = ?",
        [(a.custom_status, a.claim.key.local_id) for a in failed],
    )
    tx.db.executemany(
        "INSERT INTO ended (local_id, queue, priority, state, ended_at, claim_descriptor)"
        " VALUES (?, ?, ?, 3, ?, ?)",
        [
            (claim.key.local_id, queue_id, claim.key.priority, tx.now_ms, claim.claim_descriptor)
            for claim, _, _ in failed
        ],
    )
    _end_claims(tx, [attempt.claim.key.local_id for attempt in failed])
    tx.moved(
        Counter([(queue_id, attempt.claim.key.priority) for attempt in failed]),
        JobState.IN_PROGRESS,
        JobState.FAILED,
    )
    requeued = [
        Requeued(a.claim.key.priority, PendingKey(a.retry_at_ms, a.claim.key.local_id))
        for a in retried
    ]
    _requeue(tx, queue_id, requeued)
    return requeued


def _requeue(tx: Transaction, queue_id: int, jobs: Collection[Requeued]) -> None:
    """From IN_PROGRESS back to PENDING."""
    if jobs:
        _end_claims(tx, [job.key.local_id for job in jobs])
        make_pending(tx, queue_id, jobs, JobState.IN_PROGRESS)


def _end_claims(tx: Transaction, local_ids: Collection[int]) -> None:
    """Remove claims that are known to hold."""
    if local_ids:
        tx.db.execute(
            "DELETE FROM claims WHERE local_id IN (SELECT value FROM json_each(?))",
            (id_list(local_ids),),
        )


def make_pending(
    tx: Transaction, queue_id: int, jobs: Collection[Requeued], before: JobState
) -> None:
    tx.db.executemany(
        "INSERT INTO pending (queue, priority, run_after, local_id) VALUES (?, ?, ?, ?)",
        [(queue_id, priority, *key) for priority, key in jobs],
    )
    tx.moved(Counter([(queue_id, priority) for priority, _ in jobs]), before, JobState.PENDING)


# --- acknowledgements -----------------------------------------------------------------------

_ENDED_BY_ACK = (
    " FROM claims WHERE local_id IN (SELECT value FROM json_each(?)) AND +queue = ?"
    " AND +priority = ?"
)
_END_BY_ACK = (
    "INSERT INTO ended (local_id, queue, priority, state, ended_at, claim_descriptor)"
    " SELECT local_id, queue, priority, 2, ?, claim_descriptor" + _ENDED_BY_ACK
)


def _succeed(
    store: Store, tx: Transaction, queue: str, priority: int, acks: Sequence[Acks]
) -> set[int]:
    """IN_PROGRESS becomes SUCCEEDED; returns the local ids of acks that do not apply."""
    queue_id, local_ids = store.queue_id(queue), local_ids_of(acks)
    # Where none names its claim there is no need to look first.
    name_claims = any(alike.claim_descriptor is not None for alike in acks)
    missed = _claims_lost(tx, acks, local_ids) if name_claims else set()
    if missed:
        local_ids = [local_id for local_id in local_ids if local_id not in missed]
    which = (id_list(local_ids), queue_id, priority)
    succeeded = tx.db.execute(_END_BY_ACK, (tx.now_ms, *which)).rowcount
    if succeeded != len(local_ids):
        held = tx.db.execute("SELECT local_id" + _ENDED_BY_ACK, which)
        missed |= set(local_ids).difference(local_id for (local_id,) in held)
    if succeeded:
        tx.db.execute("DELETE" + _ENDED_BY_ACK, which)
        tx.moved({(queue_id, priority): succeeded}, JobState.IN_PROGRESS, JobState.SUCCEEDED)
        _append_statuses(tx, [alike for alike in acks if alike.append_custom_status], missed)
    return missed


def _claims_lost(tx: Transaction, acks: Sequence[Acks], local_ids: Sequence[int]) -> set[int]:
    """The local ids of acks whose jobs are not held, or not under the claim that they give."""
    held: dict[int, str] = dict(
        tx.db.execute(
            "SELECT local_id, claim_descriptor FROM claims"
            " WHERE local_id IN (SELECT value FROM json_each(?))",
            (id_list(local_ids),),
        )
    )
    return {
        local_id
        for alike in acks
        for local_id in alike.local_ids
        if local_id not in held or alike.claim_descriptor not in (None, held[local_id])
    }


def _append_statuses(tx: Transaction, acks: Sequence[Acks], missed: set[int]) -> None:
    """Append the acks' texts to their jobs', in Python: SQL functions stop at a zero byte."""
    texts = {
        i: alike.append_custom_status for alike in acks for i in alike.local_ids if i not in missed
    }
    if not texts:
        return
    rows = tx.db.execute(
        "SELECT local_id, custom_status FROM jobs"
        " WHERE local_id IN (SELECT value FROM json_each(?))",
        (id_list(texts),),
    ).fetchall()
    tx.db.executemany(
        "UPDATE jobs SET custom_status = ? WHERE local_id = ?",
        [(_cut_status(status + texts[local_id]), local_id) for local_id, status in rows],
    )


def _fail(store: Store, tx: Transaction, queue: str, priority: int, acks: Sequence[Acks]) -> Failed:
    queue_id, missed = store.queue_id(queue), set(local_ids_of(acks))
    held = held_claims(tx, queue_id, missed)
    attempts = []
    for _, local_ids, text, retry_delay_ms, claim_descriptor in acks:
        retry_at_ms = min(tx.now_ms + retry_delay_ms, LIMITS.run_after_ms)
        for local_id in local_ids:
            claim = held.get(JobKey(priority, local_id))
            if claim is not None and claim_descriptor in (None, claim.claim_descriptor):
                status = _cut_status(claim.custom_status + text)
                attempts.append(FailedAttempt(claim, retry_at_ms, status))
                missed.discard(local_id)
    return Failed(missed, fail_attempts(tx, queue_id, attempts))


def _cut_status(text: str) -> str:
    return text[: LIMITS.custom_status_chars]


# --- checkpoints and releases ---------------------------------------------------------------


def _checkpoint(store: Store, tx: Transaction, op: CheckpointOp) -> CheckpointResult:
    queue_id = store.queue_id(op.queue)
    held = held_claims(tx, queue_id, (checkpoint.key.local_id for checkpoint in op.checkpoints))
    job_rows, renewed = [], []
    requeued: list[Requeued] = []
    noop = 0
    for checkpoint in op.checkpoints:
        claim = held.get(checkpoint.key)
        if claim is None or not _is_claimers(checkpoint, claim, op.source):
            noop += 1
            continue
        claim = _after_checkpoint(claim, checkpoint, tx.now_ms)
        job_rows.append(_job_row(claim, checkpoint, tx.now_ms))
        if checkpoint.move_to_pending:
            del held[checkpoint.key]
            key = PendingKey(claim.run_after_ms, claim.key.local_id)
            requeued.append(Requeued(claim.key.priority, key))
        else:
            held[checkpoint.key] = claim
            renewed.append((tx.now_ms, claim.key.local_id))
    tx.db.executemany(
        "UPDATE jobs SET run_after = ?, attempts_allowed = coalesce(?, attempts_allowed),"
        " attempts_remaining = coalesce(?, attempts_remaining), custom_status = ?,"
        " updated_at = ?, body = coalesce(?, body) WHERE local_id = ?",
        job_rows,
    )
    tx.db.executemany("UPDATE claims SET claimed_at = ? WHERE local_id = ?", renewed)
    _requeue(tx, queue_id, requeued)
    return CheckpointResult(len(job_rows), noop, requeued)


def _is_claimers(checkpoint: Checkpoint, claim: HeldClaim, source: str) -> bool:
    held, given = claim.claim_descriptor, checkpoint.claim_descriptor
    return held == given if given is not None else claim_source(held) == source


def _after_checkpoint(claim: HeldClaim, checkpoint: Checkpoint, now_ms: int) -> HeldClaim:
    """The claim as a later checkpoint in the same op finds it."""
    run_after_ms = checkpoint.run_after_ms
    return claim._replace(
        run_after_ms=now_ms if run_after_ms is None else run_after_ms,
        custom_status=_cut_status((checkpoint.prepend_custom_status or "") + claim.custom_status),
    )


def _job_row(
    claim: HeldClaim, checkpoint: Checkpoint, now_ms: int
) -> tuple[int, int | None, int | None, str, int, bytes | None, int]:
    return (
        claim.run_after_ms,
        checkpoint.attempts,
        checkpoint.attempts,
        claim.custom_status,
        now_ms,
        checkpoint.new_body,
        claim.key.local_id,
    )


def _release(store: Store, tx: Transaction, op: ReleaseOp) -> list[Requeued]:
    queue_id = store.queue_id(op.queue)
    held = held_claims(tx, queue_id, [release.key.local_id for release in op.releases])
    requeued = []
    for key, claim_descriptor in op.releases:
        claim = held.get(key)
        if claim is not None and claim.claim_descriptor == claim_descriptor:
            del held[key]
            requeued.append(Requeued(key.priority, PendingKey(claim.run_after_ms, key.local_id)))
    _requeue(tx, queue_id, requeued)
    return requeued


# --- enqueues -------------------------------------------------------------------------------


def _enqueue(store: Store, tx: Transaction, ops: Sequence[EnqueueOp]) -> list[range]:
    now_ms, most_chars = tx.now_ms, LIMITS.custom_status_chars
    local_ids = [store.take_local_ids(len(op.jobs)) for op in ops]
    rows = [
        (
            local_id,
            queue_id,
            priority,
            attempts,
            attempts,
            now_ms if run_after_ms is None else run_after_ms,
            now_ms,
            now_ms,
            status[:most_chars],
            body,
        )
        for (queue, jobs), ids in zip(ops, local_ids, strict=True)
        for queue_id in (store.queue_id(queue),)
        for local_id, (body, priority, run_after_ms, attempts, status) in zip(
            ids, jobs, strict=True
        )
    ]
    tx.db.executemany(
        "INSERT INTO jobs (local_id, queue, priority, attempts_allowed, attempts_remaining,"
        " run_after, created_at, updated_at, custom_status, body)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        rows,
    )
    if rows:  # ids are consecutive, and nobody else's jobs lie between them
        tx.db.execute(
            "INSERT INTO pending (queue, priority, run_after, local_id)"
            " SELECT queue, priority, run_after, local_id FROM jobs WHERE local_id BETWEEN ? AND ?",
            (rows[0][0], rows[-1][0]),
        )
    tx.moved(Counter([row[1:3] for row in rows]), None, JobState.PENDING)
    return local_ids


# --- claims ---------------------------------------------------------------------------------


def _claim(store: Store, tx: Transaction, batch: Batch) -> list[Sequence[Payload | None]]:
    def read(
        queue: str, priority: int, local_ids: Sequence[int], *, most_bytes: int
    ) -> Sequence[Payload | None]:
        queue_id = store.queue_id(queue)
        return read_payloads(tx.db, queue_id, priority, local_ids, most_bytes=most_bytes)

    payloads = fitting_payloads(batch.claims, batch.claim_room, read)
    claims = [
        (store.queue_id(op.queue), *columns)
        for op, fitting in zip(batch.claims, payloads, strict=True)
        for columns in first_claims(op, len(fitting))
    ]
    pending_rows = [
        (queue_id, priority, run_after_ms, local_id)
        for queue_id, priority, keys, _, _ in claims
        for run_after_ms, local_id in keys
    ]
    now_ms = tx.now_ms
    claim_rows = [
        (key[1], queue_id, priority, now_ms, claim_descriptor)
        for queue_id, priority, keys, claim_descriptors, _ in claims
        for key, claim_descriptor in zip(keys, claim_descriptors, strict=True)
    ]
    deleted = tx.db.executemany(
        "DELETE FROM pending WHERE queue = ? AND priority = ? AND run_after = ? AND local_id = ?",
        pending_rows,
    ).rowcount
    if deleted != len(pending_rows):
        lost = _not_pending(tx, pending_rows)
        claim_rows = [row for at, row in enumerate(claim_rows) if at not in lost]
        payloads = _without(payloads, lost)
    tx.db.executemany(
        "INSERT INTO claims (local_id, queue, priority, claimed_at, claim_descriptor)"
        " VALUES (?, ?, ?, ?, ?)",
        claim_rows,
    )
    tx.moved(Counter([row[1:3] for row in claim_rows]), JobState.PENDING, JobState.IN_PROGRESS)
    return payloads


def _without(
    payloads: Sequence[Sequence[Payload | None]], lost: Collection[int]
) -> list[Sequence[Payload | None]]:
    """`payloads` with None at the positions `lost`, counted over all ops."""
    positions = count()
    return [
        [None if next(positions) in lost else payload for payload in of_op] for of_op in payloads
    ]


def _not_pending(tx: Transaction, rows: Sequence[tuple[int, int, int, int]]) -> frozenset[int]:
    """Which of `rows`, by position, were not in `pending` when they were deleted from it.

    A job that was there is now in no state's table, and its own row bears that very key. If it
    is named twice, the first takes it.
    """
    left = set(
        tx.db.execute(
            "SELECT queue, priority, run_after, local_id FROM jobs"
            " WHERE local_id IN (SELECT value FROM json_each(?))"
            " AND NOT EXISTS (SELECT 1 FROM claims WHERE claims.local_id = jobs.local_id)"
            " AND NOT EXISTS (SELECT 1 FROM ended WHERE ended.local_id = jobs.local_id)",
            (id_list(row[3] for row in rows),),
        )
    )
    lost = set()
    for at, row in enumerate(rows):
        if row in left:
            left.remove(row)
        else:
            lost.add(at)
    return frozenset(lost)


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
