"""Statements on many jobs at once, by primary key, what they read, and transactions of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pinlaterd.engines.base import KeyHolder, StoredJob
from pinlaterd.engines.mysql.connection import (
    DUPLICATE_KEY,
    FAULTS,
    MysqlConnection,
    among,
    code_of,
    pieces,
    quote_bytes,
    quote_text,
)
from pinlaterd.engines.mysql.tables import ShardTables, Table
from pinlaterd.model import JobKey, JobOptions, JobState, Payload, new_record

LISTED_IDS = 800  # servers plan longer lists badly
STATUS = b"COALESCE(custom_status, '')"


def in_ms(column: bytes) -> bytes:
    """Write a time as milliseconds since the epoch; 0 also where PinLater's server left 0."""
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


def _by_ids(
    local_ids: Sequence[int], state: JobState | None, claims: Sequence[bytes] = ()
) -> bytes:
    """Write the WHERE clause for `local_ids` that are in `state`, and held under `claims`, if
    given: of each job one, as `claim_of` makes it."""
    where = b" WHERE " + among(local_ids)
    if state is not None:
        where += b" AND state = %d" % state
    if claims:  # byte by byte, whatever the collation of the column
        where += (
            b" AND CAST(CONVERT(CONCAT(local_id, ' ', RTRIM(claim_descriptor)) USING utf8mb4)"
            b" AS BINARY) IN (" + b", ".join(claims) + b")"
        )
    return where


def claim_of(local_id: int, claim_descriptor: str) -> bytes:
    return quote_bytes(f"{local_id} {claim_descriptor}".encode())


def by_table(tables: Mapping[int, Table], keys: Iterable[JobKey]) -> list[tuple[Table, list[int]]]:
    """Return the local ids of different jobs by their tables, without those of no table."""
    found: defaultdict[int, list[int]] = defaultdict(list)
    for priority, local_id in dict.fromkeys(keys):
        found[priority].append(local_id)
    return [(tables[priority], ids) for priority, ids in found.items() if priority in tables]


def select(
    table: Table, columns: bytes, local_ids: Sequence[int], state: JobState | None
) -> Iterator[bytes]:
    for part in pieces(local_ids, LISTED_IDS):
        yield (
            b"SELECT " + columns + b" FROM " + table.name + b" FORCE INDEX (PRIMARY)"
            + _by_ids(part, state)
        )  # fmt: skip


def _update(
    table: Table,
    local_ids: Sequence[int],
    state: JobState,
    common: bytes,
    each: Sequence[Each] = (),
    *,
    claims: Sequence[bytes] = (),
    most_bytes: int,
) -> Iterator[tuple[bytes, int]]:
    """Write statements that update those jobs in `state`, and held under `claims`, if given:
    `common` assignments, then those of `each`. Yield each with how many jobs it names."""
    for one in each:
        if len(set(one.values)) == 1:
            common += b", " + one.assignment % one.values[0]
    each = [one for one in each if len(set(one.values)) > 1]
    head = b"UPDATE " + table.name + b" FORCE INDEX (PRIMARY) SET " + common
    if not each and not claims:  # as of most successes, and of all claims
        for part in pieces(local_ids, LISTED_IDS):
            yield head + _by_ids(part, state), len(part)
        return
    texts = [one.values for one in each] + ([claims] if claims else [])
    first = 0
    while first < len(local_ids):
        end = min(first + LISTED_IDS, len(local_ids))
        while end > first + 1 and _bytes(texts, first, end) > most_bytes - len(head):
            end -= (end - first) // 2
        part = local_ids[first:end]
        varied = [
            b", " + one.assignment % _choice(sorted(zip(part, one.values[first:end], strict=True)))
            for one in each
        ]
        yield head + b"".join(varied) + _by_ids(part, state, claims[first:end]), len(part)
        first = end


def _bytes(texts: Sequence[Sequence[bytes]], first: int, end: int) -> int:
    """Estimate what jobs take in a statement: their texts, and their ids with each."""
    listed = sum([sum(map(len, values[first:end])) for values in texts])
    return listed + (end - first) * (60 + 30 * len(texts))


