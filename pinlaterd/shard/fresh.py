"""Payloads of jobs that were just enqueued and are due soon, so that a claim need not read them.

Bounded in bytes: when full, newcomers are not kept. That is the right way round, for those here
are ahead of them in their queues. A payload here is what the store holds: a PENDING job's body and
attempts don't change, and whoever deletes or claims the job takes it out of here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pinlaterd.model import Payload

# A Payload, the header of its body, its id and its place in a dict (CPython 3.11).
PAYLOAD_OVERHEAD_BYTES = 240


class FreshPayloads:
    """Payloads by queue, priority and local id."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held_bytes = 0
        self._lines: dict[tuple[str, int], dict[int, Payload]] = {}

    @property
    def held_bytes(self) -> int:
        return self._held_bytes

    def keep(
        self, queue: str, priority: int, local_ids: Sequence[int], payloads: Sequence[Payload]
    ) -> None:
        """Keep them all, or none if there is no room."""
        size = sum([len(payload[0]) for payload in payloads])
        size += PAYLOAD_OVERHEAD_BYTES * len(payloads)
        if self._held_bytes + size > self._max_bytes:
            return
        self._held_bytes += size
        line = self._lines.setdefault((queue, priority), {})
        line.update(zip(local_ids, payloads, strict=True))

    def take(
        self, queue: str, priority: int, local_ids: Iterable[int]
    ) -> list[Payload | None] | None:
        """Take out those that are here, in the order of `local_ids`; None if none can be."""
        line = self._lines.get((queue, priority))
        if not line:
            return None
        pop = line.pop
        taken = [pop(local_id, None) for local_id in local_ids]
        found = [payload for payload in taken if payload] if None in taken else taken
        self._held_bytes -= sum([len(payload[0]) for payload in found if payload])
        self._held_bytes -= PAYLOAD_OVERHEAD_BYTES * len(found)
        return taken

    def discard(self, queue: str, priority: int, local_ids: Iterable[int]) -> None:
        self.take(queue, priority, local_ids)

    def drop_queue(self, queue: str) -> None:
        for name, priority in [place for place in self._lines if place[0] == queue]:
            for payload in self._lines.pop((name, priority)).values():
                self._held_bytes -= len(payload.body) + PAYLOAD_OVERHEAD_BYTES

    def clear(self) -> None:
        self._lines.clear()
        self._held_bytes = 0
