"""Group commit: what has arrived becomes batches, each of which goes into one commit.

Every accepted call is answered exactly once: after its commit, when it is refused, or when the
store fails. What can be found wrong with a call is found before its commit; if a commit fails
beyond doubt, each of its calls is tried alone, so that no other suffers.
"""

from __future__ import annotations

import json
import logging
import math
from collections import deque
from collections.abc import Sequence
from typing import cast

from pinlaterd.engines.base import Batch, BatchResult, ClaimRoom
from pinlaterd.errors import (
    InvalidRequest,
    Overloaded,
    PinLaterError,
    ProtocolError,
    QueueFull,
    QueueGone,
    QueueNotFound,
    ShardConnectionFailed,
    StorageError,
    StorageFull,
    StorageLocked,
    StorageNotCommitted,
)
from pinlaterd.model import (
    AckRequest,
    CheckpointRequest,
    DequeueRequest,
    EnqueueRequest,
    FinishRequest,
    Method,
)
from pinlaterd.rpc import codec
from pinlaterd.rpc.codec import Call
from pinlaterd.shard.bulk import AnsweredError, BulkCalls
from pinlaterd.shard.dequeue import JOB_OVERHEAD_BYTES, Dequeue
from pinlaterd.shard.health import WHOLE_STORE
from pinlaterd.shard.operations import (
    BATCH_JOBS,
    PART_JOBS,
    Ack,
    AckJobs,
    AckScheduled,
    ApplyCheckpoints,
    CheckpointJobs,
    Commit,
    Enqueue,
    EnqueueWithOptions,
    FinishJobs,
    ForeignError,
    Operation,
    ReleaseClaims,
    have_keys,
)
from pinlaterd.shard.state import STORE_FAILED, ShardState
from pinlaterd.shard.tasks import MOST_TASKS, Steps, Tasks
from pinlaterd.wire.envelope import CALL, RELEASES, CallEntry, Op, Status, unpack_keys

log = logging.getLogger(__name__)

# After so many calls in a row for which a store had no room, the enqueues behind are not tried.
_REFUSALS_OF_A_FULL_STORE = 10
# How long an enqueue waits for room that other shards may have, and when a client is to try again.
_ROOM_SECONDS, _RETRY_AFTER_MS = 0.1, 1000
_TOO_LATE = "got the call after its deadline"
_DELETE_QUEUE = Method.DELETE_QUEUE.encode()
_TAKES_NO_JOBS = "is dequeue-only"
_FIND_KEYS, _VALIDATE = Op.FIND_KEYS, Op.VALIDATE  # look-ups cost as much as calls
_CALLS = (Op.CALL, Op.VALIDATE, Op.OLDEST_FAILED, Op.ACK_SCHEDULED)


