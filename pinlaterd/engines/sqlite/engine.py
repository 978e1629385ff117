"""SqliteEngine: the StorageEngine contract on one SQLite file, with a write-ahead log.

Commits are durable (synchronous=FULL). See schema.sql for the layout. What changes many jobs does
at most `limit` in a commit, and finds them by an index: its cost is bounded, however deep the
queues.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from pinlaterd.config.schema import ServerSettings, ShardSettings
from pinlaterd.engines.base import (
    NO_TIME_MS,
    Batch,
    BatchResult,
    Durability,
    Expired,
    Finding,
    Requeued,
    SearcherFactory,
    StorageEngine,
    StoredJob,
    TableLimits,
)
from pinlaterd.engines.counts import Depths
from pinlaterd.engines.sqlite import check
from pinlaterd.engines.sqlite.batch import (
    FailedAttempt,
    HeldClaim,
    apply_batch,
    fail_attempts,
    make_pending,
    read_payloads,
)
from pinlaterd.engines.sqlite.file import LIMITS, id_list, reading
from pinlaterd.engines.sqlite.searcher import SqliteSearcherFactory, stored_jobs
from pinlaterd.engines.sqlite.store import Store, Transaction
from pinlaterd.model import JobKey, JobState, Payload, PendingKey

_BEFORE_ALL = PendingKey(-(2**63), 0)
_new = tuple.__new__  # half the cost of calling a NamedTuple, for each job of a batch

_DELETE_JOBS = "DELETE FROM jobs WHERE local_id IN (SELECT value FROM json_each(?))"
_DELETE_PENDING = (
    "DELETE FROM pending WHERE queue = ? AND priority = ? AND run_after = ? AND local_id = ?"
)
_DELETE_CLAIMS = "DELETE FROM claims WHERE local_id IN (SELECT value FROM json_each(?))"
_DELETE_ENDED = "DELETE FROM ended WHERE local_id IN (SELECT value FROM json_each(?))"

_FIRST_PENDING = (
    "SELECT local_id FROM pending WHERE queue = :queue AND priority = :priority"
    " ORDER BY run_after, local_id LIMIT :limit"
)
_OLDEST_CLAIMS = (
    "SELECT local_id FROM claims INDEXED BY claims_by_age"
    " WHERE queue = :queue AND priority = :priority"
    " ORDER BY claimed_at, local_id LIMIT :limit"
)
_OLDEST_ENDED = (
    "SELECT local_id FROM ended INDEXED BY ended_by_age"
    " WHERE queue = :queue AND state = :state AND priority = :priority"
    " ORDER BY ended_at, local_id LIMIT :limit"
)

_EXPIRED_CLAIMS = (
    "SELECT claims.local_id, claims.claim_descriptor, jobs.attempts_remaining,"
    " jobs.run_after, jobs.custom_status"
    " FROM claims INDEXED BY claims_by_age CROSS JOIN jobs ON jobs.local_id = claims.local_id"
    " WHERE claims.queue = ? AND claims.priority = ?"
    " AND claims.claimed_at > ? AND claims.claimed_at < ?"
    " ORDER BY claims.claimed_at, claims.local_id LIMIT ?"
)


class SqliteEngine(Store, StorageEngine):
    """One shard in one file, with `-wal`, `-shm` and `.lock` files beside it.

    To be used by the thread that opens it, in a process that does not fork meanwhile.
    """

    limits = LIMITS

    def address(self) -> str:
        return ""

    def durability(self) -> Durability:
        return Durability("synchronous=FULL")

    def apply(self, batch: Batch, now_ms: int) -> BatchResult:
        with self.commit(now_ms) as tx:
            return apply_batch(self, tx, batch)

    # --- queues ------------------------------------------------------------------------------

    def queues(self) -> frozenset[str]:
        return frozenset(self.queue_ids)

    def narrower(self, queue: str) -> Mapping[int, TableLimits]:
        return {}

    def create_queue(self, queue: str, now_ms: int) -> None:
        if queue in self.queue_ids:
            return
        with self.commit(now_ms) as tx:
            [queue_id] = tx.db.execute(
                "INSERT INTO queues (name, created_at) VALUES (?, ?) RETURNING id", (queue, now_ms)
            ).fetchone()
        self.queue_ids[queue] = queue_id
        self.counts.open_queue(queue_id, {})

    def delete_queue(self, queue: str) -> None:
        queue_id = self.queue_ids.get(queue)
        if queue_id is None:
            return
        with self.commit(now_ms=0) as tx:
            tx.db.execute("UPDATE queues SET dropped = 1 WHERE id = ?", (queue_id,))
            tx.db.execute("DELETE FROM depths WHERE queue = ?", (queue_id,))
        del self.queue_ids[queue]
        self.counts.drop_queue(queue_id)

    # --- reads of bounded cost ---------------------------------------------------------------

    def read_pending(
        self, queue: str, priority: int, *, after: PendingKey | None, until_ms: int, limit: int
    ) -> Sequence[PendingKey]:
        with reading(self.path):
            rows = self.db.execute(
                "SELECT run_after, local_id FROM pending WHERE queue = ? AND priority = ?"
                " AND (run_after, local_id) > (?, ?) AND run_after <= ?"
                " ORDER BY run_after, local_id LIMIT ?",
                (self.queue_id(queue), priority, *(after or _BEFORE_ALL), until_ms, limit),
            )
            return [_new(PendingKey, row) for row in rows]

    def payloads(
        self, queue: str, priority: int, local_ids: Sequence[int], *, most_bytes: int
    ) -> Sequence[Payload | None]:
        with reading(self.path):
            db, queue_id = self.db, self.queue_id(queue)
            return read_payloads(db, queue_id, priority, local_ids, most_bytes=most_bytes)

    def lookup(
        self, queue: str, keys: Sequence[JobKey], *, include_body: bool
    ) -> Sequence[StoredJob]:
        wanted = set(keys)
        with reading(self.path):
            jobs = stored_jobs(
                self.db,
                self.queue_id(queue),
                (key.local_id for key in keys),
                with_body=include_body,
            )
            return [job for job in jobs if job.key in wanted]

    def depths(self, queues: Collection[str] | None = None) -> Mapping[str, Depths | None]:
        if corrections := self.counts.poll():
            with self.commit(now_ms=0) as tx:
                tx.depth_changes.update(corrections)
        ids = self.queue_ids
        wanted = ids if queues is None else ids.keys() & queues
        return {queue: self.counts.of(ids[queue]) for queue in wanted}

    def suspects(self) -> Collection[str]:
        return {self.name_of(queue_id) for queue_id in self.counts.suspects}

    def recount(self, queue: str) -> None:
        self.counts.recount(self.queue_id(queue))

    @property
    def damage(self) -> str:
        return self.counts.damage

    def check(self, *, repair: bool) -> Sequence[Finding]:
        self.counts.find_damage()  # left to the next owner if this does not end
        with reading(self.path):
            found = [
                Finding(self.name_of(queue_id), problem, jobs)
                for queue_id, problem, jobs in check.find(self.db)
            ]
            found += [
                Finding(self.name_of(queue_id), f"{state.name} jobs counted wrong", abs(jobs))
                for (queue_id, _, state), jobs in self._miscounted().items()
            ]
        if repair and found:
            with self.commit(now_ms=0) as tx:
                check.repair(tx.db)
                tx.depth_changes.update(self._miscounted())
        if repair or not found:
            self.counts.checked()
        return found

    def _miscounted(self) -> Mapping[tuple[int, int, JobState], int]:
        """How many jobs more there are than the depths say."""
        return {
            key: jobs
            for queue_id in self.queue_ids.values()
            for key, jobs in self.counts.differences(
                queue_id, check.count_jobs(self.db, queue_id)
            ).items()
        }

    def oldest_failed(self, queue: str, priority: int, *, limit: int) -> Sequence[int]:
        with reading(self.path):
            rows = self.db.execute(
                "SELECT ended_at FROM ended WHERE queue = ? AND state = 3 AND priority = ?"
                " ORDER BY ended_at, local_id LIMIT ?",
                (self.queue_id(queue), priority, limit),
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
        with self.commit(now_ms) as tx:
            queue_id = self.queue_id(queue)
            keys = self._oldest(queue_id, JobState.FAILED, priority, limit)
            ids = id_list([key.local_id for key in keys])
            tx.db.execute(
                "UPDATE jobs SET attempts_allowed = max(attempts_allowed, ?),"
                " attempts_remaining = ?, run_after = ?, updated_at = ?"
                " WHERE local_id IN (SELECT value FROM json_each(?))",
                (attempts, attempts, run_after_ms, tx.now_ms, ids),
            )
            tx.db.execute(_DELETE_ENDED, (ids,))
            requeued = [Requeued(priority, PendingKey(run_after_ms, key.local_id)) for key in keys]
            make_pending(tx, queue_id, requeued, JobState.FAILED)
        return requeued

    def delete_jobs(
        self, queue: str, state: JobState, priority: int, *, limit: int
    ) -> Sequence[JobKey]:
        """The first to be handed out, or the oldest."""
        with self.commit(now_ms=0) as tx:
            queue_id = self.queue_id(queue)
            keys = self._oldest(queue_id, state, priority, limit)
            _delete_known(tx, queue_id, state, keys)
        return keys

    def _oldest(self, queue_id: int, state: JobState, priority: int, limit: int) -> list[JobKey]:
        statement = {
            JobState.PENDING: _FIRST_PENDING,
            JobState.IN_PROGRESS: _OLDEST_CLAIMS,
        }.get(state, _OLDEST_ENDED)
        rows = self.db.execute(
            statement,
            {"queue": queue_id, "state": int(state), "priority": priority, "limit": limit},
        )
        return [JobKey(priority, local_id) for (local_id,) in rows]

    def delete_keys(self, queue: str, state: JobState, keys: Sequence[JobKey]) -> Sequence[JobKey]:
        with self.commit(now_ms=0) as tx:
            queue_id = self.queue_id(queue)
            rows = tx.db.execute(
                "SELECT priority, local_id FROM job_records"
                " WHERE local_id IN (SELECT value FROM json_each(?)) AND queue = ? AND state = ?",
                (id_list([key.local_id for key in keys]), queue_id, int(state)),
            )
            there = {JobKey(*row) for row in rows}
            found = [key for key in dict.fromkeys(keys) if key in there]
            _delete_known(tx, queue_id, state, found)
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
        queue_id = self.queue_id(queue)
        priorities = self.priorities_holding(queue_id, JobState.IN_PROGRESS)
        if not priorities:
            return Expired([], failed=0)  # every queue is looked at, and most are at rest
        attempts: list[FailedAttempt] = []
        with self.commit(now_ms) as tx:
            for priority in priorities:
                rows = tx.db.execute(
                    _EXPIRED_CLAIMS,
                    (
                        queue_id,
                        priority,
                        claimed_after_ms,
                        claimed_before_ms,
                        limit - len(attempts),
                    ),
                )
                for local_id, *rest in rows:
                    claim = HeldClaim(JobKey(priority, local_id), *rest)
                    attempts.append(FailedAttempt(claim, now_ms, claim.custom_status))
            retried = fail_attempts(tx, queue_id, attempts)
        return Expired(retried, failed=len(attempts) - len(retried))

    def collect_garbage(
        self, queue: str, state: JobState, *, updated_before_ms: int, limit: int
    ) -> int:
        queue_id = self.queue_id(queue)
        priorities = self.priorities_holding(queue_id, state)
        if not priorities:
            return 0
        deleted = 0
        with self.commit(now_ms=0) as tx:
            for priority in priorities:
                rows = tx.db.execute(
                    "SELECT local_id FROM ended"
                    " WHERE queue = ? AND state = ? AND priority = ? AND ended_at < ?"
                    " ORDER BY ended_at LIMIT ?",
                    (queue_id, int(state), priority, updated_before_ms, limit - deleted),
                ).fetchall()
                keys = [JobKey(priority, local_id) for (local_id,) in rows]
                _delete_known(tx, queue_id, state, keys)
                deleted += len(keys)
        return deleted

    def heartbeat(self) -> None:
        """The lock is the operating system's: it lasts as long as we do."""

    def vacuum(self, *, limit: int) -> bool:
        """Remove jobs of a deleted queue, or the queue itself once it is empty."""
        with self.commit(now_ms=0) as tx:
            row = tx.db.execute("SELECT id FROM queues WHERE dropped LIMIT 1").fetchone()
            if row is None:
                return False
            if _remove_rows(tx, row[0], limit):
                return True
            tx.db.execute("DELETE FROM queues WHERE id = ?", row)
            return (
                tx.db.execute("SELECT 1 FROM queues WHERE dropped LIMIT 1").fetchone() is not None
            )

    def searcher(self) -> SearcherFactory:
        return SqliteSearcherFactory(self.path.absolute())


