"""Jobs of a queue, page by page: by state, by a text within their bodies, or by key.

A scan finds the jobs of a page, and a look-up brings their bodies, unless none are wanted. Jobs
that have ended come by their ends, the most recent first. Other states are scanned twice, as the
interface does: jobs whose run-after is still to come, then the others. A cursor says which of these
scans goes on, and where.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice, product
from typing import Annotated, Literal, NamedTuple

from aiohttp import web
from msgspec import UNSET, Meta, Struct, UnsetType

from pinlaterd.client import calls
from pinlaterd.errors import QueueNotFound, RequestError
from pinlaterd.http.api import answer_json, read_query
from pinlaterd.http.bodies import JobAnswer, Time, milliseconds
from pinlaterd.http.problems import invalid
from pinlaterd.model import (
    CONTINUATION_END,
    CONTINUATION_START,
    JobChoice,
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
    status_text: Annotated[str, Meta(min_length=1, max_length=MOST_TEXT_CHARS)] | UnsetType = UNSET
    message: str | None = None
    place: str | None = None
    worker: str | None = None
    since: Time | None = None
    before: Time | None = None
    bodies: bool = True
    key: Annotated[str, Meta(min_length=1)] | UnsetType = UNSET
    limit: Annotated[int, Meta(ge=1, le=MOST_JOBS)] = 100
    cursor: str | UnsetType = UNSET

    @property
    def body_regex(self) -> str | None:
        """The pattern that finds `text` in bodies, letter by letter."""
        return None if isinstance(self.text, UnsetType) else literal(self.text)

    @property
    def choice(self) -> JobChoice | None:
        """The conditions that are given in addition to a text. Raises Problem."""
        since, before, status = self.since, self.before, self.status_text
        choice = JobChoice(
            ended_since_ms=None if since is None else milliseconds(since),
            ended_before_ms=None if before is None else milliseconds(before),
            status_regex=None if isinstance(status, UnsetType) else literal(status),
            message=self.message,
            place=self.place,
            worker=self.worker,
        )
        if (since is not None or before is not None) and self.state not in _ENDED:
            field = "before" if since is None else "since"
            raise invalid(field, "give it with `state=succeeded` or `state=failed`")
        return choice or None


class PageAnswer(Struct, kw_only=True):
    """`cursor`: of the next page; null after the last. Where ends, statuses or workers choose jobs:
    at `looked_at` jobs the search for the page has looked, of about `in_state`; null while these
    are being counted."""

    jobs: Sequence[JobAnswer]
    cursor: str | None
    looked_at: int | UnsetType = UNSET
    in_state: int | UnsetType | None = UNSET


class _Scan(NamedTuple):
    """One of the scans that a listing consists of: jobs of a state that have ended, whose run-after
    is to come, or the others."""

    state: JobState
    kind: Literal["ended", "later", "due"]

    def __str__(self) -> str:
        return f"{self.state.name.lower()}-{self.kind}"


_ENDED: Mapping[str, _Scan] = {
    state.name.lower(): _Scan(state, "ended") for state in (JobState.SUCCEEDED, JobState.FAILED)
}
_SCANS = (
    *(_Scan(JobState.PENDING, "later"), _Scan(JobState.PENDING, "due")),
    *(_Scan(JobState.IN_PROGRESS, "later"), _Scan(JobState.IN_PROGRESS, "due")),
    *_ENDED.values(),
)


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

    async def list_jobs(self, request: web.Request) -> web.Response:
        """List jobs of a queue, page by page. Raises Problem."""
        queue, query = request.match_info["queue"], read_query(request, PageQuery)
        if not isinstance(query.key, UnsetType):
            return await self._holder(queue, query, query.key)
        scans = _scans_of(query)
        answer = PageAnswer(jobs=[], cursor=None)
        found, place = await self._search(queue, query, scans, answer)
        shown: Sequence[JobRecord] = [each.record for each in found]
        if query.bodies:
            shown, place = await self._with_bodies(found, place)
        answer.jobs = list(map(JobAnswer.of, shown))
        answer.cursor = f"{queue}.{place}" if place else None
        return answer_json(answer)

    async def _holder(self, queue: str, query: PageQuery, key: str) -> web.Response:
        """Answer the page of the job that holds a key, if there is one."""
        if query != PageQuery(key=key, limit=query.limit):
            raise invalid(
                "key", "give it without `state`, `text` and `cursor`: one job may hold it"
            )
        found = await self._client.run(calls.lookup_keys(queue, [key], include_body=True))
        if not found and queue not in await self._client.run(calls.queue_names()):
            raise QueueNotFound(queue)
        jobs = list(map(JobAnswer.of, found.values()))
        return answer_json(PageAnswer(jobs=jobs, cursor=None))

    async def first(
        self,
        queue: str,
        state: JobState,
        priorities: Iterable[int],
        body_regex: str | None,
        limit: int,
        choice: JobChoice | None = None,
    ) -> list[JobAnswer]:
        """Return the first `limit` chosen jobs of a state, one priority after the other."""
        found: list[_Found] = []
        scans = [scan for scan in _SCANS if scan.state is state]
        for priority, scan in product(priorities, scans):
            if len(found) < limit:
                call = calls.scan(
                    queue,
                    state,
                    priority=priority,
                    body_regex=body_regex,
                    page_size=limit - len(found),
                    future=scan.kind == "later",
                    newest_end_first=scan.kind == "ended",
                    choice=choice,
                )
                records = (await self._client.run(call)).jobs
                found += [_Found(record, _behind(scan, record)) for record in records]
        shown, _ = await self._with_bodies(found, None)
        return list(map(JobAnswer.of, shown))

    async def _search(
        self, queue: str, query: PageQuery, scans: Sequence[_Scan], answer: PageAnswer
    ) -> tuple[list[_Found], _Place | None]:
        """Return the jobs of a page, without bodies, and where the next one begins; tell `answer`
        how far the search got."""
        place: _Place | None = _place_of(queue, query, scans)
        counted: dict[JobState, int | None] = {}
        is_search = query.body_regex is not None or query.choice is not None
        until = time.monotonic() + _SEARCH_SECONDS
        found: list[_Found] = []
        looked_at = 0
        while place is not None:
            scan = place.scan
            wanted, left_ms = query.limit - len(found), round((until - time.monotonic()) * 1000)
            call = calls.scan(
                queue,
                scan.state,
                body_regex=query.body_regex,
                page_size=wanted,
                max_ms=max(1, left_ms) if is_search else None,
                choice=query.choice,
                future=scan.kind == "later",
                newest_end_first=scan.kind == "ended",
            )
            going_on = calls.page_after(call, ScanResult((), place.continuation))
            assert going_on is not None
            result = await self._client.run(going_on)
            found += [_Found(record, _behind(scan, record)) for record in result.jobs]
            looked_at += result.looked_at
            counted[scan.state] = result.in_state
            is_over = result.continuation == CONTINUATION_END
            last = found[-1].behind if result.jobs else place
            place = _following(last, scans) if is_over else _Place(scan, result.continuation)
            if len(found) >= query.limit or not is_over or time.monotonic() >= until:
                break
        known = [jobs for jobs in counted.values() if jobs is not None]
        if query.choice is not None:
            answer.looked_at = looked_at
            answer.in_state = sum(known) if len(known) == len(counted) else None
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
        return [_Scan(JobState.PENDING, "later")]
    return [scan for scan in _SCANS if scan.state is JobState[query.state.upper()]]


def _place_of(queue: str, query: PageQuery, scans: Sequence[_Scan]) -> _Place:
    """Return where the page begins. Raises Problem for a cursor that no such page gave."""
    if isinstance(query.cursor, UnsetType):
        return _Place(scans[0])
    name, _, token = query.cursor.rpartition(".")
    scan = next((scan for scan in scans if f"{queue}.{scan}" == name), None)
    if scan is None or not (token == CONTINUATION_START or ScanKey.parse_token(token)):
        cure = "give the one of the page before, with the same state, or none to begin again"
        raise invalid("cursor", f"it is no cursor of these jobs: {cure}")
    return _Place(scan, token)


def _behind(scan: _Scan, record: JobRecord) -> _Place:
    named = JobDescriptor.parse(record.descriptor)
    assert named is not None, record.descriptor
    at_ms = record.updated_at_ms if scan.kind == "ended" else record.run_after_ms
    key = ScanKey(at_ms, named.shard, named.priority, named.local_id)
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
