"""One queue of a worker: fetches its jobs, has them run, keeps their claims, tells how they ended.

Three kinds of threads, which meet in `ClaimsInHand`: the fetcher dequeues and takes acks along; the
executor's run the handler; the keeper renews claims, looks whether they still hold, and tells what
no dequeue took along.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from pinlaterd.client.claims import Claim, ClaimsInHand, Told
from pinlaterd.client.client import Client
from pinlaterd.client.executors import Executor, TaskExecutor, ThreadExecutor
from pinlaterd.client.handlers import Handlers, QueueHandler
from pinlaterd.client.outcomes import Ending, Outcome, outcome_of_error, outcome_of_result
from pinlaterd.client.running_job import ClaimLost, Discard, Later, Retry, RunningJob
from pinlaterd.errors import ConnectionFailed, DequeueRateLimited, PinLaterError, RequestError
from pinlaterd.model import AckInfo, CheckpointInfo, ClaimedJob, JobState

_FIRST_PAUSE_SECONDS = 0.2
_LONGEST_PAUSE_SECONDS = 5.0
_LAST_WORDS_SECONDS = 10.0

log = logging.getLogger(__name__)


class LaneSettings(NamedTuple):
    """See `Worker`."""

    concurrency: int
    ack_interval_ms: int
    ahead_ms: int
    max_wait_ms: int


class Lane:
    """Works on one queue from `start` to `end`. `on_idle` is called once it is stopped and no
    handler runs, `on_failure` if the queue can't be worked on."""

    def __init__(
        self,
        client: Client,
        handler: QueueHandler,
        handlers: Handlers,
        settings: LaneSettings,
        on_idle: Callable[[], None],
        on_failure: Callable[[RequestError], None],
    ) -> None:
        self._client = client
        self._queue = queue = handler.queue
        self._handler = handler
        self._hooks = handlers
        self._max_wait_ms = settings.max_wait_ms
        self._on_failure = on_failure
        self._hand = ClaimsInHand(
            concurrency=settings.concurrency,
            ahead_seconds=settings.ahead_ms / 1000,
            ack_interval_seconds=settings.ack_interval_ms / 1000,
            on_idle=on_idle,
        )
        kind = TaskExecutor if handler.is_async else ThreadExecutor
        self._executor: Executor = kind(self, queue, settings.concurrency)
        self._fetcher = threading.Thread(target=self._fetch, name=f"{queue}-fetcher", daemon=True)
        self._keeper = threading.Thread(target=self._keep, name=f"{queue}-keeper", daemon=True)

    def start(self) -> None:
        self._executor.start()
        self._keeper.start()
        self._fetcher.start()

    def stop(self) -> None:
        """Dequeue no more, begin no more. Safe in a signal handler, and on a lane not started."""
        self._hand.stop()

    def give_back_waiting(self) -> None:
        """What has not begun is for others, now."""
        self._give_back(self._hand.take_waiting())

    @property
    def idle(self) -> bool:
        return self._hand.idle

    def end(self) -> None:
        """Give back what still runs, at no attempt's cost, tell all that has ended, and return.

        The handlers of what is given back are told that their claims are lost."""
        self._hand.stop()
        running = self._hand.running()
        if running:
            log.warning("%s: %d jobs still run; giving them back", self._queue, len(running))
            self._lose(running)
            self._give_back(running)
        self._fetcher.join()
        self._executor.close(abandon=bool(running))
        self._hand.drain()
        self._keeper.join()
        self._say_last_words()

    # --- the fetcher ----------------------------------------------------------------------

    def _fetch(self) -> None:
        pause_seconds = _FIRST_PAUSE_SECONDS
        while room := self._hand.wait_for_room():
            acks = self._hand.take_acks()
            try:
                jobs = self._client.dequeue(
                    self._queue,
                    limit=room,
                    succeeded=_infos(acks, succeeded=True),
                    failed=_infos(acks, succeeded=False),
                    max_wait_ms=self._max_wait_ms,
                )
            except DequeueRateLimited:  # the acks were carried out all the same
                self._hand.pause(_FIRST_PAUSE_SECONDS)
            except RequestError as error:
                self._put_back(acks)
                self._on_failure(error)
                return
            except (PinLaterError, ConnectionFailed) as error:
                log.warning("dequeue of %s: %s; trying again", self._queue, error)
                self._put_back(acks)
                self._hand.pause(pause_seconds)
                pause_seconds = min(_LONGEST_PAUSE_SECONDS, pause_seconds * 2)
            else:
                pause_seconds = _FIRST_PAUSE_SECONDS
                self._hand.add(jobs, time.monotonic())
                self._executor.wake()
        # Jobs that came while the lane was stopped, perhaps the very ones it had given back.
        self.give_back_waiting()

    def _give_back(self, jobs: Sequence[ClaimedJob]) -> None:
        """Make claimed jobs PENDING again, at no attempt's cost."""
        if not jobs:
            return
        try:
            self._client.checkpoint(
                self._queue,
                [
                    CheckpointInfo(
                        job.descriptor, move_to_pending=True, claim_descriptor=job.claim_descriptor
                    )
                    for job in jobs
                ],
            )
        except (PinLaterError, ConnectionFailed) as error:
            log.warning(
                "%d jobs of %s could not be given back (%s): they are handed out again when "
                "their claims time out",
                len(jobs),
                self._queue,
                error,
            )

    def _say_last_words(self) -> None:
        give_up_at = time.monotonic() + _LAST_WORDS_SECONDS
        while told := self._hand.take_due(float("inf")):
            if time.monotonic() > give_up_at:
                log.warning("how %d jobs of %s ended was not told", len(told), self._queue)
                return
            if not self._tell(told):
                time.sleep(_FIRST_PAUSE_SECONDS)

    # --- the executor (executors.Work) ----------------------------------------------------

    def begin(self, *, block: bool) -> tuple[Claim, RunningJob] | None:
        claim = self._hand.begin(block=block)
        if claim is None:
            return None
        job = claim.running = RunningJob(claim.job, self._queue, self._client)
        return claim, job

    def call(self, job: RunningJob) -> Any:
        self._hooks.call_before(job)
        return self._handler.function(job)

    def outcome(self, job: RunningJob, result: object, error: BaseException | None) -> Outcome:
        if error is None:
            return outcome_of_result(result)
        if isinstance(error, ClaimLost) or job.lost:
            return Outcome(Ending.LOST)
        if not isinstance(error, Retry | Later | Discard):
            log.info("job %s failed", job.descriptor, exc_info=error)
            self._hooks.call_on_error(job, error)
        try:
            return outcome_of_error(error, job, self._handler.retry)
        except Exception:
            log.exception("the retry policy of queue %s failed", self._queue)
            return Outcome(Ending.RETRIED, f"{type(error).__name__}: the retry policy failed; ")

    def ended(self, claim: Claim, job: RunningJob, outcome: Outcome, run_seconds: float) -> None:
        if job.lost:
            outcome = Outcome(Ending.LOST)
        self._hooks.call_after(job, outcome)
        ack, checkpoint = _words_for(claim.job, outcome)
        self._hand.finish(
            claim,
            time.monotonic(),
            run_seconds,
            ack=ack,
            succeeded=outcome.ending is Ending.SUCCEEDED,
            checkpoint=checkpoint,
        )

    # --- the keeper -----------------------------------------------------------------------

    def _keep(self) -> None:
        while self._hand.wait_until_due(time.monotonic()):
            self._renew(self._hand.due_for_renewal(time.monotonic()))
            self._tell(self._hand.take_due(time.monotonic()))

    def _renew(self, jobs: Sequence[ClaimedJob]) -> None:
        """Renew claims, and see by a look-up whether they hold: a checkpoint does not say."""
        if not jobs:
            return
        asked_at = time.monotonic()
        try:
            self._client.checkpoint(
                self._queue,
                [CheckpointInfo(j.descriptor, claim_descriptor=j.claim_descriptor) for j in jobs],
            )
            records = self._client.lookup([job.descriptor for job in jobs])
        except (PinLaterError, ConnectionFailed) as error:
            log.warning("renewing %d claims of %s: %s", len(jobs), self._queue, error)
            self._hand.renewed(jobs, time.monotonic(), done=False)
            return
        self._hand.renewed(jobs, asked_at, done=True)
        gone = []
        for job in jobs:
            record = records.get(job.descriptor)
            if (
                record is None
                or record.state is not JobState.IN_PROGRESS
                or record.claim_descriptor != job.claim_descriptor
            ):
                gone.append(job)
        self._lose(gone)

    def _lose(self, jobs: Iterable[ClaimedJob]) -> None:
        for running in self._hand.lose([job.claim_descriptor for job in jobs]):
            log.warning("%s: its claim is gone; what its handler makes is dropped", running)
            running.lose()

    def _tell(self, told: Sequence[Told]) -> bool:
        """Tell how jobs ended in calls of their own; put back and return False if that fails."""
        if not told:
            return True
        checkpoints = [one.checkpoint for one in told if one.checkpoint is not None]
        acked = [one for one in told if one.ack is not None]
        try:
            if checkpoints:
                self._client.checkpoint(self._queue, checkpoints)
            if acked:
                self._client.ack(
                    self._queue,
                    succeeded=_infos(acked, succeeded=True),
                    failed=_infos(acked, succeeded=False),
                )
        except RequestError as error:  # the queue was deleted: so were its jobs
            log.warning("how %d jobs of %s ended: %s", len(told), self._queue, error)
        except (PinLaterError, ConnectionFailed) as error:
            log.warning("how jobs of %s ended: %s; trying again", self._queue, error)
            self._put_back(told)
            return False
        return True

    def _put_back(self, told: Sequence[Told]) -> None:
        for late in self._hand.put_back(told, time.monotonic()):
            name = late.ack.descriptor if late.ack is not None else late.checkpoint
            log.warning("%s ended, but its claim timed out first", name)


def _words_for(job: ClaimedJob, outcome: Outcome) -> tuple[AckInfo | None, CheckpointInfo | None]:
    """What the service is told of an ended job. All of it may be repeated: it names the claim."""
    claim, later = job.claim_descriptor, outcome.later
    if later is not None:
        return None, CheckpointInfo(
            job.descriptor,
            new_body=later.body,
            move_to_pending=True,
            run_after_ms=round((time.time() + max(0.0, later.delay_seconds)) * 1000),
            attempts=later.attempts,
            prepend_custom_status=later.status,
            claim_descriptor=claim,
        )
    ack = AckInfo(job.descriptor, outcome.status, outcome.retry_delay_ms, claim)
    if outcome.ending is Ending.DISCARDED and job.attempts_remaining > 1:
        # Its last attempt first: if we die before the ack, its time-out ends it for good, too.
        return ack, CheckpointInfo(job.descriptor, attempts=1, claim_descriptor=claim)
    return ack, None


def _infos(told: Sequence[Told], *, succeeded: bool) -> list[AckInfo]:
    return [one.ack for one in told if one.ack is not None and one.succeeded is succeeded]
