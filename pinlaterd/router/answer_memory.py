"""The memory that answers may take, and the calls that wait for it.

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

from pinlaterd.clock import Clock
from pinlaterd.config.schema import KIB, MIB, ServerSettings
from pinlaterd.errors import Overloaded
from pinlaterd.model import Method, ScanRequest
from pinlaterd.router.call import Call
from pinlaterd.wire.envelope import SCAN_BYTES

# Smaller ones are bounded well enough by how many calls a connection may have in hand.
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
# What a dequeue does, by the largest count of it.
_CLAIM_BYTES = 512
# includeBody of a look-up is field 2, dryRun of a dequeue field 4; each a boolean, true if not 0.
_INCLUDES_BODY = re.compile(rb"\x02\x00\x02[^\x00]", re.DOTALL).search
_DRY_RUN = b"\x02\x00\x04"
# The limit of a scan is field 6, an i32.
_DEFAULT_SCAN_LIMIT: int = ScanRequest._field_defaults["limit"]
_SCAN_LIMITS = re.compile(rb"\x08\x00\x06(.{4})", re.DOTALL).findall
_TRUE_DRY_RUN = re.compile(_DRY_RUN + rb"[^\x00]", re.DOTALL).search


class AnswerMemory:
    """Begins calls in the order in which they come, but for those that are not the next one."""

    def __init__(
        self,
        settings: ServerSettings,
        clock: Clock,
        begin: Callable[[Call], None],
        count_shards: Callable[[], int],
    ) -> None:
        self.settings = settings  # others take its place when they change live
        self._clock = clock
        self._begin = begin
        self._count_shards = count_shards
        self._most_bytes = settings.max_buffered_bytes // _OTHERS_PART
        # By whether calls claim: dequeues would never leave room for a whole answer of the others.
        self._free_bytes = {
            True: settings.max_buffered_bytes // _CLAIMS_PART,
            False: self._most_bytes,
        }
        self._waiting: dict[Call, bool] = {}  # whether it has been the next of its connection
        self._looking: asyncio.Handle | None = None

    def admit(self, call: Call) -> None:
        """Begin it, now or later."""
        message = call.message
        call.claims = call.peek.method is Method.DEQUEUE and not (
            _DRY_RUN in message and _TRUE_DRY_RUN(message)
        )
        size = self._grantable(call)
        waits = size == 0 if call.claims else size > _LARGE_BYTES
        if not waits:
            self._give(call, size)
            self._begin(call)
            return
        self._waiting[call] = False
        if self._looking is None:
            self._look()

    def grant(self, call: Call) -> None:
        """A claiming dequeue that is not the next one of its connection may get nothing."""
        self._give(call, self._grantable(call))

    def _give(self, call: Call, size: int) -> None:
        call.most_bytes = size
        self._free_bytes[call.claims] -= size

    def give_back(self, call: Call) -> None:
        self._free_bytes[call.claims] += call.most_bytes
        call.most_bytes = 0
        if self._waiting and not call.claims:
            self._look_again(0)

    def _grantable(self, call: Call) -> int:
        """All that its answer may need; of a claiming dequeue, what it may bring now, 0 if it has
        to wait for room."""
        if not call.claims:
            return self._size(call)
        room = self._room(call)
        if room < _LEAST_BYTES and not call.answer.is_next:
            return 0
        return min(self._size(call), max(_LEAST_BYTES, room // _DEQUEUE_PART))

    def _size(self, call: Call) -> int:
        """The most bytes that its answer may have."""
        peek, settings = call.peek, self.settings
        if peek.method is Method.DEQUEUE:
            jobs = max(1, peek.limit) if peek.canonical else settings.max_jobs_per_call
            size = min(
                jobs * (settings.max_job_body_bytes + _CLAIM_BYTES), settings.max_response_bytes
            )
        elif peek.method is Method.LOOKUP:
            body = settings.max_job_body_bytes if _INCLUDES_BODY(call.message) else 0
            jobs = peek.items if peek.canonical else settings.max_jobs_per_call
            size = min(jobs * (body + _RECORD_BYTES), settings.max_frame_bytes)
        elif peek.method is Method.SCAN:
            jobs = min(_scan_limit(call.message), settings.scan_limit)
            statuses = min(jobs * _STATUS_BYTES, self._count_shards() * SCAN_BYTES)
            size = statuses + jobs * (_RECORD_BYTES - _STATUS_BYTES)
        else:
            return 0
        return min(size, self._most_bytes)

    def _room(self, call: Call) -> int:
        return min(self._free_bytes[call.claims], call.answer.room())

    def _look(self) -> None:
        """Begin what may be begun; look again soon while others wait."""
        self._looking = None
        now = self._clock.monotonic()
        full = False  # those behind one that lacks room wait, too
        for call, was_next in list(self._waiting.items()):
            if call.answer.gone:
                del self._waiting[call]
                call.fail(Overloaded("the client has gone"))  # which nobody reads
                continue
            # Thousands may wait: sizes are worked out for those only that may begin.
            size = self._grantable(call) if call.claims or call.answer.is_next else 0
            ready = size > 0
            if ready and not was_next:
                # It could not be begun while the client had not taken the answers before it.
                call.deadline = now + self.settings.request_timeout_ms / 1000
                self._waiting[call] = True
            if ready and not call.claims:
                full |= size > self._room(call)
                ready = not full
            if ready:
                del self._waiting[call]
                self._give(call, size)
                self._begin(call)
            elif was_next and call.deadline <= now:
                del self._waiting[call]
                call.fail(Overloaded("answers that clients have not read take the memory for this"))
        if self._waiting:
            self._look_again(max(_LOOK_SECONDS, len(self._waiting) * _LOOK_SECONDS_PER_CALL))

    def _look_again(self, seconds: float) -> None:
        if self._looking is not None:
            self._looking.cancel()
        self._looking = asyncio.get_running_loop().call_later(seconds, self._look)


def _scan_limit(message: bytes) -> int:
    """The largest that the message may mean: what looks like a limit may stand in a text, too."""
    limits = [int.from_bytes(limit, "big", signed=True) for limit in _SCAN_LIMITS(message)]
    return max([_DEFAULT_SCAN_LIMIT, *limits])
