"""What a lane has in hand: jobs that wait, jobs that run, and what is yet to be said of those that
ended.

Threads meet here and nowhere else: the fetcher adds jobs and takes acks along, handlers begin and
finish jobs, the keeper does the chores. Nothing here does I/O; the time (monotonic seconds) is an
argument.

Beginning and finishing a job costs no lock as long as jobs wait: handlers use two deques, whose
`append` and `popleft` are atomic. Who is about to sleep says so in a flag *before* it looks once
more, and who has changed something looks at that flag *after*; so no wake-up is lost. Everything
else is under the lock.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from pinlaterd.client.ahead import Pace
from pinlaterd.client.outcomes import HANDED_BACK, Ending, Outcome
from pinlaterd.client.run_counts import RunCounts, RunFigures
from pinlaterd.client.running_job import Claim
from pinlaterd.model import ClaimedJob

# What could not be said is said again after so long.
REPEAT_SECONDS = 1.0
# Jobs that have waited for so long go back to the service: the pool is slower than it was.
HOARD_SECONDS = 1.0

_SLEEPS_NOT = -1  # as `_fetch_below`


class Chores(NamedTuple):
    """What the keeper has to say now."""

    acks: Sequence[Claim]
    settlements: Sequence[Claim]  # ends that take a checkpoint: postponed, discarded


class Counts(NamedTuple):
    """What a lane holds, and how many claims it has lost, and what it ran, since it began."""

    waiting: int
    running: int
    lost: int
    runs: RunFigures


class ClaimsInHand:
    """Every claim is waiting, then running, then ended, then gone. All methods are thread-safe."""

    def __init__(
        self, concurrency: int, *, fetchers: int, ahead_seconds: float, ack_seconds: float
    ) -> None:
        """`ack_seconds`: how long the end of a job waits for a dequeue to take it along."""
        self._ack_seconds = ack_seconds
        self._pace = Pace(concurrency, ahead_seconds)

        self._waiting: deque[Claim] = deque()
        self._ended: deque[Claim] = deque()

        self._lock = threading.Lock()
        self._in_hand: set[Claim] = set()  # waiting, running, or ended and not collected yet
        self._acks: list[Claim] = []  # ended, never tried
        self._settlements: list[Claim] = []
        self._repeats: list[tuple[float, Claim]] = []  # when to say again what could not be said
        self._renewal_at = math.inf  # no claim is to be renewed before
        self._lost = 0
        self._runs = RunCounts()

        self._job_waits = threading.Condition(self._lock)  # handlers wait for it
        self._idle = 0  # so many do
        self._waking = False  # one was woken and is on its way
        self._room = threading.Condition(self._lock)  # fetchers wait for it
        self._fetch_below = _SLEEPS_NOT  # below 0: no number of waiting jobs wakes one
        self._stopping = threading.Condition(self._lock)  # fetchers that pause wait for it
        self._chore = threading.Condition(self._lock)  # the keeper waits for it
        self._keeper_sleeps = False  # it is to be told when a job ends
        self._keeper_due_at = -math.inf  # until when it sleeps anyway
        self._tell_ready: Callable[[], None] | None = None

        self._stopped = False
        self._given_up = False
        self._saying = 0  # so many ends the keeper is telling now
        self._fetchers = fetchers
        self._asked = 0  # so many jobs are asked for by dequeues under way
        self._plenty = False  # the last dequeue brought all that it asked for

    # --- the fetchers ---------------------------------------------------------------------

    def wait_for_room(self) -> int:
        """Block until it is time for a dequeue; return for how many jobs, 0 once stopped.

        What comes of it must be handed to `add`. While one is under way there is a second one only
        if the queue had plenty: all that the last one asked for.
        """
        with self._lock:
            while not self._stopped:
                self._watch_room()
                if room := self._claimable():
                    self._asked += room
                    self._watch_room()
                    return room
                self._room.wait()
            return 0

    def pause(self, seconds: float) -> None:
        """Block for so long, or until stopped."""
        with self._lock:
            self._stopping.wait_for(lambda: self._stopped, seconds)

    def add(self, jobs: Iterable[ClaimedJob], now: float, *, asked: int) -> None:
        """Take what a dequeue for `asked` jobs has claimed; once stopped, it goes back at once."""
        claims = [Claim(job, now) for job in jobs]
        with self._lock:
            self._asked -= asked
            self._plenty = len(claims) >= asked
            if self._plenty:
                self._room.notify()
            if not claims:
                return
            if self._stopped:
                self._hand_back(claims)
                return
            self._in_hand.update(claims)
            self._renewal_at = min(self._renewal_at, *(claim.renew_at for claim in claims))
            self._waiting.extend(claims)
            self._wake_handler()
            if min(self._renewal_at, now + HOARD_SECONDS) < self._keeper_due_at:
                self._chore.notify()
        if self._tell_ready is not None:
            self._tell_ready()

    def take_acks(self) -> list[Claim]:
        """The acks that were never tried. One that failed is the keeper's: with its shard down,
        it would fail every dequeue that takes it along."""
        with self._lock:
            self._collect()
            acks, self._acks = self._acks, []
            return acks

    def end_of_fetching(self) -> None:
        """No more jobs come from one of the fetchers."""
        with self._lock:
            self._fetchers -= 1
            self._chore.notify()

    # --- handlers -------------------------------------------------------------------------

    def begin(self) -> Claim | None:
        """Take a job that waits, if there is one."""
        claim = self._take()
        if claim is None:
            with self._lock:
                if self._fetch_below >= 0:
                    self._room.notify()  # a place is free
                if self._stopped:
                    self._chore.notify()  # what was lost before it was begun has ended, too
            return None
        waiting = len(self._waiting)
        if waiting <= self._fetch_below or (waiting and self._idle and not self._waking):
            with self._lock:
                self._wake_handler()
                if waiting <= self._fetch_below:
                    self._fetch_below = _SLEEPS_NOT
                    self._room.notify()
        return claim

    def wait(self) -> Claim | None:
        """Block until a job waits and take it; None once stopped."""
        while (claim := self.begin()) is None:
            with self._lock:
                if self._stopped:
                    return None
                self._idle += 1
                if not self._waiting:
                    self._job_waits.wait()
                self._idle -= 1
                self._waking = False
        return claim

    def when_ready(self, tell: Callable[[], None]) -> None:
        """Call `tell` whenever jobs were added."""
        self._tell_ready = tell

    def finish(self, claim: Claim, outcome: Outcome, now: float) -> None:
        claim.ended_at = now
        claim.outcome = outcome
        self._ended.append(claim)
        if self._keeper_sleeps or claim.takes_checkpoint():
            with self._lock:
                self._chore.notify()

    # --- the keeper -----------------------------------------------------------------------

    def wait_until_due(self, now: float) -> bool:
        """Block until there may be a chore; False once all is done and stopped."""
        with self._lock:
            self._keeper_sleeps = True
            self._saying = 0
            self._collect()
            if self._given_up or self._is_drained():
                return False
            self._keeper_due_at = self._next_due(now)
            if self._keeper_due_at > now:
                # With an ack that is due soon there is no need to be told of more.
                self._keeper_sleeps = not self._acks
                no_end = self._keeper_due_at == math.inf
                self._chore.wait(None if no_end else self._keeper_due_at - now)
            self._keeper_sleeps = False
            self._keeper_due_at = -math.inf
            return True

    def take_chores(self, now: float) -> Chores:
        with self._lock:
            self._collect()
            if self._oldest_waiting_at() + HOARD_SECONDS <= now:
                self._pace.stalled(HOARD_SECONDS)
                self._hand_back_waiting()
            repeats = [claim for due_at, claim in self._repeats if due_at <= now]
            self._repeats = [entry for entry in self._repeats if entry[0] > now]
            if self._acks_due_at() <= now:
                repeats += self._acks
                self._acks = []
            settlements, self._settlements = self._settlements, []
            settlements += [claim for claim in repeats if claim.takes_checkpoint()]
            acks = [claim for claim in repeats if not claim.takes_checkpoint()]
            self._saying = len(acks) + len(settlements)
            return Chores(acks, settlements)

    def take_renewals(self, now: float) -> list[Claim]:
        """The claims that are to be renewed now."""
        with self._lock:
            if self._renewal_at > now:
                return []
            self._collect()
            held = [claim for claim in self._in_hand if claim.outcome is None and not claim.is_lost]
            due = [claim for claim in held if claim.renew_at <= now]
            self._renewal_at = min((c.renew_at for c in held if c.renew_at > now), default=math.inf)
            return due

    def put_back(self, claims: Iterable[Claim], now: float) -> list[Claim]:
        """Keep what could not be said for another try; return those that it is too late for."""
        late = []
        with self._lock:
            if self._given_up:
                return []
            for claim in claims:
                if claim.expires_at <= now:
                    late.append(claim)
                else:
                    self._repeats.append((now + REPEAT_SECONDS, claim))
            self._chore.notify()
        return late

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
        """Begin no more jobs: those that wait go back; those that run may finish."""
        with self._lock:
            self._stopped = True
            self._hand_back_waiting()
            self._room.notify_all()
            self._stopping.notify_all()
            self._job_waits.notify_all()
            self._chore.notify()

    def abandon(self) -> None:
        """Hand back what still runs; what comes of it is dropped."""
        with self._lock:
            self._collect()
            running = [claim for claim in self._in_hand if claim.outcome is None]
            self._hand_back(claim.copy() for claim in running if not claim.is_lost)
            self._in_hand.difference_update(running)
        for claim in running:
            claim.lose()

    def give_up(self) -> int:
        """Forget what could not be said; return how much that was, with what is being said."""
        with self._lock:
            self._collect()
            self._given_up = True
            unsaid = len(self._acks) + len(self._settlements) + len(self._repeats) + self._saying
            self._acks, self._settlements, self._repeats = [], [], []
            self._chore.notify()
            return unsaid

    def counts(self) -> Counts:
        with self._lock:
            self._collect()
            return Counts(len(self._waiting), self._running(), self._lost, self._runs.figures())

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
        self._fetch_below = self._pace.claim_below - self._asked if may_fetch else _SLEEPS_NOT

    def _claimable(self) -> int:
        if self._asked and not self._plenty:
            return 0
        coming = len(self._waiting) + self._asked
        return self._pace.claimable(running=self._running(), waiting=coming)

    def _running(self) -> int:
        return max(0, len(self._in_hand) - len(self._waiting) - len(self._ended))

    def _collect(self) -> None:
        """Sort what has ended by what is to be said of it."""
        while True:
            try:
                claim = self._ended.popleft()
            except IndexError:
                return
            if claim not in self._in_hand:
                continue  # abandoned
            self._in_hand.remove(claim)
            outcome = claim.outcome
            if outcome is not None:  # else it was lost while it waited
                ending = Ending.LOST if claim.is_lost else outcome.ending
                self._runs.add(ending, claim.ran_seconds)
            if claim.is_lost or outcome is None or outcome.ending is Ending.LOST:
                self._lost += 1
                continue
            self._pace.ran(claim.ran_seconds)
            if claim.takes_checkpoint():
                self._settlements.append(claim)
            else:
                self._acks.append(claim)

    def _hand_back_waiting(self) -> None:
        claims = []
        while (claim := self._take()) is not None:
            claims.append(claim)
        self._in_hand.difference_update(claims)
        self._hand_back(claims)

    def _hand_back(self, claims: Iterable[Claim]) -> None:
        for claim in claims:
            claim.outcome = HANDED_BACK
            self._settlements.append(claim)
        self._chore.notify()

    def _oldest_waiting_at(self) -> float:
        try:
            return self._waiting[0].claimed_at
        except IndexError:
            return math.inf

    def _acks_due_at(self) -> float:
        if not self._acks:
            return math.inf
        return -math.inf if self._stopped else self._acks[0].ended_at + self._ack_seconds

    def _next_due(self, now: float) -> float:
        if self._settlements:
            return now
        return min(
            self._acks_due_at(),
            min((due_at for due_at, _ in self._repeats), default=math.inf),
            self._renewal_at,
            self._oldest_waiting_at() + HOARD_SECONDS,
        )

    def _is_drained(self) -> bool:
        unsaid = self._acks or self._settlements or self._repeats
        return self._stopped and not (self._fetchers or self._in_hand or unsaid)
