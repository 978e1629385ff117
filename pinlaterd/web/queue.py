"""The page of a queue: its verdict and figures, and its jobs, 50 a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from http import HTTPStatus
from typing import Any, NamedTuple
from urllib.parse import urlencode

import re2
from aiohttp import web

from pinlaterd.access import may
from pinlaterd.client import calls
from pinlaterd.config.schema import Config, QueueSettings, UserSettings
from pinlaterd.errors import ConnectionFailed, PinLaterError
from pinlaterd.model import (
    CONTINUATION_END,
    CONTINUATION_START,
    JobChoice,
    JobRecord,
    JobState,
    ScanResult,
)
from pinlaterd.status import Facts
from pinlaterd.verdict import whole_span, without_shards
from pinlaterd.web import history, text
from pinlaterd.web.guide import what_to_do
from pinlaterd.web.job import hidden_pattern, holder_of, last_said
from pinlaterd.web.live import Cells, LiveFrame, LookedUp
from pinlaterd.web.overview import held, row_cells, rows_of
from pinlaterd.web.refusals import PageProblem, whole_number
from pinlaterd.web.site import Site


class Figure(NamedTuple):
    """A large number with what it counts below. `key`: of its cell."""

    key: str
    value: str
    label: str


def figures_of(queue: Facts, settings: QueueSettings) -> Sequence[Figure]:
    """Return the queue's jobs by state."""
    oldest = held(queue, "oldest_ready_age_ms", text.duration)
    succeeded = whole_span(settings.job_succeeded_ttl_hours * 3_600)
    failed = whole_span(settings.job_failed_ttl_hours * 3_600)
    return [
        Figure("ready", held(queue, "pending"), f"ready, oldest {oldest}"),
        Figure("scheduled", held(queue, "scheduled"), "scheduled"),
        Figure("running", held(queue, "in_progress"), "running"),
        Figure("succeeded", held(queue, "succeeded", text.short), f"succeeded, kept {succeeded}"),
        Figure("failed", held(queue, "failed"), f"failed, kept {failed}"),
    ]


def settings_of_queue(config: Config, name: str) -> Mapping[str, str]:
    """Return the queue's limits and times in words, its job type, and where its jobs are pushed."""
    settings = config.queue(name)
    claim = whole_span(settings.job_claimed_timeout_seconds)
    found = {
        "dequeues": (settings.max_jobs_per_second, "at most {} jobs/s"),
        "running at a time": (settings.max_in_progress, "at most {} jobs"),
        "pending": (settings.max_pending, "at most {} jobs"),
    }
    limits = {
        name: words.format(text.exact_number(limit))
        for name, (limit, words) in found.items()
        if limit is not None
    }
    others: dict[str, str] = {}
    if job_type := config.job_types.get(name):
        others["job type"] = f"{job_type.name}, {job_type.delivery_strategy.replace('_', ' ')}"
    if push := config.pushes.get(name):
        others["pushed to"] = push.url
    return {"claims end after": claim, **limits, **others}


# --- its jobs -------------------------------------------------------------------------------


class Scope(NamedTuple):
    """Jobs that the page calls by one word. `when`: what their time means."""

    state: JobState
    is_future: bool
    when: str

    @property
    def has_ended(self) -> bool:
        return self.state in (JobState.SUCCEEDED, JobState.FAILED)

    @property
    def fact(self) -> str:
        """Return the name of their number in a frame."""
        return "scheduled" if self.is_future else self.state.name.lower()


SCOPES: Mapping[str, Scope] = {
    "ready": Scope(JobState.PENDING, is_future=False, when="since"),
    "scheduled": Scope(JobState.PENDING, is_future=True, when="due"),
    "running": Scope(JobState.IN_PROGRESS, is_future=False, when="renewed"),
    "failed": Scope(JobState.FAILED, is_future=False, when="failed"),
    "succeeded": Scope(JobState.SUCCEEDED, is_future=False, when="succeeded"),
}


_ENDED = [name for name, scope in SCOPES.items() if scope.has_ended]


class JobRow(NamedTuple):
    """A job in the table. `said`: what its last attempt had to say."""

    descriptor: str
    at_ms: int
    attempts: str
    said: str
    holder: str


class JobsPage(NamedTuple):
    """One page of jobs. `problem`: why there is none; `progress`: how far a search got that is not
    over, or ""; `older`: the path of what follows, or ""; `without`: the shards that it lacks."""

    rows: Sequence[JobRow] = ()
    problem: str = ""
    progress: str = ""
    older: str = ""
    without: str = ""


