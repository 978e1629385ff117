"""What a move asks of a shard, past the routers: see `wire.shard_caller`.

What may be asked twice is asked until the shard answers, for a while: it may be restarting. To
enqueue may not; that says what is known of its outcome.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, cast

from pinlaterd.errors import (
    ConnectionFailed,
    Overloaded,
    PinLaterError,
    QueueNotFound,
    RequestError,
)
from pinlaterd.model import (
    CONTINUATION_END,
    CONTINUATION_START,
    MOVE_SOURCE,
    AckInfo,
    AckRequest,
    CallContext,
    ClaimedJob,
    DequeueResult,
    EnqueueRequest,
    Job,
    JobRecord,
    JobState,
    LookupRequest,
    Method,
    PendingKey,
    QueueNamesRequest,
    Request,
    Result,
    ScanRequest,
    ScanResult,
    is_move_claim,
)
from pinlaterd.rpc import codec
from pinlaterd.rpc.codec import Head
from pinlaterd.wire.envelope import (
    HeldJob,
    HoldRequest,
    Op,
    pack_hold_request,
    unpack_held_jobs,
)
from pinlaterd.wire.link import Outcome, ShardReply
from pinlaterd.wire.shard_caller import ShardCaller

# A shard that takes up an enqueue later than this does nothing.
ENQUEUE_SECONDS = 2.0
_CALL_SECONDS = 10.0
_PATIENCE_SECONDS = 30.0
_RETRY_SECONDS = 0.1
_PAGE_JOBS = 1_000
_CONTEXT = CallContext(MOVE_SOURCE)
_DEQUEUE = Head(Method.DEQUEUE.value, 0, oneway=False, strict=True)


class Enqueued(NamedTuple):
    """`stored` None: whether the jobs are stored is not known. False: none is, and `reason` says
    what is wrong with them, or is "" if nothing is. True: under `descriptors`, in their order."""

    stored: bool | None
    descriptors: Sequence[str] = ()
    reason: str = ""


class ShardCalls:
    """One shard. All but `enqueue` raise ConnectionFailed if it does not answer for long, and
    PinLaterError for what it refuses."""

    def __init__(self, caller: ShardCaller) -> None:
        self._caller = caller
        self.name = caller.name

    # --- what may be repeated -----------------------------------------------------------------

    def queues(self) -> list[str]:
        names = self._ask(Method.QUEUE_NAMES, QueueNamesRequest())
        return sorted(cast("frozenset[str]", names))

    def priorities(self) -> int:
        """How many there are."""
        if not self._caller.reach(seconds=_PATIENCE_SECONDS) or self._caller.facts is None:
            raise self._gone()
        return self._caller.facts.priorities

    def hold(self, queue: str, priority: int, after: PendingKey, limit: int) -> list[HeldJob]:
        """Claim jobs for their move. If an answer is lost, the jobs in it are left out here, and
        found by `held`."""
        request = pack_hold_request(HoldRequest(queue, priority, *after, limit))
        return unpack_held_jobs(self._repeat(request, Op.HOLD_SCHEDULED).payload)

    def held(self, queue: str) -> Iterator[JobRecord]:
        """The jobs of a queue that are held for their move, without bodies."""
        for future in (True, False):
            for record in self.scan(queue, JobState.IN_PROGRESS, future=future):
                if is_move_claim(record.claim_descriptor):
                    yield record

    def scan(self, queue: str, state: JobState, *, future: bool) -> Iterator[JobRecord]:
        continuation = CONTINUATION_START
        while True:
            request = ScanRequest(
                queue, state, future=future, continuation=continuation, limit=_PAGE_JOBS
            )
            page = cast("ScanResult", self._ask(Method.SCAN, request))
            yield from page.jobs
            continuation = page.continuation
            if continuation == CONTINUATION_END:
                return

    def look_up(self, descriptors: Sequence[str]) -> Mapping[str, JobRecord]:
        """With bodies. Raises InvalidRequest if these are too many for one answer."""
        records = self._ask(Method.LOOKUP, LookupRequest(descriptors, include_body=True))
        return cast("Mapping[str, JobRecord]", records)

    def succeed(self, queue: str, acks: Sequence[AckInfo]) -> None:
        """Each names its claim, so that one that came through before does nothing."""
        if acks:
            self._ask(Method.ACK, AckRequest(queue, acks))

    def release(self, job: JobRecord) -> None:
        """Back to PENDING as it was."""
        claimed = ClaimedJob(job.descriptor, b"", 0, 0, job.claim_descriptor or "", 0)
        self._repeat(codec.encode_reply(_DEQUEUE, DequeueResult([claimed])), Op.RELEASE)

    def _ask(self, method: Method, request: Request) -> Result:
        until = time.monotonic() + _PATIENCE_SECONDS
        message = codec.encode_call(method, 0, _CONTEXT, request)
        while True:
            reply = self._repeat(message, Op.CALL, until)
            try:
                return codec.decode_reply(method, reply.payload)
            except RequestError:
                raise
            except PinLaterError:  # its store is being opened anew, say, or locked for a while
                if time.monotonic() >= until:
                    raise
                time.sleep(_RETRY_SECONDS)

    def _repeat(self, message: bytes, op: Op, until: float | None = None) -> ShardReply:
        if until is None:
            until = time.monotonic() + _PATIENCE_SECONDS
        while True:
            reply = self._caller.call(message, seconds=_CALL_SECONDS, op=op)
            if reply.outcome in (Outcome.DONE, Outcome.FAILED):
                return reply
            if time.monotonic() >= until:
                raise self._gone()
            time.sleep(_RETRY_SECONDS)

    def _gone(self) -> ConnectionFailed:
        return ConnectionFailed(
            f"shard {self.name} does not answer; nothing is lost: when it serves again, repeat "
            "the command"
        )

    # --- what may not -------------------------------------------------------------------------

    def enqueue(self, queue: str, jobs: Sequence[Job]) -> Enqueued:
        """All of them, or none."""
        message = codec.encode_call(Method.ENQUEUE, 0, _CONTEXT, EnqueueRequest(queue, jobs))
        reply = self._caller.call(message, seconds=ENQUEUE_SECONDS)
        if reply.outcome is Outcome.REFUSED:
            return Enqueued(stored=False)
        if reply.outcome not in (Outcome.DONE, Outcome.FAILED):
            return Enqueued(stored=None)
        try:
            found = codec.decode_reply(Method.ENQUEUE, reply.payload)
        except (QueueNotFound, Overloaded):  # a shard that has just joined, or is busy
            return Enqueued(stored=False)
        except RequestError as error:
            return Enqueued(stored=False, reason=str(error))
        except PinLaterError:
            return Enqueued(stored=None)
        return Enqueued(stored=True, descriptors=cast("Sequence[str]", found))
