"""A shard in the router's own process: the whole ShardService on SQLite, without sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

from pinlaterd.clock import Clock
from pinlaterd.router.shards import ShardSet
from pinlaterd.shard.service import ShardService
from pinlaterd.wire.envelope import (
    CallEntry,
    OnReply,
    ReplyEntry,
    ShardCall,
    ShardFacts,
    Status,
)
from pinlaterd.wire.link import ShardLink

ROUTER = b"router"
Tell = Callable[[ReplyEntry], None]


class LocalShard(ShardLink):
    """`intercept` sees each call first; True: the shard does not get it."""

    def __init__(self, service: ShardService, listener: ShardSet, clock: Clock) -> None:
        self.name = service.name
        facts = service.facts()
        self.facts: ShardFacts | None = facts
        self.incarnation = 1
        self.degraded = self.healthy = self.answering = self.preferred = False
        self.is_returning = False
        self.calls: list[CallEntry] = []  # all that were ever made
        self.ready = dict(facts.counts)
        self.unsent = []  # patient calls, for when it is back
        self.intercept: Callable[[ShardCall, Tell], bool] = lambda _call, _on_reply: False
        self._service = service
        self._listener = listener
        self._clock = clock
        self._in_flight = {}
        self._bytes_in_flight = 0
        self._ids = count()
        self._silent_sweeps = 0
        self._loop = asyncio.get_running_loop()
        self._assess()

    @property
    def returning(self) -> bool:
        return self.is_returning and not self.incarnation

    def move_to(self, endpoint: str) -> None:
        """It has no address."""

    def serves(self, *, serves: bool = True) -> None:
        self.incarnation = int(serves)
        self._assess()
        kept, self.unsent = self.unsent, []
        for call in kept:
            self._in_flight.pop(call.call_id)
            if call.on_reply is not None:  # else it was given up
                self.call(call, call.on_reply)

    def sweep(self) -> None:
        self._sweep_kept(now=0.0)  # no deadline has passed

    def says(self, *, degraded: bool) -> None:
        self.degraded = degraded
        self._assess()

    def call(self, call: Any, on_reply: OnReply) -> None:
        if not self.healthy and call.patient and self.is_returning:
            call.call_id, call.on_reply = next(self._ids), on_reply
            self._in_flight[call.call_id] = call
            self.unsent.append(call)
        elif not self.healthy:
            on_reply(call, self, ReplyEntry(0, Status.REFUSED, b"is down"))
        elif not self.intercept(call, partial(on_reply, call, self)):
            self._carry_out(call, on_reply)

    def _carry_out(self, call: ShardCall, on_reply: OnReply) -> None:
        call.call_id = next(self._ids)
        call.on_reply = on_reply
        entry = CallEntry(
            call.call_id,
            call.deadline,
            call.message,
            call.op,
            call.max_jobs,
            call.lowest_priority,
            call.whole,
            placement=call.placement,
            router=ROUTER,
        )
        self.calls.append(entry)
        self._in_flight[entry.call_id] = call
        self._service.backlog.append(entry)
        self._loop.call_soon(self.turn)

    def close(self) -> None:
        self.serves(serves=False)

    def turn(self) -> None:
        """What the loop of a shard's process does once."""
        self._service.run_batch()
        self._service.run_slice(calls_wait=False)
        counts = list(self._service.take_counts())
        replies = self._service.replies.take().get(ROUTER, [])
        if counts:
            self.ready.update(counts)
            self._listener.counted(self, counts)
        for reply in replies:
            call = self._in_flight.pop(reply.call_id, None)
            if call is not None and call.on_reply is not None:
                call.on_reply(call, self, reply)
        if self._service.busy:
            self._loop.call_soon(self.turn)
