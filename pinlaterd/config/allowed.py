"""Rules of what values a setting may have, and the words that say so.

Each has `problem`, which says what is wrong with a value, and as text says what is allowed.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple


class Between(NamedTuple):
    """Numbers from `low` to `high`, both included."""

    low: float
    high: float

    def __str__(self) -> str:
        return f"choose from {self.low:,} to {self.high:,}".replace(",", "_")

    def problem(self, value: Any, written: str) -> str:
        """Say what is wrong with a value; return "" if nothing is."""
        return "" if self.low <= value <= self.high else f"{written} is out of range"


class OneOf(NamedTuple):
    """One of some texts, each a `noun`."""

    choices: tuple[str, ...]
    noun: str = "value"

    def __str__(self) -> str:
        return f"choose from {', '.join(self.choices)}"

    def problem(self, value: Any, written: str) -> str:
        return "" if value in self.choices else f"unknown {self.noun} {written[:60]!r}"


class Matching(NamedTuple):
    """Printable text that all of `pattern` matches. Messages show what does not, if it is
    `shown`."""

    pattern: re.Pattern[str]
    rule: str
    shown: bool = True

    def __str__(self) -> str:
        return self.rule

    def problem(self, value: Any, written: str) -> str:
        fits = value.isprintable() and self.pattern.fullmatch(value)
        return "" if fits else f"{repr(written[:60]) if self.shown else 'this'} is not valid"


class Re2Pattern(NamedTuple):
    """A pattern of RE2, or none."""

    def __str__(self) -> str:
        return "expected a pattern of RE2"

    def problem(self, value: Any, written: str) -> str:
        """Say what is wrong with a pattern; return "" if nothing is."""
        if value:
            import re2  # noqa: PLC0415 - clients have no such package

            options = re2.Options()
            options.log_errors = False
            try:
                re2.compile(value, options)
            except re2.error as error:
                [reason] = error.args
                reason = reason.decode(errors="replace") if isinstance(reason, bytes) else reason
                return f"{written[:60]!r} is not valid: {reason}"
        return ""


def characters(low: int, high: int, without: str = "") -> Matching:
    """Return the rule of `low` to `high` characters, none of them in `without`, nor a space."""
    rule = f"expected {low} to {high} characters without spaces"
    rule += f", no {' '.join(without)!r} in it" if without else ""
    return Matching(re.compile(rf"[^ {without}]{{{low},{high}}}"), rule)


Allowed = Between | OneOf | Matching | Re2Pattern | None
