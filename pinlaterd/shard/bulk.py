"""Calls that go into no batch: queues, look-ups, searches, retries and deletes of many jobs.

Queues are created and dropped at once. The rest are done in slices (see `tasks`): each is a
generator that returns the call's result, so that neither a long list nor a large limit holds up
the job path. What changes many jobs answers with the count so far once most of its time is used, or
when the shard stops.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Generator, Iterable, Sequence
from itertools import islice
from typing import Any

from pinlaterd.clock import Clock
from pinlaterd.engines.base import (
    AckOp,
    Acks,
    Batch,
    ClaimOp,
    Claims,
    ScanAfter,
    Search,
    StorageEngine,
    StoredJob,
)
from pinlaterd.errors import LookupTooLarge, PinLaterError, StorageError
from pinlaterd.model import (
    CONTINUATION_END,
    QUEUE_NAME,
    SCAN_START,
    CountRequest,
    CreateQueueRequest,
    DeleteJobsRequest,
    DeleteQueueRequest,
    JobDescriptor,
    JobKey,
    JobRecord,
    JobState,
    LookupRequest,
    Payload,
    PendingKey,
    RetryFailedRequest,
    ScanKey,
    ScanRequest,
    ScanResult,
    claim_source,
)
from pinlaterd.shard.dequeue import JOB_OVERHEAD_BYTES
from pinlaterd.shard.descriptors import LAST_PRIORITY, NO_JOB, JobDescriptors
from pinlaterd.shard.operations import chunks
from pinlaterd.shard.search import ScanPart, SearchCall
from pinlaterd.shard.state import ShardState
from pinlaterd.shard.tasks import Pace, ShardStops

# Steps that return what the call is answered with.
Answering = Generator[SearchCall | None, Any, Any]

# The part of its time after which a call that changes many jobs answers with what it has done.
_USABLE_TIME = 0.8
_LOOKUPS_A_SLICE = 200
# Large bodies: so many at once at most.
_LOOKUPS_WITH_BODY_A_SLICE = 32
_FOUND_AT_A_TIME = 100_000
_MILLIS = struct.Struct(">q")
# What is due so soon is no scheduled job any more: the ready index may know of it in a moment.
_SOON_MS = 1_000
_NOT_READ = Payload(b"", 0, 0)  # so that the engine reads no body


class BulkCalls:
    """The operations of one shard that are not the job path's four."""

    def __init__(self, engine: StorageEngine, state: ShardState, clock: Clock, pace: Pace) -> None:
        self._engine = engine
        self._state = state
        self._clock = clock
        self._pace = pace

    # --- queues ------------------------------------------------------------------------------

    def create_queue(self, request: CreateQueueRequest) -> None:
        self._state.rules.queue_name(request.queue)
        self._create(request.queue)

    def create_queues(self, names: Iterable[object]) -> None:
        """Of names that other shards have; what this store cannot hold is left out."""
        for name in names:
            if (
                isinstance(name, str)
                and QUEUE_NAME.match(name)
                and len(name) <= self._engine.limits.queue_name_chars
            ):
                self._create(name)

    def _create(self, queue: str) -> None:
        if queue not in self._state.ready:
            self._engine.create_queue(queue, self._clock.now_ms())
            self._state.ready.open_queue(queue)
            self._state.touched.add(queue)

    def delete_queue(self, request: DeleteQueueRequest) -> None:
        """The router has checked the password."""
        queue = request.queue
        self._state.rules.queue_name(queue)
        if queue in self._state.ready:
            self._engine.delete_queue(queue)
            self._state.ready.drop_queue(queue)
            self._state.fresh.drop_queue(queue)
            self._state.touched.add(queue)

    # --- jobs by descriptor --------------------------------------------------------------------

    def names_other_shards(self, request: LookupRequest) -> bool:
        parsed = map(JobDescriptor.parse, request.descriptors)
        return any(job is not None and job.shard != self._state.name for job in parsed)

    def lookup(self, request: LookupRequest) -> Answering:
        """What is not here, or malformed, is left out."""
        by_queue: dict[str, list[JobKey]] = {}
        for text in dict.fromkeys(request.descriptors):
            parsed = JobDescriptor.parse(text)
            if parsed is not None and parsed.shard == self._state.name:
                key = JobDescriptors(parsed.queue, parsed.shard).key(text)
                if key is not None and key is not NO_JOB:
                    by_queue.setdefault(parsed.queue, []).append(key)
        found: dict[str, JobRecord] = {}
        room = self._state.config.server.max_frame_bytes
        with_body = request.include_body
        slice_keys = _LOOKUPS_WITH_BODY_A_SLICE if with_body else _LOOKUPS_A_SLICE
        first = True
        for queue, keys in by_queue.items():
            for part in chunks(keys, slice_keys):
                if not first:
                    yield None
                first = False
                if queue not in self._state.ready:
                    break
                for job in self._engine.lookup(queue, part, include_body=with_body):
                    record = self._record(queue, job)
                    found[record.descriptor] = record
                    room -= len(job.body or b"") + len(job.custom_status) + JOB_OVERHEAD_BYTES
                if room < 0:
                    raise LookupTooLarge(self._state.config.server.max_frame_bytes)
        return found

    def _record(self, queue: str, job: StoredJob) -> JobRecord:
        key = job.key
        return JobRecord(f"{queue}:s{self._state.name}:p{key.priority}:{key.local_id}", *job[1:])

    # --- searches ------------------------------------------------------------------------------

    def count(self, request: CountRequest, source: str, deadline: float) -> Answering:
        """Raises TimeoutError if it takes most of the time till `deadline`: a number that is too
        low would be wrong."""
        self._state.rules.count(request)
        search = Search(
            request.queue,
            request.state,
            self._priorities(request.priority),
            self._state.config.server.count_limit,
            future=request.future,
            now_ms=self._clock.now_ms(),
            body_regex=request.body_regex,
            deadline=self._usable_until(deadline),
        )
        return (yield from _search(SearchCall("count", search, source)))

    def scan(self, request: ScanRequest, source: str, deadline: float) -> Answering:
        """What was found after most of the time till `deadline`; its continuation goes on there."""
        after = self._state.rules.scan(request)
        limit = min(request.limit, self._state.config.server.scan_limit)
        search = Search(
            request.queue,
            request.state,
            self._priorities(request.priority),
            limit + 1,  # one more tells whether there is more
            future=request.future,
            now_ms=self._clock.now_ms(),
            after=self._after(after),
            body_regex=request.body_regex,
            deadline=self._usable_until(deadline),
        )
        part: ScanPart = yield from _search(SearchCall("scan", search, source))
        jobs = part.jobs[:limit]
        continuation = CONTINUATION_END
        if part.more or len(part.jobs) > limit:
            place = after or SCAN_START
            if jobs:
                place = ScanKey(jobs[-1].run_after_ms, self._state.name, *jobs[-1].key)
            continuation = place.token()
        return ScanResult([self._record(request.queue, job) for job in jobs], continuation)

    def _after(self, key: ScanKey | None) -> ScanAfter | None:
        """Where this shard goes on. Of equal run-after, the shards come one after the other."""
        if key is None:
            return None
        if key.shard < self._state.name:
            return ScanAfter(key.run_after_ms, 0, 0)  # all of this run-after are still to come
        if key.shard > self._state.name:
            return ScanAfter(key.run_after_ms, LAST_PRIORITY + 1, 0)  # none of them
        return ScanAfter(key.run_after_ms, key.priority, key.local_id)

    def _priorities(self, priority: int | None) -> Sequence[int]:
        if priority is not None:
            return (priority,)
        return range(1, self._state.config.server.num_priority_levels + 1)

    # --- moves to other shards ---------------------------------------------------------------

    def claim_scheduled(self, op: AckOp, source: str, now_ms: int) -> AckOp:
        """Claim the jobs that `op` is to end as succeeded, in a commit of its own. Returns it with
        these claims, and without the jobs that are not scheduled any more: what is due, or soon.

        The ready index knows nothing of these jobs, since they are not due. The claims bear the
        latest time there is, so that they never time out: after a crash before the ack, jobs would
        run here before their time, beside their copies. A repeated call acks them. Raises
        StorageError."""
        named = {JobKey(acks.priority, i): acks for acks in op.succeeded for i in acks.local_ids}
        held: dict[JobKey, str] = {}
        claims: list[Claims] = []
        for job in self._engine.lookup(op.queue, list(named), include_body=False):
            if job.state is JobState.PENDING and job.run_after_ms > now_ms + _SOON_MS:
                place = PendingKey(job.run_after_ms, job.key.local_id)
                [descriptor] = self._state.claim_descriptors.take(source, 1)
                claims.append(Claims(job.key.priority, [place], [descriptor], [_NOT_READ]))
            elif job.state is JobState.IN_PROGRESS:
                descriptor = job.claim_descriptor or ""
                if claim_source(descriptor) == source:
                    held[job.key] = descriptor
        if claims:
            batch = Batch(claims=[ClaimOp(op.queue, claims)])
            [found] = self._engine.apply(batch, self._engine.limits.run_after_ms).claims
            for claim, payload in zip(claims, found, strict=True):
                if payload is not None:
                    key = JobKey(claim.priority, claim.keys[0].local_id)
                    held[key] = claim.claim_descriptors[0]
        acks = [
            Acks(key.priority, [key.local_id], named[key].append_custom_status, 0, descriptor)
            for key, descriptor in held.items()
        ]
        return AckOp(op.queue, acks, ())

    # --- changes of many jobs --------------------------------------------------------------------

    def oldest_failed(self, request: RetryFailedRequest) -> bytes:
        self._state.rules.retry_failed(request)
        ages = self._engine.oldest_failed(request.queue, request.priority, limit=request.limit)
        return b"".join(map(_MILLIS.pack, ages))

    def retry_failed(self, request: RetryFailedRequest, deadline: float) -> Answering:
        self._state.rules.retry_failed(request)
        queue = request.queue

        def retry(limit: int) -> int:
            now_ms = self._clock.now_ms()
            requeued = self._engine.retry_failed(
                queue,
                request.priority,
                attempts=request.attempts_to_allow,
                run_after_ms=now_ms if request.run_after_ms is None else request.run_after_ms,
                limit=limit,
                now_ms=now_ms,
            )
            self._state.requeue(queue, requeued, now_ms)
            return len(requeued)

        until = self._usable_until(deadline)
        return (yield from self._in_slices(queue, request.limit, until, retry))

    def delete_jobs(self, request: DeleteJobsRequest, source: str, deadline: float) -> Answering:
        self._state.rules.delete_jobs(request)
        until = self._usable_until(deadline)
        if request.body_regex is not None:
            return (yield from self._delete_matching(request, request.body_regex, source, until))

        def delete(limit: int) -> int:
            queue, state, priority = request.queue, request.state, request.priority
            keys = self._engine.delete_jobs(queue, state, priority, limit=limit)
            return self._deleted(request, keys)

        return (yield from self._in_slices(request.queue, request.limit, until, delete))

    def _in_slices(
        self, queue: str, most: int, until: float, change: Callable[[int], int]
    ) -> Answering:
        """Have `change` change so many jobs at a time, until it finds no more, most of the time is
        used, or the shard stops; returns how many it has changed."""
        changed = 0
        while changed < most and queue in self._state.ready:
            limit = min(self._pace.jobs, most - changed)
            found = change(limit)
            changed += found
            if found < limit or self._clock.monotonic() >= until:
                break
            try:
                yield None
            except ShardStops:
                break
        return changed

    def _delete_matching(
        self, request: DeleteJobsRequest, body_regex: str, source: str, until: float
    ) -> Answering:
        """The searcher finds them, the loop deletes those that still are in that state."""
        deleted = 0
        while deleted < request.limit:
            wanted = min(_FOUND_AT_A_TIME, request.limit - deleted)
            search = Search(
                request.queue,
                request.state,
                (request.priority,),
                wanted,
                body_regex=body_regex,
                deadline=until,
            )
            try:
                found: Sequence[JobKey] = yield from _search(SearchCall("find", search, source))
            except (TimeoutError, ShardStops):
                if deleted:
                    break
                raise
            left = iter(found)
            while part := list(islice(left, self._pace.jobs)):
                if request.queue not in self._state.ready:
                    return deleted
                keys = self._engine.delete_keys(request.queue, request.state, part)
                deleted += self._deleted(request, keys)
                if self._clock.monotonic() >= until:
                    return deleted
                try:
                    yield None
                except ShardStops:
                    return deleted
            if len(found) < wanted:
                break
        return deleted

    def _deleted(self, request: DeleteJobsRequest, keys: Sequence[JobKey]) -> int:
        """They leave the memory; returns how many they are."""
        self._state.forget(request.queue, request.priority, [key.local_id for key in keys])
        return len(keys)

    def _usable_until(self, deadline: float) -> float:
        now = self._clock.monotonic()
        return now + (deadline - now) * _USABLE_TIME


def _search(call: SearchCall) -> Answering:
    """Have the searcher do it. What it raises is raised here; its errors with the store say
    nothing about the owner's connection."""
    try:
        return (yield call)
    except StorageError as error:
        raise PinLaterError(f"the search failed: {error.message}") from error
