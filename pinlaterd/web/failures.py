"""The page of failures: of all queues, and of one queue in groups of those that failed alike."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import partial
from http import HTTPStatus
from operator import attrgetter
from typing import NamedTuple, cast, get_args
from urllib.parse import quote, urlencode

from aiohttp import web

from pinlaterd.access import may
from pinlaterd.client.failures import Failure, FailureGroup, FailureWindow, Grouping, shown_workers
from pinlaterd.config.schema import UserSettings
from pinlaterd.signature import TIMED_OUT, UNSAID
from pinlaterd.status import Facts
from pinlaterd.verdict import without_shards
from pinlaterd.web import text
from pinlaterd.web.bodies import redacted_text
from pinlaterd.web.job import hidden_pattern
from pinlaterd.web.live import Cells, LiveFrame
from pinlaterd.web.overview import row_cells, rows_of
from pinlaterd.web.refusals import PageProblem
from pinlaterd.web.site import USER, Site

GROUPINGS: Sequence[str] = get_args(Grouping)
RANGES: Mapping[str, int | None] = {"1h": 3_600_000, "24h": 86_400_000, "7d": 604_800_000}
_PATIENCE_SECONDS = 0.8  # after which a page shows the groups of what was read by then
_FRESH_SECONDS = 10.0  # for which the groups of a queue are shown again
_MOST_WINDOWS = 8  # that are kept so: of as many queues and ranges
_MOST_GROUPS = 100  # on a page
_SILENT = (TIMED_OUT, UNSAID)


class GroupRow(NamedTuple):
    """A group as the page shows it. `title`: what its jobs have in common. `attempts`: all that
    failed so, as shards have counted them; None: not known. `jobs_path` lists the jobs, `mend_path`
    mends them."""

    title: str
    below: str
    jobs: int
    attempts: int | None
    percent: float
    first_ms: int
    last_ms: int
    workers: str
    trend: str
    jobs_path: str
    mend_path: str


def missing_in(facts: Facts) -> Sequence[str]:
    """Return the shards of which it is not known what they hold."""
    return [shard["name"] for shard in facts["shards"] if shard["jobs"] is None]


def heading_of_all(facts: Facts, user: UserSettings | None) -> str:
    """Return the first line of the page of all queues."""
    queues = [queue for queue in facts["queues"] if may(user, "view", queue["name"])]
    failed, missing = [jobs for queue in queues if (jobs := queue["failed"])], missing_in(facts)
    if not failed:
        return "Whether jobs have failed is not known" if missing else "No job has failed"
    jobs = text.many(sum(failed), "job")
    return f"{'At least ' if missing else ''}{jobs} failed, in {text.many(len(failed), 'queue')}"


class FailureWindows:
    """The newest failures of queues, for some seconds."""

    def __init__(self, site: Site) -> None:
        self._site = site
        # With their searches, which return when they ended.
        self._kept: dict[tuple[str, str, str], tuple[FailureWindow, asyncio.Task[float]]] = {}

    async def of(self, queue: str, within: str, hidden: str) -> FailureWindow:
        """Return the failures of a queue within a range, without what the pattern `hidden` hides,
        found no longer than some seconds ago, or those of them that are known after a while.
        Viewers who ask while a search goes on wait for the same one."""
        key = (queue, within, hidden)
        window, task = self._kept.get(key) or (None, None)
        if window is None or task is None or self._is_over(task):
            self._kept.pop(key, None)
            self._drop_some()
            window = self._window(*key)
            task = asyncio.ensure_future(self._fill(window))
            # It may fail when nobody waits for it any more; the next viewer searches again.
            task.add_done_callback(lambda task: task.cancelled() or task.exception())
            self._kept[key] = window, task
        await asyncio.wait({task}, timeout=_PATIENCE_SECONDS)
        while not (task.done() or window.failures):
            await asyncio.wait({task}, timeout=_PATIENCE_SECONDS)
        if task.done():
            task.result()
        return copy(window)

    def _is_over(self, search: asyncio.Task[float]) -> bool:
        """Return whether what a search found is not to be shown again."""
        if not search.done():
            return False
        if search.cancelled() or search.exception():
            return True
        return self._site.clock.monotonic() - search.result() > _FRESH_SECONDS

    def _drop_some(self) -> None:
        """Make room for a window. One that is being filled stays: the next viewer would fill it
        again at the same time."""
        ended = [key for key, (_, search) in self._kept.items() if search.done()]
        for key in ended[: max(0, len(self._kept) - _MOST_WINDOWS + 1)]:
            del self._kept[key]

    def _window(self, queue: str, within: str, hidden: str) -> FailureWindow:
        range_ms = RANGES.get(within)
        since_ms = None if range_ms is None else self._site.clock.now_ms() - range_ms
        redact = partial(redacted_text, pattern=hidden) if hidden else None
        return FailureWindow(queue, since_ms, redact, accept_partial=True)

    async def _fill(self, window: FailureWindow) -> float:
        while window.call is not None:
            window.take(await self._site.client.run(window.call))
        return self._site.clock.monotonic()


def heading(window: FailureWindow, queue: str) -> str:
    """Return the page's first line."""
    if window.failed is None:
        return f"{queue}: failed jobs are being counted"
    least = "at least " if window.missing_shards else ""
    return f"{queue}: {least}{text.many(window.failed, 'job has', 'jobs have')} failed"


