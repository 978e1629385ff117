"""The tables of a queue as they are: what their columns can hold, and which indexes there are.

Ours (jobs.sql) hold all that the limits promise. Those that PinLater made hold whole seconds up to
2038, bodies of 64 KiB and perhaps the characters of latin1 only; a hand may have changed any of it.
So everything is read from information_schema when a queue is first used. Jobs are counted in a
snapshot of their tables (see counts.py).
"""

from __future__ import annotations

import contextlib
import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from importlib import resources
from typing import Any, NamedTuple

from pinlaterd.engines.base import Limits, TableLimits
from pinlaterd.engines.counts import Depths
from pinlaterd.engines.mysql.connection import (
    EARLIEST_MS,
    FAULTS,
    LATEST_MS,
    PACKET_CURE,
    MysqlAddress,
    MysqlConnection,
    is_locked,
    pieces,
    quote_name,
    quote_text,
    quote_time,
    storage_error,
    time_number,
)
from pinlaterd.errors import QueueNotFound, StorageCorrupt
from pinlaterd.model import QUEUE_NAME, JobState, Times

# What a shard can hold; a table that PinLater made may hold less.
_DATABASE_NAME_CHARS = 64
STATUS_CHARS = 5000
BODY_BYTES = 512 << 20  # as a literal at most twice that: the largest packet is 1 GiB


def database_prefix(shard: str) -> str:
    """Return the prefix of a shard's databases; as its name has no underscore, it ends at the
    second."""
    return f"plq_{shard}_"


def owner_database(shard: str) -> str:
    return f"plm_{shard}"


def limits_of(shard: str) -> Limits:
    return Limits(
        queue_name_chars=_DATABASE_NAME_CHARS - len(database_prefix(shard)),
        body_bytes=BODY_BYTES,
        run_after_ms=LATEST_MS,
        custom_status_chars=STATUS_CHARS,
    )


# TIMESTAMP begins one second after the epoch, for 0 means no time, and ends where 31 bits do.
_TIMESTAMP_MS = (1_000, (2**31 - 1) * 1000)
_DATETIME_MS = (EARLIEST_MS, LATEST_MS)
# Other numbers in the column `state` are a hand's: such rows are no jobs.
JOB_STATES = frozenset(JobState)
_TABLE_NAME = re.compile(r"jobs_p([1-9][0-9]{0,2})\Z")
# As PinLater made it. No claim of ours is longer, whatever host and source are in it.
_CLAIM_CHARS = 200
_TIME_COLUMNS = ("run_after", "updated_at", "created_at")
_COLUMNS = frozenset(
    {"local_id", "state", "claim_descriptor", "attempts_allowed", "attempts_remaining"}
    | {"custom_status", "body", *_TIME_COLUMNS}
)
# Character sets that have every character, and Python's names of those that PinLater's tables are
# likely to have. Of any other, only ASCII is relied on.
_WHOLE_CHARSETS = frozenset({"utf8mb4", "utf16", "utf32"})
_CODECS = {"latin1": "cp1252", "latin2": "iso8859_2", "cp1251": "cp1251", "utf8": "bmp"}
_CODECS["utf8mb3"] = _CODECS["utf8"]
_BEYOND_BMP = re.compile("[^\0-\uffff]")


class TimeColumn(Times):
    """A column of times."""

    __slots__ = ()

    def literal(self, time_ms: int) -> bytes:
        """Write a time, floored by us: servers differ in how they would round it."""
        return quote_time(self.floor(time_ms))

    def inserted(self, time_ms: int) -> bytes:
        return time_number(self.floor(time_ms))

    def bound(self, time_ms: int) -> bytes:
        """Write a time to compare with: floored as stored ones, but not cut to what can be
        stored."""
        return quote_time(time_ms - time_ms % self.step_ms)


class Order(NamedTuple):
    """The order of jobs of one state by a time: its column, and FORCE INDEX where there is an index
    on state and that column."""

    column: bytes
    forced: bytes


