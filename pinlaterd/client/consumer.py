"""Everything that one worker does for one queue.

    fetchers ──dequeues, with acks along──▶ service ◀──acks, renewals, releases── reporter
       │ jobs                                                                        ▲
       ▼                                                                             │
    in flight ──▶ executor: threads, tasks, processes ──outcomes──▶ in flight ───────┘

Fetchers and reporter have a thread each, and so a connection each: a dequeue that waits for jobs
holds up no ack. Everything is reported under a claim, so reporting it twice does no harm.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence

from pinlaterd.client.client import Client
from pinlaterd.client.executors import Executor
from pinlaterd.client.in_flight import FETCHERS, REPEAT_SECONDS, InFlight, takes_checkpoint
from pinlaterd.client.running_job import Ending, Outcome, RunningJob
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
        self.facts = in_flight.facts
        self.stop = in_flight.stop
        self._queue = queue
        self._client = client
        self._executor = executor
        self._in_flight = in_flight
        self._max_wait_ms = max_wait_ms
        self._tell = tell

    def start(self) -> None:
        self._executor.start(self._in_flight, self._tell)
        for number in range(1, FETCHERS + 1):
            self._start_thread(f"fetcher-{number}", self._fetch, self._in_flight.end_of_fetching)
        self._start_thread("reporter", self._report_all, self._end)

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
                self._queue,
            )

    def _start_thread(
        self, name: str, work: Callable[[], None], at_its_end: Callable[[], None]
    ) -> None:
        def run() -> None:
            try:
                work()
            except Exception as error:  # noqa: BLE001 - the worker raises it in the thread of `run`
                self._tell(error)
            finally:
                at_its_end()

        threading.Thread(target=run, name=f"{self._queue}-{name}", daemon=True).start()

    def _end(self) -> None:
        self._executor.close()
        self._tell(None)

    # --- fetchers -------------------------------------------------------------------------

    def _fetch(self) -> None:
        pause_seconds = _FIRST_PAUSE_SECONDS
        while room := self._in_flight.wait_for_room():
            jobs: list[ClaimedJob] = []
            pause, failed = 0.0, False
            try:
                jobs = self._dequeue(room)
                pause_seconds = _FIRST_PAUSE_SECONDS
            except DequeueRateLimited:
                pause = _FIRST_PAUSE_SECONDS
            except RequestError:
                raise
            except (PinLaterError, ConnectionFailed) as error:
                log.warning("dequeue of %s: %s; trying again", self._queue, error)
                pause, failed = pause_seconds, True
                pause_seconds = min(_LONGEST_PAUSE_SECONDS, pause_seconds * 2)
            finally:
                self._in_flight.add(jobs, time.monotonic(), asked=room, failed=failed)
            if pause:
                self._in_flight.stopping.wait(pause)

    def _dequeue(self, limit: int) -> list[ClaimedJob]:
        """Claim jobs, with all acks along that there are; those are reported later if it fails."""
        ended = self._in_flight.take_acks()
        succeeded, failed = _acks_of(ended)
        try:
            return self._client.dequeue(
                self._queue,
                limit=limit,
                succeeded=succeeded,
                failed=failed,
                max_wait_ms=self._max_wait_ms,
            )
        except DequeueRateLimited:  # the acks were carried out all the same
            raise
        except InvalidRequest:
            self._repeat_later(ended)
            if ended:
                return []  # it may be one of them: the reporter finds out which
            raise
        except BaseException:
            self._repeat_later(ended)
            raise

    def _repeat_later(self, jobs: Sequence[RunningJob]) -> None:
        for late in self._in_flight.repeat_later(jobs, time.monotonic()):
            log.warning("%s ended, but its claim timed out first", late.descriptor)

    # --- the reporter: how jobs ended -----------------------------------------------------

    def _report_all(self) -> None:
        """Until no job is in flight."""
        while self._in_flight.wait_until_due(time.monotonic()):
            try:
                self._renew_due()
                acks: list[RunningJob] = []
                checkpoints: list[RunningJob] = []
                for job in self._in_flight.take_reports(time.monotonic()):
                    (checkpoints if takes_checkpoint(job, outcome_of(job)) else acks).append(job)
                acks += self._report(checkpoints, self._checkpoint)
                self._report(acks, self._ack)
            except Exception:  # claims of jobs that run have to be renewed whatever happens
                log.exception("telling how jobs of %s ended failed; going on", self._queue)
                time.sleep(REPEAT_SECONDS)

    def _report(
        self,
        jobs: Sequence[RunningJob],
        call: Callable[[Sequence[RunningJob]], list[RunningJob]],
    ) -> list[RunningJob]:
        """Make a call about all these jobs; return what it returns: those to be acked next.

        What the service finds wrong with one of them is that one's alone.
        """
        if not jobs:
            return []
        self._renew_due()  # before each call: any of them may take as long as the client lets it
        try:
            return call(jobs)
        except QueueNotFound as error:  # so are its jobs
            log.warning("%d jobs that ended: %s", len(jobs), error)
            return []
        except RequestError as error:
            refusal: Exception = error
        except (PinLaterError, ConnectionFailed) as error:
            log.warning("acks of %s: %s; trying again", self._queue, error)
            self._repeat_later(jobs)
            return []
        except Exception as error:  # noqa: BLE001 - Thrift can't express a handler's outcome
            refusal = error
        if len(jobs) > 1:
            return [more for job in jobs for more in self._report([job], call)]
        return _refused(jobs[0], refusal)

    def _ack(self, jobs: Sequence[RunningJob]) -> list[RunningJob]:
        succeeded, failed = _acks_of(jobs)
        self._client.ack(self._queue, succeeded=succeeded, failed=failed)
        return []

    def _checkpoint(self, jobs: Sequence[RunningJob]) -> list[RunningJob]:
        """Report what is postponed; return what was discarded: with a single attempt allowed now, a
        failed ack ends it for good, and so would the time-out of its claim."""
        self._client.checkpoint(self._queue, [_checkpoint_of(job) for job in jobs])
        discarded = [job for job in jobs if outcome_of(job).ending is Ending.DISCARDED]
        for job in discarded:
            job.outcome = Outcome(Ending.RETRIED, outcome_of(job).status)
        return discarded

    # --- the reporter: what still runs ----------------------------------------------------

    def _renew_due(self) -> None:
        if due := self._in_flight.take_renewals(time.monotonic()):
            self._renew(due)

    def _renew(self, jobs: Sequence[RunningJob]) -> None:
        """Renew claims, and look whether they still hold: a checkpoint under a claim that has ended
        is no error."""
        asked_at = time.monotonic()
        renewals = [
            CheckpointInfo(job.descriptor, claim_descriptor=job.claim_descriptor) for job in jobs
        ]
        try:
            self._client.checkpoint(self._queue, renewals)
            records = self._look_up(jobs)
        except QueueNotFound:
            records = {}
        except (PinLaterError, ConnectionFailed) as error:
            by_shard = _by_shard(jobs)
            if len(by_shard) > 1:  # one that is down must not cost the others' claims
                for some in by_shard:
                    self._renew(some)
                return
            log.warning("renewing %d claims of %s: %s", len(jobs), self._queue, error)
            self._in_flight.renewed(jobs, time.monotonic(), done=False)
            return
        held = []
        for job in jobs:
            if job.is_held(records.get(job.descriptor)):
                held.append(job)
            elif job.outcome is None:
                log.warning("%s: its claim has ended while it ran", job.descriptor)
                job.lose()
        self._in_flight.renewed(held, asked_at, done=True)

    def _look_up(self, jobs: Sequence[RunningJob]) -> dict[str, JobRecord]:
        records: dict[str, JobRecord] = {}
        for first in range(0, len(jobs), _LOOKUP_JOBS):
            some = jobs[first : first + _LOOKUP_JOBS]
            records |= self._client.lookup([job.descriptor for job in some])
        return records


def outcome_of(job: RunningJob) -> Outcome:
    assert job.outcome is not None, "only what has ended is reported"
    return job.outcome


def _refused(job: RunningJob, error: Exception) -> list[RunningJob]:
    """The service will never take this outcome: the attempt has failed."""
    log.error("%s: its outcome was refused: %s", job.descriptor, error)
    if not takes_checkpoint(job, outcome_of(job)):
        return []  # it comes back when its claim times out
    job.outcome = Outcome(Ending.RETRIED, f"{type(error).__name__}: {error}")
    return [job]


def _acks_of(jobs: Sequence[RunningJob]) -> tuple[list[AckInfo], list[AckInfo]]:
    """The acks that say how jobs ended: of those that succeeded, and of those that failed."""
    succeeded: list[AckInfo] = []
    failed: list[AckInfo] = []
    for job in jobs:
        outcome, claimed = outcome_of(job), job.claimed
        delay_ms = round(outcome.delay_seconds * 1000)
        ack = AckInfo(claimed.descriptor, outcome.status, delay_ms, claimed.claim_descriptor)
        (succeeded if outcome.ending is Ending.SUCCEEDED else failed).append(ack)
    return succeeded, failed


def _checkpoint_of(job: RunningJob) -> CheckpointInfo:
    outcome = outcome_of(job)
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


def _by_shard(jobs: Sequence[RunningJob]) -> list[list[RunningJob]]:
    groups: defaultdict[str, list[RunningJob]] = defaultdict(list)
    for job in jobs:
        descriptor = JobDescriptor.parse(job.descriptor)
        groups["" if descriptor is None else descriptor.shard].append(job)
    return list(groups.values())
