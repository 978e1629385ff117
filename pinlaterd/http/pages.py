"""Jobs of a queue, page by page: by state, by a text within their bodies, or by key.

A scan finds the jobs of a page, and a look-up brings their bodies. Each state is scanned twice, as
the interface does: jobs whose run-after is still to come, then the others. A cursor says which of
these scans goes on, and where.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from itertools import islice, product
from typing import Annotated, Literal, NamedTuple

from aiohttp import web
from msgspec import UNSET, Meta, Struct, UnsetType

from pinlaterd.client import calls
from pinlaterd.errors import RequestError
from pinlaterd.http.api import answer_json, read_query
from pinlaterd.http.bodies import JobAnswer
from pinlaterd.http.problems import invalid
from pinlaterd.model import (
    CONTINUATION_END,
    CONTINUATION_START,
    JobDescriptor,
    JobRecord,
    JobState,
    ScanKey,
    ScanResult,
)
from pinlaterd.router_client import RouterClient

MOST_JOBS = 1_000  # of a page
MOST_TEXT_CHARS = 1_000
# A page ends once its bodies take so much, or the search for its jobs took so long.
_PAGE_BYTES = 4 * 1024 * 1024
_SEARCH_SECONDS = 2.0
_FIRST_LOOKUPS, _MOST_LOOKUPS = 8, 200  # how large their bodies are shows with the first ones
# What RE2 takes for something else than itself; text beyond ASCII stands for its UTF-8.
_SPECIAL = re.compile(r"[^0-9A-Za-z_\x80-\U0010ffff]")

StateName = Literal["pending", "scheduled", "in_progress", "succeeded", "failed"]


class PageQuery(Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The jobs of a queue that are asked for: of all states unless `state` is given."""

    state: StateName | UnsetType = UNSET
    text: Annotated[str, Meta(min_length=1, max_length=MOST_TEXT_CHARS)] | UnsetType = UNSET
    key: Annotated[str, Meta(min_length=1)] | UnsetType = UNSET
    limit: Annotated[int, Meta(ge=1, le=MOST_JOBS)] = 100
    cursor: str | UnsetType = UNSET

    @property
    def body_regex(self) -> str | None:
        """The pattern that finds `text` in bodies, letter by letter."""
        return None if isinstance(self.text, UnsetType) else literal(self.text)


class PageAnswer(Struct, kw_only=True):
    """`cursor`: of the next page; null after the last."""

    jobs: Sequence[JobAnswer]
    cursor: str | None


class _Scan(NamedTuple):
    """One of the scans that a listing consists of: jobs of a state whose run-after is to come, or
    the others."""

    state: JobState
    is_future: bool

    def __str__(self) -> str:
        return f"{self.state.name.lower()}-{'later' if self.is_future else 'due'}"


_SCANS = tuple([_Scan(state, is_future) for state in JobState for is_future in (True, False)])


class _Place(NamedTuple):
    """The place where a listing goes on: in this scan, behind the job that `continuation` names."""

    scan: _Scan
    continuation: str = CONTINUATION_START

    def __str__(self) -> str:
        return f"{self.scan}.{self.continuation}"


class _Found(NamedTuple):
    """A job that a scan found, and where the listing goes on behind it."""

    record: JobRecord
    behind: _Place


def literal(text: str) -> str:
    """Return the RE2 pattern that matches `text` and nothing else."""
    return _SPECIAL.sub(lambda found: rf"\x{ord(found[0]):02x}", text)