def _choice(values: Sequence[tuple[int, bytes]]) -> bytes:
    """Write the value of the last id, of those in order, that a job's own is not below. The server
    finds it by bisection, where a CASE would be walked through for every row."""
    ids, texts = zip(*values, strict=True)
    listed = ", ".join(map(str, ids)).encode()
    return b"ELT(INTERVAL(local_id, " + listed + b"), " + b", ".join(texts) + b")"


ClaimName = tuple[str, int]
"""What stands before the number that a claim descriptor ends in, and that."""


def claims_of(local_ids: Sequence[int], names: Mapping[int, ClaimName], room: int) -> bytes:
    """Write the claim descriptor of each job, whose ids are in order, filled up to `room`
    characters. Numbers mostly count up as the ids do: then the server does that."""
    runs: list[list[int]] = []
    before, ahead = "", 0
    for local_id in local_ids:
        claimer, number = names[local_id]
        if number - local_id == ahead and claimer == before:
            runs[-1].append(local_id)
        else:
            before, ahead = claimer, number - local_id
            runs.append([local_id])
    texts = [(run[0], _claims_of_run(*names[run[0]], run, room)) for run in runs]
    return texts[0][1] if len(texts) == 1 else _choice(texts)


def _claims_of_run(claimer: str, number: int, local_ids: Sequence[int], room: int) -> bytes:
    if len(local_ids) == 1:
        return quote_text(f"{claimer}{number}".ljust(room))
    claim = b"CONCAT(%b, %d + (local_id - %d))" % (quote_text(claimer), number, local_ids[0])
    last = f"{claimer}{number + local_ids[-1] - local_ids[0]}"
    return b"RPAD(%b, %d, ' ')" % (claim, max(room, len(last))) if room else claim


# --- whole jobs, and payloads ---------------------------------------------------------------

_BESIDE_BODY = (
    b"local_id, state, COALESCE(attempts_allowed, 1), COALESCE(attempts_remaining, 0), "
    + b", ".join([STATUS, in_ms(b"created_at"), RUN_AFTER_MS, UPDATED_AT_MS])
    + b", NULLIF(RTRIM(claim_descriptor), ''), "
)  # fmt: skip
_ATTEMPTS = b"COALESCE(attempts_allowed, 1), COALESCE(attempts_remaining, 1)"


def whole_job(table: Table, *, with_body: bool) -> bytes:
    """Return the columns of a job, for `stored_job`."""
    body, options = b"COALESCE(body, '')" if with_body else b"NULL", b", NULL"
    if table.options:
        options = (
            b", (SELECT CONCAT(of_all, COALESCE(expires_at, ''), ' ', COALESCE(run_after_us, ''),"
            b" ' ', COALESCE(expires_at_us, ''), ' ', COALESCE(end_reason, ''),"
            b" ' ', COALESCE(name, '')) FROM %b AS options"
            b" WHERE options.local_id = jobs_p%d.local_id"
            b" AND options.priority = %d)" % (table.options, table.priority, table.priority)
        )
    return _BESIDE_BODY + body + options


def stored_job(priority: int, row: tuple[Any, ...]) -> StoredJob:
    local_id, state, *rest, texts = row
    job = StoredJob(JobKey(priority, local_id), JobState(state), *rest)
    if texts is None:
        return job
    expires_at, run_after, expires, end_reason, name = texts.split(b" ", 4)
    key = name.decode(errors="replace") or None
    numbers = [int(n) if n else None for n in (expires_at[1:], run_after, expires)]
    expires_at_ms, run_after_us, expires_at_us = numbers
    of_all_queues = expires_at.startswith(b"1")
    options = JobOptions(key, expires_at_ms, of_all_queues, run_after_us, expires_at_us)
    return job._replace(options=options, end_reason=end_reason.decode() or None)


# --- options --------------------------------------------------------------------------------

_LISTED_KEYS = 200
_COLUMNS_OF_OPTIONS = (
    b" (local_id, priority, of_all, name, expires_at, check_at, run_after_us, expires_at_us)"
    b" VALUES "
)
_COLUMNS_OF_ALL = b" (name, queue) VALUES "


