"""What a lane has in hand: jobs that wait, jobs that run, and endings that are yet to be told.

Threads meet here and nowhere else: the fetcher adds jobs and takes acks along, the executor begins
and finishes jobs, the keeper renews claims and tells what no dequeue took along. Nothing here does
I/O; the time (monotonic seconds) is an argument.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from pinlaterd.client.running_job import RunningJob
from pinlaterd.model import AckInfo, CheckpointInfo, ClaimedJob

REPEAT_SECONDS = 1.0
MOST_IN_A_DEQUEUE = 1000
# A claim is renewed when this part of its time-out is over, so that two renewals may fail.
_RENEW_AFTER = 1 / 3
# What one job's run time counts in the mean.
_MEAN_PART = 0.1


class Told(NamedTuple):
    """What the service is to be told of a job: a checkpoint, an ack, or one after the other.

    Pointless after `expires_at`: the claim is gone."""

    ack: AckInfo | None
    succeeded: bool
    checkpoint: CheckpointInfo | None
    due_at: float
    expires_at: float
    tries: int = 0


class Claim:
    """A job in hand, and until when the service takes silence for work."""

    __slots__ = ("expires_at", "job", "renew_at", "running")

    def __init__(self, job: ClaimedJob, now: float) -> None:
        self.job = job
        self.running: RunningJob | None = None
        self.expires_at = self.renew_at = math.inf
        self.renewed(now)

    def renewed(self, now: float) -> None:
        timeout_seconds = self.job.claim_timeout_seconds
        if timeout_seconds > 0:
            self.expires_at = now + timeout_seconds
            self.renew_at = now + timeout_seconds * _RENEW_AFTER

    def not_renewed(self, now: float) -> None:
        self.renew_at = now + self.job.claim_timeout_seconds * _RENEW_AFTER / 4


class ClaimsInHand:
    """Every job waits, then runs, then has ended, then is gone; all methods are thread-safe."""

    def __init__(
        self,
        *,
        concurrency: int,
        ahead_seconds: float,
        ack_interval_seconds: float,
        on_idle: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_idle` is called once stopped and nothing runs any more; under the lock."""
        # Reentrant, so that a signal handler may call `stop` whatever its thread was doing.
        self._lock = threading.RLock()
        self._room_free = threading.Condition(self._lock)  # the fetcher waits for it
        self._job_waits = threading.Condition(self._lock)  # handlers wait for it
        self._keeper_due = threading.Condition(self._lock)
        self._concurrency = concurrency
        self._ahead_seconds = ahead_seconds
        self._ack_interval_seconds = ack_interval_seconds
        self._on_idle = on_idle
        self._waiting: deque[Claim] = deque()
        self._running: dict[str, Claim] = {}
        self._told: list[Told] = []
        self._mean_seconds: float | None = None  # of a run
        self._fetcher_waits = False
        self._stopped = False
        self._drained = False

    @property
    def idle(self) -> bool:
        with self._lock:
            return not self._running

    # --- the fetcher ----------------------------------------------------------------------

    def wait_for_room(self) -> int:
        """Block until jobs may be claimed; returns how many, 0 once stopped."""
        with self._lock:
            while not self._stopped:
                room = self._room()
                if room:
                    return room
                self._fetcher_waits = True
                self._room_free.wait()
                self._fetcher_waits = False
            return 0

    def pause(self, seconds: float) -> None:
        """Block for so long, or until stopped."""
        with self._lock:
            self._room_free.wait_for(lambda: self._stopped, seconds)

    def add(self, jobs: Sequence[ClaimedJob], now: float) -> None:
        with self._lock:
            self._waiting.extend(Claim(job, now) for job in jobs)
            self._job_waits.notify(len(jobs))
            self._keeper_due.notify()

    def take_acks(self) -> list[Told]:
        """The acks that were never tried. One that failed is the keeper's: with its shard down,
        it would fail every dequeue that takes it along."""
        with self._lock:
            fresh = [one for one in self._told if one.tries == 0 and one.checkpoint is None]
            if fresh:
                self._told = [one for one in self._told if one.tries or one.checkpoint is not None]
            return fresh

    def put_back(self, told: Iterable[Told], now: float) -> list[Told]:
        """Keep what could not be told for another try; return what it is too late for."""
        late = []
        with self._lock:
            for one in told:
                if one.expires_at <= now:
                    late.append(one)
                else:
                    again_at = now + REPEAT_SECONDS
                    self._told.append(one._replace(due_at=again_at, tries=one.tries + 1))
            self._keeper_due.notify()
        return late

    # --- the executor ---------------------------------------------------------------------

    def begin(self, *, block: bool = True) -> Claim | None:
        """Take a job that waits; None once stopped, or if none waits and this must not `block`."""
        with self._lock:
            while not self._waiting and not self._stopped:
                if not block:
                    return None
                self._job_waits.wait()
            if self._stopped:
                return None
            claim = self._waiting.popleft()
            self._running[claim.job.claim_descriptor] = claim
            if self._fetcher_waits and self._room():
                self._room_free.notify()
            return claim

    def finish(
        self,
        claim: Claim,
        now: float,
        run_seconds: float,
        *,
        ack: AckInfo | None = None,
        succeeded: bool = False,
        checkpoint: CheckpointInfo | None = None,
    ) -> None:
        """The job does not run any more. If its claim was lost meanwhile nothing is told."""
        with self._lock:
            mean = self._mean_seconds
            self._mean_seconds = (
                run_seconds if mean is None else mean + (run_seconds - mean) * _MEAN_PART
            )
            if self._running.pop(claim.job.claim_descriptor, None) is not None:
                due_at = now if checkpoint is not None else now + self._ack_interval_seconds
                self._told.append(Told(ack, succeeded, checkpoint, due_at, claim.expires_at))
                if len(self._told) == 1 or checkpoint is not None:
                    self._keeper_due.notify()
            if self._fetcher_waits and self._room():
                self._room_free.notify()
            if self._stopped and not self._running:
                self._on_idle()

    # --- the keeper -----------------------------------------------------------------------

    def wait_until_due(self, now: float) -> bool:
        """Block until there may be something to renew or to tell; False once drained."""
        with self._lock:
            if not self._drained:
                due_at = self._next_due()
                if due_at > now:
                    self._keeper_due.wait(None if due_at == math.inf else due_at - now)
            return not self._drained

    def take_due(self, now: float) -> list[Told]:
        with self._lock:
            due = [one for one in self._told if one.due_at <= now]
            if due:
                self._told = [one for one in self._told if one.due_at > now]
            return due

    def due_for_renewal(self, now: float) -> list[ClaimedJob]:
        with self._lock:
            return [claim.job for claim in self._claims() if claim.renew_at <= now]

    def renewed(self, jobs: Sequence[ClaimedJob], now: float, *, done: bool) -> None:
        """Note that these claims were renewed at `now`, or that it did not work."""
        renewed = {job.claim_descriptor for job in jobs}
        with self._lock:
            for claim in self._claims():
                if claim.job.claim_descriptor in renewed:
                    claim.renewed(now) if done else claim.not_renewed(now)

    def lose(self, claim_descriptors: Collection[str]) -> list[RunningJob]:
        """These claims are gone. Those that wait are dropped; returns those that run, whose
        handlers are to be told: what they make of it will be dropped."""
        with self._lock:
            self._waiting = deque(
                claim
                for claim in self._waiting
                if claim.job.claim_descriptor not in claim_descriptors
            )
            lost = [self._running.pop(name, None) for name in claim_descriptors]
            if self._stopped and not self._running:
                self._on_idle()
            return [c.running for c in lost if c is not None and c.running is not None]

    # --- the end --------------------------------------------------------------------------

    def stop(self) -> None:
        """Begin no more jobs; those that run may finish."""
        with self._lock:
            self._stopped = True
            self._room_free.notify_all()
            self._job_waits.notify_all()
            if not self._running:
                self._on_idle()

    def drain(self) -> None:
        """End the keeper."""
        with self._lock:
            self._drained = True
            self._keeper_due.notify_all()

    def take_waiting(self) -> list[ClaimedJob]:
        """The jobs that no handler began."""
        with self._lock:
            waiting, self._waiting = self._waiting, deque()
            return [claim.job for claim in waiting]

    def running(self) -> list[ClaimedJob]:
        with self._lock:
            return [claim.job for claim in self._running.values()]

    # --- under the lock -------------------------------------------------------------------

    def _ahead(self) -> int:
        """How many jobs the pool begins within `ahead_seconds`: so many may wait for it."""
        if self._mean_seconds is None:
            return 0
        places = self._concurrency * self._ahead_seconds
        return int(min(MOST_IN_A_DEQUEUE, places / max(self._mean_seconds, 1e-6)))

    def _room(self) -> int:
        """More than half of what may wait has begun: less would make for many small dequeues."""
        ahead = self._ahead()
        if len(self._waiting) > ahead // 2:
            return 0
        room = self._concurrency + ahead - len(self._waiting) - len(self._running)
        return max(0, min(room, MOST_IN_A_DEQUEUE))

    def _claims(self) -> list[Claim]:
        return [*self._waiting, *self._running.values()]

    def _next_due(self) -> float:
        return min(
            (
                *(one.due_at for one in self._told),
                *(claim.renew_at for claim in self._claims()),
            ),
            default=math.inf,
        )
