"""The jobs of a queue that a worker holds: some wait, some run, some have ends to be reported.

Threads meet here alone: fetchers add jobs and take acks along, handlers begin and finish jobs, the
reporter takes what it has to report. Nothing here does I/O; times are monotonic seconds. Only a
handler's thread ever waits here: fetchers and reporter are woken by what `wake` was given.

Beginning and finishing a job takes no lock while jobs wait: handlers use two deques, whose `append`
and `popleft` are atomic. Who is about to sleep notes that *before* it looks once more, and one that
has changed something looks at the note *after*: so no wake-up is lost, and few are made. Everything
else is under the lock.
"""

from __future__ import annotations

import math
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from pinlaterd.client.client import Client
from pinlaterd.client.running_job import (
    HANDED_OVER,
    RELEASED,
    SUCCEEDED,
    Ending,
    Outcome,
    RunningJob,
    unfinished,
)
from pinlaterd.model import ClaimedJob

# While handlers are busy with what one has brought the other is on its way.
FETCHERS = 2
# A report that failed is repeated after so long.
REPEAT_SECONDS = 1.0
# Jobs that have waited for so long are released: handlers are slower than they were.
HOARD_SECONDS = 1.0
# The most jobs that one dequeue claims; twice that wait at most: one answer while the next comes.
LARGEST_CLAIM = 1000
# Upper bounds of the histogram of run times, in seconds.
BOUNDS_SECONDS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0),
)
# A new run's weight in the mean: the last dozen decide.
_WEIGHT = 1 / 12
_NEVER = -1  # as `_fetch_at`: no fetcher sleeps that a number of waiting jobs could wake


class RunFigures(NamedTuple):
    """Runs at one moment. `within` says for each of BOUNDS_SECONDS how many took no longer."""

    endings: Mapping[Ending, int]
    seconds: float  # of all together
    within: Sequence[int]

    @property
    def total(self) -> int:
        return sum(self.endings.values())


class QueueFigures(NamedTuple):
    """The figures of one queue of a worker at one moment; the last four count since it began."""

    queue: str
    concurrency: int
    waiting: int  # claimed, not begun
    running: int
    dequeues: int
    dequeue_errors: int
    claims_lost: int
    runs: RunFigures


class Runs:
    """Counts runs, and knows how many jobs `concurrency` places will begin within `ahead_seconds`,
    by how long jobs took so far: jobs that run for minutes are claimed only when a place is free
    for them, so that other workers can have the rest. Not thread-safe."""

    def __init__(self, concurrency: int, ahead_seconds: float) -> None:
        self._concurrency = concurrency
        self._ahead_seconds = ahead_seconds
        self._mean_seconds: float | None = None
        self._endings = dict.fromkeys(Ending, 0)
        self._seconds = 0.0
        self._buckets = [0] * (len(BOUNDS_SECONDS) + 1)

    def limit(self, concurrency: int) -> None:
        self._concurrency = concurrency

    def add(self, ending: Ending, seconds: float) -> None:
        """Note that a job has run for so long."""
        self._endings[ending] += 1
        self._seconds += seconds
        self._buckets[bisect_left(BOUNDS_SECONDS, seconds)] += 1
        if ending is not Ending.LOST:
            mean = self._mean_seconds
            self._mean_seconds = seconds if mean is None else mean + (seconds - mean) * _WEIGHT

    def stalled(self, seconds: float) -> None:
        """Note that a job has waited so long to be begun: the mean has promised too much."""
        self._mean_seconds = max(seconds, self._mean_seconds or 0.0)

    def figures(self) -> RunFigures:
        return RunFigures(dict(self._endings), self._seconds, [*accumulate(self._buckets[:-1])])

    @property
    def ahead(self) -> int:
        """Return how many jobs may wait; 0 before the first has run: its time is unknown."""
        if self._mean_seconds is None or not self._ahead_seconds:
            return 0
        run_seconds = self._ahead_seconds * self._concurrency
        # A mean of 0 is nearly so.
        return int(min(2 * LARGEST_CLAIM, run_seconds / max(self._mean_seconds, 1e-9)))

    @property
    def claim_below(self) -> int:
        """With so many waiting, or fewer, it is time to claim more."""
        return self.ahead // 2

    def claimable(self, *, running: int, waiting: int) -> int:
        """Return how many jobs to claim now."""
        if waiting > self.claim_below:
            return 0
        free = max(0, self._concurrency - running)
        return max(0, min(LARGEST_CLAIM, free + self.ahead - waiting))


