"""Leases: claims whose dequeue asked for a time-out that is shorter than the queue's.

They are in memory only: once their owner has been restarted, or the store has another one, a claim
lasts as long as the queue says, until a checkpoint that names a time-out renews it. Times are
seconds that the shard has served (see `timekeeping`), so that no frozen shard ends claims that its
workers could not renew.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from typing import NamedTuple

from pinlaterd.engines.base import Acks
from pinlaterd.model import JobKey


class _Lease(NamedTuple):
    claim_descriptor: str
    timeout_ms: int
    ends: float


_Place = tuple[str, int]  # queue and priority


class Leases:
    """The leases of a shard, by job. One whose claim has ended stays until its time is over, unless
    an ack of it comes by: ending it then changes nothing."""

    def __init__(self, served: Callable[[], float]) -> None:
        self._served = served
        self._held: defaultdict[_Place, dict[int, _Lease]] = defaultdict(dict)
        # The jobs of a place and when to look at them: when the lease of one ends, or before. Empty
        # while there are no leases.
        self.looks: list[tuple[float, _Place, tuple[int, ...]]] = []

    def clear(self) -> None:
        self._held.clear()
        self.looks.clear()

    def add(
        self, queue: str, priority: int, claims: Iterable[tuple[int, str]], timeout_ms: int
    ) -> None:
        """Begin leases of claims that were made: local ids and claim descriptors."""
        place, ends = (queue, priority), self._served() + timeout_ms / 1000
        leases = {local_id: _Lease(claim, timeout_ms, ends) for local_id, claim in claims}
        self._held[place].update(leases)
        heappush(self.looks, (ends, place, tuple(leases)))

    def renew(
        self, queue: str, renewals: Iterable[tuple[JobKey, str | None]], timeout_ms: int | None
    ) -> None:
        """Renew leases for as long again, or for `timeout_ms`; with that also begin one of a claim
        that has none. `renewals`: jobs and, if they are named, their claims."""
        now = self._served()
        for (priority, local_id), claim in renewals:
            leases = self._held.get((queue, priority), {})
            lease = leases.get(local_id)
            if lease and claim in (None, lease.claim_descriptor):
                lasts_ms = timeout_ms or lease.timeout_ms
                ends = now + lasts_ms / 1000
                leases[local_id] = _Lease(lease.claim_descriptor, lasts_ms, ends)
                if ends < lease.ends:
                    heappush(self.looks, (ends, (queue, priority), (local_id,)))
            elif timeout_ms and claim:
                self.add(queue, priority, [(local_id, claim)], timeout_ms)

    def end(self, queue: str, ended: Iterable[Acks]) -> None:
        """Forget the leases of jobs that were acked."""
        for acks in ended:
            leases = self._held.get((queue, acks.priority), {})
            for local_id in acks.local_ids if leases else ():
                lease = leases.get(local_id)
                if lease and acks.claim_descriptor in (None, lease.claim_descriptor):
                    del leases[local_id]

    def due(self, most_jobs: int) -> tuple[str, list[Acks]] | None:
        """Return the queue of the leases that have ended first, and acks that fail their jobs, or
        None: at most as many as said, or those that ended together. They are forgotten."""
        now = self._served()
        queue, acks = "", list[Acks]()
        while self.looks and self.looks[0][0] <= now and len(acks) < most_jobs:
            if acks and self.looks[0][1][0] != queue:
                break
            _, place, local_ids = heappop(self.looks)
            leases = self._held[place]
            later: dict[float, list[int]] = {}
            for local_id in local_ids:
                lease = leases.get(local_id)
                if lease is not None and lease.ends > now:
                    later.setdefault(lease.ends, []).append(local_id)
                elif lease is not None:
                    queue = place[0]
                    acks.append(Acks(place[1], [local_id], "", 0, lease.claim_descriptor))
                    del leases[local_id]
            for ends, others in later.items():
                heappush(self.looks, (ends, place, tuple(others)))
        return (queue, acks) if acks else None
