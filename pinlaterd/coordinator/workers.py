"""The callers of a service: what processes know of them, which they report only when asked.

Routers know when sources called last, shards how many jobs each was handed, and what attempts that
failed have said. A frame asks for a summary once a second, the page of workers for everything; the
jobs that each holds follow from the claims of the jobs in progress, which are scanned, up to a
bound.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from pinlaterd.clock import Clock
from pinlaterd.config.schema import Config
from pinlaterd.errors import ConnectionFailed, PinLaterError
from pinlaterd.model import JobRecord, JobState, claim_source
from pinlaterd.status import Facts
from pinlaterd.wire.control import Details, DetailsQuestion, FailureCount

if TYPE_CHECKING:
    from pinlaterd.client import AsyncClient

log = logging.getLogger(__name__)

_OLD_SECONDS = 5.0  # after which an answer counts for nothing
_AGAIN_SECONDS = 0.9
_ANSWER_SECONDS = 0.3
_LOOK_SECONDS = 0.01
_MOST_QUEUES = 50  # whose claims are scanned, those with the most jobs in progress
_MOST_JOBS = 1_000  # of a queue, as far as they are scanned
_NEAR_PART = 0.8  # of a claim's time: what is not renewed by then is near its time-out
_RATE_SECONDS = 1.0  # over which jobs are counted, if nobody has looked lately
_LATELY_SECONDS = 30.0
_CALL_SECONDS = 5.0

_Place = tuple[str, str]  # queue and source


class DetailsControl:
    """Asks processes for details. Used on the coordinator's event loop."""

    def __init__(self, clock: Clock, ask: Callable[[DetailsQuestion], int]) -> None:
        """`ask` sends a question to all processes that answer some, and returns how many."""
        self._clock = clock
        self._ask = ask
        self._asked_at = -_AGAIN_SECONDS
        self._answers: dict[bytes, tuple[float, Details]] = {}  # by peer

    def heard(self, peer: bytes, details: Details) -> None:
        """Note an answer."""
        self._answers[peer] = (self._clock.monotonic(), details)

    def ask_again(self) -> int:
        """Ask for a summary, unless that was done just now; return how many are to answer."""
        now = self._clock.monotonic()
        if now - self._asked_at < _AGAIN_SECONDS:
            return 0
        self._asked_at = now
        return self._ask(DetailsQuestion())

    async def wait_for_first(self) -> None:
        """Ask for a summary, and wait for it unless there is one."""
        began, asked = self._clock.monotonic(), self.ask_again()
        if not self._latest():
            await self._wait(began, asked, whole=False)

    async def gather(self) -> Sequence[Details]:
        """Ask for everything; return what is answered in time."""
        began = self._clock.monotonic()
        await self._wait(began, self._ask(DetailsQuestion(whole=True)), whole=True)
        return [one for at, one in self._answers.values() if at >= began and one.whole]

    async def _wait(self, began: float, asked: int, *, whole: bool) -> None:
        until = began + _ANSWER_SECONDS
        while self._clock.monotonic() < until:
            answers = [one for at, one in self._answers.values() if at >= began]
            if sum([one.whole >= whole for one in answers]) >= asked:
                return
            await asyncio.sleep(_LOOK_SECONDS)

    def _latest(self) -> Sequence[tuple[float, Details]]:
        """Return how old each answer is, and the answer; forget those that are too old."""
        now = self._clock.monotonic()
        for peer in [peer for peer, (at, _) in self._answers.items() if now - at > _OLD_SECONDS]:
            del self._answers[peer]
        return [(now - at, details) for at, details in self._answers.values()]

    # --- what frames show -------------------------------------------------------------------------

    def unasked(self) -> tuple[float | None, Mapping[str, float]]:
        """Return for how long all routers have seen who asks for jobs, None while none has
        answered, and since when nobody has asked for those of each queue, in seconds."""
        watched: list[float] = []
        found: dict[str, float] = {}
        for age, router in self._latest():
            watched += [age + router.seconds] if router.seconds else ()
            for queue, seconds in router.unasked.items():
                found[queue] = min(age + seconds, found.get(queue, math.inf))
        return min(watched, default=None), found

    def failures(self) -> Mapping[str, dict[str, int]]:
        """Return how many attempts failed in the last minutes, by queue and signature."""
        found: dict[str, dict[str, int]] = {}
        for _, details in self._latest():
            for queue, counts in details.failures.items():
                known = found.setdefault(queue, {})
                for text, attempts in counts.items():
                    known[text] = known.get(text, 0) + attempts
        return found

    def failed_in_hour(self) -> Counter[str]:
        """Return how many attempts failed in the last hour, by queue."""
        found: Counter[str] = Counter()
        for _, details in self._latest():
            found.update(details.failed_in_hour)
        return found


# --- workers --------------------------------------------------------------------------------------


class Worker(msgspec.Struct):
    """A source that calls for jobs of a queue. Times are seconds ago; None: not known, or never."""

    queue: str
    source: str
    dequeue_seconds: float | None = None
    ack_seconds: float | None = None
    jobs_per_second: float | None = None  # that it was handed
    jobs: int = 0  # that it was handed since its shards began to count
    failed_share: float | None = None  # of those of the last minutes
    held: int = 0  # jobs in progress
    oldest_renewal_seconds: float | None = None  # of their claims
    near_time_out: int = 0  # of them


