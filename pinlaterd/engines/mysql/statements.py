"""Statements on many jobs at once, by primary key, and the rows that they read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from pinlaterd.engines.base import StoredJob
from pinlaterd.engines.mysql.literals import among, pieces, quote_bytes, quote_text
from pinlaterd.engines.mysql.tables import Table
from pinlaterd.model import JobKey, JobState, Payload

LISTED_IDS = 800  # servers plan longer lists badly
STATUS = b"COALESCE(custom_status, '')"


def in_ms(column: bytes) -> bytes:
    """A time as milliseconds since the epoch, which stands for one that PinLater's server left as
    0, too."""
    return (
        b"CAST(COALESCE(TIMESTAMPDIFF(MICROSECOND, '1970-01-01', %b) DIV 1000, 0) AS SIGNED)"
        % column
    )


RUN_AFTER_MS, UPDATED_AT_MS = in_ms(b"run_after"), in_ms(b"updated_at")


class Each(NamedTuple):
    """An assignment in which jobs differ: with %b where the value stands, and the value, a literal,
    of each job."""

    assignment: bytes
    values: Sequence[bytes]


def by_ids(local_ids: Sequence[int], state: JobState | None, claims: Sequence[bytes] = ()) -> bytes:
    """WHERE: those of `local_ids` that are in `state`, and held under `claims`, if given: of each
    job one, as `claim_of` makes it."""
    where = b" WHERE " + among(local_ids)
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


def update(
    table: Table,
    local_ids: Sequence[int],
    state: JobState,
    common: bytes,
    each: Sequence[Each] = (),
    *,
    claims: Sequence[bytes] = (),
    most_bytes: int,
) -> Iterator[tuple[bytes, int]]:
    """Of those that are in `state`, and held under `claims`, if given: `common` assignments, then
    those of `each`. Statements, and how many jobs each names."""
    for one in each:
        if len(set(one.values)) == 1:
            common += b", " + one.assignment % one.values[0]
    each = [one for one in each if len(set(one.values)) > 1]
    head = b"UPDATE " + table.name + b" FORCE INDEX (PRIMARY) SET " + common
    if not each and not claims:  # as of most successes, and of all claims
        for part in pieces(local_ids, LISTED_IDS):
            yield head + by_ids(part, state), len(part)
        return
    texts = [one.values for one in each] + ([claims] if claims else [])
    first = 0
    while first < len(local_ids):
        end = min(first + LISTED_IDS, len(local_ids))
        while end > first + 1 and _bytes(texts, first, end) > most_bytes - len(head):
            end -= (end - first) // 2
        part = local_ids[first:end]
        varied = [
            b", " + one.assignment % choice(sorted(zip(part, one.values[first:end], strict=True)))
            for one in each
        ]
        yield head + b"".join(varied) + by_ids(part, state, claims[first:end]), len(part)
        first = end


def _bytes(texts: Sequence[Sequence[bytes]], first: int, end: int) -> int:
    """About what jobs take in a statement: their texts, and their ids beside each."""
    listed = sum([sum(map(len, values[first:end])) for values in texts])
    return listed + (end - first) * (60 + 30 * len(texts))


def choice(values: Sequence[tuple[int, bytes]]) -> bytes:
    """The value of the last id, of those in order, that a job's own is not below. The server finds
    it by bisection, where a CASE would be walked through for every row."""
    ids, texts = zip(*values, strict=True)
    listed = ", ".join(map(str, ids)).encode()
    return b"ELT(INTERVAL(local_id, " + listed + b"), " + b", ".join(texts) + b")"


def claims_of(descriptors: Iterable[tuple[int, str]]) -> bytes:
    """The claim descriptor of each job. They end in numbers, which mostly count up as the ids do:
    then the server does that."""
    numbered = [(local_id, *_numbered(descriptor)) for local_id, descriptor in sorted(descriptors)]
    runs: list[tuple[int, bytes]] = []
    for (_, is_text, _), run in groupby(
        numbered, lambda one: (one[1], one[2] < 0, one[2] - one[0])
    ):
        first_id, head, first = next(run)
        text = quote_text(head)
        if not is_text:
            text = b"CONCAT(%b, %d + (local_id - %d))" % (text, first, first_id)
        runs.append((first_id, text))
    return runs[0][1] if len(runs) == 1 else choice(runs)


def _numbered(descriptor: str) -> tuple[str, int]:
    """What stands before its number, and that; all of it and -1, if it does not end in one."""
    head, colon, digits = descriptor.rpartition(":")
    if digits.isdecimal() and digits.isascii() and (digits[0] != "0" or digits == "0"):
        return head + colon, int(digits)
    return descriptor, -1


# --- whole jobs, and payloads ---------------------------------------------------------------

WITHOUT_BODY = (
    b"local_id, state, COALESCE(attempts_allowed, 1), COALESCE(attempts_remaining, 0), "
    + b", ".join([STATUS, in_ms(b"created_at"), RUN_AFTER_MS, UPDATED_AT_MS])
    + b", claim_descriptor, NULL"
)  # fmt: skip
WITH_BODY = WITHOUT_BODY.replace(b", NULL", b", COALESCE(body, '')")
_ATTEMPTS = b"COALESCE(attempts_allowed, 1), COALESCE(attempts_remaining, 1)"
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
    ids = sorted(set(local_ids))

    def read(columns: bytes, ids: Sequence[int]) -> list[tuple[Any, ...]]:
        return [
            row
            for statement in select(table, columns, ids, None)
            for row in rows(statement + b" ORDER BY local_id")
        ]

    # So that all small bodies together are within the bound; of large ones the size is read.
    is_small = b"IF(LENGTH(body) <= %d, " % max(most_bytes // len(local_ids), 256)
    size = b"NULL, COALESCE(LENGTH(body), 0))"
    columns = is_small + b"body, NULL), " + _ATTEMPTS + b", " + is_small + size
    found = read(columns, ids)  # their ids need not be read where none is missing
    if len(found) < len(ids):
        found = read(columns + b", local_id", ids)
        ids = [row[4] for row in found]
    by_id = dict(zip(ids, found, strict=True))
    sizes = {i: row[3] if row[0] is None else len(row[0]) for i, row in by_id.items()}
    fitting = local_ids[: _fitting(local_ids, sizes, most_bytes)]
    large = [i for i in fitting if i in by_id and by_id[i][0] is None]
    for *payload, local_id in read(b"COALESCE(body, ''), " + _ATTEMPTS + b", local_id", large):
        by_id[local_id] = tuple(payload)
    return [_new(Payload, by_id[i][:3]) if i in by_id else None for i in fitting]


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
