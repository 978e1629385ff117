"""Which calls may begin: how many are in flight, how many wait, and the memory of their answers.

Answers that are being made have a part of max_buffered_bytes, and those that clients have not read
leave less of it. A dequeue is granted a part of what is free; its shards claim no more jobs than
fit. The answer to a look-up, a scan or a dry run cannot be cut short: if it may be large, it is
asked of the shards once there is room for all of it. A call that lacks memory waits until it is the
next one of its connection, whose client has taken all answers before it, or a dequeue until there
is room; a dequeue that has waited for jobs is answered without any. So a client that does not read
has at most one more answer made.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable

from pinlaterd.config.schema import KIB, MIB
from pinlaterd.errors import EnqueueRejected, ErrorCode, Overloaded
from pinlaterd.model import Method, ScanRequest
from pinlaterd.router.call import Call, Shared
from pinlaterd.wire.envelope import SCAN_BYTES

# Smaller ones are bounded well enough by how many calls a connection may have in flight.
_LARGE_BYTES = 2 * MIB
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
# includeBody of a look-up is field 2, dryRun of a dequeue field 4; each a boolean, true if not 0.
_INCLUDES_BODY = re.compile(rb"\x02\x00\x02[^\x00]", re.DOTALL).search
true_dry_run = re.compile(rb"\x02\x00\x04[^\x00]", re.DOTALL).search
# Of a dequeue, from dryRun on: that, coverage, maxWaitMillis, and the ends of two structs.
_DEQUEUE_END_BYTES = 4 + 11 + 7 + 2
# The limit of a scan is field 6, an i32.
_DEFAULT_SCAN_LIMIT: int = ScanRequest._field_defaults["limit"]
_SCAN_LIMITS = re.compile(rb"\x08\x00\x06(.{4})", re.DOTALL).findall
_MSEC_NAMES = {method: f"PinLaterService.{method}_msec" for method in Method}


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
        """Whether it may begin now; else it is begun later, or has failed."""
        self.in_flight += 1
        method = call.peek.method
        if self.in_flight > self._most_in_flight:
            overloaded = Overloaded(f"{self._most_in_flight} calls are in flight already")
            call.fail(
                EnqueueRejected(overloaded.message) if method is Method.ENQUEUE else overloaded
            )
            return False
        if method is Method.DEQUEUE:
            at = len(call.message) - _DEQUEUE_END_BYTES if call.peek.canonical else 0
            call.claims = true_dry_run(call.message, at) is None
        elif method is not Method.LOOKUP and method is not Method.SCAN:
            return True
        size = self._grantable(call)
        if size if call.claims else size <= _LARGE_BYTES:
            call.granted_bytes = size
            self._free_bytes[call.claims] -= size
            return True
        self._lacking[call] = False
        if self._looking is None:
            self._look()
        return False

    def suspend(self, call: Call) -> None:
        """It waits from now on. Raises Overloaded if too many do."""
        if self.waiting >= self._most_waiting:
            raise Overloaded(
                f"{self.waiting} dequeues wait already, as many as max_waiting_dequeues in "
                "etc/pinlaterd.yaml allows"
            )
        self.in_flight -= 1
        self.waiting += 1
        self._release(call)

    def resume(self, call: Call) -> None:
        """A claiming dequeue that is not the next one of its connection may be granted nothing."""
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
        """All that its answer may need; of a claiming dequeue, what it may bring now, 0 if it has
        to wait for room."""
        if not call.claims:
            return self._size(call)
        room = min(self._free_bytes[True], call.room())
        if room < _LEAST_BYTES and not call.is_next:
            return 0
        return min(self._size(call), max(_LEAST_BYTES, room // _DEQUEUE_PART))

    def _size(self, call: Call) -> int:
        """The most bytes that its answer may have."""
        peek, settings = call.peek, self._shared.settings
        if peek.method is Method.DEQUEUE:
            jobs = max(1, peek.limit) if peek.canonical else settings.max_jobs_per_call
            of_a_job = settings.max_job_body_bytes + _CLAIM_BYTES
            size = min(jobs * of_a_job, settings.max_response_bytes)
        elif peek.method is Method.LOOKUP:
            body = settings.max_job_body_bytes if _INCLUDES_BODY(call.message) else 0
            jobs = peek.items if peek.canonical else settings.max_jobs_per_call
            size = min(jobs * (body + _RECORD_BYTES), settings.max_frame_bytes)
        else:
            jobs = min(_scan_limit(call.message), settings.scan_limit)
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
                # It could not be begun while the client had not taken the answers before it.
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


def _scan_limit(message: bytes) -> int:
    """The largest that the message may mean: what looks like a limit may stand in a text, too."""
    limits = [int.from_bytes(limit, "big", signed=True) for limit in _SCAN_LIMITS(message)]
    return max([_DEFAULT_SCAN_LIMIT, *limits])
