"""Claims: PENDING jobs become IN_PROGRESS, and their payloads are read where memory lacks them."""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Sequence
from itertools import repeat

from pinlaterd.engines.base import Batch, ClaimOp, Claims
from pinlaterd.engines.batches import first_claims, fitting_payloads
from pinlaterd.engines.sqlite.file import id_list
from pinlaterd.engines.sqlite.runs import (
    IN_PROGRESS,
    PENDING,
    Run,
    holding,
    merged,
    spans,
    split,
)
from pinlaterd.engines.sqlite.store import Store, Transaction
from pinlaterd.model import Payload

_new = tuple.__new__  # half the cost of calling a NamedTuple, for each job of a batch


def claim_jobs(store: Store, tx: Transaction, batch: Batch) -> list[Sequence[Payload | None]]:
    def read(
        queue: str, priority: int, local_ids: Sequence[int], *, most_bytes: int
    ) -> Sequence[Payload | None]:
        queue_id = store.queue_id(queue)
        return read_payloads(tx.db, queue_id, priority, local_ids, most_bytes=most_bytes)

    payloads = fitting_payloads(batch.claims, batch.claim_room, read)
    by_place: defaultdict[tuple[str, int], list[Claims]] = defaultdict(list)
    absent: defaultdict[tuple[str, int], set[int]] = defaultdict(set)
    for op, fitting in zip(batch.claims, payloads, strict=True):
        for claims in first_claims(op, len(fitting)):
            if claims[1]:
                by_place[op.queue, claims[0]].append(claims)
        if None in fitting:
            keys = [(claims[0], local_id) for claims in op.claims for local_id in claims[1]]
            for (priority, local_id), payload in zip(keys, fitting, strict=False):
                if payload is None:
                    absent[op.queue, priority].add(local_id)
    made = {
        place: _claim_at(tx, store.queue_id(place[0]), place[1], claims, absent[place])
        for place, claims in by_place.items()
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
    return [claims[0] for claims in op.claims for _ in claims[1]]


def _claim_at(
    tx: Transaction, queue_id: int, priority: int, claims: Sequence[Claims], absent: set[int]
) -> list[bool]:
    """Returns which of the jobs were PENDING, in order, or nothing if all were. If one is named
    twice, the first claim is made. Jobs that are `absent` have no row: they leave their run."""
    local_ids = [local_id for alike in claims for local_id in alike[1]]
    wanted = spans(local_ids)
    held = [run for run in holding(tx.db, queue_id, PENDING, wanted) if run.priority == priority]
    taken, left = split(held, wanted)
    place = (queue_id, priority, IN_PROGRESS, tx.now_ms)
    if not absent and sum([run.jobs for run in taken]) == len(local_ids):
        tx.replace(held, [*left, *_claim_runs(place, claims)])
        return []
    free = {local_id for run in taken for local_id in run.local_ids}
    made, flags = [], []
    for _, ids, _, claimer, first_claim in claims:
        for number, local_id in enumerate(ids, first_claim):
            flags.append(local_id in free and local_id not in absent)
            free.discard(local_id)
            if flags[-1]:
                made.append(Run(local_id, local_id, *place, claimer, number))
    tx.replace(held, [*left, *merged(sorted(made))])
    return flags


def _claim_runs(place: tuple[int, int, int, int], claims: Sequence[Claims]) -> list[Run]:
    """Mostly ids count up as claims do, within those of one op, and from one to the next."""
    runs = []
    for _, ids, _, claimer, first_claim in claims:
        first_id, last_id = ids[0], ids[-1]
        if last_id - first_id == len(ids) - 1 and list(ids) == list(range(first_id, last_id + 1)):
            runs.append(Run(first_id, last_id, *place, claimer, first_claim))
            continue
        runs += [
            Run(local_id, local_id, *place, claimer, number)
            for number, local_id in enumerate(ids, first_claim)
        ]
    return list(merged(sorted(runs))) if len(runs) > 1 else runs


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
