"""A worker: claims jobs, hands them to functions, and tells the service how they ended.

It has a consumer for each queue:

    fetchers ──dequeues, with acks along──▶ service ◀──acks, renewals, releases── reporter
       │ jobs                                                                        ▲
       ▼                                                                             │
    in flight ──▶ executor: threads, tasks, processes ──outcomes──▶ in flight ───────┘

Fetchers and reporter have a thread each, and so a connection each: a dequeue that waits for jobs
holds up no ack. Everything is reported under a claim, so reporting it twice does no harm.
"""

from __future__ import annotations

import logging
import math
import queue
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from enum import Enum, auto
from types import FrameType

from pinlaterd.client.client import Client
from pinlaterd.client.handlers import (
    Executor,
    Handlers,
    QueueHandler,
    executor_of,
    start_thread,
)
from pinlaterd.client.in_flight import (
    FETCHERS,
    REPEAT_SECONDS,
    InFlight,
    QueueFigures,
    takes_checkpoint,
)
from pinlaterd.client.running_job import Ending, Outcome, RunningJob
from pinlaterd.errors import (
    ConnectionFailed,
    DequeueRateLimited,
    InvalidRequest,
    PinLaterError,
    QueueNotFound,
    RequestError,
)
from pinlaterd.lifecycle import STOP_SIGNALS
from pinlaterd.model import AckInfo, CheckpointInfo, ClaimedJob, JobDescriptor, JobRecord

# How long the end of what was abandoned, and the last acks, are waited for.
_LAST_WORDS_SECONDS = 10.0
# Python runs signal handlers in the main thread, and nothing wakes that if the system gave the
# signal to another one: so it looks this often.
_SIGNAL_SECONDS = 0.5
_FIRST_PAUSE_SECONDS = 0.2
_LONGEST_PAUSE_SECONDS = 5.0
_LOOKUP_JOBS = 1000
CONNECTIONS_A_QUEUE = FETCHERS + 1

log = logging.getLogger(__name__)


class _Message(Enum):
    STOP = auto()
    SIGNAL = auto()
    CONSUMER_ENDED = auto()


