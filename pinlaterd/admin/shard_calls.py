"""What a move asks of a shard, past the routers: see `wire.shard_caller`.

All but an enqueue may be repeated, and are until the shard answers, for a while: it may be
restarting.
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
    AckInfo,
    AckRequest,
    CallContext,
    EnqueueRequest,
    Job,
    JobRecord,
    JobState,
    LookupRequest,
    Method,
    QueueNamesRequest,
    Request,
    Result,
    ScanRequest,
    ScanResult,
)
from pinlaterd.rpc import codec
from pinlaterd.wire.envelope import Op
from pinlaterd.wire.link import Outcome
from pinlaterd.wire.shard_caller import ShardCaller

_ENQUEUE_SECONDS = 2.0
_CALL_SECONDS = 10.0
_PATIENCE_SECONDS = 30.0
_RETRY_SECONDS = 0.1
_PAGE_JOBS = 1_000
_CONTEXT = CallContext("pinlater-admin move")


class Enqueued(NamedTuple):
    """`descriptors` of the jobs, in their order; none if nothing is known to be stored, with
    `reason` if something is wrong with the jobs."""

    descriptors: Sequence[str] = ()
    reason: str = ""


class ShardCalls:
    """One shard. All but `enqueue` raise ConnectionFailed if it does not answer for long, and
    PinLaterError for what it refuses."""

    def __init__(self, caller: ShardCaller) -> None:
        self._caller = caller

    def queues(self) -> list[str]:
        names = self._ask(Method.QUEUE_NAMES, QueueNamesRequest())
        return sorted(cast("frozenset[str]", names))

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

    def ack_scheduled(self, queue: str, acks: Sequence[AckInfo]) -> None:
        """End jobs as succeeded. Those that are due by now, or have ended, stay as they are."""
        self._ask(Method.ACK, AckRequest(queue, acks), Op.ACK_SCHEDULED)

    def enqueue(self, queue: str, jobs: Sequence[Job]) -> Enqueued:
        """All of them, or none. Not repeated: they would be stored twice."""
        message = codec.encode_call(Method.ENQUEUE, 0, _CONTEXT, EnqueueRequest(queue, jobs))
        reply = self._caller.call(message, seconds=_ENQUEUE_SECONDS)
        if reply.outcome not in (Outcome.DONE, Outcome.FAILED):
            return Enqueued()
        try:
            found = codec.decode_reply(Method.ENQUEUE, reply.payload)
        except (QueueNotFound, Overloaded):  # a shard that has just joined, or is busy
            return Enqueued()
        except RequestError as error:
            return Enqueued(reason=str(error))
        except PinLaterError:
            return Enqueued()
        return Enqueued(cast("Sequence[str]", found))

    def _ask(self, method: Method, request: Request, op: Op = Op.CALL) -> Result:
        until = time.monotonic() + _PATIENCE_SECONDS
        message = codec.encode_call(method, 0, _CONTEXT, request)
        while True:
            reply = self._caller.call(message, seconds=_CALL_SECONDS, op=op)
            if reply.outcome in (Outcome.DONE, Outcome.FAILED):
                try:
                    return codec.decode_reply(method, reply.payload)
                except RequestError:
                    raise
                except PinLaterError:  # its store is being opened anew, say, or locked for a while
                    if time.monotonic() >= until:
                        raise
            elif time.monotonic() >= until:
                raise ConnectionFailed(
                    f"shard {self._caller.name} does not answer; nothing is lost: when it serves "
                    "again, repeat the command"
                )
            time.sleep(_RETRY_SECONDS)
