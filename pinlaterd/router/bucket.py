"""Token buckets, and how much is wanted of them. Pure: the time (monotonic seconds) is passed in.

A bucket never adds small amounts to a running total: its level is reckoned from the moment at
which it was last full, or got its rate, and from the whole tokens spent since. So it neither
drifts over hours nor loses anything to being looked at often.
"""

from __future__ import annotations

import math
from collections import deque

# Far below a token; makes up for what floating point loses around a whole one.
_EPSILON = 1e-9
_MARGIN_SECONDS = 0.5
_SLOT_SECONDS = 0.2
_SLOTS = 5


class TokenBucket:
    """Fills by `rate` tokens a second, holds one second's worth, but at least one token.

    It starts empty. At rate 0 it holds nothing. On top of one token it always keeps what half a
    second brings, which is less than another one: a slow bucket that held one and no more would
    lose whatever comes between the moment that it is full and the next call."""

    __slots__ = ("_level", "_since", "_spent", "rate")

    def __init__(self, rate: float, now: float) -> None:
        self.rate = rate
        self._level = 0.0
        self._since = now
        self._spent = 0

    @property
    def capacity(self) -> float:
        return max(1.0 + _MARGIN_SECONDS * self.rate, self.rate) if self.rate > 0 else 0.0

    def tokens(self, now: float) -> float:
        level = self._level + self.rate * (now - self._since) - self._spent
        capacity = self.capacity
        if level > capacity:
            self._anchor(capacity, now)
            return capacity
        return level

    def take(self, wanted: int, now: float) -> int:
        """Up to `wanted` whole tokens."""
        taken = min(wanted, math.floor(self.tokens(now) + _EPSILON))
        if taken <= 0:
            return 0
        self._spent += taken
        return taken

    def give_back(self, tokens: int, now: float) -> None:
        """What would make the bucket overflow is lost."""
        self._spent -= tokens
        self.tokens(now)

    def credit(self, tokens: float, now: float) -> None:
        self._anchor(min(self.capacity, self.tokens(now) + tokens), now)

    def set_rate(self, rate: float, now: float) -> float:
        """Fill by `rate` from now on. Returns the tokens that the bucket can't hold any more."""
        level = self.tokens(now)
        self.rate = rate
        kept = min(level, self.capacity)
        self._anchor(kept, now)
        return level - kept

    def seconds_to_token(self, now: float) -> float:
        """How long until a whole token is there; infinity if none will come."""
        missing = 1.0 - self.tokens(now) - _EPSILON
        if missing <= 0:
            return 0.0
        return missing / self.rate if self.rate > 0 else math.inf

    def _anchor(self, level: float, now: float) -> None:
        self._level, self._since, self._spent = level, now, 0


class DemandMeter:
    """Jobs wanted within the last second or so."""

    __slots__ = ("_slots",)

    def __init__(self) -> None:
        self._slots: deque[tuple[int, int]] = deque()  # (number of the slot, jobs in it)

    def add(self, jobs: int, now: float) -> None:
        number = int(now / _SLOT_SECONDS)
        slots = self._slots
        if slots and slots[-1][0] == number:
            slots[-1] = (number, slots[-1][1] + jobs)
        else:
            slots.append((number, jobs))

    def per_second(self, now: float) -> float:
        first = int(now / _SLOT_SECONDS) - _SLOTS + 1
        while self._slots and self._slots[0][0] < first:
            self._slots.popleft()
        return sum(jobs for _, jobs in self._slots) / (now - first * _SLOT_SECONDS)
