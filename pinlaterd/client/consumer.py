"""Everything that one worker does for one queue.

    fetchers ──dequeues, with acks along──▶ service ◀──acks, renewals, releases── reporter
       │ jobs                                                                        ▲
       ▼                                                                             │
    in flight ──▶ executor: threads, tasks, processes ──outcomes──▶ in flight ───────┘

Fetchers and reporter have a thread each, and so a connection each: a dequeue that waits for jobs
holds up no ack. Everything is said under a claim, so saying it twice does no harm.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence

from pinlaterd.client.client import Client
from pinlaterd.client.executors import Executor
from pinlaterd.client.in_flight import REPEAT_SECONDS, InFlight
from pinlaterd.client.outcomes import Ending, Outcome
from pinlaterd.client.running_job import Claim
from pinlaterd.errors import (
    ConnectionFailed,
    DequeueRateLimited,
    InvalidRequest,
    PinLaterError,
    QueueNotFound,
    RequestError,
)
from pinlaterd.model import AckInfo, CheckpointInfo, ClaimedJob, JobDescriptor, JobRecord

_FIRST_PAUSE_SECONDS = 0.2
_LONGEST_PAUSE_SECONDS = 5.0
_LOOKUP_JOBS = 1000
# While handlers are busy with what one has brought the other is on its way.
FETCHERS = 2
CONNECTIONS_A_QUEUE = FETCHERS + 1

log = logging.getLogger(__name__)


class Consumer:
    """Works on one queue from `start` until it has ended; it can't be started again."""

    def __init__(
        self,
        queue: str,
        client: Client,
        executor: Executor,
        in_flight: InFlight,
        *,
        max_wait_ms: int,
        tell: Callable[[BaseException | None], None],
    ) -> None:
        """`tell` is called, from a thread of the consumer, with an error that it can't go on with,
        and with None once it has ended."""
        self.queue = queue
        self.facts = in_flight.facts
        self.stop = in_flight.stop
        self._client = client
        self._executor = executor
        self._in_flight = in_flight
        self._reporter = Reporter(queue, client, in_flight)
        self._max_wait_ms = max_wait_ms
        self._tell = tell

    def start(self) -> None:
        self._executor.start(self._in_flight, self._tell)
        for name, run in (
            *((f"fetcher-{number}", self._run_fetcher) for number in range(1, FETCHERS + 1)),
            ("reporter", self._run_reporter),
        ):
            threading.Thread(target=run, name=f"{self.queue}-{name}", daemon=True).start()

    def abandon(self) -> None:
        """Release what still runs, too."""
        self._in_flight.abandon()
        self._executor.abandon()

    def give_up(self) -> None:
        """Wait no longer for a service that does not listen."""
        if forgotten := self._in_flight.give_up():
            log.warning(
                "%d jobs of %s: the service was not told how they ended; they are handed out again "
                "when their claims time out",
                forgotten,
                self.queue,
            )

    def _run_fetcher(self) -> None:
        try:
            self._fetch()
        except Exception as error:  # noqa: BLE001 - the worker raises it in the thread of `run`
            self._tell(error)
        finally:
            self._in_flight.end_of_fetching()

    def _run_reporter(self) -> None:
        try:
            self._reporter.run()
        except Exception as error:  # noqa: BLE001 - the worker raises it in the thread of `run`
            self._tell(error)
        finally:
            self._executor.close()
            self._tell(None)

    def _fetch(self) -> None:
        pause_seconds = _FIRST_PAUSE_SECONDS
        while room := self._in_flight.wait_for_room():
            jobs: list[ClaimedJob] = []
            pause = 0.0
            try:
                jobs = self._dequeue(room)
                pause_seconds = _FIRST_PAUSE_SECONDS
            except DequeueRateLimited:
                pause = _FIRST_PAUSE_SECONDS
            except (PinLaterError, ConnectionFailed) as error:
                if isinstance(error, RequestError):
                    raise
                self._in_flight.dequeue_failed()
                log.warning("dequeue of %s: %s; trying again", self.queue, error)
                pause = pause_seconds
                pause_seconds = min(_LONGEST_PAUSE_SECONDS, pause_seconds * 2)
            finally:
                self._in_flight.add(jobs, time.monotonic(), asked=room)
            if pause:
                self._in_flight.stopping.wait(pause)

    def _dequeue(self, limit: int) -> list[ClaimedJob]:
        """Claim jobs, with all acks along that there are; those are reported later if it fails."""
        acks = self._in_flight.take_acks()
        succeeded, failed = _acks_of(acks)
        try:
            return self._client.dequeue(
                self.queue,
                limit=limit,
                succeeded=succeeded,
                failed=failed,
                max_wait_ms=self._max_wait_ms,
            )
        except DequeueRateLimited:  # the acks were carried out all the same
            raise
        except InvalidRequest:
            self._reporter.repeat_later(acks)
            if acks:
                return []  # it may be one of them: the reporter finds out which
            raise
        except BaseException:
            self._reporter.repeat_later(acks)
            raise


