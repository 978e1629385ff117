"""A worker: claims jobs of a queue, hands them to a function, and acknowledges how they ended.

    def resize(job: ClaimedJob) -> str | None:
        image = fetch(job.body)
        if image is None:
            raise Retry(delay_seconds=60, status="not uploaded yet")
        return f"{shrink(image)} bytes"                # appended to the job's custom status

    worker = Worker(Client("queue.example.com"), "images", resize, concurrency=4)
    signal.signal(signal.SIGTERM, lambda *_: worker.stop())
    worker.run()

Delivery is at least once: a job whose worker dies, or is cut off for longer than the claim's
time-out, is handed out again. So a handler must be fit to run twice.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from pinlaterd.client.claims import ClaimsInHand, Ended
from pinlaterd.client.client import Client
from pinlaterd.errors import (
    ConnectionFailed,
    DequeueRateLimited,
    PinLaterError,
    RequestError,
)
from pinlaterd.model import AckInfo, CheckpointInfo, ClaimedJob

Handler = Callable[[ClaimedJob], str | None]

_MAX_ERROR_CHARS = 500
_FIRST_PAUSE_SECONDS = 0.2
_LONGEST_PAUSE_SECONDS = 5.0
_LAST_ACKS_SECONDS = 10.0

log = logging.getLogger(__name__)


class Retry(Exception):
    """Raised by a handler: this attempt failed; try again after `delay_seconds`, if any is left.

    `status` is appended to the job's custom status.
    """

    def __init__(self, delay_seconds: float = 0.0, status: str = "") -> None:
        super().__init__(status)
        self.delay_seconds = delay_seconds
        self.status = status


class Worker:
    """Runs `handler` for the jobs of one queue, in `concurrency` threads, until stopped.

    What a handler returns, if anything, is appended to the job's custom status, and the job has
    SUCCEEDED. Raising Retry, or anything else, uses up an attempt: with one left the job is
    PENDING again, else it has FAILED; an unexpected exception becomes the status, cut.

    Acks ride on the next dequeue, or go alone after 50 ms. Claims of jobs that take long are
    renewed well before they time out. A service that is away is waited for.
    """

    def __init__(
        self,
        client: Client,
        queue: str,
        handler: Handler,
        *,
        concurrency: int = 8,
        batch: int | None = None,
        max_wait_ms: int = 2000,
    ) -> None:
        """`batch` jobs (default: `concurrency`) are claimed at once, when the ones before have
        all begun; with jobs that take minutes, choose 1. `max_wait_ms` is how long a dequeue
        waits for a first job, and so how long `stop` may take on an empty queue.
        """
        if concurrency < 1 or (batch is not None and batch < 1):
            raise ValueError("concurrency and batch must be at least 1")
        self._client = client
        self._queue = queue
        self._handler = handler
        self._concurrency = concurrency
        self._batch = concurrency if batch is None else batch
        self._max_wait_ms = max_wait_ms
        self._hand = ClaimsInHand()

    def stop(self) -> None:
        """Let `run` finish the jobs that run, acknowledge them and return.

        Jobs that were claimed but not begun are given back. Callable from any thread, and from a
        signal handler; a worker that was stopped can't be run again.
        """
        self._hand.stop()

    def run(self) -> None:
        """Work until `stop` is called.

        Raises the service's RequestError if the queue can't be worked on, as when it does not
        exist. An exception in this thread (KeyboardInterrupt, say) stops the worker in order, too.
        """
        handlers = [
            threading.Thread(target=self._handle_jobs, name=f"{self._queue}-{n}", daemon=True)
            for n in range(self._concurrency)
        ]
        keeper = threading.Thread(target=self._keep, name=f"{self._queue}-keeper", daemon=True)
        for thread in (*handlers, keeper):
            thread.start()
        try:
            self._fetch()
        finally:
            self._hand.stop()
            self._give_back(self._hand.take_waiting())
            for thread in handlers:
                thread.join()
            self._hand.drain()
            keeper.join()
            self._send_last_acks()

    # --- the thread that called run -------------------------------------------------------

    def _fetch(self) -> None:
        pause_seconds = _FIRST_PAUSE_SECONDS
        while self._hand.wait_for_room():
            acks = self._hand.take_acks()
            try:
                jobs = self._client.dequeue(
                    self._queue,
                    limit=self._batch,
                    succeeded=_infos(acks, succeeded=True),
                    failed=_infos(acks, succeeded=False),
                    max_wait_ms=self._max_wait_ms,
                )
            except DequeueRateLimited:  # the acks were carried out all the same
                self._hand.pause(_FIRST_PAUSE_SECONDS)
            except RequestError:
                self._put_back(acks)
                raise
            except (PinLaterError, ConnectionFailed) as error:
                log.warning("dequeue of %s: %s; trying again", self._queue, error)
                self._put_back(acks)
                self._hand.pause(pause_seconds)
                pause_seconds = min(_LONGEST_PAUSE_SECONDS, pause_seconds * 2)
            else:
                self._hand.add(jobs, time.monotonic())
                pause_seconds = _FIRST_PAUSE_SECONDS

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

    def _send_last_acks(self) -> None:
        give_up_at = time.monotonic() + _LAST_ACKS_SECONDS
        while acks := self._hand.take_due_acks(float("inf")):
            if time.monotonic() > give_up_at:
                log.warning("%d acks of %s were not sent", len(acks), self._queue)
                return
            if not self._send(acks):
                time.sleep(_FIRST_PAUSE_SECONDS)

    # --- handlers -------------------------------------------------------------------------

    def _handle_jobs(self) -> None:
        while (job := self._hand.begin()) is not None:
            ack, succeeded = self._handle(job)
            self._hand.finish(job, ack, time.monotonic(), succeeded=succeeded)

    def _handle(self, job: ClaimedJob) -> tuple[AckInfo, bool]:
        retry_delay_ms = 0
        try:
            status = self._handler(job) or ""
            succeeded = True
        except Retry as retry:
            status, succeeded = retry.status, False
            retry_delay_ms = max(0, round(retry.delay_seconds * 1000))
        except (Exception, SystemExit) as error:
            log.info("job %s failed", job.descriptor, exc_info=True)
            status, succeeded = f"{type(error).__name__}: {error}"[:_MAX_ERROR_CHARS], False
        # Messages of exceptions may hold half surrogate pairs, which UTF-8 can't express.
        status = status.encode(errors="replace").decode()
        return AckInfo(job.descriptor, status, retry_delay_ms, job.claim_descriptor), succeeded

    # --- the keeper -----------------------------------------------------------------------

    def _keep(self) -> None:
        """Renew claims, and send the acks that no dequeue takes along."""
        while self._hand.wait_until_due(time.monotonic()):
            self._renew(self._hand.due_for_renewal(time.monotonic()))
            self._send(self._hand.take_due_acks(time.monotonic()))

    def _renew(self, jobs: Sequence[ClaimedJob]) -> None:
        if not jobs:
            return
        asked_at = time.monotonic()
        try:
            self._client.checkpoint(
                self._queue,
                [CheckpointInfo(j.descriptor, claim_descriptor=j.claim_descriptor) for j in jobs],
            )
        except (PinLaterError, ConnectionFailed) as error:
            log.warning("renewing %d claims of %s: %s", len(jobs), self._queue, error)
            self._hand.renewed(jobs, time.monotonic(), done=False)
        else:
            self._hand.renewed(jobs, asked_at, done=True)

    def _send(self, acks: Sequence[Ended]) -> bool:
        """Send acks in a call of their own; put them back and return False if that fails."""
        if not acks:
            return True
        try:
            self._client.ack(
                self._queue,
                succeeded=_infos(acks, succeeded=True),
                failed=_infos(acks, succeeded=False),
            )
        except RequestError as error:  # the queue was deleted: so were its jobs
            log.warning("%d acks of %s: %s", len(acks), self._queue, error)
        except (PinLaterError, ConnectionFailed) as error:
            log.warning("acks of %s: %s; trying again", self._queue, error)
            self._put_back(acks)
            return False
        return True

    def _put_back(self, acks: Sequence[Ended]) -> None:
        for late in self._hand.put_back(acks, time.monotonic()):
            log.warning("%s ended, but its claim timed out first", late.ack.descriptor)


def _infos(acks: Sequence[Ended], *, succeeded: bool) -> list[AckInfo]:
    return [ended.ack for ended in acks if ended.succeeded is succeeded]
