"""Tables for people on a terminal, tab-separated lines in a pipe; never a raw control character."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pinlaterd.client.cli import printable

NUMBER_COLUMN = "#"  # a column whose title starts so is aligned right


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print rows as they come in a pipe, and as one table on a terminal."""
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