class Workers:
    """Makes the page of workers. Used on the coordinator's event loop."""

    def __init__(
        self,
        clock: Clock,
        gather: Callable[[], Awaitable[Sequence[Details]]],
        config_of: Callable[[], Config],
    ) -> None:
        """`gather` returns what the processes of all servers know."""
        self._clock = clock
        self._gather = gather
        self._config_of = config_of
        self._client: AsyncClient | None = None
        self._counted: tuple[float, Mapping[_Place, int]] | None = None  # when, and how many jobs

    async def page(self, in_progress: Mapping[str, int]) -> Facts:
        """Return the workers of all queues. `in_progress`: how many jobs are, by queue."""
        before = self._counted
        if before is None or self._clock.monotonic() - before[0] > _LATELY_SECONDS:
            before = self._count(await self._gather())
            await asyncio.sleep(_RATE_SECONDS)
        details = await self._gather()
        now = self._count(details)
        workers = _called(details)
        seconds = max(now[0] - before[0], 1e-3)
        for place, jobs in now[1].items():
            worker = workers.setdefault(place, Worker(*place))
            worker.jobs = jobs
            more = jobs - before[1].get(place, 0)
            worker.jobs_per_second = round(max(0, more) / seconds, 2)
        handed_out, failed = (_summed(details, name, "recent_work") for name in ("jobs", "failed"))
        for place in handed_out.keys() & workers.keys():
            attempts = max(handed_out[place], failed[place])
            workers[place].failed_share = round(failed[place] / attempts, 4)
        queues = sorted(in_progress, key=lambda queue: -in_progress[queue])
        queues = [queue for queue in queues if in_progress[queue]]
        is_whole = len(queues) <= _MOST_QUEUES
        for queue in queues[:_MOST_QUEUES]:
            records = await self._running(queue)
            is_whole &= records is not None and len(records) < _MOST_JOBS
            self._add_held(workers, queue, records or ())
        return {
            "workers": sorted(workers.values(), key=lambda one: (one.queue, one.source)),
            "all_claims": is_whole,  # whether the claims of all jobs in progress were looked at
        }

    def _count(self, details: Sequence[Details]) -> tuple[float, Mapping[_Place, int]]:
        self._counted = (self._clock.monotonic(), _summed(details, "jobs"))
        return self._counted

    async def _running(self, queue: str) -> Sequence[JobRecord] | None:
        """Scan the jobs of a queue that are in progress; None if that fails."""
        # Only here: no coordinator needs the client before somebody looks.
        from pinlaterd.client import AsyncClient, calls  # noqa: PLC0415

        if self._client is None:
            host, port = self._config_of().server.own_address
            self._client = AsyncClient(
                host, port, source="coordinator:workers", timeout_seconds=_CALL_SECONDS
            )
        found: list[JobRecord] = []
        for future in (False, True):  # a checkpoint may have put the run-after off
            call = calls.scan(queue, JobState.IN_PROGRESS, future=future, page_size=_MOST_JOBS)
            try:
                found += (await self._client.run(call)).jobs
            except (PinLaterError, ConnectionFailed) as error:
                log.warning("the claims of queue %s can't be scanned: %s", queue, error)
                return None
        return found

    def _add_held(
        self, workers: dict[_Place, Worker], queue: str, records: Iterable[JobRecord]
    ) -> None:
        """Add what each source holds of these jobs."""
        now_ms = self._clock.now_ms()
        near_seconds = self._config_of().queue(queue).job_claimed_timeout_seconds * _NEAR_PART
        for record in records:
            place = (queue, claim_source(record.claim_descriptor or "") or "")
            worker = workers.setdefault(place, Worker(*place))
            seconds = max(0.0, (now_ms - record.updated_at_ms) / 1000)
            worker.held += 1
            oldest_seconds = max(worker.oldest_renewal_seconds or 0.0, round(seconds, 1))
            worker.oldest_renewal_seconds = oldest_seconds
            worker.near_time_out += seconds > near_seconds

    async def failures(self, queue: str) -> Sequence[FailureCount]:
        """Return the signatures of a queue's failed attempts, as shards have counted them; the most
        frequent first."""
        whole: dict[str, FailureCount] = {}
        for details in await self._gather():
            for one in details.failure_counts:
                if one.queue == queue:
                    known = whole.get(one.signature)
                    whole[one.signature] = one if known is None else _both(known, one)
        return sorted(whole.values(), key=lambda one: -one.attempts)

    async def close(self) -> None:
        """Close the connections."""
        if self._client is not None:
            await self._client.close()


def _called(details: Iterable[Details]) -> dict[_Place, Worker]:
    """Return the sources that routers have seen."""
    workers: dict[_Place, Worker] = {}
    for calls in (call for one in details for call in one.calls):
        place = (calls.queue, calls.source)
        worker = workers.setdefault(place, Worker(*place))
        worker.dequeue_seconds = _later(worker.dequeue_seconds, calls.dequeue_seconds)
        worker.ack_seconds = _later(worker.ack_seconds, calls.ack_seconds)
    return workers


def _later(seconds: float | None, others: float | None) -> float | None:
    known = [one for one in (seconds, others) if one is not None]
    return min(known, default=None)


def _summed(details: Iterable[Details], figure: str, of: str = "work") -> Mapping[_Place, int]:
    """Add up a figure of sources over all shards."""
    found: dict[_Place, int] = {}
    for work in (work for one in details for work in getattr(one, of)):
        place = (work.queue, work.source)
        found[place] = found.get(place, 0) + getattr(work, figure)
    return found


def _both(one: FailureCount, other: FailureCount) -> FailureCount:
    """Add up the attempts of two shards that failed alike."""
    return FailureCount(
        one.queue,
        one.signature,
        one.attempts + other.attempts,
        min(one.first_ms, other.first_ms),
        max(one.last_ms, other.last_ms),
        [a + b for a, b in zip(one.by_minute, other.by_minute, strict=True)],
    )
