"""The changes of tables that `apply` makes, within its one transaction.

The order is the contract's: acks, checkpoints, releases, enqueues, claims. Of each kind, what all
ops have in common goes in one statement for each table. Jobs are reached by primary key, and each
change names the state that it expects. Successes and claims are not looked at first: if fewer jobs
are found in that state, and under the claims that acks name, all is rolled back and done again,
carefully.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice, repeat
from typing import Any, NamedTuple

from pinlaterd.engines.base import (
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
    Finish,
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
    first_claims,
    fitting_payloads,
    local_ids_of,
)
from pinlaterd.engines.mysql.connection import LATEST_MS, escaped, pieces, quote_bytes, quote_text
from pinlaterd.engines.mysql.statements import (
    LISTED_IDS,
    RUN_AFTER_MS,
    STATUS,
    ClaimName,
    Each,
    Transaction,
    by_table,
    change_options,
    claim_of,
    claims_of,
    expired,
    find_keys,
    find_keys_of_all,
    put_options,
    read_payloads,
)
from pinlaterd.engines.mysql.store import Store
from pinlaterd.engines.mysql.tables import JOB_STATES, STATUS_CHARS, Table
from pinlaterd.model import (
    EXPIRED,
    FinishOutcome,
    Job,
    JobKey,
    JobState,
    Payload,
    PendingKey,
    claim_source,
    runs_of,
)


def apply_batch(store: Store, tx: Transaction, batch: Batch) -> BatchResult:
    gone: _Places = {}  # jobs to be claimed that are past their expiry
    may_expire = bool(store.expiring_queues) and batch.fails_expired
    return BatchResult(
        acks=apply_acks(batch.acks, _ack_actions(store, tx)) if batch.acks else (),
        checkpoints=[_checkpoint(store, tx, op) for op in batch.checkpoints],
        releases=[_release(store, tx, op) for op in batch.releases],
        enqueues=_enqueue(store, tx, batch.enqueues) if batch.enqueues else (),
        with_options=_enqueue_with_options(store, tx, batch.with_options)
        if batch.with_options
        else (),
        expired=_expire_claimed(store, tx, batch.claims, gone) if may_expire else (),
        claims=_claim(store, tx, batch, gone) if batch.claims else (),
        finishes=[_finish(store, tx, op) for op in batch.finishes],
    )


# --- claims that hold, and how they end -----------------------------------------------------

# Texts that differ from job to job can't be put together with those of another character set.
_OLD_STATUS = b"CONVERT(" + STATUS + b" USING utf8mb4)"
HELD = b"local_id, RTRIM(claim_descriptor), COALESCE(attempts_remaining, 1), " + RUN_AFTER_MS


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


def held_in(rows: Iterable[tuple[int, str | None, int, int]]) -> dict[int, HeldClaim]:
    return {
        local_id: HeldClaim(local_id, claim_descriptor or "", *rest)
        for local_id, claim_descriptor, *rest in rows
    }


def _lock_held(tx: Transaction, table: Table, local_ids: Sequence[int]) -> dict[int, HeldClaim]:
    """Lock the jobs and return those that are IN_PROGRESS."""
    return held_in(tx.lock(table, HELD, local_ids, JobState.IN_PROGRESS))


def fail_attempts(
    tx: Transaction, table: Table, attempts: Sequence[FailedAttempt]
) -> list[Requeued]:
    """Make jobs PENDING with one attempt less, or FAILED with none; return the PENDING ones."""
    retried = [attempt for attempt in attempts if attempt.claim.attempts_remaining > 1]
    failed = [attempt for attempt in attempts if attempt.claim.attempts_remaining <= 1]
    run_after = table.run_after
    if retried:
        common = table.to_pending(tx.now_ms) + b", attempts_remaining = attempts_remaining - 1"
        run_afters = Each(b"run_after = %b", [run_after.literal(a.retry_at_ms) for a in retried])
        _end_attempts(tx, table, retried, JobState.PENDING, common, run_afters)
    if failed:
        now = table.updated_at.literal(tx.now_ms)
        common = b"state = 3, attempts_remaining = 0, updated_at = " + now + table.pins
        _end_attempts(tx, table, failed, JobState.FAILED, common)
    return [
        Requeued(table.priority, PendingKey(run_after.floor(a.retry_at_ms), a.claim.local_id))
        for a in retried
    ]


def _end_attempts(
    tx: Transaction,
    table: Table,
    attempts: Sequence[FailedAttempt],
    after: JobState,
    common: bytes,
    *each: Each,
) -> None:
    local_ids = [attempt.claim.local_id for attempt in attempts]
    texts = _appended(table, [attempt.append_custom_status for attempt in attempts])
    tx.update(table, local_ids, JobState.IN_PROGRESS, after, common, [*each, *texts])


def _appended(table: Table, texts: Sequence[str]) -> list[Each]:
    """Return texts to be put behind the jobs' custom statuses."""
    if not any(texts):
        return []
    return [_statuses(table, b"CONCAT(" + _OLD_STATUS + b", %b)", texts)]


