"""A dequeue that takes more than one shard, or that has to wait.

The promise: no job of priority p + 1 leaves while a covered shard holds a ready one of priority
p, and a short or empty answer is given only after every covered healthy shard confirmed it. What
shards publish are hints; they choose whom to ask first. The proof is what shards answer to this
very call: each claim names the lowest priority it may take; one that brings nothing, or whose
answer says that nothing is left, has found a moment at which nothing was there.

Dequeues that wait for jobs (`maxWaitMillis`) are woken by the counts that shards publish: as many
as jobs are ready, so that one job does not stir a thousand workers. Relies on `shards` for
choices, on `fan_out` for the acks.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import TypeVar, cast

from pinlaterd.errors import DequeueRateLimited, InvalidRequest, NoHealthyShards
from pinlaterd.model import ClaimedJob, DequeueRequest, DequeueResult, JobDescriptor, Method
from pinlaterd.router.call import (
    DEQUEUE,
    Admission,
    Call,
    Query,
    Shared,
    failure,
    results_of,
)
from pinlaterd.router.fan_out import FanOut
from pinlaterd.router.shards import best_level, cover, plan_round, ready_through
from pinlaterd.rpc import codec
from pinlaterd.rpc.peek import UNUSUAL, may_be_dry_run, may_wait
from pinlaterd.rpc.tuned import dequeue_without_acks
from pinlaterd.wire.envelope import DONE, GiveUp, ReplyEntry, ShardCall, Status
from pinlaterd.wire.link import ShardLink

T = TypeVar("T")
_FAILED, _REFUSED = Status.FAILED, Status.REFUSED  # look-ups cost as much as calls
_UNDONE = frozenset({_REFUSED, Status.SILENT})  # after which others can serve


class Dequeuer:
    """Dequeues over several shards."""

    def __init__(self, shared: Shared, fan_out: FanOut, admission: Admission) -> None:
        self._shared = shared
        self._shards = shards = shared.shards
        self._fan_out = fan_out
        self._admission = admission
        self._waiting = WaitingRoom()
        self._stopping = False
        shards.awaited, shards.on_ready = self._waiting.queues, self._wake

    def _wake(self, queue: str) -> None:
        """Wake those who wait for jobs of `queue`, which can be had."""
        self._waiting.wake(queue, self._shards.ready_jobs(queue))

    def stop_waiting(self) -> None:
        """Answer those who wait now: the server stops, and nobody waits any more."""
        self._stopping = True
        self._shared.limits.stop_waiting()
        self._waiting.wake_all()

    def choose(self, queue: str) -> ShardLink | None:
        """Choose one shard to ask for all, one that may hold jobs of the best priority."""
        shards = self._shards.preferred()
        if len(shards) < 2:
            return shards[0] if shards else None
        levels = [best_level(shard.ready_counts(queue)) for shard in shards]
        best = min(levels)
        candidates = [shard for shard, level in zip(shards, levels, strict=True) if level == best]
        return candidates[int(self._shared.rng.random() * len(candidates))]

    def join(self, call: Call, first: ShardLink, reply: ReplyEntry) -> bool:
        """Complete what `first` gave as the other shards answer, without a task of its own. False:
        it may have to wait, or is no plain dequeue."""
        message = call.message
        if may_be_dry_run(message) or (not reply.jobs and may_wait(message)):
            return False
        try:
            message = dequeue_without_acks(message)
        except UNUSUAL:
            return False
        request = DequeueRequest(call.peek.queue or "", call.peek.limit)
        gathering = Gathering(self._shared, call, request, message)

        def joined(error: Exception | None) -> None:
            try:
                if error is None:
                    gathering.deliver()
                    return
            except Exception as unexpected:  # noqa: BLE001  (whatever it is, the call is answered)
                error = unexpected
            gathering.release()
            call.fail(error)

        try:
            gathering.begin_with(first, reply)
        except NoHealthyShards as error:
            joined(error)
        else:
            gathering.claim(request.limit, joined)
        return True

    async def run(self, call: Call, first: tuple[ShardLink, ReplyEntry] | None = None) -> None:
        """Serve a dequeue whose acks, coverage or rate take more than passing it through, or that
        may wait. The `first` shard has given a part of it, and has carried out the acks."""
        size = len(call.message)
        _, context, decoded = await call.decode(self._shared)
        request = cast("DequeueRequest", decoded)
        if first is None:
            if request.acks is not None:
                # Carried out whatever becomes of the dequeue. If one fails, that is the answer.
                query = Query(Method.ACK, context, call.deadline, size)
                await self._fan_out.ack(query, request.acks)
            _check(request)
        own = request._replace(acks=None, coverage=1.0, max_wait_ms=0)
        message = codec.encode_call(DEQUEUE, call.peek.head.seqid, context, own)
        gathering = Gathering(self._shared, call, request, message)
        try:
            if first is not None:
                gathering.begin_with(*first)
            await self._serve(gathering)
        except BaseException:
            gathering.release()
            raise

    async def _serve(self, gathering: Gathering) -> None:
        """Gather, wait while there is nothing, answer."""
        call, request = gathering.call, gathering.request
        wait_ms = min(request.max_wait_ms, self._shared.settings.max_dequeue_wait_ms)
        if call.oneway:
            wait_ms = 0  # no answer delivers what it would claim
        wait_until = call.started + wait_ms / 1000
        # What a call takes comes on top of what it waits.
        gathering.deadline = call.deadline + wait_ms / 1000
        while True:
            refused = await self._gather(gathering, wait_until)
            seconds = wait_until - self._shared.clock.monotonic()
            if gathering.found or refused or seconds <= 0 or call.client_gone or self._stopping:
                break
            if call.granted_bytes:
                await self._wait_for_jobs(gathering, seconds)
            if not call.granted_bytes:
                break  # its client has not read the answers before: see admission
        if refused and not gathering.found:
            raise DequeueRateLimited(
                f"queue {request.queue!r} has used up its rate; try again later"
            )
        gathering.deliver()

    async def _wait_for_jobs(self, gathering: Gathering, seconds: float) -> None:
        call, queue = gathering.call, gathering.request.queue
        # Jobs that came after their shard confirmed that there is nothing have woken nobody.
        if not self._shards.ready_jobs(queue):
            await self._wait(call, partial(self._waiting.wait, queue, seconds))
            # It may have been woken in place of another one.
            if call.client_gone or not call.granted_bytes:
                self._wake(queue)
        gathering.covered = {}

    async def _gather(self, gathering: Gathering, wait_until: float) -> bool:
        """Take what there is, up to the request's limit. True if the rate allows nothing, not
        even until `wait_until` (monotonic seconds)."""
        request, before = gathering.request, gathering.jobs
        if not gathering.covered:
            gathering.cover()
        if request.dry_run:
            await gathering.claimed(0)
            return False
        wanted = request.limit - before
        limited = self._shared.limits.queues.get(request.queue)
        taken = wanted if limited is None else limited.take(wanted)
        # Only a dequeue that has no job yet waits for a token.
        if limited is not None and not (taken or before):
            seconds = 0.0 if self._stopping else wait_until - self._shared.clock.monotonic()
            waiting = partial(limited.wait, wanted, seconds)
            taken = await self._wait(gathering.call, waiting) or 0
            gathering.covered = {}  # what shards confirmed before is of no use after a wait
        if not taken:
            return not before
        try:
            if not gathering.covered:
                gathering.cover()
            if gathering.call.granted_bytes:  # not if it lacks memory after a wait
                await gathering.claimed(before + taken)
        finally:
            if limited is not None:
                limited.settle(wanted=wanted, taken=taken, used=gathering.jobs - before)
        return False

    async def _wait(self, call: Call, begin: Callable[[], Coroutine[None, None, T]]) -> T | None:
        """Return what the wait that begins now results in, or None as soon as the client has gone.
        Raises Overloaded if too many wait."""
        if call.client_gone:
            return None
        task = asyncio.current_task()
        assert task is not None
        self._admission.suspend(call)
        call.on_gone = task.cancel
        try:
            return await begin()
        except asyncio.CancelledError:
            if not call.connection.is_lost():
                raise
            task.uncancel()
            return None
        finally:
            call.on_gone = None
            self._admission.resume(call)


class Gathering:
    """The jobs of one dequeue as they come in from its shards, as the bytes that came.

    It asks in rounds, and each round brings a job, a confirmation, or hints by which the next one
    does. `message` is the call that shards get, without acks; each takes it for the whole one."""

    def __init__(self, shared: Shared, call: Call, request: DequeueRequest, message: bytes) -> None:
        self.call = call
        self.request = request
        self.deadline = call.deadline
        self.jobs = 0  # claims; a dry run has none
        # The shards to ask, and how many levels of each hold nothing ready, by its own word.
        self.covered: dict[ShardLink, int] = {}
        self._shared = shared
        self._message = message
        self._parts: list[tuple[ShardLink, bytes]] = []  # answers with jobs
        self._bytes = 0  # in those
        self._empty_answer = b""
        self._full = False  # whether the answer has reached the size that it may have
        self._failures: dict[ShardLink, ReplyEntry] = {}
        self._patient = False  # whether calls wait for shards that are returning
        self._wanted = 0
        self._level = 1  # the lowest priority that may be claimed by now
        self._awaited = 0
        self._replies: list[tuple[ShardLink, ReplyEntry]] = []  # of this round

    @property
    def found(self) -> bool:
        return bool(self._parts)

    def cover(self, among: Sequence[ShardLink] | None = None) -> None:
        """Choose the shards to ask from now on; nothing is confirmed yet."""
        shards = self._shared.shards.preferred() if among is None else among
        if not shards:
            raise NoHealthyShards
        covered = cover(shards, self.request.coverage, self._shared.rng)
        self.covered = dict.fromkeys(covered, 0)

    def begin_with(self, shard: ShardLink, reply: ReplyEntry) -> None:
        """Take the answer that this shard has given already."""
        if not self.request.dry_run:
            self._take(shard, reply)
        self.cover()
        self._confirm(shard, 0)

    async def claimed(self, wanted: int) -> None:
        """Claim, for those who await it. What comes in after that was cancelled is released."""
        self._failures, self._patient = {}, False  # those before a wait are of no use
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def end(error: Exception | None) -> None:
            if ended.cancelled():
                self.release()
            elif error is not None:
                ended.set_exception(error)
            else:
                ended.set_result(None)

        self.claim(wanted, end)
        try:
            await ended
        except asyncio.CancelledError:
            self._full = True
            raise

    def claim(self, wanted: int, end: Callable[[Exception | None], None]) -> None:
        """Claim level by level, until `wanted` jobs are there or all levels are confirmed empty;
        then call `end`, with what went wrong if anything did. A dry run looks at all shards."""
        self._wanted, self._level, self._end = wanted, 1, end
        if self.request.dry_run:
            self._level = 0
            self._ask([(shard, self.request.limit) for shard in self.covered])
        else:
            self._go_on()

    def _go_on(self) -> None:
        levels = self._shared.settings.num_priority_levels
        while self.jobs < self._wanted and not self._full and self._level <= levels:
            asked = [shard for shard, level in self.covered.items() if level < self._level]
            if asked:
                self._ask(self._portions(asked, levels))
                return
            self._level += 1
        self._finish(None)

    def _portions(self, asked: Sequence[ShardLink], levels: int) -> list[tuple[ShardLink, int]]:
        """Return how many jobs to ask of whom."""
        wanted = self._wanted - self.jobs
        if len(asked) == 1:
            # Whatever it gives, the others hold nothing better.
            others = [level for shard, level in self.covered.items() if shard is not asked[0]]
            self._level = min([levels, *others])
            return [(asked[0], wanted)]
        counts = [shard.ready_counts(self.request.queue) for shard in asked]
        ready = [ready_through(numbers, self._level) for numbers in counts]
        return [(asked[place], jobs) for place, jobs in plan_round(ready, wanted)]

    def _ask(self, portions: Sequence[tuple[ShardLink, int]]) -> None:
        """Ask each shard for its portion at once."""
        self._awaited = len(portions)
        most_bytes = max(1, self._bytes_left // len(portions))
        patient = self._patient
        for shard, jobs in portions:
            part = ShardCall(
                self._message, self.deadline, whole=False, patient=patient, give_up=GiveUp.SILENT
            )
            part.max_jobs = jobs
            part.lowest_priority = self._level
            part.most_bytes = most_bytes
            shard.call(part, self._arrived)

    def _arrived(self, part: ShardCall, shard: ShardLink, reply: ReplyEntry) -> None:
        try:
            self._take_answer(shard, part.max_jobs, reply)
        except Exception as error:  # noqa: BLE001
            self._finish(error)

    def _finish(self, error: Exception | None) -> None:
        """Call what awaits the end, once."""
        end, self._end = self._end, _ignore
        end(error)

    def _take_answer(self, shard: ShardLink, jobs: int, reply: ReplyEntry) -> None:
        self._take(shard, reply)
        # At its deadline a shard answers with what it has, whatever it might have found.
        in_time = self._shared.clock.monotonic() < self.deadline
        self._confirm(shard, self._level if jobs and in_time and not reply.jobs else 0)
        self._replies.append((shard, reply))
        if len(self._replies) < self._awaited:
            return
        replies, self._replies = self._replies, []
        failed = [pair for pair in replies if pair[1].status is _FAILED]
        results_of(DEQUEUE, failed)  # raises what a shard has against the dequeue
        if self.covered or self._parts:
            self._patient = False  # shards are back: a later round waits for none that goes
            self._go_on()
        else:
            self._ask_others()

    def _ask_others(self) -> None:
        """Begin again with shards that have not refused, since nobody confirmed that there is
        nothing. Raises ShardConnectionFailed if there are none, or one failed otherwise."""
        statuses = {shard: reply.status for shard, reply in self._failures.items()}
        shards = [s for s in self._shared.shards.preferred() if statuses.get(s) is not _REFUSED]
        if statuses and not (shards and _UNDONE.issuperset(statuses.values())):
            # All that failed, for it was the first that left the others no time.
            raise failure(list(self._failures.items()))
        self.cover(shards)
        # While a shard that answers may have jobs, none that has gone is awaited.
        self._patient = not shards[0].healthy
        self.claim(self._wanted, self._end)

    def _take(self, shard: ShardLink, reply: ReplyEntry) -> None:
        """Take a shard's jobs. One that fails is left out: what it may have claimed in vain ends by
        its time-out. One that is being moved or restarted has not failed: nothing was done there,
        and it may be asked again."""
        if reply.status is not DONE:
            self.covered.pop(shard, None)
            if reply.status is _REFUSED and shard.returning and not self._patient:
                return
            known = self._failures.get(shard)
            if known is None or known.status is Status.SILENT:
                self._failures[shard] = reply
        elif self._parts and len(reply.payload) > self._bytes_left:
            self._full = True
            if reply.jobs:
                shard.release(reply.payload)
        elif reply.jobs or (self.request.dry_run and codec.peek_jobs(reply.payload)):
            self._parts.append((shard, reply.payload))
            self._bytes += len(reply.payload)
            self.jobs += reply.jobs
            # Without room for one more like these, a shard would claim it in vain.
            self._full |= self._bytes_left * self.jobs < self._bytes
        else:
            self._empty_answer = reply.payload

    def _confirm(self, shard: ShardLink, level: int) -> None:
        """Note that it holds nothing ready of priorities 1 to `level`, and what it has published
        since it answered is true: what comes later another call is about to take."""
        if shard in self.covered:
            published = best_level(shard.ready_counts(self.request.queue))
            self.covered[shard] = max(published, level)

    @property
    def _bytes_left(self) -> int:
        return self.call.granted_bytes - self._bytes

    def deliver(self) -> None:
        """Answer; what can't be delivered is released."""
        call = self.call
        if self.jobs:
            call.on_undelivered = lambda _message, may_have_left: self.release(may_have_left)
        if not call.reply(self._answer()):
            self.release()

    def _answer(self) -> bytes:
        head = self.call.peek.head
        if head.strict and len(self._parts) < 2:  # as a shard would write it
            payload = self._parts[0][1] if self._parts else self._empty_answer
            if payload:
                return payload
        jobs: list[ClaimedJob] = []
        for _, payload in self._parts:
            jobs += cast("DequeueResult", codec.decode_reply(DEQUEUE, payload)).jobs
        if self.request.dry_run:
            jobs.sort(key=_priority)
            del jobs[self.request.limit :]
        return codec.encode_reply(head, DequeueResult(jobs))

    def release(self, may_have_left: bool = False) -> None:  # noqa: FBT001, FBT002 - as ShardLink's
        """End the claims of these jobs, which nobody will get."""
        parts, self._parts = self._parts, []
        if self.jobs:
            for shard, payload in parts:
                shard.release(payload, may_have_left)
        self.jobs = 0