class Worker:
    """Runs handlers for the jobs of their queues, until stopped."""

    def __init__(
        self,
        client: Client,
        handlers: Handlers,
        *,
        concurrency: int = 8,
        ack_interval_ms: int = 50,
        ahead_ms: int = 100,
        max_wait_ms: int = 2000,
        grace_seconds: float = 30.0,
        queues: Iterable[str] | None = None,
        set_up_process: Callable[[], object] | None = None,
    ) -> None:
        """`queues`: those to work on (default: all that have handlers). `concurrency`: how many
        jobs of a queue run at a time where its handler does not say. `ack_interval_ms`: how long
        the end of a job waits at most for a dequeue to take it along. `ahead_ms`: jobs that begin
        within so long are claimed in advance. `max_wait_ms`: how long a dequeue waits for a first
        job, and so how long `stop` may take with nothing to do. `grace_seconds`: how long jobs that
        run may go on after `stop`. `set_up_process`: called first in each process that runs
        handlers, as to set up logging. The client needs three connections for each queue, beside
        those that handlers use. Raises ValueError for what makes no sense.
        """
        for name, value, least in (
            ("concurrency", concurrency, 1),
            ("max_wait_ms", max_wait_ms, 1),
            ("ack_interval_ms", ack_interval_ms, 0),
            ("ahead_ms", ahead_ms, 0),
            ("grace_seconds", grace_seconds, 0),
        ):
            if not value >= least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        self._max_wait_ms = max_wait_ms
        self._grace_seconds = grace_seconds
        # Messages to the thread of `run`. A signal handler may put one whatever that thread does.
        self._inbox: queue.SimpleQueue[_Message | BaseException] = queue.SimpleQueue()
        self._consumers = []
        for handler in _chosen(handlers, queues):
            places = handler.concurrency or concurrency
            in_flight = InFlight(
                handler.queue,
                client,
                places,
                ahead_seconds=ahead_ms / 1000,
                ack_seconds=ack_interval_ms / 1000,
            )
            executor = executor_of(handler, places, client, set_up_process)
            self._consumers.append(Consumer(in_flight, executor, max_wait_ms, self._inbox.put))
        self._consumers_left = len(self._consumers)
        _check_connections(client, self._consumers_left)
        self._error: BaseException | None = None
        self._has_run = False

    def run(self, *, handle_signals: bool = True) -> None:
        """Work until `stop` is called, or SIGTERM or SIGINT comes.

        Then no job is claimed or begun any more; those that wait are released at no attempt's
        cost, and those that run have `grace_seconds`. What still runs then is released, too: its
        task is cancelled, its process ended; a thread can't be, and goes on as a daemon. A second
        signal ends the grace at once. Signals are handled if this is the main thread, and
        `handle_signals`.

        Once the worker has stopped in order, raises the service's RequestError if a queue can't be
        worked on, as when it does not exist, and ProcessNotStarted if no process can run its
        handler. RuntimeError if called twice.
        """
        if self._has_run:
            raise RuntimeError("this Worker has run; make a new one")
        self._has_run = True
        in_main_thread = threading.current_thread() is threading.main_thread()
        with self._signals() if handle_signals and in_main_thread else nullcontext():
            try:
                for consumer in self._consumers:
                    consumer.start()
                self._next_message(math.inf)
            finally:  # an exception in this thread stops the worker in order, too
                self._end()
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """End `run` in order. Any thread may call it, and a signal handler; it may be repeated."""
        self._inbox.put(_Message.STOP)

    def queue_figures(self) -> Sequence[QueueFigures]:
        """Return the figures of each queue at this moment."""
        return [consumer.facts() for consumer in self._consumers]

    @contextmanager
    def _signals(self) -> Iterator[None]:
        def note(_number: int, _frame: FrameType | None) -> None:
            self._inbox.put(_Message.SIGNAL)

        before = {number: signal.signal(number, note) for number in STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                if handler is not None:  # else it is not Python's, and can't be restored
                    signal.signal(number, handler)

    # --- the end --------------------------------------------------------------------------

    def _end(self) -> None:
        for consumer in self._consumers:
            consumer.stop()
        self._wait_until_ended(self._grace_seconds, may_hurry=True)
        for consumer in self._consumers:
            consumer.abandon()
        self._wait_until_ended(_LAST_WORDS_SECONDS + self._max_wait_ms / 1000)
        for consumer in self._consumers:
            consumer.give_up()

    def _wait_until_ended(self, seconds: float, *, may_hurry: bool = False) -> None:
        """Wait until all consumers have ended, for so long, or up to a signal if it `may_hurry`."""
        deadline = time.monotonic() + seconds
        while self._consumers_left and (message := self._next_message(deadline)) is not None:
            if may_hurry and message is _Message.SIGNAL:
                return

    def _next_message(self, deadline: float) -> _Message | BaseException | None:
        """Wait for a message and note what it tells; None once the deadline is over."""
        while True:
            left = max(0.0, deadline - time.monotonic())
            try:
                message = self._inbox.get(timeout=min(left, _SIGNAL_SECONDS))
            except queue.Empty:
                if left <= _SIGNAL_SECONDS:
                    return None
                continue
            if isinstance(message, BaseException):
                self._error = self._error or message
            self._consumers_left -= message is _Message.CONSUMER_ENDED
            return message


def _check_connections(client: Client, queues: int) -> None:
    needed = CONNECTIONS_A_QUEUE * queues
    if client.max_connections < needed:
        raise ValueError(
            f"{queues} queues need {needed} connections, {CONNECTIONS_A_QUEUE} each, beside those "
            f"that handlers use; give the Client more max_connections than {client.max_connections}"
        )


def _chosen(handlers: Handlers, queues: Iterable[str] | None) -> list[QueueHandler]:
    of_queues = handlers.by_queue
    if not of_queues:
        raise ValueError("no handlers: decorate functions with @handlers.queue(...) first")
    names = list(of_queues) if queues is None else list(dict.fromkeys(queues))
    if unknown := [name for name in names if name not in of_queues]:
        raise ValueError(f"no handler for queue {unknown[0]!r}; there are: {', '.join(of_queues)}")
    return [of_queues[name] for name in names]


# --- one queue --------------------------------------------------------------------------------


class Consumer:
    """Works on one queue from `start` until it has ended; it can't be started again."""

    def __init__(
        self,
        in_flight: InFlight,
        executor: Executor,
        max_wait_ms: int,
        tell: Callable[[_Message | BaseException], None],
    ) -> None:
        """`tell` is called, from any thread, with an error that this can't go on with, and once
        it has ended."""
        self.abandon = in_flight.abandon
        self.facts = in_flight.facts
        self.stop = in_flight.stop
        self._in_flight = in_flight
        self._queue = in_flight.queue
        self._client = in_flight.client
        self._executor = executor
        self._max_wait_ms = max_wait_ms
        self._tell = tell

    def start(self) -> None:
        self._executor.start(self._in_flight, self._tell)
        for number in range(1, FETCHERS + 1):
            start_thread(f"{self._queue}-fetcher-{number}", self._fetch, self._tell)
        start_thread(f"{self._queue}-reporter", self._report_all, self._tell)

    def give_up(self) -> None:
        """Wait no longer for a service that does not answer."""
        if forgotten := self._in_flight.give_up():
            log.warning(
                "%d jobs of %s: the service was not told how they ended; they are handed out again "
                "when their claims time out",
                forgotten,
                self._queue,
            )

    # --- fetchers -------------------------------------------------------------------------

    def _fetch(self) -> None:
        next_pause = _FIRST_PAUSE_SECONDS
        while room := self._in_flight.wait_for_room():
            jobs: list[ClaimedJob] = []
            pause, failed = 0.0, False
            try:
                jobs = self._dequeue(room)
                next_pause = _FIRST_PAUSE_SECONDS
            except DequeueRateLimited:
                pause = _FIRST_PAUSE_SECONDS
            except RequestError:
                raise
            except (PinLaterError, ConnectionFailed) as error:
                log.warning("dequeue of %s: %s; trying again", self._queue, error)
                pause, failed = next_pause, True
                next_pause = min(_LONGEST_PAUSE_SECONDS, next_pause * 2)
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
        except BaseException as error:
            self._repeat_later(ended)
            if ended and isinstance(error, InvalidRequest):
                return []  # it may be one of them: the reporter finds out which
            raise

    def _repeat_later(self, jobs: Sequence[RunningJob]) -> None:
        for late in self._in_flight.repeat_later(jobs, time.monotonic()):
            log.warning("%s ended, but its claim timed out first", late.descriptor)

    # --- the reporter: how jobs ended -----------------------------------------------------

    def _report_all(self) -> None:
        """Until no job is in flight, which is the end of this consumer."""
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
        self.abandon()  # nothing is left but processes that are just starting
        self._executor.close()
        self._tell(_Message.CONSUMER_ENDED)

    def _report(
        self, jobs: Sequence[RunningJob], call: Callable[[Sequence[RunningJob]], list[RunningJob]]
    ) -> list[RunningJob]:
        """Make a call about all these jobs; return what it returns: those to be acked next. What
        the service finds wrong with one of them is that one's alone."""
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
