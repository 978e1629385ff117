"""RedisSearcher: reads of unbounded cost, on a connection of its own in another process.

A search walks one state's set in pages, so that the server is never held up for long; between pages
jobs may come and go. What is kept in memory is one page without bodies, a few bodies, and for a
scan the jobs it returns; beside that, the ids of a walk over IN_PROGRESS jobs, and of PENDING ones
that share one millisecond.

PENDING jobs are walked in the order of a scan, which stops when it has enough, and those that have
ended in the order of their ends. Otherwise they are walked by age, all of them, and a scan keeps
the best. Evicted jobs are passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

from pinlaterd.engines.base import Search, StoredJob, no_pause
from pinlaterd.engines.redis import scripts
from pinlaterd.engines.redis.connection import Argument, RedisClient
from pinlaterd.engines.redis.scripts import (
    LEAN_MARK,
    first_score,
    local_id,
    score_behind,
    stored_job,
    to_ms,
)
from pinlaterd.engines.redis.servers import evicts
from pinlaterd.engines.redis.store import ShardKeys
from pinlaterd.engines.searching import WalkingSearcher
from pinlaterd.errors import QueueNotFound
from pinlaterd.model import JobKey, JobState

# Of a page: some 0.5 ms of a searcher.
_PAGE_JOBS = 100
_PAGE_RUNS = 16  # of up to RUN_JOBS each
_ANSWER_SECONDS = 5.0


class RedisSearcher(WalkingSearcher):
    """A connection of its own to a shard's server; a broken one is replaced with the next call."""

    def __init__(self, shard: ShardKeys, between_slices: Callable[[], None] = no_pause) -> None:
        super().__init__(between_slices)
        self._shard = shard
        self._connection = RedisClient(shard.server, _ANSWER_SECONDS)
        self._queue = ""  # that is searched, as it is in keys

    def close(self) -> None:
        self._connection.close()

    @contextmanager
    def _guarded(self, search: Search) -> Iterator[None]:
        yield  # the connection raises nothing foreign

    def _begin(self, search: Search) -> None:
        self._next_slice(search)
        if self._connection.failure:
            self._connection = RedisClient(self._shard.server, _ANSWER_SECONDS)
        for names, stored in (("pls", LEAN_MARK + search.queue), ("pln", search.queue)):
            if self._connection.read("ZSCORE", f"{names}_{self._shard.name}", stored) is not None:
                self._queue = stored
                return
        raise QueueNotFound(search.queue)

    def _walks_in_order(self, search: Search) -> bool:
        return search.state is JobState.PENDING or search.newest_end_first

    def _quick_count(self, search: Search, priority: int) -> int | None:
        if search.state is not JobState.PENDING or evicts(self._connection):
            return None
        jobs: int = self._connection.read(
            "ZCOUNT",
            self._shard.set_key(self._queue, priority, search.state),
            *self._bounds(search),
        )
        return jobs

    def _bounds(self, search: Search) -> tuple[str, str]:
        first, last = search.times_ms
        return first_score(self._queue, first), score_behind(self._queue, last)

    def _walk(self, search: Search, priority: int) -> Iterator[StoredJob]:
        pages = self._latest_pages if self._walks_in_order(search) else self._pages
        for part in self._slices(search, chain.from_iterable(pages(search, priority))):
            yield from sorted(self._read(search, priority, part), key=search.order_of)

    def _latest_pages(self, search: Search, priority: int) -> Iterator[list[int]]:
        """Yield ids in the order of a scan, those of whole milliseconds. The set runs the other way
        within one, so that a millisecond that is cut short by the page is left to the next page,
        and one that is larger than a page is read apart."""
        low, high = self._bounds(search)
        is_in_runs = search.newest_end_first and self._queue.startswith(LEAN_MARK)
        most = _PAGE_RUNS if is_in_runs else _PAGE_JOBS
        key = self._shard.set_key(self._queue, priority, search.state)
        while True:
            self._next_slice(search)
            rows = self._connection.read(
                *("ZREVRANGEBYSCORE", key, high, low, "WITHSCORES", "LIMIT", 0, most)
            )
            times = [to_ms(self._queue, score) for score in rows[1::2]]
            cut_ms = times[-1] if len(times) == most else None
            if cut_ms is not None and times[0] == cut_ms:
                yield sorted(self._ids_at(search, priority, cut_ms))
                high = score_behind(self._queue, cut_ms - 1)
                continue
            numbers = map(local_id, rows[::2])
            found = zip(times, numbers, strict=True)
            places = sorted((-ms, number) for ms, number in found if number and ms != cut_ms)
            ids = [number for _, number in places]
            yield self._in_runs(priority, ids) if is_in_runs else ids
            if cut_ms is None:
                return
            high = score_behind(self._queue, cut_ms)

    def _in_runs(self, priority: int, last_ids: Sequence[int]) -> list[int]:
        """Return the ids of the jobs of runs that end with `last_ids`."""
        first_ids = self._run(scripts.RUN_STARTS, priority, *last_ids)
        pairs = zip(first_ids, last_ids, strict=True)
        return [number for first, last in pairs if first for number in range(int(first), last + 1)]

    def _ids_at(self, search: Search, priority: int, ms: int) -> Iterator[int]:
        begin = first_score(self._queue, ms)
        for rows in self._rows(search, priority, (begin, "")):
            at_ms = [number for number, _, of_job in rows if of_job == ms]
            yield from at_ms
            if len(at_ms) < len(rows):
                return

    def _pages(self, search: Search, priority: int) -> Iterator[list[int]]:
        """Yield ids, each once: a checkpoint moves a job to the end of those IN_PROGRESS. Of ended
        jobs come those that had ended when the walk began, not what is retried and ends again."""
        key = self._shard.set_key(self._queue, priority, search.state)
        newest = self._connection.read("ZREVRANGE", key, 0, 0, "WITHSCORES")
        running, met = search.state is JobState.IN_PROGRESS, set[int]()
        for rows in self._rows(search, priority):
            if running:
                yield [number for number, *_ in rows if number not in met]
                met.update(number for number, *_ in rows)
                continue
            yield [number for number, score, _ in rows if newest and score <= float(newest[1])]
            if not newest or rows[-1][1] > float(newest[1]):
                return

    def _rows(
        self, search: Search, priority: int, place: tuple[Argument, Argument] = ("", "")
    ) -> Iterator[list[tuple[int, float, int]]]:
        """Yield id, score and its time in ms of jobs behind `place`, in the order of the set."""
        while True:
            self._next_slice(search)
            rows = self._run(scripts.PAGE, priority, int(search.state), *place, _PAGE_JOBS)[0]
            found = [
                (number, float(score), ms)
                for member, score, ms in zip(rows[::3], rows[1::3], rows[2::3], strict=True)
                if (number := local_id(member)) is not None
            ]
            if found:
                yield found
            if len(rows) < 3 * _PAGE_JOBS:
                return
            place = (rows[-2], rows[-3])

    def _run(self, script: scripts.Script, *arguments: Argument) -> list[Any]:
        """Run a script on the queue; return its result after the OK."""
        _, *answer = self._connection.run(script, (self._shard.name, self._queue, *arguments))
        return list(answer)

    def _read(self, search: Search, priority: int, local_ids: Sequence[int]) -> Iterator[StoredJob]:
        """Yield those of `local_ids` that still are in their state."""
        with_body = self._matches is not None
        keys = [JobKey(priority, number) for number in local_ids]
        ids = [part for key in keys for part in key]
        rows = self._run(scripts.LOOKUP, int(search.state), "1" if with_body else "0", *ids)
        for key, row in zip(keys, rows, strict=True):
            if isinstance(row, list):
                yield stored_job(key, row, with_body=with_body)
