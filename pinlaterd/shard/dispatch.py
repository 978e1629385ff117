"""Takes calls as they arrive: decodes each, and finds out what it takes to answer it.

A call of the job path becomes an Operation for the next commit; all others are answered at once, or
as tasks, in slices. What is wrong with a call is answered here.
"""

from __future__ import annotations

import json
import logging

from pinlaterd.errors import (
    InvalidRequest,
    PinLaterError,
    ProtocolError,
    StorageError,
    StorageNotCommitted,
)
from pinlaterd.model import (
    AckRequest,
    CheckpointRequest,
    DequeueRequest,
    EnqueueRequest,
)
from pinlaterd.rpc import codec
from pinlaterd.rpc.codec import Call
from pinlaterd.shard.bulk import AnsweredError, BulkCalls
from pinlaterd.shard.dequeue import Dequeue
from pinlaterd.shard.operations import (
    Ack,
    AckScheduled,
    CheckpointJobs,
    Enqueue,
    ForeignError,
    Operation,
    ReleaseClaims,
)
from pinlaterd.shard.state import STORE_FAILED, ShardState
from pinlaterd.wire.envelope import CallEntry, Op, Status

log = logging.getLogger(__name__)

_DELETE_QUEUE = b"deleteQueue"
_TAKES_NO_JOBS = "is dequeue-only"
_CALLS = (Op.CALL, Op.VALIDATE, Op.OLDEST_FAILED, Op.ACK_SCHEDULED)


def changes_queues(entry: CallEntry) -> bool:
    """Whether it may drop a queue that others in the same batch rely on. A job's body that holds
    this name only ends a batch early."""
    return entry.message.find(_DELETE_QUEUE, 0, 40) >= 0 and entry.op is Op.CALL


class Dispatch:
    """The first to see a call."""

    def __init__(self, state: ShardState, bulk: BulkCalls) -> None:
        self._state = state
        self._bulk = bulk
        self._replies = state.replies
        self._operations = {
            EnqueueRequest: self._enqueue,
            DequeueRequest: Dequeue,
            AckRequest: self._ack,
            CheckpointRequest: CheckpointJobs,
        }

    def take(self, entry: CallEntry, now_ms: int) -> Operation | None:
        """The Operation that `entry` takes; None if it is answered here, now or later."""
        if entry.op not in _CALLS:
            return self._take_message(entry)
        state, replies = self._state, self._replies
        try:
            call = codec.decode_call(entry.message, state.config.server.max_jobs_per_call)
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
        """Something between router and shard, which is no call of a client."""
        try:
            if entry.op is Op.RELEASE:
                return ReleaseClaims(entry, self._state)
            if entry.op is Op.END_SEARCH:
                self._bulk.end_search(entry.router, int(entry.message))
            else:
                self._bulk.create_queues(json.loads(entry.message))
        except (ProtocolError, ValueError) as error:
            log.error("a router sent a message that can't be read: %s", error)
        except StorageNotCommitted as error:
            log.warning("can't create queues that other shards have: %s", error.message)
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
        told = error if isinstance(error, PinLaterError) else InvalidRequest(str(error))
        self._replies.fail(entry, peeked.head, told)

    def _enqueue(
        self, entry: CallEntry, call: Call, state: ShardState, now_ms: int
    ) -> Operation | None:
        # Routers know, too; a call that was on its way when they heard is given to another shard.
        if state.dequeue_only:
            self._replies.refuse(entry, _TAKES_NO_JOBS)
            return None
        operation = Enqueue(entry, call, state, now_ms)
        if entry.op is not Op.VALIDATE and operation.jobs:
            return operation
        self._replies.add(entry, Status.DONE, codec.encode_reply(call.head, []))
        return None

    def _ack(self, entry: CallEntry, call: Call, state: ShardState, now_ms: int) -> Operation:
        kind = AckScheduled if entry.op is Op.ACK_SCHEDULED else Ack
        return kind(entry, call, state, now_ms)