def find_keys(
    rows: Callable[[bytes], Iterable[tuple[Any, ...]]],
    tables: Mapping[int, Table],
    keys: Sequence[str],
    *,
    of_all_queues: bool = False,
) -> dict[str, JobKey]:
    """Find keys as StorageEngine.find_keys does, in a queue that has a table of options. `rows`:
    what a statement reads. A job has to be there: a PinLater server deletes it without its key."""
    found: dict[str, JobKey] = {}
    options = next(table.options for table in tables.values())
    for part in pieces([quote_bytes(key.encode()) for key in keys], _LISTED_KEYS):
        statement = b"SELECT name, priority, local_id FROM %b WHERE of_all = %d AND name IN (%b)"
        for name, *job_key in rows(statement % (options, of_all_queues, b", ".join(part))):
            found[name.decode()] = JobKey(*job_key)
    there: set[JobKey] = set()
    for table, local_ids in by_table(tables, found.values()):
        for statement in select(table, b"local_id", local_ids, None):
            there.update(JobKey(table.priority, local_id) for (local_id,) in rows(statement))
    return {key: job_key for key, job_key in found.items() if job_key in there}


def find_keys_of_all(
    rows: Callable[[bytes], Iterable[tuple[Any, ...]]], tables: ShardTables, keys: Sequence[str]
) -> dict[str, KeyHolder]:
    """Find keys as StorageEngine.find_keys_of_all does. `rows`: what a statement reads."""
    queues: defaultdict[str, list[str]] = defaultdict(list)
    listed = [quote_bytes(key.encode()) for key in keys] if tables.has_options else []
    for part in pieces(listed, _LISTED_KEYS):
        statement = b"SELECT name, queue FROM %b WHERE name IN (%b)"
        for name, queue in rows(statement % (tables.keys_of_all, b", ".join(part))):
            queues[queue.decode()].append(name.decode())
    found: dict[str, KeyHolder] = {}
    for queue, named in queues.items():
        of_queue = tables.by_queue.get(queue)
        if of_queue and all(table.options for table in of_queue.values()):
            for key, job_key in find_keys(rows, of_queue, named, of_all_queues=True).items():
                found[key] = KeyHolder(*job_key, True, queue)
    return found


def put_options(
    table: Table, jobs: Mapping[JobKey, JobOptions], *, are_free: bool
) -> Iterator[bytes]:
    """Store the options of jobs of the queue of `table`. If their keys are known to be free, one
    left without its job gives way; else a key that is there is an error."""
    rows, of_all = [], []
    for job, each in jobs.items():
        name = b"NULL" if each.key is None else quote_bytes(each.key.encode())
        times = (each.expires_at_ms, each.expires_at_ms, each.run_after_us, each.expires_at_us)
        texts = [b"NULL" if time is None else b"%d" % time for time in times]
        numbers = (job.local_id, job.priority, each.key_of_all_queues)
        rows.append(b"(%d, %d, %d, %b, %b)" % (*numbers, name, b", ".join(texts)))
        if each.key and each.key_of_all_queues:
            of_all.append(b"(%b, %b)" % (name, quote_text(table.queue)))
    put = b"REPLACE INTO " if are_free else b"INSERT INTO "
    for part in pieces(rows, _LISTED_KEYS):
        yield put + table.options + _COLUMNS_OF_OPTIONS + b", ".join(part)
    for part in pieces(of_all, _LISTED_KEYS):
        yield put + table.keys_of_all + _COLUMNS_OF_ALL + b", ".join(part)


def change_options(table: Table, local_ids: Sequence[int], assignments: bytes) -> Iterator[bytes]:
    """Change the options of jobs of a table that have some."""
    for part in pieces(local_ids, LISTED_IDS) if table.options else ():
        yield b"UPDATE " + table.options + b" SET " + assignments + _options_of(table, part)


def check_again(table: Table, local_ids: Sequence[int], at_ms: int | None) -> Iterator[bytes]:
    """Have maintenance look at jobs at that time; None: never."""
    time = b"NULL" if at_ms is None else b"%d" % at_ms
    return change_options(table, local_ids, b"check_at = " + time)


def expired(table: Table, local_ids: Sequence[int], now_ms: int) -> Iterator[bytes]:
    """Select those of the jobs that are past their expiry."""
    for part in pieces(local_ids, LISTED_IDS):
        where = _options_of(table, part) + b" AND expires_at <= %d" % now_ms
        yield b"SELECT local_id FROM " + table.options + where


def _options_of(table: Table, local_ids: Sequence[int]) -> bytes:
    return b" WHERE priority = %d AND " % table.priority + among(local_ids)


