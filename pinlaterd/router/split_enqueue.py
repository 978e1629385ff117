"""Enqueues in parts: one call of a client, stored by several shards.

A part that no shard took may be tried elsewhere; what became of each job is told if not all are
stored. Relies on `rpc` to cut calls into parts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import TypeVar, cast

from pinlaterd.errors import (
    EnqueuedInPart,
    EnqueueRejected,
    NoHealthyShards,
    Overloaded,
    PinLaterError,
    RequestError,
)
from pinlaterd.lifecycle import aside
from pinlaterd.model import Method
from pinlaterd.router.call import AllRefused, Call, Shared, ask_all, reason_of, results_of
from pinlaterd.router.shards import ShardSet
from pinlaterd.rpc import codec
from pinlaterd.rpc.peek import UNUSUAL
from pinlaterd.rpc.tuned import SLICE, EnqueuePart, enqueue_parts
from pinlaterd.wire.envelope import GiveUp, Op, ShardCall, Status
from pinlaterd.wire.link import ShardLink

_Part = TypeVar("_Part")


class KeysFound(Exception):
    """Some jobs have keys, by which they are to be divided. Nothing was stored."""


class SplitEnqueue:
    """One enqueue that goes to several shards.

    All jobs are validated before any is stored. A shard has a thousand jobs of a call at a time, so
    that other calls come in between. A part that no shard took may be tried elsewhere; what became
    of each is told if not all are stored."""

    def __init__(self, call: Call, shared: Shared) -> None:
        settings = shared.settings
        self._call = call
        self._shared = shared
        self._most_elements = settings.max_jobs_per_call
        self._sizes_of = partial(split_evenly, most=settings.enqueue_split_jobs)
        # Parts that together have about as many jobs as a shard may have at a time.
        self._parts_at_a_time = max(1, SLICE // settings.enqueue_split_jobs)
        self._shards: Sequence[ShardLink] = shared.shards.enqueueable()

    async def run(self) -> None:
        """Carry it out and answer it. Raises KeysFound."""
        if not self._shards:
            raise no_place_to_enqueue(self._shared.shards, {})
        descriptors = await self._carry_out()
        self._call.reply(codec.encode_reply(self._call.peek.head, descriptors))

    async def _carry_out(self) -> Sequence[str]:
        shards = self._shards
        parts = await self._parts()
        stored: list[Sequence[str] | PinLaterError] = [()] * len(parts)
        first = int(self._shared.rng.random() * len(shards))

        async def store(number: int, shards: Sequence[ShardLink]) -> None:
            try:
                stored[number] = await self._store(parts[number], shards)
            except PinLaterError as error:
                stored[number] = error

        async def store_in_turn(shard: int) -> None:
            at = (first + shard) % len(shards)
            turned = [*shards[at:], *shards[:at]]
            for group in self._groups(range(shard, len(parts), len(shards))):
                await asyncio.gather(*(store(number, turned) for number in group))

        await asyncio.gather(*map(store_in_turn, range(len(shards))))
        return all_stored([part.jobs for part in parts], stored)

    async def _parts(self) -> list[EnqueuePart]:
        """All jobs, once no shard has anything against any of them."""
        most, message = self._most_elements, self._call.message
        try:
            return await self._validated(enqueue_parts(message, most, self._sizes_of))
        except UNUSUAL:
            _, context, request = await self._call.decode(self._shared)
            encode = partial(codec.encode_call, Method.ENQUEUE, 0, context, request)
            message = await aside(len(message), encode)
            return await self._validated(enqueue_parts(message, most, self._sizes_of))

    async def _validated(self, cut: Iterator[EnqueuePart]) -> list[EnqueuePart]:
        """A shard that does not answer is asked no more."""
        parts: list[EnqueuePart] = []
        shards = self._shards
        for group in self._groups(cut):
            refusals: dict[str, str] = {}
            asked = [
                (shard, ask_about(part.message, self._call.deadline))
                for part in group
                for shard in shards
            ]
            for place, (shard, reply) in enumerate(await ask_all(asked)):
                if reply.status is Status.FAILED:
                    if parts or place >= len(shards):
                        await self._raise_as_a_whole(shard)
                    results_of(Method.ENQUEUE, [(shard, reply)])
                elif reply.status is Status.FOREIGN:
                    raise KeysFound
                elif reply.status is not Status.DONE:
                    refusals[shard.name] = reason_of(reply) or "did not answer"
            shards = [shard for shard in shards if shard.name not in refusals]
            if not shards:
                raise AllRefused(refusals)
            parts += group
        return parts

    async def _raise_as_a_whole(self, shard: ShardLink) -> None:
        """Raise what `shard` has against the jobs, by their numbers in the whole call: of a part
        but the first it told those in the part."""
        reply = await shard.ask(ask_about(self._call.message, self._call.deadline))
        if reply.status is Status.FAILED:
            results_of(Method.ENQUEUE, [(shard, reply)])
        raise AllRefused({shard.name: reason_of(reply) or "did not answer"})

    async def _store(self, part: EnqueuePart, shards: Sequence[ShardLink]) -> Sequence[str]:
        """On the first of `shards` that takes it."""
        deadline = self._call.deadline
        if self._shared.clock.monotonic() >= deadline:
            raise Overloaded("the time of the call was over")
        refusals: dict[str, str] = {}
        for patient in (False, True):
            for shard in shards:
                reply = await shard.ask(
                    ShardCall(part.message, deadline, patient=patient, give_up=GiveUp.NEVER)
                )
                if reply.status is not Status.REFUSED:
                    (descriptors,) = results_of(Method.ENQUEUE, [(shard, reply)])
                    return cast("Sequence[str]", descriptors)
                refusals[shard.name] = reason_of(reply)
        raise AllRefused(refusals, f"{part.jobs} of the jobs were not stored")

    def _groups(self, parts: Iterable[_Part]) -> Iterator[list[_Part]]:
        remaining = iter(parts)
        while group := list(islice(remaining, self._parts_at_a_time)):
            yield group


def ask_about(message: bytes, deadline: float, placement: int = 0) -> ShardCall:
    """Make the call that asks a shard whether it has anything against an enqueue."""
    call = ShardCall(message, deadline, Op.VALIDATE)
    call.placement = placement
    return call


def no_place_to_enqueue(shards: ShardSet, refusals: Mapping[str, str]) -> PinLaterError:
    """Return what to tell a caller whose jobs no shard may get, after these `refusals`."""
    if not shards.healthy():
        return NoHealthyShards()
    if refusals:
        return AllRefused(refusals)
    return EnqueueRejected("every healthy shard is dequeue-only; see `pinlater-admin status`")


def all_stored(
    sizes: Sequence[int], parts: Sequence[Sequence[str] | PinLaterError]
) -> Sequence[str]:
    """Return the descriptors of an enqueue in parts of these sizes. Raises what says which are
    stored, if some are, or may be, and others are not."""
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


def split_evenly(count: int, most: int) -> list[int]:
    """`count` items in as few parts of at most `most` as possible, nearly equal; of none, one."""
    parts = max(1, -(-count // most))
    size, larger = divmod(count, parts)
    return [size + 1] * larger + [size] * (parts - larger)
