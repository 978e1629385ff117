"""Calls on their way through a commit: what each puts into it, and answers once it is durable.

A Work is made of a valid call. It contributes to a Batch, and once that is committed it takes
its results, in the same order, brings the shard's memory up to date, and answers. What was not
committed it gives up: then nothing has changed. Dequeues are in `dequeues`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from operator import gt
from typing import Generic, NamedTuple, Protocol, TypeVar

from pinlaterd.engines.base import (
    AckOp,
    AckResult,
    Acks,
    Batch,
    BatchResult,
    CheckpointOp,
    CheckpointResult,
    ClaimOp,
    ClaimRoom,
    EnqueueOp,
    ReleaseOp,
    Requeued,
)
from pinlaterd.errors import PinLaterError, RequestError
from pinlaterd.model import Job, Payload, PendingKey
from pinlaterd.rpc import codec
from pinlaterd.rpc.codec import Head
from pinlaterd.shard.figures import Figures
from pinlaterd.shard.fresh import FreshPayloads
from pinlaterd.shard.ready import ReadyIndex
from pinlaterd.wire.envelope import CallEntry, ReplyEntry, Status

# Jobs in a batch: those who come while it is committed wait for all of it, and beyond this a
# larger one saves nothing on a job.
BATCH_JOBS = 2_000
# What one call's acks, checkpoints or releases may take of a batch; more of them go through several
# commits, and leave room for other calls in each.
PART_JOBS = BATCH_JOBS // 2
# Why a shard refuses calls, when the store does not say it better.
STORE_FAILED = "could not have its store carry it out"

_new = tuple.__new__  # half the cost of calling a NamedTuple, for each job of a batch
_Op = TypeVar("_Op", AckOp, CheckpointOp)
_Item = TypeVar("_Item")


class Arrival(NamedTuple):
    """An entry, and the router that it came from."""

    router: bytes
    entry: CallEntry


class Memory:
    """What a shard keeps in memory beside its store. Cleared when ownership begins anew."""

    __slots__ = (
        "_enqueued",
        "changed",
        "figures",
        "fresh",
        "name",
        "ready",
        "suspects",
        "touched",
    )

    def __init__(
        self, name: str, ready: ReadyIndex, fresh: FreshPayloads, figures: Figures
    ) -> None:
        self.name = name  # the shard's
        self.ready = ready
        self.fresh = fresh
        self.figures = figures
        self.changed: set[str] = set()  # queues whose depths or figures may have changed
        self.touched: set[str] = set()  # queues whose ready counts may have changed, or are gone
        self.suspects: set[str] = set()  # queues that a foreign writer seems to change
        self._enqueued: dict[str, tuple[list[int], list[Job]]] = {}  # see take_in

    def enqueued(self, queue: str, local_ids: Sequence[int], jobs: Sequence[Job]) -> None:
        """Jobs of one call were stored; `take_in` has to be called for those of a batch."""
        found = self._enqueued.get(queue)
        if found is None:
            self._enqueued[queue] = (list(local_ids), list(jobs))
        else:
            found[0].extend(local_ids)
            found[1].extend(jobs)

    def take_in(self, now_ms: int) -> None:
        """Index all jobs that a commit has stored, and keep the payloads of those due soon.

        Once for all of a batch: with one job a call, this is a good part of what a call costs."""
        for queue, (local_ids, jobs) in self._enqueued.items():
            self.touched.add(queue)
            self.figures.enqueued(queue, jobs)
            priorities = {job[1] for job in jobs}
            if len(priorities) == 1:
                self._remember(queue, priorities.pop(), local_ids, jobs, now_ms)
                continue
            for priority in priorities:
                ids = [
                    local_id
                    for local_id, job in zip(local_ids, jobs, strict=True)
                    if job[1] == priority
                ]
                of_priority = [job for job in jobs if job[1] == priority]
                self._remember(queue, priority, ids, of_priority, now_ms)
        self._enqueued.clear()

    def _remember(
        self, queue: str, priority: int, local_ids: Sequence[int], jobs: Sequence[Job], now_ms: int
    ) -> None:
        new = _new
        keys = [
            new(PendingKey, (now_ms if job[2] is None else job[2], local_id))
            for local_id, job in zip(local_ids, jobs, strict=True)
        ]
        if any(map(gt, keys, keys[1:])):
            # Earliest first. Keys differ, so that the jobs beside them are never compared.
            ordered = sorted(zip(keys, jobs, strict=True))
            keys = [key for key, _ in ordered]
            jobs = [job for _, job in ordered]
            local_ids = [key.local_id for key in keys]
        kept = self.ready.add(queue, priority, keys, now_ms)
        if kept:
            payloads = [new(Payload, (job[0], job[3], job[3])) for job in jobs[:kept]]
            self.fresh.keep(queue, priority, local_ids[:kept], payloads)

    def requeue(self, queue: str, requeued: Sequence[Requeued], now_ms: int) -> None:
        """Jobs became PENDING again."""
        if not requeued:
            return
        self.touched.add(queue)
        if queue not in self.ready:
            return
        by_priority: dict[int, list[PendingKey]] = {}
        for priority, key in requeued:
            by_priority.setdefault(priority, []).append(key)
        for priority, keys in by_priority.items():
            keys.sort()
            self.ready.add(queue, priority, keys, now_ms)

    def clear(self) -> None:
        self.ready.clear()
        self.fresh.clear()
        self.suspects.clear()


class Parts:
    """A Batch in the making."""

    __slots__ = ("acks", "checkpoints", "claims", "enqueues", "releases")

    def __init__(self) -> None:
        self.acks: list[AckOp] = []
        self.checkpoints: list[CheckpointOp] = []
        self.releases: list[ReleaseOp] = []
        self.enqueues: list[EnqueueOp] = []
        self.claims: list[ClaimOp] = []

    def batch(self, room: ClaimRoom) -> Batch:
        return Batch(self.acks, self.checkpoints, self.releases, self.enqueues, self.claims, room)


class Results:
    """A BatchResult, handed out in the order in which its Works contributed."""

    __slots__ = ("acks", "checkpoints", "claims", "enqueues", "releases")

    def __init__(self, result: BatchResult) -> None:
        self.acks: Iterator[AckResult] = iter(result.acks)
        self.checkpoints: Iterator[CheckpointResult] = iter(result.checkpoints)
        self.releases: Iterator[Sequence[Requeued]] = iter(result.releases)
        self.enqueues: Iterator[Sequence[int]] = iter(result.enqueues)
        self.claims: Iterator[Sequence[Payload | None]] = iter(result.claims)


class Work(Protocol):
    """One call. `rows`: how many jobs it puts into a commit, known before it contributes."""

    @property
    def arrival(self) -> Arrival: ...

    @property
    def queues(self) -> Collection[str]:
        """Those whose tables its next part touches."""
        ...

    @property
    def rows(self) -> int: ...

    @property
    def begun(self) -> bool:
        """Whether an earlier commit has carried out a part of it."""
        ...

    def contribute(self, parts: Parts) -> None: ...

    def conclude(self, results: Results, memory: Memory, now_ms: int) -> ReplyEntry | None:
        """After the commit: the answer, or None if it takes another commit."""
        ...

    def give_up(self, memory: Memory, now_ms: int) -> None:
        """Nothing of what it contributed was committed."""
        ...

    def fail(self, error: PinLaterError) -> ReplyEntry:
        """The answer when it is not known what was committed."""
        ...


class _AnsweredCall:
    """What all calls of clients share: a head to answer to."""

    __slots__ = ("arrival", "head")

    def __init__(self, arrival: Arrival, head: Head) -> None:
        self.arrival = arrival
        self.head = head

    def give_up(self, memory: Memory, now_ms: int) -> None:
        pass

    def fail(self, error: PinLaterError) -> ReplyEntry:
        return failed(self.arrival, self.head, error)


class EnqueueWork(_AnsweredCall):
    __slots__ = ("jobs", "queue")
    begun = False

    def __init__(self, arrival: Arrival, head: Head, queue: str, jobs: Sequence[Job]) -> None:
        super().__init__(arrival, head)
        self.queue = queue
        self.jobs = jobs

    @property
    def queues(self) -> Collection[str]:
        return (self.queue,)

    @property
    def rows(self) -> int:
        return len(self.jobs)

    def contribute(self, parts: Parts) -> None:
        parts.enqueues.append(EnqueueOp(self.queue, self.jobs))

    def conclude(self, results: Results, memory: Memory, now_ms: int) -> ReplyEntry:
        local_ids = next(results.enqueues)
        queue, jobs = self.queue, self.jobs
        memory.enqueued(queue, local_ids, jobs)
        prefix = f"{queue}:s{memory.name}:p"
        descriptors = [
            f"{prefix}{job[1]}:{local_id}" for local_id, job in zip(local_ids, jobs, strict=True)
        ]
        return done(self.arrival, codec.encode_reply(self.head, descriptors))


class _PartedWork(_AnsweredCall, Generic[_Op]):
    """A call of any number of acks or checkpoints, of which each commit carries out one part.

    `problem`: what is wrong with some of them; the others are carried out all the same."""

    __slots__ = ("begun", "parts", "problem", "queue")

    def __init__(
        self, arrival: Arrival, head: Head, parts: Sequence[_Op], problem: RequestError | None
    ) -> None:
        super().__init__(arrival, head)
        self.queue = parts[0].queue
        self.parts: deque[_Op] = deque(parts)
        self.problem = problem
        self.begun = False

    @property
    def queues(self) -> Collection[str]:
        return (self.queue,)

    def _answer(self) -> ReplyEntry | None:
        """After the commit of the first of its parts."""
        self.begun = True
        self.parts.popleft()
        if self.parts:
            return None
        if self.problem is not None:
            return self.fail(self.problem)
        return done(self.arrival, codec.encode_reply(self.head, None))


class AckWork(_PartedWork[AckOp]):
    __slots__ = ()

    @property
    def rows(self) -> int:
        return self.parts[0].jobs

    def contribute(self, parts: Parts) -> None:
        parts.acks.append(self.parts[0])

    def conclude(self, results: Results, memory: Memory, now_ms: int) -> ReplyEntry | None:
        conclude_acks(self.queue, next(results.acks), memory, now_ms)
        return self._answer()


def split_acks(op: AckOp) -> list[AckOp]:
    """The same acks in the same order, at most PART_JOBS at a time."""
    if op.jobs <= PART_JOBS:
        return [op]
    succeeded = [AckOp(op.queue, part, ()) for part in _parts_of(op.succeeded)]
    return succeeded + [AckOp(op.queue, (), part) for part in _parts_of(op.failed)]


def _parts_of(acks: Sequence[Acks]) -> list[list[Acks]]:
    parts: list[list[Acks]] = []
    room = 0
    for alike in acks:
        local_ids = alike.local_ids
        while local_ids:
            if not room:
                parts.append([])
                room = PART_JOBS
            parts[-1].append(alike._replace(local_ids=local_ids[:room]))
            taken = len(parts[-1][-1].local_ids)
            room -= taken
            local_ids = local_ids[taken:]
    return parts


def slices(items: Sequence[_Item], most: int) -> list[Sequence[_Item]]:
    """`items` in order, at most `most` at a time."""
    return [items[at : at + most] for at in range(0, len(items), most)]


def conclude_acks(queue: str, result: AckResult, memory: Memory, now_ms: int) -> None:
    memory.changed.add(queue)
    memory.figures.acked(queue, result)
    memory.requeue(queue, result.requeued, now_ms)


class CheckpointWork(_PartedWork[CheckpointOp]):
    __slots__ = ()

    @property
    def rows(self) -> int:
        return len(self.parts[0].checkpoints)

    def contribute(self, parts: Parts) -> None:
        parts.checkpoints.append(self.parts[0])

    def conclude(self, results: Results, memory: Memory, now_ms: int) -> ReplyEntry | None:
        result = next(results.checkpoints)
        memory.figures.checkpointed(self.queue, result)
        memory.requeue(self.queue, result.requeued, now_ms)
        return self._answer()


class ReleaseWork:
    """Claims that were never delivered. There may be nobody left to answer to."""

    __slots__ = ("arrival", "begun", "parts")

    def __init__(self, arrival: Arrival, parts: Sequence[ReleaseOp]) -> None:
        self.arrival = arrival
        self.parts = deque(parts)
        self.begun = False

    @property
    def queues(self) -> Collection[str]:
        return (self.parts[0].queue,) if self.parts else ()

    @property
    def rows(self) -> int:
        return len(self.parts[0].releases) if self.parts else 0

    def contribute(self, parts: Parts) -> None:
        if self.parts:
            parts.releases.append(self.parts[0])

    def conclude(self, results: Results, memory: Memory, now_ms: int) -> ReplyEntry | None:
        if self.parts:
            released = next(results.releases)
            memory.figures.count("claims_released", len(released))
            memory.requeue(self.parts.popleft().queue, released, now_ms)
            self.begun = True
        return None if self.parts else done(self.arrival, b"")

    def give_up(self, memory: Memory, now_ms: int) -> None:
        pass

    def fail(self, error: PinLaterError) -> ReplyEntry:
        """They end by their time-out."""
        return refused(self.arrival, STORE_FAILED)


# --- answers --------------------------------------------------------------------------------


def done(arrival: Arrival, payload: bytes, jobs: int = 0) -> ReplyEntry:
    return _new(ReplyEntry, (arrival.entry.call_id, Status.DONE, payload, jobs))


def failed(arrival: Arrival, head: Head, error: PinLaterError) -> ReplyEntry:
    payload = codec.encode_error(head, error)
    return ReplyEntry(arrival.entry.call_id, Status.FAILED, payload)


def refused(arrival: Arrival, reason: str) -> ReplyEntry:
    """`reason`: what a caller is to be told of this shard if nobody else serves."""
    return ReplyEntry(arrival.entry.call_id, Status.REFUSED, reason.encode())


def foreign(arrival: Arrival) -> ReplyEntry:
    return ReplyEntry(arrival.entry.call_id, Status.FOREIGN, b"")
