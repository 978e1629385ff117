"""The overview: what is wrong first, then every queue, the worst first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from aiohttp import web

from pinlaterd.access import may
from pinlaterd.config.schema import UserSettings
from pinlaterd.stats import natural
from pinlaterd.status import Facts
from pinlaterd.web import text
from pinlaterd.web.live import Cells, Moment
from pinlaterd.web.site import USER, Site

_SERVING = "serving"
_MOST_ROWS = 12  # that are shown as long as no further queue is unwell


class QueueVerdict(NamedTuple):
    """A judgement of a queue: `state` has the mark and the colour of the style, `words` say it."""

    state: str
    words: str
    detail: str = ""


# The worst first; those before `paused` need somebody.
_ORDER = ("stopped", "failing", "paused", "behind", "draining", "well", "idle")
_NEEDS_SOMEBODY = frozenset(_ORDER[:2])
_MAY_FOLD = frozenset(_ORDER[-2:])


def verdict_of(queue: Facts) -> QueueVerdict:
    """Return how a queue is."""
    coming, done = queue["enqueues_per_second"], queue["dequeues_per_second"]
    if queue["jobs_per_second_limit"] == 0:
        return QueueVerdict("paused", "Paused")
    if queue["pending"] and not done and queue["oldest_ready_age_ms"] > 60_000:
        return QueueVerdict("stopped", "Stopped", "no worker asks")
    if failed := queue["failures_per_second"]:
        share = 100 * failed / (failed + queue["acks_per_second"])
        if share >= 5:
            return QueueVerdict("failing", f"Failing {share:.0f} %")
    if queue["pending"] and coming > done:
        return QueueVerdict("behind", "Behind", f"+{text.rate(coming - done)} jobs/s")
    if coming or done or queue["in_progress"]:
        return QueueVerdict("well", "Well")
    return QueueVerdict("idle", "Idle")


class Column(NamedTuple):
    """A column of figures. `key`: of its cells, and of its style."""

    key: str
    title: str
    value: Callable[[Facts], str]


COLUMNS = (
    Column("ready", "ready", lambda queue: text.number(queue["pending"])),
    Column("scheduled", "scheduled", lambda queue: text.number(queue["scheduled"])),
    Column("running", "running", lambda queue: text.number(queue["in_progress"])),
    Column("oldest", "oldest", lambda queue: text.duration(queue["oldest_ready_age_ms"])),
    Column("wait", "wait p99", lambda queue: text.duration(queue["dequeue_delay_p99_ms"])),
    Column("in", "in/s", lambda queue: text.rate(queue["enqueues_per_second"])),
    Column("out", "out/s", lambda queue: text.rate(queue["dequeues_per_second"])),
    Column("failing", "failed/s", lambda queue: text.rate(queue["failures_per_second"])),
    Column("failed", "failed", lambda queue: text.number(queue["failed"])),
)


class Row(NamedTuple):
    """A queue in the table."""

    name: str
    verdict: QueueVerdict
    cells: Sequence[tuple[Column, str]]


def rows_of(facts: Facts, user: UserSettings | None) -> list[Row]:
    """Return the queues that the user may see, the worst first."""
    queues = (queue for queue in facts["queues"] if may(user, "view", queue["name"]))
    found = [(queue, verdict_of(queue)) for queue in queues]
    found.sort(
        key=lambda one: (_ORDER.index(one[1].state), -one[0]["pending"], natural(one[0]["name"]))
    )
    return [
        Row(queue["name"], verdict, [(column, column.value(queue)) for column in COLUMNS])
        for queue, verdict in found
    ]


class Banner(NamedTuple):
    """Something that is wrong. `links`: title and path of what helps."""

    state: str
    title: str
    detail: str
    links: Sequence[tuple[str, str]]


def banners_of(facts: Facts, rows: Sequence[Row]) -> list[Banner]:
    """Return what is wrong, the worst first."""
    found = [
        Banner(
            row.verdict.state,
            f"{row.name}: {row.verdict.words.lower()}",
            row.verdict.detail,
            [("queue", f"/q/{row.name}")],
        )
        for row in rows
        if row.verdict.state in _NEEDS_SOMEBODY
    ]
    found += [Banner("stopped", problem, "", []) for problem in facts["problems"]]
    found += [Banner("behind", warning, "", []) for warning in facts["warnings"]]
    return found


def headline(facts: Facts, rows: Sequence[Row]) -> str:
    """Return the page's first line, which is the answer."""
    unwell = sum(row.verdict.state in _NEEDS_SOMEBODY for row in rows)
    if unwell:
        needs = "queue needs" if unwell == 1 else "queues need"
        return f"{text.word(unwell)} {needs} you"
    if facts["problems"]:
        return "The service needs you"
    return "All queues are well" if rows else "There is no queue yet"


