"""Facts as text: jobs, times, and tables, which are tab-separated lines in a pipe.

Bodies and custom statuses come from anybody. On their way to a terminal everything that could
command it is escaped; in JSON they are exact.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from pinlaterd.model import JobRecord

if TYPE_CHECKING:
    from rich.table import Table


MAX_SHOWN_CHARS = 200
MAX_LINE_CHARS = 2000  # of a message


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
    facts = {**record._asdict(), "state": record.state.name}
    if record.body is None:
        del facts["body"]
        return facts
    try:
        facts["body"] = record.body.decode()
    except UnicodeDecodeError:
        del facts["body"]
        facts["body_base64"] = base64.b64encode(record.body).decode()
    return facts


def record_text(record: JobRecord) -> str:
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
    return "\n".join(line.rstrip() for line in lines)


def shown_time(at_ms: int) -> str:
    """UTC with milliseconds; times that no calendar holds stay numbers."""
    try:
        at = datetime.fromtimestamp(at_ms / 1000, UTC)
    except (OverflowError, ValueError, OSError):
        return f"{at_ms} ms"
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


# --- tables -------------------------------------------------------------------------------

# A title, one that starts with # being of numbers, and what shows it of a row.
Column = tuple[str, Callable[[Any], object]]


def print_table(columns: Sequence[Column], rows: Iterable[object]) -> None:
    """Print rows as they come in a pipe, and as one table on a terminal."""
    from rich.console import Console  # loading it takes a while

    console = Console(highlight=False)
    if console.is_terminal:
        console.print(make_table(columns, rows))
        return
    print("\t".join(title.removeprefix("#") for title, _ in columns))  # noqa: T201
    for row in rows:
        print("\t".join(_cells(columns, row)))  # noqa: T201


def make_table(
    columns: Sequence[Column], rows: Iterable[object], *, wrap: bool = True, left_out: int = 0
) -> Table:
    """For a terminal. Without `wrap` a row is one line, cut where the terminal ends. The last says
    how many rows were `left_out`."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title, _ in columns:
        table.add_column(
            title.removeprefix("#"),
            justify="right" if title.startswith("#") else "left",
            overflow="fold" if wrap else "ellipsis",
            no_wrap=not wrap,
        )
    for row in rows:
        table.add_row(*map(Text, _cells(columns, row)))
    if left_out:
        table.add_row(f"… {left_out} more")
    return table


def _cells(columns: Sequence[Column], row: object) -> list[str]:
    return [printable(str(cell(row))) for _, cell in columns]
