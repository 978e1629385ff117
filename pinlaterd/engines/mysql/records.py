"""How jobs are read: rows of a job table as StoredJobs, and as Payloads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pinlaterd.engines.base import StoredJob
from pinlaterd.engines.mysql.statements import (
    CREATED_AT_MS,
    RUN_AFTER_MS,
    STATUS,
    UPDATED_AT_MS,
    select,
)
from pinlaterd.engines.mysql.tables import Table
from pinlaterd.model import JobKey, JobState, Payload

WITHOUT_BODY = (
    b"local_id, state, COALESCE(attempts_allowed, 1), COALESCE(attempts_remaining, 0), "
    + STATUS + b", " + CREATED_AT_MS + b", " + RUN_AFTER_MS + b", " + UPDATED_AT_MS
    + b", claim_descriptor, NULL"
)  # fmt: skip
# Other numbers in the column `state` are a hand's: such rows are no jobs.
STATES = frozenset(JobState)
WITH_BODY = WITHOUT_BODY.replace(b", NULL", b", COALESCE(body, '')")
_PAYLOAD = (
    b"local_id, COALESCE(body, ''), COALESCE(attempts_allowed, 1), COALESCE(attempts_remaining, 1)"
)
_new = tuple.__new__  # half the cost of calling a NamedTuple, for each job of a batch


def stored_job(priority: int, row: tuple[Any, ...]) -> StoredJob:
    local_id, state, *rest = row
    return StoredJob(JobKey(priority, local_id), JobState(state), *rest)


def read_payloads(
    rows: Callable[[bytes], Iterable[tuple[Any, ...]]],
    table: Table,
    local_ids: Sequence[int],
    *,
    most_bytes: int,
) -> list[Payload | None]:
    """As StorageEngine.payloads. `rows`: what a statement reads."""
    if not local_ids:
        return []
    # So that all small bodies together are within the bound; of large ones the size is read.
    small = max(most_bytes // len(local_ids), 256)
    columns = (
        b"local_id, IF(LENGTH(body) <= %d, body, NULL), COALESCE(attempts_allowed, 1),"
        b" COALESCE(attempts_remaining, 1), COALESCE(LENGTH(body), 0)" % small
    )
    found = {
        row[0]: row
        for statement in select(table, columns, local_ids, None)
        for row in rows(statement)
    }
    fitting = _fitting(local_ids, {i: row[4] for i, row in found.items()}, most_bytes)
    ids = local_ids[:fitting]
    large = [i for i in ids if i in found and found[i][1] is None]
    for statement in select(table, _PAYLOAD, large, None):
        found.update((row[0], row) for row in rows(statement))
    return [_new(Payload, found[local_id][1:4]) if local_id in found else None for local_id in ids]


def _fitting(local_ids: Sequence[int], sizes: Mapping[int, int], most_bytes: int) -> int:
    """How many of the bodies fit: all up to the first that does not, but one at least."""
    met = False
    for at, local_id in enumerate(local_ids):
        size = sizes.get(local_id)
        if size is None:
            continue
        most_bytes -= size
        if most_bytes < 0 and met:
            return at
        met = True
    return len(local_ids)
