"""The page that finds jobs: by descriptor, claim or key at once, else by text in their bodies.

A search runs in this process, one part of a second after the other, and keeps what it has found
for those who look at its page: the address of the page is its name. Two search at a time, the
others wait in line; one that nobody looks at ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any, NamedTuple
from urllib.parse import urlencode

import re2
from aiohttp import web
from multidict import MultiMapping

from pinlaterd.access import may
from pinlaterd.client import AsyncClient, calls
from pinlaterd.clock import Clock
from pinlaterd.errors import ConnectionFailed, PinLaterError
from pinlaterd.model import (
    ALL_QUEUES,
    MOST_KEY_BYTES,
    JobChoice,
    JobDescriptor,
    JobRecord,
    LookupRequest,
    QueueKey,
    ScanResult,
    claim_source,
)
from pinlaterd.router_client import RouterClient
from pinlaterd.status import Facts
from pinlaterd.verdict import without_shards
from pinlaterd.web.bodies import visible_text
from pinlaterd.web.job import hidden_pattern, last_said, look_of
from pinlaterd.web.queue import SCOPES, Scope
from pinlaterd.web.refusals import PageProblem, whole_number
from pinlaterd.web.site import FORM, USER, Site

MOST_FOUND = 200
_MOST_SEEN = 1_000_000
_MOST_TEXT_CHARS = 1_000
_SEARCHES_AT_A_TIME = 2
_PART_MS = 500  # after which a search says how far it is
_PAGE = 50
_PATIENCE_SECONDS = 0.7  # in which a short search ends before its page is shown
_UNSEEN_SECONDS = 30.0  # after which a search ends that nobody looks at
_KEPT_SECONDS = 60.0
_PARTIAL_KEPT_SECONDS = 10.0  # the shards that it lacks may be back
_MOST_KEPT = 100


# Scopes in the order of a search, each with its number of jobs in a frame.
_FIGURES = {
    "failed": "failed",
    "running": "in_progress",
    "ready": "pending",
    "scheduled": "scheduled",
    "succeeded": "succeeded",
}
STATES = tuple(_FIGURES)


class SearchQuery(NamedTuple):
    """The jobs to search for; `queue`: "" for all that the user may see."""

    text: str
    is_regex: bool
    states: Sequence[str]
    queue: str = ""
    worker: str | None = None  # whose running jobs; the text does not matter then

    @property
    def pattern(self) -> str | None:
        """The RE2 pattern of bodies that match."""
        if self.worker is not None:
            return None
        return self.text if self.is_regex else re2.escape(self.text)

    @property
    def command(self) -> str:
        """The command that searches for the same."""
        words = ["pinlater-admin", "job", "find"]
        words += ["--re2"] if self.is_regex else []
        words += ["--queue", self.queue] if self.queue else []
        if self.worker is None and self.states != STATES:
            words += [word for state in self.states for word in ("--state", state)]
        words += ["--"] if self.text.startswith("-") else []
        return shlex.join([*words, self.text])


class FoundJob(NamedTuple):
    """A job as the list shows it."""

    descriptor: str
    state: str
    word: str
    at_ms: int
    said: str


class JobSearch:
    """A search under way, or what it came to; its task writes, requests read."""

    def __init__(
        self,
        query: SearchQuery,
        queues: Sequence[str],
        about: int | None,
        now: float,
        most: int = MOST_FOUND,
    ) -> None:
        """Begin none yet. `about`: how many jobs there are to look at, if that is known; `most`:
        how many are enough."""
        self.query = query
        self._most = most
        self._queues = queues
        self._about = about
        self.found: list[JobRecord] = []
        self.seen_at = now  # monotonic, by anybody; math.inf: it needs no viewer
        self.began_at = self.ended_at = 0.0  # 0: not yet
        self.problem = ""
        self.task: asyncio.Task[None] | None = None
        self._looked_at = 0
        self.missing_shards: set[str] = set()  # of any page
        self._state = ""  # that is searched; "": none yet, or no more
        self._queues_done = 0  # in that state

    async def run(self, client: RouterClient | AsyncClient, clock: Clock) -> None:
        """Search until all is found, too much is, or nobody looks."""
        for state in self.query.states:  # failed ones of all queues first
            self._state, self._queues_done = state, 0
            for queue in self._queues:
                await self._scan(client, clock, queue, SCOPES[state])
                if self.problem:
                    return
                self._queues_done += 1
        self._state = ""

    async def _scan(
        self, client: RouterClient | AsyncClient, clock: Clock, queue: str, scope: Scope
    ) -> None:
        worker = self.query.worker
        call: calls.PreparedCall[ScanResult] | None = calls.scan(
            queue,
            scope.state,
            future=scope.is_future,
            body_regex=self.query.pattern,
            page_size=_PAGE,
            newest_end_first=scope.has_ended,
            max_ms=_PART_MS,
            accept_partial=True,
            choice=JobChoice(worker=worker) if worker is not None else None,
        )
        while call is not None:
            page = await client.run(call)
            self.found += page.jobs
            self._looked_at += page.looked_at
            self.missing_shards.update(page.missing_shards or ())
            if len(self.found) > self._most:
                del self.found[self._most :]
                self.problem = f"More than {self._most} match: say more of what you look for."
            elif clock.monotonic() - self.seen_at > _UNSEEN_SECONDS:
                self.problem = "It ended, as nobody looked at it."
            call = None if self.problem else calls.page_after(call, page)

    def progress(self, now: float) -> Mapping[str, Any]:
        """Return how far it is, for a viewer, who has seen it now."""
        self.seen_at = max(self.seen_at, now)
        without = without_shards(sorted(self.missing_shards))
        state = f" for {self._state} ones" if self._state else ""
        return {
            "found": len(self.found),
            "looked_at": self._looked_at,
            "about": self._about,
            "queues": f"{self._queues_done} of {len(self._queues)} queues{state}",
            "seconds": (self.ended_at or now) - self.began_at if self.began_at else 0.0,
            "is_waiting": not (self.began_at or self.ended_at),
            "is_over": bool(self.ended_at),
            "problem": f"{self.problem} {without}".strip(),
        }


class Searches:
    """The searches of all viewers."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._kept: dict[tuple[str, SearchQuery], JobSearch] = {}
        self._room = asyncio.Semaphore(_SEARCHES_AT_A_TIME)

    async def get(self, request: web.Request, query: SearchQuery) -> JobSearch:
        """Return a user's search for this; it begins if there is none. Raises PageProblem."""
        user = _user_name(request)
        now = self._site.clock.monotonic()
        for key, search in list(self._kept.items()):
            kept = _PARTIAL_KEPT_SECONDS if search.missing_shards else _KEPT_SECONDS
            if search.ended_at and now - search.ended_at > kept:
                del self._kept[key]
        if (user, query) not in self._kept:
            queues = await _queues_of(self._site, request, query)
            about = await _about(self._site, query, queues)
            if len(self._kept) >= _MOST_KEPT:
                what = "Too many searches wait."
                raise PageProblem(HTTPStatus.TOO_MANY_REQUESTS, what, "Try again in a minute.")
            if (user, query) not in self._kept:  # nor was it begun meanwhile
                begun = self._kept[user, query] = JobSearch(query, queues, about, now)
                begun.task = asyncio.create_task(self._run(begun))
        return self._kept[user, query]

    def cancel(self, user: str, query: SearchQuery) -> None:
        """End a search; what it has found stays."""
        search = self._kept.get((user, query))
        if search is not None and search.task is not None and not search.ended_at:
            search.problem = "You cancelled it."
            search.task.cancel()

    async def _run(self, search: JobSearch) -> None:
        clock = self._site.clock
        try:
            async with self._room:
                search.began_at = clock.monotonic()
                await search.run(self._site.client, clock)
        except (PinLaterError, ConnectionFailed) as error:
            search.problem = f"It ended early: {error}."
        finally:
            search.ended_at = clock.monotonic()


