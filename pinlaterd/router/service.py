"""The twelve operations, as the router serves them.

The four of the job path (enqueue, dequeue, ack, checkpoint) and look-ups are passed through as
bytes whenever one shard can answer; a dequeue from several is in `dequeue.py`, all else that
takes several shards in `divided.py`. Relies on `rpc` for bytes, on `routing` for choices, and
on `shards` for whom to ask. All runs on one event loop; nothing here blocks it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from operator import attrgetter
from random import Random
from typing import Any

from pinlaterd.clock import Clock
from pinlaterd.config.schema import ServerSettings
from pinlaterd.errors import (
    EnqueueRejected,
    ErrorCode,
    Overloaded,
    PinLaterError,
)
from pinlaterd.model import Method
from pinlaterd.router import routing
from pinlaterd.router.answer_memory import AnswerMemory
from pinlaterd.router.asking import LARGE_BYTES
from pinlaterd.router.call import Answer, Call, Refusal, reason_of
from pinlaterd.router.dequeue import Dequeuer
from pinlaterd.router.divided import DividedCalls
from pinlaterd.router.enqueue import no_place_to_enqueue
from pinlaterd.router.limits import Limits
from pinlaterd.router.shards import Shard, ShardSet
from pinlaterd.rpc import codec
from pinlaterd.stats import Stats
from pinlaterd.wire.link import GiveUp, Outcome, ShardCall, ShardReply

log = logging.getLogger(__name__)

# Their answers may be large: they have to have room (see `answer_memory`).
_ANSWERED_AT_LENGTH = frozenset({Method.DEQUEUE, Method.LOOKUP, Method.SCAN})
_SEARCHES = frozenset({Method.COUNT, Method.SCAN})
# Small enqueues that arrive together go to one shard, so many at most.
_FILL_CALLS = 16
_SMALL_CALL_BYTES = 4096
_LONG_LIST = 1000
_MSEC_NAMES = {method: f"PinLaterService.{method}_msec" for method in Method}


class RouterService:
    """Takes each call off the wire and sees to it that it is answered exactly once, in time."""

    def __init__(
        self,
        shards: ShardSet,
        settings: ServerSettings,
        limits: Limits,
        clock: Clock,
        stats: Stats,
        chance: Random,
    ) -> None:
        self._shards = shards
        self._limits = limits
        self._clock = clock
        self._stats = stats
        self._chance = chance
        self._timeout_seconds = settings.request_timeout_ms / 1000
        self._most_in_hand = settings.max_calls_in_flight
        self._most_waiting = settings.max_waiting_dequeues
        self._split_jobs = settings.enqueue_split_jobs
        self._most_elements = settings.max_jobs_per_call
        self._last_enqueued: Shard | None = None
        self._in_hand = 0
        self._waiting = 0
        self._none_in_hand: asyncio.Event | None = None  # only while finishing
        self._tasks: set[asyncio.Task[None]] = set()
        self._divided = DividedCalls(shards, settings, clock, chance)
        self._dequeuer = Dequeuer(shards, settings, limits, clock, chance, self._divided)
        self._memory = AnswerMemory(settings, clock, self._begin, lambda: len(shards.by_name))
        shards.on_ready = self._wake
        self._pass_through: dict[Method, Callable[[Call], None]] = {
            Method.ENQUEUE: self._enqueue,
            Method.DEQUEUE: self._dequeue,
            Method.ACK: self._ack,
            Method.CHECKPOINT: self._to_first_descriptor,
            Method.LOOKUP: self._to_first_descriptor,
        }

    def follow(self, settings: ServerSettings) -> None:
        """Go by `settings` from the next call on, as far as they can change live."""
        self._split_jobs = settings.enqueue_split_jobs
        self._most_elements = settings.max_jobs_per_call
        self._divided.settings = settings
        self._dequeuer.settings = settings
        self._memory.settings = settings

    def handle(self, message: bytes, answer: Answer) -> None:
        """Take one call. Raises ProtocolError if `message` is no Thrift message."""
        peek = codec.peek(message)
        method = peek.method
        if method is None:
            self._stats.count("PinLater.unknown_method")
            answer.send(codec.encode_unknown_method(peek.head))
            return
        started = self._clock.monotonic()
        call = Call(
            message,
            peek,
            answer,
            started=started,
            deadline=started + self._timeout_seconds,
            keeper=self,
        )
        self._in_hand += 1
        if method is Method.DEQUEUE:
            answer.expect_wait()
        if self._in_hand > self._most_in_hand:
            call.fail(self._overloaded(method))
        elif method in _ANSWERED_AT_LENGTH:
            self._memory.admit(call)
        else:
            self._begin(call)

    def _begin(self, call: Call) -> None:
        peek = call.peek
        assert peek.method is not None
        begin = self._pass_through.get(peek.method)
        if begin is not None and peek.canonical and peek.items <= self._most_elements:
            begin(call)
        else:
            self._divide(call)

    def _wake(self, queue: str) -> None:
        """A shard holds jobs of `queue`: those who wait for it may try again."""
        waiting = self._dequeuer.waiting
        if queue in waiting.queues:
            waiting.wake(queue, self._shards.ready_jobs(queue))

    @property
    def calls_in_hand(self) -> int:
        return self._in_hand

    @property
    def calls_waiting(self) -> int:
        return self._waiting

    def stop_waiting(self) -> None:
        """Dequeues that wait for jobs are answered now, and none waits any more."""
        self._dequeuer.stop_waiting()

    async def finish_calls(self, seconds: float) -> None:
        """Wait until all calls in hand are answered, at most so long; then give up the rest."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._drained(), seconds)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _drained(self) -> None:
        self._none_in_hand = asyncio.Event()
        if self._in_hand or self._waiting:
            await self._none_in_hand.wait()

    # --- what calls tell (CallKeeper) ---------------------------------------------------------

    def waits(self, call: Call) -> None:
        if self._waiting >= self._most_waiting:
            raise Overloaded(
                f"{self._waiting} dequeues wait already, as many as max_waiting_dequeues in "
                "etc/pinlaterd.yaml allows"
            )
        self._in_hand -= 1
        self._waiting += 1
        self._memory.give_back(call)

    def goes_on(self, call: Call) -> None:
        self._waiting -= 1
        self._in_hand += 1
        self._memory.grant(call)

    def ended(self, call: Call, error: ErrorCode | None) -> None:
        self._in_hand -= 1
        if call.most_bytes:
            self._memory.give_back(call)
        if self._none_in_hand is not None and not (self._in_hand or self._waiting):
            self._none_in_hand.set()
        method = call.peek.method
        assert method is not None
        self._stats.record(_MSEC_NAMES[method], (self._clock.monotonic() - call.started) * 1000)
        if error is not None:
            self._stats.count(f"PinLater.{method}.errors.{error.name}")
            if error is ErrorCode.DEQUEUE_RATE_LIMITED:
                self._stats.count(f"{call.peek.queue}_dequeue_requests_rate_limited")

    # --- passing through -------------------------------------------------------------------

    def _enqueue(self, call: Call) -> None:
        last = self._last_enqueued
        if call.peek.items > self._split_jobs:
            self._divide(call)
        elif (
            last is not None
            and 0 < last.calls_unsent < _FILL_CALLS
            and len(call.message) < _SMALL_CALL_BYTES
        ):
            # Small calls of one turn of the loop share a message: what a message costs on its
            # way, and what a commit costs, is several times what such a call costs.
            self._enqueue_on(last, call)
        else:
            self._try_enqueue(call, self._shards.enqueueable())

    def _try_enqueue(self, call: Call, candidates: list[Shard]) -> None:
        if not candidates:
            call.fail(no_place_to_enqueue(self._shards, call.refusals))
            return
        shard = routing.choose_least_loaded(candidates, _calls_in_flight, self._chance)
        self._last_enqueued = shard
        self._enqueue_on(shard, call)

    def _enqueue_on(self, shard: Shard, call: Call) -> None:
        # Others may take it if this one goes. One that has gone was chosen for want of another.
        waits = not shard.healthy and shard.returning

        def replied(reply: ShardReply) -> None:
            if reply.outcome is not Outcome.REFUSED:
                call.finish(shard, reply)
                return
            # Nothing was stored, so another shard may serve, unseen by the caller; or this one
            # once it is back, which is tried once.
            if waits or not shard.returning:
                call.refusals = (*call.refusals, Refusal(shard.name, reason_of(reply)))
            tried = {refusal.shard for refusal in call.refusals}
            self._try_enqueue(call, [c for c in self._shards.enqueueable() if c.name not in tried])

        shard.call(
            ShardCall(call.deadline, call.message), replied, patient=waits, give_up=GiveUp.NEVER
        )

    def _dequeue(self, call: Call) -> None:
        """Ask one shard for all, the acks along with it if they look like its own.

        A shard that finds another's acks among them, or a coverage below 1, answers FOREIGN."""
        queue, limit, first = call.peek.queue, call.peek.limit, call.peek.first_descriptor
        assert queue is not None
        shard = self._dequeuer.choose(queue) if first is None else self._shard_named_in(first)
        granted = self._limits.take(queue, limit) if shard is not None and limit > 0 else 0
        if shard is None or granted == 0:
            self._divide(call)
            return

        def replied(reply: ShardReply) -> None:
            self._limits.settle(queue, wanted=limit, taken=granted, used=reply.jobs)
            if reply.outcome in (Outcome.FOREIGN, Outcome.REFUSED) or (
                reply.outcome is Outcome.SILENT and first is None
            ):
                self._divide(call)
            elif (
                reply.outcome is Outcome.DONE
                and reply.jobs < granted
                # A dry run claims nothing, and may be whole all the same; it needs no tokens.
                and (granted < limit or codec.peek_jobs(reply.payload) < granted)
                and not call.answer.gone
            ):
                self._run(call, self._dequeuer.go_on(call, shard, reply))
            else:
                call.finish(shard, reply)

        # Jobs of lower priorities only once the other shards have said that they hold no better.
        lowest_priority = 0 if len(self._shards.by_name) == 1 else 1
        shard.call(
            ShardCall(
                call.deadline,
                call.message,
                max_jobs=granted,
                lowest_priority=lowest_priority,
                most_bytes=call.most_bytes,
            ),
            replied,
            patient=False,  # others may have jobs; if there are none, the divided call waits
            give_up=GiveUp.SILENT if first is None else GiveUp.STALLED,
        )

    def _ack(self, call: Call) -> None:
        """A long list goes in parts: neither we nor a shard decode all of it at once."""
        if len(call.message) > LARGE_BYTES:
            self._divide(call)
        else:
            self._to_first_descriptor(call)

    def _to_first_descriptor(self, call: Call) -> None:
        first = call.peek.first_descriptor
        shard = self._shard_named_in(first) if first is not None else None
        if shard is None or _names_other_shards(call):
            self._divide(call)
            return

        def replied(reply: ShardReply) -> None:
            if reply.outcome in (Outcome.FOREIGN, Outcome.REFUSED):
                self._divide(call)
            else:
                call.finish(shard, reply)

        shard.call(ShardCall(call.deadline, call.message), replied)

    def _shard_named_in(self, descriptor: str) -> Shard | None:
        """The shard that `QUEUE:sSHARD:pPRIORITY:LOCALID` names, unless it is down."""
        parts = descriptor.split(":", 2)
        shard = self._shards.by_name.get(parts[1][1:]) if len(parts) > 1 else None
        if shard is None or not (shard.healthy or shard.returning):
            return None
        return shard

    # --- what takes more than one shard ------------------------------------------------------

    def _divide(self, call: Call) -> None:
        """Decode the call, and let several shards answer it."""
        if call.peek.method is Method.DEQUEUE:
            self._run(call, self._dequeuer.run(call))
        else:
            task = self._run(call, self._divided.run(call))
            if call.peek.method in _SEARCHES:
                call.answer.on_gone = task.cancel  # what changes jobs goes on

    def _run(self, call: Call, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(partial(_end_unanswered, call))
        return task

    def _overloaded(self, method: Method) -> PinLaterError:
        error = Overloaded(f"{self._most_in_hand} calls are in hand already")
        return EnqueueRejected(error.message) if method is Method.ENQUEUE else error


def _names_other_shards(call: Call) -> bool:
    """Of a long list: whether some of its descriptors don't begin like the first. A shard would
    take many times as long to find that out."""
    first, items = call.peek.first_descriptor, call.peek.items
    if first is None or items <= _LONG_LIST:
        return False
    return call.message.count(first.encode().rpartition(b":p")[0]) < items


def _end_unanswered(call: Call, task: asyncio.Task[None]) -> None:
    """Answer `call` with why `task`, which was to answer it, has failed.

    A callback, since a task that is cancelled before its first step runs none of its own code."""
    if task.cancelled():
        call.fail(PinLaterError("the server is stopping; try again"))
        return
    error = task.exception()
    if isinstance(error, PinLaterError):
        call.fail(error)
    elif error is not None:
        log.error("%s failed", call.peek.method, exc_info=error)
        call.fail(PinLaterError("internal error; the server's log says more"))


_calls_in_flight = attrgetter("calls_in_flight")
