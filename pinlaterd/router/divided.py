"""Calls that several shards answer together: divided, sent to all at once, merged.

createQueue and getQueueNames go round a shard that is down; deleteQueue, counts, scans, retries
and deletes over all shards need every one of them, and name those that are missing. Acks,
checkpoints and look-ups need only the shards that their descriptors name. Whoever needs a shard
that has gone a moment ago waits for it; so nothing here fails while a shard is restarted.

Relies on `routing` to divide and merge, on `rpc` for bytes, on `shards` for whom to ask.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from random import Random
from typing import Any, cast

from pinlaterd.clock import Clock
from pinlaterd.config.password import verify_password
from pinlaterd.config.schema import KIB, ServerSettings
from pinlaterd.errors import (
    ContinuationInvalid,
    EnqueuedInPart,
    EnqueueRejected,
    InvalidRequest,
    LookupTooLarge,
    NoHealthyShards,
    Overloaded,
    PasswordInvalid,
    PinLaterError,
    QueueNameInvalid,
    QueueNameTooLong,
    RequestError,
    ShardConnectionFailed,
)
from pinlaterd.model import (
    CONTINUATION_START,
    QUEUE_NAME,
    AckRequest,
    CallContext,
    CheckpointRequest,
    CountRequest,
    CreateQueueRequest,
    DeleteJobsRequest,
    DeleteQueueRequest,
    EnqueueRequest,
    JobRecord,
    LookupRequest,
    Method,
    QueueNamesRequest,
    Request,
    Result,
    RetryFailedRequest,
    ScanKey,
    ScanRequest,
    ScanResult,
)
from pinlaterd.router import routing
from pinlaterd.router.call import AllRefused, Call, Refusal, reason_of, shard_failed, shards_failed
from pinlaterd.router.shards import Shard, ShardSet
from pinlaterd.rpc import codec
from pinlaterd.wire.envelope import Op
from pinlaterd.wire.router_end import GiveUp, Outcome, ShardCall, ShardReply

_LARGEST_I32 = 2**31 - 1
_CarryOut = Callable[[CallContext, Any, float], Coroutine[Any, Any, Result]]
_MILLIS = struct.Struct(">q")
# Each step of a larger call takes milliseconds.
_LARGE_BYTES = 64 * KIB
# Ages of as many jobs are read, of each shard at once.
_RETRIED_AT_A_TIME = 2_000
# A part that begins then may use four fifths of what is left (shard/inquiries.py), and be answered.
_USABLE_TIME = 0.5


class DividedCalls:
    """The methods that take several shards, each as a coroutine that returns its result."""

    def __init__(
        self, shards: ShardSet, settings: ServerSettings, clock: Clock, chance: Random
    ) -> None:
        self._shards = shards
        self.settings = settings  # others take its place when they change live
        self._clock = clock
        self._chance = chance
        self._creating: set[str] = set()
        self._by_request: dict[type[Request], _CarryOut] = {
            CreateQueueRequest: self._create_queue,
            DeleteQueueRequest: self._delete_queue,
            EnqueueRequest: self._enqueue,
            AckRequest: self.ack,
            CheckpointRequest: self._checkpoint,
            LookupRequest: self._lookup,
            CountRequest: self._count,
            QueueNamesRequest: self._queue_names,
            ScanRequest: self._scan,
            RetryFailedRequest: self._retry_failed,
            DeleteJobsRequest: self._delete_jobs,
        }

    async def run(self, call: Call) -> None:
        """Decode `call`, carry it out and answer it."""
        decoded = codec.decode_call(call.message, self.settings.max_jobs_per_call)
        await _let_others_go_on(len(call.message))
        carry_out = self._by_request[type(decoded.request)]
        result = await carry_out(decoded.context, decoded.request, call.deadline)
        call.reply(codec.encode_reply(call.peek.head, result))

    # --- queues ------------------------------------------------------------------------------

    async def _create_queue(
        self, context: CallContext, request: CreateQueueRequest, deadline: float
    ) -> None:
        """On all healthy shards; the others catch up before they serve."""
        _check_queue_name(request.queue)
        longest = self._shards.longest_queue_name()
        if len(request.queue) > longest:
            raise QueueNameTooLong(request.queue, longest)
        self._check_room_for(request.queue)
        self._creating.add(request.queue)
        try:
            await self._create_on_all(context, request, deadline)
        finally:
            self._creating.discard(request.queue)

    def _check_room_for(self, queue: str) -> None:
        """Before any shard creates it, with the creations that are under way here. Several routers
        at once may exceed the limit by one queue each."""
        most = self.settings.max_queues
        shards = self._shards
        if shards.knows_queue(queue):
            return
        new = [name for name in self._creating if not shards.knows_queue(name)]
        if shards.most_queues() + len(new) >= most:
            raise InvalidRequest(
                f"queue {queue!r} can't be created: there are {most} queues or more, as many as "
                "max_queues in etc/pinlaterd.yaml allows; delete unused ones, or raise max_queues"
            )

    async def _create_on_all(
        self, context: CallContext, request: CreateQueueRequest, deadline: float
    ) -> None:
        asked: set[str] = set()
        shards = self._present()
        while shards:
            await self._ask_each(shards, Method.CREATE_QUEUE, context, request, deadline)
            asked.update(shard.name for shard in shards)
            # One that was welcomed meanwhile was greeted before its queue was known here.
            shards = [shard for shard in self._shards.healthy() if shard.name not in asked]

    async def _delete_queue(
        self, context: CallContext, request: DeleteQueueRequest, deadline: float
    ) -> None:
        """On all shards or on none: a shard that is down would bring the queue back."""
        stored = self.settings.admin_password_hash
        if not stored:
            raise PasswordInvalid(
                "deleteQueue is refused: no admin password is set; make one with "
                "`pinlater-admin hash-password` and set admin_password_hash"
            )
        # The hash is slow by design; it must not hold up the loop.
        if not await asyncio.get_running_loop().run_in_executor(
            None, partial(verify_password, request.password, stored)
        ):
            raise PasswordInvalid("the password is not the admin password")
        _check_queue_name(request.queue)
        for is_last in (False, False, True):
            if self._shards.unhealthy():
                # Some are returning, or this fails: see that all are there before any of them acts.
                await self._ask_every(Method.QUEUE_NAMES, context, QueueNamesRequest(), deadline)
            if await self._drop_queue(context, request, deadline, is_last=is_last):
                return

    async def _drop_queue(
        self, context: CallContext, request: DeleteQueueRequest, deadline: float, *, is_last: bool
    ) -> bool:
        """False if a shard went in order before it heard of it, unless this `is_last`.

        It must not hear of it after it has come back, as other calls would: with its welcome it has
        brought the queue back to the others by then. So all of them are asked again."""
        call = ShardCall(
            deadline, codec.encode_call(Method.DELETE_QUEUE, 0, context, request), whole=False
        )
        shards = self._every()
        replies = await asyncio.gather(*(shard.ask(call, patient=False) for shard in shards))
        went = any(
            reply.outcome is Outcome.REFUSED and (shard.returning or shard.healthy)
            for shard, reply in zip(shards, replies, strict=True)
        )
        if went and not is_last:
            return False
        _results(Method.DELETE_QUEUE, shards, replies)
        return True

    async def _queue_names(
        self, context: CallContext, request: QueueNamesRequest, deadline: float
    ) -> frozenset[str]:
        names = await self._ask_each(
            self._present(), Method.QUEUE_NAMES, context, request, deadline
        )
        return frozenset().union(*cast("list[frozenset[str]]", names))

    # --- jobs by descriptor --------------------------------------------------------------------

    async def ack(self, context: CallContext, request: AckRequest, deadline: float) -> None:
        """Each shard's acks to it. Those that can go nowhere fail alone, after all the others."""
        if not self._shards.knows_queue(request.queue):
            # Let a shard say what is wrong with the queue, also when there is nothing to ack.
            await self._ask_one(Method.ACK, context, AckRequest(request.queue), deadline)
        by_shard, bad = routing.divide_acks(request, self._shards.by_name)
        await self._ask_named(Method.ACK, context, by_shard, deadline)
        if bad:
            raise InvalidRequest(routing.describe_bad(bad))

    async def _checkpoint(
        self, context: CallContext, request: CheckpointRequest, deadline: float
    ) -> None:
        if not self._shards.knows_queue(request.queue):
            await self._ask_one(
                Method.CHECKPOINT, context, CheckpointRequest(request.queue, ()), deadline
            )
        by_shard, bad = routing.divide_checkpoints(
            request.checkpoints, request.queue, self._shards.by_name
        )
        requests = {
            name: CheckpointRequest(request.queue, items) for name, items in by_shard.items()
        }
        await self._ask_named(Method.CHECKPOINT, context, requests, deadline)
        if bad:
            raise InvalidRequest(routing.describe_bad(bad))

    async def _lookup(
        self, context: CallContext, request: LookupRequest, deadline: float
    ) -> Mapping[str, JobRecord]:
        if not self._shards.by_name:
            raise NoHealthyShards  # which shards there are is not known yet
        by_shard = routing.divide_lookups(request.descriptors, self._shards.by_name)
        requests = {
            name: LookupRequest(descriptors, request.include_body)
            for name, descriptors in by_shard.items()
        }
        found: dict[str, JobRecord] = {}
        most_bytes = self.settings.max_frame_bytes  # each shard sees to its own part only
        for part in await self._ask_named(
            Method.LOOKUP, context, requests, deadline, most_bytes=most_bytes
        ):
            found.update(cast("Mapping[str, JobRecord]", part))
        return found

    # --- jobs by state -------------------------------------------------------------------------

    async def _count(self, context: CallContext, request: CountRequest, deadline: float) -> int:
        counts = await self._ask_every(Method.COUNT, context, request, deadline)
        return min(_LARGEST_I32, sum(cast("list[int]", counts)))

    async def _scan(
        self, context: CallContext, request: ScanRequest, deadline: float
    ) -> ScanResult:
        if (
            request.continuation != CONTINUATION_START
            and ScanKey.parse_token(request.continuation) is None
        ):
            raise ContinuationInvalid(request.continuation)
        limit = min(request.limit, self.settings.scan_limit)
        results = await self._ask_every(
            Method.SCAN, context, request._replace(limit=limit), deadline
        )
        return routing.merge_scans(cast("list[ScanResult]", results), limit)

    async def _retry_failed(
        self, context: CallContext, request: RetryFailedRequest, deadline: float
    ) -> int:
        """The oldest over all shards, a bounded number at a time."""
        until = self._usable_until(deadline)
        retried = 0
        while True:
            wanted = min(request.limit - retried, _RETRIED_AT_A_TIME)
            shares = await self._oldest_failed(context, request._replace(limit=wanted), deadline)
            done = await self._ask_named(Method.RETRY_FAILED, context, shares, deadline)
            retried += sum(cast("list[int]", done))
            # After the last of them come those that have been retried by this call, and failed.
            were_all = sum(share.limit for share in shares.values()) < wanted
            if were_all or retried >= request.limit or self._clock.monotonic() >= until:
                return retried

    async def _oldest_failed(
        self, context: CallContext, request: RetryFailedRequest, deadline: float
    ) -> dict[str, RetryFailedRequest]:
        """Each shard says how old its candidates are, and gets its share of the oldest."""
        shards = self._every()
        message = codec.encode_call(Method.RETRY_FAILED, 0, context, request)
        replies = await _ask_all(
            [
                (shard, ShardCall(deadline, message, Op.OLDEST_FAILED, whole=False))
                for shard in shards
            ]
        )
        for shard, reply in zip(shards, replies, strict=True):
            if reply.outcome is not Outcome.DONE:
                _result(shard, Method.RETRY_FAILED, reply)  # raises why
        candidates = [
            # A shard that was removed meanwhile is asked nothing more.
            [age for (age,) in _MILLIS.iter_unpack(reply.payload)]
            if shard.name in self._shards.by_name
            else []
            for shard, reply in zip(shards, replies, strict=True)
        ]
        shares = routing.share_of_oldest(candidates, request.limit)
        return {
            shard.name: request._replace(limit=share)
            for shard, share in zip(shards, shares, strict=True)
            if share
        }

    async def _delete_jobs(
        self, context: CallContext, request: DeleteJobsRequest, deadline: float
    ) -> int:
        """Each shard an equal part of what is left to do, so that together they never delete more
        than the limit; then those that may have more, until all is done."""
        until = self._usable_until(deadline)
        shards = self._every()
        self._chance.shuffle(shards)
        deleted = 0
        while True:
            each, more = divmod(request.limit - deleted, len(shards))
            parts = {
                shard.name: request._replace(limit=each + (place < more))
                for place, shard in enumerate(shards)
                if each + (place < more) > 0
            } or {shards[0].name: request}  # which says what is wrong with the limit
            counts = await self._ask_named(Method.DELETE_JOBS, context, parts, deadline)
            for (name, part), count in zip(parts.items(), cast("list[int]", counts), strict=True):
                deleted += count
                # One that stops has done a part only; a second search would cost too much.
                if not count or (request.body_regex is not None and count < part.limit):
                    shards = [shard for shard in shards if shard.name != name]
            # One that was removed meanwhile is asked nothing more.
            shards = [shard for shard in shards if shard.name in self._shards.by_name]
            if not shards or deleted >= request.limit:
                return deleted
            if deleted and self._clock.monotonic() >= until:
                return deleted

    def _usable_until(self, deadline: float) -> float:
        """When a call that changes many jobs begins nothing more, to be answered in time."""
        now = self._clock.monotonic()
        return now + (deadline - now) * _USABLE_TIME

    async def _enqueue(
        self, context: CallContext, request: EnqueueRequest, deadline: float
    ) -> Sequence[str]:
        """A request too large for one transaction: in parts, over shards taken in turn.

        All jobs are validated before any is stored. A part that no shard took may be tried
        elsewhere; what became of each is told if not all are stored."""
        shards = self._shards.enqueueable()
        if not shards:
            if self._shards.healthy():
                raise EnqueueRejected(
                    "every healthy shard is dequeue-only; see `pinlater-admin status`"
                )
            raise NoHealthyShards
        whole = ShardCall(
            deadline, codec.encode_call(Method.ENQUEUE, 0, context, request), Op.VALIDATE
        )
        for shard, reply in zip(
            shards, await _ask_all([(shard, whole) for shard in shards]), strict=True
        ):
            if reply.outcome is Outcome.FAILED:
                _result(shard, Method.ENQUEUE, reply)  # raises why
        sizes = routing.split_evenly(max(1, len(request.jobs)), self.settings.enqueue_split_jobs)
        first = int(self._chance.random() * len(shards))
        parts, at = [], 0
        for turn, size in enumerate(sizes):
            part = EnqueueRequest(request.queue, request.jobs[at : at + size])
            at += size
            start = (first + turn) % len(shards)
            parts.append(
                self._enqueue_part(context, part, shards[start:] + shards[:start], deadline)
            )
        done = await asyncio.gather(*parts, return_exceptions=True)
        return _all_stored(sizes, done)

    async def _enqueue_part(
        self, context: CallContext, part: EnqueueRequest, shards: list[Shard], deadline: float
    ) -> Sequence[str]:
        message = codec.encode_call(Method.ENQUEUE, 0, context, part)
        refusals: dict[str, Refusal] = {}
        for patient in (False, True):
            for shard in shards:
                reply = await shard.ask(
                    ShardCall(deadline, message), patient=patient, give_up=GiveUp.NEVER
                )
                if reply.outcome is not Outcome.REFUSED:
                    return cast("Sequence[str]", _result(shard, Method.ENQUEUE, reply))
                refusals[shard.name] = Refusal(shard.name, reason_of(reply))
        raise AllRefused(list(refusals.values()), f"{len(part.jobs)} of the jobs were not stored")

    # --- asking --------------------------------------------------------------------------------

    def _present(self) -> list[Shard]:
        present = self._shards.present()
        if not present:
            raise NoHealthyShards
        return present

    def _every(self) -> list[Shard]:
        """All shards; raises an error that names those that are down."""
        down = self._shards.down()
        if down:
            raise ShardConnectionFailed(down, "down; this call needs every shard")
        if not self._shards.by_name:
            raise NoHealthyShards
        return list(self._shards.by_name.values())

    async def _ask_every(
        self, method: Method, context: CallContext, request: Request, deadline: float
    ) -> list[Result]:
        return await self._ask_each(self._every(), method, context, request, deadline)

    async def _ask_one(
        self, method: Method, context: CallContext, request: Request, deadline: float
    ) -> Result:
        shards = self._present()
        shard = shards[int(self._chance.random() * len(shards))]
        (result,) = await self._ask_each([shard], method, context, request, deadline)
        return result

    async def _ask_each(
        self,
        shards: Sequence[Shard],
        method: Method,
        context: CallContext,
        request: Request,
        deadline: float,
    ) -> list[Result]:
        """The same of all `shards` at once."""
        call = ShardCall(deadline, codec.encode_call(method, 0, context, request), whole=False)
        replies = await _ask_all([(shard, call) for shard in shards])
        return _results(method, shards, replies)

    async def _ask_named(
        self,
        method: Method,
        context: CallContext,
        requests: Mapping[str, Request],
        deadline: float,
        *,
        most_bytes: int | None = None,
    ) -> list[Result]:
        """To each shard its own, at once. A shard that is down fails after the others are done.

        Raises LookupTooLarge if the answers have more than `most_bytes` together."""
        shards = [self._shards.by_name[name] for name in requests]
        asked = []
        for shard in shards:
            message = codec.encode_call(method, 0, context, requests[shard.name])
            await _let_others_go_on(len(message))
            asked.append((shard, ShardCall(deadline, message, whole=False)))
        replies = await _ask_all(asked)
        if most_bytes is not None and sum(len(reply.payload) for reply in replies) > most_bytes:
            raise LookupTooLarge(most_bytes)
        return _results(method, shards, replies)


