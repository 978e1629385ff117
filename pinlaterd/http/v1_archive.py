"""GET /v1/archived-jobs: jobs of Rickover's interface that have ended, the most recent end first.

Each queue of a job type is scanned in both states by the time of the end, a page at a time, and
what the scans find is merged by (time, queue, state, place in the scan). A cursor names the last
job of an answer: each scan goes on behind that place. When most of a request's time is over, the
answer is what was found by then, with a cursor.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from aiohttp import web

from pinlaterd.access import USER, may
from pinlaterd.client import calls
from pinlaterd.errors import QueueNotFound
from pinlaterd.http.job_types import JobTypes
from pinlaterd.http.v1_bodies import job_answer, status_of
from pinlaterd.http.v1_errors import bad_request, json_response, server_error, unavailable
from pinlaterd.http.v1_jobs import Names, queue_of
from pinlaterd.model import (
    CONTINUATION_END,
    CONTINUATION_START,
    EXPIRED,
    JobDescriptor,
    JobRecord,
    JobState,
    ScanKey,
    ScanResult,
)
from pinlaterd.router_client import RouterClient

_MOST_JOBS = 100
_FIRST_JOBS = 8  # of each scan: most of many types bring nothing
_LOOKUPS = 16  # with bodies, in one call
# Shards refuse more searches of a server than a few dozen; these are of one process.
_SCANS_AT_A_TIME = 8
_STATES = {
    "": (JobState.SUCCEEDED, JobState.FAILED),
    "succeeded": (JobState.SUCCEEDED,),
    "failed": (JobState.FAILED,),
    EXPIRED: (JobState.FAILED,),
}
_LAST_SHARD, _LAST_PRIORITY = "z" * 16, 127
_LIMIT_DIGITS, _TIME_DIGITS = 4, 15
_SCAN_PART = 0.8  # of a request's time: the rest is for bodies


class _Place(NamedTuple):
    """The place of an archived job among all."""

    age: int  # the time of its end, negated
    queue: str
    state: JobState
    shard: str
    priority: int
    local_id: int

    @classmethod
    def of(cls, job: JobRecord) -> _Place:
        named = JobDescriptor.parse(job.descriptor)
        assert named is not None, job.descriptor
        return cls(-job.updated_at_ms, named.queue, job.state, *named[1:])

    @classmethod
    def parse(cls, cursor: str) -> _Place:
        """Raises RestError."""
        time_ms, _, rest = cursor.partition(".")
        state, _, descriptor = rest.partition(".")
        named = JobDescriptor.parse(descriptor)
        is_time = time_ms.isascii() and time_ms.isdecimal() and len(time_ms) <= _TIME_DIGITS
        if not (is_time and state in ("2", "3")) or named is None:
            raise bad_request("invalid_parameter", "Invalid cursor", instance="")
        return cls(-int(time_ms), named.queue, JobState(int(state)), *named[1:])

    def __str__(self) -> str:
        named = JobDescriptor(self.queue, self.shard, self.priority, self.local_id)
        return f"{-self.age}.{self.state:d}.{named}"

    def continuation(self, queue: str, state: JobState) -> str:
        """Return where the scan of a queue and state goes on that is to find what comes behind."""
        key = ScanKey(-self.age, *self[3:])
        if (queue, state) < (self.queue, self.state):
            key = ScanKey(-self.age, _LAST_SHARD, _LAST_PRIORITY, 0)
        elif (queue, state) > (self.queue, self.state):
            key = ScanKey(-self.age, "-", 0, 0)
        return key.token()


class _Scan:
    """The archived jobs of a queue and state that are still to come."""

    def __init__(
        self,
        client: RouterClient,
        turns: asyncio.Semaphore,
        queue: str,
        state: JobState,
        status: str,
        after: _Place | None,
    ) -> None:
        """Find those of a status of Rickover's, if one is given, that come behind `after`. Each
        page takes one of `turns`."""
        self._client = client
        self._turns = turns
        self._queue = queue
        self._state = state
        self._size = _FIRST_JOBS  # of the next page
        self._status = status
        self._continuation = after.continuation(queue, state) if after else CONTINUATION_START
        self.found: deque[JobRecord] = deque()

    async def fill(self) -> None:
        """Read on until there is a job, or the scan ends."""
        while not self.found and self._continuation != CONTINUATION_END:
            scan = calls.scan(self._queue, self._state, page_size=self._size, newest_end_first=True)
            self._size = min(2 * self._size, _MOST_JOBS)
            call = calls.page_after(scan, ScanResult((), self._continuation))
            assert call is not None
            try:
                async with self._turns:
                    page = await self._client.run(call)
            except QueueNotFound:
                return
            jobs = page.jobs
            self.found += [job for job in jobs if self._status in ("", status_of(job))]
            self._continuation = page.continuation


async def _choose(scans: Sequence[_Scan], limit: int, chosen: list[JobRecord]) -> None:
    """Append to `chosen` the first jobs of all scans, in their order."""
    await asyncio.gather(*(scan.fill() for scan in scans))
    while len(chosen) < limit and (left := [scan for scan in scans if scan.found]):
        first = min(left, key=lambda scan: _Place.of(scan.found[0]))
        chosen.append(first.found.popleft())
        await first.fill()


class Archive:
    """The handler of the call."""

    def __init__(self, client: RouterClient, job_types: JobTypes) -> None:
        self._client = client
        self._job_types = job_types
        self._turns = asyncio.Semaphore(_SCANS_AT_A_TIME)

    async def show(self, request: web.Request, _names: Names) -> web.Response:
        query = request.query
        name, status = query.get("name", ""), query.get("status", "")
        text = query.get("limit", str(_MOST_JOBS))
        limit = int(text) if text.isdecimal() and len(text) < _LIMIT_DIGITS else 0
        if not 1 <= limit <= _MOST_JOBS:
            title = f"limit must be a number from 1 to {_MOST_JOBS}, got {text[:20]}"
            raise bad_request("invalid_parameter", title, instance="")
        if status not in _STATES:
            raise server_error(f"There is no status {status}")
        after = _Place.parse(query["cursor"]) if "cursor" in query else None
        scans = [
            _Scan(self._client, self._turns, one.queue, state, status, after)
            for one in self._job_types.newest_first
            if name in ("", one.name) and may(request.get(USER), "view", one.queue)
            for state in _STATES[status]
        ]
        chosen: list[JobRecord] = []
        try:
            async with asyncio.timeout(_SCAN_PART * self._client.seconds):
                await _choose(scans, limit, chosen)
            is_whole = len(chosen) < limit
        except TimeoutError:
            if not chosen:
                raise unavailable("No such job was found in time; name a job type") from None
            is_whole = False
        headers = {}
        if not is_whole:
            link = request.url.update_query(cursor=str(_Place.of(chosen[-1])))
            headers = {"Link": f'<{link.relative()}>; rel="next"'}
        return json_response(await self._with_bodies(chosen), headers=headers)

    async def _with_bodies(self, chosen: Sequence[JobRecord]) -> list[Mapping[str, object]]:
        records: dict[str, JobRecord] = {}
        for at in range(0, len(chosen), _LOOKUPS):
            descriptors = [job.descriptor for job in chosen[at : at + _LOOKUPS]]
            found = await self._client.run(calls.lookup(descriptors, include_body=True))
            records |= found
        left = [records[job.descriptor] for job in chosen if job.descriptor in records]
        return [job_answer(job, self._job_types.name_of(queue_of(job))) for job in left]