def make_engine(shard: ShardSettings, _server: ServerSettings) -> SqliteEngine:
    return SqliteEngine(Path(shard.file))


def _delete_known(tx: Transaction, queue_id: int, state: JobState, keys: Sequence[JobKey]) -> None:
    """Delete jobs that are known to be in `state`."""
    if not keys:
        return
    ids = id_list([key.local_id for key in keys])
    if state is JobState.PENDING:
        pending_rows = tx.db.execute(
            "SELECT queue, priority, run_after, local_id FROM jobs"
            " WHERE local_id IN (SELECT value FROM json_each(?))",
            (ids,),
        ).fetchall()
        tx.db.executemany(_DELETE_PENDING, pending_rows)
    else:
        tx.db.execute(_DELETE_CLAIMS if state is JobState.IN_PROGRESS else _DELETE_ENDED, (ids,))
    tx.db.execute(_DELETE_JOBS, (ids,))
    tx.moved(Counter([(queue_id, key.priority) for key in keys]), state, None)


def _remove_rows(tx: Transaction, queue_id: int, limit: int) -> bool:
    """Remove up to `limit` jobs of a deleted queue. False if there are none."""
    which = (queue_id, limit)
    rows = tx.db.execute(
        "SELECT queue, priority, run_after, local_id FROM pending WHERE queue = ? LIMIT ?", which
    ).fetchall()
    if rows:
        tx.db.executemany(_DELETE_PENDING, rows)
        tx.db.execute(_DELETE_JOBS, (id_list([row[-1] for row in rows]),))
        return True
    for select, delete in (
        ("SELECT local_id FROM claims WHERE queue = ? LIMIT ?", _DELETE_CLAIMS),
        ("SELECT local_id FROM ended WHERE queue = ? LIMIT ?", _DELETE_ENDED),
    ):
        local_ids = [local_id for (local_id,) in tx.db.execute(select, which)]
        if local_ids:
            tx.db.execute(delete, (id_list(local_ids),))
            tx.db.execute(_DELETE_JOBS, (id_list(local_ids),))
            return True
    return False
