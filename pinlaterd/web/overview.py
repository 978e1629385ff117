"""The overview: what is wrong first, then every queue, the worst first."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from aiohttp import web

from pinlaterd.access import may
from pinlaterd.config.schema import UserSettings
from pinlaterd.status import Facts, worst_first
from pinlaterd.verdict import VerdictKind, VerdictLevel
from pinlaterd.web import text
from pinlaterd.web.bodies import redacted_message, visible_text
from pinlaterd.web.guide import what_to_do
from pinlaterd.web.live import Cells, LiveFrame
from pinlaterd.web.site import USER, Site
from pinlaterd.web.system import process_state, shard_state

_MOST_ROWS = 12  # that are shown as long as no more queues are unwell
_MOST_BANNERS = 6  # of queues with the same verdict: beyond, their rows say it


class Column(NamedTuple):
    """A column of figures. `key`: of its cells, and of its style."""

    key: str
    title: str
    value: Callable[[Facts], str]


def held(queue: Facts, key: str, shown: Callable[[float | None], str] = text.number) -> str:
    """Return a figure of the jobs that a queue holds: a lower bound where a shard's are missing."""
    least = "≥ " if queue["missing_shards"] and queue[key] is not None else ""
    return least + shown(queue[key])


def _limit(queue: Facts) -> str:
    limit = queue["jobs_per_second_limit"]
    return "none" if limit is None else text.exact_number(limit)


COLUMNS = (
    Column("ready", "ready", lambda queue: held(queue, "pending")),
    Column("scheduled", "scheduled", lambda queue: held(queue, "scheduled")),
    Column("running", "running", lambda queue: held(queue, "in_progress")),
    Column("oldest", "oldest", lambda queue: held(queue, "oldest_ready_age_ms", text.duration)),
    Column("wait", "wait p99", lambda queue: text.duration(queue["dequeue_delay_p99_ms"])),
    Column("in", "in/s", lambda queue: text.rate(queue["enqueues_per_second"])),
    Column("out", "out/s", lambda queue: text.rate(queue["dequeues_per_second"])),
    Column("failing", "failed/s", lambda queue: text.rate(queue["failures_per_second"])),
    Column("failed", "failed", lambda queue: held(queue, "failed")),
    Column("limit", "limit/s", _limit),
)


class Row(NamedTuple):
    """A queue in the table. `verdict`: as `pinlaterd.verdict` gives it."""

    name: str
    verdict: Facts
    cells: Sequence[tuple[Column, str]]
    line: str  # of the jobs that were ready in the last hour, as a path

    @property
    def needs_somebody(self) -> bool:
        """Whether nobody should sleep meanwhile."""
        return bool(self.verdict["level"] == VerdictLevel.BAD)

    @property
    def sentence(self) -> str:
        """Return what the verdict's word does not say by itself."""
        sentence: str = self.verdict["sentence"]
        return "" if sentence == self.verdict["word"] else sentence


def rows_of(frame: LiveFrame, user: UserSettings | None, hidden: str) -> list[Row]:
    """Return the queues that the user may see, the worst first, without what the pattern `hidden`
    hides."""
    queues = [queue for queue in frame.facts["queues"] if may(user, "view", queue["name"])]
    return [
        Row(
            queue["name"],
            verdict_of(queue, hidden),
            [(one, one.value(queue)) for one in COLUMNS],
            frame.lines.get(queue["name"], ""),
        )
        for queue in worst_first(queues)
    ]


def verdict_of(queue: Facts, hidden: str) -> Facts:
    """Return the verdict of a queue with every character visible, and the words of its jobs without
    what the pattern `hidden` hides."""
    verdict, said = queue["verdict"], queue["verdict"]["top_failure"]
    if (seen := redacted_message(said, hidden)) != said:
        quoting = ("detail", "text", "sentence", "top_failure")
        verdict = verdict | {name: verdict[name].replace(said, seen) for name in quoting}
    return {name: visible_text(words) for name, words in verdict.items()}


_SYSTEM = ("system", "/system")
_IS_NOT_SERVING = re.compile(r"(\S+: )?\S+ is [a-z, ]+")  # a process, of a server
_ABOUT_JOBS = (VerdictKind.FAILING, VerdictKind.TIMING_OUT)


class Banner(NamedTuple):
    """Something that is wrong. `links`: title and path of what helps. `row`: of the queue that it
    is about, whose cells keep it up to date."""

    state: str
    title: str
    links: Sequence[tuple[str, str]]
    row: Row | None = None


def banners_of(facts: Facts, rows: Sequence[Row]) -> list[Banner]:
    """Return what is wrong, the worst first."""
    found: list[Banner] = []
    unwell = (row for row in rows if row.needs_somebody)
    for kind, of_kind in itertools.groupby(unwell, key=lambda row: str(row.verdict["kind"])):
        alike = list(of_kind)
        found += [
            Banner(kind, f"{row.name}: {_words_of(kind)}", _links_of(row), row)
            for row in alike[:_MOST_BANNERS]
        ]
        if left := len(alike[_MOST_BANNERS:]):
            more = f"{text.many(left, 'more queue')}: {_words_of(kind)}"
            found.append(Banner(kind, more, [("show", "#queues")]))
    for state, key in (("stopped", "problems"), ("behind", "warnings")):
        found += [
            Banner(state, said, [_SYSTEM, *what_to_do(_section_of(said, facts["shards"]))])
            for said in facts[key]
        ]
    return found