def takes_checkpoint(job: RunningJob, outcome: Outcome) -> bool:
    """Tell whether more than an ack is needed to report it."""
    if outcome.ending is Ending.DISCARDED:
        return job.attempts_remaining > 1
    return outcome.ending is Ending.POSTPONED


class InFlight:
    """Each job is waiting, then running, then ended, then reported. Methods are thread-safe."""

    def __init__(
        self,
        queue: str,
        client: Client,
        concurrency: int,
        *,
        ahead_seconds: float,
        ack_seconds: float,
        keeps_single_attempts: bool = False,
    ) -> None:
        """`ack_seconds`: how long the end of a job waits for a dequeue to take it along.
        `keeps_single_attempts`: what was claimed of jobs that run at most once is begun here, also
        after `stop`, or fails: it is never released."""
        self.queue = queue
        self.client = client
        self._concurrency = concurrency
        self._ack_seconds = ack_seconds
        self._keeps_single_attempts = keeps_single_attempts
        self.stopping = threading.Event()
        self.abandoned = False
        self._tell_ready: Callable[[], None] | None = None
        self.wake(room=lambda: None, due=lambda: None)  # no fetcher or reporter is at work yet
        self._waiting: deque[RunningJob] = deque()
        # With the outcome, or None if the claim was lost before it began.
        self._ended: deque[tuple[RunningJob, Outcome | None]] = deque()

        self._lock = threading.Lock()
        self._held: set[RunningJob] = set()  # waiting, running, or ended and not sorted yet
        self._acks: list[RunningJob] = []  # ended, and never reported yet
        # When to report what the reporter alone does: checkpoints, and what failed before.
        self._reports: list[tuple[float, RunningJob]] = []
        self._reporting = 0  # so many ends the reporter reports now
        # No claim is to be renewed before, and how long the latest ones last; the reporter reads.
        self.renewal_at = self.claim_seconds = math.inf
        self._dequeues = 0
        self._dequeue_errors = 0
        self._lost = 0
        self._runs = Runs(concurrency, ahead_seconds)

        self._job_waits = threading.Condition(self._lock)  # handlers wait for it
        self._idle = 0  # so many do
        self._waking = False  # one was woken and is on its way
        self._fetch_at = _NEVER  # with so few jobs waiting
        self._asked = 0  # so many jobs are asked for by dequeues under way
        self._plenty = False  # the last dequeue brought all that it asked for
        self._reporter_sleeps_until = -math.inf
        self._given_up = False
        self._released_at = -math.inf  # what waited

    # --- fetchers -------------------------------------------------------------------------

    def wake(self, *, room: Callable[[], object], due: Callable[[], object]) -> None:
        """Call `room` when it may be time for a dequeue, and `due` when something may have to be
        reported sooner than `due_at` said. Any thread calls them; they must not block."""
        self._tell_room = room
        self._tell_due = due

    def take_room(self) -> int:
        """Return for how many jobs a dequeue should ask now; 0: for none yet. What it brings must
        be handed to `add`. While one is under way there is a second one only if the last one
        brought all that it asked for."""
        with self._lock:
            if self.stopping.is_set():
                return 0
            self._watch_room()
            if room := self._claimable():
                self._asked += room
                self._dequeues += 1
                self._watch_room()
            return room

    def add(
        self, jobs: Iterable[ClaimedJob], now: float, *, asked: int, failed: bool = False
    ) -> None:
        """Take what a dequeue for `asked` jobs has claimed; once stopped, release it at once, but
        for what is kept."""
        claimed = [RunningJob(self.queue, job, self.client, now) for job in jobs]
        with self._lock:
            self._dequeue_errors += failed
            self._asked -= asked
            self._plenty = len(claimed) >= asked
            if self._plenty:
                self._tell_room()
            if self.stopping.is_set():
                claimed = self._release_but_kept(claimed)
                self._job_waits.notify_all()
            if not claimed:
                return
            self._held.update(claimed)
            self._waiting.extend(claimed)
            self.claim_seconds = claimed[-1].claimed.claim_timeout_seconds or math.inf
            self.renewal_at = min(self.renewal_at, *(job.renew_at for job in claimed))
            self._wake_handler()
            self._wake_reporter(min(self.renewal_at, now + HOARD_SECONDS))
        if self._tell_ready is not None:
            self._tell_ready()

    def take_acks(self) -> list[RunningJob]:
        """Take the acks that were never tried. One that failed is the reporter's: with its shard
        down, it would fail every dequeue that takes it along."""
        with self._lock:
            self._sort_ended()
            acks, self._acks = self._acks, []
            return acks

    # --- handlers -------------------------------------------------------------------------

    def begin(self) -> RunningJob | None:
        """Take a job that waits, if there is one. It must be finished, once. Never blocks."""
        job = self._take()
        waiting = len(self._waiting)
        if waiting <= self._fetch_at or (waiting and self._idle and not self._waking):
            with self._lock:
                if waiting <= self._fetch_at:
                    self._fetch_at = _NEVER
                    self._tell_room()
                self._wake_handler()
        if job is not None:
            job.began_at = time.monotonic()
        elif self.stopping.is_set():
            with self._lock:
                self._tell_due()  # what was lost before it was begun has ended, too
        return job

    def wait(self) -> RunningJob | None:
        """Block until a job waits and take it; None once stopped, and no dequeue is under way."""
        while (job := self.begin()) is None:
            with self._lock:
                if self.stopping.is_set() and not self._asked:
                    return None
                self._idle += 1
                if not self._waiting:
                    self._job_waits.wait()
                self._idle -= 1
                self._waking = False
        return job

    def _take(self) -> RunningJob | None:
        while True:
            try:
                job = self._waiting.popleft()
            except IndexError:
                return None
            if not job.lost:
                return job
            self._ended.append((job, None))

    def limit(self, concurrency: int) -> None:
        """Claim for so many places from now on; what is claimed already is begun all the same."""
        with self._lock:
            self._concurrency = concurrency
            self._runs.limit(concurrency)
            self._tell_room()

    def when_ready(self, tell: Callable[[], None]) -> None:
        """Call `tell`, from any thread, whenever jobs were added."""
        self._tell_ready = tell

    def finish(self, job: RunningJob, outcome: Outcome, now: float) -> None:
        job.ended_at = now
        self._ended.append((job, outcome))
        is_ack = outcome is SUCCEEDED or not takes_checkpoint(job, outcome)
        due_at = now + self._ack_seconds if is_ack else -math.inf
        if due_at < self._reporter_sleeps_until:
            with self._lock:
                self._wake_reporter(due_at)

    # --- the reporter ---------------------------------------------------------------------

    def due_at(self) -> float | None:
        """Return when there is something to report next; None once all is reported, and stopped.
        The reporter is woken for what comes sooner."""
        with self._lock:
            self._reporting = 0
            self._reporter_sleeps_until = math.inf
            self._sort_ended()
            is_empty = not (self._asked or self._held or self._acks or self._reports)
            if self._given_up or (self.stopping.is_set() and is_empty):
                return None
            self._reporter_sleeps_until = self._next_due()
            return self._reporter_sleeps_until

    def take_reports(self, now: float) -> list[RunningJob]:
        """Take the ended jobs that are to be reported now."""
        with self._lock:
            self._sort_ended()
            if self._hoard_due_at() <= now:
                self._runs.stalled(HOARD_SECONDS)
                self._release_waiting(now)
            due = [job for at, job in self._reports if at <= now]
            self._reports = [(at, job) for at, job in self._reports if at > now]
            if self._acks_due_at() <= now:
                due += self._acks
                self._acks = []
            self._reporting = len(due)
            return due

    def repeat_later(
        self, jobs: Sequence[RunningJob], now: float, *, after_seconds: float = REPEAT_SECONDS
    ) -> list[RunningJob]:
        """Keep what could not be reported for another try; return those that it is too late for."""
        with self._lock:
            if self._given_up:
                return []
            late = [job for job in jobs if job.expires_at <= now]
            at = now + after_seconds
            self._reports += [(at, job) for job in jobs if job.expires_at > now]
            self._wake_reporter(at)
            return late

    def take_renewals(self, now: float) -> list[RunningJob]:
        """Return the jobs whose claims are to be renewed now."""
        with self._lock:
            if self.renewal_at > now:
                return []
            self._sort_ended()
            held = [job for job in self._held if not job.lost]
            # Look at those that are due now once more: their renewal may end by any error.
            again_at = now + REPEAT_SECONDS
            times = (job.renew_at if job.renew_at > now else again_at for job in held)
            self.renewal_at = min(times, default=math.inf)
            return [job for job in held if job.renew_at <= now]

    def renewed(self, jobs: Iterable[RunningJob], now: float, *, done: bool) -> None:
        """Note that these claims were renewed at `now`, or that it did not work."""
        with self._lock:
            for job in jobs:
                (job.renewed if done else job.not_renewed)(now)
                self.renewal_at = min(self.renewal_at, job.renew_at)

    # --- the end --------------------------------------------------------------------------

    def stop(self) -> None:
        """Begin no more jobs but those that are kept: the others that wait are released; those that
        run may finish."""
        with self._lock:
            self.stopping.set()
            self._ack_seconds = -math.inf
            self._release_waiting(-math.inf)
            self._job_waits.notify_all()
            self._tell_room()
            self._tell_due()

    def abandon(self) -> None:
        """Release what still runs, or fail it if it has a single attempt; what it returns or raises
        is dropped."""
        with self._lock:
            self._sort_ended()
            self.abandoned = True  # before `lose`, which wakes up those who look at this
            running, self._held = self._held, set()
            self._waiting.clear()
            for job in running:
                if not job.lost:
                    self._to_report(job, unfinished(job))
            self._wake_reporter(-math.inf)
        for job in running:
            job.lose()

    def give_up(self) -> int:
        """Forget what could not be reported; return how much, with what is being reported."""
        with self._lock:
            self._sort_ended()
            self._given_up = True
            forgotten = self._reporting + len(self._acks) + len(self._reports)
            self._acks, self._reports = [], []
            self._tell_due()
            return forgotten

    def facts(self) -> QueueFigures:
        with self._lock:
            self._sort_ended()
            return QueueFigures(
                self.queue,
                self._concurrency,
                len(self._waiting),
                self._running(),
                self._dequeues,
                self._dequeue_errors,
                self._lost,
                self._runs.figures(),
            )

    # --- under the lock -------------------------------------------------------------------

    def _wake_handler(self) -> None:
        """Wake one handler; it wakes another one when it finds more to do. So jobs that end before
        a second one could begin cost a single wake-up."""
        if self._waiting and self._idle and not self._waking:
            self._waking = True
            self._job_waits.notify()

    def _wake_reporter(self, due_at: float) -> None:
        """Wake the reporter, unless it wakes by then anyway."""
        if due_at < self._reporter_sleeps_until:
            self._reporter_sleeps_until = -math.inf
            self._tell_due()

    def _watch_room(self) -> None:
        """Note with how few waiting jobs a fetcher is to be woken."""
        may_fetch = self._plenty or not self._asked
        self._fetch_at = self._runs.claim_below - self._asked if may_fetch else _NEVER

    def _claimable(self) -> int:
        if self._asked and not self._plenty:
            return 0
        coming = len(self._waiting) + self._asked
        return self._runs.claimable(running=self._running(), waiting=coming)

    def _running(self) -> int:
        return max(0, len(self._held) - len(self._waiting) - len(self._ended))

    def _sort_ended(self) -> None:
        """Count what has ended, and sort it by how it is to be reported."""
        while self._ended:
            job, outcome = self._ended.popleft()
            if job not in self._held:
                continue  # abandoned
            self._held.remove(job)
            is_lost = job.lost or outcome is None or outcome.ending is Ending.LOST
            if outcome is not None:
                ending = Ending.LOST if is_lost else outcome.ending
                self._runs.add(ending, job.ended_at - job.began_at)
            if is_lost or outcome is None:
                self._lost += 1
            elif outcome is not HANDED_OVER:
                self._to_report(job, outcome)

    def _to_report(self, job: RunningJob, outcome: Outcome) -> None:
        job.outcome = outcome
        if outcome is SUCCEEDED or not takes_checkpoint(job, outcome):
            self._acks.append(job)
        else:
            self._reports.append((-math.inf, job))

    def _release_waiting(self, now: float) -> None:
        self._released_at = now
        waiting = [*iter(self._take, None)]
        self._held.difference_update(waiting)
        kept = self._release_but_kept(waiting)
        self._held.update(kept)
        self._waiting.extend(kept)

    def _release_but_kept(self, jobs: Iterable[RunningJob]) -> list[RunningJob]:
        """Release jobs; return those that are to be begun here all the same."""
        kept: list[RunningJob] = []
        for job in jobs:
            if not (self._keeps_single_attempts and job.attempts_allowed == 1):
                self._to_report(job, RELEASED)
            elif self.abandoned:
                self._to_report(job, unfinished(job))
            else:
                kept.append(job)
        self._wake_reporter(-math.inf)
        return kept

    def _hoard_due_at(self) -> float:
        """Return when jobs will have waited for too long."""
        try:
            return max(self._waiting[0].claimed_at, self._released_at) + HOARD_SECONDS
        except IndexError:
            return math.inf

    def _acks_due_at(self) -> float:
        return self._acks[0].ended_at + self._ack_seconds if self._acks else math.inf

    def _next_due(self) -> float:
        return min(
            min((at for at, _ in self._reports), default=math.inf),
            self._acks_due_at(),
            self.renewal_at,
            self._hoard_due_at(),
        )
