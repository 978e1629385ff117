"""The guide: docs/operations.md, which is packaged, as the page /help that others link to.

It reads the part of Markdown that this file uses: headings, paragraphs, lists, tables, code, links.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

from aiohttp import web
from markupsafe import Markup, escape

from pinlaterd.web.site import Site

_FILE = Path(__file__).parent / "operations.md"
# By the kind of a queue's verdict, and by what else a page may find wrong.
SECTIONS = {
    "unreadable": "a-shard-is-down",
    "paused": "a-queue-is-paused",
    "limited": "a-limit-refuses-calls",
    "stopped": "a-queue-has-stopped",
    "timing_out": "claims-time-out",
    "failing": "jobs-fail",
    "behind": "a-queue-is-behind",
    "shard_down": "a-shard-is-down",
    "degraded": "a-shard-is-degraded",
    "process": "a-process-does-not-start",
}
_HEADING = re.compile(r"(#{1,4}) (.*)")
_ITEM = re.compile(r" *(?:[-*]|[0-9]+\.) ")
_BLOCK = re.compile(r"#{1,4} | *(?:[-*]|[0-9]+\.) |\||```| {4}|<!--")
# Code first: within it nothing else counts.
_INLINE = re.compile(
    r"(?P<ticks>`+) ?(?P<code>.+?) ?(?P=ticks)|\*\*(?P<bold>.+?)\*\*"
    r"|\[(?P<text>[^]]+)\]\((?P<to>[^)]+)\)"
)


def what_to_do(kind: str) -> list[tuple[str, str]]:
    """Return the link to what to do about something; none if nothing is to be done."""
    return [("what to do", f"/help#{SECTIONS[kind]}")] if kind in SECTIONS else []


def routes(site: Site) -> list[web.RouteDef]:
    """Return the route of the page, which needs no right."""

    async def show(request: web.Request) -> web.StreamResponse:
        return site.render(request, "guide.html", content=page())

    return [site.page("/help", show, role="")]


@cache
def page() -> Markup:
    """Return the file as HTML."""
    return Markup("\n").join(_blocks(_FILE.read_text(encoding="utf-8").splitlines()))


def _blocks(lines: Sequence[str]) -> Iterator[Markup]:
    at = 0
    while at < len(lines):
        line, end = lines[at], at + 1
        if heading := _HEADING.fullmatch(line):
            level = len(heading[1])
            yield Markup('<h{} id="{}">{}</h{}>').format(
                level, anchor(heading[2]), _inline(heading[2]), level
            )
        elif line.startswith("```"):
            end = next(i for i in range(at + 1, len(lines)) if lines[i].startswith("```")) + 1
            yield _code(lines[at + 1 : end - 1])
        elif line.startswith("    "):
            end = _end_of(lines, at, lambda other: other.startswith("    ") or not other.strip())
            yield _code([one[4:] for one in lines[at:end]])
        elif line.startswith("|"):
            end = _end_of(lines, at, lambda other: other.startswith("|"))
            yield _table(lines[at:end])
        elif _ITEM.match(line):
            end = _end_of(
                lines, at, lambda other: bool(other.strip()) and other[0] in " -*0123456789"
            )
            yield _list(lines[at:end])
        elif line.strip() and not line.startswith("<!--"):
            end = _end_of(lines, at, lambda other: bool(other.strip() and not _BLOCK.match(other)))
            yield Markup("<p>{}</p>").format(_inline(" ".join(lines[at:end])))
        at = end


def _end_of(lines: Sequence[str], at: int, goes_on: Callable[[str], bool]) -> int:
    """Return where the block ends that begins at `at`."""
    return next((i for i in range(at + 1, len(lines)) if not goes_on(lines[i])), len(lines))


def _code(lines: Sequence[str]) -> Markup:
    return Markup("<pre>{}</pre>").format("\n".join(lines).rstrip())


def _list(lines: Sequence[str]) -> Markup:
    items: list[str] = []
    for line in lines:
        if _ITEM.match(line):
            items.append(_ITEM.sub("", line, count=1))
        else:
            items[-1] += " " + line.strip()
    shown = Markup("").join(Markup("<li>{}</li>").format(_inline(item)) for item in items)
    return Markup("<ul>{}</ul>").format(shown)


def _table(lines: Sequence[str]) -> Markup:
    rows = [re.split(r"(?<!\\)\|", line.strip().strip("|")) for line in lines]
    shown = [
        Markup("").join(
            Markup("<{0}>{1}</{0}>").format("td" if number else "th", _inline(cell.strip()))
            for cell in row
        )
        for number, row in enumerate(rows)
        if number != 1  # the line between head and rows
    ]
    return Markup('<div class="wide" tabindex="0"><table>{}</table></div>').format(
        Markup("").join(Markup("<tr>{}</tr>").format(row) for row in shown)
    )


def _inline(text: str) -> Markup:
    found, at = Markup(), 0
    for part in _INLINE.finditer(text):
        found += escape(text[at : part.start()])
        if part["code"]:
            found += Markup("<code>{}</code>").format(part["code"])
        elif part["bold"]:
            found += Markup("<strong>{}</strong>").format(_inline(part["bold"]))
        elif part["to"].startswith(("#", "http")):
            found += Markup('<a href="{}">{}</a>').format(part["to"], _inline(part["text"]))
        else:  # another file, which is not packaged
            found += _inline(part["text"])
        at = part.end()
    return found + escape(text[at:])


def anchor(title: str) -> str:
    """Return the anchor of a heading, as GitHub makes it."""
    kept = re.sub(r"[^\w\- ]", "", title.lower())
    return kept.replace(" ", "-")
