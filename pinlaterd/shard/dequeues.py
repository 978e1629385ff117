"""Dequeues: from the ready index into a commit, and from there into the answer.

A dequeue that is short when its batch is committed, while the index holds more by then (jobs that
its own acks or others' enqueues made ready, or more than one batch may hold), goes on with the
next batch. It is answered when it has all it may take, when nothing is ready any more, when its
answer is as large as it may be, or at its deadline.

Payloads that are not in memory are read by the engine as it claims: so nobody knows how large they
are before, and the engine claims no more than fits the answer, and the batch. What did not fit goes
back into the index, and the dequeue on with the next batch. Its answer is full once it comes first
in a batch and gets nothing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import compress, count, islice
from typing import cast

from pinlaterd.config.schema import ServerSettings
from pinlaterd.engines.base import AckOp, Acks, Batch, ClaimOp, Claims, StorageEngine
from pinlaterd.errors import PinLaterError, RequestError
from pinlaterd.model import DequeueRequest, JobKey, JobState, Payload, PendingKey, claim_source
from pinlaterd.rpc import codec
from pinlaterd.rpc.codec import Call, DequeueAnswer
from pinlaterd.shard.ready import Taken
from pinlaterd.shard.works import (
    Arrival,
    Memory,
    Parts,
    Results,
    conclude_acks,
    done,
    failed,
)
from pinlaterd.wire.envelope import ReplyEntry

# What a job costs in an answer beside its body: its descriptor twice, its claim, field heads.
JOB_OVERHEAD_BYTES = 300
# What a dry run reads at a time, about as much as a commit costs: those who wait don't feel it.
_MOST_KEYS_A_LOOK = 200
_MOST_BYTES_A_LOOK = 256 << 10
# What is due so soon is no scheduled job any more: the ready index may know of it in a moment.
_SOON_MS = 1_000
_NOT_READ = Payload(b"", 0, 0)  # so that the engine reads no body


class ClaimDescriptors:
    """`HOST:PORT:STARTMILLIS:SOURCE:COUNTER`, no two of them alike.

    START differs from every other ownership of this shard. Other shards of this server may begin
    in the same millisecond: each counts through numbers of its own, `position` modulo `shards`.
    """

    def __init__(
        self, server: ServerSettings, start_ms: int, *, position: int, shards: int
    ) -> None:
        self._head = f"{server.advertised_host}:{server.port}:{start_ms}:"
        self.counter = count(position, max(1, shards))

    def prefix(self, source: str) -> str:
        """What comes before the counter."""
        return f"{self._head}{source}:"


class DequeueWork:
    """A dequeue on its way, perhaps through several commits."""

    __slots__ = (
        "_claim_timeout_seconds",
        "_leads",
        "acks",
        "arrival",
        "begun",
        "bytes_left",
        "changes_nothing",
        "claims",
        "dry_run",
        "full",
        "head",
        "jobs",
        "lowest_priority",
        "problem",
        "queue",
        "remaining",
        "source",
    )

    def __init__(
        self,
        arrival: Arrival,
        call: Call,
        *,
        most_bytes: int,
        claim_timeout_seconds: float,
        acks: Sequence[AckOp],
        problem: RequestError | None,
    ) -> None:
        request = cast("DequeueRequest", call.request)
        most_jobs = arrival.entry.max_jobs
        limit = request.limit if most_jobs < 0 else min(request.limit, most_jobs)
        self.arrival = arrival
        self.head = call.head
        self.queue = request.queue
        self.source = call.context.source
        self.remaining = 0 if problem is not None else limit
        self.dry_run = request.dry_run
        self.changes_nothing = request.dry_run and not acks
        self.bytes_left = most_bytes
        self.full = False  # whether the answer is as large as it may be
        self.lowest_priority = arrival.entry.lowest_priority
        self.acks = deque(acks)  # of which each commit carries out one part
        self.problem = problem  # of its acks, or of itself: then nothing is claimed
        self.begun = False  # whether a commit has carried out any of it
        self.jobs = DequeueAnswer()
        self.claims: list[Claims] = []  # in hand, for the commit that is being made
        self._leads = False  # whether they are the first of that commit
        self._claim_timeout_seconds = math.ceil(claim_timeout_seconds)

    @property
    def queues(self) -> Collection[str]:
        return {self.queue, self.acks[0].queue} if self.acks else (self.queue,)

    @property
    def rows(self) -> int:
        return (self.acks[0].jobs if self.acks else 0) + self.claimed

    @property
    def claimed(self) -> int:
        """How many jobs it puts into the commit that is being made."""
        return sum([len(claims[1]) for claims in self.claims])

    def contribute(self, parts: Parts) -> None:
        if self.acks:
            parts.acks.append(self.acks[0])
        if self.claims:
            self._leads = not parts.claims
            # A job too large for any answer is handed out alone.
            empty = not self.jobs
            parts.claims.append(ClaimOp(self.queue, self.claims, self.bytes_left, empty))

    def conclude(self, results: Results, memory: Memory, now_ms: int) -> ReplyEntry | None:
        if self.acks:
            conclude_acks(self.acks.popleft().queue, next(results.acks), memory, now_ms)
            self.begun = True
            if self.acks:
                return None
        if self.claims:
            self._take_over(next(results.claims), memory, now_ms)
            self.begun = True
        if self.problem is not None:
            return failed(self.arrival, self.head, self.problem)
        memory.touched.add(self.queue)
        if (
            self.remaining > 0
            and not self.full
            and self.queue in memory.ready
            and memory.ready.has_ready(self.queue, self.lowest_priority, now_ms)
        ):
            return None
        return self.answer()

    def answer(self) -> ReplyEntry:
        """What it has by now."""
        payload = codec.encode_dequeued(self.head, self.jobs)
        return done(self.arrival, payload, 0 if self.dry_run else len(self.jobs))

    def give_up(self, memory: Memory, now_ms: int) -> None:
        claims, self.claims = self.claims, []
        self._put_back(claims, memory, now_ms)

    def _put_back(self, claims: Sequence[Claims], memory: Memory, now_ms: int) -> None:
        """They were not made: others may have these jobs."""
        for priority, keys, _, payloads in claims:
            for key, payload in zip(keys, payloads, strict=True):
                if payload is not None:
                    memory.fresh.keep(self.queue, priority, (key.local_id,), (payload,))
            memory.ready.put_back(self.queue, (Taken(priority, list(keys)),), now_ms)

    def fail(self, error: PinLaterError) -> ReplyEntry:
        """What earlier commits claimed is delivered all the same."""
        return self.answer() if self.jobs else failed(self.arrival, self.head, error)

    def add(
        self,
        shard: str,
        priority: int,
        keys: Iterable[PendingKey],
        payloads: Sequence[Payload],
        claims: Sequence[str],
    ) -> None:
        """More jobs for the answer."""
        prefix = f"{self.queue}:s{shard}:p{priority}:"
        descriptors = [f"{prefix}{key[1]}" for key in keys]
        self.jobs.add(descriptors, payloads, claims, self._claim_timeout_seconds)
        self.remaining -= len(descriptors)

    def _take_over(self, payloads: Sequence[Payload | None], memory: Memory, now_ms: int) -> None:
        """The claims were committed, the first of them, as many as fitted. None stands for a job
        that was not PENDING in the store: that is somebody else's doing."""
        asked, had_jobs = self.claimed, len(self.jobs) > 0
        claims, self.claims = self.claims, []
        handed_out = 0
        at = 0
        for priority, keys, descriptors, given in claims:
            found = payloads[at : at + len(keys)]
            fit = len(found)
            at += fit
            if fit < len(keys):
                left = Claims(priority, keys[fit:], descriptors[fit:], given[fit:])
                self._put_back([left], memory, now_ms)
            handed_out += self._hand_out(
                priority, keys[:fit], descriptors[:fit], found, memory, now_ms
            )
        if len(payloads) < asked:
            self.full = self._leads and not handed_out and had_jobs
        if handed_out < len(payloads):
            memory.figures.mismatched(self.queue, len(payloads) - handed_out)
            memory.suspects.add(self.queue)

    def _hand_out(
        self,
        priority: int,
        keys: Sequence[PendingKey],
        descriptors: Sequence[str],
        payloads: Sequence[Payload | None],
        memory: Memory,
        now_ms: int,
    ) -> int:
        """Returns how many of these jobs were claimed."""
        held = [payload for payload in payloads if payload is not None]
        if len(held) < len(keys):
            kept = [payload is not None for payload in payloads]
            keys, descriptors = list(compress(keys, kept)), list(compress(descriptors, kept))
        self.bytes_left -= sum([len(payload[0]) for payload in held])
        self.bytes_left -= JOB_OVERHEAD_BYTES * len(held)
        self.add(memory.name, priority, keys, held, descriptors)
        memory.figures.dequeued(self.queue, [now_ms - key[0] for key in keys], held)
        return len(held)


