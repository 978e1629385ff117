"""The changes of tables that `apply` makes, within its one commit.

The order is the contract's: acks, checkpoints, releases, enqueues, claims. Statements name ids by
one JSON list, so that each is compiled once, whatever the size of the batch.
"""

from __future__ import annotations

import logging
import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import chain, pairwise, repeat
from typing import NamedTuple

from pinlaterd.engines.base import (
    AckOp,
    AckResult,
    Acks,
    Batch,
    BatchResult,
    Checkpoint,
    CheckpointOp,
    CheckpointResult,
    ClaimOp,
    Claims,
    EnqueueOp,
    EnqueueWithOptionsOp,
    Finished,
    FinishOp,
    KeyHolder,
    ReleaseOp,
    Requeued,
)
from pinlaterd.engines.batches import (
    AckActions,
    Failed,
    FindKeys,
    apply_acks,
    enqueue_with_options,
    expired_status,
    first_claims,
    fitting_payloads,
    local_ids_of,
)
from pinlaterd.engines.sqlite.file import LIMITS, id_list, insert_rows
from pinlaterd.engines.sqlite.options import expired, note_expired, put_options
from pinlaterd.engines.sqlite.runs import (
    FAILED,
    IN_PROGRESS,
    PENDING,
    SUCCEEDED,
    Run,
    holding,
    merged,
    spans,
    split,
)
from pinlaterd.engines.sqlite.store import Transaction
from pinlaterd.model import (
    FinishOutcome,
    Job,
    JobKey,
    JobState,
    Payload,
    PendingKey,
    claim_source,
    defaults_behind,
    new_record,
    runs_of,
)

log = logging.getLogger(__name__)


def apply_batch(tx: Transaction, batch: Batch) -> BatchResult:
    return BatchResult(
        acks=_ack(tx, batch.acks) if batch.acks else (),
        checkpoints=[_checkpoint(tx, op) for op in batch.checkpoints] if batch.checkpoints else (),
        releases=[_release(tx, op) for op in batch.releases] if batch.releases else (),
        enqueues=_enqueue(tx, batch.enqueues) if batch.enqueues else (),
        with_options=_enqueue_with_options(tx, batch.with_options) if batch.with_options else (),
        expired=_expire_claimed(tx, batch) if tx.store.expiring_ids else (),
        claims=_claim(tx, batch) if batch.claims else (),
        finishes=[_finish(tx, op) for op in batch.finishes] if batch.finishes else (),
    )


# --- claims that hold, and how they end -----------------------------------------------------


class HeldClaim(NamedTuple):
    """A job IN_PROGRESS: its part of a run, and what its row says."""

    run: Run
    attempts_remaining: int
    run_after_ms: int
    custom_status: str

    @property
    def claim_descriptor(self) -> str:
        return self.run.claim_of(self.run.first_id)


class FailedAttempt(NamedTuple):
    """An attempt that ends without success; `retry_at_ms` counts if attempts are left."""

    claim: HeldClaim
    retry_at_ms: int
    custom_status: str


def held_claims(tx: Transaction, runs: Iterable[Run]) -> dict[JobKey, HeldClaim]:
    """Return the jobs of `runs`, one by one."""
    of_jobs = {local_id: run for run in runs for local_id in run.local_ids}
    rows = tx.db.execute(
        "SELECT local_id, CAST(attempts_remaining AS INTEGER), CAST(run_after AS INTEGER),"
        " CAST(custom_status AS TEXT) FROM jobs"
        " WHERE local_id IN (SELECT value FROM json_each(?))",
        (id_list(of_jobs),),
    )
    return {
        JobKey(run.priority, local_id): HeldClaim(run.cut(local_id, local_id), *rest)
        for local_id, *rest in rows
        for run in (of_jobs[local_id],)
    }