def _statuses(table: Table, whole: bytes, texts: Iterable[str]) -> Each:
    assignment = b"custom_status = LEFT(" + whole + b", " + b"%d)" % table.status_chars
    return Each(assignment, [table.status(text) for text in texts])


# --- acknowledgements -----------------------------------------------------------------------


def _ack_actions(store: Store, tx: Transaction) -> AckActions:
    def succeed(queue: str, priority: int, acks: Sequence[Acks]) -> set[int]:
        table = store.tables.of(queue).get(priority)
        return set(local_ids_of(acks)) if table is None else _succeed(tx, table, acks)

    def fail(queue: str, priority: int, acks: Sequence[Acks]) -> Failed:
        table, missed = store.tables.of(queue).get(priority), set(local_ids_of(acks))
        if table is None:
            return Failed(missed, ())
        held = _lock_held(tx, table, local_ids_of(acks))
        attempts = [
            FailedAttempt(
                held[local_id]
                if alike.retryable
                else held[local_id]._replace(attempts_remaining=1),
                min(tx.now_ms + alike.retry_delay_ms, LATEST_MS),
                alike.append_custom_status,
            )
            for alike in acks
            for local_id in _held_by(alike, table, held)
        ]
        missed.difference_update([attempt.claim.local_id for attempt in attempts])
        return Failed(missed, fail_attempts(tx, table, attempts))

    return AckActions(succeed, fail)


def _succeed(tx: Transaction, table: Table, acks: Sequence[Acks]) -> set[int]:
    """Make IN_PROGRESS jobs SUCCEEDED; return the local ids of acks that do not apply."""
    missed: set[int] = set()
    looks_first = tx.careful or table.plain_claims
    if looks_first:
        held = _lock_held(tx, table, local_ids_of(acks))
        for alike in acks:
            missed.update(set(alike.local_ids).difference(_held_by(alike, table, held)))
    common = b"state = 2, updated_at = " + table.updated_at.literal(tx.now_ms) + table.pins
    for compares in (False, True):
        local_ids: list[int] = []
        texts: list[str] = []
        claims: list[bytes] = []
        for alike in acks:
            ids, claim = alike.local_ids, alike.claim_descriptor
            if compares is (claim is None or looks_first):
                continue
            found = [local_id for local_id in ids if local_id not in missed] if missed else ids
            local_ids += found
            texts += [alike.append_custom_status] * len(found)
            if compares and claim is not None:
                claims += [claim_of(local_id, claim) for local_id in found]
        if local_ids:
            each = _appended(table, texts)
            done = JobState.SUCCEEDED
            tx.update(table, local_ids, JobState.IN_PROGRESS, done, common, each, claims)
    return missed


def _held_by(alike: Acks, table: Table, held: dict[int, HeldClaim]) -> list[int]:
    """Return the jobs that are held under the claim that `alike` give, if any."""
    given = alike.claim_descriptor
    claim = None if given is None else table.claim(given)
    return [
        local_id
        for local_id in alike.local_ids
        if local_id in held and claim in (None, table.claim(held[local_id].claim_descriptor))
    ]


# --- checkpoints and releases ---------------------------------------------------------------


@dataclass
class _Change:
    """The sum of all checkpoints of one job in an op."""

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