def routes(site: Site) -> list[web.RouteDef]:
    """Return the routes of the page, of its figures, and of the form that cancels."""
    searches = Searches(site)

    async def search_of(request: web.Request) -> JobSearch:
        search = await searches.get(request, _read(site, request, request.query))
        assert search.task is not None
        await asyncio.wait({search.task}, timeout=_PATIENCE_SECONDS)
        return search

    async def show(request: web.Request) -> web.StreamResponse:
        text = request.query.get("q", "").strip()
        if not text:
            return _render(site, request, None)
        descriptor = JobDescriptor.parse(text)
        if descriptor is not None:
            raise web.HTTPSeeOther(f"/j/{text}")
        holders = await _holders(site, request, text)
        if len(holders) == 1:
            raise web.HTTPSeeOther(f"/j/{holders[0]}")
        return _render(site, request, await search_of(request))

    async def figures(request: web.Request) -> web.StreamResponse:
        search = await search_of(request)
        behind = search.found[whole_number(request.query, "seen", 0, 0, _MOST_SEEN) :]
        shown = _shown(site, request, behind)
        jobs = [job._replace(said=visible_text(job.said))._asdict() for job in shown]
        return web.json_response({**search.progress(site.clock.monotonic()), "jobs": jobs})

    async def cancel(request: web.Request) -> web.StreamResponse:
        form = request[FORM]
        searches.cancel(_user_name(request), _read(site, request, form))
        fields = [(key, value) for key, value in form.items() if key != "token"]
        raise web.HTTPSeeOther(f"/find?{urlencode(fields)}")

    return [
        site.page("/find", show),
        site.page("/find.json", figures),
        site.action("/find/cancel", cancel, role="view", writes=False),
    ]


