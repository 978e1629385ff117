"""Whether a shard's store can be relied on, judged by how its last uses went.

Pure: outcomes go in, a verdict comes out. A store is healthy until it fails several times in a
row, or too often within a window, or takes much longer than it is used to; then it is degraded,
with the reason, until a few uses in a row have gone well. Routers send a degraded shard no new work
as long as others can take it; acks still come, and a probe every second. What a store refuses
beyond doubt, because it is full, is no failure of it: its jobs have to go, so that there is room
again.

Times are seconds, by any clock that only goes forward.
"""

from __future__ import annotations

from collections import Counter

from pinlaterd.config.schema import ServerSettings

# Fewer uses say nothing of a share.
LEAST_OUTCOMES = 10
# Uses in a row that have to go well before a degraded store is trusted again.
GOOD_IN_A_ROW = 3
# After so many uses it is known what is normal. Of that mean, each use changes this part.
LEAST_USES = 100
_NORMAL_PART = 0.002
# Of the recent mean a use changes this part at least; the rarer they are, the more, for a slow
# store has few, and what is older than so many seconds is past. Half at most: one is an accident.
_RECENT_PART, _RECENT_SECONDS, _MOST_RECENT_PART = 0.1, 4.0, 0.5


class StoreHealth:
    """The verdict on one store. `reason` is "" while it is healthy."""

    def __init__(self, server: ServerSettings) -> None:
        """Its limits are the settings `health_…`."""
        self._settings = server
        self.reason = ""
        self._failures_in_row = 0
        self._good_in_row = 0
        self._used: Counter[int] = Counter()  # by second, within the window
        self._failed: Counter[int] = Counter()
        self._uses = 0  # that went well while it was healthy, ever
        self._normal = 0.0
        self._recent = 0.0
        self._last_use = 0.0  # when that was

    @property
    def degraded(self) -> bool:
        return bool(self.reason)

    def succeeded(self, seconds: float, now: float) -> None:
        """A use went well, and took so long."""
        self._failures_in_row = 0
        second = int(now)
        if second in self._used:
            self._used[second] += 1
        else:
            self._note(second, failures=0)
        part = max(_RECENT_PART, (now - self._last_use) / _RECENT_SECONDS)
        self._recent += min(part, _MOST_RECENT_PART) * (seconds - self._recent)
        self._last_use = now
        if self.reason:
            slow = self._uses >= LEAST_USES and self._is_slow(seconds)
            self._good_in_row = 0 if slow else self._good_in_row + 1
            if self._good_in_row >= GOOD_IN_A_ROW:
                self._recover()
            return
        self._uses += 1
        part = max(1 / self._uses, _NORMAL_PART)
        if self._uses >= LEAST_USES and self._is_slow(self._recent):
            self.reason = (
                f"its store takes {self._recent * 1000:.0f} ms for a commit, "
                f"{self._normal * 1000:.0f} ms is normal"
            )
            return
        self._normal += part * (seconds - self._normal)

    def failed(self, now: float) -> None:
        """A use failed."""
        self._failures_in_row += 1
        self._good_in_row = 0
        self._note(int(now), failures=1)
        if self.reason:
            return
        settings = self._settings
        uses, failures = self._used.total(), self._failed.total()
        if self._failures_in_row >= settings.health_failures_in_row:
            self.reason = f"its store failed {self._failures_in_row} times in a row"
        elif uses >= LEAST_OUTCOMES and failures >= settings.health_failure_share * uses:
            window = f"{settings.health_window_seconds:g} s"
            self.reason = f"its store failed {failures} of {uses} times within {window}"

    def _is_slow(self, seconds: float) -> bool:
        settings = self._settings
        least = settings.health_slow_ms / 1000
        return seconds > max(least, settings.health_slow_factor * self._normal)

    def _note(self, second: int, failures: int) -> None:
        if second not in self._used:
            before = second - self._settings.health_window_seconds
            for past in [past for past in self._used if past < before]:
                del self._used[past], self._failed[past]
        self._used[second] += 1
        self._failed[second] += failures

    def _recover(self) -> None:
        self.reason = ""
        self._good_in_row = 0
        self._recent = self._normal
        self._used.clear()
        self._failed.clear()
