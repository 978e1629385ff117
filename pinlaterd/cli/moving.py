"""Moves scheduled jobs of one shard to others, at least once.

    enqueue    on another shard, with a status that names the old descriptor
    ack        on the source, with a status that names the new one, unless it is due there by then

In this order no job is lost wherever a move is cut short; one may be left in both places. An
enqueue of unknown outcome is made again. A shard that is killed within an ack leaves its jobs
claimed; the next move ends those.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple, cast

from pinlaterd.errors import (
    ConnectionFailed,
    InvalidRequest,
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
    JobDescriptor,
    JobRecord,
    JobState,
    LookupRequest,
    Method,
    QueueNamesRequest,
    Request,
    Result,
    ScanRequest,
    ScanResult,
    claim_source,
)
from pinlaterd.rpc import codec
from pinlaterd.wire.envelope import Op, Status
from pinlaterd.wire.shard_caller import ShardCaller

# What is due so soon runs where it is: the ack on the source has to come before that.
_SOON_SECONDS = 10.0
_BATCH_JOBS = 100
# How often all shards are asked to take a batch before it stays where it is.
_ROUNDS = 3
_ROUND_SECONDS = 1.0


class Kept(NamedTuple):
    """A job that no other shard takes, and why."""

    descriptor: str
    reason: str


class Move:
    """Of the jobs of `source`. `takers` tells the shards that take jobs at present;
    `on_moved(count)` is called as jobs are moved."""

    def __init__(
        self,
        source: ShardCalls,
        takers: Callable[[], Sequence[ShardCalls]],
        on_moved: Callable[[int], None],
    ) -> None:
        self._source = source
        self._takers = takers
        self._on_moved = on_moved
        self.kept: list[Kept] = []

    def run(self) -> None:
        """Move all jobs that are scheduled by now.

        Raises ConnectionFailed, PinLaterError: then some are moved, and a repeat goes on."""
        for queue in self._source.queues():
            found = self._source.scan(queue, JobState.PENDING, future=True)
            with contextlib.suppress(QueueNotFound):  # deleted meanwhile, with its jobs
                self._end_claimed(queue)
                while batch := list(islice(found, _BATCH_JOBS)):
                    self._move(queue, [record.descriptor for record in batch])

    def _end_claimed(self, queue: str) -> None:
        """Jobs that an earlier ack has claimed and not ended: their copies were stored before."""
        claimed = (
            AckInfo(record.descriptor, "moved")
            for future in (True, False)  # in this order, one that comes due meanwhile is met
            for record in self._source.scan(queue, JobState.IN_PROGRESS, future=future)
            if claim_source(record.claim_descriptor or "") == _CONTEXT.source
        )
        while batch := list(islice(claimed, _BATCH_JOBS)):
            self._source.ack_scheduled(queue, batch)

    def _move(self, queue: str, descriptors: Sequence[str]) -> None:
        try:
            found = self._source.look_up(descriptors)
        except InvalidRequest as error:  # their bodies are too much for one answer
            self._keep_or_halve(queue, descriptors, str(error))
            return
        records = [record for record in found.values() if _is_scheduled(record)]
        if not records:
            return
        stored, reason = self._store(queue, [_copy(record) for record in records])
        if not stored:
            left = [record.descriptor for record in records]
            self._keep_or_halve(queue, left, reason or "no other shard takes jobs now")
            return
        now_ms = time.time() * 1000
        self._source.ack_scheduled(
            queue,
            [
                AckInfo(record.descriptor, f"moved to {new}")
                for record, new in zip(records, stored, strict=True)
                # One that is due by now may have run there, and wait for its next run.
                if record.run_after_ms > now_ms
            ],
        )
        self._on_moved(len(records))

    def _store(self, queue: str, jobs: Sequence[Job]) -> tuple[Sequence[str], str]:
        """On one shard, all of them or none: their descriptors, or why none takes them."""
        reason = ""
        for _ in range(_ROUNDS):
            takers = list(self._takers())
            for taker in random.sample(takers, len(takers)):
                result = taker.enqueue(queue, jobs)
                if result.descriptors:
                    return result.descriptors, ""
                reason = result.reason or reason
            time.sleep(_ROUND_SECONDS)
        return (), reason

    def _keep_or_halve(self, queue: str, descriptors: Sequence[str], reason: str) -> None:
        """Not all of them can go together: those that can go alone, go."""
        if len(descriptors) > 1 and self._takers():
            middle = len(descriptors) // 2
            self._move(queue, descriptors[:middle])
            self._move(queue, descriptors[middle:])
        else:
            self.kept += [Kept(descriptor, reason) for descriptor in descriptors]


def _is_scheduled(record: JobRecord) -> bool:
    soon_ms = (time.time() + _SOON_SECONDS) * 1000
    return record.state is JobState.PENDING and record.run_after_ms > soon_ms


def _copy(record: JobRecord) -> Job:
    """The job as it goes on elsewhere: as many attempts as it has left, and where it comes from."""
    assert record.body is not None
    place = JobDescriptor.parse(record.descriptor)
    assert place is not None
    left, allowed = max(1, record.attempts_remaining), record.attempts_allowed
    attempts = f" ({left} of {allowed} attempts left)" if left != allowed else ""
    before = f"; {record.custom_status}" if record.custom_status else ""
    origin = f"moved from {record.descriptor}{attempts}"
    return Job(record.body, place.priority, record.run_after_ms, left, origin + before)


_ENQUEUE_SECONDS = 2.0
_CALL_SECONDS = 10.0
_PATIENCE_SECONDS = 30.0
_RETRY_SECONDS = 0.1
_PAGE_JOBS = 1_000
_CONTEXT = CallContext("pinlater-admin drain")


# --- what is asked of a shard, past the routers: see wire.shard_caller ---------------------------
# All but an enqueue may be repeated, and are until the shard answers, for a while: it may be
# restarting.


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
        if reply.status not in (Status.DONE, Status.FAILED):
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
            if reply.status in (Status.DONE, Status.FAILED):
                try:
                    return codec.decode_reply(method, reply.payload)
                except RequestError:
                    raise
                except PinLaterError:  # its store is being opened again, say, or locked for a while
                    if time.monotonic() >= until:
                        raise
            elif time.monotonic() >= until:
                raise ConnectionFailed(
                    f"shard {self._caller.name} does not answer; nothing is lost: when it serves "
                    "again, repeat the command"
                )
            time.sleep(_RETRY_SECONDS)