def _all_stored(
    sizes: Sequence[int], parts: Sequence[Sequence[str] | BaseException]
) -> Sequence[str]:
    """The descriptors of an enqueue in parts of these sizes; raises what says which are stored, if
    some are, or may be, and others are not."""
    descriptors: list[str] = []
    errors: list[PinLaterError] = []
    for size, part in zip(sizes, parts, strict=True):
        if not isinstance(part, BaseException):
            descriptors += part
            continue
        if not isinstance(part, PinLaterError):
            raise part
        errors.append(part)
        unknown = not isinstance(part, RequestError | Overloaded)  # which say that nothing was done
        mark = EnqueuedInPart.MAY_BE_STORED if unknown else EnqueuedInPart.NOT_STORED
        descriptors += [mark] * size
    if not errors:
        return descriptors
    if not any(descriptors):
        first = errors[0]
        raise AllRefused(first.refusals) if isinstance(first, AllRefused) else first
    why = "; ".join(dict.fromkeys(error.message for error in errors))
    raise EnqueuedInPart(descriptors, why) from errors[0]


async def _let_others_go_on(size: int) -> None:
    """Between the steps of a call whose message has so many bytes, if that is large."""
    if size > _LARGE_BYTES:
        await asyncio.sleep(0)


async def _ask_all(calls: Sequence[tuple[Shard, ShardCall]]) -> list[ShardReply]:
    return await asyncio.gather(*(shard.ask(call) for shard, call in calls))


def _results(
    method: Method, shards: Sequence[Shard], replies: Sequence[ShardReply]
) -> list[Result]:
    """What each said; raises the first error that a shard gave, else names those that failed."""
    for shard, reply in zip(shards, replies, strict=True):
        if reply.outcome is Outcome.FAILED:
            _result(shard, method, reply)
    failed = [
        (shard.name, reply)
        for shard, reply in zip(shards, replies, strict=True)
        if reply.outcome is not Outcome.DONE
    ]
    if failed:
        raise shards_failed(failed)
    return [_result(shard, method, reply) for shard, reply in zip(shards, replies, strict=True)]


def _result(shard: Shard, method: Method, reply: ShardReply) -> Result:
    """What the reply bears; raises the error that it bears, or what became of the call."""
    if reply.outcome in (Outcome.DONE, Outcome.FAILED):
        return codec.decode_reply(method, reply.payload)
    error: PinLaterError = shard_failed(shard.name, reply)
    raise error


def _check_queue_name(queue: str) -> None:
    if QUEUE_NAME.match(queue) is None:
        raise QueueNameInvalid(queue)
