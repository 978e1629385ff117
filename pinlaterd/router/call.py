"""One call in hand: what was asked, by when to answer, and how it ends.

Relies on `rpc` to decode it and to write errors. A call ends exactly once, by `reply`, `finish` or
`fail`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from pinlaterd.errors import (
    EnqueueRejected,
    ErrorCode,
    InvalidRequest,
    PinLaterError,
    ProtocolError,
    ShardConnectionFailed,
)
from pinlaterd.router.shards import Shard
from pinlaterd.rpc import codec
from pinlaterd.rpc.codec import Peek
from pinlaterd.wire.link import Outcome, ShardReply

T = TypeVar("T")


class Answer(Protocol):
    """Where the reply to one call goes (see `rpc.server`)."""

    on_undelivered: Callable[[bytes], None] | None
    """Called if the client goes after `send`, before all of the answer has arrived."""
    on_gone: Callable[[], object] | None
    """Called if the client goes before `send`."""

    def expect_wait(self) -> None:
        """The call may wait for long: a client may have only so many of those in hand."""
        ...

    @property
    def gone(self) -> bool:
        """Whether the client has gone, so that nobody would read an answer."""
        ...

    @property
    def is_next(self) -> bool:
        """Whether the client has taken, but for little, all answers before it."""
        ...

    def room(self) -> int:
        """How many bytes more may be held back for clients that do not read."""
        ...

    def send(self, message: bytes) -> bool:
        """False if the client has gone."""
        ...


class Refusal(NamedTuple):
    """A shard that did nothing about a call, and why."""

    shard: str
    reason: str


class CallKeeper(Protocol):
    """Who counts the calls in hand, and those that wait."""

    def waits(self, call: Call) -> None:
        """It is not in hand for now. Raises Overloaded if too many wait."""
        ...

    def goes_on(self, call: Call) -> None: ...

    def ended(self, call: Call, error: ErrorCode | None) -> None: ...


class Call:
    """A Thrift call on its way through the router. Times are monotonic seconds."""

    __slots__ = (
        "_keeper",
        "answer",
        "claims",
        "deadline",
        "message",
        "most_bytes",
        "peek",
        "refusals",
        "started",
    )

    def __init__(
        self,
        message: bytes,
        peek: Peek,
        answer: Answer,
        *,
        started: float,
        deadline: float,
        keeper: CallKeeper,
    ) -> None:
        self.message = message
        self.peek = peek
        self.answer = answer
        self.started = started
        self.deadline = deadline
        self.refusals: tuple[Refusal, ...] = ()
        self.claims = False  # whether it is a dequeue that is no dry run
        self.most_bytes = 0  # that its answer may have; of a look-up or dequeue
        self._keeper = keeper

    def decode(self, most_elements: int) -> codec.Call:
        """All of it. Raises PinLaterError if it is malformed, or a list of it too long."""
        try:
            return codec.decode_call(self.message, most_elements)
        except ProtocolError as error:
            raise InvalidRequest(str(error)) from error

    def reply(self, message: bytes, error: ErrorCode | None = None) -> bool:
        """Answer with a Thrift reply; False if nobody is there to read it."""
        sent = self.answer.send(message)
        self._keeper.ended(self, error)
        return sent

    async def wait(self, waiting: Coroutine[Any, Any, T], otherwise: T) -> T:
        """The result of `waiting`, or `otherwise` as soon as the client has gone. Meanwhile the
        call counts as one that waits. Raises Overloaded if too many do."""
        answer = self.answer
        if answer.gone:
            waiting.close()
            return otherwise
        task = asyncio.current_task()
        assert task is not None
        try:
            self._keeper.waits(self)
        except PinLaterError:
            waiting.close()
            raise
        answer.on_gone = task.cancel
        try:
            return await waiting
        except asyncio.CancelledError:
            if not self.answer.gone:
                raise
            task.uncancel()
            return otherwise
        finally:
            answer.on_gone = None
            self._keeper.goes_on(self)

    def fail(self, error: PinLaterError) -> None:
        self.reply(codec.encode_error(self.peek.head, error), error.code)

    def finish(self, shard: Shard, reply: ShardReply) -> None:
        """Answer with what `shard` made of it."""
        if reply.outcome is Outcome.DONE:
            if reply.jobs:
                # What a dequeue claimed and nobody gets goes back to be claimed by others.
                self.answer.on_undelivered = shard.release
            if not self.answer.send(reply.payload) and reply.jobs:
                shard.release(reply.payload)
            self._keeper.ended(self, None)
        elif reply.outcome is Outcome.FAILED:
            self.reply(reply.payload, codec.peek_error(reply.payload))
        else:
            self.fail(shard_failed(shard.name, reply))


def shard_failed(name: str, reply: ShardReply) -> ShardConnectionFailed:
    """What to tell a caller whose shard gave no answer."""
    if reply.outcome is Outcome.LATE:
        why = "did not answer in time; whether the call was carried out is not known"
    elif reply.outcome is Outcome.SILENT:
        why = "does not answer; whether the call was carried out is not known"
    elif reply.outcome is Outcome.LOST:
        why = "went away with the call in hand; whether it was carried out is not known"
    else:
        why = f"{reason_of(reply)}; nothing was done there"
    return ShardConnectionFailed([name], why)


def shards_failed(failures: Sequence[tuple[str, ShardReply]]) -> ShardConnectionFailed:
    """What to tell a caller whose shards, by name, gave no answers."""
    errors = [shard_failed(name, reply) for name, reply in failures]
    if len(errors) == 1:
        return errors[0]
    return ShardConnectionFailed(
        [name for name, _ in failures], "; ".join(error.message for error in errors)
    )


def reason_of(reply: ShardReply) -> str:
    """Why a shard refused, or would have."""
    return reply.payload.decode()


class AllRefused(EnqueueRejected):
    """No shard took these jobs. `left`: what became of them."""

    def __init__(self, refusals: Sequence[Refusal], left: str = "nothing was stored") -> None:
        told = [f"shard {name}: {reason}" for name, reason in refusals]
        super().__init__(f"overloaded: {'; '.join(told)}; {left}; try later")
        self.refusals = refusals