def fail_attempts(
    tx: Transaction, held: Sequence[Run], taken: Sequence[Run], attempts: Sequence[FailedAttempt]
) -> list[Requeued]:
    """Make jobs PENDING with one attempt less, or FAILED with none; return the PENDING ones. They
    are those of `taken`, parts of the runs `held`; what has no row there leaves its run."""
    retried = [attempt for attempt in attempts if attempt.claim.attempts_remaining > 1]
    failed = [attempt for attempt in attempts if attempt.claim.attempts_remaining <= 1]
    tx.db.executemany(
        "UPDATE jobs SET attempts_remaining = attempts_remaining - 1, run_after = ?,"
        " updated_at = ?, custom_status = ? WHERE local_id = ?",
        [(a.retry_at_ms, tx.now_ms, a.custom_status, a.claim.run.first_id) for a in retried],
    )
    tx.db.executemany(
        "UPDATE jobs SET attempts_remaining = 0, custom_status = ? WHERE local_id = ?",
        [(a.custom_status, a.claim.run.first_id) for a in failed],
    )
    ends = [a.claim.run._replace(state=FAILED, at_ms=tx.now_ms) for a in failed]
    ends += [a.claim.run.pending(a.retry_at_ms) for a in retried]
    tx.move(held, taken, sorted(ends))
    return [_requeued(a.claim.run, a.retry_at_ms) for a in retried]


def _requeued(run: Run, run_after_ms: int) -> Requeued:
    return Requeued(run.priority, PendingKey(run_after_ms, run.first_id))


# --- acknowledgements -----------------------------------------------------------------------


def _ack(tx: Transaction, ops: Sequence[AckOp]) -> list[AckResult]:
    return apply_acks(ops, AckActions(partial(_succeed, tx), partial(_fail, tx)))


def _succeed(tx: Transaction, queue: str, priority: int, acks: Sequence[Acks]) -> set[int]:
    """Make IN_PROGRESS jobs SUCCEEDED; return the local ids of acks that do not apply."""
    local_ids = local_ids_of(acks)
    held, inside, left, missed = _held_by(tx, queue, priority, acks, local_ids)
    if inside:
        ended = [run._replace(state=SUCCEEDED, at_ms=tx.now_ms) for run in inside]
        tx.replace(held, [*left, *merged(ended)])
        _append_statuses(tx, [alike for alike in acks if alike.append_custom_status], missed)
    return missed


def _held_by(
    tx: Transaction,
    queue: str,
    priority: int,
    acks: Sequence[Acks],
    local_ids: Sequence[int],
) -> tuple[list[Run], list[Run], list[Run], set[int]]:
    """Find the jobs that are acked: the runs that hold them, the parts of those whose acks apply,
    the other parts, and the local ids of acks that don't apply."""
    wanted = spans(local_ids)
    found = holding(tx.db, tx.store.queue_id(queue), IN_PROGRESS, wanted)
    held = [run for run in found if run.priority == priority]
    inside, left = split(held, wanted)
    named = any(alike.claim_descriptor is not None for alike in acks)
    if not named and sum([run.jobs for run in inside]) == len(local_ids):
        return held, inside, left, set()
    of_jobs = {local_id: run for run in inside for local_id in run.local_ids}
    missed = {
        local_id
        for alike in acks
        for local_id in alike.local_ids
        if local_id not in of_jobs
        or alike.claim_descriptor not in (None, of_jobs[local_id].claim_of(local_id))
    }
    if missed:
        inside, left = split(held, spans(of_jobs.keys() - missed))
    return held, inside, left, missed


_STATUSES = (
    "SELECT local_id, CAST(custom_status AS TEXT) FROM jobs"
    " WHERE local_id IN (SELECT value FROM json_each(?))"
)


def _append_statuses(tx: Transaction, acks: Sequence[Acks], missed: set[int]) -> None:
    """Append the acks' texts to their jobs', in Python: SQL functions stop at a zero byte."""
    texts = {
        i: alike.append_custom_status for alike in acks for i in alike.local_ids if i not in missed
    }
    if not texts:
        return
    rows = tx.db.execute(_STATUSES, (id_list(texts),)).fetchall()
    tx.db.executemany(
        "UPDATE jobs SET custom_status = ? WHERE local_id = ?",
        [(_cut_status(status + texts[local_id]), local_id) for local_id, status in rows],
    )