def _checkpoint(store: Store, tx: Transaction, op: CheckpointOp) -> CheckpointResult:
    tables = store.tables.of(op.queue)
    held = _held(store, tx, op.queue, [checkpoint.key for checkpoint in op.checkpoints])
    changes: defaultdict[int, dict[int, _Change]] = defaultdict(dict)
    requeued: list[Requeued] = []
    missed: set[JobKey] = set()
    done = 0
    for checkpoint in op.checkpoints:
        key = checkpoint.key
        claim = held.get(key)
        if claim is None or not _is_claimers(checkpoint, tables[key.priority], claim, op.source):
            missed.add(key)
            continue
        done += 1
        at_ms = tx.now_ms if checkpoint.run_after_ms is None else checkpoint.run_after_ms
        at_ms = tables[key.priority].run_after.floor(at_ms)
        changes[key.priority].setdefault(key.local_id, _Change(at_ms)).follow(checkpoint, at_ms)
        if checkpoint.move_to_pending:
            del held[key]
            requeued.append(Requeued(key.priority, PendingKey(at_ms, key.local_id)))
    for priority, of_priority in changes.items():
        for to_pending in (False, True):
            alike = {i: one for i, one in of_priority.items() if one.to_pending is to_pending}
            if alike:
                _change(tx, tables[priority], alike, to_pending=to_pending)
    return CheckpointResult(done, len(op.checkpoints) - done, requeued, missed)


def _held(
    store: Store, tx: Transaction, queue: str, keys: Sequence[JobKey]
) -> dict[JobKey, HeldClaim]:
    return {
        JobKey(table.priority, local_id): claim
        for table, local_ids in by_table(store.tables.of(queue), keys)
        for local_id, claim in _lock_held(tx, table, sorted(local_ids)).items()
    }


def _is_claimers(checkpoint: Checkpoint, table: Table, claim: HeldClaim, source: str) -> bool:
    held = table.claim(claim.claim_descriptor)
    if checkpoint.claim_descriptor is not None:
        return held == table.claim(checkpoint.claim_descriptor)
    return claim_source(held) == table.claim(source)


def _change(
    tx: Transaction, table: Table, changes: dict[int, _Change], *, to_pending: bool
) -> None:
    """Set new values; jobs without a new value keep their old one."""
    values = list(changes.values())
    each = [Each(b"run_after = %b", [table.run_after.literal(c.run_after_ms) for c in values])]
    if any(change.attempts is not None for change in values):
        for column in (b"attempts_allowed", b"attempts_remaining"):
            new = [column if c.attempts is None else b"%d" % c.attempts for c in values]
            each.append(Each(column + b" = %b", new))
    texts = [change.prepend_custom_status for change in values]
    if any(texts):
        each.append(_statuses(table, b"CONCAT(%b, " + _OLD_STATUS + b")", texts))
    if any(change.body is not None for change in values):
        bodies = [b"body" if c.body is None else quote_bytes(c.body) for c in values]
        each.append(Each(b"body = %b", bodies))
    if to_pending:
        common = table.to_pending(tx.now_ms)
    else:
        # The claim holds from now on. Released unused, the job has been PENDING since now.
        now = table.updated_at.literal(tx.now_ms)
        since = b", pending_since = " + now if table.has_pending_since else b""
        common = b"updated_at = " + now + since
    after = JobState.PENDING if to_pending else JobState.IN_PROGRESS
    tx.update(table, list(changes), JobState.IN_PROGRESS, after, common, each)


def _release(store: Store, tx: Transaction, op: ReleaseOp) -> list[Requeued]:
    tables = store.tables.of(op.queue)
    held = _held(store, tx, op.queue, [release.key for release in op.releases])
    requeued = []
    released: list[JobKey] = []
    for release in op.releases:
        key = release.key
        claim, table = held.get(key), tables.get(key.priority)
        if claim is None or table is None:
            continue
        if table.claim(claim.claim_descriptor) == table.claim(release.claim_descriptor):
            del held[key]
            requeued.append(Requeued(key.priority, PendingKey(claim.run_after_ms, key.local_id)))
            released.append(key)
    for table, local_ids in by_table(tables, released):
        # PinLater's tables do not tell since when it was PENDING: there it is since the claim.
        since = b"COALESCE(pending_since, updated_at)" if table.has_pending_since else b"updated_at"
        common = b"state = 0, claim_descriptor = DEFAULT, updated_at = " + since + table.pins
        tx.update(table, local_ids, JobState.IN_PROGRESS, JobState.PENDING, common)
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
    for op in ops:
        tables, local_ids = store.tables.of(op.queue), store.take_local_ids(len(op.jobs))
        taken.append(local_ids)
        following = iter(local_ids)
        for job, bodies in runs_of(op.jobs):
            place, between = (op.queue, job.priority), _between(tx, tables[job.priority], job)
            of_run = list(islice(following, len(bodies)))
            ids[place] += of_run
            rows[place] += [
                b"(%d%b, _binary'%b')" % (local_id, between, escaped(body))
                for local_id, body in zip(of_run, bodies, strict=True)
            ]
    for (queue, priority), part in rows.items():
        tx.insert(store.tables.of(queue)[priority], _COLUMNS, part, ids[queue, priority])
    return taken


