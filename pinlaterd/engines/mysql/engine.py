"""MysqlEngine: the StorageEngine contract on one shard's databases in a MySQL or MariaDB server.

See jobs.sql for the layout, store.py for ownership.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from pinlaterd.clock import Clock, SystemClock
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
from pinlaterd.engines.mysql import slices
from pinlaterd.engines.mysql.batch import apply_batch
from pinlaterd.engines.mysql.connection import Server
from pinlaterd.engines.mysql.limits import limits_of
from pinlaterd.engines.mysql.records import (
    STATES,
    WITH_BODY,
    WITHOUT_BODY,
    read_payloads,
    stored_job,
)
from pinlaterd.engines.mysql.searcher import MysqlSearcherFactory
from pinlaterd.engines.mysql.statements import RUN_AFTER_MS, UPDATED_AT_MS, select
from pinlaterd.engines.mysql.store import Store
from pinlaterd.engines.mysql.tables import Table
from pinlaterd.model import JobKey, JobState, Payload, PendingKey

_new = tuple.__new__  # half the cost of calling a NamedTuple, for each job of a batch
_READ_IDS = 500


class MysqlEngine(StorageEngine):
    """To be used by the thread that opens it, in a process that does not fork meanwhile."""

    def __init__(
        self,
        shard: str,
        server: Server,
        *,
        levels: int,
        most_body_bytes: int,
        lease_seconds: float,
        answer_seconds: float,
        clock: Clock | None = None,
    ) -> None:
        """`levels`: how many priorities a queue has tables for. `most_body_bytes`: the longest body
        that will be asked for; `narrower` says if the server takes no such. `answer_seconds`: a
        server that takes longer for an answer is given up. `clock`: its monotonic time says when
        the server has to hear from us; what is stored bears the times that calls give."""
        self.limits = limits_of(shard)
        self._store = Store(
            shard,
            server,
            clock or SystemClock(),
            levels=levels,
            most_body_bytes=most_body_bytes,
            lease_seconds=lease_seconds,
            answer_seconds=answer_seconds,
        )

    @property
    def trouble(self) -> str:
        return self._store.trouble

    def open(self, now_ms: int) -> Ownership:
        return self._store.open(now_ms)

    def close(self) -> None:
        self._store.close()

    def heartbeat(self) -> None:
        self._store.heartbeat()

    def address(self) -> str:
        return f"{self._store.server.host}:{self._store.server.port}"

    def durability(self) -> Durability:
        store = self._store
        with store.reading():
            [[flush, logged, log_flush]] = store.db.rows(
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
            for tables in store.tables.values()
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
        store = self._store
        return store.transact(now_ms, lambda tx: apply_batch(store, tx, batch))

    # --- queues ------------------------------------------------------------------------------

    def queues(self) -> frozenset[str]:
        return frozenset(self._store.tables)

    def narrower(self, queue: str) -> Mapping[int, TableLimits]:
        return self._store.narrower.get(queue, {})

    def create_queue(self, queue: str, now_ms: int) -> None:
        if queue not in self._store.tables:
            self._store.create_queue(queue)

    def delete_queue(self, queue: str) -> None:
        if queue in self._store.tables:
            self._store.delete_queue(queue)

    # --- reads of bounded cost ---------------------------------------------------------------

    def read_pending(
        self, queue: str, priority: int, *, after: PendingKey | None, until_ms: int, limit: int
    ) -> Sequence[PendingKey]:
        table = self._table(queue, priority)
        if table is None:
            return []
        head = b"SELECT %b, local_id FROM %b%b WHERE state = 0 AND " % (
            RUN_AFTER_MS,
            table.name,
            table.by_run_after,
        )
        until = table.run_after.bound(until_ms)
        rows: list[tuple[int, ...]] = []
        with self._store.reading():
            if after is None:
                where = b"run_after <= %b" % until
            else:
                at = table.run_after.bound(after.run_after_ms)
                if after.run_after_ms % table.run_after.step_ms == 0:
                    # Apart, so that both are ranges of the index, however many are of one time.
                    rows += self._store.db.rows(
                        head + b"run_after = %b AND local_id > %d AND run_after <= %b"
                        b" ORDER BY local_id LIMIT %d" % (at, after.local_id, until, limit)
                    )
                where = b"run_after > %b AND run_after <= %b" % (at, until)
            if len(rows) < limit:
                rows += self._store.db.rows(
                    head + where + b" ORDER BY run_after, local_id LIMIT %d" % (limit - len(rows))
                )
        return [_new(PendingKey, row) for row in rows]

    def payloads(
        self, queue: str, priority: int, local_ids: Sequence[int], *, most_bytes: int
    ) -> Sequence[Payload | None]:
        table = self._table(queue, priority)
        if table is None:
            return [None] * len(local_ids)
        with self._store.reading():
            return read_payloads(self._store.db.rows, table, local_ids, most_bytes=most_bytes)

    def lookup(
        self, queue: str, keys: Sequence[JobKey], *, include_body: bool
    ) -> Sequence[StoredJob]:
        tables = self._store.tables_of(queue)
        jobs: list[StoredJob] = []
        with self._store.reading():
            for priority in {key.priority for key in keys} & tables.keys():
                local_ids = list({key.local_id for key in keys if key.priority == priority})
                columns = WITH_BODY if include_body else WITHOUT_BODY
                for statement in select(tables[priority], columns, local_ids, None):
                    rows = self._store.db.rows(statement)
                    jobs += [stored_job(priority, row) for row in rows if row[1] in STATES]
        return jobs

    def depths(self, queues: Collection[str] | None = None) -> Mapping[str, Depths | None]:
        counts, tables = self._store.counts, self._store.tables
        counts.add(counts.poll())
        wanted = tables if queues is None else tables.keys() & queues
        return {queue: counts.of(queue) for queue in wanted}

    def suspects(self) -> Collection[str]:
        return self._store.counts.suspects

    def recount(self, queue: str) -> None:
        if queue in self._store.tables:
            self._store.counts.recount(queue)

    def check(self, *, repair: bool) -> Sequence[Finding]:
        """Only a foreign writer gives a job a state that does not exist: it becomes PENDING."""
        store, found = self._store, []
        where = b" WHERE state IS NULL OR state NOT IN (0, 1, 2, 3)"
        for queue, tables in store.tables.items():
            for table in tables.values():
                with store.reading():
                    [[jobs]] = store.db.rows(b"SELECT COUNT(*) FROM " + table.name + where)
                if jobs:
                    found.append(Finding(queue, "jobs in a state that does not exist", jobs))
                    if repair:
                        statement = b"UPDATE " + table.name + b" SET state = 0" + where
                        self._run(statement)
        return found

    def _run(self, statement: bytes) -> None:
        self._store.transact(0, lambda tx: tx.run([statement]))

    def oldest_failed(self, queue: str, priority: int, *, limit: int) -> Sequence[int]:
        table = self._table(queue, priority)
        if table is None:
            return []
        with self._store.reading():
            rows = self._store.db.rows(slices.oldest_failed(table, UPDATED_AT_MS, limit))
        return [updated_at_ms for (updated_at_ms,) in rows]

    def _table(self, queue: str, priority: int) -> Table | None:
        return self._store.tables_of(queue).get(priority)

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
        return self._store.transact(
            now_ms,
            lambda tx: slices.retry_failed(
                self._store,
                tx,
                queue,
                priority,
                attempts=attempts,
                run_after_ms=run_after_ms,
                limit=limit,
            ),
        )

    def delete_jobs(
        self, queue: str, state: JobState, priority: int, *, limit: int
    ) -> Sequence[JobKey]:
        store = self._store
        return store.transact(
            0, lambda tx: slices.delete_jobs(store, tx, queue, state, priority, limit)
        )

    def delete_keys(self, queue: str, state: JobState, keys: Sequence[JobKey]) -> Sequence[JobKey]:
        store = self._store
        return store.transact(0, lambda tx: slices.delete_keys(store, tx, queue, state, keys))

    def release_expired(
        self,
        queue: str,
        *,
        claimed_before_ms: int,
        limit: int,
        now_ms: int,
        claimed_after_ms: int = NO_TIME_MS,
    ) -> Expired:
        store = self._store
        return store.transact(
            now_ms,
            lambda tx: slices.release_expired(
                store, tx, queue, claimed_ms=(claimed_after_ms, claimed_before_ms), limit=limit
            ),
        )

    def collect_garbage(
        self, queue: str, state: JobState, *, updated_before_ms: int, limit: int
    ) -> int:
        store = self._store
        return store.transact(
            0,
            lambda tx: slices.collect_garbage(
                store, tx, queue, state, updated_before_ms=updated_before_ms, limit=limit
            ),
        )

    def vacuum(self, *, limit: int) -> bool:
        """A queue goes with its database, at once; InnoDB purges by itself."""
        return False

    def searcher(self) -> SearcherFactory:
        return MysqlSearcherFactory(self._store.shard, self._store.server)