class WaitingRoom:
    """Dequeues that found nothing, by queue: first come, first woken."""

    def __init__(self) -> None:
        # Thousands may end at once: a deque would be searched for each of them.
        self.queues: dict[str, OrderedDict[asyncio.Future[None], None]] = {}

    async def wait(self, queue: str, seconds: float) -> None:
        """Wait until there are jobs of `queue`, but no longer than `seconds`."""
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiters = self.queues.setdefault(queue, OrderedDict())
        waiters[woken] = None
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(woken, seconds)
        finally:
            waiters.pop(woken, None)
            if not waiters and self.queues.get(queue) is waiters:
                del self.queues[queue]

    def wake_all(self) -> None:
        """Wake all: nobody will get anything any more."""
        for queue in list(self.queues):
            self.wake(queue, len(self.queues[queue]))

    def wake(self, queue: str, ready: int) -> None:
        """Wake as many of those who still want a job of `queue` as there are `ready`."""
        waiters = self.queues.get(queue)
        while waiters and ready > 0:
            woken, _ = waiters.popitem(last=False)
            if not woken.done():
                woken.set_result(None)
                ready -= 1


def _ignore(_error: Exception | None) -> None:
    """Do nothing: it has ended."""


def _check(request: DequeueRequest) -> None:
    """Check a whole request as a shard would, before it is divided."""
    if request.limit < 1:
        raise InvalidRequest(f"limit is {request.limit}; it must be at least 1")
    if not 0 < request.coverage <= 1:
        raise InvalidRequest(f"coverage is {request.coverage}; it must be above 0 and at most 1")
    if request.max_wait_ms < 0:
        raise InvalidRequest(f"maxWaitMillis is {request.max_wait_ms}; it must be at least 0")


def _priority(job: ClaimedJob) -> int:
    parsed = JobDescriptor.parse(job.descriptor)
    return parsed.priority if parsed is not None else 0