def _between(tx: Transaction, table: Table, job: Job) -> bytes:
    """Return what stands between a row's id and its body."""
    run_after_ms = tx.now_ms if job.run_after_ms is None else job.run_after_ms
    return b", 0, %d, %d, %b, %b, %b, %b" % (
        job.attempts_allowed,
        job.attempts_allowed,
        table.status(job.custom_status),
        table.updated_at.inserted(tx.now_ms),
        table.created_at.inserted(tx.now_ms),
        table.run_after.inserted(run_after_ms),
    )


def _enqueue_with_options(
    store: Store, tx: Transaction, ops: Sequence[EnqueueWithOptionsOp]
) -> list[list[KeyHolder]]:
    def read(statement: bytes) -> list[tuple[Any, ...]]:
        return tx.read([statement])

    def find(queue: str, keys: Sequence[str]) -> Mapping[str, JobKey]:
        return find_keys(read, store.tables.of(queue), keys)

    def find_of_all(keys: Sequence[str]) -> Mapping[str, KeyHolder]:
        return find_keys_of_all(read, store.tables, keys)

    def put(queue: str, jobs: Sequence[Job]) -> Sequence[int]:
        [local_ids] = _enqueue(store, tx, [EnqueueOp(queue, jobs)])
        options = {
            JobKey(job.priority, local_id): job.options
            for job, local_id in zip(jobs, local_ids, strict=True)
            if job.options
        }
        table = next(iter(store.tables.of(queue).values()))
        for statement in put_options(table, options, are_free=tx.finds_keys):
            tx.run(statement)
        return local_ids

    # Keys are mostly free, as their index finds: only if not they are looked for first.
    return enqueue_with_options(ops, FindKeys(find, find_of_all) if tx.finds_keys else None, put)


# --- expiry ---------------------------------------------------------------------------------

_Places = dict[tuple[str, int], set[int]]
"""By queue and priority: jobs."""


def fail_expired(tx: Transaction, table: Table, local_ids: Sequence[int]) -> list[int]:
    """Fail those of the jobs that are PENDING, and past their expiry; returns which."""
    past = [local_id for (local_id,) in tx.read(expired(table, local_ids, tx.now_ms))]
    failed = [local_id for (local_id,) in tx.lock(table, b"local_id", past, JobState.PENDING)]
    if failed:
        text = quote_text(f" {EXPIRED}")
        room = table.status_chars - len(EXPIRED) - 1
        status = b"LTRIM(CONCAT(LEFT(%b, %d), %b))" % (_OLD_STATUS, room, text)
        now = table.updated_at.literal(tx.now_ms)
        common = b"state = 3, updated_at = %b%b, custom_status = %b" % (now, table.pins, status)
        tx.update(table, failed, JobState.PENDING, JobState.FAILED, common)
        ended = b"check_at = NULL, end_reason = " + quote_text(EXPIRED)
        for statement in change_options(table, failed, ended):
            tx.run(statement)
    return failed


def _expire_claimed(
    store: Store, tx: Transaction, ops: Sequence[ClaimOp], gone: _Places
) -> list[int]:
    """Fail jobs that are to be claimed and are past their expiry; returns how many of each op, and
    adds them to `gone`."""
    counts = []
    for op in ops:
        tables, failed = store.tables.of(op.queue), 0
        for claims in op.claims if op.queue in store.expiring_queues else ():
            table = tables.get(claims.priority)
            if table is not None and table.options:
                found = fail_expired(tx, table, claims.local_ids)
                gone.setdefault((op.queue, claims.priority), set()).update(found)
                failed += len(found)
        counts.append(failed)
    return counts if any(counts) else []


# --- claims ---------------------------------------------------------------------------------

_ClaimsMade = dict[tuple[str, int], dict[int, ClaimName]]
"""By queue and priority: jobs, and their claims."""


def _named(claims: Claims) -> Iterator[tuple[int, ClaimName]]:
    names = zip(repeat(claims.claimer), count(claims.first_claim))
    return zip(claims.local_ids, names)  # noqa: B905


