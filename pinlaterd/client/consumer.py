"""A consumer: claims the jobs of queues, has executors run them, and reports how they ended.

All of it is one event loop's, with two fetchers and a reporter for each queue:

    fetchers ──dequeues, with acks along──▶ service ◀──acks, renewals, releases── reporter
       │ jobs                                                                        ▲
       ▼                                                                             │
    in flight ──▶ executor: threads, tasks, processes ──outcomes──▶ in flight ───────┘

A queue has a connection for the dequeue that waits for jobs, so that this holds up no ack, and a
second one while there are plenty. Everything is reported under a claim, so reporting it twice does
no harm.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, cast

from pinlaterd.client import calls
from pinlaterd.client.calls import PreparedCall
from pinlaterd.client.client import AsyncClient
from pinlaterd.client.handlers import Executor
from pinlaterd.client.in_flight import FETCHERS, REPEAT_SECONDS, InFlight, takes_checkpoint
from pinlaterd.client.pool import CallGivenUp
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

# How long the end of what was abandoned, and the last acks, are waited for.
_LAST_WORDS_SECONDS = 10.0
# How long a server may take to end a wait.
_HANG_UP_SECONDS = 1.0
_FIRST_PAUSE_SECONDS = 0.2
_LONGEST_PAUSE_SECONDS = 5.0
# How often a queue that is still to be made is looked for.
_NEW_QUEUE_SECONDS = 1.0
_LONGEST_SLEEP_SECONDS = 3600.0  # of a reporter
_LOOKUP_JOBS = 1000

Fail = Callable[[BaseException], object]
Report = Callable[[Sequence[RunningJob]], Awaitable[list[RunningJob]]]

log = logging.getLogger(__name__)


class Consumer:
    """Works on queues, which may be added and removed meanwhile. Made and used in one event loop;
    `client` is of that loop, and has room for three connections for each queue."""

    def __init__(
        self,
        client: AsyncClient,
        *,
        max_wait_ms: int,
        fail: Fail,
        expects_queues: bool = True,
        claim_timeout_ms: int | None = None,
    ) -> None:
        """`max_wait_ms`: how long a dequeue waits for a first job. `claim_timeout_ms`: how long its
        claims last unless they are renewed (None: as the queue says). `fail` is called with an
        error that a queue can't be worked on with: its work has stopped, and it is to be removed.
        `expects_queues`: that there is no such queue is such an error; else it may come."""
        self.client = client
        self.expects_queues = expects_queues
        self.max_wait_ms = max_wait_ms
        self.claim_timeout_ms = claim_timeout_ms
        self.fail = fail
        self._works: dict[str, QueueWork] = {}

    @property
    def queues(self) -> Sequence[str]:
        """List the queues that are worked on."""
        return list(self._works)

    def add(
        self, in_flight: InFlight, executor: Executor, *, claim_timeout_ms: int | None = None
    ) -> None:
        """Begin to work on the queue of `in_flight`; `claim_timeout_ms` is that of this queue.
        Raises ValueError if it is worked on, and what `executor.start` raises; then nothing is left
        of it."""
        if in_flight.queue in self._works:
            raise ValueError(f"queue {in_flight.queue!r} is worked on already")
        lasts_ms = claim_timeout_ms or self.claim_timeout_ms
        work = QueueWork(self, in_flight, executor, lasts_ms)
        try:
            work.start()
        except BaseException:  # such as no more threads: end those that have begun
            in_flight.stop()
            raise
        self._works[in_flight.queue] = work

    async def remove(
        self, *queues: str, grace_seconds: float = 30.0, hurry: asyncio.Event | None = None
    ) -> None:
        """End the work on these queues, and return once it has ended. Jobs that wait are released;
        those that run have `grace_seconds`, or until `hurry` is set. None loses an attempt. May be
        called again meanwhile, as with a shorter grace."""
        works = [self._works[queue] for queue in queues]
        for work in works:
            work.stop()
        ends = asyncio.gather(*(work.end() for work in works))
        hurried = asyncio.create_task((hurry or asyncio.Event()).wait())
        waits: set[asyncio.Future[Any]] = {hurried, ends}
        try:
            await asyncio.wait(waits, timeout=grace_seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            hurried.cancel()
        for work in works:
            work.abandon()
        await asyncio.wait([ends], timeout=_LAST_WORDS_SECONDS)
        for work in works:
            work.give_up()
        await ends
        self._works = {queue: work for queue, work in self._works.items() if work not in works}


# --- one queue --------------------------------------------------------------------------------


class QueueWork:
    """The work on one queue, from `start` until it has ended; it can't be started again."""

    def __init__(
        self,
        consumer: Consumer,
        in_flight: InFlight,
        executor: Executor,
        claim_timeout_ms: int | None,
    ) -> None:
        self.abandon = in_flight.abandon
        self._in_flight = in_flight
        self._queue = in_flight.queue
        self._client = consumer.client
        self._executor = executor
        self._max_wait_ms = consumer.max_wait_ms
        self._claim_timeout_ms = claim_timeout_ms
        self._tell_failed = consumer.fail
        self._loop = asyncio.get_running_loop()
        self._room, self._due, self._stopping = asyncio.Event(), asyncio.Event(), asyncio.Event()
        # Under way, by their fetchers.
        self._dequeues: dict[asyncio.Task[None], PreparedCall[list[ClaimedJob]]] = {}
        self._was_found = False  # whether there was such a queue once
        self._expects_queue = consumer.expects_queues

    def start(self) -> None:
        room, due = partial(self._soon, self._room.set), partial(self._soon, self._due.set)
        self._in_flight.wake(room=room, due=due)
        self._executor.start(self._in_flight, partial(self._soon, self._fail))
        self._fetchers = [self._begin(self._fetch()) for _ in range(FETCHERS)]
        self._reporter = self._begin(self._report_all())

    def stop(self) -> None:
        """Begin no more jobs, and release those that wait."""
        self._in_flight.stop()
        self._stopping.set()
        for fetcher in self._fetchers:
            call = self._dequeues.get(fetcher)
            ends_itself = call is None or self._client.hang_up(call)
            self._loop.call_later(_HANG_UP_SECONDS if ends_itself else 0, fetcher.cancel)

    async def end(self) -> None:
        """Return once nothing runs, and all is reported, after `stop`."""
        await asyncio.wait([*self._fetchers, self._reporter])
        self.abandon()  # nothing is left but processes that are just starting
        await asyncio.to_thread(self._executor.close)

    def give_up(self) -> None:
        """Wait no longer for a service that does not answer."""
        if forgotten := self._in_flight.give_up():
            log.warning(
                "%d jobs of %s: their ends could not be reported; they are handed out again when "
                "their claims time out",
                forgotten,
                self._queue,
            )
        self._reporter.cancel()

    def _begin(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        async def guarded() -> None:
            try:
                await work
            except asyncio.CancelledError:
                raise
            except BaseException as error:  # noqa: BLE001 - nobody else would notice
                self._fail(error)

        return asyncio.create_task(guarded())

    def _soon(self, function: Callable[..., object], *arguments: object) -> None:
        """Have the loop call a function; any thread may do so."""
        with contextlib.suppress(RuntimeError):  # the loop has ended, and all its work
            self._loop.call_soon_threadsafe(function, *arguments)

    def _fail(self, error: BaseException) -> None:
        self.stop()
        self._tell_failed(error)

    # --- fetchers -------------------------------------------------------------------------

    async def _fetch(self) -> None:
        next_pause = _FIRST_PAUSE_SECONDS
        while not self._stopping.is_set():
            self._room.clear()
            room = self._in_flight.take_room()
            if not room:
                await self._room.wait()
                continue
            jobs: list[ClaimedJob] = []
            pause, failed = 0.0, False
            try:
                jobs = await self._dequeue(room)
                next_pause = _FIRST_PAUSE_SECONDS
            except DequeueRateLimited:
                pause = _FIRST_PAUSE_SECONDS
            except QueueNotFound as error:
                if self._expects_queue and not self._was_found:
                    raise
                if next_pause == _FIRST_PAUSE_SECONDS:
                    log.warning("%s; it is looked for now and then", error)
                next_pause = _LONGEST_PAUSE_SECONDS if self._was_found else _NEW_QUEUE_SECONDS
                pause = next_pause
            except RequestError:
                raise
            except CallGivenUp:
                if not self._stopping.is_set():  # somebody has closed the client
                    raise
            except (PinLaterError, ConnectionFailed) as error:
                log.warning("dequeue of %s: %s; trying again", self._queue, error)
                pause, failed = next_pause, True
                next_pause = min(_LONGEST_PAUSE_SECONDS, next_pause * 2)
            finally:
                self._in_flight.add(jobs, time.monotonic(), asked=room, failed=failed)
            if pause:
                await _wait(self._stopping, pause)

    async def _dequeue(self, limit: int) -> list[ClaimedJob]:
        """Claim jobs, with all acks along that there are; those are reported later if it fails."""
        ended = self._in_flight.take_acks()
        succeeded, failed = _acks_of(ended)
        call = calls.dequeue(
            self._queue,
            limit=limit,
            succeeded=succeeded,
            failed=failed,
            # The first one finds out whether there is such a queue.
            max_wait_ms=self._max_wait_ms if self._was_found else 0,
            claim_timeout_ms=self._claim_timeout_ms,
        )
        fetcher = cast("asyncio.Task[None]", asyncio.current_task())
        self._dequeues[fetcher] = call
        try:
            jobs = await self._client.run(call)
            self._was_found = True
            return jobs
        except DequeueRateLimited:  # the acks were carried out all the same
            self._was_found = True
            raise
        except BaseException as error:
            was_ended = isinstance(error, CallGivenUp | asyncio.CancelledError)
            self._repeat_later(ended, after_seconds=0 if was_ended else REPEAT_SECONDS)
            if ended and isinstance(error, InvalidRequest):
                return []  # it may be one of them: the reporter finds out which
            raise
        finally:
            del self._dequeues[fetcher]

    def _repeat_later(
        self, jobs: Sequence[RunningJob], *, after_seconds: float = REPEAT_SECONDS
    ) -> None:
        now = time.monotonic()
        for late in self._in_flight.repeat_later(jobs, now, after_seconds=after_seconds):
            log.warning("%s ended, but its claim timed out first", late.descriptor)

    # --- the reporter: how jobs ended -----------------------------------------------------

    async def _report_all(self) -> None:
        """Report until no job is in flight, which is the end of this work."""
        while True:
            self._due.clear()
            due_at = self._in_flight.due_at()
            if due_at is None:
                return
            if (seconds := due_at - time.monotonic()) > 0:
                await _wait(self._due, min(seconds, _LONGEST_SLEEP_SECONDS))
            if self._stopping.is_set():  # a dequeue that waits would claim what is released
                await asyncio.wait(self._fetchers)
            try:
                await self._renew_due()
                acks: list[RunningJob] = []
                checkpoints: list[RunningJob] = []
                for job in self._in_flight.take_reports(time.monotonic()):
                    (checkpoints if takes_checkpoint(job, outcome_of(job)) else acks).append(job)
                acks += await self._report(checkpoints, self._checkpoint)
                await self._report(acks, self._ack)
            except Exception:  # claims of jobs that run have to be renewed whatever happens
                log.exception("telling how jobs of %s ended failed; going on", self._queue)
                await asyncio.sleep(REPEAT_SECONDS)

    async def _report(self, jobs: Sequence[RunningJob], call: Report) -> list[RunningJob]:
        """Make a call about all these jobs; return what it returns: those to be acked next. What
        the service finds wrong with one of them is that one's alone."""
        if not jobs:
            return []
        # Before each call, as any of them may take as long as the client lets it.
        await self._renew_due()
        try:
            return await call(jobs)
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
            return [more for job in jobs for more in await self._report([job], call)]
        return _refused(jobs[0], refusal)

    async def _ack(self, jobs: Sequence[RunningJob]) -> list[RunningJob]:
        succeeded, failed = _acks_of(jobs)
        await self._client.ack(self._queue, succeeded=succeeded, failed=failed)
        return []

    async def _checkpoint(self, jobs: Sequence[RunningJob]) -> list[RunningJob]:
        """Report what is postponed; return what was discarded: with a single attempt allowed now, a
        failed ack ends it for good, and so would the time-out of its claim."""
        await self._client.checkpoint(self._queue, [_checkpoint_of(job) for job in jobs])
        discarded = [job for job in jobs if outcome_of(job).ending is Ending.DISCARDED]
        for job in discarded:
            job.outcome = Outcome(Ending.RETRIED, outcome_of(job).status)
        return discarded

    # --- the reporter: what still runs ----------------------------------------------------

    async def _renew_due(self) -> None:
        now = time.monotonic()
        late_seconds = now - self._in_flight.renewal_at
        if late_seconds > self._in_flight.claim_seconds / 3:
            log.warning(
                "claims of %s are renewed %.1f s late: for so long a handler held Python's lock, a "
                "call waited for the service, or the machine stood still; see docs/worker.md",
                self._queue,
                late_seconds,
            )
        if due := self._in_flight.take_renewals(now):
            await self._renew(due)

    async def _renew(self, jobs: Sequence[RunningJob]) -> None:
        """Renew claims, and look whether they still hold: a checkpoint under a claim that has ended
        is no error."""
        asked_at = time.monotonic()
        renewals = [
            CheckpointInfo(job.descriptor, claim_descriptor=job.claim_descriptor) for job in jobs
        ]
        try:
            lasts_ms = self._claim_timeout_ms
            await self._client.checkpoint(self._queue, renewals, claim_timeout_ms=lasts_ms)
            records = await self._look_up(jobs)
        except QueueNotFound:
            records = {}
        except (PinLaterError, ConnectionFailed) as error:
            by_shard = _by_shard(jobs)
            if len(by_shard) > 1:  # one that is down must not cost the others' claims
                for some in by_shard:
                    await self._renew(some)
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

    async def _look_up(self, jobs: Sequence[RunningJob]) -> dict[str, JobRecord]:
        records: dict[str, JobRecord] = {}
        for first in range(0, len(jobs), _LOOKUP_JOBS):
            some = jobs[first : first + _LOOKUP_JOBS]
            records |= await self._client.lookup([job.descriptor for job in some])
        return records


async def _wait(event: asyncio.Event, seconds: float) -> None:
    """Wait until an event is set, for so long at most."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await event.wait()


def outcome_of(job: RunningJob) -> Outcome:
    assert job.outcome is not None, "only what has ended is reported"
    return job.outcome


def _refused(job: RunningJob, error: Exception) -> list[RunningJob]:
    """Fail the attempt: the service will never take this outcome."""
    log.error("%s: its outcome was refused: %s", job.descriptor, error)
    if not takes_checkpoint(job, outcome_of(job)):
        return []  # it comes back when its claim times out
    job.outcome = Outcome(Ending.RETRIED, f"{type(error).__name__}: {error}")
    return [job]


def _acks_of(jobs: Sequence[RunningJob]) -> tuple[list[AckInfo], list[AckInfo]]:
    """Return the acks of the jobs that succeeded, and of those that failed."""
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