def delete_options(table: Table, local_ids: Sequence[int]) -> Iterator[bytes]:
    """Delete the options of jobs of a table, if its queue has any."""
    held, of_all = table.options, table.keys_of_all
    names = (held, of_all, held, of_all, held, of_all, held, of_all, quote_text(table.queue))
    what = (
        b"DELETE %b, %b FROM %b LEFT JOIN %b ON %b.of_all = 1 AND %b.name = %b.name"
        b" AND %b.queue = %b" % names
    )
    for part in pieces(local_ids, LISTED_IDS) if held else ():
        yield what + _options_of(table, part)


def read_payloads(
    rows: Callable[[bytes], Iterable[tuple[Any, ...]]],
    table: Table,
    local_ids: Sequence[int],
    *,
    most_bytes: int,
) -> list[Payload | None]:
    """Read payloads as StorageEngine.payloads does. `rows`: what a statement reads."""
    if not local_ids:
        return []
    ids = sorted(set(local_ids))

    def read(columns: bytes, ids: Sequence[int]) -> list[tuple[Any, ...]]:
        return [
            row
            for statement in select(table, columns, ids, None)
            for row in rows(statement + b" ORDER BY local_id")
        ]

    # So that all small bodies together are within the bound; of large ones the size is read. A
    # payload is one value: the driver takes half a microsecond for each.
    most_small = max(most_bytes // len(local_ids), 256)
    small = b"CONCAT_WS(' ', " + _ATTEMPTS + b", body)"
    columns = b"IF(LENGTH(body) <= %d, %b, NULL)" % (most_small, small)
    found = read(columns, ids)  # their ids need not be read where none is missing
    if len(found) < len(ids):
        found = read(columns + b", local_id", ids)
        ids = [row[1] for row in found]
    payloads = {i: _payload(row[0]) for i, row in zip(ids, found, strict=True) if row[0]}
    sizes = {local_id: len(payload.body) for local_id, payload in payloads.items()}
    if len(payloads) < len(ids):
        large = [local_id for local_id in ids if local_id not in payloads]
        sizes.update(read(b"local_id, COALESCE(LENGTH(body), 0)", large))
    fitting = local_ids[: _fitting(local_ids, sizes, most_bytes)]
    large = [local_id for local_id in fitting if local_id in sizes and local_id not in payloads]
    for local_id, *columns_read in read(b"local_id, COALESCE(body, ''), " + _ATTEMPTS, large):
        payloads[local_id] = Payload(*columns_read)
    return [payloads.get(local_id) for local_id in fitting]


def _payload(columns: bytes) -> Payload:
    allowed, remaining, body = columns.split(b" ", 2)
    return new_record(Payload, (body, int(allowed), int(remaining)))


def _fitting(local_ids: Sequence[int], sizes: Mapping[int, int], most_bytes: int) -> int:
    """Count how many of the bodies fit: all up to the first that does not, but one at least."""
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


# --- transactions ---------------------------------------------------------------------------


# Has the server end a packet, before the COMMIT in it, unless the statement before has found so
# many rows. SET fails where DO would not; a number out of range is an error in every sql_mode.
_EXPECT = b"SET @unexpected = 9223372036854775807 + (ROW_COUNT() <> %d)"
_OUT_OF_RANGE = 1690
_MOST_HEAD_BYTES = 400  # of a statement up to its values, with two names


class UnexpectedRows(Exception):
    """Jobs were not in the state that a statement relied on: to be done again, looking first."""


class KeysAreHeld(Exception):
    """Keys that were taken for free may be held: to be done again, looking first."""


class Transaction:
    """Statements are sent several in a packet: with the next one that reads, or with the COMMIT.
    One that is alone is a transaction by itself."""

    def __init__(
        self, db: MysqlConnection, now_ms: int, *, careful: bool, finds_keys: bool = False
    ) -> None:
        self.now_ms = now_ms
        self.careful = careful  # whether rows were unexpected before
        self.finds_keys = finds_keys  # whether keys were held before
        self.committing = False  # whether the server was asked to commit
        self.depth_changes: defaultdict[tuple[str, int, JobState], int] = defaultdict(int)
        self._db = db
        self._begun = False
        self._unsent: list[bytes] = []

    def run(self, statement: bytes) -> None:
        """Change something, later."""
        self._unsent.append(statement)

    def insert(
        self, table: Table, columns: bytes, rows: Sequence[bytes], local_ids: Sequence[int]
    ) -> None:
        """Insert jobs that are PENDING; in several statements where one would be too long."""
        head = b"INSERT INTO " + table.name + b" (" + columns + b") VALUES "
        first, size = 0, len(head)
        for at, row in enumerate(rows):
            size += len(row) + 2
            if size > self._db.statement_bytes and at > first:
                self.run(head + b", ".join(rows[first:at]))
                first, size = at, len(head) + len(row)
        self.run(head + b", ".join(rows[first:]))
        self._moved(table, local_ids, None, JobState.PENDING)

    def update(
        self,
        table: Table,
        local_ids: Sequence[int],
        before: JobState,
        after: JobState,
        common: bytes,
        each: Sequence[Each] = (),
        claims: Sequence[bytes] = (),
    ) -> None:
        """Update as `_update` does. Unless all are found, UnexpectedRows is raised later."""
        most_bytes = self._db.statement_bytes
        for statement, jobs in _update(
            table, local_ids, before, common, each, claims=claims, most_bytes=most_bytes
        ):
            self._unsent += (statement, _EXPECT % jobs)
        if after is not before:
            self._moved(table, local_ids, before, after)

    def delete(self, table: Table, local_ids: Sequence[int], state: JobState) -> None:
        for part in pieces(local_ids, LISTED_IDS):
            statement = b"DELETE FROM " + table.name + _by_ids(part, state)
            self._unsent += (statement, _EXPECT % len(part))
        self._unsent += delete_options(table, local_ids)
        self._moved(table, local_ids, state, None)

    def read(self, statements: Iterable[bytes]) -> list[tuple[Any, ...]]:
        rows: list[tuple[Any, ...]] = []
        for statement in statements:
            self.run(statement)
            rows += self._send()
        return rows

    def lock(
        self, table: Table, columns: bytes, local_ids: Sequence[int], state: JobState | None
    ) -> list[tuple[Any, ...]]:
        """Read those that are in `state`, if given. Nobody, not even a foreign writer, changes them
        before our transaction ends."""
        return self.read(
            statement + b" FOR UPDATE" for statement in select(table, columns, local_ids, state)
        )

    def commit(self) -> None:
        """Send what has not been sent. `committing` tells whether an error is that of a commit."""
        if self._begun or len(self._unsent) > 1:
            self.run(b"COMMIT")
        if self._unsent:
            if not self._begun:  # a connection that is lost by now leaves no doubt
                self._db.check_open()
            self._send(commits=True)

    def _send(self, *, commits: bool = False) -> tuple[tuple[Any, ...], ...]:
        """Send the statements; return what the last one reads."""
        unsent, self._unsent = self._unsent, []
        if not unsent:
            return ()
        if not (self._begun or (commits and len(unsent) == 1)):
            self._begun = True
            unsent.insert(0, b"BEGIN")
        first = size = 0
        for at, statement in enumerate(unsent):
            size += len(statement) + 2
            if size > self._db.statement_bytes and at > first:
                self._send_packet(unsent[first:at])
                first, size = at, len(statement)
        self.committing = commits
        return self._send_packet(unsent[first:])

    def _send_packet(self, packet: Sequence[bytes]) -> tuple[tuple[Any, ...], ...]:
        try:
            return self._db.run(packet)
        except FAULTS as fault:
            if code_of(fault) == _OUT_OF_RANGE and self._db.last_statement.startswith(b"SET"):
                raise UnexpectedRows from fault
            statement = self._db.last_statement[:_MOST_HEAD_BYTES]
            puts_options = _COLUMNS_OF_OPTIONS in statement or _COLUMNS_OF_ALL in statement
            if code_of(fault) == DUPLICATE_KEY and puts_options and not self.finds_keys:
                raise KeysAreHeld from fault
            raise

    def _moved(
        self,
        table: Table,
        local_ids: Sequence[int],
        before: JobState | None,
        after: JobState | None,
    ) -> None:
        """Note that jobs changed state; None: not there."""
        if not local_ids:
            return
        for state, jobs in ((before, -len(local_ids)), (after, len(local_ids))):
            if state is not None:
                self.depth_changes[table.queue, table.priority, state] += jobs
