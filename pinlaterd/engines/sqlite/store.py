"""The owning connection and what the engine keeps in memory about its file.

`Store.commit` is the only way to write: one durable transaction, whose faults become
StorageNotCommitted where nothing was kept beyond doubt, else StorageError. After the latter the
store refuses everything until it is opened again. What is mirrored in memory (queues, depths, the
mark of local ids) changes only once a commit has succeeded.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from pinlaterd.clock import Clock
from pinlaterd.config.layout import sync_folder
from pinlaterd.engines.base import SINGLE, Term, first_local_id
from pinlaterd.engines.counts import Counts, Depths
from pinlaterd.engines.sqlite.file import (
    FAULTS,
    OwnerLock,
    connect_owner,
    connect_reader,
    is_damage,
    never_committed,
    reading,
    storage_error,
)
from pinlaterd.engines.sqlite.keys import KeyIndex
from pinlaterd.engines.sqlite.options import (
    add_columns,
    has_options,
    make_tables,
    may_expire,
    note_queue,
    queues_with_options,
)
from pinlaterd.engines.sqlite.runs import PUT_RUN, Run, count_jobs, find_damage, merged, split
from pinlaterd.errors import QueueNotFound, StorageError, StorageNotCommitted
from pinlaterd.model import QUEUE_NAME, JobState

log = logging.getLogger(__name__)

# Local ids are marked as used ahead in blocks, so that a commit seldom writes the mark.
_RESERVED_IDS = 10_000
_STATES = tuple(JobState)
_MOST_PRIORITIES = 127
_COUNTED_AT_ONCE = 500  # rows of `runs`


class Transaction:
    """One commit: statements on `db`, and what it changes in the depths."""

    def __init__(self, store: Store, now_ms: int) -> None:
        self.store = store
        self.db = store.db
        self.now_ms = now_ms
        self.depth_changes: defaultdict[tuple[int, int, JobState], int] = defaultdict(int)
        self.with_options: set[int] = set()  # queues that have got their first options
        self.expiring: set[int] = set()  # queues with new jobs that may expire

    def move(self, held: Sequence[Run], taken: Sequence[Run], new: Iterable[Run] = ()) -> None:
        """Move `taken`, which are parts of `held`, out of their state, into `new`; all in order."""
        _, left = split(held, taken)
        self.replace(held, [*left, *merged(new)])

    def replace(self, old: Sequence[Run], new: Sequence[Run]) -> None:
        """Write `new` in place of `old`."""
        changes = self.depth_changes
        for run in old:
            jobs = run.last_id - run.first_id + 1
            changes[run.queue_id, run.priority, _STATES[run.state]] -= jobs
        for run in new:
            jobs = run.last_id - run.first_id + 1
            changes[run.queue_id, run.priority, _STATES[run.state]] += jobs
        if gone := {run.first_id for run in old}.difference([run.first_id for run in new]):
            self.db.executemany(
                "DELETE FROM runs WHERE first_id = ?", [(first_id,) for first_id in gone]
            )
        self.db.executemany(PUT_RUN, new)

    def note_options(self, queue_id: int) -> None:
        """Make ready for options of a queue: tables are made with the first ones of all queues."""
        store = self.store
        if queue_id in store.with_options or queue_id in self.with_options:
            return
        if not (store.with_options or self.with_options):
            make_tables(self.db)
            store.keys.open(self.db)
        note_queue(self.db, queue_id)
        self.with_options.add(queue_id)


class FileSnapshot:
    """A snapshot to count jobs in (counts.py): a read transaction on its own connection."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with reading(path):
            self._db = connect_reader(path)
            self._db.execute("BEGIN")
            self._db.execute("SELECT 1 FROM meta").fetchone()  # the first read fixes what it sees

    def count(self, queue_id: int) -> Depths:
        with reading(self._path):
            return count_jobs(self._db, queue_id)

    def find_damage(self) -> str:
        with reading(self._path):
            found = find_damage(self._db)
        return "; ".join(f"{jobs:,} {problem}" for _, problem, jobs in found)

    def cancel(self) -> None:
        with contextlib.suppress(sqlite3.Error):  # closed
            self._db.interrupt()

    def close(self) -> None:
        self._db.close()


