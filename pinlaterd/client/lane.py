"""A lane: everything that one worker does for one queue.

    fetchers ──dequeues, with acks along──▶ service ◀──acks, renewals, what goes back── keeper
       │ jobs                                                                             ▲
       ▼                                                                                  │
    claims in hand ──▶ executor: threads, tasks, processes ──outcomes──▶ claims in hand ──┘

Fetchers and keeper have a thread each, and so a connection each: a dequeue that waits for jobs
holds up no ack. docs/worker.md says what a lane promises.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from pinlaterd.client.claims import ClaimsInHand
from pinlaterd.client.client import Client
from pinlaterd.client.executors import Executor
from pinlaterd.client.keeper import Keeper, acks_of
from pinlaterd.client.outcomes import Outcome
from pinlaterd.client.run_counts import RunFigures
from pinlaterd.client.running_job import Claim, RunningJob
from pinlaterd.errors import (
    ConnectionFailed,
    DequeueRateLimited,
    InvalidRequest,
    PinLaterError,
    RequestError,
)
from pinlaterd.model import ClaimedJob

_FIRST_PAUSE_SECONDS = 0.2
_LONGEST_PAUSE_SECONDS = 5.0
# While handlers are busy with what one has brought the other is on its way.
FETCHERS = 2
CONNECTIONS_A_LANE = FETCHERS + 1

log = logging.getLogger(__name__)


class LaneFacts(NamedTuple):
    """A lane at one moment; the last four count since it began."""

    queue: str
    concurrency: int
    waiting: int  # claimed, not begun
    running: int
    dequeues: int
    dequeue_errors: int
    claims_lost: int
    runs: RunFigures


class Lane:
    """Works on one queue from `start` until it has ended; it can't be started again."""

    def __init__(
        self,
        queue: str,
        client: Client,
        executor: Executor,
        hand: ClaimsInHand,
        *,
        concurrency: int,
        max_wait_ms: int,
        tell: Callable[[BaseException | None], None],
    ) -> None:
        """`tell` is called, from a thread of the lane, with an error that the lane can't go on
        with, and with None once it has ended."""
        self.queue = queue
        self._client = client
        self._executor = executor
        self._hand = hand
        self._keeper = Keeper(queue, client, hand)
        self._concurrency = concurrency
        self._max_wait_ms = max_wait_ms
        self._tell = tell
        self._counting = threading.Lock()
        self._dequeues = 0
        self._dequeue_errors = 0

    def start(self) -> None:
        self._executor.start(self)
        for name, run in (
            *((f"fetcher-{number}", self._run_fetcher) for number in range(1, FETCHERS + 1)),
            ("keeper", self._run_keeper),
        ):
            threading.Thread(target=run, name=f"{self.queue}-{name}", daemon=True).start()

    def stop(self) -> None:
        """Begin no more jobs, and hand back what was not begun; what runs may finish."""
        self._hand.stop()

    def abandon(self) -> None:
        """Hand back what still runs, too."""
        self._hand.abandon()
        self._executor.abandon()

    def give_up(self) -> None:
        """Wait no longer for a service that does not listen."""
        if unsaid := self._hand.give_up():
            log.warning(
                "%d jobs of %s: the service was not told how they ended; they are handed out again "
                "when their claims time out",
                unsaid,
                self.queue,
            )

    def facts(self) -> LaneFacts:
        counts = self._hand.counts()
        return LaneFacts(
            self.queue,
            self._concurrency,
            counts.waiting,
            counts.running,
            self._dequeues,
            self._dequeue_errors,
            counts.lost,
            counts.runs,
        )

    # --- jobs for the executor (Work) -----------------------------------------------------

    def begin(self) -> RunningJob | None:
        return self._begun(self._hand.begin())

    def wait(self) -> RunningJob | None:
        return self._begun(self._hand.wait())

    def when_ready(self, tell: Callable[[], None]) -> None:
        self._hand.when_ready(tell)

    def finish(self, job: RunningJob, outcome: Outcome) -> None:
        self._hand.finish(job.claim, outcome, time.monotonic())

    def fail(self, error: Exception) -> None:
        self._tell(error)

    def _begun(self, claim: Claim | None) -> RunningJob | None:
        if claim is None:
            return None
        claim.began_at = time.monotonic()
        return RunningJob(self.queue, claim, self._the_client)

    def _the_client(self) -> Client:
        return self._client

    # --- threads --------------------------------------------------------------------------

    def _run_fetcher(self) -> None:
        try:
            self._fetch()
        except Exception as error:  # noqa: BLE001 - the worker raises it in the thread of `run`
            self._tell(error)
        finally:
            self._hand.end_of_fetching()

    def _run_keeper(self) -> None:
        try:
            self._keeper.run()
        except Exception as error:  # noqa: BLE001 - the worker raises it in the thread of `run`
            self._tell(error)
        finally:
            self._executor.close()
            self._tell(None)

    def _fetch(self) -> None:
        pause_seconds = _FIRST_PAUSE_SECONDS
        while room := self._hand.wait_for_room():
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
                with self._counting:
                    self._dequeue_errors += 1
                log.warning("dequeue of %s: %s; trying again", self.queue, error)
                pause = pause_seconds
                pause_seconds = min(_LONGEST_PAUSE_SECONDS, pause_seconds * 2)
            finally:
                self._hand.add(jobs, time.monotonic(), asked=room)
            if pause:
                self._hand.pause(pause)

    def _dequeue(self, limit: int) -> list[ClaimedJob]:
        """Claim jobs, with all acks along that there are; those are put back if it fails."""
        acks = self._hand.take_acks()
        succeeded, failed = acks_of(acks)
        with self._counting:
            self._dequeues += 1
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
            self._keeper.say_later(acks)
            if acks:
                return []  # it may be one of them: the keeper finds out which
            raise
        except BaseException:
            self._keeper.say_later(acks)
            raise
