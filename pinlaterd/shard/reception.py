"""Takes calls as they arrive: decodes each, and finds out what it takes to answer it.

A call of the job path becomes a Work for the next commit; all others are answered at once, or as
sliced works. What is wrong with a call is answered here.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple, cast

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
from pinlaterd.shard.dequeues import Claimer
from pinlaterd.shard.inquiries import Answering, Inquiries
from pinlaterd.shard.planning import ForeignError, Planner
from pinlaterd.shard.tasks import ShardStops, Steps, Tasks
from pinlaterd.shard.works import (
    STORE_FAILED,
    Arrival,
    Memory,
    Work,
    done,
    failed,
    foreign,
    refused,
)
from pinlaterd.wire.envelope import (
    CallEntry,
    MalformedEnvelope,
    Op,
    ReplyEntry,
    unpack_call_id,
)

log = logging.getLogger(__name__)

# Sliced works in hand; more is more than would be done within their deadlines.
MOST_TASKS = 1_000
_DELETE_QUEUE = b"deleteQueue"
_TAKES_NO_JOBS = "is dequeue-only"
_NEVER = float("inf")
_CALLS = (Op.CALL, Op.VALIDATE, Op.OLDEST_FAILED, Op.ACK_SCHEDULED)

Reply = Callable[[Arrival, ReplyEntry], None]


class _Sliced(NamedTuple):
    """A call that is answered in slices; `at_once`: the first is small, or only a search."""

    answering: Answering
    at_once: bool


class Reception:
    """The first to see a call. `reply` is called for those that are answered here."""

    def __init__(
        self,
        planner: Planner,
        inquiries: Inquiries,
        tasks: Tasks,
        memory: Memory,
        reply: Reply,
    ) -> None:
        self._planner = planner
        self._inquiries = inquiries
        self._tasks = tasks
        self._memory = memory
        self._reply = reply
        self._searches: dict[tuple[bytes, int], Steps] = {}  # by router and call id
        # Routers know, too; a call that was on its way when they heard is given to another shard.
        self.dequeue_only = False
        self.claimer: Claimer | None = None  # of the present ownership

    def take(self, arrival: Arrival, now_ms: int) -> Work | None:
        """The Work that `arrival` takes; None if it is answered here, now or later."""
        op = arrival.entry.op
        if op in _CALLS:
            return self._take_call(arrival, now_ms)
        try:
            if op is Op.RELEASE:
                return self._planner.release(arrival)
            if op is Op.END_SEARCH:
                self._end_search(arrival)
                return None
            self.create_queues(json.loads(arrival.entry.message))
        except (MalformedEnvelope, ProtocolError, ValueError) as error:
            log.error("a router sent a message that can't be read: %s", error)
        except StorageNotCommitted as error:
            log.warning("can't create queues that other shards have: %s", error.message)
            self._reply(arrival, refused(arrival, STORE_FAILED))
            return None
        self._reply(arrival, done(arrival, b""))
        return None

    def _end_search(self, arrival: Arrival) -> None:
        """Of a call that changes jobs, and of one that was answered meanwhile, nothing is ended."""
        call_id = unpack_call_id(arrival.entry.message)
        steps = self._searches.get((arrival.router, call_id))
        if steps is not None:
            self._tasks.end_search(steps)
        self._reply(arrival, done(arrival, b""))

    def changes_queues(self, arrival: Arrival) -> bool:
        """Whether it may drop a queue that others in the same batch rely on. A job's body that
        holds this name only ends a batch early."""
        return arrival.entry.op is Op.CALL and _DELETE_QUEUE in arrival.entry.message[:40]

    def create_queues(self, names: Iterable[object]) -> None:
        self._inquiries.create_queues(names)

    def release_of(self, router: bytes, entry: ReplyEntry) -> Arrival:
        """A call to end the claims in an answer of ours."""
        return Arrival(router, CallEntry(entry.call_id, _NEVER, entry.payload, Op.RELEASE))

    def _take_call(self, arrival: Arrival, now_ms: int) -> Work | None:
        message = arrival.entry.message
        try:
            call = codec.decode_call(message, self._planner.config.server.max_jobs_per_call)
        except (ProtocolError, PinLaterError) as error:
            self._explain(arrival, error)
            return None
        try:
            found = self._dispatch(arrival, call, now_ms)
        except ForeignError:
            self._reply(arrival, foreign(arrival))
        except StorageNotCommitted as error:
            self._reply(arrival, failed(arrival, call.head, self._unable(error)))
        except StorageError as error:
            self._reply(arrival, failed(arrival, call.head, self._unable(error)))
            raise
        except PinLaterError as error:
            self._reply(arrival, failed(arrival, call.head, error))
        else:
            if not isinstance(found, _Sliced):
                return found
            steps = self._answering(arrival, call.head, found.answering)
            next(steps)
            if isinstance(call.request, CountRequest | ScanRequest):
                self._searches[arrival.router, arrival.entry.call_id] = steps
            self._tasks.start(steps, at_once=found.at_once)
        return None

    def _explain(self, arrival: Arrival, error: ProtocolError | PinLaterError) -> None:
        """Answer bytes that are no call of ours, if so much of them can be read."""
        try:
            peeked = codec.peek(arrival.entry.message)
        except ProtocolError:
            log.error("a router sent bytes that are no call")
            self._reply(arrival, done(arrival, b""))
            return
        if peeked.method is None:
            self._reply(arrival, done(arrival, codec.encode_unknown_method(peeked.head)))
            return
        told = error if isinstance(error, PinLaterError) else InvalidRequest(str(error))
        self._reply(arrival, failed(arrival, peeked.head, told))

    def _dispatch(self, arrival: Arrival, call: Call, now_ms: int) -> Work | _Sliced | None:
        request, planner = call.request, self._planner
        match request:
            case EnqueueRequest() if self.dequeue_only:
                self._reply(arrival, refused(arrival, _TAKES_NO_JOBS))
                return None
            case EnqueueRequest():
                work = planner.enqueue(arrival, call, now_ms)
                if arrival.entry.op is not Op.VALIDATE and work.jobs:
                    return work
                self._answer(arrival, call.head, [])
                return None
            case DequeueRequest():
                return planner.dequeue(arrival, call, now_ms)
            case AckRequest() if arrival.entry.op is Op.ACK_SCHEDULED:
                return self._ack_scheduled(arrival, call, now_ms)
            case AckRequest():
                return planner.ack(arrival, call, now_ms)
            case CheckpointRequest():
                return planner.checkpoint(arrival, call)
            case CreateQueueRequest():
                self._inquiries.create_queue(request)
                self._answer(arrival, call.head, None)
            case DeleteQueueRequest():
                self._inquiries.delete_queue(request)
                self._answer(arrival, call.head, None)
            case QueueNamesRequest():
                self._answer(arrival, call.head, frozenset(self._memory.ready.queues()))
            case RetryFailedRequest() if arrival.entry.op is Op.OLDEST_FAILED:
                planner.check_queue(request.queue)
                self._reply(arrival, done(arrival, self._inquiries.oldest_failed(request)))
            case _:
                return self._slice(arrival, call)
        return None

    def _ack_scheduled(self, arrival: Arrival, call: Call, now_ms: int) -> Work:
        assert self.claimer is not None
        work = self._planner.ack(arrival, call, now_ms)
        source = call.context.source
        claim = self.claimer.claim_scheduled
        work.parts = deque(claim(op, source, now_ms) for op in work.parts)
        return work

    def _answer(self, arrival: Arrival, head: Head, result: Result) -> None:
        self._reply(arrival, done(arrival, codec.encode_reply(head, result)))

    # --- sliced works --------------------------------------------------------------------------

    def _slice(self, arrival: Arrival, call: Call) -> _Sliced:
        if len(self._tasks) >= MOST_TASKS:
            raise Overloaded(f"shard {self._memory.name} has {MOST_TASKS} such calls in hand")
        request, deadline, inquiries = call.request, arrival.entry.deadline, self._inquiries
        source = call.context.source
        if isinstance(request, LookupRequest):
            if arrival.entry.whole and inquiries.names_other_shards(request):
                raise ForeignError
            return _Sliced(inquiries.lookup(request), at_once=True)
        queued = cast(
            "CountRequest | ScanRequest | RetryFailedRequest | DeleteJobsRequest", request
        )
        self._planner.check_queue(queued.queue)
        match queued:
            case CountRequest():
                return _Sliced(inquiries.count(queued, source, deadline), at_once=True)
            case ScanRequest():
                return _Sliced(inquiries.scan(queued, source, deadline), at_once=True)
            case RetryFailedRequest():
                return _Sliced(inquiries.retry_failed(queued, deadline), at_once=False)
            case DeleteJobsRequest():
                return _Sliced(inquiries.delete_jobs(queued, source, deadline), at_once=False)

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
            closed = ShardConnectionFailed([self._memory.name], "closed its store meanwhile")
            self._reply(arrival, failed(arrival, head, closed))
            raise
        except TimeoutError:
            late = PinLaterError("the search did not end in time; narrow it")
            self._reply(arrival, failed(arrival, head, late))
        except StorageError as error:
            self._reply(arrival, failed(arrival, head, self._unable(error)))
            if not isinstance(error, StorageNotCommitted):
                raise
        except PinLaterError as error:
            self._reply(arrival, failed(arrival, head, error))
        else:
            self._answer(arrival, head, result)

    def _unable(self, error: StorageError) -> ShardConnectionFailed:
        return ShardConnectionFailed([self._memory.name], error.message)