class Store:
    """One shard's file, open for its owner."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.queue_ids: dict[str, int] = {}
        # Queues, deleted ones included, that may have jobs with options.
        self.with_options: set[int] = set()
        self.expiring_ids: set[int] = set()  # queues that may have jobs with an expiry
        self.keys = KeyIndex()
        self._fence = 0
        self.counts = Counts(lambda: FileSnapshot(path), Clock(), self.name_of)
        self._lock = OwnerLock(path)
        self._db: sqlite3.Connection | None = None
        self._failure = ""  # why it must be reopened
        self._ended_badly = False  # whether we were the owner, until a clean end is noted
        self._next_local_id = 1
        self._marked_local_id = 1  # ids below this are marked as used in the file

    # --- ownership ---------------------------------------------------------------------------

    def open(self, now_ms: int, term: Term = SINGLE) -> int:
        if self._db is not None:
            raise StorageError(f"{self.path} is open already; close it first")
        with reading(self.path):
            self._lock.acquire()
            try:
                self._db = connect_owner(self.path)
                sync_folder(self.path.parent)  # SQLite syncs the files only
                self._failure = ""
                self._load()
                return self._take_over(now_ms)
            except BaseException:
                self._abandon()
                raise

    def _load(self) -> None:
        """Load what is not long to count; the rest is counted later, beside the owner."""
        db = self.db
        found = db.execute("SELECT name, id FROM queues WHERE NOT dropped").fetchall()
        self.queue_ids = {n: i for n, i in found if isinstance(n, str) and QUEUE_NAME.match(n)}
        for name, queue_id in found:
            if name not in self.queue_ids:
                text = (
                    "%s: queue %r (number %d) has no name that a queue can have; it is left alone"
                )
                log.error(text, self.path, name, queue_id)
        self.with_options = queues_with_options(db)
        if has_options(db):  # deleted queues leave the tables, which searches read
            add_columns(db)
        if self.with_options:
            self.keys.open(db)
        self.expiring_ids = {each for each in self.with_options if may_expire(db, each)}
        [many] = db.execute(
            "SELECT count(*) > ?1 FROM (SELECT 1 FROM runs LIMIT ?1 + 1)", (_COUNTED_AT_ONCE,)
        ).fetchone()
        for queue_id in self.queue_ids.values():
            self.counts.open_queue(queue_id, None if many else count_jobs(db, queue_id))

    def _take_over(self, now_ms: int) -> int:
        meta: dict[str, int] = dict(self.db.execute("SELECT key, value FROM meta"))
        start_ms = max(now_ms, meta.get("start_ms", 0) + 1)
        self._fence = meta.get("fence", 0)
        # What is found may be older than what we left, or nothing: a restored copy.
        clean = bool(meta.get("clean", 1)) and not self._ended_badly
        next_local_id = max(
            meta.get("next_local_id", 1), self._next_local_id, first_local_id(now_ms)
        )
        self._next_local_id = self._marked_local_id = next_local_id
        with self.commit(now_ms) as tx:
            self._set_meta(tx, {"start_ms": start_ms, "clean": 0, "next_local_id": next_local_id})
        self._ended_badly = True
        if not (clean and meta.get("sound", 1)):
            self.counts.find_damage()
        return start_ms

    def close(self) -> None:
        """Close the store. Safe to repeat. An end that can't be noted counts as unclean."""
        if self._db is not None and not self._failure:
            with contextlib.suppress(StorageError):
                end = {"clean": 1, "sound": self.counts.sound, "next_local_id": self._next_local_id}
                with self.commit(0) as tx:
                    self._set_meta(tx, end)
                    if self.with_options:
                        self.keys.move(tx.db, everything=True)
                self._ended_badly = False
        self._abandon()

    def _abandon(self) -> None:
        db, self._db = self._db, None
        try:
            self.counts.close()
            if db is not None:
                with reading(self.path):
                    db.close()
        finally:
            self._lock.release()

    # --- reading and writing -----------------------------------------------------------------

    @property
    def failure(self) -> str:
        return self._failure

    @property
    def fence(self) -> int:
        return self._fence

    @property
    def db(self) -> sqlite3.Connection:
        """The connection, for reading."""
        if self._db is None:
            raise StorageError(f"{self.path} is not open")
        if self._failure:
            raise StorageNotCommitted(f"{self.path} must be reopened: {self._failure}")
        return self._db

    @contextmanager
    def commit(self, now_ms: int) -> Iterator[Transaction]:
        """Make one durable transaction of the block."""
        tx = Transaction(self, now_ms)
        db = tx.db
        marked_local_id = self._marked_local_id
        try:
            db.execute("BEGIN IMMEDIATE")
            yield tx
            if self.with_options:
                self.keys.move(db)
            if self._next_local_id > self._marked_local_id:
                self._marked_local_id = self._next_local_id + _RESERVED_IDS
                self._set_meta(tx, {"next_local_id": self._marked_local_id})
        except BaseException as fault:
            self._marked_local_id = marked_local_id
            self._roll_back(db, fault)
            raise
        try:
            db.execute("COMMIT")
        except FAULTS as fault:
            self._marked_local_id = marked_local_id
            self._roll_back(db, fault, undone=never_committed(fault))
        self.counts.add(tx.depth_changes)
        self.with_options |= tx.with_options
        self.expiring_ids |= tx.expiring
        if self.with_options:
            self.keys.commit()

    def raise_fence(self, number: int) -> None:
        if number > self._fence:
            with self.commit(now_ms=0) as tx:
                self._set_meta(tx, {"fence": number})
            self._fence = number

    def _roll_back(
        self, db: sqlite3.Connection, fault: BaseException, *, undone: bool = True
    ) -> None:
        """Undo the transaction, and raise what stands for `fault` if it is the store's."""
        self.keys.undo()
        try:
            if db.in_transaction:
                db.execute("ROLLBACK")
        except FAULTS:
            undone = False
        if not undone or is_damage(fault):
            self._failure = "its last commit is in doubt"
        if not undone or isinstance(fault, FAULTS):
            raise storage_error(fault, self.path, undone=undone) from fault

    def _set_meta(self, tx: Transaction, values: dict[str, int]) -> None:
        tx.db.executemany("INSERT OR REPLACE INTO meta (key, value) VALUES (?, ?)", values.items())

    # --- what is kept in memory --------------------------------------------------------------

    def queue_id(self, queue: str) -> int:
        """Return the number of a queue that exists."""
        queue_id = self.queue_ids.get(queue)
        if queue_id is None:
            raise QueueNotFound(queue)
        return queue_id

    def take_local_ids(self, count: int) -> range:
        """Take ids never given out before. Call it within `commit`, which marks them used."""
        first = self._next_local_id
        self._next_local_id = first + count
        return range(first, first + count)

    def priorities_holding(self, queue_id: int, state: JobState) -> Sequence[int]:
        """Return the priorities at which a queue may have jobs in `state`, highest first."""
        depths = self.counts.of(queue_id)
        if depths is None:
            return range(1, _MOST_PRIORITIES + 1)
        return sorted(priority for priority, held in depths if held == state)

    def name_of(self, queue_id: int) -> str:
        names = (name for name, known_id in self.queue_ids.items() if known_id == queue_id)
        return next(names, f"number {queue_id}")
