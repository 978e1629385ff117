"""SqliteEngine: the StorageEngine contract on one SQLite file, with a write-ahead log.

Commits are durable (synchronous=FULL). See schema.sql for the layout.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from pinlaterd.engines.base import (
    NO_TIME_MS,
    Batch,
    BatchResult,
    Durability,
    Expired,
    Finding,
    Ownership,
    Requeued,
    SearcherFactory,
    StorageEngine,
    StoredJob,
    TableLimits,
)
from pinlaterd.engines.counts import Depths
from pinlaterd.engines.sqlite import check, slices
from pinlaterd.engines.sqlite.batch import apply_batch
from pinlaterd.engines.sqlite.faults import reading
from pinlaterd.engines.sqlite.limits import LIMITS
from pinlaterd.engines.sqlite.records import read_payloads, stored_jobs
from pinlaterd.engines.sqlite.searcher import SqliteSearcherFactory
from pinlaterd.engines.sqlite.snapshot import count_jobs
from pinlaterd.engines.sqlite.store import Store
from pinlaterd.model import JobKey, JobState, Payload, PendingKey

_BEFORE_ALL = PendingKey(-(2**63), 0)
_new = tuple.__new__  # half the cost of calling a NamedTuple, for each job of a batch


class SqliteEngine(StorageEngine):
    """One shard in one file, with `-wal`, `-shm` and `.lock` files beside it.

    To be used by the thread that opens it, in a process that does not fork meanwhile.
    """

    limits = LIMITS

    def __init__(self, path: Path) -> None:
        self._store = Store(path)
        self._path = path

    @property
    def trouble(self) -> str:
        return self._store.trouble

    def open(self, now_ms: int) -> Ownership:
        return self._store.open(now_ms)

    def close(self) -> None:
        self._store.close()

    def address(self) -> str:
        return ""

    def durability(self) -> Durability:
        return Durability("synchronous=FULL")

    def apply(self, batch: Batch, now_ms: int) -> BatchResult:
        with self._store.commit(now_ms) as tx:
            return apply_batch(self._store, tx, batch)

    # --- queues ------------------------------------------------------------------------------

    def queues(self) -> frozenset[str]:
        return frozenset(self._store.queue_ids)

    def narrower(self, queue: str) -> Mapping[int, TableLimits]:
        return {}

    def create_queue(self, queue: str, now_ms: int) -> None:
        if queue in self._store.queue_ids:
            return
        with self._store.commit(now_ms) as tx:
            [queue_id] = tx.db.execute(
                "INSERT INTO queues (name, created_at) VALUES (?, ?) RETURNING id", (queue, now_ms)
            ).fetchone()
        self._store.queue_ids[queue] = queue_id
        self._store.counts.open_queue(queue_id, {})

    def delete_queue(self, queue: str) -> None:
        queue_id = self._store.queue_ids.get(queue)
        if queue_id is None:
            return
        with self._store.commit(now_ms=0) as tx:
            tx.db.execute("UPDATE queues SET dropped = 1 WHERE id = ?", (queue_id,))
            tx.db.execute("DELETE FROM depths WHERE queue = ?", (queue_id,))
        del self._store.queue_ids[queue]
        self._store.counts.drop_queue(queue_id)

    # --- reads of bounded cost ---------------------------------------------------------------

    def read_pending(
        self, queue: str, priority: int, *, after: PendingKey | None, until_ms: int, limit: int
    ) -> Sequence[PendingKey]:
        with reading(self._path):
            rows = self._store.db.execute(
                "SELECT run_after, local_id FROM pending WHERE queue = ? AND priority = ?"
                " AND (run_after, local_id) > (?, ?) AND run_after <= ?"
                " ORDER BY run_after, local_id LIMIT ?",
                (self._store.queue_id(queue), priority, *(after or _BEFORE_ALL), until_ms, limit),
            )
            return [_new(PendingKey, row) for row in rows]

    def payloads(
        self, queue: str, priority: int, local_ids: Sequence[int], *, most_bytes: int
    ) -> Sequence[Payload | None]:
        with reading(self._path):
            db, queue_id = self._store.db, self._store.queue_id(queue)
            return read_payloads(db, queue_id, priority, local_ids, most_bytes=most_bytes)

    def lookup(
        self, queue: str, keys: Sequence[JobKey], *, include_body: bool
    ) -> Sequence[StoredJob]:
        wanted = set(keys)
        with reading(self._path):
            jobs = stored_jobs(
                self._store.db,
                self._store.queue_id(queue),
                (key.local_id for key in keys),
                with_body=include_body,
            )
            return [job for job in jobs if job.key in wanted]

    def depths(self, queues: Collection[str] | None = None) -> Mapping[str, Depths | None]:
        store = self._store
        if corrections := store.counts.poll():
            with store.commit(now_ms=0) as tx:
                tx.depth_changes.update(corrections)
        ids = store.queue_ids
        wanted = ids if queues is None else ids.keys() & queues
        return {queue: store.counts.of(ids[queue]) for queue in wanted}

    def suspects(self) -> Collection[str]:
        return {self._store.name_of(queue_id) for queue_id in self._store.counts.suspects}

    def recount(self, queue: str) -> None:
        self._store.counts.recount(self._store.queue_id(queue))

    @property
    def damage(self) -> str:
        return self._store.counts.damage

    def check(self, *, repair: bool) -> Sequence[Finding]:
        store = self._store
        store.counts.find_damage()  # left to the next owner if this does not end
        with reading(self._path):
            found = [
                Finding(store.name_of(queue_id), problem, jobs)
                for queue_id, problem, jobs in check.find(store.db)
            ]
            found += [
                Finding(store.name_of(queue_id), f"{state.name} jobs counted wrong", abs(jobs))
                for (queue_id, _, state), jobs in self._miscounted().items()
            ]
        if repair and found:
            with store.commit(now_ms=0) as tx:
                check.repair(tx.db)
                tx.depth_changes.update(self._miscounted())
        if repair or not found:
            store.counts.checked()
        return found

    def _miscounted(self) -> Mapping[tuple[int, int, JobState], int]:
        """How many jobs more there are than the depths say."""
        store = self._store
        return {
            key: jobs
            for queue_id in store.queue_ids.values()
            for key, jobs in store.counts.differences(
                queue_id, count_jobs(store.db, queue_id)
            ).items()
        }

    def oldest_failed(self, queue: str, priority: int, *, limit: int) -> Sequence[int]:
        with reading(self._path):
            rows = self._store.db.execute(
                "SELECT ended_at FROM ended WHERE queue = ? AND state = 3 AND priority = ?"
                " ORDER BY ended_at, local_id LIMIT ?",
                (self._store.queue_id(queue), priority, limit),
            )
            return [ended_at for (ended_at,) in rows]

    # --- writes in slices --------------------------------------------------------------------

    def retry_failed(
        self,
        queue: str,
        priority: int,
        *,
        attempts: int,
        run_after_ms: int,
        limit: int,
        now_ms: int,
    ) -> Sequence[Requeued]:
        with self._store.commit(now_ms) as tx:
            return slices.retry_failed(
                tx,
                self._store.queue_id(queue),
                priority,
                attempts=attempts,
                run_after_ms=run_after_ms,
                limit=limit,
            )

    def delete_jobs(
        self, queue: str, state: JobState, priority: int, *, limit: int
    ) -> Sequence[JobKey]:
        with self._store.commit(now_ms=0) as tx:
            queue_id = self._store.queue_id(queue)
            keys = slices.first_jobs(tx.db, queue_id, state, priority, limit)
            slices.delete_known(tx, queue_id, state, keys)
        return keys

    def delete_keys(self, queue: str, state: JobState, keys: Sequence[JobKey]) -> Sequence[JobKey]:
        with self._store.commit(now_ms=0) as tx:
            queue_id = self._store.queue_id(queue)
            found = slices.still_in_state(tx.db, queue_id, state, keys)
            slices.delete_known(tx, queue_id, state, found)
        return found

    def release_expired(
        self,
        queue: str,
        *,
        claimed_before_ms: int,
        limit: int,
        now_ms: int,
        claimed_after_ms: int = NO_TIME_MS,
    ) -> Expired:
        queue_id = self._store.queue_id(queue)
        if not self._store.priorities_holding(queue_id, JobState.IN_PROGRESS):
            return Expired([], failed=0)  # upkeep looks at every queue, and most are at rest
        with self._store.commit(now_ms) as tx:
            return slices.release_expired(
                self._store,
                tx,
                queue_id,
                claimed_ms=(claimed_after_ms, claimed_before_ms),
                limit=limit,
            )

    def collect_garbage(
        self, queue: str, state: JobState, *, updated_before_ms: int, limit: int
    ) -> int:
        queue_id = self._store.queue_id(queue)
        if not self._store.priorities_holding(queue_id, state):
            return 0
        with self._store.commit(now_ms=0) as tx:
            return slices.collect_garbage(
                self._store,
                tx,
                queue_id,
                state,
                updated_before_ms=updated_before_ms,
                limit=limit,
            )

    def heartbeat(self) -> None:
        """The lock is the operating system's: it lasts as long as we do."""

    def vacuum(self, *, limit: int) -> bool:
        with self._store.commit(now_ms=0) as tx:
            return slices.remove_dropped_rows(tx, limit)

    def searcher(self) -> SearcherFactory:
        return SqliteSearcherFactory(self._path.absolute())
