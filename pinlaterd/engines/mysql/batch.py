"""What `apply` does to the tables, within its one transaction.

The order is the contract's: acks, checkpoints, releases, enqueues, claims. Of each kind, what all
ops have in common goes in one statement for each table. Jobs are reached by primary key, and each
change names the state that it expects. Successes and claims are not looked at first: if fewer jobs
are found in that state, and under the claims that acks name, all is rolled back and done again,
carefully.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pinlaterd.engines.base import (
    Acks,
    Batch,
    BatchResult,
    Checkpoint,
    CheckpointOp,
    CheckpointResult,
    ClaimOp,
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
from pinlaterd.engines.mysql.literals import LATEST_MS, STATUS_CHARS, quote_bytes, quote_text
from pinlaterd.engines.mysql.ownership import claimed_job
from pinlaterd.engines.mysql.statements import (
    RUN_AFTER_MS,
    STATUS,
    Each,
    claim_of,
    read_payloads,
    select,
    select_locked,
)
from pinlaterd.engines.mysql.store import Store
from pinlaterd.engines.mysql.tables import Table
from pinlaterd.engines.mysql.transaction import Transaction
from pinlaterd.model import Job, JobKey, JobState, Payload, PendingKey, claim_source


def apply_batch(store: Store, tx: Transaction, batch: Batch) -> BatchResult:
    return BatchResult(
        acks=apply_acks(batch.acks, _ack_actions(store, tx)) if batch.acks else (),
        checkpoints=[_checkpoint(store, tx, op) for op in batch.checkpoints],
        releases=[_release(store, tx, op) for op in batch.releases],
        enqueues=_enqueue(store, tx, batch.enqueues) if batch.enqueues else (),
        claims=_claim(store, tx, batch) if batch.claims else (),
    )


# --- claims that hold, and how they end -----------------------------------------------------

HELD = b"local_id, claim_descriptor, COALESCE(attempts_remaining, 1), " + RUN_AFTER_MS


class HeldClaim(NamedTuple):
    """A job IN_PROGRESS."""

    local_id: int
    claim_descriptor: str
    attempts_remaining: int
    run_after_ms: int


class FailedAttempt(NamedTuple):
    """An attempt that ends without success; `retry_at_ms` counts if attempts are left."""

    claim: HeldClaim
    retry_at_ms: int
    append_custom_status: str = ""


def held_claims(tx: Transaction, table: Table, local_ids: Sequence[int]) -> dict[int, HeldClaim]:
    """Those of the jobs that are IN_PROGRESS. Nobody can change them before our commit."""
    return held_in(tx.read(select_locked(table, HELD, local_ids, JobState.IN_PROGRESS)))


def held_in(rows: Iterable[tuple[int, str | None, int, int]]) -> dict[int, HeldClaim]:
    return {
        local_id: HeldClaim(local_id, claim_descriptor or "", *rest)
        for local_id, claim_descriptor, *rest in rows
    }


def to_pending(tx: Transaction, table: Table) -> bytes:
    """The assignments by which a job becomes PENDING as from now."""
    since = b"pending_since = NULL, " if table.has_pending_since else b""
    return b"state = 0, claim_descriptor = NULL, %supdated_at = %s" % (
        since,
        table.updated_at.literal(tx.now_ms),
    )


def fail_attempts(
    tx: Transaction, queue: str, table: Table, attempts: Sequence[FailedAttempt]
) -> list[Requeued]:
    """PENDING with one attempt less, or FAILED with none; returns those that are PENDING."""
    retried = [attempt for attempt in attempts if attempt.claim.attempts_remaining > 1]
    failed = [attempt for attempt in attempts if attempt.claim.attempts_remaining <= 1]
    run_after = table.run_after
    if retried:
        each = [Each(b"run_after = ", [run_after.literal(a.retry_at_ms) for a in retried])]
        each += _appended(table, [a.append_custom_status for a in retried])
        common = to_pending(tx, table) + b", attempts_remaining = attempts_remaining - 1"
        ids = [a.claim.local_id for a in retried]
        tx.update(table, ids, JobState.IN_PROGRESS, common, each)
        tx.moved(queue, table, ids, JobState.IN_PROGRESS, JobState.PENDING)
    if failed:
        common = b"state = 3, attempts_remaining = 0, updated_at = " + table.updated_at.literal(
            tx.now_ms
        )
        each = _appended(table, [a.append_custom_status for a in failed])
        ids = [a.claim.local_id for a in failed]
        tx.update(table, ids, JobState.IN_PROGRESS, common + table.pins, each)
        tx.moved(queue, table, ids, JobState.IN_PROGRESS, JobState.FAILED)
    return [
        Requeued(table.priority, PendingKey(run_after.floor(a.retry_at_ms), a.claim.local_id))
        for a in retried
    ]


def _appended(table: Table, texts: Sequence[str]) -> list[Each]:
    """Texts to be put behind the jobs' custom statuses."""
    if not any(texts):
        return []
    return [_status(table, b"CONCAT(" + STATUS + b", ", texts, b")")]


