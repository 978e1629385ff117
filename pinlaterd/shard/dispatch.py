"""Takes calls as they arrive: decodes each, and finds out what it takes to answer it.

A call of the job path becomes an Operation for the next commit; all others are answered at once, or
as tasks, in slices. What is wrong with a call is answered here.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Callable
from typing import Any, cast

from pinlaterd.errors import (
    InvalidRequest,
    Overloaded,
    PinLaterError,
    ProtocolError,
    ShardConnectionFailed,
    StorageError,
    StorageNotCommitted,
)
from pinlaterd.model import (
    AckRequest,
    CheckpointRequest,
    CountRequest,
    CreateQueueRequest,
    DeleteJobsRequest,
    DeleteQueueRequest,
    DequeueRequest,
    EnqueueRequest,
    LookupRequest,
    QueueNamesRequest,
    Result,
    RetryFailedRequest,
    ScanRequest,
)
from pinlaterd.rpc import codec
from pinlaterd.rpc.codec import Call, Head
from pinlaterd.shard.bulk import Answering, BulkCalls
from pinlaterd.shard.dequeue import Dequeue
from pinlaterd.shard.operations import (
    Ack,
    CheckpointJobs,
    Enqueue,
    ForeignError,
    Operation,
    ReleaseClaims,
    Replies,
)
from pinlaterd.shard.state import STORE_FAILED, Arrival, ShardState
from pinlaterd.shard.tasks import ShardStops, Steps, Tasks
from pinlaterd.wire.envelope import (
    CallEntry,
    Op,
    ReplyEntry,
)

log = logging.getLogger(__name__)

# Calls that are answered in slices; more is more than would be done within their deadlines.
MOST_TASKS = 1_000
_DELETE_QUEUE = b"deleteQueue"
_TAKES_NO_JOBS = "is dequeue-only"
_NEVER = float("inf")
_CALLS = (Op.CALL, Op.VALIDATE, Op.OLDEST_FAILED, Op.ACK_SCHEDULED)

# Of a call of one type of request: its Operation; None if it is answered otherwise.
_Handler = Callable[[Arrival, Call, int], Operation | None]


class Dispatch:
    """The first to see a call."""

    def __init__(self, state: ShardState, bulk: BulkCalls, tasks: Tasks, replies: Replies) -> None:
        self._state = state
        self._bulk = bulk
        self._tasks = tasks
        self._reply = replies.reply
        self._searches: dict[tuple[bytes, int], Steps] = {}  # by router and call id
        self._handlers: dict[type[Any], _Handler] = {
            EnqueueRequest: self._enqueue,
            DequeueRequest: self._dequeue,
            AckRequest: self._ack,
            CheckpointRequest: self._checkpoint,
            CreateQueueRequest: self._create_queue,
            DeleteQueueRequest: self._delete_queue,
            QueueNamesRequest: self._queue_names,
            LookupRequest: self._lookup,
            CountRequest: self._search,
            ScanRequest: self._search,
            RetryFailedRequest: self._retry_failed,
            DeleteJobsRequest: self._delete_jobs,
        }

    def take(self, arrival: Arrival, now_ms: int) -> Operation | None:
        """The Operation that `arrival` takes; None if it is answered here, now or later."""
        op = arrival.entry.op
        if op in _CALLS:
            return self._take_call(arrival, now_ms)
        try:
            if op is Op.RELEASE:
                return ReleaseClaims(arrival, self._state)
            if op is Op.END_SEARCH:
                self._end_search(arrival)
                return None
            self._bulk.create_queues(json.loads(arrival.entry.message))
        except (ProtocolError, ValueError) as error:
            log.error("a router sent a message that can't be read: %s", error)
        except StorageNotCommitted as error:
            log.warning("can't create queues that other shards have: %s", error.message)
            self._reply(arrival, arrival.refused(STORE_FAILED))
            return None
        self._reply(arrival, arrival.done(b""))
        return None

    def _end_search(self, arrival: Arrival) -> None:
        """Of a call that changes jobs, and of one that was answered meanwhile, nothing is ended."""
        call_id = int(arrival.entry.message)
        steps = self._searches.get((arrival.router, call_id))
        if steps is not None:
            self._tasks.end_search(steps)
        self._reply(arrival, arrival.done(b""))

    def changes_queues(self, arrival: Arrival) -> bool:
        """Whether it may drop a queue that others in the same batch rely on. A job's body that
        holds this name only ends a batch early."""
        return arrival.entry.op is Op.CALL and _DELETE_QUEUE in arrival.entry.message[:40]

    def release_of(self, router: bytes, entry: ReplyEntry) -> Arrival:
        """A call to end the claims in an answer of ours."""
        return Arrival(router, CallEntry(entry.call_id, _NEVER, entry.payload, Op.RELEASE))

    def _take_call(self, arrival: Arrival, now_ms: int) -> Operation | None:
        most = self._state.config.server.max_jobs_per_call
        try:
            call = codec.decode_call(arrival.entry.message, most)
        except (ProtocolError, PinLaterError) as error:
            self._explain(arrival, error)
            return None
        try:
            return self._handlers[type(call.request)](arrival, call, now_ms)
        except ForeignError:
            self._reply(arrival, arrival.foreign())
        except StorageNotCommitted as error:
            self._reply(arrival, arrival.failed(call.head, self._unable(error)))
        except StorageError as error:
            self._reply(arrival, arrival.failed(call.head, self._unable(error)))
            raise
        except PinLaterError as error:
            self._reply(arrival, arrival.failed(call.head, error))
        return None

    def _explain(self, arrival: Arrival, error: ProtocolError | PinLaterError) -> None:
        """Answer bytes that are no call of ours, if so much of them can be read."""
        try:
            peeked = codec.peek(arrival.entry.message)
        except ProtocolError:
            log.error("a router sent bytes that are no call")
            self._reply(arrival, arrival.done(b""))
            return
        if peeked.method is None:
            self._reply(arrival, arrival.done(codec.encode_unknown_method(peeked.head)))
            return
        told = error if isinstance(error, PinLaterError) else InvalidRequest(str(error))
        self._reply(arrival, arrival.failed(peeked.head, told))

    def _answer(self, arrival: Arrival, head: Head, result: Result) -> None:
        self._reply(arrival, arrival.done(codec.encode_reply(head, result)))

    def _unable(self, error: StorageError) -> ShardConnectionFailed:
        return ShardConnectionFailed([self._state.name], error.message)

    # --- the job path ------------------------------------------------------------------------

    def _enqueue(self, arrival: Arrival, call: Call, now_ms: int) -> Operation | None:
        # Routers know, too; a call that was on its way when they heard is given to another shard.
        if self._state.dequeue_only:
            self._reply(arrival, arrival.refused(_TAKES_NO_JOBS))
            return None
        operation = Enqueue(arrival, call, self._state, now_ms)
        if arrival.entry.op is not Op.VALIDATE and operation.jobs:
            return operation
        self._answer(arrival, call.head, [])
        return None

    def _dequeue(self, arrival: Arrival, call: Call, now_ms: int) -> Operation:
        return Dequeue(arrival, call, self._state, now_ms)

    def _ack(self, arrival: Arrival, call: Call, now_ms: int) -> Operation:
        operation = Ack(arrival, call, self._state, now_ms)
        if arrival.entry.op is Op.ACK_SCHEDULED:
            claim, source = self._bulk.claim_scheduled, call.context.source
            operation.parts = deque(claim(op, source, now_ms) for op in operation.parts)
        return operation

    def _checkpoint(self, arrival: Arrival, call: Call, _now_ms: int) -> Operation:
        return CheckpointJobs(arrival, call, self._state)

    # --- queues ------------------------------------------------------------------------------

    def _create_queue(self, arrival: Arrival, call: Call, _now_ms: int) -> None:
        self._bulk.create_queue(cast("CreateQueueRequest", call.request))
        self._answer(arrival, call.head, None)

    def _delete_queue(self, arrival: Arrival, call: Call, _now_ms: int) -> None:
        self._bulk.delete_queue(cast("DeleteQueueRequest", call.request))
        self._answer(arrival, call.head, None)

    def _queue_names(self, arrival: Arrival, call: Call, _now_ms: int) -> None:
        self._answer(arrival, call.head, frozenset(self._state.ready.queues()))

    # --- in slices ---------------------------------------------------------------------------

    def _lookup(self, arrival: Arrival, call: Call, _now_ms: int) -> None:
        self._check_tasks()
        request = cast("LookupRequest", call.request)
        if arrival.entry.whole and self._bulk.names_other_shards(request):
            raise ForeignError
        self._start(arrival, call, self._bulk.lookup(request), at_once=True)

    def _search(self, arrival: Arrival, call: Call, _now_ms: int) -> None:
        request = cast("CountRequest | ScanRequest", call.request)
        self._check_tasks()
        self._state.check_queue(request.queue)
        begin = self._bulk.count if isinstance(request, CountRequest) else self._bulk.scan
        answering = begin(request, call.context.source, arrival.entry.deadline)  # type: ignore[arg-type]
        self._start(arrival, call, answering, at_once=True)

    def _retry_failed(self, arrival: Arrival, call: Call, _now_ms: int) -> None:
        request = cast("RetryFailedRequest", call.request)
        if arrival.entry.op is Op.OLDEST_FAILED:
            self._state.check_queue(request.queue)
            self._reply(arrival, arrival.done(self._bulk.oldest_failed(request)))
            return
        self._check_tasks()
        self._state.check_queue(request.queue)
        answering = self._bulk.retry_failed(request, arrival.entry.deadline)
        self._start(arrival, call, answering)

    def _delete_jobs(self, arrival: Arrival, call: Call, _now_ms: int) -> None:
        request = cast("DeleteJobsRequest", call.request)
        self._check_tasks()
        self._state.check_queue(request.queue)
        answering = self._bulk.delete_jobs(request, call.context.source, arrival.entry.deadline)
        self._start(arrival, call, answering)

    def _check_tasks(self) -> None:
        if len(self._tasks) >= MOST_TASKS:
            raise Overloaded(f"shard {self._state.name} has {MOST_TASKS} such calls in flight")

    def _start(
        self, arrival: Arrival, call: Call, answering: Answering, *, at_once: bool = False
    ) -> None:
        """`at_once`: the first slice is small, or only a search."""
        steps = self._answering(arrival, call.head, answering)
        next(steps)
        if isinstance(call.request, CountRequest | ScanRequest):
            self._searches[arrival.router, arrival.entry.call_id] = steps
        self._tasks.start(steps, at_once=at_once)

    def _answering(self, arrival: Arrival, head: Head, answering: Answering) -> Steps:
        """Run it, and see to it that it is answered exactly once, however it ends; or not at all,
        if the shard stops before it has changed anything: then a successor carries it out.

        Has to be begun at once: a generator that was never begun is closed without a trace."""
        try:
            yield None
            try:
                result = yield from answering
            finally:
                self._searches.pop((arrival.router, arrival.entry.call_id), None)
        except ShardStops:
            return
        except GeneratorExit:
            closed = ShardConnectionFailed([self._state.name], "closed its store meanwhile")
            self._reply(arrival, arrival.failed(head, closed))
            raise
        except TimeoutError:
            late = PinLaterError("the search did not end in time; narrow it")
            self._reply(arrival, arrival.failed(head, late))
        except StorageError as error:
            self._reply(arrival, arrival.failed(head, self._unable(error)))
            if not isinstance(error, StorageNotCommitted):
                raise
        except PinLaterError as error:
            self._reply(arrival, arrival.failed(head, error))
        else:
            self._answer(arrival, head, result)