class JobsQuery(NamedTuple):
    """The jobs that a request asks for. `given`: its parameters, without the place."""

    scope: Scope
    given: Mapping[str, str]
    choice: JobChoice | None
    cursor: str
    priority: int | None

    @classmethod
    def of(cls, query: Mapping[str, str]) -> JobsQuery:
        """Read a request's query. Raises PageProblem."""
        given = {name: query[name] for name in _JOBS_PARAMETERS if query.get(name)}
        state = given.setdefault("state", "ready")
        if state not in SCOPES:
            cure = f"Choose from {', '.join(SCOPES)}."
            raise PageProblem(HTTPStatus.BAD_REQUEST, f"There is no state {state[:20]!r}.", cure)
        priority = whole_number(query, "priority", 0, 1, MOST_PRIORITY) or None
        scope = SCOPES[state]
        if not scope.has_ended:
            given = {name: text for name, text in given.items() if name not in ("since", "before")}
        choice = choice_of(given, time_of(given, "before"), has_ended=scope.has_ended)
        cursor = query.get("cursor", CONTINUATION_START)
        return cls(scope, given, choice or None, cursor, priority)

    @property
    def reads_what_is_hidden(self) -> bool:
        """Whether its answer tells what is left out of bodies and statuses for some users."""
        return self.body_regex is not None or "status" in self.given

    @property
    def body_regex(self) -> str | None:
        return body_regex_of(self.given)

    @property
    def filters(self) -> Mapping[str, str]:
        """Return what jobs have to meet beyond their state, as the page shows it."""
        shown = {name: self.given[name] for name in _FILTERS if name in self.given}
        times = {name: time_of(shown, name) for name in ("since", "before") if name in shown}
        return shown | {name: text.exact(at) for name, at in times.items() if at is not None}

    def call(self, queue: str) -> calls.PreparedCall[ScanResult]:
        """Return the call that finds the page's jobs."""
        call = calls.scan(
            queue,
            self.scope.state,
            priority=self.priority,
            future=self.scope.is_future,
            body_regex=self.body_regex,
            page_size=_PAGE_JOBS,
            newest_end_first=self.scope.has_ended,
            # A list that is not searched through is read at once.
            max_ms=_SEARCH_MS if self.body_regex or self.choice else None,
            accept_partial=True,
            choice=self.choice,
        )
        return calls.page_after(call, ScanResult((), self.cursor)) or call


_FILTERS = ("priority", "body", "status", "message", "place", "worker", "since", "before")
_JOBS_PARAMETERS = ("state", "by", *_FILTERS)
_PAGE_JOBS = 50
_HIDDEN = (
    "parts of bodies and statuses are hidden from you, so you can't search them; an operator can "
    "give you the role bodies"
)
_TIME_DIGITS = 15  # of milliseconds: beyond, no calendar has it
_LATEST_MS = 99_999_999_999_999
MOST_PRIORITY = 127  # that a call can name
_SEARCH_MS = 1_500  # after which the page shows what was found by then


def choice_of(
    given: Mapping[str, str], ended_before_ms: int | None, *, has_ended: bool
) -> JobChoice:
    """Return the choice that filters make. Raises PageProblem."""
    return JobChoice(
        ended_before_ms=ended_before_ms if has_ended else None,
        ended_since_ms=time_of(given, "since") if has_ended else None,
        status_regex=given.get("status") or None,
        message=given.get("message") or None,
        place=given.get("place") or None,
        worker=given.get("worker") or None,
    )


def body_regex_of(given: Mapping[str, str]) -> str | None:
    """Return the expression that a filter finds in bodies: as it is `by` RE2, else as a text."""
    body = given.get("body") or None
    return body if body is None or given.get("by") == "RE2" else re2.escape(body)


