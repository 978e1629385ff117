"""Dequeues: from the ready index into a commit, and from there into the answer.

A dequeue that is short when its batch is committed, while the index holds more by then (jobs that
its own acks or others' enqueues made ready, or more than one batch may hold), goes on with the
next batch. It is answered when it has all it may take, when nothing is ready any more, when its
answer is as large as it may be, or at its deadline.

The size of an answer is known before anything is claimed: payloads that are not in memory are
read first, in portions that end where an answer would. The
engine gets them with the claims, so that nothing is read twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import cast

from pinlaterd.config.schema import ServerSettings
from pinlaterd.engines.base import AckOp, Claim, ClaimOp, StorageEngine
from pinlaterd.errors import PinLaterError, RequestError, StorageError
from pinlaterd.model import DequeueRequest, JobKey, Payload, PendingKey
from pinlaterd.rpc import codec
from pinlaterd.rpc.codec import Call, DequeueAnswer
from pinlaterd.shard.ready import Taken
from pinlaterd.shard.works import Arrival, Memory, Parts, Results, conclude_acks, done, failed
from pinlaterd.wire.envelope import ReplyEntry

# What a job costs in an answer beside its body: its descriptor twice, its claim, field heads.
JOB_OVERHEAD_BYTES = 300
_MOST_KEYS_A_READ = 500
# What a dry run reads at a time, about as much as a commit costs: those who wait don't feel it.
_MOST_KEYS_A_LOOK = 200
_MOST_BYTES_A_LOOK = 256 << 10
_new = tuple.__new__  # half the cost of calling a NamedTuple, for each job of a batch


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
        acks: AckOp | None,
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
        self.changes_nothing = request.dry_run and acks is None
        self.bytes_left = most_bytes
        self.full = False  # whether the answer is as large as it may be
        self.lowest_priority = arrival.entry.lowest_priority
        self.acks = acks
        self.problem = problem  # what is wrong with its acks: then nothing is claimed
        self.begun = False  # whether its acks were carried out
        self.jobs = DequeueAnswer()
        self.claims: list[Claim] = []  # in hand, for the commit that is being made
        self._claim_timeout_seconds = math.ceil(claim_timeout_seconds)

    @property
    def rows(self) -> int:
        acks = self.acks
        acked = 0 if acks is None else len(acks.succeeded) + len(acks.failed)
        return acked + len(self.claims)

    def contribute(self, parts: Parts) -> None:
        if self.acks is not None:
            parts.acks.append(self.acks)
        if self.claims:
            parts.claims.append(ClaimOp(self.queue, self.claims))

    def conclude(self, results: Results, memory: Memory, now_ms: int) -> ReplyEntry | None:
        memory.touched.add(self.queue)
        if self.acks is not None:
            conclude_acks(self.acks.queue, next(results.acks), memory, now_ms)
            self.acks, self.begun = None, True
        if self.claims:
            self._take_over(next(results.claims), memory, now_ms)
        if self.problem is not None:
            return failed(self.arrival, self.head, self.problem)
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
        if not self.claims:
            return
        for key, run_after_ms, _, payload in self.claims:
            put_back = Taken(key.priority, [PendingKey(run_after_ms, key.local_id)])
            memory.ready.put_back(self.queue, (put_back,), now_ms)
            if payload is not None:
                memory.fresh.keep(self.queue, key.priority, (key.local_id,), (payload,))
        self.claims = []

    def fail(self, error: PinLaterError) -> ReplyEntry:
        """What earlier commits claimed is delivered all the same."""
        return self.answer() if self.jobs else failed(self.arrival, self.head, error)

    def add(
        self,
        shard: str,
        keys: Iterable[JobKey],
        payloads: Sequence[Payload],
        claims: Sequence[str],
    ) -> None:
        """More jobs for the answer."""
        prefix = f"{self.queue}:s{shard}:p"
        descriptors = [f"{prefix}{priority}:{local_id}" for priority, local_id in keys]
        self.jobs.add(descriptors, payloads, claims, self._claim_timeout_seconds)
        self.remaining -= len(descriptors)

    def _take_over(self, payloads: Sequence[Payload | None], memory: Memory, now_ms: int) -> None:
        """The claims were committed. None stands for a job that was not PENDING in the store: that
        is somebody else's doing."""
        claims, self.claims = self.claims, []
        delay_ms = now_ms - claims[len(claims) // 2].run_after_ms
        held = [payload for payload in payloads if payload is not None]
        if len(held) < len(claims):
            memory.figures.mismatched(self.queue, len(claims) - len(held))
            memory.strange.add(self.queue)
            claims = [
                claim
                for claim, payload in zip(claims, payloads, strict=True)
                if payload is not None
            ]
        self.add(memory.name, [claim[0] for claim in claims], held, [claim[2] for claim in claims])
        memory.figures.dequeued(self.queue, held, delay_ms)


class Claimer:
    """Chooses the jobs that dequeues claim, or, on a dry run, look at."""

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
        self._most_bytes = server.max_response_bytes
        self._levels = server.num_priority_levels

    def choose(
        self, work: DequeueWork, most_jobs: int, room: int, now_ms: int, *, first: bool
    ) -> int:
        """Put claims into `work` for the next commit; returns the bytes of their jobs.

        At most `most_jobs`, and `room` bytes; `first`: nothing else is in that batch. If the store
        can't be read, StorageError is raised, and what is in `work` by then has to be given up."""
        ready, queue = self._memory.ready, work.queue
        if queue not in ready:
            return 0
        limit = min(work.remaining, most_jobs)
        taken = ready.take(queue, limit, work.lowest_priority, now_ms)
        try:
            return self._choose_of(taken, work, room, now_ms, first=first)
        except StorageError:
            chosen = {claim.key for claim in work.claims}
            for priority, keys in taken:
                left = [key for key in keys if (priority, key.local_id) not in chosen]
                ready.put_back(queue, [Taken(priority, left)], now_ms)
            raise

    def _choose_of(
        self, taken: Sequence[Taken], work: DequeueWork, room: int, now_ms: int, *, first: bool
    ) -> int:
        ready, fresh, queue = self._memory.ready, self._memory.fresh, work.queue
        used = 0
        for at, (priority, keys) in enumerate(taken):
            cached = fresh.take(queue, priority, [key[1] for key in keys])
            chosen = 0
            portions = (
                ((keys, cached),)
                if cached is not None and None not in cached
                else self._portions(queue, priority, keys, cached)
            )
            for part, payloads in portions:
                fitting, size = _fitting(work, payloads, room - used, first=first and not used)
                used += size
                self._claim(work, priority, part[:fitting], payloads[:fitting])
                chosen += fitting
                if fitting < len(part):
                    left = Taken(priority, keys[chosen:])
                    ready.put_back(queue, [left, *taken[at + 1 :]], now_ms)
                    return used
        return used

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
                unknown = [None] * len(keys)
                payloads = self._read(queue, priority, keys, unknown, _MOST_BYTES_A_LOOK)
                fitting, _ = _fitting(work, payloads, work.bytes_left, first=True)
                found = [
                    (_new(JobKey, (priority, key.local_id)), payload)
                    for key, payload in zip(keys[:fitting], payloads, strict=False)
                    if payload is not None
                ]
                held = [payload for _, payload in found]
                work.add(self._memory.name, [key for key, _ in found], held, [""] * len(held))
                if fitting:
                    after = keys[fitting - 1]
                yield None

    def _portions(
        self,
        queue: str,
        priority: int,
        keys: Sequence[PendingKey],
        cached: Sequence[Payload | None] | None,
    ) -> Iterator[tuple[Sequence[PendingKey], Sequence[Payload | None]]]:
        """All of `keys` with their payloads, those not in memory read from the store; None for
        a job that is gone from it."""
        begin = 0
        while begin < len(keys):
            part = keys[begin : begin + _MOST_KEYS_A_READ]
            known = cached[begin : begin + len(part)] if cached else [None] * len(part)
            payloads = self._read(queue, priority, part, known, self._most_bytes)
            yield part[: len(payloads)], payloads
            begin += len(payloads)

    def _read(
        self,
        queue: str,
        priority: int,
        keys: Sequence[PendingKey],
        known: Sequence[Payload | None],
        most_bytes: int,
    ) -> Sequence[Payload | None]:
        """The payloads of the first of `keys`, up to `most_bytes`, of one at least."""
        unknown = [key[1] for key, payload in zip(keys, known, strict=True) if payload is None]
        read = self._engine.payloads(queue, priority, unknown, most_bytes=most_bytes)
        if len(unknown) == len(keys):
            return read
        payloads: list[Payload | None] = []
        left = iter(read)
        for payload in known:
            if payload is None:
                try:
                    payloads.append(next(left))
                except StopIteration:
                    break
            else:
                payloads.append(payload)
        return payloads

    def _claim(
        self,
        work: DequeueWork,
        priority: int,
        keys: Sequence[PendingKey],
        payloads: Sequence[Payload | None],
    ) -> None:
        prefix, counter = self._descriptors.prefix(work.source), self._descriptors.counter
        work.claims += [
            _new(Claim, (_new(JobKey, (priority, key[1])), key[0], f"{prefix}{number}", payload))
            for key, payload, number in zip(keys, payloads, counter, strict=False)
            if payload is not None
        ]


def _fitting(
    work: DequeueWork, payloads: Sequence[Payload | None], room: int, *, first: bool
) -> tuple[int, int]:
    """How many of `payloads` fit into the answer of `work` and the `room` of a batch, and their
    bytes. A job too large for any answer is handed out alone; one too large for any batch, too.

    `first`: nothing is in that batch yet. Notes in `work` that its answer is full. What is None
    takes no bytes."""
    sizes = [0 if payload is None else len(payload[0]) + JOB_OVERHEAD_BYTES for payload in payloads]
    fitting, used = len(sizes), sum(sizes)
    if used > min(room, work.bytes_left):
        alone = not work.jobs and not work.claims
        fitting = used = 0
        for size in sizes:
            work.full = used + size > work.bytes_left and not (alone and fitting == 0)
            if work.full or (used + size > room and not (first and fitting == 0)):
                break
            fitting += 1
            used += size
    work.bytes_left -= used
    return fitting, used
