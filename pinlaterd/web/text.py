"""Figures as people read them: the same words on every page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime

from markupsafe import Markup

from pinlaterd.verdict import span

UNKNOWN = "–"
_WORDS = (
    *("No", "One", "Two", "Three", "Four", "Five", "Six"),
    *("Seven", "Eight", "Nine", "Ten", "Eleven", "Twelve"),
)
_SHORT_FROM = 1_000_000
_LEAST_POINTS = 6  # of a line
DAY_MS = 86_400_000


def number(value: float | None) -> str:
    """Return a whole number with separators."""
    return UNKNOWN if value is None else f"{round(value):,}"


def short(value: float | None) -> str:
    """Return a number in few characters: 31,200, but 1.2 M."""
    if value is None or value < _SHORT_FROM:
        return number(value)
    return f"{value / _SHORT_FROM:,.1f} M"


def exact_number(value: float) -> str:
    """Return a number that somebody has set with all its digits: 0.1, 2.5, 1,000."""
    return f"{round(value, 9):,}".removesuffix(".0")


def rate(per_second: float | None) -> str:
    """Return a rate with two digits that mean something."""
    if per_second is None:
        return UNKNOWN
    if 0 < per_second < 1:
        return f"{per_second:.1g}"
    return f"{per_second:.1f}".removesuffix(".0") if per_second < 10 else f"{per_second:,.0f}"


def duration(milliseconds: float | None) -> str:
    """Return a time in one or two units."""
    if milliseconds is None:
        return UNKNOWN
    if 0 < milliseconds < 1000:
        return f"{max(1, milliseconds):.0f} ms"
    return span(milliseconds / 1000)


def percent(share: float) -> str:
    """Return a share of a hundred."""
    return "< 1 %" if 0 < share < 1 else f"{share:.0f} %"


def line(values: Sequence[float | None]) -> str:
    """Return the path of a small line through values, 72 wide and 16 high, for SVG; with a gap
    where one is not known. A few values are no line."""
    known = [value for value in values if value is not None]
    if len(known) < _LEAST_POINTS:
        return ""
    most = max(known) or 1
    step, path, is_gap = 72 / max(1, len(values) - 1), "", True
    for place, value in enumerate(values):
        if value is not None:
            path += f"{'M' if is_gap else 'L'}{step * place:.0f} {15 - 14 * value / most:.0f}"
        is_gap = value is None
    return path


def size(count: float | None) -> str:
    """Return a number of bytes."""
    if count is None:
        return UNKNOWN
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 10 else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


def many(count: int, one: str, more: str = "") -> str:
    """Return "1 queue", "2 queues"."""
    return f"{count:,} {one if count == 1 else more or one + 's'}"


def word(count: int) -> str:
    """Return a number as the word that begins a sentence."""
    return _WORDS[count] if count < len(_WORDS) else f"{count:,}"


def clock_time(ms: float, now_ms: float) -> str:
    """Return a time of day, UTC, with its date unless that is within a day of now."""
    return _utc(ms).strftime("%H:%M:%S" if abs(now_ms - ms) < DAY_MS else "%m-%d %H:%M:%S")


def exact(ms: float) -> str:
    """Return a time that leaves no doubt."""
    return _utc(ms).strftime("%Y-%m-%d %H:%M:%S UTC")


def ago(ms: float, now_ms: float) -> str:
    """Return how long ago a time was, or how long it is until then."""
    shown = duration(abs(now_ms - ms))
    return f"in {shown}" if ms > now_ms else f"{shown} ago"


def when(ms: float, now_ms: float) -> Markup:
    """Return a time as HTML: how long ago it was, with the exact time under the pointer."""
    return Markup('<time data-ago datetime="{}" title="{}">{}</time>').format(
        iso(ms), exact(ms), ago(ms, now_ms)
    )


def iso(ms: float) -> str:
    """Return a time as programs read it."""
    return _utc(ms).strftime("%Y-%m-%dT%H:%M:%SZ")


def iso_ms(ms: int) -> str:
    """Return a time to the millisecond, as commands take it."""
    return f"{_utc(ms):%Y-%m-%dT%H:%M:%S}.{ms % 1000:03}Z"


def _utc(ms: float) -> datetime:
    return datetime.fromtimestamp(ms / 1000, UTC)


# By the names that templates have for them.
FILTERS: Mapping[str, Callable[..., str]] = {
    one.__name__: one
    for one in (
        *(number, short, rate, duration, percent, size, many, word),
        *(clock_time, exact, iso, when),
    )
}
