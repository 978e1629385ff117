"""The search that all engines share: the order of a scan, its end, the matching of jobs.

An engine walks over the jobs of one state and priority, in slices; this module merges, filters and
counts. Bodies and custom statuses are searched by RE2: the same in every engine, linear in the size
of the text. Walks in order are merged before they are filtered, so that a scan that is interrupted
knows up to where it has found all.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain, islice
from typing import NamedTuple, TypeVar

import re2

from pinlaterd.clock import Clock
from pinlaterd.engines.base import ScanAfter, Search, Searcher, StoredJob
from pinlaterd.errors import InvalidRequest, QueueNotFound
from pinlaterd.model import JobChoice, JobKey, JobState, claim_source
from pinlaterd.signature import signature

T = TypeVar("T")

# Bounds what a hostile pattern may take, compiled program and search cache together.
_MAX_PATTERN_MEMORY_BYTES = 8 << 20
# Of a slice, with bodies or without: some 0.5 ms of the searcher or of the server. A process that
# wakes up meanwhile may have to wait for its end, whatever its priority.
_SLICE_JOBS = 32
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


def compile_body_regex(pattern: str, name: str = "bodyRegexToMatch") -> BodyRegex:
    """Compile a pattern. A body is bytes of any kind, so it is matched byte by byte: the pattern's
    own text stands for its UTF-8 bytes, `.` for one byte, and a class such as `[a-z]` holds single
    bytes. A custom status is matched by its UTF-8 in the same way.

    Raises InvalidRequest, which calls the pattern `name`, for one that RE2 does not take.
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
            f"{name} is no RE2 pattern: {reason[:_MAX_REASON_CHARS]}; see https://github.com/google/re2/wiki/Syntax"
        ) from error
    return BodyRegex(compiled.search, compiled.programsize)


class ChosenJobs:
    """Tells of jobs whether a choice has chosen them, by what is read of them without bodies."""

    def __init__(self, search: Search) -> None:
        choice = search.choice or JobChoice()
        # A scan by the time of the end meets no others.
        self._ends_ms = None if search.newest_end_first else search.ends_ms
        pattern = choice.status_regex
        self._status = pattern and compile_body_regex(pattern, "statusRegexToMatch").search
        self._message, self._place, self._worker = choice.message, choice.place, choice.worker

    def __contains__(self, job: StoredJob) -> bool:
        if self._ends_ms and not self._ends_ms[0] <= job.updated_at_ms <= self._ends_ms[1]:
            return False
        if self._worker is not None and claim_source(job.claim_descriptor or "") != self._worker:
            return False
        if self._message is not None or self._place is not None:
            found = signature(job.custom_status, failed=job.state is JobState.FAILED)
            if self._message not in (None, found.message) or self._place not in (None, found.place):
                return False
        return not self._status or self._status(job.custom_status.encode()) is not None


def too_late() -> TimeoutError:
    """Make the error with which a search ends at its deadline."""
    return TimeoutError("the search took longer than its deadline allows")


