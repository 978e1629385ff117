"""Choosing shards, splitting requests by shard, and merging what they say.

Everything here is pure: no sockets, no clock, and randomness is an argument. It relies on
`model` only. Shards are whatever can be a key.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from random import Random
from typing import Generic, NamedTuple, TypeVar

from pinlaterd.model import (
    CONTINUATION_END,
    AckInfo,
    AckRequest,
    CheckpointInfo,
    JobDescriptor,
    JobRecord,
    ScanKey,
    ScanResult,
)

S = TypeVar("S")
_Item = TypeVar("_Item", AckInfo, CheckpointInfo)
# The most that a descriptor's local id has.
_ID_DIGITS = 19


def cover(shards: Sequence[S], coverage: float, rng: Random) -> list[S]:
    """max(1, round(coverage x shards)) of them, of which a random one is the first."""
    count = len(shards)
    if coverage < 1:
        return rng.sample(shards, max(1, round(coverage * count)))
    at = int(rng.random() * count)
    return [*shards[at:], *shards[:at]]


ALL_LEVELS = 1 << 16  # more priorities than there can be


def best_level(counts: Sequence[int]) -> int:
    """How many priorities, from the highest, hold nothing ready: 0 if priority 1 does hold some."""
    for level, count in enumerate(counts):
        if count:
            return level
    return ALL_LEVELS


def ready_through(counts: Sequence[int], level: int) -> int:
    """Jobs ready at priorities 1 to `level`."""
    return sum(counts[:level])


class Portion(NamedTuple):
    """How many jobs to ask of the shard at `place`; 0 asks only what it holds."""

    place: int
    jobs: int


def plan_round(ready: Sequence[int], wanted: int) -> list[Portion]:
    """Whom to ask for `wanted` jobs of a level, given how many each shard may hold.

    One shard is asked for all if its hint says that it has as many; else the portions follow the
    hints. Where no hint says anything, all are asked what they hold: those answers are the hints
    of the next round, and if they all are zero, its end. Together never more than `wanted` are
    asked for, so that nothing is claimed in vain.
    """
    enough = [index for index, count in enumerate(ready) if count >= wanted]
    if enough:
        return [Portion(enough[0], wanted)]
    portions = []
    remaining = wanted
    for index, count in enumerate(ready):
        jobs = min(count, remaining)
        remaining -= jobs
        portions.append(Portion(index, jobs))
    return portions


def _shard_of(descriptor: str, queue: str, shards: Mapping[str, S]) -> S | None:
    parsed = JobDescriptor.parse(descriptor)
    return shards.get(parsed.shard) if parsed is not None and parsed.queue == queue else None


def _sort(
    items: Iterable[_Item], queue: str, shards: Mapping[str, S], by_shard: dict[S, list[_Item]]
) -> list[str]:
    """Add each item to those of its shard; returns the descriptors that name no job of these."""
    bad = []
    # Jobs that are named together mostly have all but their local ids in common: what comes before
    # those is understood once.
    known: dict[str, list[_Item]] = {}
    for item in items:
        descriptor = item.descriptor
        head, _, id_text = descriptor.rpartition(":")
        plain = id_text.isdigit() and id_text.isascii() and len(id_text) <= _ID_DIGITS
        if plain and head in known:
            known[head].append(item)
        elif (shard := _shard_of(descriptor, queue, shards)) is None:
            bad.append(descriptor)
        else:
            known[head] = by_shard.setdefault(shard, [])
            known[head].append(item)
    return bad


class AcksByShard(Generic[S]):
    """Acks by shard, as they come in; `bad`: the descriptors that are malformed or name no job of
    `shards`."""

    def __init__(self, queue: str, shards: Mapping[str, S]) -> None:
        self.queue = queue
        self.bad: list[str] = []
        self._shards = shards
        self._succeeded: dict[S, list[AckInfo]] = {}
        self._failed: dict[S, list[AckInfo]] = {}

    def add(self, request: AckRequest) -> None:
        self.bad += _sort(request.succeeded, self.queue, self._shards, self._succeeded)
        self.bad += _sort(request.failed, self.queue, self._shards, self._failed)

    def requests(self) -> dict[S, AckRequest]:
        succeeded, failed = self._succeeded, self._failed
        return {
            shard: AckRequest(self.queue, succeeded.get(shard, ()), failed.get(shard, ()))
            for shard in {**succeeded, **failed}
        }


def checkpoints_by_shard(
    checkpoints: Sequence[CheckpointInfo], queue: str, shards: Mapping[str, S]
) -> tuple[dict[S, list[CheckpointInfo]], list[str]]:
    by_shard: dict[S, list[CheckpointInfo]] = {}
    return by_shard, _sort(checkpoints, queue, shards, by_shard)


def lookups_by_shard(descriptors: Iterable[str], shards: Mapping[str, S]) -> dict[S, list[str]]:
    """The descriptors of each shard; those of no shard of ours are left out."""
    by_shard: dict[S, list[str]] = defaultdict(list)
    for descriptor in dict.fromkeys(descriptors):
        parsed = JobDescriptor.parse(descriptor)
        if parsed is not None and parsed.shard in shards:
            by_shard[shards[parsed.shard]].append(descriptor)
    return by_shard


def describe_bad(descriptors: Sequence[str]) -> str:
    """The message for acks and checkpoints that can be carried out nowhere."""
    shown = ", ".join(repr(descriptor[:200]) for descriptor in descriptors[:10])
    more = f" and {len(descriptors) - 10} more" if len(descriptors) > 10 else ""
    return (
        f"not job descriptors of this queue and its shards: {shown}{more}; "
        "the other jobs of the call were carried out"
    )


def split_evenly(count: int, most: int) -> list[int]:
    """`count` items in as few parts of at most `most` as possible, nearly equal; of none, one."""
    parts = max(1, -(-count // most))
    size, larger = divmod(count, parts)
    return [size + 1] * larger + [size] * (parts - larger)


def share_of_oldest(candidates: Mapping[S, Sequence[int]], limit: int) -> dict[S, int]:
    """How many of the `limit` oldest come from each sorted list of ages; those of none left out."""
    tagged = ([(age, index) for age in ages] for index, ages in enumerate(candidates.values()))
    shards = list(candidates)
    shares: dict[S, int] = defaultdict(int)
    for taken, (_, index) in enumerate(heapq.merge(*tagged)):
        if taken == limit:
            break
        shares[shards[index]] += 1
    return shares


def _scan_key(job: JobRecord) -> ScanKey:
    parsed = JobDescriptor.parse(job.descriptor)
    assert parsed is not None, job.descriptor
    return ScanKey(job.run_after_ms, parsed.shard, parsed.priority, parsed.local_id)


def merge_scans(results: Sequence[ScanResult], limit: int) -> ScanResult:
    """The first `limit` of what the shards found, and where to go on. A shard that has not finished
    knows nothing of what comes behind its continuation: there the merged answer ends."""
    keyed = sorted(
        ((_scan_key(job), job) for result in results for job in result.jobs),
        key=lambda pair: pair[0].sort_key(),
    )
    ends = [key for result in results if (key := ScanKey.parse_token(result.continuation))]
    end = min(ends, key=ScanKey.sort_key, default=None)
    known = [pair for pair in keyed if end is None or pair[0].sort_key() <= end.sort_key()]
    if len(known) > limit:
        known, end = known[:limit], known[limit - 1][0]
    return ScanResult([job for _, job in known], end.token() if end else CONTINUATION_END)
