"""The age of claims, by the time for which the shard served: no step of a clock ends a claim, and
no time in which workers could not reach the shard.

What is stored bears wall time. So a list of breaks tells which time it was so much served time ago.
Every few seconds the list and the time are noted in a file of DIR/run: a process that starts in the
same boot of the machine goes on with its predecessor's clock and breaks, whatever the wall clock
did meanwhile, and knows how long the shard was away. After a reboot, or on another machine, every
claim has its whole time-out again.

The file also tells the latest time that an owner of this folder may have reached, by whatever
clock: local ids begin with the time (engines.base.first_local_id), and must not begin before that.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from pathlib import Path
from typing import NamedTuple

import msgspec

from pinlaterd.clock import Clock
from pinlaterd.config.layout import replace_file

log = logging.getLogger(__name__)

# A turn of the loop takes a second at most; one that takes so long was no service.
_ABSENT_SECONDS = 5.0
_MOST_BREAKS = 100
# A new file costs as much as all else that an idle shard does in a second. What was served since it
# was noted counts as not served once a successor goes on: claims get so much longer at most.
_NOTE_SECONDS = 5.0
# A larger correction is noted at once: a successor's time must not begin before that of fresh jobs.
_CORRECTION_MS = 10
# An owner of an earlier boot may have gone on for so long after it noted the time.
_UNNOTED_MS = 10_000
_LONG_AGO_MS = 0
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class _Break(NamedTuple):
    """A moment of the served time at which now_ms changed by something else than served time."""

    served: float  # seconds
    before_ms: int
    after_ms: int


class _Noted(msgspec.Struct):
    """The content of the file. All but `boot` is as of when it was written."""

    boot: str
    elapsed: float
    now_ms: int
    latest_ms: int = 0
    absent: float = 0.0
    breaks: list[_Break] = []


class Timekeeper:
    """The served time of one shard. `file` is where the time is noted; None: nowhere."""

    def __init__(self, clock: Clock, file: Path | None = None) -> None:
        self._clock = clock
        self._file = file
        self._breaks: deque[_Break] = deque(maxlen=_MOST_BREAKS)
        self._absent = 0.0  # seconds of elapsed time that were not served
        self._begun = False
        self._alive: tuple[float, int] | None = None  # elapsed, now_ms when it last served
        self._latest = (0.0, 0)  # elapsed when noted, and the latest time of any owner then
        self._unknown_since = 0.0  # served time: older claims may bear times still to come

    # --- begin and end of service ------------------------------------------------------------

    def resume(self) -> None:
        """Go on with the clock of a predecessor in this boot, before the store is opened."""
        if self._begun or self._file is None:
            return
        with contextlib.suppress(OSError, ValueError):
            noted = msgspec.json.decode(self._file.read_bytes(), type=_Noted)
            latest_ms = noted.latest_ms or noted.now_ms
            self._latest = (self._clock.elapsed(), latest_ms + _UNNOTED_MS)
            since = self._clock.elapsed() - noted.elapsed
            if noted.boot and noted.boot == _boot_id() and since >= 0:
                self._clock.resume(noted.now_ms + round(since * 1000))
                self._latest = (noted.elapsed, latest_ms)
                self._alive = (noted.elapsed, noted.now_ms)
                self._absent, self._breaks = noted.absent, deque(noted.breaks, _MOST_BREAKS)

    def latest_ms(self) -> int:
        """Return the time, or that of the owner that was furthest ahead, as if it served still."""
        elapsed, latest_ms = self._latest
        now_ms = self._clock.now_ms()
        if latest_ms:
            now_ms = max(now_ms, latest_ms + round((self._clock.elapsed() - elapsed) * 1000))
        return now_ms

    def begin(self) -> None:
        """Begin to count: the store is open."""
        elapsed, now_ms = self._clock.elapsed(), self._clock.now_ms()
        since, before_ms = self._alive or (elapsed, _LONG_AGO_MS)
        self._break_off(since, before_ms, elapsed, now_ms)
        self._unknown_since = self._served(elapsed)
        self._begun = True
        self.note()

    def awake(self) -> None:
        """Note that the process runs: once a second while the shard serves, and before ages are
        computed, since it may have stood still."""
        elapsed, now_ms = self._clock.elapsed(), self._clock.now_ms()
        if self._alive is not None and elapsed - self._alive[0] > _ABSENT_SECONDS:
            log.warning("did not run for %.1f s; claims get that time", elapsed - self._alive[0])
            self._break_off(*self._alive, elapsed, now_ms)
        self._alive = (elapsed, now_ms)

    def tick(self) -> bool:
        """Look at the clock, once a second. True if the time went back."""
        self.awake()
        before_ms, warning = self._clock.now_ms(), self._clock.warning
        followed = self._clock.look()
        if self._clock.warning != warning and self._clock.warning:
            log.warning("%s", self._clock.warning)
        now_ms = self._clock.now_ms()
        if followed:
            elapsed = self._clock.elapsed()
            self._break_off(elapsed, before_ms, elapsed, now_ms)
            if now_ms < before_ms:
                self._unknown_since = self._served(elapsed)
        corrected = now_ms - before_ms > _CORRECTION_MS
        if followed or corrected or self._clock.elapsed() - self._latest[0] >= _NOTE_SECONDS:
            self.note()
        return followed and now_ms < before_ms

    def served(self) -> float:
        """Return the served time, in seconds; for differences."""
        self.awake()
        return self._served(self._clock.elapsed())

    # --- ages ----------------------------------------------------------------------------------

    def claimed_before_ms(self, timeout_ms: int) -> int:
        """Return a time: claims renewed before it are older than `timeout_ms`; if the clock was set
        back, perhaps not all that are."""
        self.awake()
        elapsed, end_ms = self._clock.elapsed(), self._clock.now_ms()
        end = self._served(elapsed)
        at, most_ms = end - timeout_ms / 1000, end_ms
        for served, before_ms, after_ms in reversed(self._breaks):
            if at >= served:
                break
            # What was claimed since then bears times from here on.
            most_ms = min(most_ms, after_ms)
            end, end_ms = served, before_ms
        return max(0, min(most_ms, end_ms - round((end - at) * 1000)))

    def known_for(self, timeout_ms: int) -> bool:
        """Tell whether all claims of a time-out's age bear times of the clock as it goes now: those
        that bear times still to come are from before it was set back."""
        self.awake()
        return self._served(self._clock.elapsed()) - self._unknown_since >= timeout_ms / 1000

    # --- within ------------------------------------------------------------------------------

    def _served(self, elapsed: float) -> float:
        return elapsed - self._absent

    def _break_off(self, since: float, before_ms: int, until: float, after_ms: int) -> None:
        """Count the time from `since` to `until` (elapsed) as not served."""
        overflows = len(self._breaks) == _MOST_BREAKS
        self._breaks.append(_Break(self._served(since), before_ms, after_ms))
        if overflows:  # how old claims from before the oldest one are is not known any more
            self._breaks[0] = self._breaks[0]._replace(before_ms=_LONG_AGO_MS)
        self._absent += until - since
        self._alive = (until, after_ms)

    def note(self) -> None:
        """Note the clock for a successor; nothing before `begin`."""
        if self._file is None or not self._begun:
            return
        self.awake()
        elapsed, now_ms = self._clock.elapsed(), self._clock.now_ms()
        self._latest = (elapsed, self.latest_ms())
        breaks = list(self._breaks)
        noted = _Noted(_boot_id(), elapsed, now_ms, self._latest[1], self._absent, breaks)
        try:
            replace_file(self._file, msgspec.json.encode(noted))
        except OSError as error:
            log.warning("can't note the time in %s: %s", self._file, error)


def _boot_id() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return ""
