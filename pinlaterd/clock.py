"""The time, as an argument: nobody reads a clock but through here, so that no test sleeps.

May rely on the standard library only.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

# A difference to the machine's wall clock up to which it is followed at once.
STEP_MS = 1000.0
# How long a step of the wall clock has to last until it is followed.
HOLD_SECONDS = 300.0
# How long a step is told of after it has ended.
_TOLD_SECONDS = 3600.0
_READINGS = 5
_READING_SECONDS = 0.0005
_POLL_SECONDS = 0.05
_EARLY_SECONDS = 0.001


class Clock:
    """Wall time for what is stored, monotonic time for deadlines.

    Wall time runs with elapsed time, and follows steps of the machine's clock with care: a
    difference of up to a second, as NTP makes it, at once; a step once it has lasted for
    HOLD_SECONDS, so that a clock that jumps and comes back changes nothing."""

    def __init__(self) -> None:
        # The step of the machine's wall clock that is under way, or was not long ago; else "".
        self.warning = ""
        # How far the machine's wall clock was stepped, as far as this is not followed.
        self.step_ms = 0.0
        self._offset_ms = time.time() * 1000 - self.elapsed() * 1000
        self._last_ms = 0.0  # what small corrections never go back behind
        self._step_since: float | None = None  # the one that is not followed yet
        self._told_until = 0.0

    # Seconds since the machine started: one scale for all processes of a machine.
    monotonic = staticmethod(time.monotonic)

    def elapsed(self) -> float:
        """Return monotonic seconds that include the time for which the machine was suspended."""
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def now_ms(self) -> int:
        """Return milliseconds since the epoch. Less than the call before only after `look`."""
        # `elapsed`, without the cost of a call: this is asked several times for each of a client's.
        now_ms = time.clock_gettime(time.CLOCK_BOOTTIME) * 1000 + self._offset_ms
        if now_ms < self._last_ms:
            return int(self._last_ms)
        self._last_ms = now_ms
        return int(now_ms)

    def resume(self, now_ms: int) -> None:
        """Go on from this time, which a predecessor's clock would show now."""
        self._offset_ms = now_ms - self.elapsed() * 1000
        self._last_ms = 0.0

    def look(self) -> bool:
        """Compare with the machine's wall clock; once a second. True if a step was followed."""
        difference_ms, elapsed = self._difference()
        if abs(difference_ms) <= STEP_MS:
            self._offset_ms += difference_ms
            self._end_step(elapsed)
            return False
        if self._step_since is None or abs(difference_ms - self.step_ms) > STEP_MS:
            self._step_since = elapsed
        self.step_ms = difference_ms
        stepped = f"the machine's clock was stepped by {_seconds(difference_ms)} s"
        if elapsed - self._step_since < HOLD_SECONDS:
            self.warning = f"{stepped}; this is followed if it lasts for {HOLD_SECONDS:.0f} s"
            return False
        self._offset_ms += difference_ms
        self._last_ms, self.step_ms = 0.0, 0.0
        self._step_since = None
        self._tell(stepped, elapsed)
        return True

    def _end_step(self, elapsed: float) -> None:
        if self._step_since is not None:
            stepped = f"the machine's clock was stepped by {_seconds(self.step_ms)} s"
            self._step_since, self.step_ms = None, 0.0
            self._tell(f"{stepped} and came back", elapsed)
        elif elapsed > self._told_until:
            self.warning = ""

    def _tell(self, text: str, elapsed: float) -> None:
        self.warning, self._told_until = text, elapsed + _TOLD_SECONDS

    def _difference(self) -> tuple[float, float]:
        """Return by how much the machine's wall clock is ahead of ours, in ms, and the elapsed
        time. Read again after a pause between two readings, which would count as a step."""
        for _ in range(_READINGS):
            before, wall, after = self.elapsed(), time.time(), self.elapsed()
            if after - before <= _READING_SECONDS:
                break
        return wall * 1000 - (after * 1000 + self._offset_ms), after


def until_full(seconds: float, now: float) -> float:
    """Return the seconds from `now` (monotonic) to the next multiple of `seconds`, which comes at
    once for all processes of a machine: one that hears of others then wakes up once. A timer may
    end early by less than a millisecond, and does not end again for its multiple."""
    return seconds - (now + _EARLY_SECONDS) % seconds + _EARLY_SECONDS


def polls(seconds: float) -> Iterator[bool]:
    """Pace a loop that blocks, and ends by itself: yield whether it has taken longer than it
    should, `seconds`, with a pause before each further time."""
    deadline = time.monotonic() + seconds
    while True:
        yield time.monotonic() >= deadline
        time.sleep(_POLL_SECONDS)


def _seconds(ms: float) -> str:
    return f"{ms / 1000:+.0f}"
