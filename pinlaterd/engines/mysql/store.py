"""The owning connection and what the engine keeps in memory about its shard.

The lock that makes an owner (lock.py) belongs to the connection that writes; the server ends both
when it has heard nothing for `lease_seconds`. So a process that was frozen or cut off has lost the
power to write together with the lock, and finds out with its next statement: a lost connection is
lost ownership. It is never replaced silently; the store refuses everything until it is opened anew,
and looks then who owns the shard now.

`Store.transact` is the only way to write jobs: one durable transaction. What is mirrored in memory
(queues, depths, the mark of local ids) changes only once it has been committed. Of a transaction
whose connection is lost before its COMMIT nothing is kept. If it is lost within the COMMIT, another
connection takes the lock: then the transaction has ended, nobody has written since, and what it
changed last (witness.py) tells how it ended.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from pinlaterd.clock import Clock
from pinlaterd.engines.base import Ownership, TableLimits, first_local_id
from pinlaterd.engines.counts import Counts
from pinlaterd.engines.mysql import witness
from pinlaterd.engines.mysql.connection import Connection, Server
from pinlaterd.engines.mysql.faults import (
    FAULTS,
    PACKET_CURE,
    describe,
    gone_database,
    is_duplicate,
    is_gone,
    is_locked,
    is_lost,
    is_read_only,
    is_retryable,
    storage_error,
)
from pinlaterd.engines.mysql.limits import database_prefix, owner_database
from pinlaterd.engines.mysql.literals import quote_name, quote_text
from pinlaterd.engines.mysql.lock import OwnerLock
from pinlaterd.engines.mysql.snapshot import TableSnapshot
from pinlaterd.engines.mysql.statements import pieces
from pinlaterd.engines.mysql.tables import (
    Table,
    create_database,
    create_owner_table,
    create_tables,
    last_local_id,
    load_tables,
    tables_of,
)
from pinlaterd.errors import (
    QueueGone,
    QueueNotFound,
    StorageError,
    StorageLocked,
    StorageNotCommitted,
)
from pinlaterd.model import QUEUE_NAME, JobState

T = TypeVar("T")

# Local ids are marked as used ahead in blocks, so that a commit seldom writes the mark.
_RESERVED_IDS = 10_000
# When the store is opened, one statement describes so many tables, or reads a row of each: either
# takes a tenth of a second, several times that if the server has none of them open.
_TABLES_DESCRIBED, _TABLES_READ = 900, 300
# Dropping a queue with its files may take long.
_DROP_SECONDS = 300.0
# How often upkeep looks into tables in which it expects nothing: each look is a statement.
_SWEEP_SECONDS = 30.0
# An answer to how a lost COMMIT ended may take this part of what others may take: together they end
# before the callers' time does, which is twice that of one answer.
_LOOK_UP_PART = 0.5
# How often a transaction is begun.
_ATTEMPTS = 4
# A queue is dropped by hand, while a search may read it and the server may write statistics of its
# tables (MariaDB, a second after the last of many changes): that may wait for locks.
_WAIT_FOR_LOCKS = b"SET STATEMENT lock_wait_timeout = 1, innodb_lock_wait_timeout = 1 FOR "


class Misfit(Exception):
    """Jobs were not in the state that a statement relied on: to be done again, looking first."""


@dataclass
class _Write:
    """A change: how many rows its statements have to find, if that is known, and have found."""

    expected: int | None
    found: int = 0


_Statement = tuple[bytes, _Write | None]


class Transaction:
    """What one commit does: statements, and what it changes in the depths.

    Statements are sent several in a packet: with the next one that reads, or at the end."""

    def __init__(self, db: Connection, now_ms: int, *, careful: bool) -> None:
        self.db = db
        self.now_ms = now_ms
        self.careful = careful  # whether a Misfit has been met
        self.inserts_into = ""  # the queue that jobs were last inserted into
        self.witness: witness.Witness | None = None  # of the last change, as far as one can tell
        self.depth_changes: defaultdict[tuple[str, int, JobState], int] = defaultdict(int)
        self._unsent: list[_Statement] = [(b"BEGIN", None)]
        self._writes: list[_Write] = []

    @property
    def changed(self) -> bool:
        """Whether anything has been changed, by what was sent."""
        return any(write.found for write in self._writes)

    def run(self, statements: Iterable[bytes], expected: int | None = None) -> None:
        """Change something, later. Raises Misfit, then, if the statements together don't find as
        many rows as expected."""
        write = _Write(expected)
        self._writes.append(write)
        self._unsent += [(statement, write) for statement in statements]

    def run_now(self, statements: Iterable[bytes]) -> int:
        """Change something; returns how many rows the statements found."""
        self.run(statements)
        self.send()
        return self._writes[-1].found

    def read(self, statements: Iterable[bytes]) -> list[tuple[Any, ...]]:
        rows: list[tuple[Any, ...]] = []
        for statement in statements:
            self._unsent.append((statement, None))
            rows += self.send()
        return rows

    def send(self) -> tuple[tuple[Any, ...], ...]:
        """Send what has not been sent; returns what the last statement reads."""
        unsent, self._unsent = self._unsent, []
        rows: tuple[tuple[Any, ...], ...] = ()
        first = size = 0
        for at, (statement, _) in enumerate(unsent):
            size += len(statement) + 2
            if size > self.db.statement_bytes and at > first:
                self._send_packet(unsent[first:at])
                first, size = at, len(statement)
        if unsent:
            rows = self._send_packet(unsent[first:])
        if any(write.expected not in (None, write.found) for write in self._writes):
            raise Misfit
        return rows

    def _send_packet(self, packet: Sequence[_Statement]) -> tuple[tuple[Any, ...], ...]:
        counts, rows = self.db.run([statement for statement, _ in packet])
        for (_, write), found in zip(packet, counts, strict=True):
            if write is not None:
                write.found += found
        return rows

    def moved(
        self,
        queue: str,
        table: Table,
        local_ids: Sequence[int],
        before: JobState | None,
        after: JobState | None,
    ) -> None:
        """Note that jobs changed state; None: not there."""
        if not local_ids:
            return
        priority, jobs = table.priority, len(local_ids)
        if before is not None:
            self.depth_changes[queue, priority, before] -= jobs
        if after is not None:
            self.depth_changes[queue, priority, after] += jobs
        self.witness = witness.moved_job(table, local_ids[0], before, after)


class Store:
    """One shard's databases, open for their owner."""

    def __init__(
        self,
        shard: str,
        server: Server,
        clock: Clock,
        *,
        levels: int,
        most_body_bytes: int,
        lease_seconds: float,
        answer_seconds: float,
    ) -> None:
        self.shard = shard
        self.server = server
        self.tables: dict[str, dict[int, Table]] = {}  # by queue and priority
        self.narrower: dict[str, dict[int, TableLimits]] = {}  # what some of them hold
        self.counts = Counts(self._snapshot, clock, str)
        self._sweeps_due: dict[tuple[str, JobState], float] = {}  # monotonic seconds
        self._clock = clock
        self._levels = levels
        self._most_body_bytes = most_body_bytes
        self._lease_seconds = lease_seconds
        self._answer_seconds = answer_seconds
        self._prefix = database_prefix(shard)
        self._queue_named = re.compile(rb"`%b(\w+)`" % re.escape(self._prefix.encode()))
        self._owner_database = owner_database(shard)
        self._owner_table = quote_name(self._owner_database, "owner")
        self._lock = OwnerLock(shard, server)
        self._db: Connection | None = None
        self._heard_at = 0.0  # when a heartbeat last found the server as it has to be
        self._start_ms = 0  # of our ownership
        self.trouble = ""  # why it must be opened anew
        self._unmoved_commits = 0  # see _note
        self._ended_badly = False  # whether we were the owner, until a clean end is noted
        self._next_local_id = 1
        self._marked_local_id = 1  # ids below this are marked as used in the owner's table

    def __str__(self) -> str:
        return f"shard {self.shard} in {self.server}"

    # --- ownership ---------------------------------------------------------------------------

    def open(self, now_ms: int) -> Ownership:
        if self._db is not None:
            raise StorageError(f"{self} is open already; close it first")
        db = self._connect(self._answer_seconds)
        self._db, self.trouble, self._heard_at = db, "", self._clock.monotonic()
        try:
            with self._guarded():
                self._lock.take(db)
                self._check_writable(db)
                self._load(db)
                return self._take_over(db, now_ms)
        except BaseException:
            self._abandon()
            raise

    def _connect(self, patience_seconds: float) -> Connection:
        return Connection(
            self.server,
            patience_seconds=patience_seconds,
            idle_seconds=self._lease_seconds,
            waits_for_locks=False,
            several_statements=True,
        )

    def _check_writable(self, db: Connection) -> None:
        """Before anything fails half-way; an administrator's account would even succeed."""
        [[read_only]] = db.rows(b"SELECT @@read_only")
        if str(read_only).upper() not in ("0", "OFF"):
            raise StorageError(
                f"{self.server} is read-only, as replicas are; point master of shard {self.shard} "
                "in etc/shards.yaml to the primary, or make it writable"
            )

    def _load(self, db: Connection) -> None:
        self.tables, self.narrower, self._sweeps_due = {}, {}, {}
        prefix = quote_text(self._prefix)
        found = [
            database[len(self._prefix) :]
            for (database,) in db.rows(
                b"SELECT schema_name FROM information_schema.schemata"
                b" WHERE CAST(LEFT(schema_name, %d) AS BINARY) = %s" % (len(self._prefix), prefix)
            )
        ]
        queues = [queue for queue in found if QUEUE_NAME.match(queue)]
        for some in pieces(queues, max(1, _TABLES_DESCRIBED // self._levels)):
            tables = load_tables(db, [self._prefix + queue for queue in some])
            for queue in some:
                self._take_on(db, queue, tables[self._prefix + queue])

    def _take_on(self, db: Connection, queue: str, tables: dict[int, Table]) -> None:
        database = self._prefix + queue
        if not tables:  # as one name it is found whatever its case
            tables = tables_of(db, database)
        self.counts.open_queue(queue, None if tables else {})
        missing = set(range(1, self._levels + 1)) - tables.keys()
        if missing:  # it was made for fewer priorities, or never finished
            for statement in create_tables(database, sorted(missing)):
                db.execute(statement)
            tables = tables_of(db, database)
        self.tables[queue] = tables
        self.narrower[queue] = {
            priority: narrower
            for priority, table in tables.items()
            if (narrower := self._narrower(db, table)) is not None
        }

    def _narrower(self, db: Connection, table: Table) -> TableLimits | None:
        """What a table holds, and its server takes, where less than may be asked for."""
        if db.value_bytes >= min(self._most_body_bytes, table.limits.body_bytes):
            return table.narrower
        return table.limits._replace(body_bytes=db.value_bytes, body_cure=PACKET_CURE)

    def _snapshot(self) -> TableSnapshot:
        tables = {queue: tuple(tables.values()) for queue, tables in self.tables.items()}
        return TableSnapshot(self.server, tables, self.db)

    def _take_over(self, db: Connection, now_ms: int) -> Ownership:
        db.execute(create_database(self._owner_database))
        db.execute(create_owner_table(self._owner_database))
        known: dict[str, int] = dict(db.rows(b"SELECT name, value FROM " + self._owner_table))
        self._start_ms = start_ms = max(now_ms, known.get("start_ms", 0) + 1)
        # What is found may be older than what we left, or nothing: a replica, a copy put back.
        clean = bool(known.get("clean", 1)) and not self._ended_badly
        self._unmoved_commits = known.get("unmoved_commits", 0)
        self._next_local_id = max(
            known.get("next_local_id", 1), self._next_local_id, first_local_id(now_ms)
        )
        self._pass_used_ids(db, self.tables)
        self._marked_local_id = self._next_local_id
        values = {"start_ms": start_ms, "clean": 0, "next_local_id": self._next_local_id}
        self.transact(now_ms, lambda tx: self._remember(tx, values))
        self._ended_badly = True
        return Ownership(start_ms, clean)

    def _pass_used_ids(self, db: Connection, queues: Iterable[str]) -> None:
        """Go on above every id that their tables have given out: PinLater's, or a stranger's."""
        tables = {self._prefix + queue: self.tables[queue].values() for queue in queues}
        for some in pieces(list(tables), max(1, _TABLES_READ // self._levels)):
            try:
                last = last_local_id(db, {name: tables[name] for name in some})
            except FAULTS as fault:
                if not is_locked(fault):
                    raise
                # One by one: the last statement has to name the queue that is locked.
                last = max(last_local_id(db, {name: tables[name]}) for name in some)
            self._next_local_id = max(self._next_local_id, last + 1)

    def close(self) -> None:
        """Safe to repeat. An end that can't be noted counts as unclean."""
        if self._db is not None and not self.trouble:
            values = {"clean": 1, "next_local_id": self._next_local_id}
            with contextlib.suppress(StorageError):
                self.transact(0, lambda tx: self._remember(tx, values))
                self._ended_badly = False
                with self.reading():
                    self._lock.release(self.db)
        self._abandon()

    def _abandon(self) -> None:
        self.counts.close()
        db, self._db = self._db, None
        if db is not None:
            db.close()

    def heartbeat(self) -> None:
        """Let the server hear from us before it takes us for dead. One that has become a replica
        keeps no owner: it would refuse all that we write, or, from an administrator, accept it."""
        db, now = self.db, self._clock.monotonic()
        if now - self._heard_at < self._lease_seconds / 3:
            return
        with self.reading():
            try:
                self._check_writable(db)
            except StorageError as error:
                self.trouble = error.message
                raise
        self._heard_at = now

    # --- reading and writing -----------------------------------------------------------------

    @property
    def db(self) -> Connection:
        """The connection, for reading."""
        if self._db is None:
            raise StorageError(f"{self} is not open")
        if self.trouble:
            raise StorageNotCommitted(f"{self} must be opened anew: {self.trouble}")
        return self._db

    def transact(self, now_ms: int, work: Callable[[Transaction], T]) -> T:
        """`work` in one durable transaction. It may be called again, if a stranger's locks or ids,
        or jobs in an unexpected state, get in its way: nothing is kept of what it did before."""
        careful, attempts_left = False, _ATTEMPTS
        while True:
            db = self.db
            tx = Transaction(db, now_ms, careful=careful)
            marked_local_id = self._marked_local_id
            try:
                result = work(tx)
                self._note(tx)
            except Misfit as misfit:
                self._marked_local_id = marked_local_id
                self._roll_back(db, misfit)
                careful = True
                continue
            except FAULTS as fault:
                self._marked_local_id = marked_local_id
                self._roll_back(db, fault)
                if is_duplicate(fault) and tx.inserts_into:
                    self.counts.suspects.add(tx.inserts_into)
                attempts_left -= 1
                self._prepare_to_repeat(db, fault, attempts_left)
                continue
            except BaseException as fault:
                self._marked_local_id = marked_local_id
                self._roll_back(db, fault)
                raise
            try:
                self._commit(tx)
            except StorageLocked:
                self._marked_local_id = marked_local_id
                raise
            self.counts.add(tx.depth_changes)
            return result

    def _note(self, tx: Transaction) -> None:
        """What the owner's table has to remember of a transaction."""
        if self._next_local_id > self._marked_local_id:
            self._marked_local_id = self._next_local_id + _RESERVED_IDS
            self._remember(tx, {"next_local_id": self._marked_local_id})
        tx.send()
        if tx.changed and tx.witness is None:
            # Checkpoints alone: jobs that stay in their state may well look as they did before.
            self._unmoved_commits += 1
            self._remember(tx, {"unmoved_commits": self._unmoved_commits})
            tx.send()

    def _roll_back(self, db: Connection, fault: BaseException) -> None:
        """Undo the transaction. One whose connection is lost the server undoes by itself, but we
        own nothing then."""
        try:
            if is_lost(fault):
                raise fault
            db.roll_back()
        except FAULTS as lost:
            self._lose(lost, undone=True)

    def _prepare_to_repeat(self, db: Connection, fault: BaseException, attempts_left: int) -> None:
        """After a fault of a transaction that is rolled back. Raises what stands for it, unless
        that was an accident with strangers: their locks, or ids that they have used."""
        if attempts_left > 0 and is_duplicate(fault):
            with self.reading():
                self._pass_used_ids(db, self.tables)
        elif attempts_left <= 0 or not is_retryable(fault):
            if is_gone(fault) or is_read_only(fault):
                self._lose(fault, undone=True)
            raise self._not_committed(db, fault) from fault

    def _not_committed(self, db: Connection, fault: BaseException) -> StorageError:
        """What stands for the fault of a statement that changed nothing."""
        error = storage_error(fault, str(self), undone=True)
        if not is_locked(fault):
            return error
        # The server does not say which table is locked. A statement names one queue at most; a
        # COMMIT, or a statement on the owner's table, none: then a backup has locked everything.
        named = self._queue_named.search(db.last_statement)
        self.counts.cancel()  # an ALTER that waits for a count to end locks the owner out
        return StorageLocked(named[1].decode() if named else "", error.message)

    def _commit(self, tx: Transaction) -> None:
        """Returns if all of it is kept, perhaps by a connection that is lost by then."""
        try:
            tx.db.execute(b"COMMIT")
        except FAULTS as fault:
            if is_locked(fault):  # the server has undone the transaction
                self._roll_back(tx.db, fault)
                raise self._not_committed(tx.db, fault) from fault
            self.trouble = f"its connection was lost within a commit: {describe(fault)}"
            tx.db.close()
            if tx.witness is not None and not self._was_committed(tx.witness, fault):
                raise StorageNotCommitted(
                    f"{self}: {describe(fault)}; that commit was not kept"
                ) from fault

    def _was_committed(self, last_change: witness.Witness, fault: BaseException) -> bool:
        """Whether a transaction was kept whose COMMIT ended with `fault`, as its server tells on
        another connection. Raises StorageError if that can't be found out."""
        try:
            with closing(self._connect(self._answer_seconds * _LOOK_UP_PART)) as db:
                self._lock.take(db)
                self._check_writable(db)
                self._check_still_ours(db)
                committed = witness.was_committed(db, last_change)
                with contextlib.suppress(*FAULTS):  # it ends with `db` in any case
                    self._lock.release(db)
                return committed
        except (StorageError, *FAULTS) as unable:
            why = unable.message if isinstance(unable, StorageError) else describe(unable)
            raise StorageError(
                f"{self}: {describe(fault)}; whether the last commit was kept is not known, and "
                f"can't be looked up: {why}"
            ) from fault

    def _check_still_ours(self, db: Connection) -> None:
        """Every owner writes when it took over. Between our connection's end and `db`'s lock there
        may have been another."""
        rows = db.rows(b"SELECT value FROM " + self._owner_table + b" WHERE name = 'start_ms'")
        if rows != ((self._start_ms,),):
            raise StorageError("another process has owned the shard meanwhile")

    def _lose(self, fault: BaseException, *, undone: bool = False) -> NoReturn:
        self.trouble = describe(fault)
        error = storage_error(fault, str(self), undone=undone)
        queue = self._gone_queue(fault) if undone else ""
        raise (QueueGone(queue, error.message) if queue else error) from fault

    def _gone_queue(self, fault: BaseException) -> str:
        """The queue whose database is gone, as the fault of a statement tells; "" if none is. A
        table that is gone is made anew when the store is opened."""
        database = gone_database(fault)
        queue = database.removeprefix(self._prefix)
        if self._db is None or queue == database or queue not in self.tables:
            return ""
        try:
            there = self._db.rows(
                b"SELECT 1 FROM information_schema.schemata WHERE schema_name = "
                + quote_text(database)
            )
        except FAULTS:
            return ""
        return "" if there else queue

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Around what changes nothing."""
        try:
            yield
        except FAULTS as fault:
            if is_lost(fault) or is_gone(fault):
                self._lose(fault, undone=True)
            raise self._not_committed(self.db, fault) from fault

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Around what is no transaction and changes something: after a fault, nobody knows."""
        try:
            yield
        except FAULTS as fault:
            if is_locked(fault):  # it has not begun
                raise self._not_committed(self.db, fault) from fault
            self._lose(fault)

    def _remember(self, tx: Transaction, values: dict[str, int]) -> None:
        """The first of `values` differs from what was there before."""
        rows = b", ".join(b"(%s, %d)" % (quote_text(name), value) for name, value in values.items())
        tx.run([b"REPLACE INTO " + self._owner_table + b" (name, value) VALUES " + rows])
        if tx.witness is None:
            name, value = next(iter(values.items()))
            tx.witness = witness.remembered(self._owner_table, name, value)

    # --- queues ------------------------------------------------------------------------------

    def create_queue(self, queue: str) -> None:
        db = self.db
        with self.reading():
            db.execute(create_database(self._prefix + queue))
            self._take_on(db, queue, {})
            self._pass_used_ids(db, [queue])

    def delete_queue(self, queue: str) -> None:
        """A server drops a database table by table: if that ends half-way, nobody knows how far."""
        db = self.db
        self.counts.cancel()
        statement = b"DROP DATABASE IF EXISTS " + quote_name(self._prefix + queue)
        if db.is_mariadb:
            statement = _WAIT_FOR_LOCKS + statement
        with self._guarded(), db.patiently(_DROP_SECONDS):
            db.execute(statement)
        del self.tables[queue], self.narrower[queue]
        self.counts.drop_queue(queue)
        for state in JobState:
            self._sweeps_due.pop((queue, state), None)

    # --- what is kept in memory --------------------------------------------------------------

    def tables_of(self, queue: str) -> dict[int, Table]:
        tables = self.tables.get(queue)
        if tables is None:
            raise QueueNotFound(queue)
        return tables

    def tables_to_sweep(self, queue: str, state: JobState) -> list[Table]:
        """Those with jobs in `state` that may be due, highest priority first: those known to have
        any, and now and then all, for what a stranger does is in no count of ours."""
        tables, depths = self.tables_of(queue), self.counts.of(queue)
        now, due = self._clock.monotonic(), self._sweeps_due
        if depths is None or now >= due.get((queue, state), -math.inf):
            due[queue, state] = now + _SWEEP_SECONDS
            return [table for _, table in sorted(tables.items())]
        return [table for level, table in sorted(tables.items()) if (level, state) in depths]

    def take_local_ids(self, count: int) -> range:
        """Ids never given out before. To be called within `transact`, which marks them as used."""
        first = self._next_local_id
        self._next_local_id = first + count
        return range(first, first + count)
