"""How much all connections together may hold back: unfinished messages and unread answers.

The sum is kept as an estimate that only grows, one addition for each piece of data, and counted
exactly whenever the estimate reaches the next mark. Above half the limit, those who hold the most
are read from no more, so many of them that what the others hold fits into what is left: the
closer to the limit, the fewer may go on, and at the limit nobody. So the limit holds, and it is
the largest who wait for it. Pure: it knows holders, not sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final, Protocol

# The sum is counted again each time that this part of the limit has come in.
_COUNTS_PER_LIMIT: Final = 64


class Holder(Protocol):
    """A connection, as far as its memory goes."""

    def held_bytes(self) -> int: ...

    def hold(self, held: bool) -> None:  # noqa: FBT001 - two states, and that is what it is about
        """Whether to be read from no more. Safe to repeat."""
        ...


class BufferBudget:
    """Divides `max_bytes` among the holders that `holders` gives."""

    def __init__(self, max_bytes: int, holders: Callable[[], Collection[Holder]]) -> None:
        self._max_bytes = max_bytes
        self._holders = holders
        self._step = max(1, max_bytes // _COUNTS_PER_LIMIT)
        self._estimate = 0
        self._mark = max_bytes // 2
        self._strained = False

    @property
    def strained(self) -> bool:
        """Whether anybody may be waiting for memory: then `count` again soon."""
        return self._strained

    def charge(self, size: int) -> None:
        """So many bytes more may be held."""
        self._estimate += size
        if self._estimate > self._mark:
            self.count()

    def count(self) -> None:
        """Count exactly, and say who may go on."""
        sizes = sorted(
            ((holder.held_bytes(), holder) for holder in self._holders()), key=lambda each: each[0]
        )
        total = sum(size for size, _ in sizes)
        self._estimate = total
        self._mark = max(self._max_bytes // 2, total + self._step)
        self._strained = total > self._max_bytes // 2
        left = self._max_bytes - total if self._strained else self._max_bytes
        for size, holder in sizes:
            left -= size
            holder.hold(left < 0)
