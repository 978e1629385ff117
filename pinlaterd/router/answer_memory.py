"""The memory that answers may take, and the calls that wait for it.

Answers that are being made have a part of max_buffered_bytes, and those that clients have not read
leave less of it. A dequeue is granted a part of what is free; its shards claim no more jobs than
fit. The answer to a look-up or a dry run cannot be cut short: if it may be large, it is asked of
the shards once there is room for all of it. A call that lacks memory waits until it is the
next one of its connection, whose client has taken all answers before it. So a client that does not
read has at most one more answer made.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from pinlaterd.clock import Clock
from pinlaterd.config.schema import KIB, MIB, ServerSettings
from pinlaterd.errors import Overloaded
from pinlaterd.model import Method
from pinlaterd.router.call import Call

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
_RECORD_BYTES = 20_400
# A field 2 that is a boolean, and a field 4: includeBody of a look-up, dryRun of a dequeue.
_INCLUDE_BODY, _DRY_RUN = b"\x02\x00\x02\x01", b"\x02\x00\x04\x01"


class AnswerMemory:
    """Begins calls in the order in which they come, but for those that are not the next one."""

    def __init__(
        self, settings: ServerSettings, clock: Clock, begin: Callable[[Call], None]
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._begin = begin
        # By whether calls claim: dequeues would never leave room for a whole answer of the others.
        self._free_bytes = {
            True: settings.max_buffered_bytes // _CLAIMS_PART,
            False: settings.max_buffered_bytes // _OTHERS_PART,
        }
        self._waiting: deque[Call] = deque()
        self._looking: asyncio.TimerHandle | None = None

    def admit(self, call: Call) -> None:
        """Begin it, now or later."""
        if _claims(call):
            waits = self._room(call) < _LEAST_BYTES and not call.answer.is_next
        else:
            waits = self._size(call) > _LARGE_BYTES
        if not waits:
            self.grant(call)
            self._begin(call)
            return
        self._waiting.append(call)
        if self._looking is None:
            self._look()

    def grant(self, call: Call) -> None:
        size = self._size(call)
        claims = _claims(call)
        if claims:
            size = min(size, max(_LEAST_BYTES, self._room(call) // _DEQUEUE_PART))
        call.most_bytes = size
        self._free_bytes[claims] -= size

    def give_back(self, call: Call) -> None:
        if call.most_bytes:
            self._free_bytes[_claims(call)] += call.most_bytes
            call.most_bytes = 0

    def _size(self, call: Call) -> int:
        """The most bytes that its answer may have."""
        peek, settings = call.peek, self._settings
        if peek.method is Method.DEQUEUE:
            jobs = max(1, peek.limit) if peek.canonical else settings.max_jobs_per_call
            size = min(jobs * settings.max_job_body_bytes, settings.max_response_bytes)
        elif peek.method is Method.LOOKUP:
            body = settings.max_job_body_bytes if _INCLUDE_BODY in call.message else 0
            jobs = peek.items if peek.canonical else settings.max_jobs_per_call
            size = min(jobs * (body + _RECORD_BYTES), settings.max_frame_bytes)
        else:
            return 0
        return min(size, settings.max_buffered_bytes // _OTHERS_PART)

    def _room(self, call: Call) -> int:
        return min(self._free_bytes[_claims(call)], call.answer.room())

    def _look(self) -> None:
        """Begin what may be begun; look again soon while others wait."""
        self._looking = None
        waiting, self._waiting = self._waiting, deque()
        full = False  # those behind one that lacks room wait, too
        for call in waiting:
            if call.answer.gone:
                call.fail(Overloaded("the client has gone"))  # which nobody reads
                continue
            ready = call.answer.is_next
            if ready and not _claims(call):
                full = full or self._size(call) > self._room(call)
                ready = not full
            if ready:
                self.grant(call)
                # It could not be begun while the client had not taken the answers before it.
                call.deadline = self._clock.monotonic() + self._settings.request_timeout_ms / 1000
                self._begin(call)
            else:
                self._waiting.append(call)
        if self._waiting and self._looking is None:
            seconds = max(_LOOK_SECONDS, len(self._waiting) * _LOOK_SECONDS_PER_CALL)
            self._looking = asyncio.get_running_loop().call_later(seconds, self._look)


def _claims(call: Call) -> bool:
    return call.peek.method is Method.DEQUEUE and _DRY_RUN not in call.message
