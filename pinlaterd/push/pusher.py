"""A pusher: hands the jobs of one queue to their downstream, as many at a time as that can take."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress

from pinlaterd.client.handlers import Executor
from pinlaterd.client.in_flight import InFlight
from pinlaterd.client.running_job import (
    HANDED_OVER,
    RELEASED,
    Ending,
    Outcome,
    RunningJob,
)
from pinlaterd.errors import ConnectionFailed, PinLaterError
from pinlaterd.push.downstream import DownstreamAnswer, Downstreams
from pinlaterd.push.targets import NotPushable, Target
from pinlaterd.stats import Stats

log = logging.getLogger(__name__)

# Rickover's: how long to wait before an unavailable downstream is asked again about the same job.
_AGAIN_SECONDS = (0.5, 1.0)
# How often a downstream that is down is sent a job, to find out whether it still is.
_PROBE_SECONDS = 1.0


class RequestLimit:
    """The number of requests at a time: halved by each that finds the downstream down, one more
    after each that finds it up. Once it is 0, a probe follows, after a pause."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.open = most
        self.why_down = ""  # by the last request; "" if that found it up

    def note(self, answer: DownstreamAnswer) -> bool:
        """Return whether the number has changed."""
        before = self.open
        if answer.is_down:
            self.open //= 2
            self.why_down = answer.failure or "no answer in time"
        else:
            self.open = min(self.most, self.open + 1)
            self.why_down = ""
        return self.open != before


class Pusher(Executor):
    """Runs in the event loop of its consumer. Whatever becomes of a request, it is made once, but
    for those that a downstream itself wants repeated."""

    def __init__(
        self,
        target: Target,
        downstreams: Downstreams,
        stats: Stats,
        handed_over: Callable[[], object],
    ) -> None:
        """`handed_over` is called after each job that a downstream has taken."""
        self.target = target  # another one of the same queue may take its place
        self.limit = RequestLimit(target.concurrency)
        self._downstreams = downstreams
        self._stats = stats
        self._handed_over = handed_over
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: InFlight, fail: Callable[[BaseException], object]) -> None:
        self._work, self._fail = work, fail
        self._stopping = asyncio.Event()
        work.when_ready(self._begin)

    def follow(self, target: Target) -> None:
        """Go on with another target of the same queue."""
        self.target = target
        before, self.limit.most = self.limit.most, target.concurrency
        if self.limit.open and target.concurrency != before:  # else the next probe opens one
            self.limit.open = target.concurrency
            self._work.limit(target.concurrency)
            self._begin()

    def stop(self) -> None:
        """Make no request again that was made."""
        self._stopping.set()

    def _begin(self) -> None:
        while len(self._tasks) < self.limit.open and (job := self._work.begin()) is not None:
            task = asyncio.get_running_loop().create_task(self._push_jobs(job))
            self._tasks.add(task)
            task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)
        self._begin()

    async def _push_jobs(self, first: RunningJob) -> None:
        """Push `first`, and what waits then: one task for many jobs costs less than one for
        each."""
        job: RunningJob | None = first
        while job is not None:
            outcome = await self._push(job)
            self._work.finish(job, outcome, time.monotonic())
            job = self._work.begin() if len(self._tasks) <= self.limit.open else None

    async def _push(self, job: RunningJob) -> Outcome:
        target = self.target
        try:
            request = await target.request(job)
        except NotPushable as error:
            log.error("job %s %s", job.descriptor, error)
            return Outcome(Ending.DISCARDED, f"push: it {error}")
        except (PinLaterError, ConnectionFailed) as error:
            log.warning("job %s: %s; it is released", job.descriptor, error)
            return RELEASED  # nothing was sent
        if self._stopping.is_set():
            return RELEASED  # it may be released already, and handed out to others
        try:
            answer = await self._downstreams.post(request.url, request.body, target.headers)
            for seconds in _AGAIN_SECONDS:
                if not answer.is_unavailable or self._stopping.is_set():
                    break
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), seconds)
                answer = await self._downstreams.post(request.url, request.body, target.headers)
        except Exception:
            # It may have left, so it is not released: at most once means that it never returns.
            log.exception("job %s could not be pushed", job.descriptor)
            answer = DownstreamAnswer("could not be pushed")
        self._note(answer)
        if not answer.failure:
            self._handed_over()
            return HANDED_OVER
        log.warning("job %s: attempt %d failed: %s", job.descriptor, job.attempt, answer.failure)
        is_last = job.attempts_remaining <= 1
        return Outcome(
            Ending.FAILED if is_last else Ending.RETRIED,
            f"downstream {answer.failure}" + ("" if is_last else "; "),
            target.backoff_ms(job.attempts_allowed, job.attempts_remaining - 1) / 1000,
        )

    def _note(self, answer: DownstreamAnswer) -> None:
        queue = self.target.queue
        self._stats.count(f"{queue}_push_failed" if answer.failure else f"{queue}_pushed")
        if not self.limit.note(answer):
            return
        self._work.limit(self.limit.open)
        if self.limit.open:
            self._begin()
        else:
            asyncio.get_running_loop().call_later(_PROBE_SECONDS, self._probe)

    def _probe(self) -> None:
        if not self.limit.open:
            self.limit.open = 1
            self._work.limit(1)
            self._begin()
