"""Ends attempts of jobs that were handed over, and whose end was not reported in time.

What is handed over is in progress, and nobody here remembers it: the jobs in progress are looked
through, first at the start, so that a process that was killed needs no successor that knows its
jobs, and then when the next one can be overdue. While nothing is in progress, nothing is done.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable
from contextlib import suppress

from pinlaterd.client.client import AsyncClient
from pinlaterd.errors import ConnectionFailed, PinLaterError, QueueNotFound
from pinlaterd.model import AckInfo, JobRecord, JobState, claim_source
from pinlaterd.push.targets import Target
from pinlaterd.stats import Stats

log = logging.getLogger(__name__)

SOURCE = "push:"  # how the sources of claims begin whose jobs are handed over
_LONGEST_PAUSE_SECONDS = 5.0
_ACKS_A_CALL = 500


class Overdue:
    """Watches the jobs in progress of one queue."""

    def __init__(
        self,
        client: AsyncClient,
        queue: str,
        target: Callable[[], Target],
        looks: asyncio.Semaphore,
        stats: Stats,
    ) -> None:
        """`looks`: bounds how many queues are looked through at a time."""
        self._client = client
        self._queue = queue
        self._target = target
        self._looks = looks
        self._stats = stats
        self._next_at = time.time()  # math.inf: nothing is in progress
        self._handed_over = asyncio.Event()

    def note_handed_over(self) -> None:
        """Look at the jobs in progress once one that is handed over now can be overdue."""
        if self._next_at == math.inf:
            self._next_at = time.time() + self._target().timeout_seconds
            self._handed_over.set()

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            while (seconds := self._next_at - time.time()) > 0:
                self._handed_over.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(None if seconds == math.inf else seconds):
                        await self._handed_over.wait()
            target = self._target()
            least_pause = min(_LONGEST_PAUSE_SECONDS, target.timeout_seconds / 20)
            self._next_at = math.inf  # a job that is handed over meanwhile lowers it
            try:
                async with self._looks:
                    next_at = await self._end_overdue(target)
            except QueueNotFound:
                next_at = math.inf
            except (PinLaterError, ConnectionFailed) as error:
                log.warning("jobs in progress of %s: %s; trying again", self._queue, error)
                next_at = 0.0
            self._next_at = min(self._next_at, max(next_at, time.time() + least_pause))

    async def _end_overdue(self, target: Target) -> float:
        """Fail overdue attempts; return when the next one is due, math.inf if there is none."""
        next_at, overdue = math.inf, []
        now = time.time()
        async for job in self._client.scan(self._queue, JobState.IN_PROGRESS):
            if not (claim_source(job.claim_descriptor or "") or "").startswith(SOURCE):
                continue  # a worker's
            due_at = job.updated_at_ms / 1000 + target.timeout_seconds
            if due_at > now:
                next_at = min(next_at, due_at)
            else:
                overdue.append(_failure(job, target))
        for first in range(0, len(overdue), _ACKS_A_CALL):
            some = overdue[first : first + _ACKS_A_CALL]
            log.warning("%d jobs of %s: no callback in time", len(some), self._queue)
            # Under their claims: nothing happens to those whose callback comes before this.
            await self._client.ack(self._queue, failed=some)
            self._stats.count(f"{self._queue}_push_overdue", len(some))
        return next_at


def _failure(job: JobRecord, target: Target) -> AckInfo:
    return AckInfo(
        job.descriptor,
        f"no callback within {target.timeout_seconds:g} s"
        + ("; " if job.attempts_remaining > 1 else ""),
        target.backoff_ms(job.attempts_allowed, job.attempts_remaining - 1),
        job.claim_descriptor,
    )
