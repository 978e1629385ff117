"""What a worker holds of one queue: jobs that wait, jobs that run, and ends yet to be reported.

Threads meet here and nowhere else: fetchers add jobs and take acks along, handlers begin and finish
jobs, the reporter takes what it has to say. Nothing here does I/O; times are monotonic seconds.

Beginning and finishing a job costs no lock as long as jobs wait: handlers use two deques, whose
`append` and `popleft` are atomic. A thread that is about to sleep sets a flag *before* it looks
once more, and one that has changed something looks at that flag *after*; so no wake-up is lost.
Everything else is under the lock.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from pinlaterd.client.client import Client
from pinlaterd.client.outcomes import HANDED_BACK, Ending, Outcome
from pinlaterd.client.running_job import Claim, RunningJob
from pinlaterd.client.runs import RunFigures, Runs
from pinlaterd.model import ClaimedJob

# A report that failed is repeated after so long.
REPEAT_SECONDS = 1.0
# Jobs that have waited for so long are released: the pool is slower than it was.
HOARD_SECONDS = 1.0
_AWAKE = -1  # as `_fetch_below`: no fetcher sleeps that a number of waiting jobs could wake


class LaneFacts(NamedTuple):
    """What a worker does for a queue at one moment; the last four count since it began."""

    queue: str
    concurrency: int
    waiting: int  # claimed, not begun
    running: int
    dequeues: int
    dequeue_errors: int
    claims_lost: int
    runs: RunFigures


class Unreported:
    """Ends that the service is yet to be told of. Not thread-safe."""

    def __init__(self, ack_seconds: float) -> None:
        """`ack_seconds`: how long the end of a job waits for a dequeue to take it along."""
        self.acks: list[Claim] = []  # never tried
        self._ack_seconds = ack_seconds
        self._checkpoints: list[Claim] = []  # ends that take one: postponed, discarded
        self._repeats: list[tuple[float, Claim]] = []  # when to tell again what failed

    def __len__(self) -> int:
        return len(self.acks) + len(self._checkpoints) + len(self._repeats)

    def add(self, claim: Claim) -> None:
        (self._checkpoints if claim.takes_checkpoint() else self.acks).append(claim)

    def repeat(self, claim: Claim, at: float) -> None:
        self._repeats.append((at, claim))

    def due_at(self, *, stopping: bool) -> float:
        if self._checkpoints or (self.acks and stopping):
            return -math.inf
        acks_at = self.acks[0].ended_at + self._ack_seconds if self.acks else math.inf
        return min(acks_at, min((at for at, _ in self._repeats), default=math.inf))

    def take_due(self, now: float, *, stopping: bool) -> list[Claim]:
        due, self._checkpoints = self._checkpoints, []
        due += [claim for at, claim in self._repeats if at <= now]
        self._repeats = [entry for entry in self._repeats if entry[0] > now]
        if self.acks and (stopping or self.acks[0].ended_at + self._ack_seconds <= now):
            due += self.acks
            self.acks = []
        return due

    def clear(self) -> None:
        self.acks, self._checkpoints, self._repeats = [], [], []


class InFlight:
    """Every claim is waiting, then running, then ended, then gone. All methods are thread-safe."""

    def __init__(
        self,
        queue: str,
        client: Client,
        concurrency: int,
        *,
        fetchers: int,
        ahead_seconds: float,
        ack_seconds: float,
    ) -> None:
        self._queue = queue
        self._get_client = lambda: client
        self._concurrency = concurrency
        self.stopping = threading.Event()

        self._waiting: deque[Claim] = deque()
        self._ended: deque[Claim] = deque()

        self._lock = threading.Lock()
        self._held: set[Claim] = set()  # waiting, running, or ended and not sorted yet
        self._unreported = Unreported(ack_seconds)
        self._renewal_at = math.inf  # no claim is to be renewed before
        self._dequeues = 0
        self._dequeue_errors = 0
        self._lost = 0
        self._runs = Runs(concurrency, ahead_seconds)

        self._job_waits = threading.Condition(self._lock)  # handlers wait for it
        self._idle = 0  # so many do
        self._waking = False  # one was woken and is on its way
        self._room = threading.Condition(self._lock)  # fetchers wait for it
        self._fetch_below = _AWAKE
        self._due = threading.Condition(self._lock)  # the reporter waits for it
        self._reporter_sleeps = False  # it is to be told when a job ends
        self._reporter_due_at = -math.inf  # until when it sleeps anyway
        self._tell_ready: Callable[[], None] | None = None

        self._given_up = False
        self._reporting = 0  # so many ends the reporter is telling now
        self._fetchers = fetchers
        self._asked = 0  # so many jobs are asked for by dequeues under way
        self._plenty = False  # the last dequeue brought all that it asked for

    # --- fetchers -------------------------------------------------------------------------

    def wait_for_room(self) -> int:
        """Block until it is time for a dequeue; return for how many jobs, 0 once stopped.

        What comes of it must be handed to `add`. While one is under way there is a second one only
        if the queue had plenty: all that the last one asked for.
        """
        with self._lock:
            while not self.stopping.is_set():
                self._watch_room()
                if room := self._claimable():
                    self._asked += room
                    self._dequeues += 1
                    self._watch_room()
                    return room
                self._room.wait()
            return 0

    def add(self, jobs: Iterable[ClaimedJob], now: float, *, asked: int) -> None:
        """Take what a dequeue for `asked` jobs has claimed; once stopped, release it at once."""
        claims = [Claim(job, now) for job in jobs]
        with self._lock:
            self._asked -= asked
            self._plenty = len(claims) >= asked
            if self._plenty:
                self._room.notify()
            if not claims:
                return
            if self.stopping.is_set():
                self._release(claims)
                return
            self._held.update(claims)
            self._renewal_at = min(self._renewal_at, *(claim.renew_at for claim in claims))
            self._waiting.extend(claims)
            self._wake_handler()
            if min(self._renewal_at, now + HOARD_SECONDS) < self._reporter_due_at:
                self._due.notify()
        if self._tell_ready is not None:
            self._tell_ready()

    def take_acks(self) -> list[Claim]:
        """The acks that were never tried. One that failed is the reporter's: with its shard down,
        it would fail every dequeue that takes it along."""
        with self._lock:
            self._sort_ended()
            acks, self._unreported.acks = self._unreported.acks, []
            return acks

    def dequeue_failed(self) -> None:
        with self._lock:
            self._dequeue_errors += 1

    def end_of_fetching(self) -> None:
        """No more jobs come from one of the fetchers."""
        with self._lock:
            self._fetchers -= 1
            self._due.notify()

    # --- handlers -------------------------------------------------------------------------

    def begin(self) -> RunningJob | None:
        """Take a job that waits, if there is one. It must be finished, once. Never blocks."""
        claim = self._take()
        if claim is None:
            with self._lock:
                if self._fetch_below >= 0:
                    self._room.notify()  # a place is free
                if self.stopping.is_set():
                    self._due.notify()  # what was lost before it was begun has ended, too
            return None
        waiting = len(self._waiting)
        if waiting <= self._fetch_below or (waiting and self._idle and not self._waking):
            with self._lock:
                self._wake_handler()
                if waiting <= self._fetch_below:
                    self._fetch_below = _AWAKE
                    self._room.notify()
        claim.began_at = time.monotonic()
        return RunningJob(self._queue, claim, self._get_client)

    def wait(self) -> RunningJob | None:
        """Block until a job waits and take it; None once stopped."""
        while (job := self.begin()) is None:
            with self._lock:
                if self.stopping.is_set():
                    return None
                self._idle += 1
                if not self._waiting:
                    self._job_waits.wait()
                self._idle -= 1
                self._waking = False
        return job

    def when_ready(self, tell: Callable[[], None]) -> None:
        """Call `tell`, from any thread, whenever jobs were added."""
        self._tell_ready = tell

    def finish(self, job: RunningJob, outcome: Outcome, now: float) -> None:
        claim = job.claim
        claim.ended_at = now
        claim.outcome = outcome
        self._ended.append(claim)
        if self._reporter_sleeps or claim.takes_checkpoint():
            with self._lock:
                self._due.notify()

    # --- the reporter ---------------------------------------------------------------------

    def wait_until_due(self, now: float) -> bool:
        """Block until there may be something to report; False once all is, and stopped."""
        with self._lock:
            self._reporter_sleeps = True
            self._reporting = 0
            self._sort_ended()
            if self._given_up or self._is_drained():
                return False
            self._reporter_due_at = self._next_due()
            if self._reporter_due_at > now:
                # With an ack that is due soon there is no need to be told of more.
                self._reporter_sleeps = not self._unreported.acks
                no_end = self._reporter_due_at == math.inf
                self._due.wait(None if no_end else self._reporter_due_at - now)
            self._reporter_sleeps = False
            self._reporter_due_at = -math.inf
            return True

    def take_reports(self, now: float) -> list[Claim]:
        """The ends that are to be reported now."""
        with self._lock:
            self._sort_ended()
            if self._oldest_waiting_at() + HOARD_SECONDS <= now:
                self._runs.stalled(HOARD_SECONDS)
                self._release_waiting()
            reports = self._unreported.take_due(now, stopping=self.stopping.is_set())
            self._reporting = len(reports)
            return reports

    def repeat_later(self, claims: Iterable[Claim], now: float) -> list[Claim]:
        """Keep what could not be reported for another try; return those that it is too late for."""
        late = []
        with self._lock:
            if self._given_up:
                return []
            for claim in claims:
                if claim.expires_at <= now:
                    late.append(claim)
                else:
                    self._unreported.repeat(claim, now + REPEAT_SECONDS)
            self._due.notify()
        return late

    def take_renewals(self, now: float) -> list[Claim]:
        """The claims that are to be renewed now."""
        with self._lock:
            if self._renewal_at > now:
                return []
            self._sort_ended()
            held = [claim for claim in self._held if claim.outcome is None and not claim.is_lost]
            due = [claim for claim in held if claim.renew_at <= now]
            self._renewal_at = min((c.renew_at for c in held if c.renew_at > now), default=math.inf)
            return due

    def renewed(self, claims: Iterable[Claim], now: float, *, done: bool) -> None:
        """Note that these claims were renewed at `now`, or that it did not work."""
        with self._lock:
            for claim in claims:
                if done:
                    claim.renewed(now)
                else:
                    claim.not_renewed(now)
                self._renewal_at = min(self._renewal_at, claim.renew_at)

    # --- the end --------------------------------------------------------------------------

    def stop(self) -> None:
        """Begin no more jobs: those that wait are released; those that run may finish."""
        with self._lock:
            self.stopping.set()
            self._release_waiting()
            self._room.notify_all()
            self._job_waits.notify_all()
            self._due.notify()

    def abandon(self) -> None:
        """Release what still runs; what comes of it is dropped."""
        with self._lock:
            self._sort_ended()
            running = [claim for claim in self._held if claim.outcome is None]
            self._release(claim.copy() for claim in running if not claim.is_lost)
            self._held.difference_update(running)
        for claim in running:
            claim.lose()

    def give_up(self) -> int:
        """Forget what could not be reported; return how much, with what is being reported."""
        with self._lock:
            self._sort_ended()
            self._given_up = True
            forgotten = len(self._unreported) + self._reporting
            self._unreported.clear()
            self._due.notify()
            return forgotten

    def facts(self) -> LaneFacts:
        with self._lock:
            self._sort_ended()
            return LaneFacts(
                self._queue,
                self._concurrency,
                len(self._waiting),
                self._running(),
                self._dequeues,
                self._dequeue_errors,
                self._lost,
                self._runs.figures(),
            )

    # --- without the lock -----------------------------------------------------------------

    def _take(self) -> Claim | None:
        while True:
            try:
                claim = self._waiting.popleft()
            except IndexError:
                return None
            if not claim.is_lost:
                return claim
            self._ended.append(claim)

    # --- under the lock -------------------------------------------------------------------

    def _wake_handler(self) -> None:
        """Wake one handler; it wakes another one when it finds more to do. So jobs that end before
        a second one could begin cost a single wake-up."""
        if self._waiting and self._idle and not self._waking:
            self._waking = True
            self._job_waits.notify()

    def _watch_room(self) -> None:
        """Say below which number of waiting jobs a fetcher is to be woken."""
        may_fetch = self._plenty or not self._asked
        self._fetch_below = self._runs.claim_below - self._asked if may_fetch else _AWAKE

    def _claimable(self) -> int:
        if self._asked and not self._plenty:
            return 0
        coming = len(self._waiting) + self._asked
        return self._runs.claimable(running=self._running(), waiting=coming)

    def _running(self) -> int:
        return max(0, len(self._held) - len(self._waiting) - len(self._ended))

    def _sort_ended(self) -> None:
        """Count what has ended, and sort it by what is to be reported."""
        while True:
            try:
                claim = self._ended.popleft()
            except IndexError:
                return
            if claim not in self._held:
                continue  # abandoned
            self._held.remove(claim)
            is_lost = claim.is_lost or claim.outcome is None or claim.outcome.ending is Ending.LOST
            if claim.outcome is not None:  # else it was lost while it waited
                ending = Ending.LOST if is_lost else claim.outcome.ending
                self._runs.add(ending, claim.ended_at - claim.began_at)
            if is_lost:
                self._lost += 1
            else:
                self._unreported.add(claim)

    def _release_waiting(self) -> None:
        claims = []
        while (claim := self._take()) is not None:
            claims.append(claim)
        self._held.difference_update(claims)
        self._release(claims)

    def _release(self, claims: Iterable[Claim]) -> None:
        for claim in claims:
            claim.outcome = HANDED_BACK
            self._unreported.add(claim)
        self._due.notify()

    def _oldest_waiting_at(self) -> float:
        try:
            return self._waiting[0].claimed_at
        except IndexError:
            return math.inf

    def _next_due(self) -> float:
        return min(
            self._unreported.due_at(stopping=self.stopping.is_set()),
            self._renewal_at,
            self._oldest_waiting_at() + HOARD_SECONDS,
        )

    def _is_drained(self) -> bool:
        return self.stopping.is_set() and not (self._fetchers or self._held or self._unreported)