def _prepended(table: Table, texts: Sequence[str]) -> list[Each]:
    """Texts to be put in front of the jobs' custom statuses."""
    if not any(texts):
        return []
    return [_status(table, b"CONCAT(", texts, b", " + STATUS + b")")]


def _status(table: Table, before: bytes, texts: Sequence[str], behind: bytes) -> Each:
    values = [table.status(text) for text in texts]
    return Each(b"custom_status = LEFT(" + before, values, behind + b", %d)" % table.status_chars)


# --- acknowledgements -----------------------------------------------------------------------


def _ack_actions(store: Store, tx: Transaction) -> AckActions:
    def succeed(queue: str, priority: int, acks: Sequence[Acks]) -> set[int]:
        table = store.tables.of(queue).get(priority)
        return set(local_ids_of(acks)) if table is None else _succeed(tx, queue, table, acks)

    def fail(queue: str, priority: int, acks: Sequence[Acks]) -> Failed:
        table, missed = store.tables.of(queue).get(priority), set(local_ids_of(acks))
        if table is None:
            return Failed(missed, ())
        attempts = _failed_attempts(tx, table, acks)
        missed.difference_update([attempt.claim.local_id for attempt in attempts])
        return Failed(missed, fail_attempts(tx, queue, table, attempts))

    return AckActions(succeed, fail)


def _succeed(tx: Transaction, queue: str, table: Table, acks: Sequence[Acks]) -> set[int]:
    """IN_PROGRESS becomes SUCCEEDED; returns the local ids of acks that do not apply."""
    missed: set[int] = set()
    if tx.careful or table.plain_claims:
        held = held_claims(tx, table, local_ids_of(acks))
        for alike in acks:
            missed.update(set(alike.local_ids).difference(_held_by(alike, table, held)))
        acks = [alike._replace(claim_descriptor=None) for alike in acks]
    common = b"state = 2, updated_at = " + table.updated_at.literal(tx.now_ms) + table.pins
    for names_claims in (False, True):
        jobs = [  # id, text, claim
            (local_id, alike[2], alike[4])
            for alike in acks
            if (alike[4] is not None) is names_claims
            for local_id in alike[1]
            if local_id not in missed
        ]
        if not jobs:
            continue
        local_ids = [local_id for local_id, _, _ in jobs]
        tx.update(
            table,
            local_ids,
            JobState.IN_PROGRESS,
            common,
            _appended(table, [text for _, text, _ in jobs]),
            claims=[claim_of(local_id, claim) for local_id, _, claim in jobs if claim is not None],
            expected=len(jobs),
        )
        tx.moved(queue, table, local_ids, JobState.IN_PROGRESS, JobState.SUCCEEDED)
    return missed


def _held_by(alike: Acks, table: Table, held: dict[int, HeldClaim]) -> list[int]:
    """The jobs that are held under the claim that `alike` give, if any."""
    given = alike.claim_descriptor
    claim = None if given is None else table.claim(given)
    return [
        local_id
        for local_id in alike.local_ids
        if local_id in held and claim in (None, table.claim(held[local_id].claim_descriptor))
    ]