class Table(NamedTuple):
    """One priority of a queue."""

    name: bytes  # quoted, with its database
    label: str  # for messages
    queue: str
    priority: int
    storage: str  # InnoDB, or else
    run_after: TimeColumn
    updated_at: TimeColumn
    created_at: TimeColumn
    body_bytes: int
    status_chars: int
    status_codec: str  # "" if it has every character
    plain_claims: bool  # claims are stored in ASCII, other characters as ?
    has_pending_since: bool
    claim_room: int  # characters that a PENDING job keeps for its claim
    ready: Order  # jobs that are PENDING, by run-after
    aged: Order  # others, by their last change
    pins: bytes  # assignments that keep the server from changing times by itself
    options: bytes  # the table of the queue's options, quoted; empty where there is none
    lacks_exact: bool = False  # whether that table is from before its last columns
    keys_of_all: bytes = b""  # the shard's table of keys of all queues, there if `options` is

    def to_pending(self, now_ms: int) -> bytes:
        """Write the assignments by which a job becomes PENDING as from now."""
        now = self.updated_at.literal(now_ms)
        return b"state = 0, claim_descriptor = DEFAULT, updated_at = " + now

    def order(self, state: JobState) -> Order:
        """Return the order in which jobs are found by an index, if there is any."""
        return self.ready if state is JobState.PENDING or not self.aged.forced else self.aged

    def claim(self, claim_descriptor: str) -> str:
        """Return a claim descriptor as the table holds it."""
        if self.plain_claims and not claim_descriptor.isascii():
            return claim_descriptor.encode("ascii", "replace").decode()
        return claim_descriptor

    def status(self, text: str) -> bytes:
        """Write a literal for custom_status; characters that the table lacks become `?`."""
        text = text[: self.status_chars]
        if not text.isascii():
            if self.status_codec == "bmp":
                text = _BEYOND_BMP.sub("?", text)
            elif self.status_codec:
                text = text.encode(self.status_codec, "replace").decode(self.status_codec)
        return quote_text(text)


# --- reading ---------------------------------------------------------------------------------


class _Column(NamedTuple):
    kind: str
    whole_kind: str
    chars: int
    precision: int
    charset: str
    extra: str
    default: str  # MariaDB quotes texts


_TableKey = tuple[str, str]  # database and table


def load_tables(db: MysqlConnection, databases: Sequence[str]) -> dict[str, dict[int, Table]]:
    """Read the job tables of queues' databases, by database and priority; none of a database that
    is not there. It takes as many statements for many as for one.

    Raises StorageCorrupt for one that is not laid out as a job table."""
    found: dict[str, dict[int, Table]] = {database: {} for database in databases}
    columns: defaultdict[_TableKey, dict[str, _Column]] = defaultdict(dict)
    for database, table, column, kind, whole_kind, chars, precision, *texts in _described(
        db,
        b"column_name, data_type, column_type, character_maximum_length, datetime_precision,"
        b" COALESCE(character_set_name, ''), extra, COALESCE(NULLIF(column_default, 'NULL'), '')"
        b" FROM information_schema.columns",
        databases,
    ):
        columns[database, table][column.lower()] = _Column(
            kind, whole_kind, int(chars or 0), int(precision or 0), *texts
        )
    if not columns:
        return found
    indexes: defaultdict[_TableKey, defaultdict[str, list[str]]]
    indexes = defaultdict(lambda: defaultdict(list))
    statistics = b"index_name, seq_in_index, column_name FROM information_schema.statistics"
    for database, table, index, _, column in sorted(_described(db, statistics, databases)):
        indexes[database, table][index].append(column.lower())
    engines = b"COALESCE(engine, '?') FROM information_schema.tables"
    for database, table, engine in _described(db, engines, databases):
        key, match = (database, table), _TABLE_NAME.match(table)
        if match is not None and key in columns:
            priority = int(match[1])
            held = columns.get((database, "options"), {})
            options = quote_name(database, "options") if held else b""
            lacks_exact = bool(held) and "expires_at_us" not in held
            made = _table(*key, priority, engine, columns[key], indexes[key])
            found[database][priority] = made._replace(options=options, lacks_exact=lacks_exact)
    return found


def tables_of(db: MysqlConnection, database: str) -> dict[int, Table]:
    """Read the job tables of one database."""
    return load_tables(db, [database])[database]


