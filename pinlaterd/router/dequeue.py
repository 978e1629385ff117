"""A dequeue that takes more than one shard, or that has to wait.

The promise: no job of priority p + 1 leaves while a covered shard holds a ready one of priority
p, and a short or empty answer is given only after every covered healthy shard confirmed it. What
shards publish are hints; they choose whom to ask first. The proof is what shards answer to this
very call: each claim names the lowest priority it may take; one that brings nothing, or whose
answer says that nothing is left, has found a moment at which nothing was there.

Dequeues that wait for jobs (`maxWaitMillis`) are woken by the counts that shards publish: as many
as jobs are ready, so that one job does not stir a thousand workers. Relies on `routing` for
choices, on `fan_out` for the acks.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import TypeVar, cast

from pinlaterd.clock import Clock
from pinlaterd.errors import DequeueRateLimited, InvalidRequest, NoHealthyShards, PinLaterError
from pinlaterd.model import (
    CallContext,
    ClaimedJob,
    DequeueRequest,
    DequeueResult,
    JobDescriptor,
    Method,
)
from pinlaterd.router import routing
from pinlaterd.router.admission import Admission
from pinlaterd.router.call import Call, Query, Shared, ask_all, failure, results_of
from pinlaterd.router.fan_out import FanOut
from pinlaterd.rpc import codec
from pinlaterd.wire.envelope import GiveUp, ReplyEntry, ShardCall, Status
from pinlaterd.wire.link import ShardLink

T = TypeVar("T")


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
        """Jobs of `queue` can be had: those who wait for it may try again."""
        self._waiting.wake(queue, self._shards.ready_jobs(queue))

    def stop_waiting(self) -> None:
        """The server stops: those who wait are answered now, and nobody waits any more."""
        self._stopping = True
        self._shared.limits.stop_waiting()
        self._waiting.wake_all()

    def choose(self, queue: str) -> ShardLink | None:
        """One shard to ask for all: one that may hold jobs of the best priority, if any does."""
        shards = self._shards.preferred()
        if len(shards) < 2:
            return shards[0] if shards else None
        levels = [routing.best_level(shard.ready_counts(queue)) for shard in shards]
        best = min(levels)
        candidates = [shard for shard, level in zip(shards, levels, strict=True) if level == best]
        return candidates[int(self._shared.rng.random() * len(candidates))]

    async def run(self, call: Call, first: tuple[ShardLink, ReplyEntry] | None = None) -> None:
        """Serve a dequeue whose acks, coverage or rate take more than passing it through; or of
        which the `first` shard gave a part, and has carried out the acks."""
        _, context, decoded = call.decode(self._shared.settings.max_jobs_per_call)
        request = cast("DequeueRequest", decoded)
        gathering = _Gathering(call, context, request, self._shared.clock)
        if first is None:
            if request.acks is not None:
                # Carried out whatever becomes of the dequeue. If one fails, that is the answer.
                await self._fan_out.ack(Query(Method.ACK, context, call.deadline), request.acks)
            _check(request)
        else:
            gathering.cover(self._covered(request))
            if not request.dry_run:
                gathering.take(*first)
        await self._serve(gathering)

    def _covered(self, request: DequeueRequest) -> list[ShardLink]:
        shards = self._shards.preferred()
        if not shards:
            raise NoHealthyShards
        return routing.cover(shards, request.coverage, self._shared.rng)

    async def _serve(self, gathering: _Gathering) -> None:
        """Gather, wait while there is nothing, answer; what can't be delivered goes back."""
        call, request = gathering.call, gathering.request
        wait_ms = min(request.max_wait_ms, self._shared.settings.max_dequeue_wait_ms)
        if call.peek.head.oneway:
            wait_ms = 0  # no answer delivers what it would claim
        wait_until = call.started + wait_ms / 1000
        # What a call takes comes on top of what it waits.
        gathering.deadline = call.deadline + wait_ms / 1000
        try:
            while True:
                refused = await self._gather(gathering, wait_until)
                seconds = wait_until - self._shared.clock.monotonic()
                if gathering.jobs or refused or seconds <= 0 or call.answer.gone or self._stopping:
                    break
                await self._wait_for_jobs(gathering, seconds)
                if not call.granted_bytes:
                    break  # its client has not read the answers before: see admission
        except BaseException:
            gathering.release()
            raise
        if refused and not gathering.jobs:
            raise DequeueRateLimited(
                f"queue {request.queue!r} has used up its rate; try again later"
            )
        if gathering.jobs and not request.dry_run:
            call.answer.on_undelivered = lambda _message: gathering.release()
        if not call.reply(codec.encode_reply(call.peek.head, DequeueResult(gathering.jobs))):
            gathering.release()

    async def _wait_for_jobs(self, gathering: _Gathering, seconds: float) -> None:
        call, queue = gathering.call, gathering.request.queue
        # Jobs that came after their shard confirmed that there is nothing have woken nobody.
        if not self._shards.ready_jobs(queue):
            await self._wait(call, partial(self._waiting.wait, queue, seconds))
            # It may have been woken in place of another one.
            if call.answer.gone or not call.granted_bytes:
                self._wake(queue)
        gathering.cover([])

    async def _gather(self, gathering: _Gathering, wait_until: float) -> bool:
        """Take what there is, up to the request's limit. True if the rate allows nothing, not
        even until `wait_until` (monotonic seconds)."""
        request = gathering.request
        if not gathering.covered:
            gathering.cover(self._covered(request))
        if request.dry_run:
            await gathering.look()
            return False
        before = len(gathering.jobs)
        wanted = request.limit - before
        limited = self._shared.limits.queues.get(request.queue)
        taken = wanted if limited is None else limited.take(wanted)
        # Only a dequeue that has no job yet waits for a token.
        if limited is not None and not (taken or before):
            seconds = 0.0 if self._stopping else wait_until - self._shared.clock.monotonic()
            waiting = partial(limited.wait, wanted, seconds)
            taken = await self._wait(gathering.call, waiting) or 0
            gathering.cover([])  # what shards confirmed before is of no use after a wait
        if not taken:
            return not gathering.jobs
        try:
            if not gathering.covered:
                gathering.cover(self._covered(request))
            await self._claim(gathering, before + taken)
        finally:
            if limited is not None:
                limited.settle(wanted=wanted, taken=taken, used=len(gathering.jobs) - before)
        return False

    async def _wait(self, call: Call, begin: Callable[[], Coroutine[None, None, T]]) -> T | None:
        """What the wait that begins now results in, or None as soon as the client has gone. Raises
        Overloaded if too many wait."""
        answer = call.answer
        if answer.gone:
            return None
        task = asyncio.current_task()
        assert task is not None
        self._admission.suspend(call)
        answer.on_gone = task.cancel
        try:
            return await begin()
        except asyncio.CancelledError:
            if not call.answer.gone:
                raise
            task.uncancel()
            return None
        finally:
            answer.on_gone = None
            self._admission.resume(call)

    async def _claim(self, gathering: _Gathering, wanted: int) -> None:
        """Claim level by level, until `wanted` jobs are there or all levels are confirmed empty.

        Each round brings a job, a confirmation, or hints by which the next one does."""
        queue, levels = gathering.request.queue, self._shared.settings.num_priority_levels
        level = 1
        while len(gathering.jobs) < wanted and not gathering.full and level <= levels:
            asked = gathering.unconfirmed(level)
            if not asked:
                level += 1
                continue
            if len(asked) == 1:
                # Whatever it gives, the others hold nothing better.
                level = min(levels, gathering.confirmed_beside(asked[0]))
            ready = [routing.ready_through(shard.ready_counts(queue), level) for shard in asked]
            portions = routing.plan_round(ready, wanted - len(gathering.jobs))
            await gathering.ask([(asked[place], jobs) for place, jobs in portions], level)
            if not gathering.covered and not gathering.jobs:
                # Nobody confirmed that there is nothing.
                if not gathering.only_silence:
                    raise gathering.failure()
                gathering.cover(self._covered(gathering.request))
                level = 1


