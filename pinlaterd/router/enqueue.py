"""Enqueues that more than one shard may store, each of them a part of the jobs.

Jobs without keys go to any shards: a part that one did not take may be tried elsewhere. A job with
a key goes to the shard that is responsible for it, and to no other, so that any enqueue of it
finds it; if that shard is unavailable, the call waits for it as acks do, and then fails. What
became of each job is told if not all are stored. Relies on `rpc` to cut calls into parts, on
`shards` for the homes of keys.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, TypeVar, cast

from pinlaterd.errors import (
    EnqueuedInPart,
    EnqueueRejected,
    NoHealthyShards,
    Overloaded,
    PinLaterError,
    ProtocolError,
    RequestError,
)
from pinlaterd.lifecycle import aside
from pinlaterd.model import (
    ALL_QUEUES,
    MOST_KEY_BYTES,
    AlikeJobs,
    EnqueueRequest,
    Job,
    Method,
    QueueKey,
    key_of,
    new_record,
    runs_of,
)
from pinlaterd.router.call import (
    AllRefused,
    Call,
    Shared,
    ask_all,
    failure,
    reason_of,
    results_of,
)
from pinlaterd.router.shards import ShardSet
from pinlaterd.rpc import codec
from pinlaterd.rpc.peek import UNUSUAL
from pinlaterd.rpc.structs import sized
from pinlaterd.rpc.tuned import SLICE, CutEnqueue, EnqueuePart, cut_enqueue, enqueue_parts
from pinlaterd.wire.envelope import GiveUp, KeyQuestion, Op, ShardCall, Status, pack_keys
from pinlaterd.wire.key_placement import KeyHomes
from pinlaterd.wire.link import ShardLink

_Part = TypeVar("_Part")
# Of each job: to cut it off costs as much as to decode so many bytes (see `aside`).
_CUT_BYTES = 10
_LENGTH_BYTES = 4  # in front of a descriptor
_USUAL_MS = (2**31 - 1) * 1000  # up to which every table holds times


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
        """Carry it out and answer it."""
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
        """Return the parts of all jobs, once no shard has anything against any of them."""
        most, message = self._most_elements, self._call.message
        try:
            return await self._validated(enqueue_parts(message, most, self._sizes_of))
        except UNUSUAL:
            _, context, request = await self._call.decode(self._shared)
            encode = partial(codec.encode_call, Method.ENQUEUE, 0, context, request)
            message = await aside(len(message), encode)
            return await self._validated(enqueue_parts(message, most, self._sizes_of))

    async def _validated(self, cut: Iterator[EnqueuePart]) -> list[EnqueuePart]:
        """Have shards validate all parts; one that does not answer is asked no more."""
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
        """Store a part on the first of `shards` that takes it."""
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


class EnqueueByKey:
    """One enqueue of which some jobs have keys. A job whose key no former shard holds is stored by
    the responsible one, or found to exist there. All are validated before any is stored, but for
    what only a store has against a job."""

    def __init__(self, call: Call, shared: Shared) -> None:
        self._call = call
        self._shared = shared
        self._shards = shared.shards
        self._most = shared.settings.enqueue_split_jobs
        self._cut = CutEnqueue(EnqueueRequest("", ()), (), b"")
        self._jobs: Sequence[Job] = ()
        self._keys: Sequence[QueueKey | None] = ()  # of each job
        # Of each job: its descriptor, as it stands in the answer, and whether it existed; or why it
        # is not stored. b"" where neither is known.
        self._descriptors: list[bytes] = []
        self._existed = bytearray()
        self._errors: dict[int, PinLaterError] = {}

    async def run(self) -> None:
        """Carry it out and answer it."""
        call, shards = self._call, self._shards
        self._cut = await self._read()
        queue, self._jobs = self._cut.request
        size = len(self._jobs) * _CUT_BYTES
        self._keys = await aside(size, _keys_of, queue, self._jobs)
        self._descriptors, self._existed = [b""] * len(self._jobs), bytearray(len(self._jobs))
        if not any(self._keys):
            await SplitEnqueue(call, self._shared).run()
            return
        if not shards.homes.placement.enqueueable:
            raise no_place_to_enqueue(shards, {})
        if not await aside(size, self._are_usual):
            await self._validate(shards.homes)
        while self._left():
            homes = shards.homes
            if by_former := await aside(size, self._by_former, homes):
                await self._for_each(self._ask_former, homes, by_former)
            by_shard = await aside(size, self._by_responsible, homes)
            await self._for_each(self._store, homes, by_shard)
            if self._left():
                await shards.try_keys_again(call.deadline, by_shard)
        if self._errors:
            self._raise_errors()
        call.reply(await aside(size, codec.encode_keyed, call.peek.head, self._answer()))

    async def _read(self) -> CutEnqueue:
        message, defaults, peek = self._call.message, self._shared.job_defaults, self._call.peek
        most = self._shared.settings.max_jobs_per_call
        size = peek.items * _CUT_BYTES if peek.canonical else len(message)
        try:
            return await aside(size, cut_enqueue, message, most, defaults)
        except UNUSUAL:
            _, context, request = await self._call.decode(self._shared)
            message = codec.encode_call(Method.ENQUEUE, 0, context, request)
            return await aside(len(message), cut_enqueue, message, most, defaults)

    def _are_usual(self) -> bool:
        """Return whether a shard hardly has anything against any of the jobs."""
        settings, jobs = self._shared.settings, self._jobs
        sizes = [len(key.key.encode()) for key in self._keys if key]
        some = jobs[:1] if isinstance(jobs, AlikeJobs) else jobs
        return (
            min(sizes) > 0
            and max(sizes) <= MOST_KEY_BYTES
            and all(
                0 <= (options.expires_at_ms or 0) <= _USUAL_MS
                and 0 <= (options.run_after_us or 0) // 1000 <= _USUAL_MS
                and 0 <= (options.expires_at_us or 0) // 1000 <= _USUAL_MS
                and (options.key is not None or not options.key_of_all_queues)
                for job in some
                if (options := job.options)
            )
            and all(
                max(map(len, bodies)) <= settings.max_job_body_bytes
                and 0 < job.priority <= settings.num_priority_levels
                and job.attempts_allowed > 0
                and 0 <= (job.run_after_ms or 0) <= _USUAL_MS
                for job, bodies in runs_of(jobs)
            )
        )

    def _left(self) -> list[int]:
        """Return the places of the jobs without an outcome."""
        if b"" not in self._descriptors:
            return []
        return [
            place
            for place, descriptor in enumerate(self._descriptors)
            if not descriptor and place not in self._errors
        ]

    def _by_former(self, homes: KeyHomes) -> dict[str, list[int]]:
        """Divide jobs by the former shards of their keys; a job may be asked of several."""
        found: dict[str, list[int]] = {}
        for place in self._left() if homes.placement.earlier else ():
            key = self._keys[place]
            for name in homes.of(key).former if key else ():
                found.setdefault(name, []).append(place)
        return found

    def _by_responsible(self, homes: KeyHomes) -> dict[str, list[int]]:
        """Divide jobs by the shards that are to store them; those without a key go along with
        others."""
        found: dict[str, list[int]] = {}
        others = []
        for place in self._left():
            if key := self._keys[place]:
                found.setdefault(homes.of(key).responsible, []).append(place)
            else:
                others.append(place)
        if others:
            found.setdefault(next(iter(found or homes.placement.enqueueable)), []).extend(others)
        return found

    async def _validate(self, homes: KeyHomes) -> None:
        """Raise what a shard has against any of the jobs. One that stores all of them says so
        itself."""
        by_shard = self._by_responsible(homes)
        shards = [link for name in by_shard if (link := self._shards.by_name.get(name))]
        if len(by_shard) == 1:
            return
        question = (self._call.message, self._call.deadline, homes.placement.number)
        asked = (shard.ask(ask_about(*question)) for shard in shards)
        for shard, reply in zip(shards, await asyncio.gather(*asked), strict=True):
            results_of(Method.ENQUEUE, [(shard, reply)])

    async def _for_each(
        self,
        send: Callable[[KeyHomes, ShardLink, Sequence[int]], Coroutine[Any, Any, None]],
        homes: KeyHomes,
        by_shard: Mapping[str, Sequence[int]],
    ) -> None:
        """Send to all shards at once, to each some jobs after the other. A shard that is not known
        here yet is one of a later snapshot than its placement."""

        async def send_all(shard: ShardLink, places: Sequence[int]) -> None:
            for at in range(0, len(places), self._most):
                part = places[at : at + self._most]
                try:
                    await send(homes, shard, part)
                except PinLaterError as error:
                    self._errors.update(dict.fromkeys(part, error))

        known = self._shards.by_name
        there = [(known[name], places) for name, places in by_shard.items() if name in known]
        await asyncio.gather(*(send_all(shard, places) for shard, places in there))

    async def _ask_former(self, homes: KeyHomes, shard: ShardLink, part: Sequence[int]) -> None:
        """Ask a shard that may hold keys from before, which then takes none of them any more."""
        keys = [key for place in part if (key := self._keys[place])]
        question = KeyQuestion(homes.placement.number, keys)
        reply = await shard.ask(ShardCall(pack_keys(question), self._call.deadline, Op.FIND_KEYS))
        if reply.status is not Status.DONE:
            raise failure([(shard, reply)])
        for place, descriptor in zip(part, json.loads(reply.payload), strict=True):
            if descriptor:
                self._descriptors[place], self._existed[place] = sized(descriptor), True

    async def _store(self, homes: KeyHomes, shard: ShardLink, part: Sequence[int]) -> None:
        """Store jobs; those that meet another placement there are left without an outcome."""
        call = ShardCall(
            self._cut.part(part), self._call.deadline, whole=False, give_up=GiveUp.NEVER
        )
        call.placement = homes.placement.number
        reply = await shard.ask(call)
        if reply.status is Status.STALE:
            return
        if reply.status is not Status.DONE:
            results_of(Method.ENQUEUE, [(shard, reply)])
        stored = codec.cut_keyed(reply.payload)
        descriptors, existed = self._descriptors, self._existed
        for place, descriptor, flag in zip(part, stored.descriptors, stored.existed, strict=True):
            descriptors[place], existed[place] = descriptor, flag

    def _answer(self) -> codec.CutEnqueued:
        return codec.CutEnqueued(self._descriptors, bytes(self._existed))

    def _raise_errors(self) -> None:
        """Raise what says which of the jobs are stored."""
        outcomes = [
            self._errors.get(place) or [descriptor[_LENGTH_BYTES:].decode()]
            for place, descriptor in enumerate(self._descriptors)
        ]
        all_stored([1] * len(outcomes), outcomes)


def _keys_of(queue: str, jobs: Sequence[Job]) -> Sequence[QueueKey | None]:
    """Return the key of each job."""
    if isinstance(jobs, AlikeJobs) and jobs.keys is not None and jobs.alike.options:
        scope = ALL_QUEUES if jobs.alike.options.key_of_all_queues else queue
        return [new_record(QueueKey, (scope, key)) for key in jobs.keys]
    return [key_of(queue, job.options) for job in jobs]


def only_key(message: bytes, shared: Shared) -> QueueKey | None:
    """Return the key of an enqueue of one job; None if it has none, or can't be read."""
    try:
        request, _, _ = cut_enqueue(message, 1, shared.job_defaults)
    except UNUSUAL:
        try:
            request = cast("EnqueueRequest", codec.decode_call(message, 1).request)
        except (PinLaterError, ProtocolError):
            return None
    return key_of(request.queue, request.jobs[0].options)


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
    """Divide `count` into as few parts of at most `most` as possible, nearly equal; 0: one part."""
    parts = max(1, -(-count // most))
    size, larger = divmod(count, parts)
    return [size + 1] * larger + [size] * (parts - larger)
