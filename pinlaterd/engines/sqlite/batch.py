"""What `apply` does to the tables, within its one commit.

The order is the contract's: acks, checkpoints, releases, enqueues, claims. Of each kind, what all
ops have in common goes in one statement.
"""

from __future__ import annotations

from collections.abc import Sequence

from pinlaterd.engines.base import (
    Batch,
    BatchResult,
    Checkpoint,
    CheckpointOp,
    CheckpointResult,
    EnqueueOp,
    ReleaseOp,
    Requeued,
)
from pinlaterd.engines.fitting import first_claims, fitting_payloads
from pinlaterd.engines.sqlite.attempts import (
    HeldClaim,
    apply_acks,
    cut_status,
    end_claims,
    held_claims,
    make_pending,
    priorities,
)
from pinlaterd.engines.sqlite.records import read_payloads
from pinlaterd.engines.sqlite.store import Store, Transaction, id_list
from pinlaterd.model import JobState, Payload, PendingKey, claim_source, is_held_under


def apply_batch(store: Store, tx: Transaction, batch: Batch) -> BatchResult:
    return BatchResult(
        acks=apply_acks(store, tx, batch.acks) if batch.acks else (),
        checkpoints=[_checkpoint(store, tx, op) for op in batch.checkpoints],
        releases=[_release(store, tx, op) for op in batch.releases],
        enqueues=_enqueue(store, tx, batch.enqueues) if batch.enqueues else (),
        claims=_claim(store, tx, batch) if batch.claims else (),
    )


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
    return is_held_under(held, given) and (given is not None or claim_source(held) == source)


def _after_checkpoint(claim: HeldClaim, checkpoint: Checkpoint, now_ms: int) -> HeldClaim:
    """The claim as a later checkpoint in the same op finds it."""
    run_after_ms = checkpoint.run_after_ms
    return claim._replace(
        run_after_ms=now_ms if run_after_ms is None else run_after_ms,
        custom_status=cut_status((checkpoint.prepend_custom_status or "") + claim.custom_status),
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
    held = held_claims(tx, queue_id, (release.key.local_id for release in op.releases))
    requeued = []
    for key, claim_descriptor in op.releases:
        claim = held.get(key)
        if claim is not None and claim.claim_descriptor == claim_descriptor:
            del held[key]
            requeued.append(Requeued(key.priority, PendingKey(claim.run_after_ms, key.local_id)))
    _requeue(tx, queue_id, requeued)
    return requeued


def _requeue(tx: Transaction, queue_id: int, jobs: Sequence[Requeued]) -> None:
    """From IN_PROGRESS back to PENDING."""
    if jobs:
        end_claims(tx, (job.key.local_id for job in jobs))
        make_pending(tx, queue_id, jobs)
        tx.moved(queue_id, priorities(jobs), JobState.IN_PROGRESS, JobState.PENDING)


# --- enqueues -------------------------------------------------------------------------------


def _enqueue(store: Store, tx: Transaction, ops: Sequence[EnqueueOp]) -> list[range]:
    now_ms = tx.now_ms
    job_rows, pending_rows = [], []
    local_ids = []
    for queue, jobs in ops:
        queue_id = store.queue_id(queue)
        ids = store.take_local_ids(len(jobs))
        local_ids.append(ids)
        for local_id, (body, priority, run_after_ms, attempts, status) in zip(
            ids, jobs, strict=True
        ):
            run_after = now_ms if run_after_ms is None else run_after_ms
            job_rows.append(
                (
                    local_id,
                    queue_id,
                    priority,
                    attempts,
                    attempts,
                    run_after,
                    now_ms,
                    now_ms,
                    cut_status(status),
                    body,
                )
            )
            pending_rows.append((queue_id, priority, run_after, local_id))
        tx.moved(queue_id, [job.priority for job in jobs], None, JobState.PENDING)
    tx.db.executemany(
        "INSERT INTO jobs (local_id, queue, priority, attempts_allowed, attempts_remaining,"
        " run_after, created_at, updated_at, custom_status, body)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
        job_rows,
    )
    tx.db.executemany(
        "INSERT INTO pending (queue, priority, run_after, local_id) VALUES (?, ?, ?, ?)",
        pending_rows,
    )
    return local_ids


# --- claims ---------------------------------------------------------------------------------


def _claim(store: Store, tx: Transaction, batch: Batch) -> list[Sequence[Payload | None]]:
    def read(
        queue: str, priority: int, local_ids: Sequence[int], *, most_bytes: int
    ) -> Sequence[Payload | None]:
        queue_id = store.queue_id(queue)
        return read_payloads(tx.db, queue_id, priority, local_ids, most_bytes=most_bytes)

    payloads = fitting_payloads(batch.claims, batch.claim_room, read)
    ops = [
        (store.queue_id(op.queue), first_claims(op, len(fitting)))
        for op, fitting in zip(batch.claims, payloads, strict=True)
    ]
    pending_rows = [
        (queue_id, priority, run_after_ms, local_id)
        for queue_id, claims in ops
        for priority, keys, _, _ in claims
        for run_after_ms, local_id in keys
    ]
    deleted = tx.db.executemany(
        "DELETE FROM pending WHERE queue = ? AND priority = ? AND run_after = ? AND local_id = ?",
        pending_rows,
    ).rowcount
    lost = _not_pending(tx, pending_rows) if deleted != len(pending_rows) else frozenset()

    claim_rows: list[tuple[int, int, int, int, str]] = []
    first = 0
    for number, (queue_id, claims) in enumerate(ops):
        new_rows = [
            (key[1], queue_id, priority, tx.now_ms, claim_descriptor)
            for priority, keys, claim_descriptors, _ in claims
            for key, claim_descriptor in zip(keys, claim_descriptors, strict=True)
        ]
        if lost:
            gone = [at in lost for at in range(first, first + len(new_rows))]
            first += len(new_rows)
            new_rows = [row for row, is_gone in zip(new_rows, gone, strict=True) if not is_gone]
            payloads[number] = [
                None if is_gone else payload
                for payload, is_gone in zip(payloads[number], gone, strict=True)
            ]
        claim_rows += new_rows
        tx.moved(queue_id, [row[2] for row in new_rows], JobState.PENDING, JobState.IN_PROGRESS)
    tx.db.executemany(
        "INSERT INTO claims (local_id, queue, priority, claimed_at, claim_descriptor)"
        " VALUES (?, ?, ?, ?, ?)",
        claim_rows,
    )
    return payloads


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
