"""How an attempt ends: claims that hold, acknowledgements, failures and retries.

Called within a Transaction. Jobs are reached by primary key, and each change names the state that
it expects. Plain successes are not looked at first: if fewer of them are found IN_PROGRESS than
were named, all is rolled back and done again, carefully.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pinlaterd.engines.base import Acks, Requeued
from pinlaterd.engines.batches import AckActions, Failed, local_ids_of
from pinlaterd.engines.mysql.literals import LATEST_MS
from pinlaterd.engines.mysql.statements import (
    RUN_AFTER_MS,
    STATUS,
    Each,
    claim_of,
    select_locked,
    update,
)
from pinlaterd.engines.mysql.store import Store, Transaction
from pinlaterd.engines.mysql.tables import Table
from pinlaterd.model import JobState, PendingKey

_HELD = b"local_id, claim_descriptor, COALESCE(attempts_remaining, 1), " + RUN_AFTER_MS


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
    return held_in(tx.read(select_locked(table, _HELD, local_ids, JobState.IN_PROGRESS)))


def held_in(rows: Iterable[tuple[int, str | None, int, int]]) -> dict[int, HeldClaim]:
    return {
        local_id: HeldClaim(local_id, claim_descriptor or "", *rest)
        for local_id, claim_descriptor, *rest in rows
    }


def oldest_claims(table: Table, claimed_after_ms: int, claimed_before_ms: int, limit: int) -> bytes:
    """The statement for `held_in`. Without an index by age the longest claimed are not told from
    the others, and need not be."""
    order = b" ORDER BY updated_at, local_id" if table.by_updated_at else b""
    updated_at = table.updated_at
    after = b""
    if claimed_after_ms > updated_at.earliest_ms:
        after = b" AND updated_at > " + updated_at.bound(claimed_after_ms)
    return (
        b"SELECT " + _HELD + b" FROM " + table.name + table.by_updated_at
        + b" WHERE state = 1 AND updated_at < "
        + updated_at.bound(min(claimed_before_ms, updated_at.latest_ms))
        + after + order + b" LIMIT %d FOR UPDATE" % limit
    )  # fmt: skip


def to_pending(tx: Transaction, table: Table) -> bytes:
    """The assignments by which a job becomes PENDING as from now."""
    since = b"pending_since = NULL, " if table.has_pending_since else b""
    return b"state = 0, claim_descriptor = NULL, %supdated_at = %s" % (
        since,
        table.updated_at.literal(tx.now_ms),
    )


def fail_attempts(
    tx: Transaction, queue: str, table: Table, attempts: Sequence[FailedAttempt], most_bytes: int
) -> list[Requeued]:
    """PENDING with one attempt less, or FAILED with none; returns those that are PENDING."""
    retried = [attempt for attempt in attempts if attempt.claim.attempts_remaining > 1]
    failed = [attempt for attempt in attempts if attempt.claim.attempts_remaining <= 1]
    run_after = table.run_after
    if retried:
        each = [Each(b"run_after = ", [run_after.literal(a.retry_at_ms) for a in retried])]
        each += appended(table, [a.append_custom_status for a in retried])
        common = to_pending(tx, table) + b", attempts_remaining = attempts_remaining - 1"
        ids = [a.claim.local_id for a in retried]
        _update_held(tx, table, ids, common, each, most_bytes)
        tx.moved(queue, table, ids, JobState.IN_PROGRESS, JobState.PENDING)
    if failed:
        common = b"state = 3, attempts_remaining = 0, updated_at = " + table.updated_at.literal(
            tx.now_ms
        )
        each = appended(table, [a.append_custom_status for a in failed])
        ids = [a.claim.local_id for a in failed]
        _update_held(tx, table, ids, common + table.pins, each, most_bytes)
        tx.moved(queue, table, ids, JobState.IN_PROGRESS, JobState.FAILED)
    return [
        Requeued(table.priority, PendingKey(run_after.floor(a.retry_at_ms), a.claim.local_id))
        for a in retried
    ]


def _update_held(
    tx: Transaction,
    table: Table,
    local_ids: Sequence[int],
    common: bytes,
    each: Sequence[Each],
    most_bytes: int,
) -> None:
    """Change jobs that `held_claims` has read, and locked."""
    state = JobState.IN_PROGRESS
    tx.run(update(table, local_ids, state, common, each, most_bytes=most_bytes))


def appended(table: Table, texts: Sequence[str]) -> list[Each]:
    """Texts to be put behind the jobs' custom statuses."""
    if not any(texts):
        return []
    return [_status(table, b"CONCAT(" + STATUS + b", ", texts, b")")]


def prepended(table: Table, texts: Sequence[str]) -> list[Each]:
    """Texts to be put in front of the jobs' custom statuses."""
    if not any(texts):
        return []
    return [_status(table, b"CONCAT(", texts, b", " + STATUS + b")")]


def _status(table: Table, before: bytes, texts: Sequence[str], behind: bytes) -> Each:
    values = [table.status(text) for text in texts]
    return Each(b"custom_status = LEFT(" + before, values, behind + b", %d)" % table.status_chars)


# --- acknowledgements -----------------------------------------------------------------------


def ack_actions(store: Store, tx: Transaction) -> AckActions:
    def succeed(queue: str, priority: int, acks: Sequence[Acks]) -> set[int]:
        table = store.tables_of(queue).get(priority)
        if table is None:
            return set(local_ids_of(acks))
        return _succeed(store, tx, queue, table, acks)

    def fail(queue: str, priority: int, acks: Sequence[Acks]) -> Failed:
        table, missed = store.tables_of(queue).get(priority), set(local_ids_of(acks))
        if table is None:
            return Failed(missed, ())
        attempts = _failed_attempts(tx, table, acks)
        missed.difference_update([attempt.claim.local_id for attempt in attempts])
        return Failed(missed, fail_attempts(tx, queue, table, attempts, store.db.statement_bytes))

    return AckActions(succeed, fail)


def _succeed(
    store: Store, tx: Transaction, queue: str, table: Table, acks: Sequence[Acks]
) -> set[int]:
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
        statements = update(
            table,
            local_ids,
            JobState.IN_PROGRESS,
            common,
            appended(table, [text for _, text, _ in jobs]),
            claims=[claim_of(local_id, claim) for local_id, _, claim in jobs if claim is not None],
            most_bytes=store.db.statement_bytes,
        )
        tx.run(statements, expected=len(jobs))
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
