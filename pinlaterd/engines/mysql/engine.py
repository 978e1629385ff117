"""MysqlEngine: the StorageEngine contract on one shard's databases in a MySQL or MariaDB server.

See jobs.sql for the layout, store.py for ownership. What changes many jobs does at most `limit` in
a transaction, and finds them by an index. PinLater's tables have none by the time of a change:
there, claims that timed out are looked for among all that are IN_PROGRESS, the longest failed among
all that FAILED, and garbage by run-after, as it did.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial

from pinlaterd.config.schema import ServerSettings, ShardSettings
from pinlaterd.engines.base import (
    CHECK_AGAIN_MS,
    LATEST_MS,
    NO_TIME_MS,
    TRIED_BYTES,
    Batch,
    BatchResult,
    Durability,
    EnqueueOp,
    Expired,
    ExpiredJobs,
    Finding,
    KeyHolder,
    Requeued,
    SearcherFactory,
    StorageEngine,
    StoredJob,
    TableLimits,
)
from pinlaterd.engines.batches import retry_at
from pinlaterd.engines.counts import Depths
from pinlaterd.engines.mysql.batch import (
    HELD,
    FailedAttempt,
    apply_batch,
    fail_attempts,
    fail_expired,
    held_in,
)
from pinlaterd.engines.mysql.connection import WAIT_FOR_LOCKS, MysqlAddress, quote_name, quote_text
from pinlaterd.engines.mysql.searcher import MysqlSearcher
from pinlaterd.engines.mysql.statements import (
    UPDATED_AT_MS,
    Each,
    Transaction,
    by_table,
    change_options,
    check_again,
    find_keys,
    find_keys_of_all,
    in_ms,
    read_payloads,
    select,
    stored_job,
    whole_job,
)
from pinlaterd.engines.mysql.store import Store
from pinlaterd.engines.mysql.tables import JOB_STATES, Table, create_database
from pinlaterd.errors import address_of
from pinlaterd.model import Job, JobKey, JobState, Payload, PendingKey, new_record

# Dropping a queue with its files may take long.
_DROP_SECONDS = 300.0
# How often maintenance looks into tables in which it expects nothing: each look is a statement.
_SWEEP_SECONDS = 30.0
# What follows the host in a claim (`ClaimDescriptors` of the shard), if a source has 14 characters.
_CLAIM_BEHIND_HOST = 48
_LOCKED = b" FOR UPDATE"


class MysqlEngine(Store, StorageEngine):
    """To be used by the thread that opens it, in a process that does not fork meanwhile."""

    def address(self) -> str:
        return address_of(self.server.host, self.server.port)

    def durability(self) -> Durability:
        with self.reading():
            [[flush, logged, log_flush]] = self.db.rows(
                b"SELECT @@innodb_flush_log_at_trx_commit, @@log_bin, @@sync_binlog"
            )
        setting = f"innodb_flush_log_at_trx_commit={flush}"
        if logged:
            setting += f", sync_binlog={log_flush}"
        warnings = []
        if flush != 1:
            whose = "the server or of its machine" if flush == 0 else "its machine"
            warnings.append(
                f"a crash of {whose} loses the jobs of the last second: "
                f"innodb_flush_log_at_trx_commit is {flush}; set it to 1"
            )
        if logged and log_flush != 1:
            # After a crash the server undoes what its binary log lacks.
            warnings.append(
                "a crash of its machine loses the jobs that the binary log lacks: "
                f"sync_binlog is {log_flush}; set it to 1"
            )
        fragile = [
            table.label
            for tables in self.tables.by_queue.values()
            for table in tables.values()
            if table.storage.lower() != "innodb"
        ]
        if fragile:
            warnings.append(
                f"commits are no commits in {', '.join(fragile[:3])}"
                f"{', …' if len(fragile) > 3 else ''}: ALTER TABLE … ENGINE = InnoDB"
            )
        return Durability(setting, "; ".join(warnings))

    def apply(self, batch: Batch, now_ms: int) -> BatchResult:
        for op in batch.with_options:
            with self.reading():
                self.tables.make_options(self.db, op.queue)
        self.expiring_queues.update(op.queue for op in batch.with_options if op.expires)
        return self.transact(now_ms, lambda tx: apply_batch(self, tx, batch))

    def try_enqueue(self, queue: str) -> None:
        """Find out whether a row has room, which shows before its transaction is rolled back."""
        ops = [EnqueueOp(queue, [Job(b" " * TRIED_BYTES)])] if queue else []

        def enqueue_in_vain(tx: Transaction) -> None:
            apply_batch(self, tx, Batch(enqueues=ops))
            raise StopIteration  # nothing of it is to be kept

        with contextlib.suppress(StopIteration):
            self.transact(0, enqueue_in_vain)

    # --- queues ------------------------------------------------------------------------------

    def queues(self) -> frozenset[str]:
        return frozenset(self.tables.by_queue)

    def narrower(self, queue: str) -> Mapping[int, TableLimits]:
        return self.tables.narrower.get(queue, {})

    def create_queue(self, queue: str, now_ms: int) -> None:
        db = self.db
        if queue in self.tables.by_queue:
            return
        with self.reading():
            db.execute(create_database(self.tables.prefix + queue))
            had_tables = self.tables.add(db, queue, {})
            self.counts.open_queue(queue, None if had_tables else {})
            self.pass_used_ids(db, [queue])

    def delete_queue(self, queue: str) -> None:
        """Drop the database, which happens table by table: if that fails, nobody knows how far."""
        db = self.db
        if queue not in self.tables.by_queue:
            return
        self.counts.cancel()
        statement = b"DROP DATABASE IF EXISTS " + quote_name(self.tables.prefix + queue)
        if db.is_mariadb:
            # For a search that reads it, and for the server, which writes statistics of tables a
            # second after the last of many changes.
            statement = WAIT_FOR_LOCKS + statement
        with self.guarded(), db.patiently(_DROP_SECONDS):
            if self.tables.has_options:
                of_queue = b" WHERE queue = " + quote_text(queue)
                db.execute(b"DELETE FROM " + self.tables.keys_of_all + of_queue)
            db.execute(statement)
        self.tables.drop(queue)
        self.expiring_queues.discard(queue)
        self.counts.drop_queue(queue)
        for state in JobState:
            self.sweeps_due.pop((queue, state), None)

    # --- reads of bounded cost ---------------------------------------------------------------

    def read_pending(
        self, queue: str, priority: int, *, after: PendingKey | None, until_ms: int, limit: int
    ) -> Sequence[PendingKey]:
        table = self.tables.of(queue)[priority]
        at, run_after = table.ready.column, table.run_after
        head = b"SELECT %b, local_id FROM %b%b WHERE state = 0 AND " % (
            in_ms(at),
            table.name,
            table.ready.forced,
        )
        where = b"%b <= %b" % (at, run_after.bound(until_ms))
        rows: list[tuple[int, ...]] = []
        with self.reading():
            if after is not None:
                last = run_after.bound(after.run_after_ms)
                if after.run_after_ms % run_after.step_ms == 0:
                    # Apart, so that both are ranges of the index, however many are of one time.
                    rows += self.db.rows(
                        head
                        + b"%b = %b AND local_id > %d AND %b ORDER BY local_id LIMIT %d"
                        % (at, last, after.local_id, where, limit)
                    )
                where = b"%b > %b AND %b" % (at, last, where)
            if len(rows) < limit:
                rows += self.db.rows(
                    head + b"%b ORDER BY %b, local_id LIMIT %d" % (where, at, limit - len(rows))
                )
        return [new_record(PendingKey, row) for row in rows]

    def payloads(
        self, queue: str, priority: int, local_ids: Sequence[int], *, most_bytes: int
    ) -> Sequence[Payload | None]:
        table = self.tables.of(queue)[priority]
        with self.reading():
            return read_payloads(self.db.rows, table, local_ids, most_bytes=most_bytes)

    def lookup(
        self, queue: str, keys: Sequence[JobKey], *, include_body: bool
    ) -> Sequence[StoredJob]:
        jobs: list[StoredJob] = []
        with self.reading():
            for table, local_ids in by_table(self.tables.of(queue), keys):
                columns = whole_job(table, with_body=include_body)
                for statement in select(table, columns, local_ids, None):
                    rows = self.db.rows(statement)
                    found = [row for row in rows if row[1] in JOB_STATES]
                    jobs += [stored_job(table.priority, row) for row in found]
        return jobs

    def find_keys(self, queue: str, keys: Sequence[str]) -> Mapping[str, JobKey]:
        tables = self.tables.of(queue)
        if not self.tables.options_of(queue):
            return {}
        with self.reading():
            return find_keys(self.db.rows, tables, keys)

    def find_keys_of_all(self, keys: Sequence[str]) -> Mapping[str, KeyHolder]:
        with self.reading():
            return find_keys_of_all(self.db.rows, self.tables, keys)

    def depths(self, queues: Collection[str] | None = None) -> Mapping[str, Depths | None]:
        self.counts.add(self.counts.poll())
        known = self.tables.by_queue
        wanted = known if queues is None else known.keys() & queues
        return {queue: self.counts.of(queue) for queue in wanted}

    def suspects(self) -> Collection[str]:
        return self.counts.suspects

    def recount(self, queue: str) -> None:
        if queue in self.tables.by_queue:
            self.counts.recount(queue)

    def check(self, *, repair: bool) -> Sequence[Finding]:
        """Make jobs PENDING whose state does not exist, which only a foreign writer gives them."""
        found = []
        where = b" WHERE state IS NULL OR state NOT IN (0, 1, 2, 3)"
        for queue, tables in self.tables.by_queue.items():
            for table in tables.values():
                with self.reading():
                    [[jobs]] = self.db.rows(b"SELECT COUNT(*) FROM " + table.name + where)
                if jobs:
                    found.append(Finding(queue, "jobs in a state that does not exist", jobs))
                    if repair:
                        with self.guarded():
                            self.db.execute(b"UPDATE " + table.name + b" SET state = 0" + where)
        return found

    def oldest_failed(self, queue: str, priority: int, *, limit: int) -> Sequence[int]:
        table = self.tables.of(queue)[priority]
        with self.reading():
            rows = self.db.rows(_oldest_failed(table, UPDATED_AT_MS, limit))
        return [updated_at_ms for (updated_at_ms,) in rows]

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
        table = self.tables.of(queue)[priority]

        def retry(tx: Transaction) -> list[int]:
            statement = _oldest_failed(table, b"local_id", limit) + _LOCKED
            local_ids = [local_id for (local_id,) in tx.read([statement])]
            _retry(tx, table, dict.fromkeys(local_ids, run_after_ms), attempts)
            return local_ids

        at_ms = table.run_after.floor(run_after_ms)
        local_ids = self.transact(now_ms, retry)
        if table.options:
            self.expiring_queues.add(queue)
        return [Requeued(priority, PendingKey(at_ms, local_id)) for local_id in local_ids]

    def retry_found(
        self,
        queue: str,
        run_afters: Mapping[JobKey, int],
        *,
        attempts: int,
        ended_before_ms: int,
        now_ms: int,
    ) -> Sequence[Requeued]:
        named = by_table(self.tables.of(queue), run_afters)

        def retry(tx: Transaction) -> list[Requeued]:
            requeued: list[Requeued] = []
            for table, keys in named:
                found = tx.read(_found(table, keys, JobState.FAILED, ended_before_ms))
                retried = {i: run_afters[JobKey(table.priority, i)] for (i,) in found}
                _retry(tx, table, retried, attempts)
                floor = table.run_after.floor
                requeued += [
                    Requeued(table.priority, PendingKey(floor(at_ms), local_id))
                    for local_id, at_ms in retried.items()
                ]
            return requeued

        if any(table.options for table, _ in named):
            self.expiring_queues.add(queue)
        return self.transact(now_ms, retry)

    def delete_jobs(
        self, queue: str, state: JobState, priority: int, *, limit: int
    ) -> Sequence[JobKey]:
        table = self.tables.of(queue)[priority]
        at, index = table.order(state)
        statement = b"SELECT local_id FROM %b%b WHERE state = %d ORDER BY %b, local_id LIMIT %d" % (
            table.name,
            index,
            state,
            at,
            limit,
        )
        local_ids = self.transact(0, lambda tx: _delete(tx, table, state, [statement + _LOCKED]))
        return [JobKey(priority, local_id) for local_id in local_ids]

    def delete_found(
        self,
        queue: str,
        state: JobState,
        keys: Sequence[JobKey],
        *,
        ended_before_ms: int = LATEST_MS,
    ) -> Sequence[JobKey]:
        named = by_table(self.tables.of(queue), keys)

        def delete_those(tx: Transaction) -> set[JobKey]:
            found: set[JobKey] = set()
            for table, local_ids in named:
                deleted = _delete(
                    tx, table, state, _found(table, local_ids, state, ended_before_ms)
                )
                found.update(JobKey(table.priority, local_id) for local_id in deleted)
            return found

        found = self.transact(0, delete_those)
        return [key for key in dict.fromkeys(keys) if key in found]

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
        tables = self._tables_to_sweep(queue, JobState.IN_PROGRESS)

        def release(tx: Transaction) -> Expired:
            retried: list[Requeued] = []
            done = 0
            for table in tables:
                if done == limit:
                    break
                statement = _oldest_claims(table, claimed_after_ms, claimed_before_ms, limit - done)
                held = held_in(tx.read([statement]))
                attempts = [
                    FailedAttempt(
                        claim, retry_at(tx.now_ms, backoff_attempts, claim.attempts_remaining)
                    )
                    for claim in held.values()
                ]
                retried += fail_attempts(tx, table, attempts)
                done += len(attempts)
            return Expired(retried, failed=done - len(retried))

        return self.transact(now_ms, release)

    @property
    def expiring(self) -> Collection[str]:
        return self.expiring_queues

    def expire_jobs(self, queue: str, *, limit: int, now_ms: int) -> ExpiredJobs:
        tables, options = self.tables.of(queue), self.tables.options_of(queue)
        if not options:
            return ExpiredJobs([], 0)
        due = b"SELECT priority, local_id FROM %b WHERE check_at <= %d ORDER BY check_at LIMIT %d"
        with self.reading():
            rows = [JobKey(*row) for row in self.db.rows(due % (options, now_ms, limit))]

        def expire(tx: Transaction) -> list[JobKey]:
            failed: list[JobKey] = []
            for table, local_ids in by_table(tables, rows):
                ended = fail_expired(tx, table, local_ids)
                failed += [JobKey(table.priority, local_id) for local_id in ended]
                left = set(local_ids).difference(ended)
                held = tx.lock(table, b"local_id", sorted(left), JobState.IN_PROGRESS)
                running = {local_id for (local_id,) in held}
                for statement in (
                    *check_again(table, sorted(running), now_ms + CHECK_AGAIN_MS),
                    *check_again(table, sorted(left - running), None),
                ):
                    tx.run(statement)
            return failed

        return ExpiredJobs(self.transact(now_ms, expire) if rows else [], len(rows))

    def collect_garbage(
        self, queue: str, state: JobState, *, updated_before_ms: int, limit: int
    ) -> int:
        tables = self._tables_to_sweep(queue, state)

        def collect(tx: Transaction) -> int:
            deleted = 0
            for table in tables:
                if deleted == limit:
                    break
                bound = table.updated_at.bound(updated_before_ms)
                at, index = table.order(state)
                where = b"updated_at < " + bound
                if at != b"updated_at":  # what is due later was changed later
                    where += b" AND %b < %b" % (at, bound)
                statement = (
                    b"SELECT local_id FROM %b%b WHERE state = %d AND %b ORDER BY %b, local_id"
                    b" LIMIT %d" % (table.name, index, state, where, at, limit - deleted)
                )
                deleted += len(_delete(tx, table, state, [statement + _LOCKED]))
            return deleted

        return self.transact(0, collect)

    def _tables_to_sweep(self, queue: str, state: JobState) -> list[Table]:
        """List the tables with jobs in `state` that may be due, highest priority first: those known
        to have any, and now and then all, for a foreign writer's jobs are in no count of ours."""
        tables, depths = self.tables.of(queue), self.counts.of(queue)
        now, due = self.clock.monotonic(), self.sweeps_due
        if depths is None or now >= due.get((queue, state), -math.inf):
            due[queue, state] = now + _SWEEP_SECONDS
            return [table for _, table in sorted(tables.items())]
        return [table for level, table in sorted(tables.items()) if (level, state) in depths]

    def vacuum(self, *, limit: int) -> bool:
        """Do nothing: a queue goes with its database, at once; InnoDB purges by itself."""
        return False

    def searcher(self) -> SearcherFactory:
        return partial(MysqlSearcher, self.shard, self.server)


