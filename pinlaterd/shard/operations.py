"""The calls of the job path, from a valid call through a commit to the answer.

Each kind of call has one class, which checks the call as it is made, adds its store operations to
a Commit together with what takes their results, brings the shard's state up to date, and replies.
An operation that was not committed has changed nothing. Dequeues are in `dequeue`.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Generic, TypeVar, cast

from pinlaterd.engines.base import (
    AckOp,
    AckResult,
    Acks,
    Batch,
    BatchResult,
    Checkpoint,
    CheckpointOp,
    CheckpointResult,
    ClaimOp,
    ClaimRoom,
    EnqueueOp,
    Release,
    ReleaseOp,
    Requeued,
)
from pinlaterd.errors import InvalidRequest, PinLaterError, RequestError
from pinlaterd.model import (
    AckInfo,
    AckRequest,
    AlikeAcks,
    CheckpointRequest,
    DequeueResult,
    EnqueueRequest,
    JobDescriptor,
    JobKey,
    Method,
    Payload,
)
from pinlaterd.rpc import codec
from pinlaterd.rpc.codec import Call, Head
from pinlaterd.shard.descriptors import NO_JOB, JobDescriptors, is_local_id
from pinlaterd.shard.state import STORE_FAILED, Arrival, ShardState
from pinlaterd.wire.envelope import ReplyEntry

# Jobs in a batch: those who come while it is committed wait for all of it, and beyond this a
# larger one saves nothing on a job.
BATCH_JOBS = 2_000
# What one call's acks, checkpoints or releases may take of a batch; more of them go through several
# commits, and leave room for other calls in each.
PART_JOBS = BATCH_JOBS // 2
_MOST_NAMED = 10  # bad descriptors that an error message shows

_new = tuple.__new__  # half the cost of calling a NamedTuple, for each job of a batch
_Op = TypeVar("_Op")
_Result = TypeVar("_Result")
_Item = TypeVar("_Item")
# An operation of the store, and what takes its result. Times are the batch's, in ms.
_Added = list[tuple[_Op, Callable[[_Result, int], None]]]


class ForeignError(Exception):
    """The call names jobs of other shards, or takes more than one shard: routers divide it."""


class Commit:
    """One commit of the store in the making. `enqueuing`: the calls that `enqueues` are of."""

    __slots__ = ("acks", "checkpoints", "claims", "enqueues", "enqueuing", "releases")

    def __init__(self) -> None:
        self.acks: _Added[AckOp, AckResult] = []
        self.checkpoints: _Added[CheckpointOp, CheckpointResult] = []
        self.releases: _Added[ReleaseOp, Sequence[Requeued]] = []
        self.enqueues: list[EnqueueOp] = []
        self.enqueuing: list[Enqueue] = []
        self.claims: _Added[ClaimOp, Sequence[Payload | None]] = []

    def batch(self, room: ClaimRoom) -> Batch:
        return Batch(
            [op for op, _ in self.acks] if self.acks else (),
            [op for op, _ in self.checkpoints] if self.checkpoints else (),
            [op for op, _ in self.releases] if self.releases else (),
            self.enqueues,
            [op for op, _ in self.claims] if self.claims else (),
            room,
        )

    def hand_over(self, result: BatchResult, state: ShardState, now_ms: int) -> None:
        """It is durable: give each result to whom it belongs."""
        if self.acks:
            for (_, acked), ack_result in zip(self.acks, result.acks, strict=True):
                acked(ack_result, now_ms)
        if self.checkpoints:
            for (_, checkpointed), done in zip(self.checkpoints, result.checkpoints, strict=True):
                checkpointed(done, now_ms)
        if self.releases:
            for (_, released), requeued in zip(self.releases, result.releases, strict=True):
                released(requeued, now_ms)
        for enqueue, local_ids in zip(self.enqueuing, result.enqueues, strict=True):
            enqueue.local_ids = local_ids
        state.index_stored(self.enqueues, result.enqueues, now_ms)
        for (_, claimed), payloads in zip(self.claims, result.claims, strict=True):
            claimed(payloads, now_ms)


class Operation:
    """One call. `begun`: whether a commit has carried out any of it."""

    __slots__ = ("arrival", "begun", "head", "queue", "state")

    def __init__(self, arrival: Arrival, head: Head, queue: str, state: ShardState) -> None:
        self.arrival = arrival
        self.head = head
        self.queue = queue
        self.state = state
        self.begun = False

    @property
    def queues(self) -> Collection[str]:
        """Those whose tables its next commit touches."""
        return (self.queue,)

    @property
    def rows(self) -> int:
        """How many jobs it puts into its next commit."""
        raise NotImplementedError

    def add_to(self, commit: Commit) -> None:
        raise NotImplementedError

    def reply(self, now_ms: int) -> ReplyEntry | None:
        """After a commit; None if it goes on with the next one."""
        raise NotImplementedError

    def give_up(self, now_ms: int) -> None:
        """Its commit failed, and nothing of it has changed."""

    def fail(self, error: PinLaterError) -> ReplyEntry:
        """The answer if it ends here."""
        return self.arrival.failed(self.head, error)


class Replies:
    """The operations in flight, and the replies that wait to be taken."""

    def __init__(self) -> None:
        self.bytes = 0  # in those that wait
        self._in_flight: dict[Operation, None] = {}
        self._waiting: defaultdict[bytes, list[ReplyEntry]] = defaultdict(list)

    def expect(self, operation: Operation) -> None:
        """It is in flight from now on."""
        self._in_flight[operation] = None

    def settle(self, operation: Operation, entry: ReplyEntry) -> None:
        del self._in_flight[operation]
        self._waiting[operation.arrival[0]].append(entry)
        self.bytes += len(entry[2])

    def reply(self, arrival: Arrival, entry: ReplyEntry) -> None:
        """To a call that was never in flight."""
        self._waiting[arrival.router].append(entry)
        self.bytes += len(entry.payload)

    def forget(self, operation: Operation) -> None:
        """It stays without a reply."""
        del self._in_flight[operation]

    def abandon(self, told: PinLaterError) -> None:
        """End all that is in flight; callers are told why."""
        for operation in list(self._in_flight):
            self.settle(operation, operation.fail(told))

    def take(self) -> Mapping[bytes, list[ReplyEntry]]:
        """The replies since the last time, by router."""
        replies, self._waiting = self._waiting, defaultdict(list)
        self.bytes = 0
        return replies


# --- enqueue --------------------------------------------------------------------------------


class Enqueue(Operation):
    """`local_ids`: those of its jobs, once they are stored."""

    __slots__ = ("jobs", "local_ids")

    def __init__(self, arrival: Arrival, call: Call, state: ShardState, now_ms: int) -> None:
        """Raises RequestError."""
        request = cast("EnqueueRequest", call.request)
        super().__init__(arrival, call.head, request.queue, state)
        state.check_queue(request.queue)
        self.jobs = state.rules.enqueue(call.context, request, now_ms)
        self.local_ids: Sequence[int] = ()

    @property
    def rows(self) -> int:
        return len(self.jobs)

    def add_to(self, commit: Commit) -> None:
        commit.enqueues.append(_new(EnqueueOp, (self.queue, self.jobs)))
        commit.enqueuing.append(self)

    def reply(self, now_ms: int) -> ReplyEntry:
        prefix = f"{self.queue}:s{self.state.name}:p"
        descriptors = [
            f"{prefix}{job[1]}:{local_id}"
            for local_id, job in zip(self.local_ids, self.jobs, strict=True)
        ]
        return self.arrival.done(codec.encode_reply(self.head, descriptors))


# --- acks -----------------------------------------------------------------------------------


class _InParts(Operation, Generic[_Op]):
    """Of any number of acks or checkpoints, of which each commit carries out one part. `problem`:
    what is wrong with some of them; the others are carried out all the same."""

    __slots__ = ("parts", "problem")
    parts: deque[_Op]
    problem: RequestError | None

    def reply(self, now_ms: int) -> ReplyEntry | None:
        if self.parts:
            return None
        if self.problem is not None:
            return self.fail(self.problem)
        return self.arrival.done(codec.encode_reply(self.head, None))


class Ack(_InParts[AckOp]):
    __slots__ = ()

    def __init__(self, arrival: Arrival, call: Call, state: ShardState, now_ms: int) -> None:
        """Raises RequestError, ForeignError."""
        request = cast("AckRequest", call.request)
        super().__init__(arrival, call.head, request.queue, state)
        self.parts, self.problem = ack_parts(arrival, request, state, now_ms)

    @property
    def rows(self) -> int:
        return self.parts[0].jobs

    def add_to(self, commit: Commit) -> None:
        commit.acks.append((self.parts[0], self._acked))

    def _acked(self, result: AckResult, now_ms: int) -> None:
        self.begun = True
        note_acked(self.parts.popleft().queue, result, self.state, now_ms)


def note_acked(queue: str, result: AckResult, state: ShardState, now_ms: int) -> None:
    state.changed.add(queue)
    state.figures.acked(queue, result)
    state.requeue(queue, result.requeued, now_ms)


def ack_parts(
    arrival: Arrival, request: AckRequest, state: ShardState, now_ms: int
) -> tuple[deque[AckOp], RequestError | None]:
    """The acks that can be carried out, a part for each commit, and what is wrong with the others.
    Raises QueueNotFound, and ForeignError if the router has not divided them yet."""
    queue, rules = request.queue, state.rules
    state.check_queue(queue)
    descriptors = JobDescriptors(queue, state.name)
    bad: list[str] = []
    succeeded = _acks(descriptors, request.succeeded, bad) if request.succeeded else []
    problem: RequestError | None = None
    failed: list[Acks] = []
    if request.failed:
        failing, problem = _with_valid_delays(request.failed, state, now_ms)
        for acks in _acks(descriptors, failing, bad):
            wrong = rules.unheld_retry(queue, acks, now_ms)
            if wrong is None:
                failed.append(acks)
            elif problem is None:
                name = descriptors.of(acks.priority, acks.local_ids[0])
                problem = InvalidRequest(f"retryDelayMillis of {name!r} is {wrong}")
    if bad and arrival.entry.whole:
        raise ForeignError
    parts = _split_acks(AckOp(queue, succeeded, failed))
    return parts, _bad_descriptors(bad, descriptors) or problem


def _with_valid_delays(
    infos: Sequence[AckInfo], state: ShardState, now_ms: int
) -> tuple[Sequence[AckInfo], RequestError | None]:
    wrong_delay = state.rules.ack_delay
    delays = {infos.retry_delay_ms} if isinstance(infos, AlikeAcks) else {info[2] for info in infos}
    if not any(wrong_delay(delay, now_ms) for delay in delays):
        return infos, None
    valid = [info for info in infos if not wrong_delay(info.retry_delay_ms, now_ms)]
    wrong = next(info for info in infos if wrong_delay(info.retry_delay_ms, now_ms))
    problem = wrong_delay(wrong.retry_delay_ms, now_ms)
    return valid, InvalidRequest(f"retryDelayMillis of {wrong.descriptor[:200]!r} is {problem}")


def _acks(descriptors: JobDescriptors, infos: Sequence[AckInfo], bad: list[str]) -> list[Acks]:
    """Jobs that are acked together mostly have all but their local ids in common: what comes
    before it is understood once, as long as it stays the same."""
    if isinstance(infos, AlikeAcks) and is_local_id(infos.digits[0].decode()):
        first = descriptors.key(infos[0].descriptor)
        if first is not None and first is not NO_JOB:
            return [Acks(first.priority, list(map(int, infos.digits)), *infos.rest)]
    acks: list[Acks] = []
    known_head = alike = None
    priority = 0
    for descriptor, status, delay_ms, claim in infos:
        head, _, id_text = descriptor.rpartition(":")
        plain = is_local_id(id_text)
        if head == known_head and plain:
            local_id = int(id_text)
        else:
            key = descriptors.key(descriptor)
            if key is None:
                bad.append(descriptor)
                continue
            priority, local_id = key
            known_head = head if plain and local_id else None
        if (priority, status, delay_ms, claim) != alike:
            alike = (priority, status, delay_ms, claim)
            local_ids: list[int] = []
            acks.append(_new(Acks, (priority, local_ids, status, delay_ms, claim)))
        local_ids.append(local_id)
    return acks


def _split_acks(op: AckOp) -> deque[AckOp]:
    """The same acks in the same order, at most PART_JOBS at a time."""
    if op.jobs <= PART_JOBS:
        return deque([op])
    parts = deque(AckOp(op.queue, part, ()) for part in _parts_of(op.succeeded))
    parts.extend(AckOp(op.queue, (), part) for part in _parts_of(op.failed))
    return parts


def _parts_of(acks: Sequence[Acks]) -> list[list[Acks]]:
    parts: list[list[Acks]] = []
    room = 0
    for alike in acks:
        local_ids = alike.local_ids
        while local_ids:
            if not room:
                parts.append([])
                room = PART_JOBS
            part = local_ids[:room]
            parts[-1].append(alike._replace(local_ids=part))
            room -= len(part)
            local_ids = local_ids[len(part) :]
    return parts


def _bad_descriptors(bad: Sequence[str], descriptors: JobDescriptors) -> RequestError | None:
    if not bad:
        return None
    shown = ", ".join(repr(descriptor[:200]) for descriptor in bad[:_MOST_NAMED])
    more = f" and {len(bad) - _MOST_NAMED} more" if len(bad) > _MOST_NAMED else ""
    return InvalidRequest(
        f"not job descriptors of queue {descriptors.queue!r} on shard {descriptors.shard!r}: "
        f"{shown}{more}; the other jobs of the call were carried out"
    )


# --- checkpoints and releases ---------------------------------------------------------------


class CheckpointJobs(_InParts[CheckpointOp]):
    __slots__ = ()

    def __init__(self, arrival: Arrival, call: Call, state: ShardState) -> None:
        """Raises RequestError, ForeignError."""
        request = cast("CheckpointRequest", call.request)
        super().__init__(arrival, call.head, request.queue, state)
        state.check_queue(request.queue)
        state.rules.checkpoints(call.context)
        descriptors = JobDescriptors(request.queue, state.name)
        checkpoints, bad = [], []
        problem: RequestError | None = None
        for (
            descriptor,
            body,
            to_pending,
            run_after_ms,
            attempts,
            text,
            claim,
        ) in request.checkpoints:
            key = descriptors.key(descriptor)
            if key is None:
                bad.append(descriptor)
                continue
            checkpoint = Checkpoint(key, run_after_ms, body, to_pending, attempts, text, claim)
            wrong = state.rules.checkpoint(request.queue, descriptor, checkpoint)
            if wrong is None:
                checkpoints.append(checkpoint)
            problem = problem or wrong
        if bad and arrival.entry.whole:
            raise ForeignError
        self.problem = _bad_descriptors(bad, descriptors) or problem
        self.parts = deque(
            CheckpointOp(request.queue, call.context.source, part)
            for part in chunks(checkpoints, PART_JOBS) or ((),)
        )

    @property
    def rows(self) -> int:
        return len(self.parts[0].checkpoints)

    def add_to(self, commit: Commit) -> None:
        commit.checkpoints.append((self.parts[0], self._checkpointed))

    def _checkpointed(self, result: CheckpointResult, now_ms: int) -> None:
        self.begun = True
        self.parts.popleft()
        self.state.figures.checkpointed(self.queue, result)
        self.state.requeue(self.queue, result.requeued, now_ms)


class ReleaseClaims(Operation):
    """Claims of a dequeue's answer that could not be delivered. There may be nobody left to answer
    to; what can't be released ends by its time-out."""

    __slots__ = ("parts",)

    def __init__(self, arrival: Arrival, state: ShardState) -> None:
        """Raises ProtocolError."""
        super().__init__(arrival, _NO_HEAD, "", state)
        by_queue: dict[str, list[Release]] = {}
        for job in _claimed_jobs(arrival.entry.message).jobs:
            named = JobDescriptor.parse(job.descriptor)
            if named is not None and named.shard == state.name and job.claim_descriptor:
                key = JobKey(named.priority, named.local_id)
                by_queue.setdefault(named.queue, []).append(Release(key, job.claim_descriptor))
        self.parts = deque(
            ReleaseOp(queue, part)
            for queue, releases in by_queue.items()
            if queue in state.ready
            for part in chunks(releases, PART_JOBS)
        )

    @property
    def queues(self) -> Collection[str]:
        return (self.parts[0].queue,) if self.parts else ()

    @property
    def rows(self) -> int:
        return len(self.parts[0].releases) if self.parts else 0

    def add_to(self, commit: Commit) -> None:
        if self.parts:
            commit.releases.append((self.parts[0], self._released))

    def _released(self, requeued: Sequence[Requeued], now_ms: int) -> None:
        self.begun = True
        self.state.figures.count("claims_released", len(requeued))
        self.state.requeue(self.parts.popleft().queue, requeued, now_ms)

    def reply(self, now_ms: int) -> ReplyEntry | None:
        return None if self.parts else self.arrival.done(b"")

    def fail(self, error: PinLaterError) -> ReplyEntry:
        return self.arrival.refused(STORE_FAILED)


_NO_HEAD = Head("", 0, oneway=False, strict=True)


def _claimed_jobs(reply: bytes) -> DequeueResult:
    try:
        return cast("DequeueResult", codec.decode_reply(Method.DEQUEUE, reply))
    except PinLaterError:
        return DequeueResult(())  # an answer that is an error claims nothing


def chunks(items: Sequence[_Item], most: int) -> Iterable[Sequence[_Item]]:
    """`items` in order, at most `most` at a time."""
    return [items[at : at + most] for at in range(0, len(items), most)]