def explained(window: FailureWindow, by: str, within: str, now_ms: int) -> str:
    """Return which jobs are grouped, and by what."""
    words = {"message": "by what they say", "place": "by where", "worker": "by who ran them"}
    if window.times_ms is None:
        return (
            "None of them failed within this range." if window.failed else "Nothing to mend here."
        )
    first, last = (text.clock_time(at_ms, now_ms) for at_ms in window.times_ms)
    grouped = len(window.failures)
    which = f"All {grouped:,}" if window.is_whole else f"The newest {grouped:,}"
    if window.is_whole and window.missing_shards:
        which = f"{grouped:,} of the other shards"
    elif window.is_whole and RANGES.get(within) is not None:
        which = f"The {grouped:,} of the last {within.replace('h', ' h').replace('d', ' d')}"
    older = "" if window.is_whole else " Older ones are not grouped."
    if window.call is not None:
        older = " Older ones are being read: load the page again to see their groups."
    return f"{which}, {first} to {last} UTC, grouped {words[by]}.{older}"


class Groups(NamedTuple):
    """The groups that the page shows, and how many more there are, with how many jobs."""

    rows: Sequence[GroupRow]
    more: int
    more_jobs: int


def groups_of(
    window: FailureWindow, by: Grouping, now_ms: int, counted: Mapping[str, int]
) -> Groups:
    """Return the groups, the largest first. `counted`: failed attempts, by what they said."""
    groups = window.groups(by, now_ms)
    # What is left of a status may be what others say: a link would lead to their jobs.
    key_of: Callable[[Failure], str] = attrgetter(by)
    redacted = {key_of(failure) for failure in window.failures if failure.is_redacted}
    rows = [
        # An empty text would choose all jobs.
        _row(
            *(window, by, group, counted.get(group.key)),
            is_named=bool(group.key) and group.key not in redacted,
        )
        for group in groups[:_MOST_GROUPS]
    ]
    left = groups[_MOST_GROUPS:]
    return Groups(rows, len(left), sum(group.jobs for group in left))