def _claim(
    store: Store, tx: Transaction, batch: Batch, gone: _Places
) -> Sequence[Sequence[Payload | None]]:
    """Claim jobs, but those that are `gone`."""

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
    wanted: _ClaimsMade = defaultdict(dict)  # a job that is named twice is the first one's
    for op, fitting in zip(batch.claims, payloads, strict=True):
        for claims in first_claims(op, len(fitting)):
            by_id = wanted[op.queue, claims.priority]
            for local_id, name in _named(claims):
                by_id.setdefault(local_id, name)
    for place, local_ids in gone.items():
        for local_id in local_ids:
            wanted[place].pop(local_id, None)
    made: _ClaimsMade = {}
    for (queue, priority), by_id in wanted.items():
        table = store.tables.of(queue).get(priority)
        if table is not None:
            made[queue, priority] = _claim_in(tx, table, by_id)
    if sum(map(len, made.values())) == sum(map(len, payloads)):
        return payloads
    return [_handed_out(op, of_op, made) for op, of_op in zip(batch.claims, payloads, strict=True)]


def _handed_out(
    op: ClaimOp, payloads: Sequence[Payload | None], made: _ClaimsMade
) -> list[Payload | None]:
    """Return `payloads` of the first jobs of `op`; None where its claim was not made. What is
    handed out leaves `made`: the same claim may come a second time."""
    handed_out: list[Payload | None] = []
    for claims in first_claims(op, len(payloads)):
        held = made.get((op.queue, claims.priority), {})
        for local_id, name in _named(claims):
            mine = held.get(local_id) == name
            handed_out.append(payloads[len(handed_out)] if mine else None)
            if mine:
                del held[local_id]
    return handed_out


def _claim_in(tx: Transaction, table: Table, wanted: dict[int, ClaimName]) -> dict[int, ClaimName]:
    """Claim the jobs that are PENDING; returns those."""
    if tx.careful:
        ready = dict.fromkeys(tx.lock(table, b"local_id", list(wanted), JobState.PENDING))
        wanted = {i: name for i, name in wanted.items() if (i,) in ready}
    since = b"pending_since = updated_at, " if table.has_pending_since else b""  # its old value
    now = table.updated_at.literal(tx.now_ms)
    common = b"state = 1, %bupdated_at = %b%b, claim_descriptor = " % (since, now, table.pins)
    for part in pieces(sorted(wanted), LISTED_IDS):
        names = wanted
        if table.plain_claims:
            named = [(i, *wanted[i]) for i in part]
            names = {i: (table.claim(claimer), number) for i, claimer, number in named}
        claims = claims_of(part, names, table.claim_room)
        tx.update(table, part, JobState.PENDING, JobState.IN_PROGRESS, common + claims)
    return wanted


# --- finishes -------------------------------------------------------------------------------


def _finish(store: Store, tx: Transaction, op: FinishOp) -> Finished:
    tables = store.tables.of(op.queue)
    columns = b"local_id, state, COALESCE(attempts_remaining, 1)"
    found = {
        JobKey(table.priority, local_id): (JobState(state), attempts)
        for table, local_ids in by_table(tables, [finish.key for finish in op.finishes])
        for local_id, state, attempts in tx.lock(table, columns, sorted(local_ids), None)
        if state in JOB_STATES
    }
    result = Finished([], [], [])
    for finish in op.finishes:
        key = finish.key
        before, attempts = found.get(key, (None, 0))
        outcome = finish.judge(before, attempts)
        result.outcomes.append(outcome)
        if outcome is not FinishOutcome.DONE or before is None:
            continue
        due_ms = _finish_one(tx, tables[key.priority], before, finish)
        if before is JobState.PENDING:
            result.left_pending.append(key)
        if finish.state is JobState.PENDING:
            result.requeued.append(Requeued(key.priority, PendingKey(due_ms, key.local_id)))
    return result


def _finish_one(tx: Transaction, table: Table, before: JobState, finish: Finish) -> int:
    """Change a job that is in the state `before`; return when it is due if it is PENDING now."""
    due_ms = table.run_after.floor(min(tx.now_ms + finish.retry_delay_ms, LATEST_MS))
    each = _appended(table, [finish.append_custom_status])
    if finish.state is JobState.PENDING:
        common = table.to_pending(tx.now_ms)
        each.append(Each(b"run_after = %b", [table.run_after.literal(due_ms)]))
    else:
        now = table.updated_at.literal(tx.now_ms)
        common = b"state = %d, updated_at = " % finish.state + now + table.pins
    common += b", attempts_remaining = %d" % finish.attempts_remaining
    tx.update(table, [finish.key.local_id], before, finish.state, common, each)
    return due_ms
