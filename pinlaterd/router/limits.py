"""How many jobs a dequeue may take: the seam at which rate limits enter.

The coordinator divides each queue's rate over the routers; a router spends its share through a
`Limits`. It relies on nothing but the standard library.
"""

from __future__ import annotations

from typing import Protocol


class Limits(Protocol):
    """Tokens for dequeues, by queue. A dequeue pays only for the jobs that it gets."""

    def take(self, queue: str, wanted: int) -> int:
        """Up to `wanted` tokens; 0 means that the dequeue is rate limited."""
        ...

    def give_back(self, queue: str, tokens: int) -> None:
        """Return tokens that were taken and not used."""
        ...


class Unlimited:
    """No queue has a limit."""

    def take(self, queue: str, wanted: int) -> int:
        return wanted

    def give_back(self, queue: str, tokens: int) -> None:
        pass
