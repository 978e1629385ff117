"""The owning connection and what the engine keeps in memory about its shard.

The server's lock `pinlaterd:<shard>` makes an owner: the connection that holds it, and writes,
owns the shard. The server ends both when it has heard nothing for `lease_seconds`, and with them
whatever transaction was under way. So a process that was frozen or cut off has lost the power to
write together with the lock, and finds out with its next statement; and the next owner knows that
nothing of its predecessor is under way. A lost connection is never replaced silently: the store
refuses everything until it is opened again, and looks then who owns the shard now.

All of this takes for granted that a connection of ours is one connection of the server, from its
beginning to its end. A proxy that passes bytes on keeps to that; one that multiplexes (hands each
transaction to any connection that it has) does not, and no shard may be behind it.

`Store.transact` is the only way to write jobs: one durable transaction. What is mirrored in memory
(queues, depths, the mark of local ids) changes only once it has been committed. Of a transaction
whose connection is lost before its COMMIT nothing is kept; if it is lost within the COMMIT, nobody
knows.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import NoReturn, TypeVar

from pinlaterd.clock import Clock
from pinlaterd.engines.base import SINGLE, Term, first_local_id
from pinlaterd.engines.counts import Counts
from pinlaterd.engines.mysql.connection import (
    DEADLOCK,
    DUPLICATE_KEY,
    FAULTS,
    READ_ONLY,
    MysqlAddress,
    MysqlConnection,
    code_of,
    describe,
    gone_database,
    is_gone,
    is_locked,
    is_lost,
    leaves_doubt,
    quote_name,
    quote_text,
    storage_error,
)
from pinlaterd.engines.mysql.ownership import ServerLock
from pinlaterd.engines.mysql.statements import KeysAreHeld, Transaction, UnexpectedRows
from pinlaterd.engines.mysql.tables import (
    ShardTables,
    TableSnapshot,
    create_database,
    create_table,
    limits_of,
    owner_database,
)
from pinlaterd.errors import QueueGone, StorageError, StorageLocked, StorageNotCommitted
from pinlaterd.model import JobState

T = TypeVar("T")

# Local ids are marked as used ahead in blocks, so that a commit seldom writes the mark.
_RESERVED_IDS = 10_000
# How often a transaction is begun.
_ATTEMPTS = 4
# After one in which jobs were not as expected, so many look first: where claims time out often, a
# late ack would make every batch be done twice.
_CAREFUL_TRANSACTIONS = 20


class Store:
    """One shard's databases, open for their owner."""

    def __init__(
        self,
        shard: str,
        server: MysqlAddress,
        *,
        levels: int,
        most_body_bytes: int,
        lease_seconds: float,
        answer_seconds: float,
        claim_room: int = 64,
        clock: Clock | None = None,
    ) -> None:
        """`levels`: how many priorities a queue has tables for. `most_body_bytes`: the longest body
        that will be asked for; `narrower` says if the server takes no such. `claim_room`: how many
        characters a claim has as a rule, in tables that are made from now on. `answer_seconds`: a
        server that takes longer for an answer is given up. `clock`: its monotonic time says when
        the server has to hear from us; what is stored bears the times that calls give."""
        self.limits = limits_of(shard)
        self.shard = shard
        self.server = server
        self.tables = ShardTables(
            shard, levels=levels, most_body_bytes=most_body_bytes, claim_room=claim_room
        )
        self.clock = clock or Clock()
        self.counts = Counts(self._snapshot, self.clock, str)
        self.expiring_queues: set[str] = set()  # queues that may have jobs with an expiry
        self.sweeps_due: dict[tuple[str, JobState], float] = {}  # monotonic seconds
        self._lease_seconds = lease_seconds
        self._answer_seconds = answer_seconds
        self._queue_named = re.compile(rb"`%b(\w+)`" % re.escape(self.tables.prefix.encode()))
        self._owner_database = owner_database(shard)
        self._owner_table = quote_name(self._owner_database, "owner")
        self._lock = ServerLock(shard, server)
        self._term = SINGLE  # of our latest ownership
        self._db: MysqlConnection | None = None
        self._heard_at = 0.0  # when a heartbeat last found the server as it has to be
        self._failure = ""  # why it must be reopened
        self._careful_left = 0  # transactions that look first
        self._next_local_id = 1
        self._fence = 0
        self._marked_local_id = 1  # ids below this are marked as used in the owner's table

    def __str__(self) -> str:
        return f"shard {self.shard} in {self.server}"

    # --- ownership ---------------------------------------------------------------------------

    def open(self, now_ms: int, term: Term = SINGLE) -> int:
        if self._db is not None:
            raise StorageError(f"{self} is open already; close it first")
        db = MysqlConnection(
            self.server,
            patience_seconds=self._answer_seconds,
            idle_seconds=self._lease_seconds,
            waits_for_locks=False,
        )
        if term.epoch:
            db.notice_cuts()
        self._db, self._failure, self._heard_at = db, "", self.clock.monotonic()
        try:
            with self.guarded():
                if term.epoch:
                    self._check_writable(db)
                self._lock.take_in(db, term, was_ours=term[:2] == self._term[:2])
                self._check_writable(db)
                self._term = term
                self.sweeps_due = {}
                for queue, had_tables in self.tables.load(db).items():
                    self.counts.open_queue(queue, None if had_tables else {})
                queues = self.tables.by_queue
                self.expiring_queues = {
                    queue for queue in queues if self.tables.may_expire(db, queue)
                }
                return self._take_over(db, now_ms)
        except BaseException:
            self._abandon()
            raise

    def _check_writable(self, db: MysqlConnection) -> None:
        """Refuse a read-only server: an administrator's account could write even there."""
        [[read_only]] = db.rows(b"SELECT @@read_only")
        if str(read_only).upper() not in ("0", "OFF"):
            raise StorageError(
                f"{self.server} is read-only, as replicas are; point master of shard {self.shard} "
                "in etc/shards.yaml to the primary, or make it writable"
            )

    def _snapshot(self) -> TableSnapshot:
        by_queue = self.tables.by_queue.items()
        tables = {queue: tuple(tables.values()) for queue, tables in by_queue}
        return TableSnapshot(self.server, tables, self.db)

    def _take_over(self, db: MysqlConnection, now_ms: int) -> int:
        db.execute(create_database(self._owner_database))
        db.execute(create_table("owner.sql", self._owner_database, "owner"))
        known: dict[str, int] = dict(db.rows(b"SELECT name, value FROM " + self._owner_table))
        start_ms = max(now_ms, known.get("start_ms", 0) + 1)
        # What is found may be older than what we left, or nothing: a replica, a restored copy.
        self._next_local_id = max(
            known.get("next_local_id", 1), self._next_local_id, first_local_id(now_ms)
        )
        self.pass_used_ids(db, self.tables.by_queue)
        self._marked_local_id = self._next_local_id
        self._fence = known.get("fence", 0)
        values = {"start_ms": start_ms, "next_local_id": self._next_local_id}
        self.transact(now_ms, lambda tx: self.remember(tx, values))
        return start_ms

    @property
    def fence(self) -> int:
        return self._fence

    def raise_fence(self, number: int) -> None:
        if number > self._fence:
            self.transact(0, lambda tx: self.remember(tx, {"fence": number}))
            self._fence = number

    def pass_used_ids(self, db: MysqlConnection, queues: Collection[str]) -> None:
        """Go on above every id that their tables have given out to others."""
        self._next_local_id = max(self._next_local_id, self.tables.last_local_id(db, queues) + 1)

    def close(self) -> None:
        """Close the store. Safe to repeat."""
        if self._db is not None and not self._failure:
            values = {"next_local_id": self._next_local_id}
            with contextlib.suppress(StorageError):
                self.transact(0, lambda tx: self.remember(tx, values))
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
        db, now = self.db, self.clock.monotonic()
        if now - self._heard_at < self._lease_seconds / 3 and not self._term.epoch:
            return
        with self.reading():
            try:
                self._check_writable(db)
            except StorageError as error:
                self._failure = error.message
                raise
        self._heard_at = now

    # --- reading and writing -----------------------------------------------------------------

    @property
    def failure(self) -> str:
        return self._failure

    @property
    def db(self) -> MysqlConnection:
        """The connection, for reading."""
        if self._db is None:
            raise StorageError(f"{self} is not open")
        if self._failure:
            raise StorageNotCommitted(f"{self} must be reopened: {self._failure}")
        return self._db

    def transact(self, now_ms: int, work: Callable[[Transaction], T]) -> T:
        """Do `work` in one durable transaction. It may be called again, if a foreign writer's locks
        or ids, or jobs in an unexpected state, get in its way: nothing is kept of what it did
        before."""
        careful, finds_keys, attempts_left = self._careful_left > 0, False, _ATTEMPTS
        self._careful_left -= careful
        while True:
            db = self.db
            tx = Transaction(db, now_ms, careful=careful, finds_keys=finds_keys)
            try:
                result = work(tx)
                marked_local_id = self._mark_ids(tx)
                tx.commit()
            except KeysAreHeld as held:
                self._roll_back(db, held)
                finds_keys = True
                continue
            except UnexpectedRows as unexpected:
                self._roll_back(db, unexpected)
                attempts_left -= careful
                if attempts_left < 0:
                    raise StorageNotCommitted(
                        f"{self}: jobs change while they are locked"
                    ) from None
                careful, self._careful_left = True, _CAREFUL_TRANSACTIONS
                continue
            except FAULTS as fault:
                if tx.committing and leaves_doubt(fault, db.last_statement):
                    db.close()
                    self._failure = describe(fault)
                    text = f"{self}: {self._failure}; whether the last commit was kept is not known"
                    raise StorageError(text) from fault
                self._roll_back(db, fault)
                attempts_left -= 1
                self._prepare_to_repeat(db, fault, attempts_left)
                continue
            except BaseException as fault:
                self._roll_back(db, fault)
                raise
            self._marked_local_id = marked_local_id
            self.counts.add(tx.depth_changes)
            return result

    def _mark_ids(self, tx: Transaction) -> int:
        """Return below which ids are marked as used in the owner's table once `tx` is committed."""
        marked = self._marked_local_id
        if self._next_local_id > marked:
            marked = self._next_local_id + _RESERVED_IDS
            self.remember(tx, {"next_local_id": marked})
        return marked

    def _roll_back(self, db: MysqlConnection, fault: BaseException) -> None:
        """Undo the transaction. One whose connection is lost the server undoes by itself, but we
        own nothing then."""
        try:
            if is_lost(fault):
                raise fault
            db.roll_back()
        except FAULTS as lost:
            self._lose(lost, undone=True)

    def _prepare_to_repeat(
        self, db: MysqlConnection, fault: BaseException, attempts_left: int
    ) -> None:
        """Prepare to repeat what is rolled back after a fault. Raises what stands for it, unless
        that was an accident with foreign writers: their locks, or ids that they have used."""
        code = code_of(fault)
        if code == DUPLICATE_KEY and (queue := self._named_queue(db)):
            self.counts.suspects.add(queue)
        if attempts_left > 0 and code == DUPLICATE_KEY:
            with self.reading():
                self.pass_used_ids(db, self.tables.by_queue)
        elif attempts_left <= 0 or code != DEADLOCK:
            if is_gone(fault) or code in READ_ONLY:
                self._lose(fault, undone=True)
            raise self._not_committed(db, fault) from fault

    def _not_committed(self, db: MysqlConnection, fault: BaseException) -> StorageError:
        """Make the error for the fault of a statement that changed nothing."""
        error = storage_error(fault, str(self), undone=True)
        if not is_locked(fault):
            return error
        # The server does not say which table is locked. A statement names one queue at most; a
        # COMMIT, or a statement on the owner's table, none: then a backup has locked everything.
        self.counts.cancel()  # an ALTER that waits for a count to end locks the owner out
        return StorageLocked(self._named_queue(db), error.message)

    def _named_queue(self, db: MysqlConnection) -> str:
        """Return the queue of the last statement; "" if it concerns none."""
        named = self._queue_named.search(db.last_statement)
        return named[1].decode() if named else ""

    def _lose(self, fault: BaseException, *, undone: bool = False) -> NoReturn:
        self._failure = describe(fault)
        error = storage_error(fault, str(self), undone=undone)
        queue = self._gone_queue(fault) if undone else ""
        raise (QueueGone(queue, error.message) if queue else error) from fault

    def _gone_queue(self, fault: BaseException) -> str:
        """Return the queue whose database is gone, as the fault of a statement tells; "" if none
        is. A table that is gone is made when the store is reopened."""
        database = gone_database(fault)
        queue = database.removeprefix(self.tables.prefix)
        if self._db is None or queue == database or queue not in self.tables.by_queue:
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
        """Guard what changes nothing."""
        try:
            yield
        except FAULTS as fault:
            if is_lost(fault) or is_gone(fault):
                self._lose(fault, undone=True)
            raise self._not_committed(self.db, fault) from fault

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Guard what is no transaction and changes something: after a fault, nobody knows."""
        try:
            yield
        except FAULTS as fault:
            if is_locked(fault):  # it has not begun
                raise self._not_committed(self.db, fault) from fault
            self._lose(fault)

    def remember(self, tx: Transaction, values: dict[str, int]) -> None:
        rows = b", ".join(b"(%s, %d)" % (quote_text(name), value) for name, value in values.items())
        tx.run(b"REPLACE INTO " + self._owner_table + b" (name, value) VALUES " + rows)

    def take_local_ids(self, count: int) -> range:
        """Take ids never given out before. Call it within `transact`, which marks them used."""
        first = self._next_local_id
        self._next_local_id = first + count
        return range(first, first + count)
