"""Statements on many jobs at once, by primary key.

Lists of ids come in pieces: servers plan very long ones badly. Where jobs differ in what they get,
a CASE over the ids tells it, which the server walks through for every row: such statements are
short (the figures are on top of jobs.sql). Where all get the same, there is no CASE.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, TypeVar

from pinlaterd.engines.mysql.literals import id_list, quote_bytes
from pinlaterd.engines.mysql.tables import Table
from pinlaterd.model import JobState

T = TypeVar("T")

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


def pieces(listed: Sequence[T], size: int = LISTED_IDS) -> Iterator[Sequence[T]]:
    if len(listed) <= size:
        if listed:
            yield listed
        return
    for first in range(0, len(listed), size):
        yield listed[first : first + size]


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
    for part in pieces(local_ids):
        yield (
            b"SELECT " + columns + b" FROM " + table.name + b" FORCE INDEX (PRIMARY)"
            + by_ids(part, state)
        )  # fmt: skip


def select_locked(
    table: Table, columns: bytes, local_ids: Sequence[int], state: JobState | None
) -> Iterator[bytes]:
    """So that nobody, not even a stranger, changes them before our transaction ends."""
    for statement in select(table, columns, local_ids, state):
        yield statement + b" FOR UPDATE"


def delete(table: Table, local_ids: Sequence[int], state: JobState) -> Iterator[bytes]:
    for part in pieces(local_ids):
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
        for part in pieces(local_ids):
            yield head + by_ids(part, state)
        return
    most_ids, first = CASE_IDS if each else LISTED_IDS, 0
    texts = [one.values for one in each] + ([claims] if claims else [])
    while first < len(local_ids):
        end, room = first, most_bytes - len(head)
        while end < len(local_ids) and end - first < most_ids:
            room -= 60 + sum([len(values[end]) + 30 for values in texts])
            if room < 0 and end > first:
                break
            end += 1
        part = local_ids[first:end]
        cases = b"".join([b", " + _case(one, part, first) for one in each])
        yield head + cases + by_ids(part, state, claims[first:end])
        first = end


def _case(one: Each, part: Sequence[int], first: int) -> bytes:
    values = one.values[first : first + len(part)]
    whens = b" ".join([b"WHEN %d THEN %b" % pair for pair in zip(part, values, strict=True)])
    return one.before + b"CASE local_id " + whens + b" END" + one.behind
