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
from contextlib import contextmanager
from dataclasses import dataclass

from pinlaterd.clock import Clock, SystemClock
from pinlaterd.engines.base import Search, StoredJob, no_pause
from pinlaterd.engines.redis import scripts
from pinlaterd.engines.redis.connection import Connection
from pinlaterd.engines.redis.records import (
    LEAN_MARK,
    first_score,
    local_id,
    score_behind,
    stored_job,
    to_ms,
)
from pinlaterd.engines.redis.server_facts import evicts
from pinlaterd.engines.redis.store import ShardKeys
from pinlaterd.engines.searching import WalkingSearcher, scan_order
from pinlaterd.errors import QueueNotFound
from pinlaterd.model import JobKey, JobState

_PAGE_JOBS = 1000
_BODIES_AT_ONCE = 16
_ANSWER_SECONDS = 5.0


class RedisSearcher(WalkingSearcher):
    """A connection of its own to a shard's server; a broken one is replaced with the next call."""

    def __init__(
        self, shard: ShardKeys, clock: Clock, between_slices: Callable[[], None] = no_pause
    ) -> None:
        super().__init__(clock, between_slices)
        self._shard = shard
        self._connection = Connection(shard.server, _ANSWER_SECONDS)
        self._queue = ""  # that is searched, as it is in keys

    def close(self) -> None:
        self._connection.close()

    @contextmanager
    def _guarded(self, search: Search) -> Iterator[None]:
        yield  # the connection raises nothing foreign

    def _begin(self, search: Search) -> None:
        self._next_slice(search)
        if self._connection.failure:
            self._connection = Connection(self._shard.server, _ANSWER_SECONDS)
        for names, stored in (("plr", LEAN_MARK + search.queue), ("pln", search.queue)):
            if self._connection.read("ZSCORE", f"{names}_{self._shard.name}", stored) is not None:
                self._queue = stored
                return
        raise QueueNotFound(search.queue)

    def _walks_in_order(self, search: Search) -> bool:
        return search.state is JobState.PENDING

    def _quick_count(self, search: Search, priority: int) -> int | None:
        if search.state is not JobState.PENDING or evicts(self._connection):
            return None
        first, last = search.run_after_ms
        key = self._set_key(search, priority)
        jobs: int = self._connection.read(
            "ZCOUNT", key, first_score(self._queue, first), score_behind(self._queue, last)
        )
        return jobs

    def _set_key(self, search: Search, priority: int) -> str:
        return f"plq_{self._shard.name}_{self._queue}.p{priority}_s{int(search.state)}"

    def _walk(self, search: Search, priority: int) -> Iterator[StoredJob]:
        """All wanted jobs of one priority, without bodies; PENDING ones in the order of a scan."""
        walk = {
            JobState.PENDING: self._pending_pages,
            JobState.IN_PROGRESS: self._running_pages,
        }.get(search.state, self._ended_pages)
        for local_ids in walk(search, priority):
            yield from sorted(self._read(search, priority, local_ids), key=scan_order)

    def _pending_pages(self, search: Search, priority: int) -> Iterator[list[int]]:
        """Ids, of whole milliseconds, the latest first. The set runs the other way within
        one, so that a millisecond that is cut short by the page is left to the next page, and one
        that is larger than a page is read apart."""
        low, high = (
            first_score(self._queue, search.run_after_ms[0]),
            score_behind(self._queue, search.run_after_ms[1]),
        )
        key = self._set_key(search, priority)
        while True:
            self._next_slice(search)
            rows = self._connection.read(
                *("ZREVRANGEBYSCORE", key, high, low, "WITHSCORES", "LIMIT", 0, _PAGE_JOBS)
            )
            times = [to_ms(self._queue, score) for score in rows[1::2]]
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
                high = score_behind(self._queue, cut_ms)
            else:
                same_time = sorted(self._ids_at(search, priority, cut_ms))
                for begin in range(0, len(same_time), _PAGE_JOBS):
                    yield same_time[begin : begin + _PAGE_JOBS]
                high = score_behind(self._queue, cut_ms - 1)

    def _ids_at(self, search: Search, priority: int, ms: int) -> Iterator[int]:
        begin = first_score(self._queue, ms)
        for page in self._pages(search, priority, place=(begin, "")):
            at_ms = [number for number, _, job_ms in page if job_ms == ms]
            yield from at_ms
            if len(at_ms) < len(page):
                return

    def _running_pages(self, search: Search, priority: int) -> Iterator[list[int]]:
        """A checkpoint moves a job to the end, where it is met again."""
        met: set[int] = set()
        for page in self._pages(search, priority):
            local_ids = [number for number, *_ in page]
            yield [number for number in local_ids if number not in met]
            met.update(local_ids)

    def _ended_pages(self, search: Search, priority: int) -> Iterator[list[int]]:
        """Those that ended before the walk began, not what is retried and ends again."""
        newest = self._connection.read(
            "ZREVRANGE", self._set_key(search, priority), 0, 0, "WITHSCORES"
        )
        for page in self._pages(search, priority):
            yield [
                number for number, score, _ in page if newest and float(score) <= float(newest[1])
            ]
            if not newest or float(page[-1][1]) > float(newest[1]):
                return

    def _pages(
        self, search: Search, priority: int, place: tuple[bytes | str, bytes | str] = ("", "")
    ) -> Iterator[list[tuple[int, bytes, int]]]:
        """Ids, scores and the times that these stand for, behind `place`, in the order of the
        set."""
        while True:
            self._next_slice(search)
            _, rows = self._connection.run(
                scripts.PAGE,
                (self._shard.name, self._queue, priority, int(search.state), *place, _PAGE_JOBS),
            )
            found = [
                (number, score, ms)
                for member, score, ms in zip(rows[::3], rows[1::3], rows[2::3], strict=True)
                if (number := local_id(member)) is not None
            ]
            if found:
                yield found
            if len(rows) < 3 * _PAGE_JOBS:
                return
            place = (rows[-2], rows[-3])

    def _read(self, search: Search, priority: int, local_ids: Sequence[int]) -> Iterator[StoredJob]:
        """Those of `local_ids` that are wanted, and in their state still."""
        with_body = self._matches is not None
        at_once = _BODIES_AT_ONCE if with_body else _PAGE_JOBS
        for begin in range(0, len(local_ids), at_once):
            self._next_slice(search)
            keys = [JobKey(priority, number) for number in local_ids[begin : begin + at_once]]
            _, *rows = self._connection.run(
                scripts.LOOKUP,
                (
                    *(self._shard.name, self._queue, int(search.state)),
                    "1" if with_body else "0",
                    *[part for key in keys for part in key],
                ),
            )
            jobs = [
                stored_job(key, row, with_body=with_body)
                for key, row in zip(keys, rows, strict=True)
                if isinstance(row, list)
            ]
            yield from self._matching(search, jobs)


@dataclass(frozen=True)
class RedisSearcherFactory:
    """Opens a searcher on a shard: made in one process, called in another."""

    shard: ShardKeys

    def __call__(self, between_slices: Callable[[], None] = no_pause) -> RedisSearcher:
        return RedisSearcher(self.shard, SystemClock(), between_slices)
