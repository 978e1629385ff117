"""RedisSearcher: reads of unbounded cost, on a connection of its own in another process.

A search walks one state's set in pages, so that the server is never held up for long; between pages
jobs may come and go. What is kept in memory is one page without bodies, a few bodies, and for a
scan the jobs it returns; beside that, the ids of a walk over IN_PROGRESS jobs, and of PENDING ones
that share one millisecond.

PENDING jobs are walked in the order of a scan, which stops when it has enough. The others are
walked by age, all of them, and a scan keeps the best. Evicted jobs are passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from pinlaterd.clock import Clock, SystemClock
from pinlaterd.engines.base import ScanAfter, Searcher, StoredJob, no_pause
from pinlaterd.engines.body_regex import compile_body_regex
from pinlaterd.engines.redis import scripts
from pinlaterd.engines.redis.connection import Connection
from pinlaterd.engines.redis.records import local_id, stored_job, to_ms
from pinlaterd.engines.redis.server_facts import evicts
from pinlaterd.engines.redis.store import ShardKeys
from pinlaterd.engines.scans import (
    behind,
    scan_order,
    take_ordered,
    take_unordered,
    too_late,
)
from pinlaterd.model import JobKey, JobState

_PAGE_JOBS = 1000
_BODIES_AT_ONCE = 16
_ANSWER_SECONDS = 5.0
_EARLIEST_MS, _LATEST_MS = -(2**63), 2**63 - 1


class _Wanted(NamedTuple):
    """What a search looks for: jobs of a state with run-after from and to, ends included."""

    queue: str
    state: JobState
    run_after_ms: tuple[int, int]
    matches: Callable[[bytes], bool] | None
    deadline: float


class RedisSearcher(Searcher):
    """A connection of its own to a shard's server; a broken one is made anew with the next call."""

    def __init__(
        self, shard: ShardKeys, clock: Clock, between_slices: Callable[[], None] = no_pause
    ) -> None:
        self._between_slices = between_slices
        self.found: list[StoredJob] = []
        self._shard = shard
        self._clock = clock
        self._connection = Connection(shard.server, _ANSWER_SECONDS)

    def close(self) -> None:
        self._connection.close()

    def count(
        self,
        queue: str,
        state: JobState,
        priority: int,
        *,
        future: bool,
        now_ms: int,
        limit: int,
        body_regex: str | None,
        deadline: float,
    ) -> int:
        times = _run_after_range(now_ms, future=future)
        wanted = self._wanted(queue, state, times, body_regex, deadline)
        if wanted is None:
            return 0
        if state is JobState.PENDING and body_regex is None and not evicts(self._connection):
            key = self._set_key(wanted, priority)
            jobs: int = self._connection.read("ZCOUNT", key, _from(times[0]), _to(times[1]))
            return min(limit, jobs)
        return sum(1 for _ in islice(self._walk(wanted, priority), limit))

    def scan(
        self,
        queue: str,
        state: JobState,
        priorities: Sequence[int],
        *,
        future: bool,
        now_ms: int,
        after: ScanAfter | None,
        limit: int,
        body_regex: str | None,
        deadline: float,
    ) -> Sequence[StoredJob]:
        self.found = []
        from_ms, to_ms_ = _run_after_range(now_ms, future=future)
        if after is not None:
            to_ms_ = min(to_ms_, after.run_after_ms)
        wanted = self._wanted(queue, state, (from_ms, to_ms_), body_regex, deadline)
        if wanted is None:
            return []
        walks = [
            behind(after, self._walk(wanted, priority)) for priority in sorted(set(priorities))
        ]
        take = take_ordered if state is JobState.PENDING else take_unordered
        return take(walks, limit, self.found)

    def find(
        self,
        queue: str,
        state: JobState,
        priority: int,
        *,
        limit: int,
        body_regex: str,
        deadline: float,
    ) -> Sequence[JobKey]:
        wanted = self._wanted(queue, state, (_EARLIEST_MS, _LATEST_MS), body_regex, deadline)
        if wanted is None:
            return []
        return [job.key for job in islice(self._walk(wanted, priority), limit)]

    # --- how a search goes -------------------------------------------------------------------

    def _wanted(
        self,
        queue: str,
        state: JobState,
        run_after_ms: tuple[int, int],
        body_regex: str | None,
        deadline: float,
    ) -> _Wanted | None:
        """None if there is no such queue."""
        self._check(deadline)
        if self._connection.trouble:
            self._connection = Connection(self._shard.server, _ANSWER_SECONDS)
        if self._connection.read("ZSCORE", f"pln_{self._shard.name}", queue) is None:
            return None
        matches = None if body_regex is None else compile_body_regex(body_regex)
        return _Wanted(queue, state, run_after_ms, matches, deadline)

    def _check(self, deadline: float) -> None:
        """Before each slice."""
        self._between_slices()
        if self._clock.monotonic() > deadline:
            raise too_late()

    def _set_key(self, wanted: _Wanted, priority: int) -> str:
        return f"plq_{self._shard.name}_{wanted.queue}.p{priority}_s{int(wanted.state)}"

    def _walk(self, wanted: _Wanted, priority: int) -> Iterator[StoredJob]:
        """All wanted jobs of one priority, without bodies; PENDING ones in the order of a scan."""
        walk = {
            JobState.PENDING: self._pending_pages,
            JobState.IN_PROGRESS: self._running_pages,
        }.get(wanted.state, self._ended_pages)
        for local_ids in walk(wanted, priority):
            yield from sorted(self._read(wanted, priority, local_ids), key=scan_order)

    def _pending_pages(self, wanted: _Wanted, priority: int) -> Iterator[list[int]]:
        """Ids, of whole milliseconds, the latest first. The set runs the other way within
        one, so that a millisecond that is cut short by the page is left to the next page, and one
        that is larger than a page is read apart."""
        low, high = _from(wanted.run_after_ms[0]), _to(wanted.run_after_ms[1])
        key = self._set_key(wanted, priority)
        while True:
            self._check(wanted.deadline)
            rows = self._connection.read(
                *("ZREVRANGEBYSCORE", key, high, low, "WITHSCORES", "LIMIT", 0, _PAGE_JOBS)
            )
            times = [to_ms(score) for score in rows[1::2]]
            jobs = [
                (ms, number)
                for ms, member in zip(times, rows[::2], strict=True)
                if (number := local_id(member)) is not None
            ]
            if len(times) < _PAGE_JOBS:
                yield [number for _, number in jobs]
                return
            cut_ms = times[-1]
            whole = [number for ms, number in jobs if ms != cut_ms]
            if times[0] != cut_ms:
                yield whole
                high = _to(cut_ms)
            else:
                same_time = sorted(self._ids_at(wanted, priority, cut_ms))
                for begin in range(0, len(same_time), _PAGE_JOBS):
                    yield same_time[begin : begin + _PAGE_JOBS]
                high = _to(cut_ms - 1)

    def _ids_at(self, wanted: _Wanted, priority: int, ms: int) -> Iterator[int]:
        for local_ids, scores in self._pages(wanted, priority, place=(repr((ms - 0.5) / 1000), "")):
            at_ms = [i for i, score in zip(local_ids, scores, strict=True) if to_ms(score) == ms]
            yield from at_ms
            if len(at_ms) < len(local_ids):
                return

    def _running_pages(self, wanted: _Wanted, priority: int) -> Iterator[list[int]]:
        """A checkpoint moves a job to the end, where it is met again."""
        met: set[int] = set()
        for local_ids, _ in self._pages(wanted, priority):
            yield [number for number in local_ids if number not in met]
            met.update(local_ids)

    def _ended_pages(self, wanted: _Wanted, priority: int) -> Iterator[list[int]]:
        """Those that ended before the walk began, not what is retried and ends again."""
        newest = self._connection.read(
            "ZREVRANGE", self._set_key(wanted, priority), 0, 0, "WITHSCORES"
        )
        for local_ids, scores in self._pages(wanted, priority):
            yield [
                number
                for number, score in zip(local_ids, scores, strict=True)
                if newest and float(score) <= float(newest[1])
            ]
            if not newest or float(scores[-1]) > float(newest[1]):
                return

    def _pages(
        self, wanted: _Wanted, priority: int, place: tuple[bytes | str, bytes | str] = ("", "")
    ) -> Iterator[tuple[list[int], list[bytes]]]:
        """Ids and scores behind `place`, in the order of the set."""
        while True:
            self._check(wanted.deadline)
            _, rows = self._connection.run(
                scripts.PAGE,
                (self._shard.name, wanted.queue, priority, int(wanted.state), *place, _PAGE_JOBS),
            )
            found = [
                (number, score)
                for member, score in zip(rows[::2], rows[1::2], strict=True)
                if (number := local_id(member)) is not None
            ]
            if found:
                yield [number for number, _ in found], [score for _, score in found]
            if len(rows) < 2 * _PAGE_JOBS:
                return
            place = (rows[-1], rows[-2])

    def _read(
        self, wanted: _Wanted, priority: int, local_ids: Sequence[int]
    ) -> Iterator[StoredJob]:
        """Those of `local_ids` that are wanted, and in their state still."""
        (from_ms, to_ms_), matches = wanted.run_after_ms, wanted.matches
        at_once = _PAGE_JOBS if matches is None else _BODIES_AT_ONCE
        for begin in range(0, len(local_ids), at_once):
            self._check(wanted.deadline)
            keys = [JobKey(priority, number) for number in local_ids[begin : begin + at_once]]
            _, *rows = self._connection.run(
                scripts.LOOKUP,
                (
                    *(self._shard.name, wanted.queue, int(wanted.state)),
                    "0" if matches is None else "1",
                    *[part for key in keys for part in (priority, str(key.local_id))],
                ),
            )
            for key, row in zip(keys, rows, strict=True):
                if not isinstance(row, list):
                    continue
                job = stored_job(key, row, with_body=matches is not None)
                if matches is not None:
                    self._check(wanted.deadline)  # a large body may take as long as a slice
                if from_ms <= job.run_after_ms <= to_ms_ and (
                    matches is None or matches(job.body or b"")
                ):
                    yield job._replace(body=None)


@dataclass(frozen=True)
class RedisSearcherFactory:
    """Opens a searcher on a shard: made in one process, called in another."""

    shard: ShardKeys

    def __call__(self, between_slices: Callable[[], None] = no_pause) -> RedisSearcher:
        return RedisSearcher(self.shard, SystemClock(), between_slices)


def _from(ms: int) -> str:
    """The least score that stands for `ms`, as a bound (common.lua)."""
    return "-inf" if ms <= _EARLIEST_MS else repr((ms - 0.5) / 1000)


def _to(ms: int) -> str:
    return "+inf" if ms >= _LATEST_MS else f"({(ms + 0.5) / 1000!r}"


def _run_after_range(now_ms: int, *, future: bool) -> tuple[int, int]:
    return (now_ms + 1, _LATEST_MS) if future else (_EARLIEST_MS, now_ms)