def _fail(tx: Transaction, queue: str, priority: int, acks: Sequence[Acks]) -> Failed:
    held, ended, _, missed = _held_by(tx, queue, priority, acks, local_ids_of(acks))
    claims = held_claims(tx, ended)
    attempts = []
    for alike in acks:
        retry_at_ms = min(tx.now_ms + alike.retry_delay_ms, LIMITS.run_after_ms)
        for local_id in alike.local_ids:
            claim = claims.get(JobKey(priority, local_id))
            if claim is None:
                missed.add(local_id)
                continue
            if not alike.retryable:
                claim = claim._replace(attempts_remaining=1)
            status = _cut_status(claim.custom_status + alike.append_custom_status)
            attempts.append(FailedAttempt(claim, retry_at_ms, status))
    return Failed(missed, fail_attempts(tx, held, ended, attempts))


def _cut_status(text: str) -> str:
    return text[: LIMITS.custom_status_chars]


# --- checkpoints and releases ---------------------------------------------------------------


def _held(
    tx: Transaction, queue: str, keys: Iterable[JobKey]
) -> tuple[list[Run], dict[JobKey, HeldClaim]]:
    """Return those of the jobs that are IN_PROGRESS, and the runs that hold them."""
    wanted = spans([key.local_id for key in keys])
    runs = holding(tx.db, tx.store.queue_id(queue), IN_PROGRESS, wanted)
    return runs, held_claims(tx, split(runs, wanted)[0])


def _checkpoint(tx: Transaction, op: CheckpointOp) -> CheckpointResult:
    runs, held = _held(tx, op.queue, [checkpoint.key for checkpoint in op.checkpoints])
    before = {key: claim.run for key, claim in held.items()}
    after: dict[JobKey, Run] = {}
    job_rows = []
    requeued: list[Requeued] = []
    missed: set[JobKey] = set()
    for checkpoint in op.checkpoints:
        key = checkpoint.key
        claim = held.get(key)
        if claim is None or not _is_claimers(checkpoint, claim, op.source):
            missed.add(key)
            continue
        claim = held[key] = _after_checkpoint(claim, checkpoint, tx.now_ms)
        job_rows.append(_job_row(claim, checkpoint, tx.now_ms))
        if checkpoint.move_to_pending:
            del held[key]
            after[key] = claim.run.pending(claim.run_after_ms)
            requeued.append(_requeued(claim.run, claim.run_after_ms))
        else:
            after[key] = claim.run._replace(at_ms=tx.now_ms)
    tx.db.executemany(
        "UPDATE jobs SET run_after = ?, attempts_allowed = coalesce(?, attempts_allowed),"
        " attempts_remaining = coalesce(?, attempts_remaining), custom_status = ?,"
        " updated_at = ?, body = coalesce(?, body) WHERE local_id = ?",
        job_rows,
    )
    tx.move(runs, sorted(before[key] for key in after), sorted(after.values()))
    return CheckpointResult(len(job_rows), len(op.checkpoints) - len(job_rows), requeued, missed)


def _is_claimers(checkpoint: Checkpoint, claim: HeldClaim, source: str) -> bool:
    held, given = claim.claim_descriptor, checkpoint.claim_descriptor
    return held == given if given is not None else claim_source(held) == source


def _after_checkpoint(claim: HeldClaim, checkpoint: Checkpoint, now_ms: int) -> HeldClaim:
    """Return the claim as a later checkpoint in the same op finds it."""
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
        claim.run.first_id,
    )


def _release(tx: Transaction, op: ReleaseOp) -> list[Requeued]:
    runs, held = _held(tx, op.queue, [release.key for release in op.releases])
    released: list[HeldClaim] = []
    for release in op.releases:
        claim = held.get(release.key)
        if claim is not None and claim.claim_descriptor == release.claim_descriptor:
            released.append(held.pop(release.key))
    pending = sorted(claim.run.pending(claim.run_after_ms) for claim in released)
    tx.move(runs, sorted(claim.run for claim in released), pending)
    return [_requeued(claim.run, claim.run_after_ms) for claim in released]


# --- enqueues -------------------------------------------------------------------------------

_Place = tuple[int, int, int]  # queue, priority and run-after
_INSERT_JOBS = (
    "INSERT INTO jobs (local_id, queue, priority, run_after, created_at, updated_at,"
    " attempts_allowed, attempts_remaining, custom_status, body)"
)