class WalkingSearcher(Searcher):
    """A Searcher in terms of what an engine defines below. One search at a time."""

    def __init__(self, between_slices: Callable[[], None], clock: Clock | None = None) -> None:
        self.found: list[StoredJob] = []
        self.looked_at = 0
        self.place: ScanAfter | None = None
        # Around a match that may take longer than a slice: other searches may go on meanwhile.
        self.aside: Callable[[], AbstractContextManager[None]] = nullcontext
        self._clock = clock or Clock()
        self._between_slices = between_slices
        # Of the search that goes on:
        self._matches: BodyRegex | None = None
        self._chosen: ChosenJobs | None = None

    # --- what an engine defines --------------------------------------------------------------

    def _guarded(self, search: Search) -> AbstractContextManager[None]:
        """Guard a search: foreign exceptions become StorageError, TimeoutError, QueueNotFound."""
        raise NotImplementedError

    def _begin(self, search: Search) -> None:
        """Raises QueueNotFound if there is no such queue."""
        raise NotImplementedError

    def _walk(self, search: Search, priority: int) -> Iterator[StoredJob]:
        """Yield all jobs of the state and priority, at least those after `after` and within
        `times_ms`; with bodies if `_matches` is set."""
        raise NotImplementedError

    def _walks_in_order(self, search: Search) -> bool:
        """Tell whether `_walk` is in the order of a scan."""
        raise NotImplementedError

    def _quick_count(self, search: Search, priority: int) -> int | None:
        """Count without reading the jobs, where the store can: at most the limit, or more."""
        raise NotImplementedError

    # --- the contract ------------------------------------------------------------------------

    def count(self, search: Search) -> int:
        def count_one(priority: int) -> int:
            if self._matches is None and self._chosen is None:
                quick = self._quick_count(search, priority)
                if quick is not None:
                    return min(quick, search.limit)
            found = self._matching(search, self._walk(search, priority))
            return sum(1 for _ in islice(found, search.limit))

        return self._until_deadline(search, lambda: sum(map(count_one, search.priorities)), 0)

    def scan(self, search: Search) -> Sequence[StoredJob]:
        def merged() -> Sequence[StoredJob]:
            walks = [self._walk(search, priority) for priority in sorted(set(search.priorities))]
            if not self._walks_in_order(search):  # the first is known when all have ended
                jobs = self._matching(search, _behind(search, chain.from_iterable(walks)))
                self.found += heapq.nsmallest(search.limit, jobs, key=search.order_of)
                return self.found
            in_order = _behind(search, heapq.merge(*walks, key=search.order_of))
            found = self._matching(search, in_order, keeps_place=True)
            for job in islice(found, search.limit):
                self.found.append(job)
            return self.found

        return self._until_deadline(search, merged, ())

    def find(self, search: Search) -> Sequence[JobKey]:
        def keys() -> Sequence[JobKey]:
            walks = (
                self._matching(search, self._walk(search, priority))
                for priority in search.priorities
            )
            return [job.key for walk in walks for job in islice(walk, search.limit)]

        return self._until_deadline(search, keys, ())

    # --- how a search goes -------------------------------------------------------------------

    def _until_deadline(self, search: Search, run: Callable[[], T], nothing: T) -> T:
        """Run a search; return `nothing` for a queue that does not exist, or is dropped
        meanwhile."""
        self.found, self.looked_at, self.place = [], 0, None
        try:
            with self._guarded(search):
                self._check(search)
                self._begin(search)
                regex = search.body_regex
                self._matches = None if regex is None else compile_body_regex(regex)
                self._chosen = None if search.choice is None else ChosenJobs(search)
                return run()
        except QueueNotFound:
            return nothing

    def _check(self, search: Search) -> None:
        if self._clock.monotonic() > search.deadline:
            raise too_late()

    def _slices(self, search: Search, keys: Iterable[T]) -> Iterator[list[T]]:
        """Divide the keys of a walk into slices, and pause before each. The first one has no more
        than are wanted, since others may be read in vain."""
        left = iter(keys)
        size = min(_SLICE_JOBS, search.limit)
        while True:
            self._next_slice(search)
            part = list(islice(left, size))
            if not part:
                return
            yield part
            size = _SLICE_JOBS

    def _next_slice(self, search: Search) -> None:
        """Begin a slice. To be called before each, while nothing of the store is held."""
        self._between_slices()
        self._check(search)

    def _matching(
        self, search: Search, jobs: Iterable[StoredJob], *, keeps_place: bool = False
    ) -> Iterator[StoredJob]:
        """Yield those of `jobs` that `search` looks for, without bodies. `keeps_place`: they are in
        the order of a scan."""
        (from_ms, to_ms), matches, chosen = search.times_ms, self._matches, self._chosen
        for job in jobs:
            at_ms = search.time_of(job)
            found = from_ms <= at_ms <= to_ms
            if found and (chosen is not None or matches is not None):
                self._next_slice(search)  # a large body or status may take as long as a slice
            found = found and (chosen is None or job in chosen)
            if found and matches is not None:
                body = job.body or b""
                with self.aside() if matches.steps(body) > _LONG_STEPS else nullcontext():
                    found = matches(body)
            self.looked_at += 1
            if keeps_place:
                self.place = ScanAfter(at_ms, *job.key)
            if found:
                yield job if matches is None else job._replace(body=None)


def _behind(search: Search, jobs: Iterable[StoredJob]) -> Iterator[StoredJob]:
    after = search.after
    if after is None:
        yield from jobs
        return
    place = (-after.time_ms, after.priority, after.local_id)
    yield from (job for job in jobs if search.order_of(job) > place)
