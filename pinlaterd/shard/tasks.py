"""Work that is done in slices between commits, so that no call waits long behind it.

A task is a generator: it yields None after each slice (one short commit, or one short read), and
a SearchCall where it needs the searcher, whose result it is then sent. Tasks take turns, and while
calls wait, slices leave them most of the time.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from typing import Any

from pinlaterd.clock import Clock
from pinlaterd.engines.base import SearcherFactory
from pinlaterd.errors import Overloaded
from pinlaterd.shard.search import SearchClient, Steps

# More is more than would be done within the deadlines of calls.
MOST_TASKS = 1_000
# A slice about as long as a commit of a full batch is not felt by those who wait for that.
_SLICE_SECONDS = 0.002
_FIRST_SLICE_JOBS = 50
# While calls keep coming, slices take one part in so many of the time.
_SHARE_WHEN_BUSY = 4


class ShardStops(Exception):
    """Thrown into a task where it has yielded: the shard ends in order; the task's last word."""


class Pace:
    """How many jobs a slice may change, so that it takes about `_SLICE_SECONDS`. Around each such
    change (`with`), so that its time tells how large the next one should be."""

    def __init__(self, clock: Clock, most_jobs: int) -> None:
        self._clock = clock
        self._most_jobs = most_jobs
        self._started = 0.0
        self.jobs = min(_FIRST_SLICE_JOBS, most_jobs)

    def __enter__(self) -> None:
        self._started = self._clock.monotonic()

    def __exit__(self, *_error: object) -> None:
        seconds = self._clock.monotonic() - self._started
        if seconds > _SLICE_SECONDS:
            # Not to the bottom: what a slice costs beside its jobs stays, however few they are.
            self.jobs = max(min(_FIRST_SLICE_JOBS, self._most_jobs), self.jobs // 2)
        elif seconds < _SLICE_SECONDS / 3:
            self.jobs = min(self._most_jobs, self.jobs * 2)


class Tasks:
    """The tasks in flight, in turn."""

    def __init__(self, clock: Clock, factory: Callable[[], SearcherFactory], title: str) -> None:
        self.searches = SearchClient(factory, clock, title, self._resume)
        self._clock = clock
        self.ready: deque[tuple[Steps, Any]] = deque()  # to go on, each with what it is sent
        self._not_before = 0.0  # monotonic seconds; holds while calls wait

    def __len__(self) -> int:
        return len(self.ready) + len(self.searches)

    def check_room(self, shard: str) -> None:
        """Raises Overloaded if no more calls may be answered in slices."""
        if len(self) >= MOST_TASKS:
            raise Overloaded(f"shard {shard} has {MOST_TASKS} such calls in flight")

    def start(self, steps: Steps, *, at_once: bool = False) -> None:
        """Take up `steps`; `at_once`: its first slice is small and done now."""
        if at_once:
            self._step(steps, None)
        else:
            self.ready.append((steps, None))

    def _resume(self, steps: Steps, result: object) -> None:
        """Its search has ended so."""
        self.ready.append((steps, result))

    def run_slice(self, *, calls_wait: bool) -> None:
        """One slice of the task whose turn it is, unless those who wait come first.

        Raises what a task raised; that task is over."""
        started = self._clock.monotonic()
        if not self.ready or (calls_wait and started < self._not_before):
            return
        self._step(*self.ready.popleft())
        took = self._clock.monotonic() - started
        self._not_before = started + took * _SHARE_WHEN_BUSY

    def end_search(self, steps: Steps) -> None:
        """End a task that waits for its search: nobody waits for its result."""
        if self.searches.end(steps):
            steps.close()

    def abandon(self) -> None:
        """The store they work on has to be opened again: end them; each answers as it can."""
        for steps in self._take_all():
            steps.close()

    def stop(self) -> None:
        """The shard ends in order: end them with ShardStops."""
        for steps in self._take_all():
            with contextlib.suppress(ShardStops, StopIteration):
                steps.throw(ShardStops())

    def _take_all(self) -> list[Steps]:
        taken = [steps for steps, _ in self.ready] + self.searches.close()
        self.ready.clear()
        return taken

    def _step(self, steps: Steps, value: Any) -> None:
        try:
            wanted = steps.throw(value) if isinstance(value, Exception) else steps.send(value)
        except StopIteration:
            return
        if wanted is None:
            self.ready.append((steps, None))
        else:
            self.searches.begin(wanted, steps)
