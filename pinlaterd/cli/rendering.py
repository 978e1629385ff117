"""Facts as text: jobs, times, and tables, which are tab-separated lines in a pipe.

Bodies and custom statuses come from anybody. On their way to a terminal everything that could
command it is escaped; in JSON they are exact.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from pinlaterd.model import JobRecord

if TYPE_CHECKING:
    from rich.status import Status
    from rich.table import Table


MAX_SHOWN_CHARS = 200
NUMBER_COLUMN = "#"  # a column whose title starts so is aligned right


def printable(text: str, max_chars: int = MAX_SHOWN_CHARS) -> str:
    """`text` on one line, cut, with everything but printable characters escaped."""
    cut = text[:max_chars]
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cut)
    return shown if len(text) <= max_chars else f"{shown}… ({len(text)} characters)"


def printable_body(body: bytes, max_chars: int = MAX_SHOWN_CHARS) -> str:
    """A body as text, cut, with bytes that are no printable text escaped as \\xNN."""
    shown = printable(body[: max_chars * 4].decode("utf-8", "backslashreplace"), max_chars)
    return shown if len(body) <= max_chars else f"{shown.split('… (')[0]}… ({len(body)} bytes)"


def record_facts(record: JobRecord) -> dict[str, object]:
    """A job for JSON, exactly; a body that is not UTF-8 comes as `body_base64`."""
    facts: dict[str, object] = {
        "descriptor": record.descriptor,
        "state": record.state.name,
        "attempts_allowed": record.attempts_allowed,
        "attempts_remaining": record.attempts_remaining,
        "custom_status": record.custom_status,
        "created_at_ms": record.created_at_ms,
        "run_after_ms": record.run_after_ms,
        "updated_at_ms": record.updated_at_ms,
        "claim_descriptor": record.claim_descriptor,
    }
    if record.body is not None:
        try:
            facts["body"] = record.body.decode()
        except UnicodeDecodeError:
            facts["body_base64"] = base64.b64encode(record.body).decode()
    return facts


def record_lines(record: JobRecord) -> list[str]:
    """A job for people, a fact a line."""
    lines = [
        record.descriptor,
        f"  state          {record.state.name}",
        f"  attempts       {record.attempts_remaining} of {record.attempts_allowed} remaining",
        f"  run after      {shown_time(record.run_after_ms)}",
        f"  created        {shown_time(record.created_at_ms)}",
        f"  updated        {shown_time(record.updated_at_ms)}",
        f"  custom status  {printable(record.custom_status)}",
    ]
    if record.claim_descriptor is not None:
        lines.append(f"  claim          {printable(record.claim_descriptor)}")
    if record.body is not None:
        lines.append(f"  body           {printable_body(record.body)}")
    return [line.rstrip() for line in lines]


def shown_time(at_ms: int) -> str:
    """UTC with milliseconds; times that no calendar holds stay numbers."""
    try:
        at = datetime.fromtimestamp(at_ms / 1000, UTC)
    except (OverflowError, ValueError, OSError):
        return f"{at_ms} ms"
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def print_json(facts: object) -> None:
    """On one line."""
    click.echo(json.dumps(facts))


def print_facts(facts: object, text: str, *, as_json: bool) -> None:
    """The facts for programs, or the text for people."""
    if as_json:
        print_json(facts)
    else:
        click.echo(text)


def waiting(what: str) -> Status:
    """A block of code that takes a while: on a terminal, `what` is shown meanwhile."""
    from rich.console import Console

    return Console(stderr=True).status(what)


# --- tables -------------------------------------------------------------------------------


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print rows as they come in a pipe, and as one table on a terminal."""
    from rich.console import Console  # loading it takes a while

    console = Console(highlight=False)
    if console.is_terminal:
        console.print(make_table(columns, rows))
        return
    print("\t".join(_titles(columns)))  # noqa: T201
    for row in rows:
        print("\t".join(_cells(row)))  # noqa: T201


def make_table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], *, wrap: bool = True
) -> Table:
    """For a terminal. Without `wrap` a row is one line, cut where the terminal ends."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column, title in zip(columns, _titles(columns), strict=True):
        table.add_column(
            title,
            justify="right" if column.startswith(NUMBER_COLUMN) else "left",
            overflow="fold" if wrap else "ellipsis",
            no_wrap=not wrap,
        )
    for row in rows:
        table.add_row(*map(Text, _cells(row)))
    return table


def _titles(columns: Sequence[str]) -> list[str]:
    return [column.removeprefix(NUMBER_COLUMN) for column in columns]


def _cells(row: Sequence[object]) -> list[str]:
    return [printable(str(cell)) for cell in row]