class JobPages:
    """Lists the jobs of queues for requests."""

    def __init__(self, client: RouterClient) -> None:
        self._client = client

    async def page(self, request: web.Request) -> web.Response:
        """Answer the page that a request asks for. Raises Problem."""
        queue, query = request.match_info["queue"], read_query(request, PageQuery)
        if not isinstance(query.key, UnsetType):
            return await self._holder(queue, query, query.key)
        scans = _scans_of(query)
        found, place = await self._search(queue, query, scans)
        shown, place = await self._with_bodies(found, place)
        jobs = list(map(JobAnswer.of, shown))
        return answer_json(PageAnswer(jobs=jobs, cursor=str(place) if place else None))

    async def _holder(self, queue: str, query: PageQuery, key: str) -> web.Response:
        """Answer the page of the job that holds a key, if there is one."""
        if query != PageQuery(key=key, limit=query.limit):
            raise invalid(
                "key", "give it without `state`, `text` and `cursor`: one job may hold it"
            )
        found = await self._client.run(calls.lookup_keys(queue, [key], include_body=True))
        jobs = list(map(JobAnswer.of, found.values()))
        return answer_json(PageAnswer(jobs=jobs, cursor=None))

    async def first(
        self,
        queue: str,
        state: JobState,
        priorities: Iterable[int],
        body_regex: str | None,
        limit: int,
    ) -> list[JobAnswer]:
        """Return the first `limit` jobs of a state, one priority after the other."""
        found: list[_Found] = []
        for priority, is_future in product(priorities, (True, False)):
            if len(found) < limit:
                call = calls.scan(
                    queue,
                    state,
                    priority=priority,
                    future=is_future,
                    body_regex=body_regex,
                    page_size=limit - len(found),
                )
                scan = _Scan(state, is_future)
                records = (await self._client.run(call)).jobs
                found += [_Found(record, _behind(scan, record)) for record in records]
        shown, _ = await self._with_bodies(found, None)
        return list(map(JobAnswer.of, shown))

    async def _search(
        self, queue: str, query: PageQuery, scans: Sequence[_Scan]
    ) -> tuple[list[_Found], _Place | None]:
        """Return the jobs of a page, without bodies, and where the next one begins."""
        place: _Place | None = _place_of(query, scans)
        until = time.monotonic() + _SEARCH_SECONDS
        found: list[_Found] = []
        while place is not None:
            scan = place.scan
            wanted = query.limit - len(found)
            call = calls.scan(
                queue,
                scan.state,
                future=scan.is_future,
                body_regex=query.body_regex,
                page_size=wanted,
            )
            going_on = calls.page_after(call, ScanResult((), place.continuation))
            assert going_on is not None
            result = await self._client.run(going_on)
            found += [_Found(record, _behind(scan, record)) for record in result.jobs]
            is_over = result.continuation == CONTINUATION_END
            last = found[-1].behind if result.jobs else place
            place = _following(last, scans) if is_over else _Place(scan, result.continuation)
            if len(found) >= query.limit or not is_over or time.monotonic() >= until:
                break
        return found, place

    async def _with_bodies(
        self, found: Sequence[_Found], place: _Place | None
    ) -> tuple[list[JobRecord], _Place | None]:
        """Return the jobs of a page that still are in the state they were found in, with their
        bodies, as many as may be held at a time; and where the next page begins."""
        shown: list[JobRecord] = []
        size, at, step = 0, 0, _FIRST_LOOKUPS
        while part := list(islice(found, at, at + step)):
            if size >= _PAGE_BYTES:
                return shown, found[at - 1].behind
            descriptors = [each.record.descriptor for each in part]
            try:
                records = await self._client.run(calls.lookup(descriptors, include_body=True))
            except RequestError:  # together their bodies take more than a call's answer may
                if step == 1:
                    raise
                step = 1
                continue
            at += len(part)
            step = min(2 * step, _MOST_LOOKUPS)
            for each in part:
                record = records.get(each.record.descriptor)
                if record is not None and record.state is each.record.state:
                    shown.append(record)
                    size += len(record.body or b"")
        return shown, place


def _scans_of(query: PageQuery) -> Sequence[_Scan]:
    """Return the scans that find all jobs of the state that is asked for, or of all."""
    if isinstance(query.state, UnsetType):
        return _SCANS
    if query.state == "scheduled":
        return [_Scan(JobState.PENDING, is_future=True)]
    return [scan for scan in _SCANS if scan.state is JobState[query.state.upper()]]


def _place_of(query: PageQuery, scans: Sequence[_Scan]) -> _Place:
    """Return where the page begins. Raises Problem for a cursor that no such page gave."""
    if isinstance(query.cursor, UnsetType):
        return _Place(scans[0])
    name, _, token = query.cursor.partition(".")
    scan = next((scan for scan in scans if str(scan) == name), None)
    if scan is None or not (token == CONTINUATION_START or ScanKey.parse_token(token)):
        cure = "give the one of the page before, with the same state, or none to begin again"
        raise invalid("cursor", f"it is no cursor of these jobs: {cure}")
    return _Place(scan, token)


def _behind(scan: _Scan, record: JobRecord) -> _Place:
    named = JobDescriptor.parse(record.descriptor)
    assert named is not None, record.descriptor
    key = ScanKey(record.run_after_ms, named.shard, named.priority, named.local_id)
    return _Place(scan, key.token())


def _following(last: _Place, scans: Sequence[_Scan]) -> _Place | None:
    """Return where the next scan begins once that of `last` has found all; None behind the last.

    The second scan of a state goes on behind the job that the first one found last, since jobs of
    the first may have come due meanwhile."""
    behind = scans[scans.index(last.scan) + 1 :]
    if not behind:
        return None
    is_same_state = behind[0].state is last.scan.state
    return _Place(behind[0], last.continuation if is_same_state else CONTINUATION_START)
