"""The calls of the job path, from a valid call through a commit to the reply.

Each kind of call has one class, which checks the call as it is made, adds its store operations to
a Commit together with what takes their results, brings the shard's state up to date, and replies.
An operation that was not committed has changed nothing. Dequeues are in `dequeue`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import chain, compress, islice, repeat
from typing import Any, TypeVar, cast

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
    Claims,
    EnqueueOp,
    EnqueueWithOptionsOp,
    Finish,
    Finished,
    FinishOp,
    KeyHolder,
    Release,
    ReleaseOp,
)
from pinlaterd.errors import BadDescriptors, InvalidRequest, PinLaterError, RequestError
from pinlaterd.model import (
    AckInfo,
    AckOutcomes,
    AckRequest,
    AlikeAcks,
    AlikeJobs,
    CheckpointOutcomes,
    CheckpointRequest,
    DequeueResult,
    EnqueueWithOptionsResult,
    FinishOutcome,
    FinishRequest,
    FinishResult,
    Job,
    JobDescriptor,
    JobKey,
    JobState,
    Method,
    Payload,
    Result,
    all_but_first,
    claim_source,
    defaults_behind,
    joined,
    new_record,
)
from pinlaterd.rpc import codec
from pinlaterd.rpc.codec import Call, Head
from pinlaterd.rpc.tuned import SLICE, ack_parts
from pinlaterd.shard.state import NO_JOB, STORE_FAILED, QueueFacts, ShardState, is_local_id
from pinlaterd.shard.validation import check_claim_timeout, check_source
from pinlaterd.wire.envelope import CallEntry, Op, Status

# Jobs in a batch: those who come while it is committed wait for all of it, and beyond this a
# larger one saves nothing on a job.
BATCH_JOBS = 2_000
# What one call's acks, checkpoints or releases may take of a batch; more of them go through several
# commits, and leave room for other calls in each.
PART_JOBS = SLICE
# What is due so soon is no scheduled job any more: the ready index may know of it in a moment.
_SOON_MS = 1_000
_NOT_READ = Payload(b"", 0, 0)  # so that the engine reads no body

_Result = TypeVar("_Result")
_Item = TypeVar("_Item")


class ForeignError(Exception):
    """The call names jobs of other shards, or takes more than one shard: routers fan it out."""


class Commit:
    """One commit of the store in the making: the operations of which it carries out a part."""

    __slots__ = (
        "acks",
        "batch",
        "checkpoints",
        "claims",
        "enqueues",
        "finishes",
        "releases",
        "with_options",
    )

    def __init__(self, operations: Iterable[Operation], room: ClaimRoom) -> None:
        """Enqueues into one queue are one operation of it."""
        self.acks: list[Operation] = []
        self.checkpoints: list[Operation] = []
        self.releases: list[Operation] = []
        self.finishes: list[FinishJobs] = []
        self.enqueues: dict[str, list[Enqueue]] = {}  # by queue
        self.with_options: dict[str, list[EnqueueWithOptions]] = {}  # by queue
        # Claims, and what takes those that were made, and how many jobs have expired.
        self.claims: list[
            tuple[ClaimOp, Callable[[ClaimOp, Sequence[Payload | None], int, int], None]]
        ] = []
        for operation in operations:
            operation.add_to(self)
        # A batch mostly has one or two kinds of operation; a list of each other costs a call.
        self.batch = Batch(
            [operation.parts[0] for operation in self.acks] if self.acks else (),
            [operation.parts[0] for operation in self.checkpoints] if self.checkpoints else (),
            [operation.parts[0] for operation in self.releases] if self.releases else (),
            [
                EnqueueOp(queue, joined([call.jobs for call in calls]))
                for queue, calls in self.enqueues.items()
            ],
            [op for op, _ in self.claims] if self.claims else (),
            room,
            [
                EnqueueWithOptionsOp(queue, joined([call.jobs for call in calls]))
                for queue, calls in self.with_options.items()
            ]
            if self.with_options
            else (),
            [operation.parts[0] for operation in self.finishes] if self.finishes else (),
        )

    def hand_over(self, result: BatchResult, state: ShardState, now_ms: int) -> None:
        """Hand each result of the finished commit to its operation."""
        if self.acks:
            _hand_over_parts(self.acks, result.acks, state.acked, now_ms)
        if self.checkpoints:
            _hand_over_parts(self.checkpoints, result.checkpoints, state.checkpointed, now_ms)
        if self.releases:
            _hand_over_parts(self.releases, result.releases, state.released, now_ms)
        for op, local_ids in zip(self.batch.enqueues, result.enqueues, strict=True):
            at = 0
            for enqueue in self.enqueues[op.queue]:
                end = at + enqueue.count
                enqueue.local_ids = local_ids[at:end]
                at = end
            state.stored(op.queue, op.jobs, local_ids, now_ms)
        for with_options, holders in zip(self.batch.with_options, result.with_options, strict=True):
            self._hand_over_with_options(with_options, holders, state, now_ms)
        expired = result.expired or repeat(0)
        for (op_of_claims, claimed), payloads, gone in zip(self.claims, result.claims, expired):  # noqa: B905 - repeat has no end
            claimed(op_of_claims, payloads, gone, now_ms)
        if self.finishes:
            _hand_over_parts(self.finishes, result.finishes, state.finished, now_ms)

    def _hand_over_with_options(
        self, op: EnqueueWithOptionsOp, holders: Sequence[KeyHolder], state: ShardState, now_ms: int
    ) -> None:
        held = iter(holders)
        for call in self.with_options[op.queue]:
            call.holders = list(islice(held, call.rows))
        is_new = [not holder.existed for holder in holders]
        if all(is_new):
            state.stored(op.queue, op.jobs, [holder.local_id for holder in holders], now_ms)
        elif any(is_new):
            local_ids = [holder.local_id for holder in compress(holders, is_new)]
            state.stored(op.queue, list(compress(op.jobs, is_new)), local_ids, now_ms)


def _hand_over_parts(
    operations: Sequence[Operation],
    results: Sequence[_Result],
    note: Callable[[str, _Result, int], None],
    now_ms: int,
) -> None:
    for operation, result in zip(operations, results, strict=True):
        operation.begun = True
        operation.take_result(result)
        note(operation.parts.popleft().queue, result, now_ms)


class Operation:
    """One call. Of any number of acks, checkpoints or releases each commit carries out one of
    `parts`. `begun`: whether a commit has carried out any of it; `problem`: what is wrong with some
    of it, told once the rest is done; `in_commit`: its jobs in the commit in the making."""

    __slots__ = ("begun", "entry", "head", "in_commit", "parts", "problem", "queue", "state")

    def __init__(self, entry: CallEntry, head: Head, queue: str, state: ShardState) -> None:
        self.entry = entry
        self.head = head
        self.queue = queue
        self.state = state
        self.begun = False
        self.in_commit = 0
        self.parts: deque[Any] = _NO_PARTS
        self.problem: RequestError | None = None

    @property
    def queues(self) -> Collection[str]:
        """Return the queues that its next commit touches."""
        return (self.queue,)

    @property
    def rows(self) -> int:
        """The number of jobs that it puts into its next commit; if none, it needs none."""
        return self.parts[0].jobs if self.parts else 0

    def add_to(self, commit: Commit) -> None:
        raise NotImplementedError

    def take_result(self, result: Any) -> None:
        """Keep what the answer needs of the result of a part."""

    def reply(self, now_ms: int) -> bool:
        """Reply after a commit; return False if it goes on with the next one."""
        if self.parts:
            return False
        if self.problem is not None:
            self.fail(self.problem)
        else:
            payload = codec.encode_reply(self.head, self.result())
            self.state.replies.add(self.entry, Status.DONE, payload)
        return True

    def result(self) -> Result:
        """Return what is answered once all of it is carried out."""
        return None

    def give_up(self, now_ms: int) -> None:
        """Return what was taken: the commit failed, and nothing of it has changed."""

    def fail(self, error: PinLaterError) -> None:
        """End the call with an error."""
        self.state.replies.fail(self.entry, self.head, error)


_NO_PARTS: deque[Any] = deque(maxlen=0)


# --- enqueue --------------------------------------------------------------------------------


class Enqueue(Operation):
    """`local_ids`: those of its jobs, once they are stored."""

    __slots__ = ("_prefix", "count", "jobs", "local_ids")

    def __init__(
        self,
        entry: CallEntry,
        head: Head,
        facts: QueueFacts,
        state: ShardState,
        jobs: Sequence[Job],
    ) -> None:
        """`jobs`: as they are to be stored."""
        super().__init__(entry, head, facts.queue, state)
        self._prefix = facts.prefix
        self.count = len(jobs)
        self.jobs = jobs
        self.local_ids: Sequence[int] = ()

    @property
    def rows(self) -> int:
        return self.count

    def add_to(self, commit: Commit) -> None:
        commit.enqueues.setdefault(self.queue, []).append(self)

    def reply(self, now_ms: int) -> bool:
        prefix, jobs = self._prefix, self.jobs
        first = jobs.alike if type(jobs) is AlikeJobs else jobs[0]
        if type(jobs) is AlikeJobs or self.count == 1:
            prefix = f"{prefix}{first.priority}:"
            payload = codec.encode_enqueued(self.head, prefix, self.local_ids)
        else:
            pairs = zip(self.local_ids, jobs, strict=True)
            descriptors = [f"{prefix}{job.priority}:{local_id}" for local_id, job in pairs]
            payload = codec.encode_reply(self.head, descriptors)
        self.state.replies.add(self.entry, Status.DONE, payload)
        return True


class EnqueueWithOptions(Enqueue):
    """An enqueue of jobs of which some have options. `holders`: of all, once the call is done."""

    __slots__ = ("holders",)

    holders: Sequence[KeyHolder]

    def add_to(self, commit: Commit) -> None:
        commit.with_options.setdefault(self.queue, []).append(self)

    def reply(self, now_ms: int) -> bool:
        descriptors = [
            f"{held.queue or self.queue}:s{self.state.name}:p{held.priority}:{held.local_id}"
            for held in self.holders
        ]
        result: Result = descriptors
        if have_keys(self.jobs):
            result = EnqueueWithOptionsResult(descriptors, [held.existed for held in self.holders])
        payload = codec.encode_reply(self.head, result)
        self.state.replies.add(self.entry, Status.DONE, payload)
        return True


def have_keys(jobs: Sequence[Job]) -> bool:
    """Tell whether any of the jobs has a key."""
    if isinstance(jobs, AlikeJobs) and jobs.keys is not None:
        return True
    return any(job.options is not None and job.options.key is not None for job in jobs)


# --- acks -----------------------------------------------------------------------------------


class Acking(Operation):
    """A call that ends jobs, alone or before it dequeues. `source`: who calls."""

    __slots__ = ("source",)

    source: str

    def take_acks(self, request: AckRequest, now_ms: int) -> None:
        """Have commits carry out what is right of them, and tell what is wrong with the others.
        Raises QueueNotFound, and ForeignError if the router has not fanned them out yet."""
        facts = self.state.queue(request.queue)
        bad: list[str] = []
        parts: deque[AckOp] = deque()
        short = len(request.succeeded) + len(request.failed) <= PART_JOBS
        for part in (request,) if short else ack_parts(request):
            succeeded = _acks(facts, part.succeeded, bad) if part.succeeded else ()
            failed = _acks(facts, part.failed, bad) if part.failed else ()
            if failed:
                failed = [acks for acks in failed if self._may_retry(facts, acks, now_ms)]
            if succeeded or failed:
                parts.append(new_record(AckOp, (request.queue, succeeded, failed)))
        if bad:
            if self.entry.whole:
                raise ForeignError
            self.problem = BadDescriptors(bad, facts.place)
        self.parts = parts

    def _may_retry(self, facts: QueueFacts, acks: Acks, now_ms: int) -> bool:
        name = f"{facts.prefix}{acks.priority}:{acks.local_ids[0]}"
        try:
            self.state.rules.retry_delay(facts.queue, acks, name, now_ms)
        except InvalidRequest as error:
            self.problem = self.problem or error
            return False
        return True

    def add_to(self, commit: Commit) -> None:
        commit.acks.append(self)

    def take_result(self, result: AckResult) -> None:
        op: AckOp = self.parts[0]
        if self.state.leases.looks:
            self.state.leases.end(op.queue, (*op.succeeded, *op.failed))
        if result.failed:
            now_ms = self.state.clock.now_ms()
            self.state.failures.note(op.queue, self.source, op.failed, result.missed, now_ms)


class Ack(Acking):
    __slots__ = ()

    def __init__(self, entry: CallEntry, call: Call, state: ShardState, now_ms: int) -> None:
        """Raises RequestError, ForeignError."""
        request = cast("AckRequest", call.request)
        super().__init__(entry, call.head, request.queue, state)
        self.source = call.context.source
        self.take_acks(request, now_ms)


class AckJobs(Ack):
    """An ack that tells what became of each job: `missed` are those to which it did not apply."""

    __slots__ = ("_keys", "missed")

    def __init__(self, entry: CallEntry, call: Call, state: ShardState, now_ms: int) -> None:
        """Raises RequestError, ForeignError."""
        super().__init__(entry, call, state, now_ms)
        self._keys = [
            _keys_of(chain.from_iterable(op.succeeded for op in self.parts)),
            _keys_of(chain.from_iterable(op.failed for op in self.parts)),
        ]
        self.missed: set[JobKey] = set()
        _check_named_once(Method.ACK_JOBS, chain.from_iterable(self._keys))

    def take_result(self, result: AckResult) -> None:
        super().take_result(result)
        self.missed.update(result.missed)

    def result(self) -> AckOutcomes:
        return AckOutcomes(*[[key not in self.missed for key in keys] for keys in self._keys])


class AckScheduled(Ack):
    """An ack of scheduled jobs, which it claims first in a commit of its own."""

    __slots__ = ()

    def __init__(self, entry: CallEntry, call: Call, state: ShardState, now_ms: int) -> None:
        """Raises RequestError, ForeignError, StorageError."""
        super().__init__(entry, call, state, now_ms)
        source = call.context.source
        claimed = [_claim_scheduled(state, op, source, now_ms) for op in self.parts]
        self.parts = deque(op for op in claimed if op.succeeded)


def _claim_scheduled(state: ShardState, op: AckOp, source: str, now_ms: int) -> AckOp:
    """Claim the jobs that `op` is to end as succeeded, in a commit of its own. Returns it with
    these claims, and without the jobs that are not scheduled any more: what is due, or soon.

    The ready index knows nothing of these jobs, since they are not due. The claims bear the
    latest time there is, so that they never time out: after a crash before the ack, jobs would
    run here before their time, beside their copies. A repeated call acks them. Raises
    StorageError."""
    engine = state.engine
    named = {JobKey(acks.priority, i): acks for acks in op.succeeded for i in acks.local_ids}
    held: dict[JobKey, str] = {}
    claims: list[Claims] = []
    for job in engine.lookup(op.queue, list(named), include_body=False):
        if job.state is JobState.PENDING and job.run_after_ms > now_ms + _SOON_MS:
            claimer = state.claim_descriptors.take(source, 1)
            claims.append(Claims(job.key.priority, [job.key.local_id], [_NOT_READ], *claimer))
        elif job.state is JobState.IN_PROGRESS:
            descriptor = job.claim_descriptor or ""
            if claim_source(descriptor) == source:
                held[job.key] = descriptor
    if claims:
        batch = Batch(claims=[ClaimOp(op.queue, claims)], fails_expired=False)
        [found] = engine.apply(batch, engine.limits.run_after_ms).claims
        for claim, payload in zip(claims, found, strict=True):
            if payload is not None:
                held[JobKey(claim.priority, claim.local_ids[0])] = claim.descriptors[0]
    acks = [
        Acks(key.priority, [key.local_id], named[key].append_custom_status, 0, descriptor)
        for key, descriptor in held.items()
    ]
    return AckOp(op.queue, acks, ())


def _keys_of(acks: Iterable[Acks]) -> list[JobKey]:
    """List the jobs that are acked, in their order."""
    return [JobKey(alike.priority, local_id) for alike in acks for local_id in alike.local_ids]


def _check_named_once(method: Method, keys: Iterable[JobKey | None]) -> None:
    """Raise InvalidRequest if a job is named twice. Descriptors that name no job that may be here
    (None, NO_JOB) are never the same."""
    named = [key for key in keys if key not in (None, NO_JOB)]
    if len(set(named)) < len(named):
        raise InvalidRequest(f"{method} names a job twice; name each once")


def _acks(facts: QueueFacts, infos: Sequence[AckInfo], bad: list[str]) -> list[Acks]:
    """Group acks. Jobs that are acked together mostly have all but their local ids in common: what
    comes before it is understood once, as long as it stays the same."""
    if type(infos) is AlikeAcks:
        known_priority = facts.priority_of(infos.alike.descriptor)
        if known_priority is not None and is_local_id(infos.digits[0].decode()):
            return [_acks_like(infos.alike, known_priority, list(map(int, infos.digits)))]
    acks: list[Acks] = []
    known_head = known_priority = alike = alike_priority = None
    for info in infos:
        descriptor, rest = info.descriptor, all_but_first(info)
        head, _, id_text = descriptor.rpartition(":")
        if head != known_head:
            known_head, known_priority = head, facts.priority_of(f"{head}:")
        if known_priority is not None and is_local_id(id_text):
            priority, local_id = known_priority, int(id_text)
        else:
            key = facts.key(descriptor)
            if key is None:
                bad.append(descriptor)
                continue
            priority, local_id = key
        if rest != alike or priority != alike_priority:
            alike, alike_priority = rest, priority
            local_ids: list[int] = []
            acks.append(_acks_like(info, priority, local_ids))
        local_ids.append(local_id)
    return acks


_OTHERS_OF_ACKS = defaults_behind(Acks, "retryable")


def _acks_like(info: AckInfo, priority: int, local_ids: list[int]) -> Acks:
    """Return the acks of these jobs, which are all as `info`."""
    text, delay_ms = info.append_custom_status, info.retry_delay_ms
    fields = (priority, local_ids, text, delay_ms, info.claim_descriptor)
    return new_record(Acks, (*fields, info.retryable is not False, *_OTHERS_OF_ACKS))


# --- checkpoints and releases ---------------------------------------------------------------


class CheckpointJobs(Operation):
    """Checkpoints; `lease_ms`: for how long claims hold from then on, None: as before."""

    __slots__ = ("keys", "lease_ms")

    def __init__(self, entry: CallEntry, call: Call, state: ShardState, _now_ms: int) -> None:
        """Raises RequestError, ForeignError."""
        request = cast("CheckpointRequest", call.request)
        super().__init__(entry, call.head, request.queue, state)
        facts = state.queue(request.queue)
        check_source(call.context.source)
        check_claim_timeout(request.claim_timeout_ms)
        self.lease_ms = state.lease_ms(request.queue, request.claim_timeout_ms)
        # Of each checkpoint; None: it is not carried out.
        self.keys = [facts.key(info.descriptor) for info in request.checkpoints]
        checkpoints, bad = [], []
        for key, info in zip(self.keys, request.checkpoints, strict=True):
            if key is None:
                bad.append(info.descriptor)
                continue
            checkpoint = Checkpoint(
                key,
                info.run_after_ms,
                info.new_body,
                info.move_to_pending,
                info.attempts,
                info.prepend_custom_status,
                info.claim_descriptor,
            )
            try:
                state.rules.checkpoint(request.queue, info.descriptor, checkpoint)
                checkpoints.append(checkpoint)
            except InvalidRequest as error:
                self.problem = self.problem or error
        if bad:
            if entry.whole:
                raise ForeignError
            self.problem = BadDescriptors(bad, facts.place)
        self.parts = deque(
            CheckpointOp(request.queue, call.context.source, part)
            for part in chunks(checkpoints, PART_JOBS)
        )

    def add_to(self, commit: Commit) -> None:
        commit.checkpoints.append(self)

    def take_result(self, result: CheckpointResult) -> None:
        if self.state.leases.looks or self.lease_ms is not None:
            renewals = [
                (each.key, each.claim_descriptor)
                for each in self.parts[0].checkpoints
                if not (each.move_to_pending or each.key in result.missed)
            ]
            self.state.leases.renew(self.queue, renewals, self.lease_ms)


class ApplyCheckpoints(CheckpointJobs):
    """Checkpoints with the outcome of each: `missed` are those jobs to which it did not apply."""

    __slots__ = ("missed",)

    def __init__(self, entry: CallEntry, call: Call, state: ShardState, now_ms: int) -> None:
        """Raises RequestError, ForeignError."""
        super().__init__(entry, call, state, now_ms)
        self.missed: set[JobKey] = set()
        _check_named_once(Method.APPLY_CHECKPOINTS, self.keys)

    def take_result(self, result: CheckpointResult) -> None:
        super().take_result(result)
        self.missed.update(result.missed)

    def result(self) -> CheckpointOutcomes:
        return CheckpointOutcomes([key not in self.missed for key in self.keys])


class FinishJobs(Operation):
    """Ends of jobs, or further attempts, claimed or not."""

    __slots__ = ("outcomes",)

    def __init__(self, entry: CallEntry, call: Call, state: ShardState, now_ms: int) -> None:
        """Raises RequestError, ForeignError."""
        request = cast("FinishRequest", call.request)
        super().__init__(entry, call.head, request.queue, state)
        facts = state.queue(request.queue)
        finishes, bad = [], []
        for info in request.finishes:
            key = facts.key(info.descriptor)
            if key is None:
                bad.append(info.descriptor)
                continue
            finish = Finish(key, *all_but_first(info))
            state.rules.finish(request.queue, info.descriptor, finish, now_ms)
            finishes.append(finish)
        _check_named_once(Method.FINISH, [finish.key for finish in finishes])
        if bad:
            if entry.whole:
                raise ForeignError
            raise BadDescriptors(bad, facts.place)
        self.outcomes: list[FinishOutcome] = []
        self.parts = deque(FinishOp(request.queue, part) for part in chunks(finishes, PART_JOBS))

    def add_to(self, commit: Commit) -> None:
        commit.finishes.append(self)

    def take_result(self, result: Finished) -> None:
        self.outcomes += result.outcomes

    def result(self) -> FinishResult:
        return FinishResult(self.outcomes)


class ReleaseClaims(Operation):
    """Claims of a dequeue's answer that could not be delivered. There may be nobody left to reply
    to; what can't be released ends by its time-out. So does a job that is to run at most once, if
    its worker may have it."""

    __slots__ = ()

    def __init__(self, entry: CallEntry, state: ShardState) -> None:
        """Raises ProtocolError."""
        super().__init__(entry, _NO_HEAD, "", state)
        by_queue: dict[str, list[Release]] = {}
        for job in _claimed_jobs(entry.message).jobs:
            named = JobDescriptor.parse(job.descriptor)
            if entry.op is Op.RELEASE_SENT and job.attempts_allowed == 1:
                continue
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

    def add_to(self, commit: Commit) -> None:
        commit.releases.append(self)

    def reply(self, now_ms: int) -> bool:
        if not self.parts:
            self.state.replies.add(self.entry, Status.DONE, b"")
        return not self.parts

    def fail(self, error: PinLaterError) -> None:
        self.state.replies.refuse(self.entry, STORE_FAILED)


_NO_HEAD = Head("", 0, oneway=False, strict=True)


def _claimed_jobs(reply: bytes) -> DequeueResult:
    try:
        return cast("DequeueResult", codec.decode_reply(Method.DEQUEUE, reply))
    except PinLaterError:
        return DequeueResult(())  # an answer that is an error claims nothing


def chunks(items: Sequence[_Item], most: int) -> Iterable[Sequence[_Item]]:
    """Divide `items`, in order, into chunks of at most `most`."""
    return [items[at : at + most] for at in range(0, len(items), most)]