def make_engine(shard: ShardSettings, server: ServerSettings) -> MysqlEngine:
    assert shard.master is not None, "shards.yaml is checked for it"
    return MysqlEngine(
        shard.name,
        MysqlAddress(*shard.master, shard.user, shard.passwd),
        levels=server.num_priority_levels,
        most_body_bytes=server.max_job_body_bytes,
        lease_seconds=server.owner_lease_seconds,
        claim_room=len(server.advertised_host) + _CLAIM_BEHIND_HOST,
        answer_seconds=server.store_answer_seconds,
    )


def _oldest_claims(
    table: Table, claimed_after_ms: int, claimed_before_ms: int, limit: int
) -> bytes:
    """Write the statement for `held_in`. Without an index by age the longest claimed are not told
    from the others, and need not be."""
    at, index = table.aged
    order = b" ORDER BY " + at + b", local_id" if index else b""
    updated_at = table.updated_at
    after = b""
    if claimed_after_ms > updated_at.earliest_ms:
        after = b" AND " + at + b" > " + updated_at.bound(claimed_after_ms)
    return (
        b"SELECT " + HELD + b" FROM " + table.name + index + b" WHERE state = 1 AND " + at + b" < "
        + updated_at.bound(min(claimed_before_ms, updated_at.latest_ms))
        + after + order + b" LIMIT %d FOR UPDATE" % limit
    )  # fmt: skip


