"""Numbers in sentences for people."""

from __future__ import annotations


def how_many(number: int, singular: str, plural: str | None = None) -> str:
    """`1 job`, `2,000 jobs`. `plural`: where that is more than an s."""
    return f"{number:,} {singular if number == 1 else plural or f'{singular}s'}"
