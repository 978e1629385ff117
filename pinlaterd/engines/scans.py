"""What the searchers of all engines have in common: the order of a scan, and its end.

Pure; relies on the contract in `base` only.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from itertools import islice

from pinlaterd.engines.base import ScanAfter, StoredJob


def scan_order(job: StoredJob) -> tuple[int, int, int]:
    """By which a scan is sorted: see `ScanAfter`."""
    return (-job.run_after_ms, job.key.priority, job.key.local_id)


def behind(after: ScanAfter | None, jobs: Iterable[StoredJob]) -> Iterator[StoredJob]:
    """Those that a scan yields which goes on after `after`."""
    if after is None:
        yield from jobs
        return
    run_after_ms, priority, local_id = after
    place = (-run_after_ms, priority, local_id)
    yield from (job for job in jobs if scan_order(job) > place)


def take_ordered(
    walks: Iterable[Iterable[StoredJob]], limit: int, found: list[StoredJob]
) -> list[StoredJob]:
    """The first `limit` jobs of walks that are each in the order of a scan, added to `found` one by
    one."""
    for job in islice(heapq.merge(*walks, key=scan_order), limit):
        found.append(job)  # noqa: PERF402 - it is read between slices
    return found


def take_unordered(
    walks: Iterable[Iterable[StoredJob]], limit: int, found: list[StoredJob]
) -> list[StoredJob]:
    """The same of walks in any order: the first is known when all have ended."""
    found += heapq.nsmallest(limit, (job for walk in walks for job in walk), key=scan_order)
    return found


def too_late() -> TimeoutError:
    """What a search ends with at its deadline."""
    return TimeoutError("the search took longer than its deadline allows")
