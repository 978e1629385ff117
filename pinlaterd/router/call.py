"""One client's call on its way through the router, and what shards' replies to it mean.

Relies on `rpc` to decode it and to write errors, on `wire` for what is sent to shards. A call ends
exactly once, by `reply`, `finish` or `fail`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from pinlaterd.config.schema import KIB
from pinlaterd.errors import (
    EnqueueRejected,
    ErrorCode,
    InvalidRequest,
    PinLaterError,
    ProtocolError,
    ShardConnectionFailed,
)
from pinlaterd.model import CallContext, Method, Request, Result
from pinlaterd.rpc import codec
from pinlaterd.rpc.codec import Peek
from pinlaterd.rpc.server import Answer
from pinlaterd.wire.envelope import Op, ReplyEntry, ShardCall, Status
from pinlaterd.wire.link import ShardLink

# Each step of a larger call takes milliseconds.
LARGE_BYTES = 64 * KIB


class Refusal(NamedTuple):
    """A shard that did nothing about a call, and why."""

    shard: str
    reason: str


OnEnd = Callable[["Call", ErrorCode | None], None]


class Call(ShardCall):
    """A Thrift call. While one shard can answer it, it goes there as it is."""

    refusals: tuple[Refusal, ...] = ()
    claims: bool = False  # whether it is a dequeue that is no dry run
    granted_bytes: int = 0  # that its answer may have; of a look-up, scan or dequeue

    def __init__(
        self,
        message: bytes,
        peek: Peek,
        answer: Answer,
        started: float,
        deadline: float,
        on_end: OnEnd,
    ) -> None:
        """Times are monotonic seconds. All that ShardCall has besides keeps its defaults."""
        self.message = message
        self.peek = peek
        self.answer = answer
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
        sent = self.answer.send(message)
        self._on_end(self, error)
        return sent

    def fail(self, error: PinLaterError) -> None:
        self.reply(codec.encode_error(self.peek.head, error), error.code)

    def finish(self, shard: ShardLink, reply: ReplyEntry) -> None:
        """Answer with what `shard` made of it."""
        if reply.status is Status.DONE:
            if reply.jobs:
                # Jobs that a dequeue claimed and nobody gets are released, for others to claim.
                self.answer.on_undelivered = shard.release
            if not self.answer.send(reply.payload) and reply.jobs:
                shard.release(reply.payload)
            self._on_end(self, None)
        elif reply.status is Status.FAILED:
            self.reply(reply.payload, codec.peek_error(reply.payload))
        else:
            self.fail(shard_failed(shard.name, reply))


# --- what shards reply --------------------------------------------------------------------------


async def let_others_go_on(size: int) -> None:
    """Between the steps of a call whose message has so many bytes, if that is large."""
    if size > LARGE_BYTES:
        await asyncio.sleep(0)


class Query(NamedTuple):
    """What a call that several shards answer asks of each of them."""

    method: Method
    context: CallContext
    deadline: float

    def part(self, request: Request, op: Op = Op.CALL, *, patient: bool = True) -> ShardCall:
        message = codec.encode_call(self.method, 0, self.context, request)
        return ShardCall(message, self.deadline, op, whole=False, patient=patient)

    async def ask_each(self, shards: Sequence[ShardLink], request: Request) -> list[Result]:
        """The same of all `shards` at once."""
        replies = await ask_all((shard, self.part(request)) for shard in shards)
        return results_of(self.method, shards, replies)


async def ask_all(calls: Iterable[tuple[ShardLink, ShardCall]]) -> list[ReplyEntry]:
    return await asyncio.gather(*(shard.ask(call) for shard, call in calls))


def results_of(
    method: Method, shards: Sequence[ShardLink], replies: Sequence[ReplyEntry]
) -> list[Result]:
    """What each said; raises the first error that a shard gave, else names those that failed."""
    answered = list(zip(shards, replies, strict=True))
    for shard, reply in answered:
        if reply.status is Status.FAILED:
            result_of(shard, method, reply)
    failed = [(shard.name, reply) for shard, reply in answered if reply.status is not Status.DONE]
    if failed:
        raise shards_failed(failed)
    return [result_of(shard, method, reply) for shard, reply in answered]


def result_of(shard: ShardLink, method: Method, reply: ReplyEntry) -> Result:
    """What the reply bears; raises the error that it bears, or what became of the call."""
    if reply.status in (Status.DONE, Status.FAILED):
        return codec.decode_reply(method, reply.payload)
    error: PinLaterError = shard_failed(shard.name, reply)
    raise error


def shard_failed(name: str, reply: ReplyEntry) -> ShardConnectionFailed:
    """What to tell a caller whose shard gave no answer."""
    if reply.status is Status.LATE:
        why = "did not answer in time; whether the call was carried out is not known"
    elif reply.status is Status.SILENT:
        why = "does not answer; whether the call was carried out is not known"
    elif reply.status is Status.LOST:
        why = "went away with the call in flight; whether it was carried out is not known"
    else:
        why = f"{reason_of(reply)}; nothing was done there"
    return ShardConnectionFailed([name], why)


def shards_failed(failures: Sequence[tuple[str, ReplyEntry]]) -> ShardConnectionFailed:
    """What to tell a caller whose shards, by name, gave no answers."""
    errors = [shard_failed(name, reply) for name, reply in failures]
    if len(errors) == 1:
        return errors[0]
    return ShardConnectionFailed(
        [name for name, _ in failures], "; ".join(error.message for error in errors)
    )


def reason_of(reply: ReplyEntry) -> str:
    """Why a shard refused, or would have."""
    return reply.payload.decode()


class AllRefused(EnqueueRejected):
    """No shard took these jobs. `left`: what became of them."""

    def __init__(self, refusals: Sequence[Refusal], left: str = "nothing was stored") -> None:
        told = [f"shard {name}: {reason}" for name, reason in refusals]
        super().__init__(f"overloaded: {'; '.join(told)}; {left}; try later")
        self.refusals = refusals
