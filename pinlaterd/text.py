"""Numbers in sentences for people. Standard library only."""

from __future__ import annotations


def how_many(number: int, singular: str, plural: str | None = None) -> str:
    """`1 job`, `2,000 jobs`. `plural`: what is not the singular and an s (`job is`, `jobs are`)."""
    return f"{number:,} {singular if number == 1 else plural or f'{singular}s'}"
