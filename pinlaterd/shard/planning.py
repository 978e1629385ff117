"""From a decoded call of the job path to the Work that its commit takes.

What is wrong with a call is found here, before the batch, so that no other call suffers. May
rely on validation and on what is in memory; touches no store.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from pinlaterd.config.schema import Config
from pinlaterd.engines.base import (
    AckOp,
    Acks,
    Checkpoint,
    CheckpointOp,
    Release,
    ReleaseOp,
)
from pinlaterd.errors import InvalidRequest, PinLaterError, QueueNotFound, RequestError
from pinlaterd.model import (
    AckInfo,
    AckRequest,
    AlikeAcks,
    CheckpointRequest,
    DequeueRequest,
    DequeueResult,
    EnqueueRequest,
    JobDescriptor,
    JobKey,
    Method,
)
from pinlaterd.rpc import codec
from pinlaterd.rpc.codec import Call
from pinlaterd.shard.dequeues import DequeueWork
from pinlaterd.shard.validation import Rules
from pinlaterd.shard.works import (
    PART_JOBS,
    AckWork,
    Arrival,
    CheckpointWork,
    EnqueueWork,
    Memory,
    ReleaseWork,
    slices,
    split_acks,
)

LAST_LOCAL_ID = (1 << 63) - 1
_ID_DIGITS = len(str(LAST_LOCAL_ID))
LAST_PRIORITY = 127
# What stands for descriptors that are well formed and whose job no store can hold: local ids
# begin with 1.
NO_JOB = JobKey(1, 0)
_PRIORITIES = {str(priority): priority for priority in range(1, LAST_PRIORITY + 1)}
_MOST_NAMED = 10  # bad descriptors that an error message shows
_new = tuple.__new__  # half the cost of calling a NamedTuple, for each job of a batch


class ForeignError(Exception):
    """The call names jobs of other shards, or takes more than one shard: the router's to divide."""


class Planner:
    """Makes Works for one shard."""

    def __init__(self, rules: Rules, memory: Memory, config: Config) -> None:
        self._rules = rules
        self._memory = memory
        self.config = config  # another takes its place when it changes live

    def check_queue(self, queue: str) -> None:
        if queue not in self._memory.ready:
            raise QueueNotFound(queue)

    def enqueue(self, arrival: Arrival, call: Call, now_ms: int) -> EnqueueWork:
        request = cast("EnqueueRequest", call.request)
        self.check_queue(request.queue)
        jobs = self._rules.enqueue(call.context, request, now_ms)
        return EnqueueWork(arrival, call.head, request.queue, jobs)

    def ack(self, arrival: Arrival, call: Call, now_ms: int) -> AckWork:
        request = cast("AckRequest", call.request)
        self.check_queue(request.queue)
        op, problem = self._ack_op(arrival, request, now_ms)
        return AckWork(arrival, call.head, split_acks(op), problem)

    def dequeue(self, arrival: Arrival, call: Call, now_ms: int) -> DequeueWork:
        request = cast("DequeueRequest", call.request)
        op, problem = None, None
        if request.acks is not None:
            op, problem = self._riding_acks(arrival, request.acks, now_ms)
        problem = problem or self._dequeue_problem(call)
        if problem is None and arrival.entry.whole and request.coverage != 1.0:
            raise ForeignError
        if problem is not None and op is None:
            raise problem
        return DequeueWork(
            arrival,
            call,
            most_bytes=min(self.config.server.max_response_bytes, arrival.entry.most_bytes),
            claim_timeout_seconds=self.config.queue(request.queue).job_claimed_timeout_seconds,
            acks=split_acks(op) if op is not None and op.jobs else (),
            problem=problem,
        )

    def _dequeue_problem(self, call: Call) -> RequestError | None:
        """Why nothing can be claimed."""
        request = cast("DequeueRequest", call.request)
        try:
            self.check_queue(request.queue)
            self._rules.dequeue(call.context, request)
        except RequestError as error:
            return error
        return None

    def checkpoint(self, arrival: Arrival, call: Call) -> CheckpointWork:
        request = cast("CheckpointRequest", call.request)
        self.check_queue(request.queue)
        self._rules.checkpoints(call.context)
        place = Place(request.queue, self._memory.name)
        checkpoints, bad = [], []
        problem: RequestError | None = None
        for info in request.checkpoints:
            key = place.key(info.descriptor)
            if key is None:
                bad.append(info.descriptor)
                continue
            wrong = self._rules.checkpoint(request.queue, key.priority, info)
            if wrong is not None:
                problem = problem or wrong
            else:
                checkpoints.append(
                    Checkpoint(
                        key,
                        info.run_after_ms,
                        info.new_body,
                        info.move_to_pending,
                        info.attempts,
                        info.prepend_custom_status,
                        info.claim_descriptor,
                    )
                )
        if bad and arrival.entry.whole:
            raise ForeignError
        parts = [
            CheckpointOp(request.queue, call.context.source, part)
            for part in slices(checkpoints, PART_JOBS) or ((),)
        ]
        return CheckpointWork(arrival, call.head, parts, _bad_descriptors(bad, place) or problem)

    def release(self, arrival: Arrival) -> ReleaseWork:
        """Of a dequeue's answer that could not be delivered. Raises ProtocolError."""
        try:
            result = codec.decode_reply(Method.DEQUEUE, arrival.entry.message)
        except PinLaterError:
            return ReleaseWork(arrival, ())  # an answer that is an error claims nothing
        by_queue: dict[str, list[Release]] = {}
        for job in cast("DequeueResult", result).jobs:
            place = JobDescriptor.parse(job.descriptor)
            if place is not None and place.shard == self._memory.name and job.claim_descriptor:
                key = JobKey(place.priority, place.local_id)
                by_queue.setdefault(place.queue, []).append(Release(key, job.claim_descriptor))
        known = self._memory.ready
        parts = [
            ReleaseOp(queue, part)
            for queue, jobs in by_queue.items()
            if queue in known
            for part in slices(jobs, PART_JOBS)
        ]
        return ReleaseWork(arrival, parts)

    # --- acks ------------------------------------------------------------------------------

    def _riding_acks(
        self, arrival: Arrival, request: AckRequest, now_ms: int
    ) -> tuple[AckOp | None, RequestError | None]:
        """The acks of a dequeue. They may be of another queue."""
        try:
            self.check_queue(request.queue)
        except QueueNotFound as error:
            return None, error
        return self._ack_op(arrival, request, now_ms)

    def _ack_op(
        self, arrival: Arrival, request: AckRequest, now_ms: int
    ) -> tuple[AckOp, RequestError | None]:
        """The acks that can be carried out, and what is wrong with the others."""
        place = Place(request.queue, self._memory.name)
        bad: list[str] = []
        succeeded = _acks(place, request.succeeded, bad)
        failing, problem = self._with_valid_delays(request.failed, now_ms)
        failed = _acks(place, failing, bad)
        held = []
        for acks in failed:
            wrong = self._rules.unheld_retry(request.queue, acks, now_ms)
            if wrong is None:
                held.append(acks)
            elif problem is None:
                name = place.descriptor(JobKey(acks.priority, acks.local_ids[0]))
                problem = InvalidRequest(f"retryDelayMillis of {name!r} is {wrong}")
        if bad and arrival.entry.whole:
            raise ForeignError
        return AckOp(request.queue, succeeded, held), _bad_descriptors(bad, place) or problem

    def _with_valid_delays(
        self, infos: Sequence[AckInfo], now_ms: int
    ) -> tuple[Sequence[AckInfo], RequestError | None]:
        delays = (
            {infos.retry_delay_ms} if isinstance(infos, AlikeAcks) else {info[2] for info in infos}
        )
        if not any(self._rules.ack_delay(delay, now_ms) for delay in delays):
            return infos, None
        valid = [info for info in infos if not self._rules.ack_delay(info.retry_delay_ms, now_ms)]
        wrong = next(info for info in infos if self._rules.ack_delay(info.retry_delay_ms, now_ms))
        problem = self._rules.ack_delay(wrong.retry_delay_ms, now_ms)
        return valid, InvalidRequest(f"retryDelayMillis of {wrong.descriptor[:200]!r} is {problem}")


