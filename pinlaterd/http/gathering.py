"""Small enqueues that arrive together, as one call of the routers, each with its own outcome.

While calls for a queue are under way, enqueues gather for the next one: so the busier it is, the
more of them a call carries, and an enqueue that comes alone waits for nothing. A call that the
service refuses is made again for each of its enqueues, as one of them may be at fault.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pinlaterd.client import calls
from pinlaterd.config.schema import Config
from pinlaterd.errors import QueueNotFound, RequestError
from pinlaterd.http.bodies import EnqueuedAnswer
from pinlaterd.model import Job
from pinlaterd.router_client import RouterClient

# Larger enqueues go alone; a call carries so much at most.
_SMALL_JOBS, _SMALL_BYTES = 100, 16 * 1024
_MOST_JOBS, _MOST_BYTES = 1_000, 1024 * 1024
_CALLS_AT_A_TIME = 2  # for each queue: one that is stored, one on its way


class _Enqueue(NamedTuple):
    """One enqueue that waits for its call."""

    jobs: Sequence[Job]
    size: int
    stored: asyncio.Future[list[str]]


class _Queue:
    """The enqueues of one queue that wait, and how many calls are under way for it."""

    def __init__(self) -> None:
        self.waiting: deque[_Enqueue] = deque()
        self.calls = 0


class EnqueueGathering:
    """Stores the jobs of requests, of one event loop."""

    def __init__(self, client: RouterClient, config_of: Callable[[], Config]) -> None:
        self._client = client
        self._config_of = config_of
        self._queues: dict[str, _Queue] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def store(self, queue: str, jobs: Sequence[Job]) -> list[EnqueuedAnswer]:
        """Store jobs; return the outcome of each, in their order. Raises what the call raises."""
        if any(job.options and job.options.key for job in jobs):
            keyed = await self._client.run(calls.enqueue_keyed(queue, jobs))
            return [EnqueuedAnswer(descriptor=one.descriptor, existed=one.existed) for one in keyed]
        size = sum([len(job.body) for job in jobs])
        if len(jobs) > _SMALL_JOBS or size > _SMALL_BYTES:
            stored = await self._client.run(calls.enqueue(queue, jobs))
        else:
            stored = await self._gather(queue, jobs, size)
        return [EnqueuedAnswer(descriptor=descriptor, existed=False) for descriptor in stored]

    def _gather(self, queue: str, jobs: Sequence[Job], size: int) -> asyncio.Future[list[str]]:
        found = self._queues.get(queue)
        if found is None:
            found = self._queues[queue] = _Queue()
        stored: asyncio.Future[list[str]] = asyncio.get_running_loop().create_future()
        found.waiting.append(_Enqueue(jobs, size, stored))
        if found.calls < _CALLS_AT_A_TIME:
            found.calls += 1
            task = asyncio.ensure_future(self._call_all(queue, found))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return stored

    async def _call_all(self, queue: str, found: _Queue) -> None:
        """Make calls for a queue until nothing waits."""
        try:
            while found.waiting:
                await self._call(queue, self._take(found.waiting))
        finally:
            found.calls -= 1
            if not found.calls and not found.waiting:
                self._queues.pop(queue, None)

    def _take(self, waiting: deque[_Enqueue]) -> list[_Enqueue]:
        """Take the enqueues of the next call, without those whose clients have gone."""
        # What is split over shards may be stored in part.
        most_jobs = min(_MOST_JOBS, self._config_of().server.enqueue_split_jobs)
        taken: list[_Enqueue] = []
        jobs = size = 0
        while waiting:
            one = waiting[0]
            jobs, size = jobs + len(one.jobs), size + one.size
            if taken and (jobs > most_jobs or size > _MOST_BYTES):
                break
            waiting.popleft()
            if not one.stored.cancelled():
                taken.append(one)
        return taken

    async def _call(self, queue: str, taken: Sequence[_Enqueue]) -> None:
        """Store what was taken by one call, and give each enqueue its part of the outcome."""
        if not taken:
            return
        try:
            jobs = [job for one in taken for job in one.jobs]
            stored = await self._client.run(calls.enqueue(queue, jobs))
        except RequestError as error:
            if len(taken) > 1 and not isinstance(error, QueueNotFound):
                await asyncio.gather(*(self._call(queue, [one]) for one in taken))
            else:
                _fail(taken, error)
        except BaseException as error:
            _fail(taken, error)
            if not isinstance(error, Exception):
                raise
        else:
            at = 0
            for one in taken:
                end = at + len(one.jobs)
                if not one.stored.done():
                    one.stored.set_result(stored[at:end])
                at = end


def _fail(taken: Sequence[_Enqueue], error: BaseException) -> None:
    for one in taken:
        if not one.stored.done():
            one.stored.set_exception(error)
