"""One client's call on its way through the router, and what shards' replies to it mean.

Relies on `rpc` to decode it and to write errors, on `wire` for what is sent to shards. A call ends
exactly once, by `reply`, `finish` or `fail`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from pinlaterd.clock import Clock
from pinlaterd.config.schema import KIB, ServerSettings
from pinlaterd.errors import (
    EnqueueRejected,
    ErrorCode,
    InvalidRequest,
    PinLaterError,
    ProtocolError,
    ShardConnectionFailed,
)
from pinlaterd.model import CallContext, Method, Request, Result
from pinlaterd.router.rate_limits import LimitedQueue, RateLimits
from pinlaterd.router.shards import ShardSet
from pinlaterd.rpc import codec
from pinlaterd.rpc.codec import Peek
from pinlaterd.rpc.connection import Answer, Connection
from pinlaterd.stats import Stats
from pinlaterd.wire.envelope import Op, ReplyEntry, ShardCall, Status
from pinlaterd.wire.link import ShardLink

log = logging.getLogger(__name__)

# Each step of a larger call takes milliseconds.
LARGE_BYTES = 64 * KIB
_ENDED = Peek(b"", None, False, False, None, 0, 0, None)

Replies = Sequence[tuple[ShardLink, ReplyEntry]]


@dataclass(slots=True)
class Shared:
    """What all parts of a router share."""

    shards: ShardSet
    limits: RateLimits
    clock: Clock
    stats: Stats
    rng: Random
    settings: ServerSettings  # replaced when they change live


class Call(Answer, ShardCall):
    """A Thrift call, and its answer. While one shard can answer it, it goes there as it is."""

    refusals: Mapping[str, str] = {}  # why shards did nothing about it, by name
    claims: bool = False  # whether it is a dequeue that is no dry run
    granted_bytes: int = 0  # that its answer may have; of a look-up, scan or dequeue
    limited: LimitedQueue | None = None  # which pays for the jobs of a dequeue

    def __init__(
        self,
        message: bytes,
        peek: Peek,
        connection: Connection,
        started: float,
        deadline: float,
        on_end: Callable[[Call, ErrorCode | None], None],
    ) -> None:
        """Times are monotonic seconds. All that ShardCall has besides keeps its defaults."""
        Answer.__init__(self, connection, oneway=peek.oneway)
        self.message = message
        self.peek = peek
        self.started = started
        self.deadline = deadline
        self._on_end = on_end

    def decode(self, most_elements: int) -> codec.Call:
        """All of it. Raises PinLaterError if it is malformed, or a list of it too long."""
        try:
            return codec.decode_call(self.message, most_elements)
        except ProtocolError as error:
            raise InvalidRequest(str(error)) from error

    def reply(self, message: bytes, error: ErrorCode | None = None) -> bool:
        """Answer with a Thrift reply; False if nobody is there to read it."""
        sent = self.send(message)
        self._end(error)
        return sent

    def fail(self, error: BaseException) -> None:
        if not isinstance(error, PinLaterError):
            log.error("%s failed", self.peek.method, exc_info=error)
            error = PinLaterError("internal error; the server's log says more")
        self.reply(codec.encode_error(self.peek.head, error), error.code)

    def finish(self, shard: ShardLink, reply: ReplyEntry) -> None:
        """Answer with what `shard` made of it."""
        _, status, payload, jobs = reply
        if status is Status.DONE:
            if jobs:
                # Jobs that a dequeue claimed and nobody gets are released, for others to claim.
                self.on_undelivered = shard.release
            if not self.send(payload) and jobs:
                shard.release(payload)
            self._end(None)
        elif status is Status.FAILED:
            self.reply(payload, codec.peek_error(payload))
        else:
            self.fail(failure([(shard, reply)]))

    def _end(self, error: ErrorCode | None) -> None:
        self._on_end(self, error)
        # The answer may wait for those before it; its request would take memory that nobody counts.
        self.message, self.peek = b"", _ENDED


class Query(NamedTuple):
    """What a call that several shards answer asks of each of them."""

    method: Method
    context: CallContext
    deadline: float

    def part(self, request: Request, op: Op = Op.CALL, *, patient: bool = True) -> ShardCall:
        message = codec.encode_call(self.method, 0, self.context, request)
        return ShardCall(message, self.deadline, op, whole=False, patient=patient)

    async def replies(
        self,
        requests: Iterable[tuple[ShardLink, Request]],
        op: Op = Op.CALL,
        *,
        patient: bool = True,
    ) -> Replies:
        """Of each shard to its own request; all are asked at once."""
        asked = []
        for shard, request in requests:
            part = self.part(request, op, patient=patient)
            await let_others_go_on(len(part.message))
            asked.append((shard, part))
        return await ask_all(asked)

    async def ask(self, requests: Iterable[tuple[ShardLink, Request]]) -> list[Result]:
        return results_of(self.method, await self.replies(requests))


async def let_others_go_on(size: int) -> None:
    """Between the steps of a call whose message has so many bytes, if that is large."""
    if size > LARGE_BYTES:
        await asyncio.sleep(0)


async def ask_all(calls: Sequence[tuple[ShardLink, ShardCall]]) -> Replies:
    """What each shard replies to its own call, all asked at once."""
    replies = await asyncio.gather(*(shard.ask(call) for shard, call in calls))
    return [(shard, reply) for (shard, _), reply in zip(calls, replies, strict=True)]


# --- what shards reply --------------------------------------------------------------------------


def results_of(method: Method, replies: Replies) -> list[Result]:
    """What each said; raises the first error that a shard gave, else names those that failed."""
    for _, reply in replies:
        if reply.status is Status.FAILED:
            codec.decode_reply(method, reply.payload)
    failed = [(shard, reply) for shard, reply in replies if reply.status is not Status.DONE]
    if failed:
        raise failure(failed)
    return [codec.decode_reply(method, reply.payload) for _, reply in replies]


def failure(failed: Replies) -> ShardConnectionFailed:
    """What to tell a caller whose shards gave no answers."""
    whys = [_why(reply) for _, reply in failed]
    if len(failed) > 1:
        whys = [f"shard {shard.name}: {why}" for (shard, _), why in zip(failed, whys, strict=True)]
    return ShardConnectionFailed([shard.name for shard, _ in failed], "; ".join(whys))


def _why(reply: ReplyEntry) -> str:
    if reply.status is Status.LATE:
        return "did not answer in time; whether the call was carried out is not known"
    if reply.status is Status.SILENT:
        return "does not answer; whether the call was carried out is not known"
    if reply.status is Status.LOST:
        return "went away with the call in flight; whether it was carried out is not known"
    return f"{reason_of(reply)}; nothing was done there"


def reason_of(reply: ReplyEntry) -> str:
    """Why a shard refused, or would have."""
    return reply.payload.decode()


class AllRefused(EnqueueRejected):
    """No shard took these jobs. `left`: what became of them."""

    def __init__(self, refusals: Mapping[str, str], left: str = "nothing was stored") -> None:
        told = [f"shard {name}: {reason}" for name, reason in refusals.items()]
        super().__init__(f"overloaded: {'; '.join(told)}; {left}; try later")
        self.refusals = refusals