class Appetite:
    """How many jobs the dequeues of one batch may ask for, together.

    What is asked for and does not fit, because bodies are large, was taken from the index and goes
    back there for nothing. So after a batch in which that happened the next one asks for twice of
    what fitted, and those after it for more and more, until it happens again."""

    def __init__(self, most_jobs: int) -> None:
        self._most_jobs = most_jobs
        self.jobs = most_jobs

    def learn(self, asked: int, fitted: int) -> None:
        if fitted < asked:
            self.jobs = max(1, min(self._most_jobs, 2 * fitted))
        else:
            self.jobs = min(self._most_jobs, 2 * self.jobs)


class Claimer:
    """Chooses the jobs that dequeues claim, or, on a dry run, look at. Claims scheduled ones."""

    def __init__(
        self,
        engine: StorageEngine,
        memory: Memory,
        descriptors: ClaimDescriptors,
        server: ServerSettings,
    ) -> None:
        self._engine = engine
        self._memory = memory
        self._descriptors = descriptors
        self._levels = server.num_priority_levels

    def choose(self, work: DequeueWork, most_jobs: int, now_ms: int) -> None:
        """Put claims into `work` for the next commit, at most `most_jobs`. If the store can't be
        read, StorageError is raised, and nothing has changed."""
        ready, fresh, queue = self._memory.ready, self._memory.fresh, work.queue
        if queue not in ready:
            return
        prefix, counter = self._descriptors.prefix(work.source), self._descriptors.counter
        limit = min(work.remaining, most_jobs)
        for priority, keys in ready.take(queue, limit, work.lowest_priority, now_ms):
            payloads = fresh.take(queue, priority, [key[1] for key in keys])
            descriptors = [f"{prefix}{number}" for number in islice(counter, len(keys))]
            work.claims.append(Claims(priority, keys, descriptors, payloads or [None] * len(keys)))

    def claim_scheduled(self, op: AckOp, source: str, now_ms: int) -> AckOp:
        """Claim the jobs that `op` is to end as succeeded, in a commit of its own. Returns it with
        these claims, and without the jobs that are not scheduled any more: what is due, or soon.

        The ready index knows nothing of these jobs, since they are not due. What this source has
        claimed already, in a call that came to no end, is acked. Raises StorageError."""
        named = {JobKey(acks.priority, i): acks for acks in op.succeeded for i in acks.local_ids}
        held: dict[JobKey, str] = {}
        prefix, counter = self._descriptors.prefix(source), self._descriptors.counter
        claims: list[Claims] = []
        for job in self._engine.lookup(op.queue, list(named), include_body=False):
            if job.state is JobState.PENDING and job.run_after_ms > now_ms + _SOON_MS:
                place = PendingKey(job.run_after_ms, job.key.local_id)
                descriptor = f"{prefix}{next(counter)}"
                claims.append(Claims(job.key.priority, [place], [descriptor], [_NOT_READ]))
            elif job.state is JobState.IN_PROGRESS:
                descriptor = job.claim_descriptor or ""
                if claim_source(descriptor) == source:
                    held[job.key] = descriptor
        if claims:
            [found] = self._engine.apply(Batch(claims=[ClaimOp(op.queue, claims)]), now_ms).claims
            for claim, payload in zip(claims, found, strict=True):
                if payload is not None:
                    key = JobKey(claim.priority, claim.keys[0].local_id)
                    held[key] = claim.claim_descriptors[0]
        acks = [
            Acks(key.priority, [key.local_id], named[key].append_custom_status, 0, descriptor)
            for key, descriptor in held.items()
        ]
        return AckOp(op.queue, acks, ())

    def look(self, work: DequeueWork, now_ms: int) -> Iterator[None]:
        """A dry run, in slices: what `work` would get, as the store has it, without claims."""
        queue = work.queue
        for priority in range(1, (work.lowest_priority or self._levels) + 1):
            after: PendingKey | None = None
            while work.remaining > 0 and not work.full and queue in self._memory.ready:
                limit = min(work.remaining, _MOST_KEYS_A_LOOK)
                keys = self._engine.read_pending(
                    queue, priority, after=after, until_ms=now_ms, limit=limit
                )
                if not keys:
                    break
                local_ids = [key.local_id for key in keys]
                payloads = self._engine.payloads(
                    queue, priority, local_ids, most_bytes=_MOST_BYTES_A_LOOK
                )
                fitting = _fitting(work, payloads)
                found = [
                    (key, payload)
                    for key, payload in zip(keys[:fitting], payloads, strict=False)
                    if payload is not None
                ]
                held = [payload for _, payload in found]
                work.add(
                    self._memory.name, priority, [key for key, _ in found], held, [""] * len(held)
                )
                if fitting:
                    after = keys[fitting - 1]
                yield None


def _fitting(work: DequeueWork, payloads: Sequence[Payload | None]) -> int:
    """How many of `payloads` fit into the answer of `work`; takes their bytes from what is left of
    it, or notes that it is full. A job too large for any answer is handed out alone."""
    empty = not work.jobs
    for at, payload in enumerate(payloads):
        if payload is None:
            continue
        size = len(payload[0]) + JOB_OVERHEAD_BYTES
        if size > work.bytes_left and not empty:
            work.full = True
            return at
        work.bytes_left -= size
        empty = False
    return len(payloads)
