"""SqliteEngine: the StorageEngine contract on one SQLite file, with a write-ahead log.

Commits are durable (synchronous=FULL). See schema.sql for the layout. What changes many jobs does
at most `limit` in a commit, and finds them by an index: its cost is bounded, however deep the
queues.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path

from pinlaterd.config.schema import ServerSettings, ShardSettings
from pinlaterd.engines.base import (
    CHECK_AGAIN_MS,
    LATEST_MS,
    NO_TIME_MS,
    TRIED_BYTES,
    Batch,
    BatchResult,
    Durability,
    Expired,
    ExpiredJobs,
    Finding,
    KeyHolder,
    Requeued,
    SearcherFactory,
    StorageEngine,
    StoredJob,
)
from pinlaterd.engines.batches import retry_at
from pinlaterd.engines.counts import Depths
from pinlaterd.engines.sqlite.batch import (
    FailedAttempt,
    apply_batch,
    fail_attempts,
    fail_expired,
    held_claims,
    read_payloads,
)
from pinlaterd.engines.sqlite.file import LIMITS, reading
from pinlaterd.engines.sqlite.options import (
    check_again,
    delete_options,
    forget_queue,
    note_retried,
    to_check,
)
from pinlaterd.engines.sqlite.runs import (
    COLUMNS,
    FAILED,
    IN_PROGRESS,
    Run,
    Span,
    count_jobs,
    find_damage,
    first_jobs,
    holding,
    oldest,
    repair_damage,
    spans,
    split,
)
from pinlaterd.engines.sqlite.searcher import SqliteSearcher, stored_jobs
from pinlaterd.engines.sqlite.store import Store, Transaction
from pinlaterd.model import JobKey, JobState, Payload, PendingKey, new_record

_BEFORE_ALL = PendingKey(-(2**63), 0)
_DELETE_JOBS = "DELETE FROM jobs WHERE local_id BETWEEN ? AND ?"
_RUNS_OF_QUEUE = f"SELECT {COLUMNS} FROM runs INDEXED BY runs_by_age WHERE queue = ? LIMIT ?"  # noqa: S608


class SqliteEngine(Store, StorageEngine):
    """One shard in one file, with `-wal`, `-shm` and `.lock` files beside it.

    To be used by the thread that opens it, in a process that does not fork meanwhile.
    """

    limits = LIMITS

    def durability(self) -> Durability:
        return Durability("synchronous=FULL")

    def apply(self, batch: Batch, now_ms: int) -> BatchResult:
        with self.commit(now_ms) as tx:
            return apply_batch(tx, batch)

    def try_enqueue(self, queue: str) -> None:
        """Find out whether there is room, which shows when the transaction is committed."""
        with self.commit(now_ms=0) as tx:
            tx.db.execute("REPLACE INTO meta VALUES ('room', zeroblob(?))", (TRIED_BYTES,))
        with self.commit(now_ms=0) as tx:
            tx.db.execute("DELETE FROM meta WHERE key = 'room'")

    # --- queues ------------------------------------------------------------------------------

    def queues(self) -> frozenset[str]:
        return frozenset(self.queue_ids)

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
        del self.queue_ids[queue]
        self.counts.drop_queue(queue_id)

    # --- reads of bounded cost ---------------------------------------------------------------

    def read_pending(
        self, queue: str, priority: int, *, after: PendingKey | None, until_ms: int, limit: int
    ) -> Sequence[PendingKey]:
        at_ms, behind_id = after or _BEFORE_ALL
        with reading(self.path):
            rows = self.db.execute(
                "SELECT at, first_id, last_id FROM runs WHERE queue = ? AND state = 0"
                " AND priority = ? AND (at, last_id) > (?, ?) AND at <= ?"
                " ORDER BY at, last_id LIMIT ?",
                (self.queue_id(queue), priority, at_ms, behind_id, until_ms, limit),
            )
            keys: list[PendingKey] = []
            for run_after_ms, first_id, last_id in rows:
                from_id = max(first_id, behind_id + 1) if run_after_ms == at_ms else first_id
                local_ids = range(from_id, last_id + 1)[: limit - len(keys)]
                keys += [new_record(PendingKey, (run_after_ms, local_id)) for local_id in local_ids]
                if len(keys) == limit:
                    break
            return keys

    def payloads(
        self, queue: str, priority: int, local_ids: Sequence[int], *, most_bytes: int
    ) -> Sequence[Payload | None]:
        with reading(self.path):
            db, queue_id = self.db, self.queue_id(queue)
            return read_payloads(db, queue_id, priority, local_ids, most_bytes=most_bytes)

    def lookup(
        self, queue: str, keys: Sequence[JobKey], *, include_body: bool
    ) -> Sequence[StoredJob]:
        wanted, queue_id = set(keys), self.queue_id(queue)
        with reading(self.path):
            jobs = stored_jobs(
                self.db,
                queue_id,
                (key.local_id for key in keys),
                with_body=include_body,
                with_options=queue_id in self.with_options,
            )
            return [job for job in jobs if job.key in wanted]

    def find_keys(self, queue: str, keys: Sequence[str]) -> Mapping[str, JobKey]:
        db, queue_id = self.db, self.queue_id(queue)
        if queue_id not in self.with_options:
            return {}
        with reading(self.path):
            return self.keys.find(db, queue_id, keys)

    def find_keys_of_all(self, keys: Sequence[str]) -> Mapping[str, KeyHolder]:
        db = self.db
        if not self.with_options:
            return {}
        with reading(self.path):
            return self.keys.find_of_all(db, keys)

    def depths(self, queues: Collection[str] | None = None) -> Mapping[str, Depths | None]:
        self.counts.add(self.counts.poll())
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
                for queue_id, problem, jobs in find_damage(self.db)
            ]
        if repair and found:
            with self.commit(now_ms=0) as tx:
                repair_damage(tx.db)
            for queue_id in self.queue_ids.values():
                self.counts.open_queue(queue_id, count_jobs(self.db, queue_id))
        if repair or not found:
            self.counts.checked()
        return found

    def oldest_failed(self, queue: str, priority: int, *, limit: int) -> Sequence[int]:
        with reading(self.path):
            runs = oldest(self.db, self.queue_id(queue), FAILED, priority, limit=limit)
            return [run.at_ms for run in first_jobs(runs, limit) for _ in run.local_ids]

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
            held, failed = self._oldest(queue, JobState.FAILED, priority, limit=limit)
            _retry(tx, held, [(run, run_after_ms) for run in sorted(failed)], attempts)
        return [
            Requeued(priority, PendingKey(run_after_ms, local_id))
            for run in failed
            for local_id in run.local_ids
        ]

    def retry_found(
        self,
        queue: str,
        run_afters: Mapping[JobKey, int],
        *,
        attempts: int,
        ended_before_ms: int,
        now_ms: int,
    ) -> Sequence[Requeued]:
        with self.commit(now_ms) as tx:
            wanted = spans([key.local_id for key in run_afters])
            held = self._ended(tx, queue, JobState.FAILED, wanted, ended_before_ms)
            failed = [
                (run.cut(key.local_id, key.local_id), run_afters[key])
                for run in split(held, wanted)[0]
                for key in [JobKey(run.priority, local_id) for local_id in run.local_ids]
                if key in run_afters
            ]
            _retry(tx, held, failed, attempts)
        return [
            Requeued(run.priority, PendingKey(run_after_ms, run.first_id))
            for run, run_after_ms in failed
        ]

    def _ended(
        self,
        tx: Transaction,
        queue: str,
        state: JobState,
        wanted: Sequence[Span],
        ended_before_ms: int,
    ) -> list[Run]:
        """Return the runs with jobs of `wanted` in `state`; of jobs that have ended, those that did
        before a time."""
        held = holding(tx.db, self.queue_id(queue), int(state), wanted)
        has_ended = state in (JobState.SUCCEEDED, JobState.FAILED)
        return [run for run in held if not has_ended or run.at_ms < ended_before_ms]

    def _oldest(
        self, queue: str, state: JobState, priority: int, *, limit: int, **bounds_ms: int
    ) -> tuple[list[Run], list[Run]]:
        """Find the first `limit` jobs by the time that counts in `state`: the runs that hold them,
        by local id, and the jobs, the oldest first."""
        held = oldest(self.db, self.queue_id(queue), int(state), priority, limit=limit, **bounds_ms)
        return sorted(held), first_jobs(held, limit)

    def delete_jobs(
        self, queue: str, state: JobState, priority: int, *, limit: int
    ) -> Sequence[JobKey]:
        """Delete the jobs that would be handed out first, or the oldest."""
        with self.commit(now_ms=0) as tx:
            held, found = self._oldest(queue, state, priority, limit=limit)
            _delete(tx, held, found)
        return [JobKey(priority, local_id) for run in found for local_id in run.local_ids]

    def delete_found(
        self,
        queue: str,
        state: JobState,
        keys: Sequence[JobKey],
        *,
        ended_before_ms: int = LATEST_MS,
    ) -> Sequence[JobKey]:
        with self.commit(now_ms=0) as tx:
            wanted = spans([key.local_id for key in keys])
            held = self._ended(tx, queue, state, wanted, ended_before_ms)
            there = {
                JobKey(run.priority, local_id)
                for run in split(held, wanted)[0]
                for local_id in run.local_ids
            }
            found = [key for key in dict.fromkeys(keys) if key in there]
            _delete(tx, held, split(held, spans([key.local_id for key in found]))[0])
        return found

    def release_expired(
        self,
        queue: str,
        *,
        claimed_before_ms: int,
        limit: int,
        now_ms: int,
        claimed_after_ms: int = NO_TIME_MS,
        backoff_attempts: int = 0,
    ) -> Expired:
        priorities = self.priorities_holding(self.queue_id(queue), JobState.IN_PROGRESS)
        if not priorities:
            return Expired([], failed=0)  # every queue is looked at, and most are at rest
        bounds = {"from_ms": claimed_after_ms + 1, "to_ms": claimed_before_ms - 1}
        retried: list[Requeued] = []
        ended = 0
        with self.commit(now_ms) as tx:
            for priority in priorities:
                held, expired = self._oldest(
                    queue, JobState.IN_PROGRESS, priority, limit=limit - ended, **bounds
                )
                claims = held_claims(tx, expired).values()
                ended += len(claims)
                attempts = [
                    FailedAttempt(
                        one,
                        retry_at(now_ms, backoff_attempts, one.attempts_remaining),
                        one.custom_status,
                    )
                    for one in claims
                ]
                retried += fail_attempts(tx, held, sorted(expired), attempts)
        return Expired(retried, failed=ended - len(retried))

    @property
    def expiring(self) -> Collection[str]:
        if not self.expiring_ids:
            return ()
        return [queue for queue, number in self.queue_ids.items() if number in self.expiring_ids]

    def expire_jobs(self, queue: str, *, limit: int, now_ms: int) -> ExpiredJobs:
        db, queue_id, due = self.db, self.queue_id(queue), list[int]()
        if queue_id in self.with_options:
            with reading(self.path):
                due = to_check(db, queue_id, now_ms, limit)
        if not due:
            return ExpiredJobs([], 0)
        with self.commit(now_ms) as tx:
            failed = fail_expired(tx, queue_id, due)
            left = set(due).difference([key.local_id for key in failed])
            wanted = spans(left)
            running, _ = split(holding(tx.db, queue_id, IN_PROGRESS, wanted), wanted)
            again = {local_id for run in running for local_id in run.local_ids}
            check_again(tx.db, again, now_ms + CHECK_AGAIN_MS)
            check_again(tx.db, left - again, None)
        return ExpiredJobs(failed, len(due))

    def collect_garbage(
        self, queue: str, state: JobState, *, updated_before_ms: int, limit: int
    ) -> int:
        priorities = self.priorities_holding(self.queue_id(queue), state)
        if not priorities:
            return 0
        deleted = 0
        with self.commit(now_ms=0) as tx:
            for priority in priorities:
                held, found = self._oldest(
                    queue, state, priority, limit=limit - deleted, to_ms=updated_before_ms - 1
                )
                _delete(tx, held, found)
                deleted += sum([run.jobs for run in found])
        return deleted

    def heartbeat(self) -> None:
        """Do nothing: the lock is the operating system's, and lasts as long as the process."""

    def vacuum(self, *, limit: int) -> bool:
        """Remove jobs of a deleted queue, or the queue itself once it is empty."""
        with self.commit(now_ms=0) as tx:
            row = tx.db.execute("SELECT id FROM queues WHERE dropped LIMIT 1").fetchone()
            if row is None:
                return False
            rows = tx.db.execute(_RUNS_OF_QUEUE, (*row, limit))
            held = [Run(*values) for values in rows]
            if held:
                _delete(tx, sorted(held), first_jobs(held, limit))
                return True
            tx.db.execute("DELETE FROM queues WHERE id = ?", row)
            forget_queue(tx.db, *row)
            return (
                tx.db.execute("SELECT 1 FROM queues WHERE dropped LIMIT 1").fetchone() is not None
            )

    def searcher(self) -> SearcherFactory:
        return partial(SqliteSearcher, self.path.absolute())