def _described(
    db: MysqlConnection, columns_from: bytes, databases: Sequence[str]
) -> list[tuple[Any, ...]]:
    """Return rows of information_schema about tables of jobs and options, behind the names of
    database and table. Where databases are found whatever their case, one has the name that it was
    asked for by."""
    name = quote_text(databases[0]) if len(databases) == 1 else b"table_schema"
    rows = db.rows(
        b"SELECT " + name + b", table_name, " + columns_from + b" WHERE table_schema "
        + _among(databases) + b" AND (table_name LIKE 'jobs\\_p%' OR table_name = 'options')"
    )  # fmt: skip
    asked = frozenset(databases)
    return [row for row in rows if row[0] in asked]


def _among(databases: Sequence[str]) -> bytes:
    """Write a condition: MariaDB looks for one by its name; for several, into all that it has."""
    if len(databases) == 1:
        return b"= " + quote_text(databases[0])
    return b"IN (" + b", ".join(map(quote_text, databases)) + b")"


def _table(
    database: str,
    name: str,
    priority: int,
    storage: str,
    columns: Mapping[str, _Column],
    indexes: Mapping[str, Sequence[str]],
) -> Table:
    label = f"{database}.{name}"
    missing = sorted(_COLUMNS - columns.keys())
    if missing:
        raise StorageCorrupt(
            f"table {label} has no column {', '.join(missing)}; it is no table of jobs: move it to "
            "another database"
        )
    claim_chars = columns["claim_descriptor"].chars
    if claim_chars < _CLAIM_CHARS:
        raise StorageCorrupt(
            f"column claim_descriptor of table {label} holds {claim_chars} characters, expected "
            f"{_CLAIM_CHARS} or more; change it to VARCHAR(500)"
        )
    run_after, updated_at, created_at = (
        _time_column(label, column, columns[column]) for column in _TIME_COLUMNS
    )
    charset = columns["custom_status"].charset
    return Table(
        name=quote_name(database, name),
        label=label,
        queue=database.split("_", 2)[2],  # as `database_prefix` makes it
        priority=priority,
        storage=storage,
        run_after=run_after,
        updated_at=updated_at,
        created_at=created_at,
        body_bytes=columns["body"].chars,
        status_chars=min(STATUS_CHARS, columns["custom_status"].chars),
        status_codec="" if charset in _WHOLE_CHARSETS else _CODECS.get(charset, "ascii"),
        plain_claims=columns["claim_descriptor"].charset not in _WHOLE_CHARSETS,
        has_pending_since="pending_since" in columns,
        claim_room=len(columns["claim_descriptor"].default.strip("'")),
        ready=_order(columns, indexes, "run_after"),
        aged=_order(columns, indexes, "updated_at"),
        pins=b"".join(
            b", %s = %s" % (column.encode(), column.encode())
            for column in ("created_at", "run_after")
            if "on update" in columns[column].extra.lower()
        ),
        options=b"",
    )


def _time_column(label: str, name: str, column: _Column) -> TimeColumn:
    if column.kind not in ("timestamp", "datetime"):
        raise StorageCorrupt(
            f"column {name} of table {label} is {column.whole_kind}, expected timestamp or "
            "datetime; change it"
        )
    earliest_ms, latest_ms = _TIMESTAMP_MS if column.kind == "timestamp" else _DATETIME_MS
    step_ms = 10 ** max(0, 3 - column.precision)
    return TimeColumn(step_ms, earliest_ms, latest_ms)


def _order(
    columns: Mapping[str, _Column], indexes: Mapping[str, Sequence[str]], column: str
) -> Order:
    """Find the index for an order: by due_at, which is both times in one, where the table has that.

    Indexes are named: the figures that a server would choose by are of yesterday's table."""
    if "due_at" in columns and "generated" in columns["due_at"].extra.lower():
        for index, indexed in indexes.items():
            if indexed[:3] == ["state", "due_at", "local_id"]:
                return Order(b"due_at", _force(index))
    for index, indexed in indexes.items():
        if list(indexed) in (["state", column], ["state", column, "local_id"]):
            return Order(column.encode(), _force(index))
    return Order(column.encode(), b"")


def _force(index: str) -> bytes:
    return b" FORCE INDEX (" + quote_name(index) + b")"


# --- making ----------------------------------------------------------------------------------


def create_database(name: str) -> bytes:
    return (
        b"CREATE DATABASE IF NOT EXISTS "
        + quote_name(name)
        + b" DEFAULT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin"
    )