def _words_of(kind: str) -> str:
    return kind.replace("_", " ")


def _links_of(row: Row) -> Sequence[tuple[str, str]]:
    kind, found = row.verdict["kind"], [("queue", f"/q/{row.name}")]
    if kind in _ABOUT_JOBS:
        found.append(("failures", f"/failures?queue={row.name}"))
    return [*found, *what_to_do(kind)]


def _section_of(said: str, shards: Sequence[Facts]) -> str:
    """Return what the guide calls a problem, or a warning, of the service; "" if it has no section
    about it."""
    for shard in shards:
        if shard["degraded"] and shard["degraded"] in said:
            return "degraded"
        names_it = re.search(rf"\bshard[- ]{re.escape(shard['name'])}\b", said)
        if names_it and shard_state(shard)[0] == "stopped":
            return "shard_down"
    return "process" if _IS_NOT_SERVING.fullmatch(said) else ""


def headline(facts: Facts, rows: Sequence[Row]) -> str:
    """Return the page's first line, which is the answer."""
    unwell = sum(row.needs_somebody for row in rows)
    if unwell:
        needs = "queue needs" if unwell == 1 else "queues need"
        return f"{text.word(unwell)} {needs} you"
    if facts["problems"]:
        return "The service needs you"
    warned = [row.verdict for row in rows if row.verdict["level"] == VerdictLevel.WARN]
    if warned:
        kinds = Counter(verdict["kind"] for verdict in warned)
        found = [f"{many} {'is' if many == 1 else 'are'} {kind}" for kind, many in kinds.items()]
        return f"No queue needs you at once; {', '.join(found)}"
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


def cells_of(frame: LiveFrame, rows: Sequence[Row]) -> Cells:
    """Return the texts of the page that change."""
    cells = {"headline": headline(frame.facts, rows), "summary": summary(frame.facts, rows)}
    cells["problems"] = "; ".join(one.title for one in banners_of(frame.facts, rows))
    for row in rows:
        cells |= row_cells(row)
    return cells


def row_cells(row: Row) -> Mapping[str, str]:
    """Return the cells of a queue, which its own page has, too."""
    verdict = row.verdict
    cells = {f"{row.name} {column.key}": value for column, value in row.cells}
    return cells | {
        f"{row.name} state": verdict["kind"],
        f"{row.name} words": verdict["word"],
        f"{row.name} detail": verdict["detail"],
        f"{row.name} sentence": row.sentence,
        f"{row.name} line": row.line,
    }


def routes(site: Site) -> list[web.RouteDef]:
    """Return the route of the page."""

    async def show(request: web.Request) -> web.StreamResponse:
        frame, user = await site.frames.now(), request.get(USER)
        facts, rows = frame.facts, rows_of(frame, user, site.hidden_from(user))
        shown = rows if "all" in request.query else rows[: most_shown(rows)]
        return site.render(
            request,
            "overview.html",
            headline=headline(facts, rows),
            summary=summary(facts, rows),
            banners=banners_of(facts, rows),
            columns=COLUMNS,
            rows=shown,
            folded=len(rows) - len(shown),
            shards=_parts(facts["shards"], "shard", "shards", shard_state),
            processes=_parts(facts["processes"], "process", "processes", process_state),
        )

    def cells(frame: LiveFrame, _name: str, user: UserSettings | None) -> Cells:
        return cells_of(frame, rows_of(frame, user, site.hidden_from(user)))

    site.live.add("overview", cells)
    return [site.page("/", show)]


def most_shown(rows: Sequence[Row]) -> int:
    """Return how many rows the page begins with: none that is unwell is left out, and idle ones are
    shown only if all are idle."""
    active = [row for row in rows if row.verdict["kind"] != VerdictKind.IDLE]
    unwell = [row for row in active if row.verdict["kind"] != VerdictKind.WELL]
    return max(len(unwell), min(len(active) or len(rows), _MOST_ROWS))


# --- shards and processes ---------------------------------------------------------------------


class Parts(NamedTuple):
    """The shards, or the processes: how many are well, and why the others are not."""

    title: str
    states: Sequence[str]
    details: Sequence[str]


def _parts(
    facts: Sequence[Facts], one: str, more: str, state_of: Callable[[Facts], tuple[str, str]]
) -> Parts:
    """Sum up the shards or the processes; of those that are not well say why."""
    found = [(part["name"], *state_of(part)) for part in facts]
    details = [f"{name}: {words}" for name, state, words in found if state != "well"]
    well = text.many(len(facts) - len(details), one, more)
    title = f"{well} well" + (f", {len(details)} not" if details else "")
    return Parts(title, [state for _, state, _ in found], details)