def summary(facts: Facts, rows: Sequence[Row]) -> str:
    """Return the line below: how large the service is, and how busy."""
    shown = {row.name for row in rows}
    queues = [queue for queue in facts["queues"] if queue["name"] in shown]
    coming = sum(queue["enqueues_per_second"] for queue in queues)
    done = sum(queue["dequeues_per_second"] for queue in queues)
    sizes = ", ".join(
        text.many(len(found), one, more)
        for found, one, more in (
            (rows, "queue", ""),
            (facts["shards"], "shard", ""),
            (facts["processes"], "process", "processes"),
        )
    )
    return f"{sizes}. {text.rate(coming)} jobs/s in, {text.rate(done)} out."


def cells_of(moment: Moment, _name: str, user: UserSettings | None) -> Cells:
    """Return the texts of the page that change."""
    rows = rows_of(moment.facts, user)
    cells = {"headline": headline(moment.facts, rows), "summary": summary(moment.facts, rows)}
    cells["problems"] = "; ".join(one.title for one in banners_of(moment.facts, rows))
    for row in rows:
        cells |= row_cells(row)
    return cells


def row_cells(row: Row) -> Mapping[str, str]:
    """Return the cells of a queue, which its own page has, too."""
    state, words, detail = row.verdict
    cells = {f"{row.name} {column.key}": value for column, value in row.cells}
    return cells | {
        f"{row.name} state": state,
        f"{row.name} words": words,
        f"{row.name} detail": detail,
    }


def routes(site: Site) -> list[web.RouteDef]:
    """Return the route of the page."""

    async def show(request: web.Request) -> web.StreamResponse:
        facts = (await site.frames.now()).facts
        rows = rows_of(facts, request.get(USER))
        shown = rows if "all" in request.query else rows[: _most_shown(rows)]
        return site.render(
            request,
            "overview.html",
            headline=headline(facts, rows),
            summary=summary(facts, rows),
            banners=banners_of(facts, rows),
            columns=COLUMNS,
            rows=shown,
            folded=len(rows) - len(shown),
            shards=_parts(facts["shards"], "shard", "shards", _unwell_shard),
            processes=_parts(facts["processes"], "process", "processes", _unwell_process),
        )

    site.live.add("overview", cells_of)
    return [site.page("/", show)]


def _most_shown(rows: Sequence[Row]) -> int:
    """Return how many rows the page begins with: none that is unwell is left out."""
    unwell = sum(row.verdict.state not in _MAY_FOLD for row in rows)
    return max(unwell, _MOST_ROWS)


# --- shards and processes ---------------------------------------------------------------------


class Parts(NamedTuple):
    """The shards, or the processes: how many are well, and why the others are not."""

    title: str
    states: Sequence[str]
    details: Sequence[str]


def _parts(facts: Sequence[Facts], one: str, more: str, why_unwell: Callable[[Any], str]) -> Parts:
    reasons = [why_unwell(each) for each in facts]
    details = [f"{each['name']}: {why}" for each, why in zip(facts, reasons, strict=True) if why]
    well = text.many(len(facts) - len(details), one, more)
    title = f"{well} well" + (f", {len(details)} not" if details else "")
    return Parts(title, ["behind" if why else "well" for why in reasons], details)


def _unwell_shard(shard: Facts) -> str:
    """Return why a shard is not well; "" if it is."""
    if shard["state"] != _SERVING:
        return str(shard["state"])
    return str(shard["degraded"])


def _unwell_process(process: Facts) -> str:
    """Return why a process is not well; "" if it is."""
    return "" if process["state"] == _SERVING else str(process["state"])
