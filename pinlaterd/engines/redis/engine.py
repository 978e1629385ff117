"""RedisEngine: the StorageEngine contract on a Redis server, in PinLater's layout and our own.

What is acknowledged is kept as well as the server's `appendfsync` promises. See common.lua for the
layouts.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import compress
from typing import Any

from pinlaterd.config.schema import ServerSettings, ShardSettings
from pinlaterd.engines.base import (
    CHECK_AGAIN_MS,
    LATEST_MS,
    NO_TIME_MS,
    Batch,
    BatchResult,
    Expired,
    ExpiredJobs,
    Finding,
    KeyHolder,
    Requeued,
    SearcherFactory,
    StorageEngine,
    StoredJob,
)
from pinlaterd.engines.batches import EnqueuePlan, FindKeys, fitting_payloads
from pinlaterd.engines.redis import scripts
from pinlaterd.engines.redis.batch import Application
from pinlaterd.engines.redis.connection import Argument, Server
from pinlaterd.engines.redis.scripts import (
    LIMITS,
    is_lean,
    lean_payloads,
    plain_payloads,
    stored_job,
)
from pinlaterd.engines.redis.searcher import RedisSearcher
from pinlaterd.engines.redis.servers import Locator, sentinels_of
from pinlaterd.engines.redis.store import DamagedKey, Store
from pinlaterd.errors import StorageNotCommitted
from pinlaterd.model import JobKey, JobState, Payload, PendingKey, new_record

log = logging.getLogger(__name__)

_HELD = [b"HELD"]  # apply.lua's word for a key that may be held: nothing has changed
_EVICTED = -1  # what scripts say of an id whose hash is gone
_MOST_RESCORED_AT_ONCE = 5_000
_CHECKED_AT_ONCE = 1_000
_MOST_READ_AT_ONCE = 4_000  # Redis' Lua has room for twice as many on its stack


class RedisEngine(Store, StorageEngine):
    """One shard in one Redis server, which may hold others. To be used by one thread.

    The server is looked for each time that the shard is opened."""

    limits = LIMITS

    def apply(self, batch: Batch, now_ms: int) -> BatchResult:
        updates = (batch.acks, batch.checkpoints, batch.releases, batch.finishes)
        for ops in (*updates, batch.enqueues, batch.with_options, batch.claims):
            for op in ops:
                self.known(op.queue)
        payloads = fitting_payloads(batch.claims, batch.claim_room, self.payloads)
        # Keys are mostly free, as the script finds: only if not they are looked for first.
        plan = EnqueuePlan(batch.with_options) if batch.with_options else None
        self.expiring_queues.update(op.queue for op in batch.with_options if op.expires)
        expiring = self.expiring_queues
        application = Application(batch, self.stored, now_ms, payloads, plan, expiring)
        answer = self.write(scripts.APPLY, *application.arguments())
        if answer == _HELD:
            plan = EnqueuePlan(batch.with_options, FindKeys(self.find_keys, self.find_keys_of_all))
            application = Application(
                batch, self.stored, now_ms, payloads, plan, expiring, are_free=True
            )
            answer = self.write(scripts.APPLY, *application.arguments())
        return application.result(answer)

    # --- reads of bounded cost ---------------------------------------------------------------

    def read_pending(
        self, queue: str, priority: int, *, after: PendingKey | None, until_ms: int, limit: int
    ) -> Sequence[PendingKey]:
        stored = self.known(queue)
        arguments = (stored, priority, *(after or ("", "")), until_ms, limit)
        while True:
            try:
                answer = self.read(scripts.PENDING, *arguments)
            except DamagedKey as damage:
                # Others must not suffer from it: what is not there can't be served.
                log.error("jobs can't be read: %s", damage.message)
                return []
            if len(answer) == 2:
                self._rescore(stored, priority, low=answer[0], high=answer[1])
                continue
            [flat] = answer
            return [
                new_record(PendingKey, (run_after_ms, int(local_id)))
                for local_id, run_after_ms in zip(flat[::2], flat[1::2], strict=True)
            ]

    def _rescore(self, stored: str, priority: int, *, low: bytes, high: bytes) -> None:
        """Rescore PinLater's jobs once they are read; in slices, so that others are served."""
        offset = 0
        while True:
            page = (offset, _MOST_RESCORED_AT_ONCE)
            [looked_at] = self.write(scripts.RESCORE, stored, priority, low, high, *page)
            offset += looked_at
            if looked_at < _MOST_RESCORED_AT_ONCE:
                return

    def payloads(
        self, queue: str, priority: int, local_ids: Sequence[int], *, most_bytes: int
    ) -> Sequence[Payload | None]:
        local_ids = local_ids[:_MOST_READ_AT_ONCE]
        stored = self.known(queue)
        columns = self.read(scripts.PAYLOADS, stored, most_bytes, *local_ids)
        payloads = (lean_payloads if is_lean(stored) else plain_payloads)(*columns)
        if not all(payloads):
            gone = compress(local_ids, [payload is None for payload in payloads])
            self._forget(queue, [JobKey(priority, local_id) for local_id in gone])
        return payloads

    def lookup(
        self, queue: str, keys: Sequence[JobKey], *, include_body: bool
    ) -> Sequence[StoredJob]:
        wanted = list(dict.fromkeys(keys))
        with_body = "1" if include_body else "0"
        rows = self.read(scripts.LOOKUP, self.known(queue), "", with_body, *_flat(wanted))
        self._forget(queue, (key for key, row in zip(wanted, rows, strict=True) if row == _EVICTED))
        return [
            stored_job(key, row, with_body=include_body)
            for key, row in zip(wanted, rows, strict=True)
            if isinstance(row, list)
        ]

    def find_keys(self, queue: str, keys: Sequence[str]) -> Mapping[str, JobKey]:
        found = self._holders(self.known(queue), keys)
        return {key: JobKey(*map(int, holder.split())) for key, holder in found}

    def find_keys_of_all(self, keys: Sequence[str]) -> Mapping[str, KeyHolder]:
        found: dict[str, KeyHolder] = {}
        for key, holder in self._holders("", keys):
            priority, local_id, stored = holder.split()
            queue = stored.decode().removeprefix("+")
            if self.stored.get(queue, "").encode() == stored:
                found[key] = KeyHolder(int(priority), int(local_id), True, queue)
        return found

    def _holders(self, stored: str, keys: Sequence[str]) -> Iterator[tuple[str, bytes]]:
        for first in range(0, len(keys), _MOST_READ_AT_ONCE):
            some = keys[first : first + _MOST_READ_AT_ONCE]
            holders = self.read(scripts.FIND_KEYS, stored, *some)
            yield from (pair for pair in zip(some, holders, strict=True) if pair[1] is not None)

    def _forget(self, queue: str, keys: Iterable[JobKey]) -> None:
        """Remove jobs that a read found evicted. If the server takes no writes now, they are met
        again."""
        evicted = _flat(keys)
        if evicted:
            with contextlib.suppress(StorageNotCommitted):
                self.write(scripts.FORGET, self.known(queue), *evicted)

    def depths(
        self, queues: Collection[str] | None = None
    ) -> Mapping[str, Mapping[tuple[int, JobState], int]]:
        known = self.stored
        queues = sorted(known if queues is None else known.keys() & set(queues))
        if not queues:
            return {}
        rows = self.read(scripts.DEPTHS, len(self._priorities), *[known[queue] for queue in queues])
        keys = [(priority, state) for priority in self._priorities for state in JobState]
        return {
            queue: {key: jobs for key, jobs in zip(keys, row, strict=True) if jobs}
            for queue, row in zip(queues, rows, strict=True)
        }

    def check(self, *, repair: bool) -> Sequence[Finding]:
        """Compare sets with jobs. A hash in no set may be a deleted queue's: vacuum sees to it."""
        found = []
        for queue, stored in sorted(self.stored.items()):
            for priority in self._priorities:
                gone = sum(self._gone(stored, priority, state, repair=repair) for state in JobState)
                if gone:
                    found.append(Finding(queue, "entries of jobs that are not there", gone))
        return found

    def _gone(self, stored: str, priority: int, state: JobState, *, repair: bool) -> int:
        """Count the jobs in a state that are not there."""
        place: tuple[Argument, Argument] = ("", "")
        gone = 0
        while True:
            where = (stored, priority, int(state), *place, _CHECKED_AT_ONCE)
            [page] = self.read(scripts.PAGE, *where)
            flat = [part for member in page[::3] for part in (priority, member)]
            rows = self.read(scripts.LOOKUP, stored, int(state), "0", *flat)
            missing = [
                member for member, row in zip(page[::3], rows, strict=True) if row == _EVICTED
            ]
            gone += len(missing)
            if missing and repair:
                flat = [part for member in missing for part in (priority, member)]
                self.write(scripts.FORGET, stored, *flat)
            if len(page) < 3 * _CHECKED_AT_ONCE:
                return gone
            place = (page[-2], page[-3])

    def oldest_failed(self, queue: str, priority: int, *, limit: int) -> Sequence[int]:
        state = int(JobState.FAILED)
        [rows] = self.read(scripts.PAGE, self.known(queue), priority, state, "", "", limit)
        times_ms: list[int] = rows[2 : 3 * limit : 3]
        return times_ms

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
        arguments = (self.known(queue), priority, attempts, run_after_ms, limit, now_ms)
        local_ids = self.write(scripts.RETRY_FAILED, *arguments)
        return [Requeued(priority, PendingKey(run_after_ms, int(i))) for i in local_ids]

    def retry_found(
        self,
        queue: str,
        run_afters: Mapping[JobKey, int],
        *,
        attempts: int,
        ended_before_ms: int,
        now_ms: int,
    ) -> Sequence[Requeued]:
        flat = [part for key, at_ms in run_afters.items() for part in (*key, at_ms)]
        arguments = (self.known(queue), attempts, _bound(ended_before_ms), now_ms)
        retried = _keys(self.write(scripts.RETRY_KEYS, *arguments, *flat))
        return [
            Requeued(key.priority, PendingKey(run_afters[key], key.local_id)) for key in retried
        ]

    def delete_jobs(
        self, queue: str, state: JobState, priority: int, *, limit: int
    ) -> Sequence[JobKey]:
        arguments = (self.known(queue), int(state), limit, "", priority)
        return _keys(self.write(scripts.DELETE_FIRST, *arguments))

    def delete_found(
        self,
        queue: str,
        state: JobState,
        keys: Sequence[JobKey],
        *,
        ended_before_ms: int = LATEST_MS,
    ) -> Sequence[JobKey]:
        arguments = (self.known(queue), int(state), _bound(ended_before_ms))
        return _keys(self.write(scripts.DELETE_KEYS, *arguments, *_flat(keys)))

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
        times = (claimed_after_ms, claimed_before_ms, limit, now_ms, backoff_attempts)
        found = self.write(scripts.RELEASE_EXPIRED, self.known(queue), *times, *self._priorities)
        failed, *flat = map(int, found)
        each = zip(flat[::3], flat[1::3], flat[2::3], strict=True)
        return Expired([Requeued(p, PendingKey(at_ms, i)) for p, i, at_ms in each], failed)

    @property
    def expiring(self) -> Collection[str]:
        return self.expiring_queues

    def expire_jobs(self, queue: str, *, limit: int, now_ms: int) -> ExpiredJobs:
        times = (now_ms, now_ms + CHECK_AGAIN_MS)
        arguments = (limit, *times, LIMITS.custom_status_chars)
        looked_at, *failed = self.write(scripts.EXPIRE_JOBS, self.known(queue), *arguments)
        return ExpiredJobs(_keys(failed), looked_at)

    def collect_garbage(
        self, queue: str, state: JobState, *, updated_before_ms: int, limit: int
    ) -> int:
        arguments = (self.known(queue), int(state), limit, updated_before_ms)
        return len(self.write(scripts.DELETE_FIRST, *arguments, *self._priorities)) // 2

    def vacuum(self, *, limit: int) -> bool:
        [left] = self.write(scripts.VACUUM, limit)
        return bool(left)

    def searcher(self) -> SearcherFactory:
        return partial(RedisSearcher, self.shard)


def _bound(before_ms: int) -> Argument:
    """Return a time as scripts take it, "" for none: their numbers end at 2^53."""
    return "" if before_ms == LATEST_MS else before_ms


def _flat(keys: Iterable[JobKey]) -> list[Argument]:
    return [part for key in keys for part in key]


def _keys(flat: Sequence[Any]) -> list[JobKey]:
    return [
        JobKey(int(priority), int(local_id))
        for priority, local_id in zip(flat[::2], flat[1::2], strict=True)
    ]


def make_engine(shard: ShardSettings, server: ServerSettings) -> RedisEngine:
    locator: Locator
    if shard.sentinel is not None:
        locator = sentinels_of(shard.sentinel, shard.user, shard.passwd)
    else:
        assert shard.master is not None, "shards.yaml is checked for it"
        locator = Server(*shard.master, shard.user, shard.passwd)
    return RedisEngine(
        shard.name,
        locator,
        priority_levels=server.num_priority_levels,
        lease_seconds=server.owner_lease_seconds,
        answer_seconds=server.store_answer_seconds,
        lean=server.redis_layout == "lean",
    )
