"""The numbers of jobs by queue, priority and state: kept in memory, counted beside the owner.

A count is what a snapshot of the store holds plus what the owner has committed since. The owner
takes the snapshot on a connection that only reads, between two commits, so that each commit is in
exactly one of the two; a thread reads it, and the job path waits for nothing. The thread holds no
interpreter lock while the store counts. Queues are counted when their owner knows nothing of them,
and when somebody else may have written to them.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Generic, Protocol, TypeVar

from pinlaterd.clock import Clock
from pinlaterd.errors import StorageError
from pinlaterd.model import JobState

log = logging.getLogger(__name__)

# What an engine calls a queue by.
Q = TypeVar("Q")
Q_contra = TypeVar("Q_contra", contravariant=True)

Depths = Mapping[tuple[int, JobState], int]  # by priority and state
Changes = Mapping[tuple[Q, int, JobState], int]

# A snapshot keeps old versions of rows, or a log, from being removed: after so long no other queue
# is counted in it.
_SNAPSHOT_SECONDS = 2.0
# Counting again what has been counted before takes no more than this part of the time.
_RECOUNT_PART = 0.01
_RETRY_SECONDS = 5.0
# How long the owner waits for a count that it has cancelled.
_CANCEL_SECONDS = 1.0


class CountedSnapshot(Protocol[Q_contra]):
    """The store as it was when this was made. `count` and `close` are called by one thread."""

    def count(self, queue: Q_contra) -> Depths:
        """Count the jobs of `queue`. Raises StorageError."""

    def find_damage(self) -> str:
        """Walk over all jobs; say what disagrees in the store, "" if nothing does."""

    def cancel(self) -> None:
        """End a `count` or `find_damage` that is running: it raises StorageError. Called by the
        owner's thread, and maybe after `close`."""

    def close(self) -> None: ...


class _Pass(threading.Thread, Generic[Q]):
    """Counts queues in one snapshot. A daemon: a process that ends does not wait for it."""

    def __init__(
        self, snapshot: CountedSnapshot[Q], queues: Iterable[Q], clock: Clock, *, finds_damage: bool
    ) -> None:
        super().__init__(name="counts", daemon=True)
        self.damage: str | None = None  # None: not looked for
        self.damage_unknown = ""  # why the search for it failed
        self.counted: dict[Q, Depths] = {}
        self.failed: tuple[Q, str] | None = None
        self.began = self.ended = clock.monotonic()
        self.snapshot = snapshot
        self.cancelled = False
        self._queues = queues
        self._clock = clock
        self._finds_damage = finds_damage

    def run(self) -> None:
        try:
            if self._finds_damage:
                try:
                    self.damage = self.snapshot.find_damage()
                except StorageError as error:  # it is looked for in the next pass
                    self.damage_unknown = error.message
            for queue in self._queues:
                if self.cancelled:
                    return
                try:
                    self.counted[queue] = self.snapshot.count(queue)
                except StorageError as error:
                    self.failed = queue, error.message
                    return
                if self._clock.monotonic() > self.began + _SNAPSHOT_SECONDS:
                    return
        finally:
            self.ended = self._clock.monotonic()
            self.snapshot.close()


