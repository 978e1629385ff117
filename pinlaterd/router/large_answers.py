"""Calls whose answers may be large, begun as memory allows.

Such an answer is asked of the shards only when it is the next one of its connection, whose client
has taken all before it, and when the answers that are being made, and those that nobody has read
yet, leave room for it. So a client that does not read has at most one of them made.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from pinlaterd.clock import Clock
from pinlaterd.config.schema import MIB, ServerSettings
from pinlaterd.errors import Overloaded
from pinlaterd.model import Method
from pinlaterd.router.call import Call

# Smaller ones are bounded well enough by how many calls a connection may have in hand.
_LARGE_BYTES = 2 * MIB
# Of max_buffered_bytes: a router has an answer up to four times while it makes it (received,
# decoded, merged, encoded).
_MAKING_PART = 4
_LOOK_SECONDS = 0.02
# What a look-up tells of a job beside its body: 5,000 characters of custom status, of 4 bytes.
_RECORD_BYTES = 20_400
# A field 2 that is a boolean, and a field 4: includeBody of a look-up, dryRun of a dequeue.
_INCLUDE_BODY, _DRY_RUN = b"\x02\x00\x02\x01", b"\x02\x00\x04\x01"


class LargeAnswers:
    """Begins calls in the order in which they came, but for those whose connection is not ready."""

    def __init__(
        self, settings: ServerSettings, clock: Clock, begin: Callable[[Call], None]
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._begin = begin
        self._most_bytes = settings.max_buffered_bytes // _MAKING_PART
        self._making: dict[Call, int] = {}  # those begun, and how large their answers may be
        self._waiting: deque[tuple[Call, int]] = deque()
        self._looking: asyncio.TimerHandle | None = None

    def takes(self, call: Call) -> bool:
        """Whether it is large: then it is begun now or later."""
        size = self._size(call)
        if size <= _LARGE_BYTES:
            return False
        self._waiting.append((call, size))
        self._look()
        return True

    def ended(self, call: Call) -> None:
        self._making.pop(call, None)

    def _size(self, call: Call) -> int:
        """The most bytes that its answer may have."""
        peek, settings = call.peek, self._settings
        if peek.method is Method.LOOKUP:
            body = settings.max_job_body_bytes if _INCLUDE_BODY in call.message else 0
            jobs = peek.items if peek.canonical else settings.max_jobs_per_call
            return min(jobs * (body + _RECORD_BYTES), settings.max_frame_bytes)
        if peek.method is Method.DEQUEUE and _DRY_RUN in call.message:
            jobs = peek.limit if peek.canonical else settings.max_jobs_per_call
            return min(jobs * settings.max_job_body_bytes, settings.max_response_bytes)
        return 0

    def _look(self) -> None:
        """Begin what may be begun; look again soon while others wait."""
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None
        waiting, self._waiting = self._waiting, deque()
        full = False  # those behind one that lacks room wait, too
        for call, size in waiting:
            if call.answer.gone:
                call.fail(Overloaded("the client has gone"))  # which nobody reads
            elif full or not call.answer.is_next:
                self._waiting.append((call, size))
            elif self._has_room(call, size):
                self._making[call] = size
                # It could not be begun while the client had not taken the answers before it.
                call.deadline = self._clock.monotonic() + self._settings.request_timeout_ms / 1000
                self._begin(call)
            else:
                full = True
                self._waiting.append((call, size))
        if self._waiting and self._looking is None:
            loop = asyncio.get_running_loop()
            self._looking = loop.call_later(_LOOK_SECONDS, self._look)

    def _has_room(self, call: Call, size: int) -> bool:
        making = sum(self._making.values())
        if making and making + size > self._most_bytes:
            return False
        return call.answer.has_room_for(making + size)