def _row(
    window: FailureWindow,
    by: Grouping,
    group: FailureGroup,
    attempts: int | None,
    *,
    is_named: bool,
) -> GroupRow:
    title, below = group.message, group.place
    if by == "place":
        title, below = group.place or "no place known", group.message
    elif by == "worker":
        title, below = group.key or "no worker known", group.message
    more = group.messages - 1 if by != "message" else group.places - 1
    below = below or ("no place known" if by == "message" else "")
    chosen: dict[str, object] = {"queue": window.queue, "state": "failed", by: group.key}
    if window.since_ms is not None:
        chosen["since"] = window.since_ms
    chosen["before"] = group.last_ms + 1
    of_queue = {name: value for name, value in chosen.items() if name != "queue"}
    return GroupRow(
        title,
        f"{below} and {text.many(more, 'other')}" if more else below,
        group.jobs,
        attempts,
        100 * group.jobs / len(window.failures),
        group.first_ms,
        group.last_ms,
        shown_workers(group.workers) or text.UNKNOWN,
        text.line(group.trend),
        f"/q/{window.queue}?{urlencode(of_queue)}#jobs" if is_named else "",
        f"/mend?{urlencode({'action': 'retry', **chosen})}" if is_named else "",
    )


def command_of(queue: str, by: str, window: FailureWindow) -> str:
    """Return the command that shows the same."""
    since = "" if window.since_ms is None else f" --since {text.iso_ms(window.since_ms)}"
    return (
        f"pinlater-admin job failures {queue}" + (f" --by {by}" if by != "message" else "") + since
    ) + (" --partial" if window.missing_shards else "")


def routes(site: Site) -> list[web.RouteDef]:
    """Return the route of the page."""
    windows = FailureWindows(site)

    async def show(request: web.Request) -> web.StreamResponse:
        queue = request.query.get("queue", "")
        if not queue:
            return await show_queues(request)
        site.check_right(request, "view", queue)
        by, within = request.query.get("by", "message"), request.query.get("within", "")
        if by not in GROUPINGS or within not in ("", *RANGES):
            cure = "Choose a grouping and a range on the page."
            raise PageProblem(HTTPStatus.BAD_REQUEST, "There is no such grouping or range.", cure)
        hidden, now_ms = hidden_pattern(site, request), site.clock.now_ms()
        is_counted = by == "message" and not hidden  # shards count whole messages
        path = f"/failures.json?queue={quote(queue)}" if is_counted else ""
        window, found = await asyncio.gather(windows.of(queue, within, hidden), counts_of(path))
        counted = {one["signature"]: one["attempts"] for one in found}
        grouping = cast("Grouping", by)
        groups = await asyncio.to_thread(groups_of, window, grouping, now_ms, counted)
        first_ms, newest_ms = window.times_ms or (now_ms, window.since_ms or 0)
        return site.render(
            request,
            "failures.html",
            queue=queue,
            heading=heading(window, queue),
            explained=explained(window, by, within, now_ms),
            without=without_shards(window.missing_shards),
            newest_ms=newest_ms,
            by=by,
            within=within,
            groupings=GROUPINGS,
            ranges=("", *RANGES),
            groups=groups,
            range_ms=now_ms - (window.since_ms or first_ms),
            counted_since_ms=min([one["first_ms"] for one in found], default=None),
            chosen=request.query.get("message"),
            command=command_of(queue, by, window),
        )

    async def counts_of(path: str) -> Sequence[Facts]:
        answer = await site.frames.ask(path) if path else None
        return answer["failures"] if answer else ()

    async def show_queues(request: web.Request) -> web.StreamResponse:
        frame, user = await site.frames.now(), request.get(USER)
        rows = {row.name: row for row in rows_of(frame, user, site.hidden_from(user))}
        seen = [queue for queue in frame.facts["queues"] if queue["name"] in rows]
        failed = [queue for queue in seen if queue["failed"] != 0]
        failed.sort(key=lambda queue: (-queue["failures_per_second"], -(queue["failed"] or 0)))
        return site.render(
            request,
            "failures_of_all.html",
            heading=heading_of_all(frame.facts, user),
            without=without_shards(missing_in(frame.facts)),
            rows=[(row, row_cells(row)) for queue in failed if (row := rows[queue["name"]])],
        )

    def cells(frame: LiveFrame, _name: str, user: UserSettings | None) -> Cells:
        found = {"failures": heading_of_all(frame.facts, user)}
        for row in rows_of(frame, user, site.hidden_from(user)):
            found |= row_cells(row)
        return found

    site.live.add("failures", cells)
    return [site.page("/failures", show)]