def _enqueue(tx: Transaction, ops: Sequence[EnqueueOp]) -> list[Sequence[int]]:
    """Store jobs. Those of one queue, priority and run-after get ids in their order: one run."""
    now_ms, most_chars = tx.now_ms, LIMITS.custom_status_chars
    # Jobs that differ only in their bodies, numbered in the order of the batch.
    by_place: dict[_Place, list[tuple[int, Job, Sequence[bytes]]]] = {}
    ends = [0]  # where those of each op end
    size = 0
    for op in ops:
        queue_id = tx.store.queue_id(op.queue)
        for job, bodies in runs_of(op.jobs):
            run_after_ms = now_ms if job.run_after_ms is None else job.run_after_ms
            place = (queue_id, job.priority, run_after_ms)
            by_place.setdefault(place, []).append((size, job, bodies))
            size += 1
        ends.append(size)
    local_ids = [range(0)] * size
    rows: list[tuple[object, ...]] = []
    runs = []
    for place in sorted(by_place):
        before = len(rows)
        for at, job, bodies in by_place[place]:
            ids = local_ids[at] = tx.store.take_local_ids(len(bodies))
            attempts, text = job.attempts_allowed, job.custom_status[:most_chars]
            common = (*place, now_ms, now_ms, attempts, attempts, text)
            if len(bodies) == 1:
                rows.append((ids.start, *common, bodies[0]))
            else:
                rows += zip(ids, *map(repeat, common), bodies)  # noqa: B905 - repeat has no end
        first_id = ids.stop - (len(rows) - before)
        queue_id, priority, run_after_ms = place
        runs.append(Run(first_id, ids.stop - 1, queue_id, priority, PENDING, run_after_ms))
    insert_rows(tx.db, _INSERT_JOBS, rows)
    tx.replace((), runs)
    return [
        local_ids[first] if end == first + 1 else list(chain.from_iterable(local_ids[first:end]))
        for first, end in pairwise(ends)
    ]


def _enqueue_with_options(
    tx: Transaction, ops: Sequence[EnqueueWithOptionsOp]
) -> list[list[KeyHolder]]:
    def find(queue: str, keys: Sequence[str]) -> Mapping[str, JobKey]:
        queue_id = tx.store.queue_id(queue)
        has_keys = queue_id in tx.store.with_options
        return tx.store.keys.find(tx.db, queue_id, keys) if has_keys else {}

    def find_of_all(keys: Sequence[str]) -> Mapping[str, KeyHolder]:
        return tx.store.keys.find_of_all(tx.db, keys) if tx.store.with_options else {}

    def store(queue: str, jobs: Sequence[Job]) -> Sequence[int]:
        queue_id = tx.store.queue_id(queue)
        tx.note_options(queue_id)
        [local_ids] = _enqueue(tx, [EnqueueOp(queue, jobs)])
        for keys in put_options(tx.db, queue_id, jobs, local_ids):
            tx.store.keys.add(tx.db, keys)
        return local_ids

    tx.expiring.update(tx.store.queue_id(op.queue) for op in ops if op.expires)
    return enqueue_with_options(ops, FindKeys(find, find_of_all), store)


# --- expiry ---------------------------------------------------------------------------------


def fail_expired(tx: Transaction, queue_id: int, local_ids: Sequence[int]) -> list[JobKey]:
    """Fail those of the jobs that are PENDING, and past their expiry; returns which."""
    wanted = spans(expired(tx.db, local_ids, tx.now_ms))
    held = holding(tx.db, queue_id, PENDING, wanted)
    taken, _ = split(held, wanted)
    failed = {local_id: run for run in taken for local_id in run.local_ids}
    rows = tx.db.execute(_STATUSES, (id_list(failed),)).fetchall()
    tx.db.executemany(
        "UPDATE jobs SET custom_status = ? WHERE local_id = ?",
        [(expired_status(status, LIMITS.custom_status_chars), i) for i, status in rows],
    )
    note_expired(tx.db, failed)
    tx.move(held, taken, [run._replace(state=FAILED, at_ms=tx.now_ms) for run in taken])
    return [JobKey(run.priority, local_id) for local_id, run in failed.items()]


