"""The time, as an argument: nobody reads a clock but through here, so that no test sleeps.

May rely on the standard library only.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Wall time for what is stored, monotonic time for deadlines."""

    def now_ms(self) -> int:
        """Milliseconds since the epoch; never less than the call before."""
        ...

    def monotonic(self) -> float:
        """Seconds since the machine started: one scale for all processes of a machine."""
        ...


class SystemClock:
    """The machine's clocks, with wall time kept from going backwards.

    A wall clock that is set back does not freeze us: time goes on at monotonic speed from where
    it was until the wall clock has caught up, so that no claim outlives its time-out. One set
    forward is followed at once, as after a suspended machine wakes.
    """

    def __init__(self, floor_ms: int = 0) -> None:
        """`floor_ms`: a time known to have passed already, e.g. a predecessor's last."""
        self._last_ms = float(floor_ms)
        self._last_monotonic = time.monotonic()

    def now_ms(self) -> int:
        # Wall time first: a process that is held up between the two is behind wall time then, and
        # the next call mends that. The other way round it would be ahead of it for good.
        wall_ms = time.time() * 1000.0
        monotonic = time.monotonic()
        steady_ms = self._last_ms + (monotonic - self._last_monotonic) * 1000.0
        self._last_ms = wall_ms if wall_ms > steady_ms else steady_ms
        self._last_monotonic = monotonic
        return int(self._last_ms)

    monotonic = staticmethod(time.monotonic)


class FakeClock:
    """A clock that moves only when it is told to."""

    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        self._now_ms = now_ms
        self._monotonic = 1000.0

    def now_ms(self) -> int:
        return self._now_ms

    def monotonic(self) -> float:
        return self._monotonic

    def advance(self, seconds: float) -> None:
        self._now_ms += round(seconds * 1000)
        self._monotonic += seconds
