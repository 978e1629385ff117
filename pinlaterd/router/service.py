"""The operations of the interface, as the router serves them: receive, route, transfer, reply.

The four of the job path (enqueue, dequeue, ack, checkpoint) and look-ups are passed through as
bytes whenever one shard can answer; enqueues too large for one transaction go in parts, over
shards taken in turn. A dequeue from several is in `dequeue.py`, all else that takes several shards
in `fan_out.py`. Relies on `rpc` for bytes, and on `shards` for where to send.
All runs on one event loop; nothing here blocks it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
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
from pinlaterd.router.call import (
    DEQUEUE,
    LARGE_BYTES,
    Admission,
    AllRefused,
    Call,
    Shared,
    ask_all,
    reason_of,
    results_of,
)
from pinlaterd.router.dequeue import Dequeuer
from pinlaterd.router.fan_out import FanOut
from pinlaterd.router.shards import ShardSet, less_loaded
from pinlaterd.rpc import codec
from pinlaterd.rpc.connection import Answer, Connection
from pinlaterd.rpc.peek import UNUSUAL, may_wait, names_one_shard
from pinlaterd.rpc.tuned import SLICE, EnqueuePart, enqueue_parts
from pinlaterd.wire.envelope import DONE, GiveUp, Op, ReplyEntry, ShardCall, Status
from pinlaterd.wire.link import ShardLink

_Part = TypeVar("_Part")
_SEARCHES = frozenset({Method.COUNT, Method.SCAN})
# Small enqueues that arrive together go to one shard, so many at most.
_FILL_CALLS = 16
_SMALL_CALL_BYTES = 4096
_LONG_LIST = 1000
_SILENT, _STALLED, _NEVER = GiveUp.SILENT, GiveUp.STALLED, GiveUp.NEVER  # see envelope.DONE
_REFUSED = Status.REFUSED
_TRY_OTHERS = (Status.FOREIGN, _REFUSED)
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
        self._fan_out = FanOut(shared)
        self.dequeuer = Dequeuer(shared, self._fan_out, self.admission)
        self._pass_through: dict[Method, Callable[[Call], None]] = {
            Method.ENQUEUE: self._enqueue,
            Method.DEQUEUE: self._dequeue,
            Method.ACK: self._to_first_descriptor,
            Method.ACK_JOBS: self._to_first_descriptor,
            Method.CHECKPOINT: self._to_first_descriptor,
            Method.APPLY_CHECKPOINTS: self._to_first_descriptor,
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
        if reply.status is not _REFUSED:
            call.finish(shard, reply)
            return
        # Nothing was stored, so another shard may serve, unseen by the caller; or this one once it
        # is back, which is tried once.
        if call.patient or not shard.returning:
            call.refusals = {**call.refusals, shard.name: reason_of(reply)}
        others = [c for c in self._shards.enqueueable() if c.name not in call.refusals]
        self._enqueue_on_one_of(others, call)

    def _dequeue(self, call: Call) -> None:
        """Ask one shard for all, the acks along with it if they look like its own.

        A shard that finds another's acks among them, or a coverage below 1, answers FOREIGN."""
        queue, limit, first = call.peek.queue, call.peek.limit, call.peek.first_descriptor
        assert queue is not None
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
        """Whether a shard's short answer to a dequeue may leave jobs that could be had."""
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
        """The shard that `QUEUE:sSHARD:pPRIORITY:LOCALID` names, unless it is down."""
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
            self._run(call, SplitEnqueue(call, self._shared).run())
            return
        task = self._run(call, self._fan_out.run(call))
        if call.peek.method in _SEARCHES:
            call.on_gone = task.cancel  # what changes jobs goes on

    def _run(self, call: Call, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(partial(_end_unanswered, call))
        return task


def _is_for_several(call: Call) -> bool:
    """Whether a long list is better taken apart here. A shard would take many times as long to find
    that its descriptors don't all begin like the first; and long acks go in parts, since neither
    we nor a shard decode all of them at once."""
    peek = call.peek
    if peek.method is Method.ACK and len(call.message) > LARGE_BYTES:
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


# --- enqueues in parts ----------------------------------------------------------------------


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
        return _all_stored([part.jobs for part in parts], stored)

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
            asked = [(shard, self._ask_about(part.message)) for part in group for shard in shards]
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

    def _ask_about(self, message: bytes) -> ShardCall:
        return ShardCall(message, self._call.deadline, Op.VALIDATE)

    async def _raise_as_a_whole(self, shard: ShardLink) -> None:
        """What `shard` has against the jobs, by their numbers in the whole call: of a part but the
        first it told those in the part."""
        reply = await shard.ask(self._ask_about(self._call.message))
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


def no_place_to_enqueue(shards: ShardSet, refusals: Mapping[str, str]) -> PinLaterError:
    """What to tell a caller whose jobs no shard may get, after these `refusals`."""
    if not shards.healthy():
        return NoHealthyShards()
    if refusals:
        return AllRefused(refusals)
    return EnqueueRejected("every healthy shard is dequeue-only; see `pinlater-admin status`")


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


def split_evenly(count: int, most: int) -> list[int]:
    """`count` items in as few parts of at most `most` as possible, nearly equal; of none, one."""
    parts = max(1, -(-count // most))
    size, larger = divmod(count, parts)
    return [size + 1] * larger + [size] * (parts - larger)
