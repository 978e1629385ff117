"""Takes calls as they arrive: decodes each, and finds out what it takes to answer it.

A call of the job path becomes an Operation for the next commit; all others are answered at once, or
as tasks, in slices. What is wrong with a call is answered here.
"""

from __future__ import annotations

import json
import logging
from collections import deque

from pinlaterd.engines.base import AckOp, Acks, Batch, ClaimOp, Claims
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
    JobKey,
    JobState,
    Payload,
    PendingKey,
    claim_source,
)
from pinlaterd.rpc import codec
from pinlaterd.rpc.codec import Call
from pinlaterd.shard.bulk import BulkCalls
from pinlaterd.shard.dequeue import Dequeue
from pinlaterd.shard.operations import (
    Ack,
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
# What is due so soon is no scheduled job any more: the ready index may know of it in a moment.
_SOON_MS = 1_000
_NOT_READ = Payload(b"", 0, 0)  # so that the engine reads no body


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
        operation = Ack(entry, call, state, now_ms)
        if entry.op is Op.ACK_SCHEDULED:
            source = call.context.source
            claimed = [_claim_scheduled(state, op, source, now_ms) for op in operation.parts]
            operation.parts = deque(op for op in claimed if op.succeeded)
        return operation


def _claim_scheduled(state: ShardState, op: AckOp, source: str, now_ms: int) -> AckOp:
    """Claim the jobs that `op` is to end as succeeded, in a commit of its own. Returns it with
    these claims, and without the jobs that are not scheduled any more: what is due, or soon.

    The ready index knows nothing of these jobs, since they are not due. The claims bear the
    latest time there is, so that they never time out: after a crash before the ack, jobs would
    run here before their time, beside their copies. A repeated call acks them. Raises
    StorageError."""
    engine = state.engine
    named = {JobKey(acks.priority, i): acks for acks in op.succeeded for i in acks.local_ids}
    held: dict[JobKey, str] = {}
    claims: list[Claims] = []
    for job in engine.lookup(op.queue, list(named), include_body=False):
        if job.state is JobState.PENDING and job.run_after_ms > now_ms + _SOON_MS:
            place = PendingKey(job.run_after_ms, job.key.local_id)
            [descriptor] = state.claim_descriptors.take(source, 1)
            claims.append(Claims(job.key.priority, [place], [descriptor], [_NOT_READ]))
        elif job.state is JobState.IN_PROGRESS:
            descriptor = job.claim_descriptor or ""
            if claim_source(descriptor) == source:
                held[job.key] = descriptor
    if claims:
        batch = Batch(claims=[ClaimOp(op.queue, claims)])
        [found] = engine.apply(batch, engine.limits.run_after_ms).claims
        for claim, payload in zip(claims, found, strict=True):
            if payload is not None:
                held[JobKey(claim.priority, claim.keys[0].local_id)] = claim.claim_descriptors[0]
    acks = [
        Acks(key.priority, [key.local_id], named[key].append_custom_status, 0, descriptor)
        for key, descriptor in held.items()
    ]
    return AckOp(op.queue, acks, ())
