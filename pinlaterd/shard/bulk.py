"""Calls that go into no batch: queues, look-ups, searches, retries and deletes of many jobs.

Queues are created and dropped at once. The rest are done in slices (see `tasks`): each is a
generator that returns the call's result, so that neither a long list nor a large limit holds up
the job path. What changes many jobs answers with the count so far once most of its time is used, or
when the shard stops.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count, groupby, islice, product
from operator import attrgetter

from pinlaterd.engines.base import LATEST_MS, KeyHolder, ScanAfter, Search, StoredJob
from pinlaterd.errors import (
    LookupTooLarge,
    PinLaterError,
    ShardConnectionFailed,
    StorageError,
    StorageNotCommitted,
)
from pinlaterd.model import (
    ALL_QUEUES,
    CONTINUATION_END,
    QUEUE_NAME,
    SCAN_START,
    CountRequest,
    CreateQueueRequest,
    DeleteJobsRequest,
    DeleteQueueRequest,
    JobChoice,
    JobDescriptor,
    JobKey,
    JobRecord,
    JobState,
    LookupRequest,
    QueueKey,
    QueueNamesRequest,
    Result,
    RetryFailedRequest,
    ScanKey,
    ScanRequest,
    ScanResult,
)
from pinlaterd.rpc import codec
from pinlaterd.rpc.codec import Call, Head
from pinlaterd.shard.dequeue import JOB_OVERHEAD_BYTES
from pinlaterd.shard.operations import ForeignError, chunks
from pinlaterd.shard.state import LAST_LOCAL_ID, LAST_PRIORITY, ShardState
from pinlaterd.shard.tasks import Pace, ScanPart, SearchCall, ShardStops, Steps, Tasks
from pinlaterd.wire.envelope import CallEntry, Op, Status

# The part of its time after which a call that changes many jobs answers with what it has done.
_USABLE_TIME = 0.8
_LOOKUPS_A_SLICE = 200
# Large bodies: so many at once at most.
_LOOKUPS_WITH_BODY_A_SLICE = 32
_FOUND_AT_A_TIME = 100_000
_MILLIS = struct.Struct(">q")
_Change = Callable[[Sequence[JobKey]], int]  # of jobs; returns how many have changed


class AnsweredError(StorageError):
    """The store failed in the first slice of a call, which has been told so."""


class BulkCalls:
    """The calls of one shard that are not the job path's four."""

    def __init__(self, state: ShardState, tasks: Tasks, pace: Pace) -> None:
        self._engine = state.engine
        self._state = state
        self._clock = state.clock
        self._tasks = tasks
        self._changes = JobChanges(state, pace)
        self._searches: dict[tuple[bytes, int], Steps] = {}  # by router and call id

    def answer(self, entry: CallEntry, call: Call) -> None:
        """Answer at once, or as a task. Raises what the call is to be answered with instead, or
        AnsweredError."""
        request, source, state = call.request, call.context.source, self._state
        now = self._clock.monotonic()
        until = now + (entry.deadline - now) * _USABLE_TIME
        match request:
            case CreateQueueRequest():
                state.rules.queue_name(request.queue)
                self._create(request.queue)
                self._done(entry, call.head, None)
            case DeleteQueueRequest():
                state.rules.queue_name(request.queue)
                self._delete_queue(request.queue)
                self._done(entry, call.head, None)
            case QueueNamesRequest():
                self._done(entry, call.head, frozenset(state.ready.queues()))
            case LookupRequest():
                if entry.whole and (request.keys or self._names_other_shards(request)):
                    raise ForeignError
                self._start(entry, call, self._lookup(request))
            case CountRequest():
                self._start(entry, call, self._count(request, source, until))
            case ScanRequest():
                self._start(entry, call, self._scan(request, source, until))
            case RetryFailedRequest() if entry.op is Op.OLDEST_FAILED:
                state.replies.add(entry, Status.DONE, self._changes.oldest_failed(request))
            case RetryFailedRequest():
                self._start(
                    entry, call, self._changes.retry_failed(request, source, until), at_once=False
                )
            case DeleteJobsRequest():
                self._start(
                    entry, call, self._changes.delete_jobs(request, source, until), at_once=False
                )
            case _:
                raise AssertionError(request)

    def _done(self, entry: CallEntry, head: Head, result: Result) -> None:
        self._state.replies.add(entry, Status.DONE, codec.encode_reply(head, result))

    # --- in slices ---------------------------------------------------------------------------

    def _start(
        self, entry: CallEntry, call: Call, answering: Steps, *, at_once: bool = True
    ) -> None:
        """Start a task. `at_once`: the first slice is small, or only a search."""
        self._tasks.check_room(self._state.name)
        steps = self._answering(entry, call.head, answering)
        next(steps)
        if isinstance(call.request, CountRequest | ScanRequest):
            self._searches[entry.router, entry.call_id] = steps
        try:
            self._tasks.start(steps, at_once=at_once)
        except StorageError as error:
            raise AnsweredError(error.message) from error

    def _answering(self, entry: CallEntry, head: Head, answering: Steps) -> Steps:
        """Run it, and see to it that it is answered exactly once, however it ends; or not at all,
        if the shard stops before it has changed anything: then a successor carries it out.

        Has to be begun at once: a generator that was never begun is closed without a trace."""
        replies = self._state.replies
        try:
            yield None
            try:
                result = yield from answering
            finally:
                self._searches.pop((entry.router, entry.call_id), None)
        except ShardStops:
            return
        except GeneratorExit:
            closed = ShardConnectionFailed([self._state.name], "closed its store meanwhile")
            replies.fail(entry, head, closed)
            raise
        except TimeoutError:
            replies.fail(entry, head, PinLaterError("the search did not end in time; narrow it"))
        except StorageError as error:
            replies.fail(entry, head, self._state.unable(error))
            if not isinstance(error, StorageNotCommitted):
                raise
        except PinLaterError as error:
            replies.fail(entry, head, error)
        else:
            self._done(entry, head, result)

    def end_search(self, router: bytes, call_id: int) -> None:
        """End a search that nobody waits for; calls that change jobs, or were answered, go on."""
        steps = self._searches.get((router, call_id))
        if steps is not None:
            self._tasks.end_search(steps)

    # --- queues ------------------------------------------------------------------------------

    def create_queues(self, names: Iterable[object]) -> None:
        """Create queues that other shards have, except those whose names this store cannot hold."""
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

    def _delete_queue(self, queue: str) -> None:
        """Delete a queue; the router has checked the password."""
        if queue in self._state.ready:
            self._engine.delete_queue(queue)
            self._state.drop_queue(queue)

    # --- jobs by descriptor --------------------------------------------------------------------

    def _names_other_shards(self, request: LookupRequest) -> bool:
        parsed = map(JobDescriptor.parse, request.descriptors)
        return any(job is not None and job.shard != self._state.name for job in parsed)

    def _lookup(self, request: LookupRequest) -> Steps:
        """Look up jobs, leaving out descriptors that are malformed or name no job here."""
        by_queue = yield from self._named_jobs(request)
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

    def _named_jobs(self, request: LookupRequest) -> Steps:
        """Return the jobs that descriptors and keys name, by queue."""
        by_queue: dict[str, list[JobKey]] = {}
        for text in dict.fromkeys(request.descriptors):
            parsed = JobDescriptor.parse(text)
            if (
                parsed is not None
                and parsed.shard == self._state.name
                and 1 <= parsed.priority <= LAST_PRIORITY
                and parsed.local_id <= LAST_LOCAL_ID
            ):
                key = JobKey(parsed.priority, parsed.local_id)
                by_queue.setdefault(parsed.queue, []).append(key)
        for queue, named in _by_queue(request.keys or ()).items():
            for part in chunks(named, _LOOKUPS_A_SLICE):
                for holder in self._holders(queue, part).values():
                    key = JobKey(holder.priority, holder.local_id)
                    by_queue.setdefault(holder.queue, []).append(key)
                yield None
        return by_queue

    def find_keys(self, placement: int, keys: Sequence[QueueKey]) -> list[str]:
        """Take no key any more under an earlier placement; return the descriptors of the jobs that
        hold keys, "" for each that is free. Raises StorageError."""
        self._engine.raise_fence(placement)
        held: dict[QueueKey, str] = {}
        for queue, named in _by_queue(keys).items():
            for key, job in self._holders(queue, named).items():
                place = f"{job.queue}:s{self._state.name}:p{job.priority}:{job.local_id}"
                held[QueueKey(queue, key)] = place
        return [held.get(key, "") for key in keys]

    def _holders(self, queue: str, keys: Sequence[str]) -> Mapping[str, KeyHolder]:
        """Return the jobs that hold keys of a queue, or of all, each with its queue."""
        if queue == ALL_QUEUES:
            return self._engine.find_keys_of_all(keys)
        found = self._engine.find_keys(queue, keys) if queue in self._state.ready else {}
        return {key: KeyHolder(*job, True, queue) for key, job in found.items()}

    def _record(self, queue: str, job: StoredJob) -> JobRecord:
        key = job.key
        return JobRecord(f"{queue}:s{self._state.name}:p{key.priority}:{key.local_id}", *job[1:])

    # --- searches ------------------------------------------------------------------------------

    def _count(self, request: CountRequest, source: str, until: float) -> Steps:
        """Raises TimeoutError if it takes most of its time: a number that is too low would be
        wrong."""
        self._state.queue(request.queue)
        self._state.rules.count(request)
        search = self._jobs_of(request, self._state.config.server.count_limit, until)
        return (yield from run_search(SearchCall("count", search, source)))

    def _scan(self, request: ScanRequest, source: str, until: float) -> Steps:
        """Scan for most of the call's time; the continuation goes on from there."""
        self._state.queue(request.queue)
        after = self._state.rules.scan(request)
        limit = min(request.limit, self._state.config.server.scan_limit)
        if request.max_ms is not None:
            until = min(until, self._clock.monotonic() + request.max_ms / 1000)
        search = self._jobs_of(request, limit + 1, until)  # one more tells whether there is more
        search = search._replace(after=self._after(after), choice=request.options)
        if request.newest_end_first:
            search = search._replace(future=None, newest_end_first=True)
        part: ScanPart = yield from run_search(SearchCall("scan", search, source))
        jobs = part.jobs[:limit]
        continuation = CONTINUATION_END
        if part.more or len(part.jobs) > limit:
            place, shard = after or SCAN_START, self._state.name
            if part.place is not None and len(part.jobs) <= limit:
                place = ScanKey(part.place.time_ms, shard, *part.place[1:])
            elif jobs:
                place = ScanKey(search.time_of(jobs[-1]), shard, *jobs[-1].key)
            continuation = place.token()
        records = [self._record(request.queue, job) for job in jobs]
        return ScanResult(records, continuation, part.looked_at, self._jobs_in(search))

    def _jobs_in(self, search: Search) -> int | None:
        """Return how many jobs are in the state and priorities of a search; None: not known yet."""
        depths = self._engine.depths([search.queue]).get(search.queue)
        if depths is None:
            return None
        places = product(search.priorities, (search.state,))
        return sum(depths.get(place, 0) for place in places)

    def _after(self, key: ScanKey | None) -> ScanAfter | None:
        """Return where this shard continues. Of equal run-after, shards come one by one."""
        if key is None:
            return None
        if key.shard < self._state.name:
            return ScanAfter(key.time_ms, 0, 0)  # all of this run-after are still to come
        if key.shard > self._state.name:
            return ScanAfter(key.time_ms, LAST_PRIORITY + 1, 0)  # none of them
        return ScanAfter(key.time_ms, key.priority, key.local_id)

    def _jobs_of(self, request: CountRequest | ScanRequest, limit: int, until: float) -> Search:
        levels = range(1, self._state.config.server.num_priority_levels + 1)
        return Search(
            request.queue,
            request.state,
            levels if request.priority is None else (request.priority,),
            limit,
            future=request.future,
            now_ms=self._clock.now_ms(),
            body_regex=request.body_regex,
            deadline=until,
        )