def _failed_attempts(tx: Transaction, table: Table, acks: Sequence[Acks]) -> list[FailedAttempt]:
    """The failed attempts that `acks` report, where they apply."""
    held = held_claims(tx, table, local_ids_of(acks))
    return [
        FailedAttempt(
            held[local_id],
            min(tx.now_ms + alike.retry_delay_ms, LATEST_MS),
            alike.append_custom_status,
        )
        for alike in acks
        for local_id in _held_by(alike, table, held)
    ]


# --- checkpoints and releases ---------------------------------------------------------------


@dataclass
class _Change:
    """What all checkpoints of one job in an op come to."""

    run_after_ms: int
    attempts: int | None = None
    prepend_custom_status: str = ""
    body: bytes | None = None
    to_pending: bool = False

    def follow(self, checkpoint: Checkpoint, run_after_ms: int) -> None:
        self.run_after_ms = run_after_ms
        if checkpoint.attempts is not None:
            self.attempts = checkpoint.attempts
        if checkpoint.new_body is not None:
            self.body = checkpoint.new_body
        text = checkpoint.prepend_custom_status or ""
        self.prepend_custom_status = (text + self.prepend_custom_status)[:STATUS_CHARS]
        self.to_pending = checkpoint.move_to_pending

    @property
    def shape(self) -> tuple[bool, bool, bool, bool]:
        """Changes of one shape assign the same columns."""
        return (
            self.to_pending,
            self.attempts is not None,
            bool(self.prepend_custom_status),
            self.body is not None,
        )


def _checkpoint(store: Store, tx: Transaction, op: CheckpointOp) -> CheckpointResult:
    tables = store.tables.of(op.queue)
    held = _held(store, tx, op.queue, [checkpoint.key for checkpoint in op.checkpoints])
    changes: dict[JobKey, _Change] = {}
    requeued: list[Requeued] = []
    done = 0
    for checkpoint in op.checkpoints:
        key = checkpoint.key
        claim = held.get(key)
        if claim is None or not _is_claimers(checkpoint, tables[key.priority], claim, op.source):
            continue
        done += 1
        table = tables[key.priority]
        at_ms = tx.now_ms if checkpoint.run_after_ms is None else checkpoint.run_after_ms
        at_ms = table.run_after.floor(at_ms)
        changes.setdefault(key, _Change(at_ms)).follow(checkpoint, at_ms)
        if checkpoint.move_to_pending:
            del held[key]
            requeued.append(Requeued(key.priority, PendingKey(at_ms, key.local_id)))
    _change(store, tx, op.queue, changes)
    return CheckpointResult(done, len(op.checkpoints) - done, requeued)


def _held(
    store: Store, tx: Transaction, queue: str, keys: Sequence[JobKey]
) -> dict[JobKey, HeldClaim]:
    tables = store.tables.of(queue)
    by_priority: defaultdict[int, set[int]] = defaultdict(set)
    for priority, local_id in keys:
        if priority in tables:
            by_priority[priority].add(local_id)
    return {
        JobKey(priority, local_id): claim
        for priority, local_ids in by_priority.items()
        for local_id, claim in held_claims(tx, tables[priority], sorted(local_ids)).items()
    }


def _is_claimers(checkpoint: Checkpoint, table: Table, claim: HeldClaim, source: str) -> bool:
    held = table.claim(claim.claim_descriptor)
    if checkpoint.claim_descriptor is not None:
        return held == table.claim(checkpoint.claim_descriptor)
    return claim_source(held) == table.claim(source)


def _change(store: Store, tx: Transaction, queue: str, changes: dict[JobKey, _Change]) -> None:
    alike: defaultdict[tuple[int, tuple[bool, ...]], dict[int, _Change]] = defaultdict(dict)
    for (priority, local_id), change in changes.items():
        alike[priority, change.shape][local_id] = change
    for (priority, shape), part in alike.items():
        is_pending, has_attempts, _, has_body = shape
        table = store.tables.of(queue)[priority]
        values = list(part.values())
        each = [Each(b"run_after = ", [table.run_after.literal(c.run_after_ms) for c in values])]
        if has_attempts:
            attempts = [b"%d" % (c.attempts or 0) for c in values]
            each.append(Each(b"attempts_allowed = ", attempts))
            each.append(Each(b"attempts_remaining = ", attempts))
        each += _prepended(table, [c.prepend_custom_status for c in values])
        if has_body:
            each.append(Each(b"body = ", [quote_bytes(c.body or b"") for c in values]))
        common = to_pending(tx, table) if is_pending else _renewed(tx, table)
        tx.update(table, list(part), JobState.IN_PROGRESS, common, each)
        if is_pending:
            tx.moved(queue, table, list(part), JobState.IN_PROGRESS, JobState.PENDING)


