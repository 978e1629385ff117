"""Statements on many jobs at once, by primary key, and the rows that they read.

Lists of ids come in pieces: servers plan very long ones badly. Where jobs differ in what they get,
a CASE over the ids tells it, which the server walks through for every row: such statements are
short (the figures are on top of jobs.sql). Where all get the same, there is no CASE.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pinlaterd.engines.base import StoredJob
from pinlaterd.engines.mysql.literals import id_list, pieces, quote_bytes
from pinlaterd.engines.mysql.tables import Table
from pinlaterd.model import JobKey, JobState, Payload

LISTED_IDS = 800
CASE_IDS = 100
# A time as milliseconds since the epoch; one that PinLater's server left as 0 counts as the epoch.
_MS = "CAST(COALESCE(TIMESTAMPDIFF(MICROSECOND, '1970-01-01', {}) DIV 1000, 0) AS SIGNED)"
RUN_AFTER_MS = _MS.format("run_after").encode()
UPDATED_AT_MS = _MS.format("updated_at").encode()
CREATED_AT_MS = _MS.format("created_at").encode()
STATUS = b"COALESCE(custom_status, '')"


class Each(NamedTuple):
    """An assignment in which jobs differ: what stands before the value and behind it, and the
    value, a literal, of each job."""

    before: bytes
    values: Sequence[bytes]
    behind: bytes = b""


def by_ids(local_ids: Sequence[int], state: JobState | None, claims: Sequence[bytes] = ()) -> bytes:
    """WHERE: those of `local_ids` that are in `state`, and held under `claims`, if given: of each
    job one, as `claim_of` makes it."""
    where = b" WHERE local_id IN (" + id_list(local_ids) + b")"
    if state is not None:
        where += b" AND state = %d" % state
    if claims:  # byte by byte, whatever the collation of the column
        where += (
            b" AND CAST(CONVERT(CONCAT(local_id, ' ', claim_descriptor) USING utf8mb4) AS BINARY)"
            b" IN (" + b", ".join(claims) + b")"
        )
    return where


def claim_of(local_id: int, claim_descriptor: str) -> bytes:
    return quote_bytes(f"{local_id} {claim_descriptor}".encode())


def select(
    table: Table, columns: bytes, local_ids: Sequence[int], state: JobState | None
) -> Iterator[bytes]:
    for part in pieces(local_ids, LISTED_IDS):
        yield (
            b"SELECT " + columns + b" FROM " + table.name + b" FORCE INDEX (PRIMARY)"
            + by_ids(part, state)
        )  # fmt: skip


def select_locked(
    table: Table, columns: bytes, local_ids: Sequence[int], state: JobState | None
) -> Iterator[bytes]:
    """So that nobody, not even a foreign writer, changes them before our transaction ends."""
    for statement in select(table, columns, local_ids, state):
        yield statement + b" FOR UPDATE"


def delete(table: Table, local_ids: Sequence[int], state: JobState) -> Iterator[bytes]:
    for part in pieces(local_ids, LISTED_IDS):
        yield b"DELETE FROM " + table.name + by_ids(part, state)


def update(
    table: Table,
    local_ids: Sequence[int],
    state: JobState,
    common: bytes,
    each: Sequence[Each] = (),
    *,
    claims: Sequence[bytes] = (),
    most_bytes: int,
) -> Iterator[bytes]:
    """Of those that are in `state`, and held under `claims`, if given: `common` assignments, then
    those of `each`."""
    for one in each:
        if len(set(one.values)) == 1:
            common += b", " + one.before + one.values[0] + one.behind
    each = [one for one in each if len(set(one.values)) > 1]
    head = b"UPDATE " + table.name + b" FORCE INDEX (PRIMARY) SET " + common
    if not each and not claims:
        for part in pieces(local_ids, LISTED_IDS):
            yield head + by_ids(part, state)
        return
    most_ids, first = CASE_IDS if each else LISTED_IDS, 0
    texts = [one.values for one in each] + ([claims] if claims else [])
    while first < len(local_ids):
        end = min(first + most_ids, len(local_ids))
        while end > first + 1 and _bytes(texts, first, end) > most_bytes - len(head):
            end -= (end - first) // 2
        part = local_ids[first:end]
        cases = b"".join([b", " + _case(one, part, first) for one in each])
        yield head + cases + by_ids(part, state, claims[first:end])
        first = end


def _bytes(texts: Sequence[Sequence[bytes]], first: int, end: int) -> int:
    """About what jobs take in a statement: their texts, and their ids beside each."""
    listed = sum([sum(map(len, values[first:end])) for values in texts])
    return listed + (end - first) * (60 + 30 * len(texts))


def _case(one: Each, part: Sequence[int], first: int) -> bytes:
    values = one.values[first : first + len(part)]
    whens = b" ".join([b"WHEN %d THEN %b" % pair for pair in zip(part, values, strict=True)])
    return one.before + b"CASE local_id " + whens + b" END" + one.behind


# --- whole jobs, and payloads ---------------------------------------------------------------

WITHOUT_BODY = (
    b"local_id, state, COALESCE(attempts_allowed, 1), COALESCE(attempts_remaining, 0), "
    + STATUS + b", " + CREATED_AT_MS + b", " + RUN_AFTER_MS + b", " + UPDATED_AT_MS
    + b", claim_descriptor, NULL"
)  # fmt: skip
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