def _expire_claimed(tx: Transaction, batch: Batch) -> list[int]:
    """Fail jobs that are to be claimed and are past their expiry; returns how many of each op."""
    failed = []
    for op in batch.claims if batch.fails_expired else ():
        queue_id = tx.store.queue_id(op.queue)
        local_ids = [local_id for claims in op.claims for local_id in claims.local_ids]
        expires = queue_id in tx.store.expiring_ids
        failed.append(len(fail_expired(tx, queue_id, local_ids)) if expires else 0)
    return failed if any(failed) else []


# --- claims ---------------------------------------------------------------------------------


def _claim(tx: Transaction, batch: Batch) -> list[Sequence[Payload | None]]:
    def read(
        queue: str, priority: int, local_ids: Sequence[int], *, most_bytes: int
    ) -> Sequence[Payload | None]:
        queue_id = tx.store.queue_id(queue)
        return read_payloads(tx.db, queue_id, priority, local_ids, most_bytes=most_bytes)

    payloads = fitting_payloads(batch.claims, batch.claim_room, read)
    by_place: defaultdict[tuple[str, int], list[Claims]] = defaultdict(list)
    absent: defaultdict[tuple[str, int], set[int]] = defaultdict(set)
    for op, fitting in zip(batch.claims, payloads, strict=True):
        for claims in first_claims(op, len(fitting)):
            if claims.local_ids:
                by_place[op.queue, claims.priority].append(claims)
        if not all(fitting):
            keys = [(claims.priority, i) for claims in op.claims for i in claims.local_ids]
            for (priority, local_id), payload in zip(keys, fitting, strict=False):
                if payload is None:
                    absent[op.queue, priority].add(local_id)
    made = {
        (queue, priority): _claim_at(
            tx, tx.store.queue_id(queue), priority, claims, absent[queue, priority]
        )
        for (queue, priority), claims in by_place.items()
    }
    if not any(made.values()):
        return payloads
    held = {place: iter(flags or repeat(True)) for place, flags in made.items()}
    return [
        [
            payload if next(held[op.queue, priority]) else None
            for priority, payload in zip(_priorities(op), fitting, strict=False)
        ]
        for op, fitting in zip(batch.claims, payloads, strict=True)
    ]


def _priorities(op: ClaimOp) -> list[int]:
    return [claims.priority for claims in op.claims for _ in claims.local_ids]


def _claim_at(
    tx: Transaction, queue_id: int, priority: int, claims: Sequence[Claims], absent: set[int]
) -> list[bool]:
    """Return which of the jobs were PENDING, in order, or nothing if all were. If one is named
    twice, the first claim is made. Jobs that are `absent` have no row: they leave their run."""
    local_ids = [local_id for alike in claims for local_id in alike.local_ids]
    wanted = spans(local_ids)
    held = [run for run in holding(tx.db, queue_id, PENDING, wanted) if run.priority == priority]
    taken, left = split(held, wanted)
    place = (queue_id, priority, IN_PROGRESS, tx.now_ms)
    if not absent and sum([run.jobs for run in taken]) == len(local_ids):
        tx.replace(held, [*left, *_claim_runs(place, claims)])
        return []
    free = {local_id for run in taken for local_id in run.local_ids}
    made, flags = [], []
    for alike in claims:
        for number, local_id in enumerate(alike.local_ids, alike.first_claim):
            is_made = local_id in free and local_id not in absent
            flags.append(is_made)
            free.discard(local_id)
            if is_made:
                made.append(Run(local_id, local_id, *place, alike.claimer, number))
    tx.replace(held, [*left, *merged(sorted(made))])
    return flags


def _claim_runs(place: tuple[int, int, int, int], claims: Sequence[Claims]) -> list[Run]:
    """Make runs of claims, whose ids mostly count up, within those of one op and to the next."""
    runs = []
    for alike in claims:
        ids, claimer, first_claim = alike.local_ids, alike.claimer, alike.first_claim
        first_id, last_id = ids[0], ids[-1]
        if last_id - first_id == len(ids) - 1 and list(ids) == list(range(first_id, last_id + 1)):
            runs.append(Run(first_id, last_id, *place, claimer, first_claim))
            continue
        runs += [
            Run(local_id, local_id, *place, claimer, number)
            for number, local_id in enumerate(ids, first_claim)
        ]
    return list(merged(sorted(runs))) if len(runs) > 1 else runs