def _renewed(tx: Transaction, table: Table) -> bytes:
    """The assignments of a claim that holds from now on. Released unused, the job has been
    PENDING since now."""
    now = table.updated_at.literal(tx.now_ms)
    since = b", pending_since = " + now if table.has_pending_since else b""
    return b"updated_at = " + now + since


def _release(store: Store, tx: Transaction, op: ReleaseOp) -> list[Requeued]:
    tables = store.tables.of(op.queue)
    held = _held(store, tx, op.queue, [release.key for release in op.releases])
    requeued = []
    by_priority: defaultdict[int, list[int]] = defaultdict(list)
    for key, claim_descriptor in op.releases:
        claim = held.get(key)
        if claim is None:
            continue
        table = tables[key.priority]
        if table.claim(claim.claim_descriptor) == table.claim(claim_descriptor):
            del held[key]
            requeued.append(Requeued(key.priority, PendingKey(claim.run_after_ms, key.local_id)))
            by_priority[key.priority].append(key.local_id)
    for priority, local_ids in by_priority.items():
        table = tables[priority]
        # PinLater's tables do not tell since when it was PENDING: there it is since the claim.
        since = b"COALESCE(pending_since, updated_at)" if table.has_pending_since else b"updated_at"
        common = b"state = 0, claim_descriptor = NULL, updated_at = " + since + table.pins
        tx.update(table, local_ids, JobState.IN_PROGRESS, common)
        tx.moved(op.queue, table, local_ids, JobState.IN_PROGRESS, JobState.PENDING)
    return requeued


# --- enqueues -------------------------------------------------------------------------------

_COLUMNS = (
    b"local_id, state, attempts_allowed, attempts_remaining, custom_status, updated_at, created_at,"
    b" run_after, body"
)


def _enqueue(store: Store, tx: Transaction, ops: Sequence[EnqueueOp]) -> list[range]:
    taken = []
    rows: defaultdict[tuple[str, int], list[bytes]] = defaultdict(list)
    ids: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
    like: tuple[object, ...] | None = None
    for queue, jobs in ops:
        local_ids = store.take_local_ids(len(jobs))
        taken.append(local_ids)
        for local_id, job in zip(local_ids, jobs, strict=True):
            body, priority, *rest = job
            if like != (queue, priority, *rest):  # most jobs differ in their bodies alone
                like = (queue, priority, *rest)
                table = store.tables.of(queue)[priority]
                add, add_id = rows[queue, priority].append, ids[queue, priority].append
                between = _between(tx, table, job)
            add(b"(%d%b%b)" % (local_id, between, quote_bytes(body)))
            add_id(local_id)
    for (queue, priority), part in rows.items():
        table = store.tables.of(queue)[priority]
        head = b"INSERT INTO " + table.name + b" (" + _COLUMNS + b") VALUES "
        tx.run(_inserts(head, part, store.db.statement_bytes))
        tx.moved(queue, table, ids[queue, priority], None, JobState.PENDING)
    return taken


def _between(tx: Transaction, table: Table, job: Job) -> bytes:
    """What stands between a row's id and its body."""
    run_after_ms = tx.now_ms if job.run_after_ms is None else job.run_after_ms
    return b", 0, %d, %d, %b, %b, %b, %b, " % (
        job.attempts_allowed,
        job.attempts_allowed,
        table.status(job.custom_status),
        table.updated_at.literal(tx.now_ms),
        table.created_at.literal(tx.now_ms),
        table.run_after.literal(run_after_ms),
    )


