"""How much all connections together may hold back: unfinished messages and unread answers.

The sum is kept as an estimate that only grows, one addition for each piece of data, and counted
exactly whenever the estimate reaches the next mark. Above half the limit not all may go on, but
only so many that what their unfinished messages still lack fits into what is left: those first
that lack the least, since they are the soonest to give their memory back. One unfinished message
may always go on, so that there is no deadlock; the limit may be exceeded by that one, and by what
was on its way. Who may go on and does not is for the server to close. Pure: it knows holders, not
sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final, Protocol

# The sum is counted again each time that this part of the limit has come in.
_COUNTS_PER_LIMIT: Final = 64


class Holder(Protocol):
    """A connection, as far as its memory goes."""

    def held_bytes(self) -> int: ...

    def missing_bytes(self) -> int:
        """What its unfinished message still lacks, as far as is known; 0 if it has none."""
        ...

    def hold(self, held: bool) -> None:  # noqa: FBT001 - two states, and that is what it is about
        """Whether to be read from no more. Safe to repeat."""
        ...


class BufferBudget:
    """Divides `max_bytes` among the holders that `holders` gives."""

    def __init__(self, max_bytes: int, holders: Callable[[], Collection[Holder]]) -> None:
        self._max_bytes = max_bytes
        self._holders = holders
        self._step = max(1, max_bytes // _COUNTS_PER_LIMIT)
        self._estimate = self._counted = 0
        self._mark = max_bytes // 2
        self.crowded = False  # somebody has to wait for memory

    def charge(self, size: int) -> None:
        """So many bytes more may be held."""
        self._estimate += size
        if self._estimate > self._mark:
            self.count()

    def room(self) -> int:
        """How many bytes more may be held beside what is, with a half left to others."""
        half = self._max_bytes // 2
        if self._estimate > half // 2 and self._estimate - self._counted > self._step:
            self.count()
        return max(0, half - self._estimate)

    def count(self) -> None:
        """Count exactly, and say who may go on."""
        holders = self._holders()
        total = sum(holder.held_bytes() for holder in holders)
        self._estimate = self._counted = total
        self._mark = max(self._max_bytes // 2, total + self._step)
        if total > self._max_bytes // 2:
            self._admit(holders, self._max_bytes - total)
        elif self.crowded:
            self.crowded = False
            for holder in holders:
                holder.hold(False)

    def _admit(self, holders: Collection[Holder], room: int) -> None:
        self.crowded = False
        first = True
        lacking = sorted(
            ((holder.missing_bytes(), holder) for holder in holders), key=lambda each: each[0]
        )
        for missing, holder in lacking:
            room -= missing
            waits = room < 0 and not (first and missing)
            holder.hold(waits)
            self.crowded |= waits
            if missing:
                first = False