class Counts(Generic[Q]):
    """Used by the owner's thread."""

    def __init__(
        self,
        take_snapshot: Callable[[], CountedSnapshot[Q]],
        clock: Clock,
        name_of: Callable[[Q], str],
    ) -> None:
        """`name_of`: a queue in messages."""
        self.suspects: set[Q] = set()  # queues whose counts show that somebody else writes there
        self._name_of = name_of
        self.damage = ""  # what disagrees in the store, as far as it was looked for
        self._finds_damage = False
        self._take_snapshot = take_snapshot
        self._clock = clock
        self._known: dict[Q, Counter[tuple[int, JobState]]] = {}
        self._wanted: dict[Q, None] = {}  # to be counted, in this order
        self._pass: _Pass[Q] | None = None
        self._outdated: set[Q] = set()  # wanted again since the snapshot was taken
        # What was committed since its snapshot.
        self._since: defaultdict[Q, Counter[tuple[int, JobState]]] = defaultdict(Counter)
        self._recount_at = self._retry_at = 0.0  # monotonic seconds

    def of(self, queue: Q) -> Depths | None:
        """Return the counts that are not 0, or None until the queue has been counted."""
        known = self._known.get(queue)
        return None if known is None else {key: jobs for key, jobs in known.items() if jobs > 0}

    def open_queue(self, queue: Q, depths: Depths | None) -> None:
        """Begin to keep the counts of a queue; None: not known."""
        if depths is None:
            self._wanted[queue] = None
        else:
            self._known[queue] = Counter(depths)

    def drop_queue(self, queue: Q) -> None:
        self._known.pop(queue, None)
        self._wanted.pop(queue, None)
        self.suspects.discard(queue)

    def recount(self, queue: Q) -> None:
        """Count `queue` in a snapshot that is yet to be taken: somebody else may have written to
        it."""
        self.suspects.discard(queue)
        self._wanted[queue] = None
        self._outdated.add(queue)

    def add(self, changes: Changes[Q]) -> None:
        """Add changes that the owner has committed."""
        for (queue, priority, state), jobs in changes.items():
            if self._pass is not None:
                self._since[queue][priority, state] += jobs
            depths = self._known.get(queue)
            if depths is not None:
                depths[priority, state] += jobs
                if depths[priority, state] < 0:  # jobs that we did not know of
                    self.suspects.add(queue)

    def find_damage(self) -> None:
        """Have the next pass look for it."""
        self._finds_damage = True

    def checked(self) -> None:
        """Note that the owner has looked through all jobs, and nothing disagrees any more."""
        self.damage, self._finds_damage = "", False

    @property
    def sound(self) -> bool:
        """Whether nothing disagrees in the store, and nothing is left to be looked for."""
        return not (self.damage or self._finds_damage)

    def poll(self) -> Changes[Q]:
        """Go on with counting. Returns corrections of what `of` says, for the owner to `add`."""
        if self._pass is None:
            self._begin()
        elif not self._pass.is_alive():
            return self._take_result(self._pass)
        return {}

    def cancel(self) -> None:
        """End the snapshot and whatever locks it holds; what is left is counted later."""
        if self._pass is not None and self._pass.is_alive():
            self._pass.cancelled = True
            self._pass.snapshot.cancel()
            self._pass.join(_CANCEL_SECONDS)

    def close(self) -> None:
        """Forget all counts, since the store is closed."""
        self.cancel()
        self._pass = None
        for known in (self._known, self._wanted, self._since, self.suspects):
            known.clear()
        self.damage, self._finds_damage = "", False
        self._recount_at = self._retry_at = 0.0

    def _begin(self) -> None:
        now = self._clock.monotonic()
        rests = now < self._recount_at and self._wanted.keys() <= self._known.keys()
        wanted = self._wanted or self._finds_damage
        if not wanted or rests or now < self._retry_at:
            return
        try:
            snapshot = self._take_snapshot()
        except StorageError as error:
            self._fail("counted", error.message)
            return
        self._since.clear()
        self._outdated.clear()
        self._pass = _Pass(
            snapshot, list(self._wanted), self._clock, finds_damage=self._finds_damage
        )
        self._pass.start()

    def _take_result(self, ended: _Pass[Q]) -> Changes[Q]:
        self._pass = None
        now = self._clock.monotonic()
        self._recount_at = now + (ended.ended - ended.began) / _RECOUNT_PART
        if ended.damage is not None and self._finds_damage:
            self._finds_damage = False
            self.damage = ended.damage
            if self.damage:
                log.error("the store disagrees with itself: %s", self.damage)
        if ended.failed is not None:
            queue, why = ended.failed
            if queue in self._wanted:  # the others are counted first
                self._wanted[queue] = self._wanted.pop(queue)
            self._fail("counted", "cancelled" if ended.cancelled else why)
        if ended.damage_unknown:
            self._fail("checked", "cancelled" if ended.cancelled else ended.damage_unknown)
        corrections: dict[tuple[Q, int, JobState], int] = {}
        for queue, depths in ended.counted.items():
            if queue in self._wanted:
                if queue not in self._outdated:
                    del self._wanted[queue]
                corrections |= self._corrections(queue, depths)
        return corrections

    def _corrections(self, queue: Q, snapshot: Depths) -> Changes[Q]:
        counted = Counter(snapshot)
        counted.update(self._since[queue])
        known: Depths = self._known.get(queue, Counter())
        corrections = {
            (queue, *key): jobs
            for key in counted.keys() | known.keys()
            if (jobs := counted.get(key, 0) - known.get(key, 0))
        }
        if queue not in self._known:
            self._known[queue] = Counter()
        elif corrections:
            name = self._name_of(queue)
            log.warning("the depths of queue %s did not match its jobs; they are corrected", name)
        return corrections

    def _fail(self, what: str, why: str) -> None:
        self._retry_at = self._clock.monotonic() + _RETRY_SECONDS
        log.warning("jobs can't be %s now, and are in %g s: %s", what, _RETRY_SECONDS, why)
