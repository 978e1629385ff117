"""A job as its handler sees it, and the claim that it runs under.

A Claim holds what is known in this process of one claim; it does no I/O. A RunningJob is what
handlers and hooks get: it saves progress, and knows whether the claim still holds. Times are
monotonic seconds unless a name says otherwise.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from pinlaterd.client.client import Client
from pinlaterd.client.outcomes import SUCCEEDED, ClaimLost, Ending, Outcome, sayable
from pinlaterd.model import CheckpointInfo, ClaimedJob, JobRecord, JobState

# A claim is renewed when this part of its time-out is over, so that two renewals may fail.
_RENEW_AFTER = 1 / 3


class Claim:
    """One claim: until when the server takes silence for work, and whether it was lost.

    `outcome` is set when the run has ended. Once `is_lost` is set, nothing is said to the server
    about the job any more.
    """

    __slots__ = (
        "_tell",
        "began_at",
        "claimed_at",
        "ended_at",
        "expires_at",
        "is_lost",
        "job",
        "outcome",
        "renew_at",
    )

    def __init__(self, job: ClaimedJob, now: float) -> None:
        self.job = job
        self.is_lost = False
        self.claimed_at = self.began_at = self.ended_at = now
        self.outcome: Outcome | None = None
        self._tell: Callable[[], None] | None = None
        self.renewed(now)

    def takes_checkpoint(self) -> bool:
        """Whether more than an ack has to be said of its outcome."""
        outcome = self.outcome
        if outcome is None or outcome is SUCCEEDED:
            return False
        if outcome.ending is Ending.DISCARDED:
            return self.job.attempts_remaining > 1
        return outcome.ending is Ending.POSTPONED

    def copy(self) -> Claim:
        """The same claim, for something else to be said of it."""
        copy = Claim(self.job, self.claimed_at)
        copy.expires_at, copy.renew_at = self.expires_at, self.renew_at
        return copy

    def holds(self, record: JobRecord | None) -> bool:
        """Whether the job, of which the service knows that much, is still held under this claim."""
        return (
            record is not None
            and record.state is JobState.IN_PROGRESS
            and record.claim_descriptor == self.job.claim_descriptor
        )

    def renewed(self, now: float) -> None:
        """The server counts the time-out from `now` on."""
        timeout_seconds = self.job.claim_timeout_seconds
        if timeout_seconds > 0:
            self.expires_at = now + timeout_seconds
            self.renew_at = now + timeout_seconds * _RENEW_AFTER
        else:
            self.expires_at = self.renew_at = math.inf

    def not_renewed(self, now: float) -> None:
        """A renewal failed: try again soon."""
        self.renew_at = now + self.job.claim_timeout_seconds * _RENEW_AFTER / 4

    def lose(self) -> None:
        """Note that the claim is gone, and call what `when_lost` was given."""
        self.is_lost = True
        tell = self._tell
        if tell is not None:
            tell()

    def when_lost(self, tell: Callable[[], None] | None) -> None:
        """Call `tell` once the claim is lost, from any thread, and at once if it is already."""
        self._tell = tell
        if self.is_lost and tell is not None:
            tell()


class RunningJob:
    """A job in the hands of its handler. Any thread may use it while the handler runs."""

    __slots__ = ("_body", "_client", "claim", "queue")

    def __init__(self, queue: str, claim: Claim, client: Callable[[], Client]) -> None:
        """`client` gives the Client to use; it is asked for it only when one is needed."""
        self.queue = queue
        self.claim = claim
        self._client = client
        self._body: bytes | None = None

    def __repr__(self) -> str:
        return f"RunningJob({self.descriptor!r}, attempt={self.attempt})"

    @property
    def descriptor(self) -> str:
        return self.claim.job.descriptor

    @property
    def claim_descriptor(self) -> str:
        return self.claim.job.claim_descriptor

    @property
    def body(self) -> bytes:
        """The job's body; after `save(body=…)` that one."""
        return self.claim.job.body if self._body is None else self._body

    @property
    def attempts_allowed(self) -> int:
        return self.claim.job.attempts_allowed

    @property
    def attempts_remaining(self) -> int:
        """How many attempts are left, with this one."""
        return self.claim.job.attempts_remaining

    @property
    def attempt(self) -> int:
        """Which attempt this is; 1 is the first."""
        return self.attempts_allowed - self.attempts_remaining + 1

    @property
    def client(self) -> Client:
        """The worker's Client, to enqueue what is to be done next, for one."""
        return self._client()

    @property
    def lost(self) -> bool:
        """Whether the claim has ended meanwhile: another worker may run the job now."""
        return self.claim.is_lost

    def raise_if_lost(self) -> None:
        """Raise ClaimLost if the claim has ended. Long handlers ask between their steps."""
        if self.claim.is_lost:
            raise ClaimLost(f"the claim on {self.descriptor} has ended while it ran")

    def save(self, body: bytes | None = None, status: str | None = None) -> None:
        """Store progress: an attempt after this one begins with `body`; `status` is put in front of
        the custom status. It renews the claim, too.

        Returns once that is durable. Raises ClaimLost if the claim has ended (nothing was stored),
        and what Client.checkpoint raises. It blocks: `await asyncio.to_thread(job.save, …)`.
        """
        self.raise_if_lost()
        asked_at = time.monotonic()
        self.client.checkpoint(
            self.queue,
            [
                CheckpointInfo(
                    self.descriptor,
                    new_body=body,
                    prepend_custom_status=None if status is None else sayable(status),
                    claim_descriptor=self.claim_descriptor,
                )
            ],
        )
        # A checkpoint whose claim has ended changes nothing and is no error.
        if not self.claim.holds(self.client.lookup([self.descriptor]).get(self.descriptor)):
            self.claim.lose()
        self.raise_if_lost()
        self.claim.renewed(asked_at)
        if body is not None:
            self.note_saved(body)

    def note_saved(self, body: bytes) -> None:
        """`body` is the job's now, wherever it was saved."""
        self._body = body
