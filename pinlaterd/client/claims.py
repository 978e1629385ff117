"""What a worker has in hand: jobs that wait, jobs that run, and acks that are yet to be sent.

Threads meet here and nowhere else: the fetcher adds jobs and takes acks along, handlers begin
and finish jobs, the keeper renews claims and sends the acks that no dequeue took along. Nothing
here does I/O; the time (monotonic seconds) is an argument.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pinlaterd.model import AckInfo, ClaimedJob

# How long a finished job waits for the next dequeue to take its ack along.
ACK_LINGER_SECONDS = 0.05
ACK_REPEAT_SECONDS = 1.0
# A claim is renewed when this part of its time-out is over, so that two renewals may fail.
_RENEW_AFTER = 1 / 3


class Ended(NamedTuple):
    """How a job ended, to be acknowledged; pointless after `expires_at`: the claim is gone."""

    ack: AckInfo
    succeeded: bool
    due_at: float
    expires_at: float
    tries: int = 0


class _Claim:
    """A job in hand, and until when the server takes its silence for work."""

    __slots__ = ("expires_at", "job", "renew_at")

    def __init__(self, job: ClaimedJob, now: float) -> None:
        self.job = job
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
    """Every job is waiting, then running, then ended, then gone; all methods are thread-safe."""

    def __init__(self) -> None:
        # Reentrant, so that a signal handler may call `stop` whatever its thread was doing.
        self._lock = threading.RLock()
        self._no_job_waits = threading.Condition(self._lock)  # the fetcher waits for it
        self._job_waits = threading.Condition(self._lock)  # handlers wait for it
        self._keeper_due = threading.Condition(self._lock)
        self._waiting: deque[_Claim] = deque()
        self._running: dict[str, _Claim] = {}
        self._ended: list[Ended] = []
        self._stopped = False
        self._drained = False

    # --- the fetcher ----------------------------------------------------------------------

    def wait_for_room(self) -> bool:
        """Block until no job waits for a handler; False once stopped."""
        with self._lock:
            while self._waiting and not self._stopped:
                self._no_job_waits.wait()
            return not self._stopped

    def pause(self, seconds: float) -> None:
        """Block for so long, or until stopped."""
        with self._lock:
            self._no_job_waits.wait_for(lambda: self._stopped, seconds)

    def add(self, jobs: Iterable[ClaimedJob], now: float) -> None:
        with self._lock:
            self._waiting.extend(_Claim(job, now) for job in jobs)
            self._job_waits.notify_all()
            self._keeper_due.notify()

    def take_acks(self) -> list[Ended]:
        """The acks that were never tried. One that failed is the keeper's: with its shard down,
        it would fail every dequeue that takes it along."""
        with self._lock:
            fresh = [ended for ended in self._ended if ended.tries == 0]
            self._ended = [ended for ended in self._ended if ended.tries > 0]
            return fresh

    def put_back(self, acks: Iterable[Ended], now: float) -> list[Ended]:
        """Keep acks that could not be sent for another try; return those it is too late for."""
        late = []
        with self._lock:
            for ended in acks:
                if ended.expires_at <= now:
                    late.append(ended)
                else:
                    again_at = now + ACK_REPEAT_SECONDS
                    self._ended.append(ended._replace(due_at=again_at, tries=ended.tries + 1))
            self._keeper_due.notify()
        return late

    # --- handlers -------------------------------------------------------------------------

    def begin(self) -> ClaimedJob | None:
        """Block until a job waits and take it; None once stopped."""
        with self._lock:
            while not self._waiting and not self._stopped:
                self._job_waits.wait()
            if self._stopped:
                return None
            claim = self._waiting.popleft()
            self._running[claim.job.claim_descriptor] = claim
            if not self._waiting:
                self._no_job_waits.notify()
            return claim.job

    def finish(self, job: ClaimedJob, ack: AckInfo, now: float, *, succeeded: bool) -> None:
        with self._lock:
            claim = self._running.pop(job.claim_descriptor)
            due_at = now + ACK_LINGER_SECONDS
            self._ended.append(Ended(ack, succeeded, due_at, claim.expires_at))
            if len(self._ended) == 1:
                self._keeper_due.notify()

    # --- the keeper -----------------------------------------------------------------------

    def wait_until_due(self, now: float) -> bool:
        """Block until there may be something to renew or to send; False once drained."""
        with self._lock:
            if not self._drained:
                due_at = self._next_due()
                if due_at > now:
                    self._keeper_due.wait(None if due_at == math.inf else due_at - now)
            return not self._drained

    def take_due_acks(self, now: float) -> list[Ended]:
        with self._lock:
            due = [ended for ended in self._ended if ended.due_at <= now]
            self._ended = [ended for ended in self._ended if ended.due_at > now]
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

    # --- the end --------------------------------------------------------------------------

    def stop(self) -> None:
        """Begin no more jobs; those that run may finish."""
        with self._lock:
            self._stopped = True
            self._no_job_waits.notify_all()
            self._job_waits.notify_all()

    def drain(self) -> None:
        """End the keeper: nothing runs any more."""
        with self._lock:
            self._drained = True
            self._keeper_due.notify_all()

    def take_waiting(self) -> list[ClaimedJob]:
        """The jobs that no handler began."""
        with self._lock:
            waiting, self._waiting = self._waiting, deque()
            return [claim.job for claim in waiting]

    # --- under the lock -------------------------------------------------------------------

    def _claims(self) -> list[_Claim]:
        return [*self._waiting, *self._running.values()]

    def _next_due(self) -> float:
        return min(
            (
                *(ended.due_at for ended in self._ended),
                *(claim.renew_at for claim in self._claims()),
            ),
            default=math.inf,
        )
