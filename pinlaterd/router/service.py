"""The operations of the interface, as the router serves them: receive, route, transfer, reply.

The four of the job path (enqueue, dequeue, ack, checkpoint) and look-ups are passed through as
bytes whenever one shard can answer; enqueues too large for one transaction go in parts, over
shards taken in turn. A dequeue from several is in `dequeue.py`, all else that takes several shards
in `fan_out.py`. Relies on `rpc` for bytes, and on `shards` for where to send.
All runs on one event loop; nothing here blocks it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial

from pinlaterd.errors import PinLaterError
from pinlaterd.lifecycle import aside
from pinlaterd.model import Method
from pinlaterd.router.call import (
    DECODE_IN_PARTS_BYTES,
    DEQUEUE,
    Admission,
    Call,
    Shared,
    reason_of,
)
from pinlaterd.router.callers import Callers
from pinlaterd.router.dequeue import Dequeuer
from pinlaterd.router.enqueue import (
    EnqueueByKey,
    SplitEnqueue,
    no_place_to_enqueue,
    only_key,
)
from pinlaterd.router.fan_out import FanOut
from pinlaterd.router.shards import less_loaded
from pinlaterd.rpc import codec
from pinlaterd.rpc.connection import Answer, Connection
from pinlaterd.rpc.peek import holds_key, may_have_keys, may_wait, names_one_shard, source_of
from pinlaterd.wire.envelope import DONE, GiveUp, ReplyEntry, Status
from pinlaterd.wire.link import ShardLink

_SEARCHES = frozenset({Method.COUNT, Method.SCAN})
# Small enqueues that arrive together go to one shard, so many at most.
_FILL_CALLS = 16
_SMALL_CALL_BYTES = 4096
_LONG_LIST = 1000
# Looking a member of an enum up costs as much as a call (Python 3.11).
_SILENT, _STALLED, _NEVER = GiveUp.SILENT, GiveUp.STALLED, GiveUp.NEVER
_FOREIGN, _REFUSED, _STALE = Status.FOREIGN, Status.REFUSED, Status.STALE
_TRY_OTHERS = (_FOREIGN, _REFUSED)
_LOOK_SECONDS = 0.01


class RouterService:
    """Takes each call off the wire and sees to it that it is answered exactly once, in time."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._shards = shared.shards
        self._clock = shared.clock
        self._timeout_seconds = shared.settings.request_timeout_ms / 1000
        self._last_enqueued: ShardLink | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.admission = Admission(shared, self._begin)
        self.callers = Callers(self._clock.monotonic())
        self._fan_out = FanOut(shared)
        self.dequeuer = Dequeuer(shared, self._fan_out, self.admission)
        self._pass_through: dict[Method, Callable[[Call], None]] = {
            Method.ENQUEUE: self._enqueue,
            Method.DEQUEUE: self._dequeue,
            Method.ACK: self._ack,
            Method.ACK_JOBS: self._ack,
            Method.CHECKPOINT: self._ack,
            Method.APPLY_CHECKPOINTS: self._ack,
            Method.FINISH: self._ack,
            Method.LOOKUP: self._to_first_descriptor,
        }

    def handle(self, message: bytes, connection: Connection) -> None:
        """Take one call. Raises ProtocolError if `message` is no Thrift message."""
        peek = codec.peek(message)
        method = peek.method
        if method is None:
            self._shared.stats.count("PinLater.unknown_method")
            answer = Answer(connection, oneway=peek.head.oneway)
            answer.send(codec.encode_unknown_method(peek.head))
            return
        started = self._clock.monotonic()
        deadline = started + self._timeout_seconds
        call = Call(message, peek, connection, started, deadline, self.admission.ended)
        if method is DEQUEUE:
            call.expect_wait()
        if self.admission.admit(call):
            self._begin(call)

    def _begin(self, call: Call) -> None:
        peek = call.peek
        assert peek.method is not None
        begin = self._pass_through.get(peek.method)
        if (
            begin is not None
            and peek.canonical
            and peek.items <= self._shared.settings.max_jobs_per_call
        ):
            begin(call)
        else:
            self._serve_whole(call)

    async def finish_calls(self, seconds: float) -> None:
        """Wait until all calls are answered, at most so long; then give up the rest."""
        admission, until = self.admission, self._clock.monotonic() + seconds
        while (  # noqa: ASYNC110 - only at the end, so that no call pays for an event
            admission.in_flight or admission.waiting
        ) and self._clock.monotonic() < until:
            await asyncio.sleep(_LOOK_SECONDS)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- passing through -------------------------------------------------------------------

    def _enqueue(self, call: Call) -> None:
        last = self._last_enqueued
        if call.peek.items > self._shared.settings.enqueue_split_jobs:
            self._serve_whole(call)
        elif may_have_keys(call.message):
            self._enqueue_keyed(call)
        elif (
            last is not None
            and last.preferred
            and 0 < len(last.unsent) < _FILL_CALLS
            and len(call.message) < _SMALL_CALL_BYTES
        ):
            # Small calls of one turn of the loop share a message: what a message costs on its
            # way, and what a commit costs, is several times what such a call costs.
            self._enqueue_on_one_of([last], call)
        else:
            self._enqueue_on_one_of(self._shards.enqueueable(), call)

    def _enqueue_on_one_of(self, shards: list[ShardLink], call: Call) -> None:
        if not shards:
            call.fail(no_place_to_enqueue(self._shards, call.refusals))
            return
        shard = self._last_enqueued = less_loaded(shards, self._shared.rng)
        # Others may take it if this one goes. One that has gone was chosen for want of another.
        call.patient = not shard.healthy and shard.returning
        call.give_up = _NEVER
        shard.call(call, self._enqueued)

    def _enqueued(self, call: Call, shard: ShardLink, reply: ReplyEntry) -> None:
        if reply.status not in _TRY_OTHERS:
            call.finish(shard, reply)
            return
        if reply.status is _FOREIGN:
            self._run(call, EnqueueByKey(call, self._shared).run())
            return
        # Nothing was stored, so another shard may serve, unseen by the caller; or this one once it
        # is back, which is tried once.
        if call.patient or not shard.returning:
            call.refusals = {**call.refusals, shard.name: reason_of(reply)}
        others = [c for c in self._shards.enqueueable() if c.name not in call.refusals]
        self._enqueue_on_one_of(others, call)

    def _enqueue_keyed(self, call: Call) -> None:
        """Send one job to the shard that is responsible for its key; more are divided by shard."""
        sole = self._shards.homes.sole
        if sole in self._shards.by_name:
            self._enqueue_at(sole, call)
            return
        if call.peek.items != 1:
            self._run(call, EnqueueByKey(call, self._shared).run())
            return
        key, homes = only_key(call.message, self._shared), self._shards.homes
        if key is None:
            self._enqueue_on_one_of(self._shards.enqueueable(), call)
            return
        home = homes.of(key)
        if home.former or home.responsible not in self._shards.by_name:
            self._run(call, EnqueueByKey(call, self._shared).run())
        else:
            self._enqueue_at(home.responsible, call)

    def _enqueue_at(self, shard: str, call: Call) -> None:
        """Have the shard that is responsible for all keys of a call store its jobs."""
        call.placement, call.give_up = self._shards.homes.placement.number, _NEVER
        self._shards.by_name[shard].call(call, self._enqueued_by_key)

    def _enqueued_by_key(self, call: Call, shard: ShardLink, reply: ReplyEntry) -> None:
        if reply.status is _STALE:
            self._run(call, EnqueueByKey(call, self._shared).run())
        else:
            call.finish(shard, reply)

    def _dequeue(self, call: Call) -> None:
        """Ask one shard for all, the acks along with it if they look like its own.

        A shard that finds another's acks among them, or a coverage below 1, answers FOREIGN."""
        queue, limit, first = call.peek.queue, call.peek.limit, call.peek.first_descriptor
        assert queue is not None
        self.callers.dequeues(queue, source_of(call.message), call.started)
        shard = self.dequeuer.choose(queue) if first is None else self._shard_named_in(first)
        if shard is None or limit <= 0:
            self._serve_whole(call)
            return
        limited = call.limited = self._shared.limits.queues.get(queue)
        call.max_jobs = limit if limited is None else limited.take(limit)
        if not call.max_jobs:
            self._serve_whole(call)
            return
        # Jobs of lower priorities only once the other shards have said that they hold no better.
        call.lowest_priority = 0 if len(self._shards.by_name) == 1 else 1
        call.most_bytes = call.granted_bytes
        call.patient = False  # others may have jobs; if there are none, the whole call waits
        call.give_up = _SILENT if first is None else _STALLED
        shard.call(call, self._dequeued)

    def _dequeued(self, call: Call, shard: ShardLink, reply: ReplyEntry) -> None:
        peek, status, limited = call.peek, reply.status, call.limited
        if limited is not None:
            limited.settle(wanted=peek.limit, taken=call.max_jobs, used=reply.jobs)
        if status is DONE:
            if reply.jobs == call.max_jobs or not self._may_be_more(call, shard, reply):
                call.finish(shard, reply)
            elif limited is not None or not self.dequeuer.join(call, shard, reply):
                self._run(call, self.dequeuer.run(call, (shard, reply)))
        elif status in _TRY_OTHERS or (status is Status.SILENT and peek.first_descriptor is None):
            self._serve_whole(call)
        else:
            call.finish(shard, reply)

    def _may_be_more(self, call: Call, shard: ShardLink, reply: ReplyEntry) -> bool:
        """Tell whether a shard's short answer to a dequeue may leave jobs that could be had."""
        if call.client_gone:
            return False
        granted = call.max_jobs
        if granted < call.peek.limit:
            return True
        # A dry run claims nothing, and may be whole all the same.
        if not call.claims and codec.peek_jobs(reply.payload) >= granted:
            return False
        if len(self._shards.by_name) > 1 or any(shard.ready_counts(call.peek.queue or "")):
            return True
        # The counts that came with the answer of the only shard confirm that nothing is left.
        return not reply.jobs and may_wait(call.message)

    def _ack(self, call: Call) -> None:
        self.callers.acks(call.peek.queue or "", source_of(call.message), call.started)
        self._to_first_descriptor(call)

    def _to_first_descriptor(self, call: Call) -> None:
        first = call.peek.first_descriptor
        shard = self._shard_named_in(first) if first is not None else None
        if shard is None or _is_for_several(call):
            self._serve_whole(call)
        else:
            shard.call(call, self._carried_out)

    def _carried_out(self, call: Call, shard: ShardLink, reply: ReplyEntry) -> None:
        if reply.status in _TRY_OTHERS:
            self._serve_whole(call)
        else:
            call.finish(shard, reply)

    def _shard_named_in(self, descriptor: str) -> ShardLink | None:
        """Return the shard that `QUEUE:sSHARD:pPRIORITY:LOCALID` names, unless it is down."""
        parts = descriptor.split(":", 2)
        shard = self._shards.by_name.get(parts[1][1:]) if len(parts) > 1 else None
        if shard is None or not (shard.healthy or shard.returning):
            return None
        return shard

    # --- what takes more than one shard ------------------------------------------------------

    def _serve_whole(self, call: Call) -> None:
        """Decode the call, and let as many shards answer it as it takes."""
        if call.peek.method is DEQUEUE:
            self._run(call, self.dequeuer.run(call))
            return
        if call.peek.method is Method.ENQUEUE:
            self._run(call, self._enqueue_in_parts(call))
            return
        task = self._run(call, self._fan_out.run(call))
        if call.peek.method in _SEARCHES:
            call.on_gone = task.cancel  # what changes jobs goes on

    async def _enqueue_in_parts(self, call: Call) -> None:
        has_keys = await aside(len(call.message), holds_key, call.message)
        await (EnqueueByKey if has_keys else SplitEnqueue)(call, self._shared).run()

    def _run(self, call: Call, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(partial(_end_unanswered, call))
        return task


def _is_for_several(call: Call) -> bool:
    """Tell whether a long list is better taken apart here. A shard would take many times as long to
    find that its descriptors don't all begin like the first; and long acks go in parts, since
    neither we nor a shard decode all of them at once."""
    peek = call.peek
    if peek.method is Method.ACK and len(call.message) > DECODE_IN_PARTS_BYTES:
        return True
    return peek.items > _LONG_LIST and not names_one_shard(call.message, peek)


def _end_unanswered(call: Call, task: asyncio.Task[None]) -> None:
    """Answer `call` with why `task`, which was to answer it, has failed.

    A callback, since a task that is cancelled before its first step runs none of its own code."""
    if task.cancelled():
        call.fail(PinLaterError("the server is stopping; try again"))
        return
    error = task.exception()
    if error is not None:
        call.fail(error)