def time_of(given: Mapping[str, str], name: str) -> int | None:
    """Return a time of a query in milliseconds: it is those, or a time in UTC. Raises
    PageProblem."""
    shown = given.get(name, "")
    if not shown or (shown.isdecimal() and len(shown) < _TIME_DIGITS):
        return int(shown) if shown else None
    try:
        at = datetime.fromisoformat(shown)
    except ValueError:
        cure = "Write it as 2026-11-26T03:08, in UTC."
        what = f"{name}: {shown[:40]!r} is no time."
        raise PageProblem(HTTPStatus.BAD_REQUEST, what, cure) from None
    at_ms = round((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() * 1000)
    return min(max(0, at_ms), _LATEST_MS)


async def find_jobs(site: Site, request: web.Request, queue: str, query: JobsQuery) -> JobsPage:
    """Return a page of jobs. What prevents it is said in its place: the rest is shown all the
    same."""
    pattern = hidden_pattern(site, request)
    if pattern and query.reads_what_is_hidden:
        return JobsPage(problem=_HIDDEN)
    try:
        found = await site.client.run(query.call(queue))
    except (ConnectionFailed, PinLaterError) as error:
        return JobsPage(problem=getattr(error, "message", "") or str(error))
    rows = [_job_row(job, query.scope, pattern) for job in found.jobs]
    without = without_shards(found.missing_shards or ())
    if found.continuation == CONTINUATION_END:
        return JobsPage(rows, without=without)
    progress = ""
    if len(rows) < _PAGE_JOBS:
        about = "" if found.in_state is None else f" of about {found.in_state:,}"
        progress = f"Looked at {found.looked_at:,}{about} jobs so far."
    older = {**query.given, **_range_of(request), "cursor": found.continuation}
    return JobsPage(rows, "", progress, f"/q/{queue}?{urlencode(older)}#jobs", without)


async def _newest_ends(site: Site, queue: str, scope: Scope) -> str:
    """Return when the last jobs of a list ended, in milliseconds, the latest first."""
    found = await site.client.run(JobsQuery(scope, {}, None, CONTINUATION_START, None).call(queue))
    return " ".join([str(job.updated_at_ms) for job in found.jobs])


def _range_of(request: web.Request) -> Mapping[str, str]:
    """Return the range of the plots, which links of the list keep."""
    return {name: value for name, value in request.query.items() if name == "range"}


def matching(query: JobsQuery, page: JobsPage) -> str:
    """Return how many jobs match a search, as far as the page shows it."""
    state, found = query.given["state"], len(page.rows)
    if query.cursor != CONTINUATION_START or page.problem or (page.older and not found):
        return f"{state.capitalize()} jobs that match"
    least = "At least " if page.older or page.without else ""
    return least + text.many(found, f"{state} job matches", f"{state} jobs match")


def _job_row(job: JobRecord, scope: Scope, pattern: str) -> JobRow:
    return JobRow(
        job.descriptor,
        job.run_after_ms if scope.state is JobState.PENDING else job.updated_at_ms,
        f"{job.attempts_remaining} of {job.attempts_allowed}",
        last_said(job, pattern),
        holder_of(job),
    )


def routes(site: Site) -> list[web.RouteDef]:
    """Return the route of the page."""

    async def show(request: web.Request) -> web.StreamResponse:
        name = request.match_info["queue"]
        frame = await site.frames.now()
        queue = queue_in(frame.facts, name)
        if queue is None:
            # It may be newer than the last figures, or hold nothing yet.
            if name not in await site.client.run(calls.queue_names()):
                cure = "The overview lists all queues."
                raise PageProblem(HTTPStatus.NOT_FOUND, f"There is no queue {name}.", cure)
            return site.render(request, "queue_unknown.html", name=name)
        settings = site.config.queue(name)
        hidden = hidden_pattern(site, request)
        [row] = rows_of(frame._replace(facts={"queues": [queue]}), None, hidden)
        return site.render(
            request,
            "queue.html",
            queue=name,
            name=name,
            row=row,
            figures=figures_of(queue, settings),
            has_failed=bool(queue["failed"]),
            links=what_to_do(row.verdict["kind"]),
            settings=settings_of_queue(site.config, name),
            **await jobs_values(request, name, queue),
            **history.values_of(request, name),
        )

    async def jobs_values(request: web.Request, name: str, facts: Facts) -> Mapping[str, Any]:
        query = JobsQuery.of(request.query)
        jobs = await find_jobs(site, request, name, query)
        return {
            "jobs": jobs,
            "matching": matching(query, jobs),
            "filters": query.filters,
            "ranged": _range_of(request),
            "scope": query.scope,
            "scopes": SCOPES,
            "given": query.given,
            "levels": range(1, site.config.server.num_priority_levels + 1),
            "is_first": query.cursor == CONTINUATION_START,
            "list_state": held(facts, query.scope.fact),
        }

    ends, kept = LookedUp("newest ends"), dict[str, int | None]()

    def list_cells(queue: Facts, state: str) -> Cells:
        """Return what tells that lists of jobs have changed. `state`: of a list of ended jobs."""
        moves = [queue[f"{what}_per_second"] for what in ("acks", "failures")]
        if state in _ENDED:
            key, jobs = f"{queue['name']} {state}", queue[state]
            again = any(moves) or kept.get(key) != jobs
            kept[key] = jobs
            look = partial(_newest_ends, site, queue["name"], SCOPES[state])
            return ends.get(key, look, again=again)
        moves += [queue[f"{what}_per_second"] for what in ("enqueues", "dequeues")]
        moving = ", changing" if any(moves) else ""
        return {
            f"list {name}": held(queue, scope.fact) + moving
            for name, scope in SCOPES.items()
            if not scope.has_ended
        }

    def cells(frame: LiveFrame, of: str, user: UserSettings | None) -> Cells:
        name, _, state = of.partition(" ")
        found = queue_in(frame.facts, name)
        if found is None or not may(user, "view", name):
            return {}
        hidden = site.hidden_from(user)
        rows = rows_of(frame._replace(facts={"queues": [found]}), None, hidden)
        figures = figures_of(found, site.config.queue(name))
        numbers = {f"figure {one.key}": one.value for one in figures}
        labels = {f"label {one.key}": one.label for one in figures}
        return {**row_cells(rows[0]), **numbers, **labels, **list_cells(found, state)}

    site.live.add("queue", cells)
    return [site.page("/q/{queue}", show)]


def queue_in(facts: Facts, name: str) -> Facts | None:
    """Return the row of a queue in a frame; None if the frame has none."""
    return next((queue for queue in facts["queues"] if queue["name"] == name), None)