class Reporter:
    """Tells the service how jobs ended, and renews the claims of those that run, in a thread of its
    own, until no job is in flight."""

    def __init__(self, queue: str, client: Client, in_flight: InFlight) -> None:
        self._queue = queue
        self._client = client
        self._in_flight = in_flight

    def run(self) -> None:
        while self._in_flight.wait_until_due(time.monotonic()):
            try:
                self._renew_due()
                reports = self._in_flight.take_reports(time.monotonic())
                takes_checkpoint = [claim for claim in reports if claim.takes_checkpoint()]
                acks = [claim for claim in reports if not claim.takes_checkpoint()]
                acks += self._report(takes_checkpoint, self._checkpoint)
                self._report(acks, self._ack)
            except Exception:  # claims of jobs that run have to be renewed whatever happens
                log.exception("telling how jobs of %s ended failed; going on", self._queue)
                time.sleep(REPEAT_SECONDS)

    def repeat_later(self, claims: Sequence[Claim]) -> None:
        """Keep what could not be reported now."""
        for late in self._in_flight.repeat_later(claims, time.monotonic()):
            log.warning("%s ended, but its claim timed out first", late.job.descriptor)

    # --- how jobs ended -------------------------------------------------------------------

    def _report(
        self, claims: Sequence[Claim], call: Callable[[Sequence[Claim]], list[Claim]]
    ) -> list[Claim]:
        """Make a call about all these claims; return what it returns: those to be acked next.

        What the service finds wrong with one of them is that one's alone.
        """
        if not claims:
            return []
        self._renew_due()  # before each call: any of them may take as long as the client lets it
        try:
            return call(claims)
        except QueueNotFound as error:  # so are its jobs
            log.warning("%d jobs that ended: %s", len(claims), error)
            return []
        except (PinLaterError, ConnectionFailed) as error:
            if not isinstance(error, RequestError):
                log.warning("acks of %s: %s; trying again", self._queue, error)
                self.repeat_later(claims)
                return []
            refusal: Exception = error
        except Exception as error:  # noqa: BLE001 - Thrift can't express what a handler wants said
            refusal = error
        if len(claims) > 1:
            return [more for claim in claims for more in self._report([claim], call)]
        return self._refused(claims[0], refusal)

    def _refused(self, claim: Claim, error: Exception) -> list[Claim]:
        """The service will never take this outcome: the attempt has failed."""
        log.error("%s: its outcome was refused: %s", claim.job.descriptor, error)
        if not claim.takes_checkpoint():
            return []  # it comes back when its claim times out
        claim.outcome = Outcome(Ending.RETRIED, f"{type(error).__name__}: {error}")
        return [claim]

    def _ack(self, claims: Sequence[Claim]) -> list[Claim]:
        succeeded, failed = _acks_of(claims)
        self._client.ack(self._queue, succeeded=succeeded, failed=failed)
        return []

    def _checkpoint(self, claims: Sequence[Claim]) -> list[Claim]:
        """Tell what is postponed; return what was discarded: with a single attempt allowed now, a
        failed ack ends it for good, and so would the time-out of its claim."""
        self._client.checkpoint(self._queue, [_checkpoint_of(claim) for claim in claims])
        discarded = [claim for claim in claims if _outcome(claim).ending is Ending.DISCARDED]
        for claim in discarded:
            claim.outcome = Outcome(Ending.RETRIED, _outcome(claim).status)
        return discarded

    # --- what still runs ------------------------------------------------------------------

    def _renew_due(self) -> None:
        self._renew(self._in_flight.take_renewals(time.monotonic()))

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
            self._in_flight.renewed(claims, time.monotonic(), done=False)
            return
        held = []
        for claim in claims:
            if claim.holds(records.get(claim.job.descriptor)):
                held.append(claim)
            elif claim.outcome is None:
                log.warning("%s: its claim has ended while it ran", claim.job.descriptor)
                claim.lose()
        self._in_flight.renewed(held, asked_at, done=True)

    def _look_up(self, claims: Sequence[Claim]) -> dict[str, JobRecord]:
        records: dict[str, JobRecord] = {}
        for first in range(0, len(claims), _LOOKUP_JOBS):
            some = claims[first : first + _LOOKUP_JOBS]
            records |= self._client.lookup([claim.job.descriptor for claim in some])
        return records


def _acks_of(claims: Sequence[Claim]) -> tuple[list[AckInfo], list[AckInfo]]:
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


def _checkpoint_of(claim: Claim) -> CheckpointInfo:
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
    assert claim.outcome is not None, "only what has ended is reported"
    return claim.outcome


def _by_shard(claims: Sequence[Claim]) -> list[list[Claim]]:
    groups: defaultdict[str, list[Claim]] = defaultdict(list)
    for claim in claims:
        descriptor = JobDescriptor.parse(claim.job.descriptor)
        groups["" if descriptor is None else descriptor.shard].append(claim)
    return list(groups.values())