def make_engine(shard: ShardSettings, _server: ServerSettings) -> SqliteEngine:
    return SqliteEngine(Path(shard.file))


def _retry(
    tx: Transaction, held: Sequence[Run], failed: Sequence[tuple[Run, int]], attempts: int
) -> None:
    """Make jobs PENDING, those of each run from its run-after on; the runs are parts of `held`, in
    order."""
    tx.db.executemany(
        "UPDATE jobs SET attempts_allowed = max(attempts_allowed, ?),"
        " attempts_remaining = ?, run_after = ?, updated_at = ?"
        " WHERE local_id BETWEEN ? AND ?",
        [
            (attempts, attempts, run_after_ms, tx.now_ms, run.first_id, run.last_id)
            for run, run_after_ms in failed
        ],
    )
    runs = [run for run, _ in failed]
    tx.move(held, runs, [run.pending(run_after_ms) for run, run_after_ms in failed])
    if runs and runs[0].queue_id in tx.store.with_options:
        retried = [(run.first_id, run.last_id) for run in runs]
        if note_retried(tx.db, retried):
            tx.expiring.add(runs[0].queue_id)


def _delete(tx: Transaction, held: Sequence[Run], found: Sequence[Run]) -> None:
    """Delete the jobs of `found`, which are parts of `held`."""
    tx.move(held, sorted(found))
    gone = [(run.first_id, run.last_id) for run in found]
    tx.db.executemany(_DELETE_JOBS, gone)
    if found and found[0].queue_id in tx.store.with_options:
        tx.store.keys.remove(tx.db, gone)
        delete_options(tx.db, gone)
