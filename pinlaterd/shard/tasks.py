"""Work that is done in slices between commits, so that no call waits long behind it.

A task is a generator: it yields None after each slice (one short commit, or one short read), and
a SearchCall where it needs the searcher, whose result it is then sent. Tasks take turns. Slices
adapt their size to how long they take, and while calls wait, slices leave them most of the time.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Generator
from typing import Any

from pinlaterd.clock import Clock
from pinlaterd.shard.search import SearchCall, SearchDone

# What a task yields, is sent, and returns.
Steps = Generator[SearchCall | None, Any, None]

# A slice about as long as a commit of a full batch is not felt by those who wait for that.
_SLICE_SECONDS = 0.002
_FIRST_SLICE_JOBS = 50
# While calls keep coming, slices take one part in so many of the time.
_SHARE_WHEN_BUSY = 4

# Begins a search; returns what ends it.
Submit = Callable[[SearchCall, SearchDone], Callable[[], None]]


def _nothing() -> None:
    pass


class ShardStops(Exception):
    """Thrown into a task where it has yielded: the shard ends in order; the task's last word."""


class Pace:
    """How many jobs a slice may change, so that it takes about `_SLICE_SECONDS`."""

    def __init__(self, most_jobs: int) -> None:
        self._most_jobs = most_jobs
        self.jobs = min(_FIRST_SLICE_JOBS, most_jobs)

    def took(self, seconds: float) -> None:
        if seconds > _SLICE_SECONDS:
            # Not to the bottom: what a slice costs beside its jobs stays, however few they are.
            self.jobs = max(min(_FIRST_SLICE_JOBS, self._most_jobs), self.jobs // 2)
        elif seconds < _SLICE_SECONDS / 3:
            self.jobs = min(self._most_jobs, self.jobs * 2)


class Tasks:
    """The tasks in flight, in turn."""

    def __init__(self, clock: Clock, submit: Submit, most_jobs: int) -> None:
        self.pace = Pace(most_jobs)
        self._clock = clock
        self._submit = submit
        self._ready: deque[tuple[Steps, Any]] = deque()
        self._searching: dict[Steps, Callable[[], None]] = {}  # what ends the search of each
        self._unpaced: set[Steps] = set()
        self._not_before = 0.0  # monotonic seconds; holds while calls wait

    def __len__(self) -> int:
        return len(self._ready) + len(self._searching)

    @property
    def runnable(self) -> bool:
        """Whether `run_slice` would find anything to do."""
        return bool(self._ready)

    def start(self, steps: Steps, *, at_once: bool = False, paced: bool = True) -> None:
        """Take up `steps`; `at_once`: its first slice is small and done now. `paced`: its slices
        are as large as the pace says, so that their times tell how large they should be."""
        if not paced:
            self._unpaced.add(steps)
        if at_once:
            self._step(steps, None)
        else:
            self._ready.append((steps, None))

    def run_slice(self, *, calls_wait: bool) -> None:
        """One slice of the task whose turn it is, unless those who wait come first.

        Raises what a task raised; that task is over."""
        if not self._ready:
            return
        started = self._clock.monotonic()
        if calls_wait and started < self._not_before:
            return
        steps, value = self._ready.popleft()
        self._step(steps, value)
        took = self._clock.monotonic() - started
        if steps not in self._unpaced:
            self.pace.took(took)
        self._not_before = started + took * _SHARE_WHEN_BUSY

    def end_search(self, steps: Steps) -> None:
        """End a task that waits for its search: nobody waits for its result."""
        end = self._searching.pop(steps, None)
        if end is not None:
            end()
            self._unpaced.discard(steps)
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
        taken = [steps for steps, _ in self._ready] + list(self._searching)
        self._ready.clear()
        self._searching.clear()
        self._unpaced.clear()
        return taken

    def _step(self, steps: Steps, value: Any) -> None:
        try:
            wanted = steps.throw(value) if isinstance(value, Exception) else steps.send(value)
        except StopIteration:
            self._unpaced.discard(steps)
            return
        if wanted is None:
            self._ready.append((steps, None))
            return
        finished = False

        def found(result: object) -> None:
            nonlocal finished
            finished = True
            if self._searching.pop(steps, None) is not None:
                self._ready.append((steps, result))

        self._searching[steps] = _nothing
        end = self._submit(wanted, found)
        if not finished:
            self._searching[steps] = end