def _oldest_failed(table: Table, columns: bytes, limit: int) -> bytes:
    at, index = table.aged
    return b"SELECT %b FROM %b%b WHERE state = 3 ORDER BY %b, local_id LIMIT %d" % (
        columns,
        table.name,
        index,
        at,
        limit,
    )


def _found(
    table: Table, local_ids: Sequence[int], state: JobState, ended_before_ms: int
) -> Iterator[bytes]:
    """Select and lock those of the jobs that are in `state`; of jobs that have ended, those that
    did before a time."""
    ended = b""
    if state in (JobState.SUCCEEDED, JobState.FAILED) and ended_before_ms < LATEST_MS:
        ended = b" AND updated_at < " + table.updated_at.bound(ended_before_ms)
    for statement in select(table, b"local_id", local_ids, state):
        yield statement + ended + _LOCKED


def _retry(tx: Transaction, table: Table, run_afters: Mapping[int, int], attempts: int) -> None:
    """Make FAILED jobs PENDING, each from its run-after on, by their local ids."""
    local_ids = list(run_afters)
    allowed = b", attempts_allowed = GREATEST(COALESCE(attempts_allowed, 0), %d)" % attempts
    common = table.to_pending(tx.now_ms) + allowed + b", attempts_remaining = %d" % attempts
    times = [table.run_after.literal(run_after_ms) for run_after_ms in run_afters.values()]
    each = [Each(b"run_after = %b", times)]
    tx.update(table, local_ids, JobState.FAILED, JobState.PENDING, common, each)
    retried = b"check_at = expires_at, end_reason = NULL"
    for statement in change_options(table, local_ids, retried):
        tx.run(statement)


def _delete(tx: Transaction, table: Table, state: JobState, selects: Iterable[bytes]) -> list[int]:
    """Delete the jobs in `state` that `selects` find and lock; return their local ids."""
    local_ids = [local_id for (local_id,) in tx.read(selects)]
    tx.delete(table, local_ids, state)
    return local_ids