class _Gathering:
    """The jobs of one dequeue as they come in from its shards."""

    def __init__(
        self, call: Call, context: CallContext, request: DequeueRequest, clock: Clock
    ) -> None:
        self.call = call
        self.request = request
        self.deadline = call.deadline
        self.jobs: list[ClaimedJob] = []
        self.full = False  # whether the answer has reached the size that it may have
        # The shards to ask, and how many levels of each hold nothing ready, by its own word.
        self.covered: dict[ShardLink, int] = {}
        self._clock = clock
        self._failures: dict[ShardLink, ReplyEntry] = {}
        self._from: dict[ShardLink, list[ClaimedJob]] = {}
        self._bytes = 0
        # Without acks: they have been carried out. Each shard takes it for the whole request.
        own = request._replace(acks=None, coverage=1.0, max_wait_ms=0)
        self._message = codec.encode_call(Method.DEQUEUE, call.peek.head.seqid, context, own)

    def cover(self, shards: Sequence[ShardLink]) -> None:
        """Ask these from now on; nothing is confirmed yet."""
        self.covered = dict.fromkeys(shards, 0)

    def unconfirmed(self, level: int) -> list[ShardLink]:
        """Those that may hold ready jobs of priorities 1 to `level`."""
        return [shard for shard, confirmed in self.covered.items() if confirmed < level]

    def confirmed_beside(self, shard: ShardLink) -> int:
        """How many levels hold nothing ready at all shards but this one."""
        others = [confirmed for other, confirmed in self.covered.items() if other is not shard]
        return min(others, default=routing.ALL_LEVELS)

    async def look(self) -> None:
        """A dry run: what each shard would give, the best of it."""
        limit = self.request.limit
        await self.ask([(shard, limit) for shard in self.covered], 0)
        if not self.covered and not self.jobs:
            raise self.failure()
        self.jobs.sort(key=_priority)
        del self.jobs[limit:]

    async def ask(self, portions: Sequence[tuple[ShardLink, int]], lowest_priority: int) -> None:
        """Ask each shard for its portion at once, and take what they give."""
        asked = [
            (shard, self._part(jobs, lowest_priority, len(portions))) for shard, jobs in portions
        ]
        replies = await ask_all(asked)
        # At its deadline a shard answers with what it has, whatever it might have found.
        in_time = self._clock.monotonic() < self.deadline
        for (shard, jobs), (_, reply) in zip(portions, replies, strict=True):
            self.take(shard, reply, lowest_priority if jobs and in_time else 0)
        failed = [(shard, reply) for shard, reply in replies if reply.status is Status.FAILED]
        results_of(Method.DEQUEUE, failed)  # raises what the first said

    def _part(self, jobs: int, lowest_priority: int, parts: int) -> ShardCall:
        # What the others give is not to wait for one that has gone.
        patient = len(self.covered) == 1
        part = ShardCall(
            self._message, self.deadline, whole=False, patient=patient, give_up=GiveUp.SILENT
        )
        part.max_jobs = jobs
        part.lowest_priority = lowest_priority
        part.most_bytes = max(1, self._bytes_left // parts)
        return part

    def take(self, shard: ShardLink, reply: ReplyEntry, lowest_priority: int = 0) -> None:
        """Take a shard's jobs of priorities up to `lowest_priority` (0: not known), and its word on
        what it has left. A shard that fails is left out: what it may have claimed in vain ends by
        its time-out."""
        if reply.status is not Status.DONE:
            self.covered.pop(shard, None)
            known = self._failures.get(shard)
            if known is None or known.status is Status.SILENT:
                self._failures[shard] = reply
            return
        if shard in self.covered:
            confirmed = routing.best_level(shard.ready_counts(self.request.queue))
            # What has come since another call is about to take; so nothing is proof enough.
            self.covered[shard] = max(confirmed, 0 if reply.jobs else lowest_priority)
        # `jobs` counts claims: a dry run's answer has none, whatever it shows.
        if reply.jobs or self.request.dry_run:
            result = codec.decode_reply(Method.DEQUEUE, reply.payload)
            self._add(shard, list(cast("DequeueResult", result).jobs))

    @property
    def only_silence(self) -> bool:
        """Whether those left out did not answer, while others can serve."""
        return all(reply.status is Status.SILENT for reply in self._failures.values())

    def failure(self) -> PinLaterError:
        """Of all that failed, for it was the first that left the others no time."""
        return failure(list(self._failures.items())) if self._failures else NoHealthyShards()

    @property
    def _bytes_left(self) -> int:
        return self.call.granted_bytes - self._bytes

    def _add(self, shard: ShardLink, jobs: list[ClaimedJob]) -> None:
        fitting = 0
        for job in jobs:
            size = len(job.body) + len(job.descriptor) * 2 + len(job.claim_descriptor)
            if self.full or (size > self._bytes_left and (self.jobs or fitting)):
                self.full = True
                break
            self._bytes += size
            fitting += 1
        self.jobs += jobs[:fitting]
        # Without room for one more like these, a shard would claim it in vain.
        self.full |= self._bytes_left * len(self.jobs) < self._bytes
        if not self.request.dry_run:
            self._from.setdefault(shard, []).extend(jobs[:fitting])
            if jobs[fitting:]:
                self._release(shard, jobs[fitting:])

    def release(self) -> None:
        """Nobody will get these jobs: end their claims."""
        for shard, jobs in self._from.items():
            if jobs:
                self._release(shard, jobs)
        self._from = {}
        self.jobs = []

    def _release(self, shard: ShardLink, jobs: list[ClaimedJob]) -> None:
        shard.release(codec.encode_reply(self.call.peek.head, DequeueResult(jobs)))


class WaitingRoom:
    """Dequeues that found nothing, by queue: first come, first woken."""

    def __init__(self) -> None:
        # Thousands may end at once: a deque would be searched for each of them.
        self.queues: dict[str, OrderedDict[asyncio.Future[None], None]] = {}

    async def wait(self, queue: str, seconds: float) -> None:
        """Until there are jobs of `queue`, but no longer than `seconds`."""
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
        """Nobody will get anything any more."""
        for queue in list(self.queues):
            self.wake(queue, len(self.queues[queue]))

    def wake(self, queue: str, ready: int) -> None:
        """`ready` jobs of `queue` can be had: wake as many of those who still want one."""
        waiters = self.queues.get(queue)
        while waiters and ready > 0:
            woken, _ = waiters.popitem(last=False)
            if not woken.done():
                woken.set_result(None)
                ready -= 1


def _check(request: DequeueRequest) -> None:
    """What a shard would say of a whole request, before it is divided."""
    if request.limit < 1:
        raise InvalidRequest(f"limit is {request.limit}; it must be at least 1")
    if not 0 < request.coverage <= 1:
        raise InvalidRequest(f"coverage is {request.coverage}; it must be above 0 and at most 1")
    if request.max_wait_ms < 0:
        raise InvalidRequest(f"maxWaitMillis is {request.max_wait_ms}; it must be at least 0")


def _priority(job: ClaimedJob) -> int:
    parsed = JobDescriptor.parse(job.descriptor)
    return parsed.priority if parsed is not None else 0
