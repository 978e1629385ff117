"""Enqueues of jobs with keys: each goes to the shard that is responsible for its key, and to no
other.

So a job that holds a key is found by whoever enqueues it again. If that shard is unavailable, the
call waits for it as acks do, and then fails. Relies on `shards` for the homes of keys.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Sequence
from typing import cast

from pinlaterd.errors import PinLaterError, ProtocolError, ShardConnectionFailed
from pinlaterd.lifecycle import aside
from pinlaterd.model import EnqueueRequest, Job, KeyedEnqueueResult, Method, QueueKey, key_of
from pinlaterd.router.call import Call, Query, Shared, results_of
from pinlaterd.router.split_enqueue import SplitEnqueue, all_stored, ask_about, no_place_to_enqueue
from pinlaterd.rpc import codec
from pinlaterd.wire.envelope import GiveUp, ReplyEntry, Status
from pinlaterd.wire.key_placement import KeyHomes
from pinlaterd.wire.link import ShardLink

_AGAIN_SECONDS = 0.02  # until a call that met another placement is sent again


class EnqueueByKey:
    """One enqueue of which some jobs have keys. All jobs are validated before any is stored."""

    def __init__(self, call: Call, shared: Shared) -> None:
        self._call = call
        self._shared = shared
        self._shards = shared.shards
        self._most = shared.settings.enqueue_split_jobs
        self._jobs: Sequence[Job] = ()
        self._outcomes: list[tuple[str, bool] | PinLaterError] = []  # of each job

    async def run(self) -> None:
        """Carry it out and answer it."""
        call = self._call
        _, context, request = await call.decode(self._shared)
        request = cast("EnqueueRequest", request)
        query = Query(Method.ENQUEUE, context, call.deadline, len(call.message))
        self._queue, self._jobs = request.queue, request.jobs
        if not any(key_of(self._queue, job.options) for job in self._jobs):
            await SplitEnqueue(call, self._shared).run()
            return
        self._outcomes = [PinLaterError("not sent")] * len(self._jobs)
        left: Sequence[int] = range(len(self._jobs))
        homes = self._shards.homes
        await self._validate(homes, self._by_shard(homes, left))
        while left:
            stores = [
                self._store(query, homes, shard, places)
                for shard, places in self._by_shard(homes, left).items()
            ]
            left = [place for stale in await asyncio.gather(*stores) for place in stale]
            if left:
                await self._wait(homes, left)
                homes = self._shards.homes
        call.reply(codec.encode_reply(call.peek.head, self._result()))

    def _by_shard(self, homes: KeyHomes, places: Iterable[int]) -> dict[str, list[int]]:
        """Divide jobs by the shards that are to store them; those without a key go along with
        others."""
        found: dict[str, list[int]] = {}
        others = []
        for place in places:
            key = key_of(self._queue, self._jobs[place].options)
            home = homes.of(key or QueueKey(self._queue, ""))
            if home is None:
                raise no_place_to_enqueue(self._shards, {})
            if key is None:
                others.append(place)
            else:
                found.setdefault(home.responsible, []).append(place)
        if others:
            found[next(iter(found))] += others
        return found

    async def _validate(self, homes: KeyHomes, by_shard: Collection[str]) -> None:
        """Raise what a shard has against any of the jobs. One that stores all of them says so
        itself."""
        shards = [link for name in by_shard if (link := self._shards.by_name.get(name))]
        if len(by_shard) == 1:
            return
        question = (self._call.message, self._call.deadline, homes.placement.number)
        asked = (shard.ask(ask_about(*question)) for shard in shards)
        for shard, reply in zip(shards, await asyncio.gather(*asked), strict=True):
            results_of(Method.ENQUEUE, [(shard, reply)])

    async def _store(
        self, query: Query, homes: KeyHomes, name: str, places: Sequence[int]
    ) -> list[int]:
        """Store jobs on their shard; return those that met another placement there."""
        stale: list[int] = []
        for at in range(0, len(places), self._most):
            part = places[at : at + self._most]
            try:
                shard = self._shard(name)
                request = EnqueueRequest(self._queue, [self._jobs[place] for place in part])
                call = await aside(query.size, query.part, request)
                call.placement, call.give_up = homes.placement.number, GiveUp.NEVER
                reply = await shard.ask(call)
                if reply.status is Status.STALE:
                    stale += part
                else:
                    self._take(part, shard, reply)
            except PinLaterError as error:
                for place in part:
                    self._outcomes[place] = error
        return stale

    def _take(self, part: Sequence[int], shard: ShardLink, reply: ReplyEntry) -> None:
        """Note the outcomes of jobs that were sent together. Raises PinLaterError."""
        [result] = results_of(Method.ENQUEUE, [(shard, reply)])
        if not isinstance(result, KeyedEnqueueResult):  # none of them has a key
            result = KeyedEnqueueResult(cast("Sequence[str]", result), [False] * len(part))
        for place, descriptor, existed in zip(part, *result, strict=True):
            self._outcomes[place] = (descriptor, existed)

    def _shard(self, name: str) -> ShardLink:
        shard = self._shards.by_name.get(name)
        if shard is None:
            raise ShardConnectionFailed([name], "is not known here yet; nothing was done there")
        return shard

    async def _wait(self, homes: KeyHomes, left: Sequence[int]) -> None:
        """Wait until jobs may be sent again. Raises ShardConnectionFailed once it is too late."""
        if self._shared.clock.monotonic() + _AGAIN_SECONDS >= self._call.deadline:
            told = "follows another placement of keys than this router; nothing was done there"
            raise ShardConnectionFailed(list(self._by_shard(homes, left)), told)
        await asyncio.sleep(_AGAIN_SECONDS)

    def _result(self) -> KeyedEnqueueResult:
        """Return the outcomes of all jobs. Raises what says which of them are stored, if some are
        not."""
        told = [one if isinstance(one, PinLaterError) else [one[0]] for one in self._outcomes]
        descriptors = all_stored([1] * len(told), told)
        existed = [one[1] for one in self._outcomes if not isinstance(one, PinLaterError)]
        return KeyedEnqueueResult(descriptors, existed)


def only_key(message: bytes) -> QueueKey | None:
    """Return the key of an enqueue of one job; None if it has none, or can't be read."""
    try:
        request = cast("EnqueueRequest", codec.decode_call(message, 1).request)
    except (PinLaterError, ProtocolError):
        return None
    return key_of(request.queue, request.jobs[0].options)
