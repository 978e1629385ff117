"""The search that all engines share: the order of a scan, its end, the matching of bodies.

An engine walks over the jobs of one state and priority, in slices; this module counts, merges and
filters. Bodies are searched by RE2: the same in every engine, linear in the size of the body.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import NamedTuple, TypeVar

import re2

from pinlaterd.clock import Clock
from pinlaterd.engines.base import Search, Searcher, StoredJob
from pinlaterd.errors import InvalidRequest, QueueNotFound
from pinlaterd.model import JobKey

T = TypeVar("T")

# Bounds what a hostile pattern may take, compiled program and search cache together.
_MAX_PATTERN_MEMORY_BYTES = 8 << 20
_MAX_REASON_CHARS = 200  # RE2 repeats the pattern in it
# RE2 takes as many steps for a body as its program has instructions times its bytes at most: for a
# million some 5 ms of a fast processor.
_LONG_STEPS, _MOST_STEPS = 4_000_000, 500_000_000


class BodyRegex(NamedTuple):
    """A compiled pattern that bodies are searched for."""

    search: Callable[[bytes], object]
    instructions: int

    def steps(self, body: bytes) -> int:
        """Return how many steps RE2 takes for `body` at most."""
        return self.instructions * len(body)

    def __call__(self, body: bytes) -> bool:
        """Return whether `body` has a match. Raise InvalidRequest if that could take minutes."""
        if self.steps(body) > _MOST_STEPS:
            raise InvalidRequest(
                f"bodyRegexToMatch has {self.instructions:,} instructions of RE2, a body "
                f"{len(body):,} bytes; their product may be {_MOST_STEPS:,} at most"
            )
        return self.search(body) is not None


def compile_body_regex(pattern: str) -> BodyRegex:
    """Compile a pattern. A body is bytes of any kind, so it is matched byte by byte: the pattern's
    own text stands for its UTF-8 bytes, `.` for one byte, and a class such as `[a-z]` holds single
    bytes.

    Raises InvalidRequest for a pattern that RE2 does not take.
    """
    options = re2.Options()
    options.encoding = re2.Options.Encoding.LATIN1
    options.max_mem = _MAX_PATTERN_MEMORY_BYTES
    options.log_errors = False
    options.never_capture = True
    try:
        compiled = re2.compile(pattern.encode(), options)
    except re2.error as error:
        reason = error.args[0] if error.args else ""
        if isinstance(reason, bytes):
            reason = reason.decode(errors="replace")
        raise InvalidRequest(
            f"bodyRegexToMatch is no RE2 pattern: {reason[:_MAX_REASON_CHARS]}; see https://github.com/google/re2/wiki/Syntax"
        ) from error
    return BodyRegex(compiled.search, compiled.programsize)


def too_late() -> TimeoutError:
    """Make the error with which a search ends at its deadline."""
    return TimeoutError("the search took longer than its deadline allows")


class WalkingSearcher(Searcher):
    """A Searcher in terms of what an engine defines below. One search at a time."""

    def __init__(self, between_slices: Callable[[], None], clock: Clock | None = None) -> None:
        self.found: list[StoredJob] = []
        # Around a match that may take longer than a slice: other searches may go on meanwhile.
        self.aside: Callable[[], AbstractContextManager[None]] = nullcontext
        self._clock = clock or Clock()
        self._between_slices = between_slices
        self._matches: BodyRegex | None = None  # of the search that goes on

    # --- what an engine defines --------------------------------------------------------------

    def _guarded(self, search: Search) -> AbstractContextManager[None]:
        """Around a search: foreign exceptions become StorageError, TimeoutError, QueueNotFound."""
        raise NotImplementedError

    def _begin(self, search: Search) -> None:
        """Raises QueueNotFound if there is no such queue."""
        raise NotImplementedError

    def _walk(self, search: Search, priority: int) -> Iterator[StoredJob]:
        """Yield all jobs that `search` looks for, without bodies, at least those after `after`."""
        raise NotImplementedError

    def _walks_in_order(self, search: Search) -> bool:
        """Whether `_walk` is in the order of a scan."""
        raise NotImplementedError

    def _quick_count(self, search: Search, priority: int) -> int | None:
        """Without reading the jobs, where the store can do that; at most the limit, or more."""
        raise NotImplementedError

    # --- the contract ------------------------------------------------------------------------

    def count(self, search: Search) -> int:
        def count_one(priority: int) -> int:
            quick = self._quick_count(search, priority) if self._matches is None else None
            if quick is not None:
                return min(quick, search.limit)
            return sum(1 for _ in islice(self._walk(search, priority), search.limit))

        return self._until_deadline(search, lambda: sum(map(count_one, search.priorities)), 0)

    def scan(self, search: Search) -> Sequence[StoredJob]:
        self.found = []

        def merged() -> Sequence[StoredJob]:
            walks = [
                _behind(search, self._walk(search, priority))
                for priority in sorted(set(search.priorities))
            ]
            if not self._walks_in_order(search):  # the first is known when all have ended
                jobs = (job for walk in walks for job in walk)
                self.found += heapq.nsmallest(search.limit, jobs, key=search.order_of)
                return self.found
            for job in islice(heapq.merge(*walks, key=search.order_of), search.limit):
                self.found.append(job)
            return self.found

        return self._until_deadline(search, merged, ())

    def find(self, search: Search) -> Sequence[JobKey]:
        def keys() -> Sequence[JobKey]:
            walks = (self._walk(search, priority) for priority in search.priorities)
            return [job.key for walk in walks for job in islice(walk, search.limit)]

        return self._until_deadline(search, keys, ())

    # --- how a search goes -------------------------------------------------------------------

    def _until_deadline(self, search: Search, run: Callable[[], T], nothing: T) -> T:
        """`nothing` is found in a queue that does not exist, or is dropped meanwhile."""
        try:
            with self._guarded(search):
                self._check(search)
                self._begin(search)
                regex = search.body_regex
                self._matches = None if regex is None else compile_body_regex(regex)
                return run()
        except QueueNotFound:
            return nothing

    def _check(self, search: Search) -> None:
        if self._clock.monotonic() > search.deadline:
            raise too_late()

    def _next_slice(self, search: Search) -> None:
        """To be called before each, while nothing of the store is held."""
        self._between_slices()
        self._check(search)

    def _matching(self, search: Search, jobs: Iterable[StoredJob]) -> Iterator[StoredJob]:
        """Yield those of `jobs` that `search` looks for, without bodies."""
        (from_ms, to_ms), matches = search.times_ms, self._matches
        for job in jobs:
            if not from_ms <= search.time_of(job) <= to_ms:
                continue
            if matches is None:
                yield job
                continue
            self._next_slice(search)  # a large body may take as long as a slice
            body = job.body or b""
            with self.aside() if matches.steps(body) > _LONG_STEPS else nullcontext():
                found = matches(body)
            if found:
                yield job._replace(body=None)


def _behind(search: Search, jobs: Iterable[StoredJob]) -> Iterator[StoredJob]:
    after = search.after
    if after is None:
        yield from jobs
        return
    place = (-after.run_after_ms, after.priority, after.local_id)
    yield from (job for job in jobs if search.order_of(job) > place)
