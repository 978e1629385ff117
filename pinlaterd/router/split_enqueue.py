"""Enqueues too large for one transaction: in parts, over shards taken in turn.

All jobs are validated before any is stored. A shard has a thousand jobs of a call at a time, so
that other calls come in between. A part that no shard took may be tried elsewhere; what became of
each is told if not all are stored.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from random import Random
from typing import TypeVar, cast

from pinlaterd.clock import Clock
from pinlaterd.config.schema import ServerSettings
from pinlaterd.errors import (
    EnqueuedInPart,
    EnqueueRejected,
    NoHealthyShards,
    Overloaded,
    PinLaterError,
    RequestError,
)
from pinlaterd.model import Method
from pinlaterd.router import routing
from pinlaterd.router.call import (
    AllRefused,
    Call,
    Refusal,
    ask_all,
    let_others_go_on,
    reason_of,
    result_of,
)
from pinlaterd.router.shards import ShardSet
from pinlaterd.rpc import codec
from pinlaterd.rpc.peek import UNUSUAL
from pinlaterd.rpc.tuned import SLICE, EnqueuePart, enqueue_parts
from pinlaterd.wire.envelope import GiveUp, Op, ReplyEntry, ShardCall, Status
from pinlaterd.wire.link import ShardLink

_Part = TypeVar("_Part")


class SplitEnqueues:
    """Enqueues that go to several shards."""

    def __init__(self, shards: ShardSet, clock: Clock, rng: Random) -> None:
        self._shards = shards
        self._clock = clock
        self._rng = rng

    async def carry_out(self, call: Call, settings: ServerSettings) -> Sequence[str]:
        shards = self._shards.enqueueable()
        if not shards:
            raise no_place_to_enqueue(self._shards)
        parts = await self._parts(call, shards, settings)
        stored: list[Sequence[str] | PinLaterError] = [()] * len(parts)
        first = int(self._rng.random() * len(shards))

        async def store(number: int, shards: Sequence[ShardLink]) -> None:
            try:
                stored[number] = await self._store(parts[number], shards, call.deadline)
            except PinLaterError as error:
                stored[number] = error

        async def store_in_turn(shard: int) -> None:
            at = (first + shard) % len(shards)
            turned = shards[at:] + shards[:at]
            for group in _groups(range(shard, len(parts), len(shards)), settings):
                await asyncio.gather(*(store(number, turned) for number in group))

        await asyncio.gather(*map(store_in_turn, range(len(shards))))
        return _all_stored([part.jobs for part in parts], stored)

    async def _parts(
        self, call: Call, shards: Sequence[ShardLink], settings: ServerSettings
    ) -> list[EnqueuePart]:
        most = settings.max_jobs_per_call
        sizes_of = partial(_sizes, most=settings.enqueue_split_jobs)
        try:
            cut = enqueue_parts(call.message, most, sizes_of)
            return await self._validated(cut, call, shards, settings)
        except UNUSUAL:
            _, context, request = call.decode(most)
            message = codec.encode_call(Method.ENQUEUE, 0, context, request)
            cut = enqueue_parts(message, most, sizes_of)
            return await self._validated(cut, call, shards, settings)

    async def _validated(
        self,
        cut: Iterator[EnqueuePart],
        call: Call,
        shards: Sequence[ShardLink],
        settings: ServerSettings,
    ) -> list[EnqueuePart]:
        """The parts, once no shard has anything against any of them. One that does not answer is
        asked no more."""
        parts: list[EnqueuePart] = []
        for group in _groups(cut, settings):
            replies = await asyncio.gather(*(_validate(part, shards, call) for part in group))
            refusals: dict[str, Refusal] = {}
            for number, shard, reply in _each(replies, shards, len(parts)):
                if reply.status is Status.FAILED:
                    await _raise_what_is_wrong(call, shard, reply, number)
                elif reply.status is not Status.DONE:
                    refusals[shard.name] = _refusal(shard, reply)
            shards = [shard for shard in shards if shard.name not in refusals]
            if not shards:
                raise AllRefused(list(refusals.values()))
            parts += group
            await let_others_go_on(len(call.message))
        return parts

    async def _store(
        self, part: EnqueuePart, shards: Sequence[ShardLink], deadline: float
    ) -> Sequence[str]:
        """On the first of `shards` that takes it."""
        if self._clock.monotonic() >= deadline:
            raise Overloaded("the time of the call was over")
        refusals: dict[str, Refusal] = {}
        for patient in (False, True):
            for shard in shards:
                reply = await shard.ask(
                    ShardCall(part.message, deadline, patient=patient, give_up=GiveUp.NEVER)
                )
                if reply.status is not Status.REFUSED:
                    return cast("Sequence[str]", result_of(shard, Method.ENQUEUE, reply))
                refusals[shard.name] = Refusal(shard.name, reason_of(reply))
        raise AllRefused(list(refusals.values()), f"{part.jobs} of the jobs were not stored")


def no_place_to_enqueue(shards: ShardSet, refusals: Sequence[Refusal] = ()) -> PinLaterError:
    """What to tell a caller whose jobs no shard may get, after these `refusals`."""
    if not shards.healthy():
        return NoHealthyShards()
    if refusals:
        return AllRefused(refusals)
    return EnqueueRejected("every healthy shard is dequeue-only; see `pinlater-admin status`")


async def _validate(
    part: EnqueuePart, shards: Sequence[ShardLink], call: Call
) -> Sequence[ReplyEntry]:
    return await ask_all(
        [(shard, ShardCall(part.message, call.deadline, Op.VALIDATE)) for shard in shards]
    )


def _each(
    replies: Iterable[Sequence[ReplyEntry]], shards: Sequence[ShardLink], first: int
) -> Iterator[tuple[int, ShardLink, ReplyEntry]]:
    """What each shard says of each part, with the part's number; that of the first is `first`."""
    for number, of_part in enumerate(replies, first):
        for shard, reply in zip(shards, of_part, strict=True):
            yield number, shard, reply


async def _raise_what_is_wrong(call: Call, shard: ShardLink, reply: ReplyEntry, part: int) -> None:
    """With the jobs' numbers in the whole call: but for the first part, `shard` says so of that."""
    if part:
        reply = await shard.ask(ShardCall(call.message, call.deadline, Op.VALIDATE))
    if reply.status is Status.FAILED:
        result_of(shard, Method.ENQUEUE, reply)
    raise AllRefused([_refusal(shard, reply)])


def _refusal(shard: ShardLink, reply: ReplyEntry) -> Refusal:
    return Refusal(shard.name, reason_of(reply) or "did not answer")


def _groups(parts: Iterable[_Part], settings: ServerSettings) -> Iterator[list[_Part]]:
    """As many at a time as have SLICE jobs together, but at least one."""
    most = max(1, SLICE // settings.enqueue_split_jobs)
    remaining = iter(parts)
    while group := list(islice(remaining, most)):
        yield group


def _sizes(jobs: int, most: int) -> Sequence[int]:
    return routing.split_evenly(jobs, most) if jobs else [0]


def _all_stored(
    sizes: Sequence[int], parts: Sequence[Sequence[str] | PinLaterError]
) -> Sequence[str]:
    """The descriptors of an enqueue in parts of these sizes; raises what says which are stored, if
    some are, or may be, and others are not."""
    descriptors: list[str] = []
    errors: list[PinLaterError] = []
    for size, part in zip(sizes, parts, strict=True):
        if not isinstance(part, PinLaterError):
            descriptors += part
            continue
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