def _by_queue(keys: Sequence[QueueKey]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for queue, key in dict.fromkeys(keys):
        found.setdefault(queue, []).append(key)
    return found


class JobChanges:
    """The changes of many jobs of one shard."""

    def __init__(self, state: ShardState, pace: Pace) -> None:
        self._engine = state.engine
        self._state = state
        self._clock = state.clock
        self._pace = pace

    def oldest_failed(self, request: RetryFailedRequest) -> bytes:
        self._state.queue(request.queue)
        self._state.rules.retry_failed(request, self._clock.now_ms())
        ages = self._engine.oldest_failed(request.queue, request.priority, limit=request.limit)
        return b"".join(map(_MILLIS.pack, ages))

    def retry_failed(self, request: RetryFailedRequest, source: str, until: float) -> Steps:
        self._state.queue(request.queue)
        self._state.rules.retry_failed(request, self._clock.now_ms())
        if request.chooses:
            change = self._retrying(request)
            return (yield from self._chosen(request, JobState.FAILED, source, until, change))
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

        return (yield from self._in_slices(queue, request.limit, until, retry))

    def _retrying(self, request: RetryFailedRequest) -> _Change:
        """Return what retries jobs that were found; their run-afters follow those of the jobs that
        it was given before."""
        choice, places = request.options or JobChoice(), count()
        jobs = request.limit if choice.descriptors is None else len(choice.descriptors)
        ended_before_ms = choice.ended_before_ms
        begin_ms, spread_ms = request.run_after_ms, request.spread_ms or 0
        if begin_ms is None:
            begin_ms = self._clock.now_ms()

        def retry(keys: Sequence[JobKey]) -> int:
            now_ms = self._clock.now_ms()
            run_afters = {
                key: begin_ms + spread_ms * place // jobs
                for key, place in zip(keys, places, strict=False)
            }
            requeued = self._engine.retry_found(
                request.queue,
                run_afters,
                attempts=request.attempts_to_allow,
                ended_before_ms=LATEST_MS if ended_before_ms is None else ended_before_ms,
                now_ms=now_ms,
            )
            self._state.requeue(request.queue, requeued, now_ms)
            return len(requeued)

        return retry

    def delete_jobs(self, request: DeleteJobsRequest, source: str, until: float) -> Steps:
        self._state.queue(request.queue)
        self._state.rules.delete_jobs(request)
        queue, state = request.queue, request.state
        ended_before_ms = (request.options or JobChoice()).ended_before_ms
        if ended_before_ms is None:
            ended_before_ms = LATEST_MS

        def delete(limit: int) -> int:
            return self._deleted(
                request, self._engine.delete_jobs(queue, state, request.priority, limit=limit)
            )

        def delete_found(keys: Sequence[JobKey]) -> int:
            return self._deleted(
                request,
                self._engine.delete_found(queue, state, keys, ended_before_ms=ended_before_ms),
            )

        if request.chooses:
            return (yield from self._chosen(request, state, source, until, delete_found))
        return (yield from self._in_slices(queue, request.limit, until, delete))

    def _in_slices(
        self, queue: str, most: int, until: float, change: Callable[[int], int]
    ) -> Steps:
        """Have `change` change so many jobs at a time, until it finds no more, most of the time is
        used, or the shard stops; returns how many it has changed."""
        changed = 0
        while changed < most and queue in self._state.ready:
            limit = min(self._pace.jobs, most - changed)
            with self._pace:
                found = change(limit)
            changed += found
            if found < limit or self._clock.monotonic() >= until:
                break
            try:
                yield None
            except ShardStops:
                break
        return changed

    def _chosen(
        self,
        request: RetryFailedRequest | DeleteJobsRequest,
        state: JobState,
        source: str,
        until: float,
        change: _Change,
    ) -> Steps:
        """Have `change` change the jobs that a request chooses; return how many it has changed, or
        of a dry run how many it would."""
        choice = request.options or JobChoice()
        search = Search(
            request.queue,
            state,
            self._state.rules.levels(request),
            request.limit,
            body_regex=request.body_regex,
            deadline=until,
            choice=request.options,
        )
        if choice.descriptors is not None:
            facts = self._state.queue(request.queue)
            named = filter(None, map(facts.key, dict.fromkeys(choice.descriptors)))
            keys = [key for key in named if key.priority in search.priorities]
            if request.dry_run:
                return (yield from self._count_named(search, keys, choice.ended_before_ms))
            changed, _ = yield from self._in_parts(request.queue, keys, until, change)
            return changed
        if request.dry_run:
            found = yield from run_search(SearchCall("count", search, source))
            return min(found, request.limit)
        return (yield from self._change_found(search, source, change))

    def _count_named(
        self, search: Search, keys: Sequence[JobKey], ended_before_ms: int | None
    ) -> Steps:
        """Count those of `keys` that are in the state, and have ended before that time."""
        found = 0
        for part in chunks(keys, _LOOKUPS_A_SLICE):
            if search.queue in self._state.ready:
                for job in self._engine.lookup(search.queue, part, include_body=False):
                    is_early = ended_before_ms is None or job.updated_at_ms < ended_before_ms
                    found += job.state is search.state and is_early
            yield None
        return found

    def _change_found(self, search: Search, source: str, change: _Change) -> Steps:
        """Have the searcher find jobs, and the loop change those that are as they were."""
        queue, most, changed = search.queue, search.limit, 0
        while changed < most:
            wanted = min(_FOUND_AT_A_TIME, most - changed)
            part = search._replace(limit=wanted)
            try:
                found: Sequence[JobKey] = yield from run_search(SearchCall("find", part, source))
            except (TimeoutError, ShardStops):
                if changed:
                    break
                raise
            done, is_over = yield from self._in_parts(
                queue, found[:wanted], search.deadline, change
            )
            changed += done
            if is_over or len(found) < wanted:
                break
        return changed

    def _in_parts(self, queue: str, keys: Sequence[JobKey], until: float, change: _Change) -> Steps:
        """Have `change` change jobs in parts, a commit each; return how many it has changed, and
        whether that ended early: most of the time is used, the queue has gone, or the shard
        stops."""
        changed, left = 0, iter(keys)
        while part := list(islice(left, self._pace.jobs)):
            if queue not in self._state.ready:
                return changed, True
            with self._pace:
                changed += change(part)
            if self._clock.monotonic() >= until:
                return changed, True
            try:
                yield None
            except ShardStops:
                return changed, True
        return changed, False

    def _deleted(self, request: DeleteJobsRequest, keys: Sequence[JobKey]) -> int:
        """Remove PENDING jobs from memory; return how many they are."""
        self._state.ended(request.queue)
        if request.state is JobState.PENDING:
            self._state.touched.add(request.queue)
            for priority, alike in groupby(sorted(keys), attrgetter("priority")):
                local_ids = [key.local_id for key in alike]
                self._state.ready.discard(request.queue, priority, local_ids)
        return len(keys)


def run_search(call: SearchCall) -> Steps:
    """Have the searcher do it. What it raises is raised here; its errors with the store say
    nothing about the owner's connection."""
    try:
        return (yield call)
    except StorageError as error:
        raise PinLaterError(f"the search failed: {error.message}") from error
