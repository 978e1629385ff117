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
    titles = [column.removeprefix(NUMBER_COLUMN) for column in columns]
    cells = ([printable(str(cell)) for cell in row] for row in rows)
    if not console.is_terminal:
        print("\t".join(titles))  # noqa: T201
        for row in cells:
            print("\t".join(row))  # noqa: T201
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column, title in zip(columns, titles, strict=True):
        is_number = column.startswith(NUMBER_COLUMN)
        table.add_column(title, justify="right" if is_number else "left", overflow="fold")
    for row in cells:
        table.add_row(*(Text(cell) for cell in row))
    console.print(table)