class Batches:
    """The calls that have arrived, and the batches made of them."""

    def __init__(self, state: ShardState, bulk: BulkCalls, tasks: Tasks) -> None:
        self.backlog: deque[CallEntry] = deque()
        self._state = state
        self._engine = state.engine
        self._clock = state.clock
        self._locks = state.locks
        self._replies = state.replies
        self._dispatch = Dispatch(state, bulk)
        self._tasks = tasks
        self._in_flight: dict[Operation, None] = {}  # neither answered nor in the backlog
        self.unfinished: list[Operation] = []  # those that go on with the next batch
        self._dry_runs: deque[Dequeue] = deque()  # in turn
        # Enqueues for which there is no room yet, and until when they wait for permits.
        self._awaiting_room: dict[Enqueue, float] = {}
        self._room = ClaimRoom(state.batch_bytes, JOB_OVERHEAD_BYTES)
        # How many jobs the dequeues of a batch may ask for. What does not fit, because bodies are
        # large, is taken from the index for nothing: then the next batch asks for twice of what
        # did fit, and those after it for more and more.
        self._most_claims = BATCH_JOBS

    def refuse_all(self, reason: str) -> None:
        """Refuse all that has arrived and is in no batch yet."""
        while self.backlog:
            self._state.stats.count("shard_calls_refused")
            self._replies.refuse(self.backlog.popleft(), reason)

    def abandon(self, error: ShardConnectionFailed) -> None:
        """End all that is in flight; those that wait for a lock are in the backlog then."""
        for operation in self._in_flight:
            operation.fail(error)
        self._in_flight.clear()
        self.unfinished.clear()
        self._awaiting_room.clear()
        self._dry_runs.clear()
        self.backlog.extendleft(reversed(self._locks.clear()))

    def leave_dry_runs(self) -> None:
        """Leave dry runs, which have changed nothing, unanswered."""
        for dry_run in self._dry_runs:
            if not dry_run.begun:
                del self._in_flight[dry_run]

    def try_locked_again(self) -> None:
        queues, calls = self._locks.due()
        if not queues:
            return
        self.backlog.extendleft(reversed(calls))
        ready, now_ms = self._state.ready, self._clock.now_ms()
        for queue in ready.queues() if WHOLE_STORE in queues else [q for q in queues if q in ready]:
            ready.look_again(queue)
            if ready.is_counted(queue, now_ms):
                self._state.touched.add(queue)

    # --- one batch ---------------------------------------------------------------------------

    def run(self) -> None:
        """Make one commit of what has arrived, as much as fits."""
        batch = _Batch(self._clock.now_ms(), self._clock.monotonic(), self._most_claims)
        unfinished, self.unfinished = self.unfinished, []
        for operation in unfinished:
            if batch.jobs < PART_JOBS or operation.entry.deadline <= batch.now:
                self._add(batch, operation)
            else:
                self.unfinished.append(operation)
        if self._awaiting_room:
            for enqueue in self._enqueues_to_go_on(batch.now):
                self._add(batch, enqueue)
        self._fill(batch)
        operations = [*batch.writes, *batch.dequeues]
        if not operations:
            return
        refusal = self._commit(operations, batch.now_ms)
        for dequeue in batch.left_out:
            self._conclude_empty(dequeue, batch.now_ms)
        if refusal and not isinstance(refusal, StorageFull) and not self._engine.failure:
            # Once, however many calls it refused.
            self._state.health.failed(self._clock.monotonic(), refusal.message)

    def _fill(self, batch: _Batch) -> None:
        backlog, replies = self.backlog, self._replies
        take, in_flight = self._dispatch.take, self._in_flight
        # Look-ups are answered without a commit, and their answers may be large.
        while (
            backlog
            and batch.jobs < BATCH_JOBS
            and batch.claims_left > 0
            and replies.bytes < self._state.batch_bytes
        ):
            call = backlog.popleft()
            if call.deadline <= batch.now:
                self._state.stats.count("shard_calls_expired")
                # Nothing was done; the router can forget it.
                replies.refuse(call, _TOO_LATE)
                continue
            if (batch.writes or batch.dequeues or self.unfinished) and _goes_alone(call):
                # These rely on the queues as they are; or it relies on what they will have stored.
                backlog.appendleft(call)
                break
            batch.jobs += 1  # so that calls without jobs are bounded, too
            operation = take(call, batch.now_ms)
            if operation is not None:
                in_flight[operation] = None
                self._add(batch, operation)

    def _add(self, batch: _Batch, operation: Operation) -> None:
        """Add an operation, or answer or continue one that needs no commit."""
        late = operation.entry.deadline <= batch.now
        if late and (operation.parts if isinstance(operation, Dequeue) else operation.begun):
            reason = "has carried out a part of the call in time"
            operation.fail(ShardConnectionFailed([self._state.name], reason))
            del self._in_flight[operation]
            return
        locked = self._locks.holding(operation.queues) if self._locks.known else None
        if locked is not None:
            self._put_off([operation], locked, batch.now_ms)
        elif isinstance(operation, Dequeue):
            self._add_dequeue(batch, operation, late=late)
        elif (
            self._state.room.queues
            and isinstance(operation, Enqueue)
            and not self._fits(batch, operation)
        ):
            return
        elif jobs := operation.rows:
            operation.in_commit = jobs
            batch.writes.append(operation)
            batch.jobs += jobs
        else:
            self._conclude(operation, batch.now_ms)

    def _add_dequeue(self, batch: _Batch, dequeue: Dequeue, *, late: bool) -> None:
        """Let it choose its jobs."""
        now_ms = batch.now_ms
        most_jobs = min(BATCH_JOBS - batch.jobs, batch.claims_left)
        permits, queue = self._state.permits, dequeue.queue
        is_limited = queue in permits.queues
        if is_limited:
            if queue not in batch.permits_left:
                batch.permits_left[queue] = permits.free(queue)
            most_jobs = min(most_jobs, batch.permits_left[queue])
        if late:
            dequeue.remaining = 0  # what it has by now is its answer
        elif dequeue.dry_run:
            if not dequeue.parts and dequeue.remaining:
                self._look_later(dequeue)
                return
        elif dequeue.remaining and most_jobs > 0 and len(dequeue.parts) < 2:  # acks go first
            try:
                dequeue.choose(most_jobs, now_ms)
            except StorageLocked as error:
                self._put_off([dequeue], error, now_ms)
                return
            except StorageNotCommitted as error:
                self._refuse([dequeue], error, now_ms)
                return
        if jobs := dequeue.rows:
            dequeue.in_commit = jobs
            batch.dequeues.append(dequeue)
            batch.jobs += jobs
            batch.claims_left -= dequeue.chosen
            if is_limited:
                batch.permits_left[queue] -= dequeue.chosen
        elif batch.dequeues:
            batch.left_out.append(dequeue)
        else:
            self._conclude_empty(dequeue, now_ms)

    # --- room for enqueues -------------------------------------------------------------------

    @property
    def awaits_room(self) -> bool:
        """Return whether enqueues wait for permits."""
        return bool(self._awaiting_room)

    @property
    def room_due(self) -> float:
        """When an enqueue has waited for long enough, in monotonic seconds."""
        return min(self._awaiting_room.values(), default=math.inf)

    def _fits(self, batch: _Batch, enqueue: Enqueue) -> bool:
        """Take room for the jobs of an enqueue; without it, let the enqueue wait or refuse it."""
        room, queue, waiting = self._state.room, enqueue.queue, self._awaiting_room
        until = waiting.pop(enqueue, batch.now + _ROOM_SECONDS)
        if queue not in room.queues:
            return True
        if queue not in batch.room_left:
            batch.room_left[queue] = room.free(queue)
        fits = enqueue.rows <= batch.room_left[queue]
        if fits:
            batch.room_left[queue] -= enqueue.rows
        elif batch.now < until and not room.is_contested(queue):
            waiting[enqueue] = until
        else:
            self._refuse_full(enqueue)
        room.look(queue, waiting=max([e.rows for e in waiting if e.queue == queue], default=0))
        return fits

    def _refuse_full(self, enqueue: Enqueue) -> None:
        """Refuse an enqueue; others may have room, unless the job's key has its place here."""
        full, call = QueueFull(enqueue.queue, _RETRY_AFTER_MS), enqueue.entry
        self._state.stats.count(f"{enqueue.queue}_enqueue_rejected")
        if call.placement:
            enqueue.fail(full)
        else:
            self._replies.refuse(call, full.message.removeprefix("overloaded: "))
        del self._in_flight[enqueue]

    def _enqueues_to_go_on(self, now: float) -> list[Enqueue]:
        """List those that have room by now, or none anywhere, or have waited for long enough."""
        room = self._state.room
        return [
            enqueue
            for enqueue, until in self._awaiting_room.items()
            if until <= now
            or enqueue.queue not in room.queues
            or room.is_contested(enqueue.queue)
            or room.free(enqueue.queue) >= enqueue.rows
        ]

    # --- its commit --------------------------------------------------------------------------

    def _commit(self, operations: Sequence[Operation], now_ms: int) -> StorageNotCommitted | None:
        """Commit; return why none of them was carried out, if that says anything of the store; None
        if any was. Those whose queue is locked are put off, and the others go on without them."""
        while operations:
            commit = Commit(operations, self._room)
            batch = commit.batch
            started = self._clock.monotonic()
            try:
                result = self._engine.apply(batch, now_ms)
            except StorageLocked as error:
                self._locks.met(error, started)
                locked = [one for one in operations if error.queue in one.queues]
                others = [one for one in operations if error.queue not in one.queues]
                self._put_off(locked or operations, error, now_ms)  # "" stands for all queues
                operations = others if locked else ()
                continue
            except StorageNotCommitted as error:
                self._state.note_refusal(error)
                if len(operations) > 1 and not self._engine.failure:
                    return self._apart(operations, error, now_ms)
                self._refuse(operations, error, now_ms)
                return error
            self._measure(operations, batch, result, started)
            commit.hand_over(result, self._state, now_ms)
            for operation in operations:
                self._conclude(operation, now_ms)
            if batch.claims:
                self._state.record_delays()
            return None
        return None

    def _measure(
        self, operations: Sequence[Operation], batch: Batch, result: BatchResult, started: float
    ) -> None:
        stats, now = self._state.stats, self._clock.monotonic()
        self._state.heard_at = started
        self._state.health.succeeded(now - started, now)
        if batch.enqueues or batch.with_options:
            self._state.health.stored()
        stats.record("shard_batch_jobs", sum([operation.in_commit for operation in operations]))
        stats.record("shard_commit_ms", (now - started) * 1000)
        if self._locks.known:
            self._locks.passed(queue for operation in operations for queue in operation.queues)
        if batch.claims:
            asked = sum([len(claims[1]) for op in batch.claims for claims in op.claims])
            fitted = sum([len(payloads) for payloads in result.claims])
            most = 2 * (self._most_claims if fitted == asked else fitted)
            self._most_claims = max(1, min(BATCH_JOBS, most))

    def _apart(
        self, operations: Sequence[Operation], error: StorageNotCommitted, now_ms: int
    ) -> StorageNotCommitted | None:
        """Commit operations one by one, after `error`, which one of them may have caused; but what
        takes no room does not wait for each refusal of a full store. Returns as `_commit` does;
        where some were refused for lack of room only, that is not why."""
        log.warning("a batch failed, so its calls are tried one by one: %s", error.message)
        groups: list[Sequence[Operation]] = [[operation] for operation in operations]
        if isinstance(error, StorageFull):
            enqueues = [one for one in operations if isinstance(one, Enqueue)]
            others = [one for one in operations if not isinstance(one, Enqueue)]
            if enqueues and others:
                groups = [others, *[[enqueue] for enqueue in enqueues]]
        refusals: list[StorageNotCommitted | None] = []
        not_tried: list[Operation] = []
        full_in_a_row = 0
        for at, group in enumerate(groups):
            if self._engine.failure:  # which it got into meanwhile
                not_tried += [operation for left in groups[at:] for operation in left]
                break
            if full_in_a_row >= _REFUSALS_OF_A_FULL_STORE and isinstance(group[0], Enqueue):
                not_tried += group
                continue
            refusal = self._commit(group, now_ms)
            refusals.append(refusal)
            full_in_a_row = full_in_a_row + 1 if isinstance(refusal, StorageFull) else 0
        if not_tried:
            self._refuse(not_tried, refusals[-1] or error, now_ms)
        if None in refusals:
            return None
        return min(refusals, key=lambda refusal: isinstance(refusal, StorageFull))

    def _conclude(self, operation: Operation, now_ms: int) -> None:
        """Reply after a commit, or where none is needed."""
        if operation.reply(now_ms):
            del self._in_flight[operation]
        else:
            self.unfinished.append(operation)

    def _conclude_empty(self, dequeue: Dequeue, now_ms: int) -> None:
        """Answer a dequeue that finds nothing in memory."""
        try:
            self._state.confirm()
        except StorageError as error:
            self._refuse([dequeue], error, now_ms)
        else:
            self._conclude(dequeue, now_ms)

    def _put_off(self, operations: Sequence[Operation], error: StorageLocked, now_ms: int) -> None:
        """Have operations whose queue is locked wait for the next try, or refuse them."""
        refused = []
        for operation in operations:
            self._state.touched.update(operation.queues)
            if not operation.begun and self._locks.keep(error, operation.entry):
                operation.give_up(now_ms)
                del self._in_flight[operation]
            else:
                refused.append(operation)
        if refused:
            self._refuse(refused, error, now_ms)

    def _refuse(self, operations: Sequence[Operation], error: StorageError, now_ms: int) -> None:
        """Refuse operations: nothing has changed, so another shard may serve, unless their queue
        was removed. If earlier commits have carried out a part of one, the answer says so."""
        if not isinstance(error, StorageLocked):
            log.warning("calls that can't be carried out: %d: %s", len(operations), error.message)
        self._state.stats.count("shard_calls_refused", len(operations))
        has_reason = isinstance(error, StorageFull | StorageLocked)
        for operation in operations:
            operation.give_up(now_ms)
            if operation.begun:
                operation.fail(self._state.unable(error))
            elif isinstance(error, QueueGone) and error.queue in operation.queues:
                operation.fail(QueueNotFound(error.queue))
            else:
                self._replies.refuse(operation.entry, error.message if has_reason else STORE_FAILED)
            del self._in_flight[operation]

    # --- dry runs ----------------------------------------------------------------------------

    def _look_later(self, dequeue: Dequeue) -> None:
        if len(self._dry_runs) >= MOST_TASKS:
            dequeue.fail(Overloaded(f"{MOST_TASKS} dry runs are in flight already"))
            del self._in_flight[dequeue]
            return
        self._dry_runs.append(dequeue)
        if len(self._dry_runs) == 1:
            self._tasks.start(self._look_in_turn())

    def _look_in_turn(self) -> Steps:
        """Look in slices, one dry run after the other: the answer of only one takes memory."""
        while self._dry_runs:
            dequeue, now_ms = self._dry_runs[0], self._clock.now_ms()
            try:
                for _ in dequeue.look(now_ms):
                    yield None
                    if dequeue.entry.deadline <= self._clock.monotonic():
                        break
            except StorageNotCommitted as error:
                self._refuse([dequeue], error, now_ms)
            else:
                dequeue.answer()
                del self._in_flight[dequeue]
            self._dry_runs.popleft()


