"""One client's call on its way through the router: what it is, whether it may begin, and what
shards' replies to it mean.

A call ends exactly once, by `reply`, `finish` or `fail`. Answers that are being made have a part of
max_buffered_bytes, and those that clients have not read leave less of it. A dequeue is granted a
part of what is free; its shards claim no more jobs than fit. The answer to a look-up, a scan or a
dry run cannot be cut short: if it may be large, it is asked of the shards once there is room for
all of it. A call that lacks memory waits until it is the next one of its connection, whose client
has taken all answers before it, or a dequeue until there is room; a dequeue that has waited for
jobs is answered without any. So a client that does not read has at most one more answer made.

Relies on `rpc` to decode calls and to write errors, on `wire` for what is sent to shards.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Final, NamedTuple

from pinlaterd.clock import Clock
from pinlaterd.config.schema import KIB, MIB, ServerSettings
from pinlaterd.errors import (
    EnqueueRejected,
    ErrorCode,
    InvalidRequest,
    Overloaded,
    PinLaterError,
    ProtocolError,
    ShardConnectionFailed,
)
from pinlaterd.lifecycle import aside
from pinlaterd.model import CallContext, JobDefaults, Method, Request, Result
from pinlaterd.router.rate_limits import LimitedQueue, RateLimits
from pinlaterd.router.shards import ShardSet
from pinlaterd.rpc import codec
from pinlaterd.rpc.codec import Head, Peek
from pinlaterd.rpc.connection import Answer, Connection
from pinlaterd.rpc.peek import (
    DEQUEUE_END_BYTES,
    may_be_dry_run,
    may_include_bodies,
    may_name_keys,
    most_scanned,
)
from pinlaterd.stats import Stats
from pinlaterd.wire.envelope import DONE, SCAN_BYTES, Op, ReplyEntry, ShardCall, Status
from pinlaterd.wire.link import ShardLink

log = logging.getLogger(__name__)

# Each step of a larger call takes milliseconds.
DECODE_IN_PARTS_BYTES = 64 * KIB
DEQUEUE: Final = Method.DEQUEUE  # a look-up of the member costs as much as a call

# Smaller ones are bounded well enough by how many calls a connection may have in flight.
_ADMITTED_AT_ONCE_BYTES = 2 * MIB
# Of max_buffered_bytes. A claiming dequeue's answer passes through, most of the time; of the others
# a router has each up to four times while it makes it (received, decoded, merged, encoded).
_CLAIMS_PART = 2
_OTHERS_PART = 4
# Of what is free, for one dequeue; and what the next one of a connection has in any case.
_DEQUEUE_PART = 4
_LEAST_BYTES = 256 * KIB
# How often those that wait are looked at: to look at thousands takes milliseconds.
_LOOK_SECONDS = 0.02
_LOOK_SECONDS_PER_CALL = 20e-6
# What a look-up tells of a job beside its body: 5,000 characters of custom status, of 4 bytes.
_STATUS_BYTES = 20_000
_RECORD_BYTES = _STATUS_BYTES + 400
# What a dequeue tells of a job beside its body, at most.
_CLAIM_BYTES = 512
_MAY_BE_LARGE = frozenset({Method.DEQUEUE, Method.LOOKUP, Method.SCAN})
_MSEC_NAMES = {method: f"PinLaterService.{method}_msec" for method in Method}
_ENDED = Peek(Head("", 0, oneway=False, strict=True), None, False, None, 0, 0, None)

Replies = Sequence[tuple[ShardLink, ReplyEntry]]


@dataclass(slots=True)
class Shared:
    """The state that all parts of a router share."""

    shards: ShardSet
    limits: RateLimits
    clock: Clock
    stats: Stats
    rng: Random
    settings: ServerSettings  # replaced when they change live, as is what follows
    job_defaults: Mapping[str, JobDefaults] = field(default_factory=dict)  # by queue
    # Jobs that calls have changed since that was reported last, by queue and method.
    mends: dict[tuple[str, str], int] = field(default_factory=dict)


class Call(Answer, ShardCall):
    """A Thrift call, and its answer. While one shard can answer it, it goes there as it is."""

    refusals: Mapping[str, str] = {}  # why shards did nothing about it, by name
    claims: bool = False  # whether it is a dequeue that is no dry run
    granted_bytes: int = 0  # that its answer may have; of a look-up, scan or dequeue
    limited: LimitedQueue | None = None  # which pays for the jobs of a dequeue

    def __init__(
        self,
        message: bytes,
        peek: Peek,
        connection: Connection,
        started: float,
        deadline: float,
        on_end: Callable[[Call, ErrorCode | None], None],
    ) -> None:
        """Times are monotonic seconds. All that ShardCall has besides keeps its defaults."""
        Answer.__init__(self, connection, oneway=peek.head.oneway)
        self.message = message
        self.peek = peek
        self.started = started
        self.deadline = deadline
        self._on_end = on_end

    async def decode(self, shared: Shared) -> codec.Call:
        """Decode all of it. Raises PinLaterError if it is malformed, or a list of it too long."""
        message, most_elements = self.message, shared.settings.max_jobs_per_call
        arguments = (message, most_elements, shared.job_defaults)
        try:
            return await aside(len(message), codec.decode_call, *arguments)
        except ProtocolError as error:
            raise InvalidRequest(str(error)) from error

    def reply(self, message: bytes, error: ErrorCode | None = None) -> bool:
        """Answer with a Thrift reply; False if nobody is there to read it."""
        sent = self.connection.answered(self, message)
        self._on_end(self, error)
        # The answer may wait for those before it; its request would take memory that nobody counts.
        self.message, self.peek = b"", _ENDED
        return sent

    def fail(self, error: BaseException) -> None:
        if not isinstance(error, PinLaterError):
            log.error("%s failed", self.peek.method, exc_info=error)
            error = PinLaterError("internal error; the server's log says more")
        self.reply(codec.encode_error(self.peek.head, error), error.code)

    def finish(self, shard: ShardLink, reply: ReplyEntry) -> None:
        """Answer with what `shard` made of it."""
        _, status, payload, jobs = reply
        if status is DONE:
            if jobs:
                # Jobs that a dequeue claimed and nobody gets are released, for others to claim.
                self.on_undelivered = shard.release
            if not self.reply(payload) and jobs:
                shard.release(payload)
        elif status is Status.FAILED:
            self.reply(payload, codec.peek_error(payload))
        else:
            self.fail(failure([(shard, reply)]))


# --- whether it may begin --------------------------------------------------------------------


class Admission:
    """Counts calls until they end, and grants memory to those whose answers may be large, in the
    order in which they come."""

    def __init__(self, shared: Shared, begin: Callable[[Call], None]) -> None:
        """`begin` is called with a call that was not admitted at once, when it may begin."""
        settings = shared.settings
        self.in_flight = 0
        self.waiting = 0  # dequeues that wait for jobs or tokens; not in flight meanwhile
        self._shared = shared
        self._monotonic, self._record = shared.clock.monotonic, shared.stats.record
        self._begin = begin
        self._most_in_flight = settings.max_calls_in_flight
        self._most_waiting = settings.max_waiting_dequeues
        self._most_bytes = settings.max_buffered_bytes // _OTHERS_PART
        # By whether calls claim: dequeues would never leave room for a whole answer of the others.
        self._free_bytes = {
            True: settings.max_buffered_bytes // _CLAIMS_PART,
            False: self._most_bytes,
        }
        # Calls that lack memory: whether each has been the next of its connection.
        self._lacking: dict[Call, bool] = {}
        self._looking: asyncio.Handle | None = None

    def admit(self, call: Call) -> bool:
        """Tell whether it may begin now; else it is begun later, or has failed."""
        self.in_flight += 1
        method = call.peek.method
        if self.in_flight > self._most_in_flight:
            overloaded = Overloaded(f"{self._most_in_flight} calls are in flight already")
            call.fail(
                EnqueueRejected(overloaded.message) if method is Method.ENQUEUE else overloaded
            )
            return False
        if method not in _MAY_BE_LARGE:
            return True
        if method is DEQUEUE:
            end = call.message[-DEQUEUE_END_BYTES:] if call.peek.canonical else call.message
            call.claims = not may_be_dry_run(end)
        size = self._grantable(call)
        if size if call.claims else size <= _ADMITTED_AT_ONCE_BYTES:
            self._grant(call, size)
            return True
        self._lacking[call] = False
        if self._looking is None:
            self._look()
        return False

    def suspend(self, call: Call) -> None:
        """Have a call wait from now on. Raises Overloaded if too many do."""
        if self.waiting >= self._most_waiting:
            raise Overloaded(
                f"{self.waiting} dequeues wait already, as many as max_waiting_dequeues in "
                "etc/pinlaterd.yaml allows"
            )
        self.in_flight -= 1
        self.waiting += 1
        self._release(call)

    def resume(self, call: Call) -> None:
        """Begin again; a claiming dequeue that is not its connection's next may get nothing."""
        self.waiting -= 1
        self.in_flight += 1
        self._grant(call, self._grantable(call))

    def ended(self, call: Call, error: ErrorCode | None) -> None:
        self.in_flight -= 1
        if call.granted_bytes:
            self._release(call)
        method = call.peek.method
        assert method is not None
        self._record(_MSEC_NAMES[method], (self._monotonic() - call.started) * 1000)
        if error is not None:
            stats = self._shared.stats
            stats.count(f"PinLater.{method}.errors.{error.name}")
            if error is ErrorCode.DEQUEUE_RATE_LIMITED:
                stats.count(f"{call.peek.queue}_dequeue_requests_rate_limited")

    # --- memory --------------------------------------------------------------------------------

    def _grant(self, call: Call, size: int) -> None:
        call.granted_bytes = size
        self._free_bytes[call.claims] -= size

    def _release(self, call: Call) -> None:
        self._free_bytes[call.claims] += call.granted_bytes
        call.granted_bytes = 0
        if self._lacking and not call.claims:
            self._look_again(0)

    def _grantable(self, call: Call) -> int:
        """Return all that its answer may need; of a claiming dequeue, what it may bring now, 0 if
        it has to wait for room."""
        if not call.claims:
            return self._size(call)
        room = min(self._free_bytes[True], call.room())
        if room < _LEAST_BYTES and not call.is_next:
            return 0
        return min(self._size(call), max(_LEAST_BYTES, room // _DEQUEUE_PART))

    def _size(self, call: Call) -> int:
        """Return the most bytes that its answer may have."""
        peek, settings = call.peek, self._shared.settings
        if peek.method is DEQUEUE:
            jobs = max(1, peek.limit) if peek.canonical else settings.max_jobs_per_call
            of_a_job = settings.max_job_body_bytes + _CLAIM_BYTES
            size = min(jobs * of_a_job, settings.max_response_bytes)
        elif peek.method is Method.LOOKUP:
            body = settings.max_job_body_bytes if may_include_bodies(call.message) else 0
            is_counted = peek.canonical and not may_name_keys(call.message)
            jobs = peek.items if is_counted else settings.max_jobs_per_call
            size = min(jobs * (body + _RECORD_BYTES), settings.max_frame_bytes)
        else:
            jobs = most_scanned(call.message, settings.scan_limit)
            statuses = min(jobs * _STATUS_BYTES, len(self._shared.shards.by_name) * SCAN_BYTES)
            size = statuses + jobs * (_RECORD_BYTES - _STATUS_BYTES)
        return min(size, self._most_bytes)

    def _look(self) -> None:
        """Begin what may be begun; look again soon while others wait."""
        self._looking = None
        now = self._shared.clock.monotonic()
        full = False  # those behind one that lacks room wait, too
        for call, was_next in list(self._lacking.items()):
            if call.client_gone:
                del self._lacking[call]
                call.fail(Overloaded("the client has gone"))  # which nobody reads
                continue
            # Thousands may wait: sizes are worked out for those only that may begin.
            size = self._grantable(call) if call.claims or call.is_next else 0
            ready = size > 0
            if ready and not was_next:
                # Restart its deadline: it could not begin until the client had read the others.
                call.deadline = now + self._shared.settings.request_timeout_ms / 1000
                self._lacking[call] = True
            if ready and not call.claims:
                full |= size > min(self._free_bytes[False], call.room())
                ready = not full
            if ready:
                del self._lacking[call]
                self._grant(call, size)
                self._begin(call)
            elif was_next and call.deadline <= now:
                del self._lacking[call]
                call.fail(Overloaded("answers that clients have not read take the memory for this"))
        if self._lacking:
            self._look_again(max(_LOOK_SECONDS, len(self._lacking) * _LOOK_SECONDS_PER_CALL))

    def _look_again(self, seconds: float) -> None:
        if self._looking is not None:
            self._looking.cancel()
        self._looking = asyncio.get_running_loop().call_later(seconds, self._look)


# --- asking shards ---------------------------------------------------------------------------


class Query(NamedTuple):
    """The part of each shard in a call of `size` bytes that several shards answer."""

    method: Method
    context: CallContext
    deadline: float
    size: int
    peer: str = "?"

    def part(self, request: Request, op: Op = Op.CALL, *, patient: bool = True) -> ShardCall:
        message = codec.encode_call(self.method, 0, self.context, request)
        return ShardCall(message, self.deadline, op, whole=False, patient=patient)

    async def replies(
        self,
        requests: Iterable[tuple[ShardLink, Request]],
        op: Op = Op.CALL,
        *,
        patient: bool = True,
    ) -> Replies:
        """Ask each shard its own request, all at once; return their replies."""
        asked = []
        for shard, request in requests:
            part = await aside(self.size, self.part, request, op, patient=patient)
            asked.append((shard, part))
        return await ask_all(asked)

    async def ask(self, requests: Iterable[tuple[ShardLink, Request]]) -> list[Result]:
        replies = await self.replies(requests)
        size = sum(len(reply.payload) for _, reply in replies)
        return await aside(size, results_of, self.method, replies)


async def ask_all(calls: Sequence[tuple[ShardLink, ShardCall]]) -> Replies:
    """Ask all at once; return what each shard replies to its own call."""
    replies = await asyncio.gather(*(shard.ask(call) for shard, call in calls))
    return [(shard, reply) for (shard, _), reply in zip(calls, replies, strict=True)]


# --- what shards reply --------------------------------------------------------------------------


def results_of(method: Method, replies: Replies) -> list[Result]:
    """Return what each said. Raises the first error of a shard, else names those that failed."""
    for _, reply in replies:
        if reply.status is Status.FAILED:
            codec.decode_reply(method, reply.payload)
    failed = [(shard, reply) for shard, reply in replies if reply.status is not Status.DONE]
    if failed:
        raise failure(failed)
    return [codec.decode_reply(method, reply.payload) for _, reply in replies]


def failure(failed: Replies) -> ShardConnectionFailed:
    """Name the shards that gave no answer to a caller, and each reason once."""
    shards_by_why: dict[str, list[str]] = {}
    for shard, reply in failed:
        shards_by_why.setdefault(_why(reply), []).append(shard.name)
    whys = [f"shard {', '.join(names)}: {why}" for why, names in shards_by_why.items()]
    reason = next(iter(shards_by_why)) if len(whys) == 1 else "; ".join(whys)
    return ShardConnectionFailed([shard.name for shard, _ in failed], reason)


def _why(reply: ReplyEntry) -> str:
    if reply.status is Status.LATE:
        return "did not answer in time; whether the call was carried out is not known"
    if reply.status is Status.SILENT:
        return "does not answer; whether the call was carried out is not known"
    if reply.status is Status.LOST:
        return "went away with the call in flight; whether it was carried out is not known"
    return f"{reason_of(reply)}; nothing was done there"


def reason_of(reply: ReplyEntry) -> str:
    """Say why a shard refused, or would have."""
    return reply.payload.decode()


class AllRefused(EnqueueRejected):
    """No shard took these jobs. `left`: what became of them."""

    def __init__(self, refusals: Mapping[str, str], left: str = "nothing was stored") -> None:
        names: dict[str, list[str]] = {}
        for name, reason in refusals.items():
            names.setdefault(reason, []).append(name)
        reasons = [f"shard {', '.join(shards)}: {reason}" for reason, shards in names.items()]
        super().__init__(f"overloaded: {'; '.join(reasons)}; {left}; try later")
        self.refusals = refusals