class Place:
    """The jobs of one queue on this shard."""

    __slots__ = ("_prefix", "queue", "shard")

    def __init__(self, queue: str, shard: str) -> None:
        self.queue = queue
        self.shard = shard
        self._prefix = f"{queue}:s{shard}:p"

    def descriptor(self, key: JobKey) -> str:
        return f"{self._prefix}{key.priority}:{key.local_id}"

    def key(self, descriptor: str) -> JobKey | None:
        """The job that `descriptor` names; None if it is malformed or names none of ours."""
        if descriptor.startswith(self._prefix):
            priority_text, _, id_text = descriptor[len(self._prefix) :].partition(":")
            priority = _PRIORITIES.get(priority_text)
            plain = id_text.isdigit() and id_text.isascii() and len(id_text) < _ID_DIGITS
            if priority is not None and plain:
                return _new(JobKey, (priority, int(id_text)))
        parsed = JobDescriptor.parse(descriptor)
        if parsed is None or parsed.queue != self.queue or parsed.shard != self.shard:
            return None
        if not 1 <= parsed.priority <= LAST_PRIORITY or parsed.local_id > LAST_LOCAL_ID:
            return NO_JOB
        return JobKey(parsed.priority, parsed.local_id)


def _acks(place: Place, infos: Sequence[AckInfo], bad: list[str]) -> list[Acks]:
    """Jobs that are acked together mostly have all but their local ids in common: what comes
    before it is understood once, as long as it stays the same."""
    if isinstance(infos, AlikeAcks) and len(infos.digits[0]) < _ID_DIGITS:
        first = place.key(infos[0].descriptor)
        if first is not None and first is not NO_JOB:
            return [Acks(first.priority, list(map(int, infos.digits)), *infos.rest)]
    acks: list[Acks] = []
    known_head = alike = None
    priority = 0
    for descriptor, status, delay_ms, claim in infos:
        head, _, id_text = descriptor.rpartition(":")
        plain = id_text.isdigit() and id_text.isascii() and len(id_text) < _ID_DIGITS
        if head == known_head and plain:
            local_id = int(id_text)
        else:
            key = place.key(descriptor)
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


def _bad_descriptors(bad: Sequence[str], place: Place) -> RequestError | None:
    if not bad:
        return None
    shown = ", ".join(repr(descriptor[:200]) for descriptor in bad[:_MOST_NAMED])
    more = f" and {len(bad) - _MOST_NAMED} more" if len(bad) > _MOST_NAMED else ""
    return InvalidRequest(
        f"not job descriptors of queue {place.queue!r} on shard {place.shard!r}: {shown}{more}; "
        "the other jobs of the call were carried out"
    )