class _Batch:
    """A batch in the making: `claims_left` is how many jobs its dequeues may still ask for.
    Dequeues are last: what became ready in a commit is in the index when they reply. `left_out` are
    those that found nothing: what the others have taken may not fit, and then it is theirs."""

    def __init__(self, now_ms: int, now: float, most_claims: int) -> None:
        self.now_ms = now_ms
        self.now = now
        self.writes: list[Operation] = []
        self.dequeues: list[Dequeue] = []
        self.left_out: list[Dequeue] = []
        self.jobs = 0
        self.claims_left = most_claims
        self.permits_left: dict[str, int] = {}  # of limited queues, for jobs to be chosen
        self.room_left: dict[str, int] = {}  # likewise, for jobs to be stored


# --- a call as it arrives -------------------------------------------------------------------


def _goes_alone(entry: CallEntry) -> bool:
    """Return whether a call may drop a queue that others in the same batch rely on, or raises the
    fence of keys. A job's body that holds this name only ends a batch early."""
    op = entry.op
    return op is _FIND_KEYS or (op is CALL and entry.message.find(_DELETE_QUEUE, 0, 40) >= 0)


class Dispatch:
    """Decodes calls. One of the job path becomes an Operation for the next commit; all others are
    answered at once, or as tasks, in slices. What is wrong with a call is answered here."""

    def __init__(self, state: ShardState, bulk: BulkCalls) -> None:
        self._state = state
        self._bulk = bulk
        self._replies = state.replies
        self._operations = {
            EnqueueRequest: self._enqueue,
            DequeueRequest: Dequeue,
            AckRequest: self._ack,
            CheckpointRequest: self._checkpoint,
            FinishRequest: FinishJobs,
        }

    def take(self, entry: CallEntry, now_ms: int) -> Operation | None:
        """Return the Operation that `entry` takes; None if it is answered here, now or later."""
        if entry.op not in _CALLS:
            return self._take_message(entry)
        state, replies = self._state, self._replies
        if entry.placement and entry.op is CALL and not state.takes_keys(entry.placement):
            replies.add(entry, Status.STALE, b"")
            return None
        try:
            most_jobs = state.config.server.max_jobs_per_call
            call = codec.decode_call(entry.message, most_jobs, state.job_defaults)
        except (ProtocolError, PinLaterError) as error:
            self._explain(entry, error)
            return None
        try:
            operation = self._operations.get(type(call.request))
            if operation is not None:
                return operation(entry, call, state, now_ms)
            self._bulk.answer(entry, call)
        except ForeignError:
            replies.add(entry, Status.FOREIGN, b"")
        except AnsweredError:
            raise
        except StorageError as error:
            replies.fail(entry, call.head, state.unable(error))
            if not isinstance(error, StorageNotCommitted):
                raise
        except PinLaterError as error:
            replies.fail(entry, call.head, error)
        return None

    def _take_message(self, entry: CallEntry) -> Operation | None:
        """Take a message between router and shard, which is no call of a client."""
        try:
            if entry.op in RELEASES:
                return ReleaseClaims(entry, self._state)
            if entry.op is Op.FIND_KEYS:
                found = self._bulk.find_keys(*unpack_keys(entry.message))
                self._replies.add(entry, Status.DONE, json.dumps(found).encode())
                return None
            if entry.op is Op.END_SEARCH:
                self._bulk.end_search(entry.router, int(entry.message))
            else:
                self._bulk.create_queues(json.loads(entry.message))
        except (ProtocolError, ValueError) as error:
            log.error("a router sent a message that can't be read: %s", error)
        except StorageNotCommitted as error:
            log.warning("can't do what a router needs: %s", error.message)
            self._replies.refuse(entry, STORE_FAILED)
            return None
        self._replies.add(entry, Status.DONE, b"")
        return None

    def _explain(self, entry: CallEntry, error: ProtocolError | PinLaterError) -> None:
        """Answer bytes that are no call of ours, if so much of them can be read."""
        try:
            peeked = codec.peek(entry.message)
        except ProtocolError:
            log.error("a router sent bytes that are no call")
            self._replies.add(entry, Status.DONE, b"")
            return
        if peeked.method is None:
            self._replies.add(entry, Status.DONE, codec.encode_unknown_method(peeked.head))
            return
        answer = error if isinstance(error, PinLaterError) else InvalidRequest(str(error))
        self._replies.fail(entry, peeked.head, answer)

    def _enqueue(
        self, entry: CallEntry, call: Call, state: ShardState, now_ms: int
    ) -> Operation | None:
        # Routers know, too; a call that was on its way when they heard is given to another shard.
        if state.dequeue_only and not entry.placement:
            self._replies.refuse(entry, _TAKES_NO_JOBS)
            return None
        request = cast("EnqueueRequest", call.request)
        facts = state.queue(request.queue)
        jobs, with_options = state.rules.enqueue(call.context, request, now_ms)
        if with_options and not entry.placement and have_keys(jobs):
            raise ForeignError
        kind = EnqueueWithOptions if with_options else Enqueue
        operation = kind(entry, call.head, facts, state, jobs)
        if entry.op is _VALIDATE or not operation.count:
            self._replies.add(entry, Status.DONE, codec.encode_reply(call.head, []))
            return None
        return operation

    def _ack(self, entry: CallEntry, call: Call, state: ShardState, now_ms: int) -> Operation:
        kind: type[Ack] = AckJobs if call.head.method_name == Method.ACK_JOBS else Ack
        if entry.op is Op.ACK_SCHEDULED:
            kind = AckScheduled
        return kind(entry, call, state, now_ms)

    def _checkpoint(
        self, entry: CallEntry, call: Call, state: ShardState, now_ms: int
    ) -> Operation:
        tells = call.head.method_name == Method.APPLY_CHECKPOINTS
        kind = ApplyCheckpoints if tells else CheckpointJobs
        return kind(entry, call, state, now_ms)