def _user_name(request: web.Request) -> str:
    user = request.get(USER)
    return user.name if user is not None else ""


def _read(site: Site, request: web.Request, fields: MultiMapping[str]) -> SearchQuery:
    """Return what a request searches for. Raises PageProblem."""
    text, queue = (fields.get(name, "").strip() for name in ("q", "queue"))
    asked = set(filter(None, fields.getall("state", [])))
    if unknown := asked - _FIGURES.keys():
        what, cure = (
            f"There is no state {min(unknown)[:20]!r}.",
            f"Choose from {', '.join(_FIGURES)}.",
        )
        raise PageProblem(HTTPStatus.BAD_REQUEST, what, cure)
    if not text or len(text) > _MOST_TEXT_CHARS:
        cure = f"Give up to {_MOST_TEXT_CHARS} characters."
        raise PageProblem(HTTPStatus.BAD_REQUEST, "There is nothing to search for.", cure)
    worker = claim_source(text)
    states = [state for state in STATES if state in asked or not asked]
    if worker is not None:
        states = ["running"]
    if worker is None and hidden_pattern(site, request):
        cure = "Search for a descriptor or a key, or have an operator give you the role `bodies`."
        what = "Bodies have parts that you may not see, so you can't search them."
        raise PageProblem(HTTPStatus.FORBIDDEN, what, cure)
    return SearchQuery(text, fields.get("as") == "re2", tuple(states), queue, worker)


async def _queues_of(site: Site, request: web.Request, query: SearchQuery) -> Sequence[str]:
    """Return the queues to search: those that the user may see. Raises PageProblem."""
    if query.queue:
        site.check_right(request, "view", query.queue)
    names = await site.client.run(calls.queue_names())
    if query.queue and query.queue not in names:
        cure = "The overview lists all queues."
        raise PageProblem(HTTPStatus.NOT_FOUND, f"There is no queue {query.queue[:100]}.", cure)
    asked = [query.queue] if query.queue else sorted(names)
    return [name for name in asked if may(request.get(USER), "view", name)]


async def _about(site: Site, query: SearchQuery, queues: Sequence[str]) -> int | None:
    try:
        return jobs_in((await site.frames.now()).facts, query, queues)
    except ConnectionFailed:  # of the coordinator, which a search does not need
        return None


def jobs_in(frame: Facts, query: SearchQuery, queues: Sequence[str]) -> int | None:
    """Return how many jobs a frame has to look at in these queues; None if it lacks one of them."""
    known = {one["name"]: one for one in frame["queues"]}
    numbers = [
        known.get(name, {}).get(_FIGURES[state]) for name in queues for state in query.states
    ]
    return round(sum(numbers)) if None not in numbers else None


async def _holders(site: Site, request: web.Request, key: str) -> list[str]:
    seen = await _queues_of(site, request, SearchQuery(key, is_regex=False, states=()))
    return await holders_of(site.client, key, seen)


async def holders_of(
    client: RouterClient | AsyncClient, key: str, queues: Sequence[str]
) -> list[str]:
    """Return the jobs of these queues that hold a key."""
    if len(key.encode()) > MOST_KEY_BYTES:
        return []
    keys = [QueueKey(name, key) for name in (ALL_QUEUES, *queues)]
    call = calls.lookup_keys("", [])._replace(request=LookupRequest((), False, keys), result=dict)
    found: dict[str, JobRecord] = {}
    with contextlib.suppress(PinLaterError):  # some shard is down: the search says so
        found = await client.run(call)
    return [one for one in found if one.partition(":")[0] in queues]


def _shown(site: Site, request: web.Request, jobs: Sequence[JobRecord]) -> Sequence[FoundJob]:
    now_ms, pattern = site.clock.now_ms(), hidden_pattern(site, request)
    looks = [(job, look_of(job, now_ms)) for job in jobs]
    return [
        FoundJob(
            job.descriptor,
            look.state,
            look.word,
            job.updated_at_ms,
            last_said(job, pattern),
        )
        for job, look in looks
    ]


def _render(site: Site, request: web.Request, search: JobSearch | None) -> web.Response:
    query = request.query
    fields = {name: query.get(name, "") for name in ("q", "as", "queue")}
    chosen = query.getall("state", [])
    sent = [*fields.items(), *(("state", state) for state in chosen)]
    progress = search.progress(site.clock.monotonic()) if search is not None else None
    return site.render(
        request,
        "find.html",
        fields=fields,
        search=search,
        progress=progress,
        jobs=_shown(site, request, search.found) if search is not None else (),
        states=STATES,
        chosen=chosen,
        sent=sent,
        command=search.query.command if search is not None else "",
        address="/find.json?" + urlencode(sent),
    )