# --- finishes -------------------------------------------------------------------------------


def _finish(tx: Transaction, op: FinishOp) -> Finished:
    queue_id = tx.store.queue_id(op.queue)
    wanted = spans([finish.key.local_id for finish in op.finishes])
    runs = {state: holding(tx.db, queue_id, state, wanted) for state in JobState}
    inside = [part for held in runs.values() for part in split(held, wanted)[0]]
    jobs = held_claims(tx, inside)
    result = Finished([], [], [])
    moved: dict[JobState, list[tuple[Run, Run]]] = {state: [] for state in JobState}
    rows = []
    for finish in op.finishes:
        job = jobs.get(finish.key)
        before = None if job is None else JobState(job.run.state)
        outcome = finish.judge(before, job.attempts_remaining if job is not None else 0)
        result.outcomes.append(outcome)
        if outcome is not FinishOutcome.DONE or job is None or before is None:
            continue
        run_after_ms = job.run_after_ms
        after = job.run._replace(state=int(finish.state), at_ms=tx.now_ms)
        if finish.state is JobState.PENDING:
            run_after_ms = min(tx.now_ms + finish.retry_delay_ms, LIMITS.run_after_ms)
            after = job.run.pending(run_after_ms)
            result.requeued.append(_requeued(job.run, run_after_ms))
        if before is JobState.PENDING:
            result.left_pending.append(finish.key)
        status = _cut_status(job.custom_status + finish.append_custom_status)
        values = (finish.attempts_remaining, run_after_ms, tx.now_ms, status)
        rows.append((*values, finish.key.local_id))
        moved[before].append((job.run, after))
    tx.db.executemany(
        "UPDATE jobs SET attempts_remaining = ?, run_after = ?, updated_at = ?, custom_status = ?"
        " WHERE local_id = ?",
        rows,
    )
    for state, pairs in moved.items():
        if pairs:
            taken, left = zip(*sorted(pairs), strict=True)
            tx.move(runs[state], taken, left)
    return result


_ATTEMPTS_END = 1 << 31
_OTHERS_OF_PAYLOAD = defaults_behind(Payload, "attempts_remaining")  # which no column holds


def read_payloads(
    db: sqlite3.Connection,
    queue_id: int,
    priority: int,
    local_ids: Sequence[int],
    *,
    most_bytes: int,
) -> list[Payload | None]:
    """Read payloads, as StorageEngine.payloads does."""
    payloads: list[Payload | None] = []
    # One row for each id, in their order, so that the read can end anywhere.
    rows = db.execute(
        "SELECT jobs.body, jobs.attempts_allowed, jobs.attempts_remaining"
        " FROM json_each(?) AS wanted LEFT JOIN jobs ON jobs.local_id = wanted.value"
        " AND jobs.queue = ? AND jobs.priority = ?",
        (id_list(local_ids), queue_id, priority),
    )
    met = False
    # Those that were right before: in most rows the same objects, as small numbers are.
    right_allowed = right_remaining = object()
    for local_id, row in zip(local_ids, rows, strict=False):
        body, allowed, remaining = row
        is_known = allowed is right_allowed and remaining is right_remaining
        if type(body) is not bytes or not (
            is_known or (_are_attempts(allowed) and _are_attempts(remaining))
        ):
            if body is not None:
                log.error("job %d holds values that no job has; it is not served", local_id)
            payloads.append(None)
            continue
        most_bytes -= len(body)
        if most_bytes < 0 and met:
            rows.close()
            break
        payloads.append(new_record(Payload, row + _OTHERS_OF_PAYLOAD))
        right_allowed, right_remaining = allowed, remaining
        met = True
    return payloads


def _are_attempts(number: object) -> bool:
    """Tell whether a column holds attempts that a job can have."""
    return type(number) is int and -1 < number < _ATTEMPTS_END