def _inserts(head: bytes, rows: Sequence[bytes], most_bytes: int) -> Iterator[bytes]:
    first, size = 0, len(head)
    for at, row in enumerate(rows):
        size += len(row) + 2
        if size > most_bytes and at > first:
            yield head + b", ".join(rows[first:at])
            first, size = at, len(head) + len(row)
    yield head + b", ".join(rows[first:])


# --- claims ---------------------------------------------------------------------------------


def _claim(store: Store, tx: Transaction, batch: Batch) -> Sequence[Sequence[Payload | None]]:
    def read(
        queue: str, priority: int, local_ids: Sequence[int], *, most_bytes: int
    ) -> Sequence[Payload | None]:
        table = store.tables.of(queue).get(priority)
        if table is None:
            return [None] * len(local_ids)
        return read_payloads(
            lambda statement: tx.read([statement]), table, local_ids, most_bytes=most_bytes
        )

    payloads = fitting_payloads(batch.claims, batch.claim_room, read)
    # By queue and priority, job and claim descriptor. A job that is named twice is the first one's.
    wanted: defaultdict[tuple[str, int], dict[int, str]] = defaultdict(dict)
    for op, fitting in zip(batch.claims, payloads, strict=True):
        for priority, keys, claim_descriptors, _ in first_claims(op, len(fitting)):
            by_id = wanted[op.queue, priority]
            for (_, local_id), claim_descriptor in zip(keys, claim_descriptors, strict=True):
                by_id.setdefault(local_id, claim_descriptor)
    made: dict[tuple[str, int], dict[int, str]] = {}
    for (queue, priority), by_id in wanted.items():
        table = store.tables.of(queue).get(priority)
        if table is None:
            continue
        kept = _claim_in(tx, table, by_id)
        made[queue, priority] = kept
        tx.moved(queue, table, list(kept), JobState.PENDING, JobState.IN_PROGRESS)
        if kept:
            # Not by its state: in this very transaction it may have come from there.
            tx.probe = claimed_job(table, *next(iter(kept.items())))
    if sum(map(len, made.values())) == sum(map(len, payloads)):
        return payloads
    return [_handed_out(op, of_op, made) for op, of_op in zip(batch.claims, payloads, strict=True)]


def _handed_out(
    op: ClaimOp,
    payloads: Sequence[Payload | None],
    made: dict[tuple[str, int], dict[int, str]],
) -> list[Payload | None]:
    """`payloads` of the first jobs of `op`; None where its claim was not made. What is handed out
    leaves `made`: the same claim may come a second time."""
    handed_out: list[Payload | None] = []
    for priority, keys, claim_descriptors, _ in first_claims(op, len(payloads)):
        claims = made.get((op.queue, priority), {})
        for (_, local_id), claim_descriptor in zip(keys, claim_descriptors, strict=True):
            mine = claims.get(local_id) == claim_descriptor
            handed_out.append(payloads[len(handed_out)] if mine else None)
            if mine:
                del claims[local_id]
    return handed_out


def _claim_in(tx: Transaction, table: Table, wanted: dict[int, str]) -> dict[int, str]:
    """Claim the jobs that are PENDING; returns those."""
    descriptors = [table.claim(claim_descriptor) for claim_descriptor in wanted.values()]
    since = b"pending_since = updated_at, " if table.has_pending_since else b""  # its old value
    common = b"state = 1, %supdated_at = %s%s" % (
        since,
        table.updated_at.literal(tx.now_ms),
        table.pins,
    )
    each = [Each(b"claim_descriptor = ", [quote_text(text) for text in descriptors])]
    local_ids = list(wanted)
    expected = None if tx.careful else len(wanted)
    tx.update(table, local_ids, JobState.PENDING, common, each, expected=expected)
    if not tx.careful or tx.found() == len(wanted):
        return wanted
    # No two claims are alike, so it is ours where it is found.
    rows = tx.read(select(table, b"local_id, claim_descriptor", local_ids, JobState.IN_PROGRESS))
    claimed = dict(rows)
    return {
        local_id: claim
        for (local_id, claim), text in zip(wanted.items(), descriptors, strict=True)
        if claimed.get(local_id) == text
    }
