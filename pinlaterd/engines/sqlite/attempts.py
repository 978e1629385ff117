"""How an attempt ends: claims that hold, acknowledgements, failures and retries.

Called within a Transaction. Statements name ids by one JSON list, so that each is compiled once,
whatever the size of the batch; a unary plus keeps the planner on the primary key.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import NamedTuple

from pinlaterd.engines.acks import carry_out_acks, local_ids_of
from pinlaterd.engines.base import AckOp, AckResult, Acks, Requeued
from pinlaterd.engines.sqlite.limits import LIMITS
from pinlaterd.engines.sqlite.store import Store, Transaction, id_list
from pinlaterd.model import MOVE_CLAIM_END, JobKey, JobState, PendingKey, is_held_under


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


def end_claims(tx: Transaction, local_ids: Iterable[int]) -> None:
    """Remove claims that are known to hold."""
    tx.db.execute(
        "DELETE FROM claims WHERE local_id IN (SELECT value FROM json_each(?))",
        (id_list(local_ids),),
    )


def make_pending(tx: Transaction, queue_id: int, jobs: Collection[Requeued]) -> None:
    tx.db.executemany(
        "INSERT INTO pending (queue, priority, run_after, local_id) VALUES (?, ?, ?, ?)",
        [(queue_id, priority, *key) for priority, key in jobs],
    )


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
    end_claims(tx, [attempt.claim.key.local_id for attempt in attempts])
    requeued = [
        Requeued(a.claim.key.priority, PendingKey(a.retry_at_ms, a.claim.key.local_id))
        for a in retried
    ]
    make_pending(tx, queue_id, requeued)
    tx.moved(queue_id, priorities(requeued), JobState.IN_PROGRESS, JobState.PENDING)
    tx.moved(
        queue_id, [a.claim.key.priority for a in failed], JobState.IN_PROGRESS, JobState.FAILED
    )
    return requeued


def priorities(jobs: Iterable[Requeued]) -> list[int]:
    return [priority for priority, _ in jobs]


# --- acknowledgements -----------------------------------------------------------------------


def apply_acks(store: Store, tx: Transaction, ops: Sequence[AckOp]) -> list[AckResult]:
    return carry_out_acks(ops, partial(_apply_together, store, tx), _name_no_job_twice)


def _name_no_job_twice(ops: Sequence[AckOp]) -> bool:
    local_ids = [local_id for op in ops for acks in op[1:] for local_id in local_ids_of(acks)]
    return len(set(local_ids)) == len(local_ids)


def _apply_together(store: Store, tx: Transaction, ops: Sequence[AckOp]) -> list[AckResult]:
    successes: defaultdict[tuple[int, int], list[Acks]] = defaultdict(list)
    failures: defaultdict[int, list[Acks]] = defaultdict(list)
    for op in ops:
        queue_id = store.queue_id(op.queue)
        for alike in op.succeeded:
            successes[queue_id, alike.priority].append(alike)
        if op.failed:
            failures[queue_id].extend(op.failed)

    missed: set[int] = set()  # local ids of acks that do not apply
    requeued: dict[int, Requeued] = {}
    for (queue_id, priority), acks in successes.items():
        missed |= _succeed(tx, queue_id, priority, acks)
    for queue_id, acks in failures.items():
        attempts = _failed_attempts(tx, queue_id, acks)
        missed.update(local_ids_of(acks))
        missed.difference_update(attempt.claim.key.local_id for attempt in attempts)
        for job in fail_attempts(tx, queue_id, attempts):
            requeued[job.key.local_id] = job
    return [_result(op, missed, requeued) for op in ops]


def _result(op: AckOp, missed: set[int], requeued: dict[int, Requeued]) -> AckResult:
    succeeded, failed = local_ids_of(op.succeeded), local_ids_of(op.failed)
    not_succeeded = sum(i in missed for i in succeeded) if missed else 0
    not_failed = sum(i in missed for i in failed) if missed else 0
    return AckResult(
        succeeded=len(succeeded) - not_succeeded,
        failed=len(failed) - not_failed,
        noop=not_succeeded + not_failed,
        requeued=[requeued[i] for i in failed if i in requeued],
    )


def _succeed(tx: Transaction, queue_id: int, priority: int, acks: Sequence[Acks]) -> set[int]:
    """IN_PROGRESS becomes SUCCEEDED; returns the local ids of acks that do not apply."""
    local_ids = local_ids_of(acks)
    # Where none names its claim there is no need to look first: SQL does as is_held_under.
    looked_at = any(alike.claim_descriptor is not None for alike in acks)
    missed = _claims_lost(tx, acks) if looked_at else set()
    if missed:
        local_ids = [local_id for local_id in local_ids if local_id not in missed]

    move = (-len(MOVE_CLAIM_END), MOVE_CLAIM_END)
    which = (id_list(local_ids), queue_id, priority, looked_at, *move)
    succeeded = tx.db.execute(
        "INSERT INTO ended (local_id, queue, priority, state, ended_at, claim_descriptor)"
        " SELECT local_id, queue, priority, 2, ?, claim_descriptor FROM claims"
        " WHERE local_id IN (SELECT value FROM json_each(?)) AND +queue = ? AND +priority = ?"
        " AND (? OR substr(claim_descriptor, ?) <> ?)",
        (tx.now_ms, *which),
    ).rowcount
    if succeeded != len(local_ids):
        held = tx.db.execute(
            "SELECT local_id FROM claims"
            " WHERE local_id IN (SELECT value FROM json_each(?)) AND +queue = ? AND +priority = ?"
            " AND (? OR substr(claim_descriptor, ?) <> ?)",
            which,
        )
        missed |= set(local_ids).difference(local_id for (local_id,) in held)
    if succeeded:
        tx.db.execute(
            "DELETE FROM claims"
            " WHERE local_id IN (SELECT value FROM json_each(?)) AND +queue = ? AND +priority = ?"
            " AND (? OR substr(claim_descriptor, ?) <> ?)",
            which,
        )
        tx.moved(queue_id, [priority] * succeeded, JobState.IN_PROGRESS, JobState.SUCCEEDED)
        _append_statuses(tx, [alike for alike in acks if alike.append_custom_status], missed)
    return missed


def _claims_lost(tx: Transaction, acks: Sequence[Acks]) -> set[int]:
    """The local ids of acks whose jobs are not held, or not under the claim that they give."""
    held: dict[int, str] = dict(
        tx.db.execute(
            "SELECT local_id, claim_descriptor FROM claims"
            " WHERE local_id IN (SELECT value FROM json_each(?))",
            (id_list(local_ids_of(acks)),),
        )
    )
    return {
        i
        for alike in acks
        for i in alike.local_ids
        if i not in held or not is_held_under(held[i], alike.claim_descriptor)
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
        [(cut_status(status + texts[local_id]), local_id) for local_id, status in rows],
    )


def _failed_attempts(tx: Transaction, queue_id: int, acks: Sequence[Acks]) -> list[FailedAttempt]:
    """The failed attempts that `acks` report, where they apply."""
    held = held_claims(tx, queue_id, local_ids_of(acks))
    attempts = []
    for priority, local_ids, text, retry_delay_ms, claim_descriptor in acks:
        retry_at_ms = min(tx.now_ms + retry_delay_ms, LIMITS.run_after_ms)
        for local_id in local_ids:
            claim = held.get(JobKey(priority, local_id))
            if claim is not None and is_held_under(claim.claim_descriptor, claim_descriptor):
                status = cut_status(claim.custom_status + text)
                attempts.append(FailedAttempt(claim, retry_at_ms, status))
    return attempts


def cut_status(text: str) -> str:
    return text[: LIMITS.custom_status_chars]
