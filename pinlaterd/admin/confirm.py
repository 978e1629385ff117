"""Asks before what can't be taken back."""

from __future__ import annotations

import sys

import click

yes_option = click.option(
    "--yes", is_flag=True, help="Don't ask; needed where nobody can be asked."
)


def confirm(question: str, *, yes: bool) -> None:
    """Go on only if a person on a terminal says so, or `yes` has."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise click.UsageError(f"{question} Nobody can be asked; give --yes if so")
    click.confirm(question, abort=True, err=True)