def create_table(script: str, database: str, name: str, *, claim_room: int = 0) -> bytes:
    """Return the statement of a file in this package, without the explanations on top of it."""
    text = resources.files(__package__).joinpath(script).read_text("utf-8")
    lines = [line for line in text.splitlines() if not line.startswith("--")]
    statement = "\n".join(lines).replace("{room}", " " * claim_room)
    return statement.encode().replace(b"{table}", quote_name(database, name))


# --- the tables of a shard ------------------------------------------------------------------

# When the store is opened, one statement describes so many tables, or reads a row of each: either
# takes a tenth of a second, several times that if the server has none of them open.
_TABLES_DESCRIBED, _TABLES_READ = 900, 300


class ShardTables:
    """The tables of a shard's queues, as its owner knows them."""

    def __init__(self, shard: str, *, levels: int, most_body_bytes: int, claim_room: int) -> None:
        self.prefix = database_prefix(shard)
        self.keys_of_all = quote_name(owner_database(shard), "keys_of_all")  # once there are keys
        self._owner_database = owner_database(shard)
        self.by_queue: dict[str, dict[int, Table]] = {}  # and priority
        self.narrower: dict[str, dict[int, TableLimits]] = {}  # what some of them hold
        self._levels = levels
        self._most_body_bytes = most_body_bytes
        self._claim_room = claim_room  # of tables that are made

    def of(self, queue: str) -> dict[int, Table]:
        tables = self.by_queue.get(queue)
        if tables is None:
            raise QueueNotFound(queue)
        return tables

    def load(self, db: MysqlConnection) -> dict[str, bool]:
        """Load the tables of all queues; return for each queue whether it had tables before."""
        self.by_queue, self.narrower = {}, {}
        rows = db.rows(
            b"SELECT schema_name FROM information_schema.schemata"
            b" WHERE CAST(LEFT(schema_name, %d) AS BINARY) = %s"
            % (len(self.prefix), quote_text(self.prefix))
        )
        found = [database[len(self.prefix) :] for (database,) in rows]
        queues = [queue for queue in found if QUEUE_NAME.match(queue)]
        had_tables = {}
        for some in pieces(queues, max(1, _TABLES_DESCRIBED // self._levels)):
            tables = load_tables(db, [self.prefix + queue for queue in some])
            for queue in some:
                had_tables[queue] = self.add(db, queue, tables[self.prefix + queue])
        return had_tables

    def add(self, db: MysqlConnection, queue: str, tables: Mapping[int, Table]) -> bool:
        """Add a queue whose database is there, with `tables` as far as they are known; make those
        that it lacks. Return whether it had any."""
        database = self.prefix + queue
        if not tables:  # as one name it is found whatever its case
            tables = tables_of(db, database)
        had_tables = bool(tables)
        missing = set(range(1, self._levels + 1)) - tables.keys()
        for priority in sorted(missing):  # it was made for fewer priorities, or never finished
            name = f"jobs_p{priority}"
            db.execute(create_table("jobs.sql", database, name, claim_room=self._claim_room))
        if missing:
            tables = tables_of(db, database)
        if tables[1].lacks_exact:
            added = b" ADD COLUMN run_after_us BIGINT, ADD COLUMN expires_at_us BIGINT"
            db.execute(b"ALTER TABLE " + tables[1].options + added)
        of_all = self.keys_of_all
        self.by_queue[queue] = {at: t._replace(keys_of_all=of_all) for at, t in tables.items()}
        limits = {priority: self._narrower(db, table) for priority, table in tables.items()}
        self.narrower[queue] = {at: narrower for at, narrower in limits.items() if narrower}
        return had_tables

    def _narrower(self, db: MysqlConnection, table: Table) -> TableLimits | None:
        """Return the limits of a table and its server, where something within the engine's limits
        may not fit, or not exactly; None if all fits."""
        body_bytes = min(table.body_bytes, BODY_BYTES)
        if db.value_bytes < min(self._most_body_bytes, body_bytes):
            return TableLimits(db.value_bytes, table.run_after, PACKET_CURE)
        if body_bytes == BODY_BYTES and table.run_after == (1, *_DATETIME_MS):
            return None
        return TableLimits(body_bytes, table.run_after)

    def make_options(self, db: MysqlConnection, queue: str) -> None:
        """Make the tables of a queue's options, unless they are there: it ends a transaction."""
        if not self.options_of(queue):
            database = self.prefix + queue
            db.execute(create_table("keys_of_all.sql", self._owner_database, "keys_of_all"))
            db.execute(create_table("options.sql", database, "options"))
            name, tables = quote_name(database, "options"), self.of(queue)
            self.by_queue[queue] = {at: t._replace(options=name) for at, t in tables.items()}

    def options_of(self, queue: str) -> bytes:
        """Return the table of a queue's options, quoted; empty where there is none."""
        return min(table.options for table in self.of(queue).values())

    def may_expire(self, db: MysqlConnection, queue: str) -> bool:
        """Return whether a queue has jobs that maintenance has to look at."""
        options = self.options_of(queue)
        return bool(options) and bool(
            db.rows(b"SELECT 1 FROM " + options + b" WHERE check_at IS NOT NULL LIMIT 1")
        )

    @property
    def has_options(self) -> bool:
        """Tell whether any queue has a table of options."""
        return any(t.options for tables in self.by_queue.values() for t in tables.values())

    def drop(self, queue: str) -> None:
        del self.by_queue[queue], self.narrower[queue]

    def last_local_id(self, db: MysqlConnection, queues: Collection[str]) -> int:
        """Return the highest id that their tables hold or have given out; 0 if there is none."""
        last = 0
        for some in pieces(list(queues), max(1, _TABLES_READ // self._levels)):
            held = [
                b"SELECT MAX(local_id) FROM " + table.name
                for queue in some
                for table in self.by_queue[queue].values()
            ]
            given_out = (
                b"SELECT MAX(auto_increment) - 1 FROM information_schema.tables WHERE table_schema "
                + _among([self.prefix + queue for queue in some])
            )
            try:
                rows = [*db.rows(b" UNION ALL ".join(held)), *db.rows(given_out)]
            except FAULTS as fault:
                if not is_locked(fault) or len(some) == 1:
                    raise
                # One by one: the last statement has to name the queue that is locked.
                rows = [(self.last_local_id(db, [queue]),) for queue in some]
            last = max(last, *[int(found or 0) for (found,) in rows])
        return last


# --- counting -------------------------------------------------------------------------------

# A count may take so long for each job, at worst from a cold disk.
_SECONDS_A_JOB = 1 / 100_000


class TableSnapshot:
    """A transaction on a connection of its own. It keeps what it has read from being dropped or
    altered, until it is closed."""

    def __init__(
        self, server: MysqlAddress, tables: Mapping[str, Sequence[Table]], owner: MysqlConnection
    ) -> None:
        """`owner`: ends the connection if the count is cancelled."""
        self._server = server
        self._tables = tables
        self._owner = owner
        self._db = MysqlConnection(server, patience_seconds=owner.patience_seconds, read_only=True)
        try:
            self._db.execute(b"SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            self._db.execute(b"START TRANSACTION WITH CONSISTENT SNAPSHOT")
            [[self._number]] = self._db.rows(b"SELECT CONNECTION_ID()")
        except FAULTS as fault:
            self._db.close()
            raise storage_error(fault, str(server), undone=True) from fault

    def count(self, queue: str) -> Depths:
        """Count by an index that holds the state and no bodies, where there is one."""
        try:
            return {
                (table.priority, JobState(state)): jobs
                for table in self._tables[queue]
                for state, jobs in self._count(table)
                if state in JOB_STATES
            }
        except FAULTS as fault:
            raise storage_error(fault, str(self._server), undone=True) from fault

    def _count(self, table: Table) -> Sequence[tuple[int, ...]]:
        database, name = table.label.split(".")
        [[estimate]] = self._db.rows(
            b"SELECT COALESCE(MAX(table_rows), 0) FROM information_schema.tables"
            b" WHERE table_schema = %b AND table_name = %b"
            % (quote_text(database), quote_text(name))
        )
        with self._db.patiently(int(estimate) * _SECONDS_A_JOB):
            return self._db.rows(
                b"SELECT state, COUNT(*) FROM %b%b GROUP BY state"
                % (table.name, table.ready.forced)
            )

    def find_damage(self) -> str:
        """Find nothing: jobs lie in one place each; opening a shard passes ids that were taken."""
        return ""

    def cancel(self) -> None:
        with contextlib.suppress(*FAULTS):
            self._owner.execute(b"KILL CONNECTION %d" % self._number)

    def close(self) -> None:
        self._db.close()
