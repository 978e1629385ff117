"""What a lane says to the service beside its dequeues: how jobs ended, that others still run, and
which go back.

Everything is said under its claim, so saying it twice does no harm: what failed for want of a
service is said again until the claim has timed out.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence

from pinlaterd.client.claims import REPEAT_SECONDS, ClaimsInHand
from pinlaterd.client.client import Client
from pinlaterd.client.outcomes import Ending, Outcome
from pinlaterd.client.running_job import Claim
from pinlaterd.errors import ConnectionFailed, PinLaterError, QueueNotFound, RequestError
from pinlaterd.model import AckInfo, CheckpointInfo, JobDescriptor, JobRecord, JobState

log = logging.getLogger(__name__)

_LOOKUP_JOBS = 1000


class Keeper:
    """Does the chores of one lane, in a thread of its own, until the lane is drained."""

    def __init__(self, queue: str, client: Client, hand: ClaimsInHand) -> None:
        self._queue = queue
        self._client = client
        self._hand = hand

    def run(self) -> None:
        while self._hand.wait_until_due(time.monotonic()):
            try:
                self._do_chores()
            except Exception:  # claims of jobs that run have to be renewed whatever happens
                log.exception("telling how jobs of %s ended failed; going on", self._queue)
                time.sleep(REPEAT_SECONDS)

    def _do_chores(self) -> None:
        self._renew_due()
        chores = self._hand.take_chores(time.monotonic())
        discarded = self._say(chores.settlements, self._settle)
        self._say([*chores.acks, *discarded], self._ack)

    def say_later(self, claims: Sequence[Claim]) -> None:
        """Keep what could not be said now."""
        for late in self._hand.put_back(claims, time.monotonic()):
            log.warning("%s ended, but its claim timed out first", late.job.descriptor)

    # --- how jobs ended -------------------------------------------------------------------

    def _say(
        self, claims: Sequence[Claim], call: Callable[[Sequence[Claim]], list[Claim]]
    ) -> list[Claim]:
        """Make a call about all these claims; return what it returns.

        What the service finds wrong with one of them is that one's alone.
        """
        if not claims:
            return []
        self._renew_due()  # before each call: any of them may take as long as the client lets it
        try:
            return call(claims)
        except QueueNotFound as error:  # so are its jobs
            log.warning("%d jobs that ended: %s", len(claims), error)
        except (PinLaterError, ConnectionFailed) as error:
            if isinstance(error, RequestError):
                return self._say_one_by_one(claims, call, error)
            log.warning("acks of %s: %s; trying again", self._queue, error)
            self.say_later(claims)
        except Exception as error:  # noqa: BLE001 - what a handler wanted said can't be put in words
            return self._say_one_by_one(claims, call, error)
        return []

    def _say_one_by_one(
        self,
        claims: Sequence[Claim],
        call: Callable[[Sequence[Claim]], list[Claim]],
        error: Exception,
    ) -> list[Claim]:
        if len(claims) > 1:
            return [more for claim in claims for more in self._say([claim], call)]
        return self._refused(claims[0], error)

    def _refused(self, claim: Claim, error: Exception) -> list[Claim]:
        """The service will never take this outcome: the attempt has failed."""
        log.error("%s: its outcome was refused: %s", claim.job.descriptor, error)
        outcome = claim.outcome
        if outcome is None or not claim.takes_checkpoint():
            return []  # it comes back when its claim times out
        claim.outcome = Outcome(Ending.RETRIED, f"{type(error).__name__}: {error}")
        return [claim]

    def _ack(self, claims: Sequence[Claim]) -> list[Claim]:
        succeeded, failed = acks_of(claims)
        self._client.ack(self._queue, succeeded=succeeded, failed=failed)
        return []

    def _settle(self, claims: Sequence[Claim]) -> list[Claim]:
        """Tell what is postponed; return what was discarded: with a single attempt allowed now, a
        failed ack ends it for good, and so would the time-out of its claim."""
        self._client.checkpoint(self._queue, [_checkpoint(claim) for claim in claims])
        discarded = [claim for claim in claims if _outcome(claim).ending is Ending.DISCARDED]
        for claim in discarded:
            claim.outcome = Outcome(Ending.RETRIED, _outcome(claim).status)
        return discarded

    # --- what still runs ------------------------------------------------------------------

    def _renew_due(self) -> None:
        self._renew(self._hand.take_renewals(time.monotonic()))

    def _renew(self, claims: Sequence[Claim]) -> None:
        """Renew claims, and look whether they still hold: a checkpoint under a claim that has ended
        is no error."""
        if not claims:
            return
        asked_at = time.monotonic()
        renewals = [
            CheckpointInfo(c.job.descriptor, claim_descriptor=c.job.claim_descriptor)
            for c in claims
        ]
        try:
            self._client.checkpoint(self._queue, renewals)
            records = self._look_up(claims)
        except QueueNotFound:
            records = {}
        except (PinLaterError, ConnectionFailed) as error:
            by_shard = _by_shard(claims)
            if len(by_shard) > 1:  # one that is down must not cost the others' claims
                for some in by_shard:
                    self._renew(some)
                return
            log.warning("renewing %d claims of %s: %s", len(claims), self._queue, error)
            self._hand.renewed(claims, time.monotonic(), done=False)
            return
        held = []
        for claim in claims:
            if _holds(claim, records.get(claim.job.descriptor)):
                held.append(claim)
            elif claim.outcome is None:
                log.warning("%s: its claim has ended while it ran", claim.job.descriptor)
                claim.lose()
        self._hand.renewed(held, asked_at, done=True)

    def _look_up(self, claims: Sequence[Claim]) -> dict[str, JobRecord]:
        records: dict[str, JobRecord] = {}
        for first in range(0, len(claims), _LOOKUP_JOBS):
            some = claims[first : first + _LOOKUP_JOBS]
            records |= self._client.lookup([claim.job.descriptor for claim in some])
        return records


def acks_of(claims: Sequence[Claim]) -> tuple[list[AckInfo], list[AckInfo]]:
    """The acks that say how jobs ended: of those that succeeded, and of those that failed."""
    succeeded, failed = [], []
    for claim in claims:
        outcome, job = _outcome(claim), claim.job
        if outcome.ending is Ending.SUCCEEDED:
            succeeded.append(AckInfo(job.descriptor, outcome.status, 0, job.claim_descriptor))
        else:
            delay_ms = round(outcome.delay_seconds * 1000)
            failed.append(AckInfo(job.descriptor, outcome.status, delay_ms, job.claim_descriptor))
    return succeeded, failed


def _checkpoint(claim: Claim) -> CheckpointInfo:
    job, outcome = claim.job, _outcome(claim)
    if outcome.ending is Ending.DISCARDED:
        return CheckpointInfo(job.descriptor, attempts=1, claim_descriptor=job.claim_descriptor)
    run_after_ms = outcome.run_after_ms
    if run_after_ms is None and outcome.delay_seconds:
        run_after_ms = round((time.time() + outcome.delay_seconds) * 1000)
    return CheckpointInfo(
        job.descriptor,
        new_body=outcome.body,
        move_to_pending=True,
        run_after_ms=run_after_ms,
        attempts=outcome.attempts,
        prepend_custom_status=outcome.status or None,
        claim_descriptor=job.claim_descriptor,
    )


def _outcome(claim: Claim) -> Outcome:
    assert claim.outcome is not None, "only what has ended is told"
    return claim.outcome


def _by_shard(claims: Sequence[Claim]) -> list[list[Claim]]:
    groups: defaultdict[str, list[Claim]] = defaultdict(list)
    for claim in claims:
        descriptor = JobDescriptor.parse(claim.job.descriptor)
        groups["" if descriptor is None else descriptor.shard].append(claim)
    return list(groups.values())


def _holds(claim: Claim, record: JobRecord | None) -> bool:
    return (
        record is not None
        and record.state is JobState.IN_PROGRESS
        and record.claim_descriptor == claim.job.claim_descriptor
    )
