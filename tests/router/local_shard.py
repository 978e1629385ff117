"""A shard in the router's own process: the whole ShardService on SQLite, without sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from itertools import count

from pinlaterd.clock import Clock
from pinlaterd.router.shards import ShardSet
from pinlaterd.shard.service import ShardService
from pinlaterd.shard.works import Arrival
from pinlaterd.wire.envelope import CallEntry, Op, ReadyCounts, ShardFacts
from pinlaterd.wire.link import GiveUp, OnReply, Outcome, ShardCall, ShardReply

ROUTER = b"router"


class LocalShard:
    """Fulfils `router.shards.Shard`. `hints_lie_still`: the router learns of no counts but those
    that come with its own replies, as if another router had enqueued. `refuses`: so many calls are
    refused, as by a shard that has too many in hand."""

    def __init__(self, service: ShardService, listener: ShardSet, clock: Clock) -> None:
        self.name = service.name
        facts = service.facts()
        self.facts: ShardFacts | None = facts
        self.healthy = True
        self.returning = False
        self.ailing = False
        self.calls: list[CallEntry] = []  # all that were ever made
        self.ready: dict[str, tuple[int, ...]] = dict(facts.counts)
        self.hints_lie_still = False
        self.refuses = 0
        self.refuses_after = -1  # so many calls, it refuses all others
        self.loses_after = -1  # the same: their outcome is unknown
        self._service = service
        self._listener = listener
        self._clock = clock
        self._ids = count()
        self._waiting: dict[int, OnReply] = {}
        self._loop = asyncio.get_running_loop()

    @property
    def answering(self) -> bool:
        return self.healthy

    @property
    def calls_in_flight(self) -> int:
        return len(self._waiting)

    @property
    def calls_unsent(self) -> int:
        return 0

    def ready_counts(self, queue: str) -> tuple[int, ...]:
        return self.ready.get(queue, ())

    def call(
        self,
        call: ShardCall,
        on_reply: OnReply,
        *,
        patient: bool = True,
        give_up: GiveUp = GiveUp.STALLED,
    ) -> None:
        if not self.healthy:
            on_reply(ShardReply(Outcome.REFUSED, b"is down"))
            return
        if len(self.calls) == self.loses_after:
            on_reply(ShardReply(Outcome.LOST))
            return
        if len(self.calls) == self.refuses_after:
            on_reply(ShardReply(Outcome.REFUSED, b"has as many calls in hand as it may have"))
            return
        if self.refuses:
            self.refuses -= 1
            on_reply(ShardReply(Outcome.REFUSED, b"has as many calls in hand as it may have"))
            return
        entry = CallEntry(
            next(self._ids),
            call.deadline,
            call.message,
            call.op,
            call.max_jobs,
            call.lowest_priority,
            call.whole,
        )
        self.calls.append(entry)
        self._waiting[entry.call_id] = on_reply
        self._service.submit([Arrival(ROUTER, entry)])
        self._loop.call_soon(self.turn)

    def ask(
        self, call: ShardCall, *, patient: bool = True, give_up: GiveUp = GiveUp.STALLED
    ) -> asyncio.Future[ShardReply]:
        future: asyncio.Future[ShardReply] = self._loop.create_future()
        self.call(call, future.set_result, patient=patient, give_up=give_up)
        return future

    def release(self, dequeue_reply: bytes) -> None:
        deadline = self._clock.monotonic() + 60
        self.call(ShardCall(deadline, dequeue_reply, Op.RELEASE), lambda _: None)

    def close(self) -> None:
        self.healthy = False

    def turn(self) -> None:
        """What the loop of a shard's process does once."""
        self._service.run_batch()
        self._service.run_slice(calls_wait=False)
        counts = self._service.take_counts()
        replies = self._service.take_replies().get(ROUTER, [])
        if replies or not self.hints_lie_still:
            self._learn(counts)
        for entry in replies:
            on_reply = self._waiting.pop(entry.call_id, None)
            if on_reply is not None:
                on_reply(ShardReply(Outcome(entry.status), entry.payload, entry.jobs))
        if self._service.busy:
            self._loop.call_soon(self.turn)

    def _learn(self, counts: Iterable[ReadyCounts]) -> None:
        counts = list(counts)
        self.ready.update(counts)
        if counts:
            self._listener.counted(self, counts)
