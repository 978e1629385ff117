"""The verdict of a queue: in words, what an operator should know of it first.

Pure: it follows from the queue's figures of now and of the last minute, and from its settings. The
first rule that holds decides, in the order of VerdictKind. `top`, `queue list`, `queue stats` and
the dashboard show it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from itertools import pairwise
from typing import NamedTuple

SILENT_SECONDS = 60.0  # without a dequeue, while a job is ready: the queue has stopped
FAILING_SHARE = 0.05  # of the attempts of a minute
_GROWN_MS = 1_000.0  # by which the oldest ready job is older than a minute ago, to count as older
_BEHIND_PART = 0.01  # of the jobs that come; a smaller difference to those that go is noise
_DRAINING_SECONDS = 60.0  # a backlog that is gone sooner is no backlog
_UNITS = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))
_COARSE = 10  # of a unit: from so many on, the next smaller one adds less than 5 %


class VerdictKind(StrEnum):
    """The kinds of verdicts, in the order in which their rules are tried."""

    UNREADABLE = "unreadable"
    PAUSED = "paused"
    LIMITED = "limited"
    STOPPED = "stopped"
    TIMING_OUT = "timing_out"
    FAILING = "failing"
    BEHIND = "behind"
    DRAINING = "draining"
    UNKNOWN = "unknown"
    WELL = "well"
    IDLE = "idle"


class VerdictLevel(StrEnum):
    """The weight of a verdict."""

    BAD = "bad"
    WARN = "warn"
    OK = "ok"
    IDLE = "idle"


_LEVELS = {
    VerdictKind.UNREADABLE: VerdictLevel.BAD,
    VerdictKind.STOPPED: VerdictLevel.BAD,
    VerdictKind.TIMING_OUT: VerdictLevel.BAD,
    VerdictKind.FAILING: VerdictLevel.BAD,
    VerdictKind.BEHIND: VerdictLevel.WARN,
    VerdictKind.LIMITED: VerdictLevel.WARN,
    VerdictKind.PAUSED: VerdictLevel.WARN,
    VerdictKind.UNKNOWN: VerdictLevel.WARN,
    VerdictKind.DRAINING: VerdictLevel.OK,
    VerdictKind.WELL: VerdictLevel.OK,
    VerdictKind.IDLE: VerdictLevel.IDLE,
}
WORST_FIRST = {kind: place for place, kind in enumerate(_LEVELS)}


class QueueView(NamedTuple):
    """The figures that a verdict follows from. Rates are per second, of the last minute.
    `seconds`: how much of that minute is known."""

    ready: int = 0
    scheduled: int = 0
    in_progress: int = 0
    oldest_ms: float = 0  # how long the first ready job has waited
    oldest_before_ms: float | None = None  # the same a minute ago; None: not known
    seconds: float = 60.0
    enqueued: float = 0
    dequeued: float = 0
    succeeded: float = 0
    failed: float = 0  # attempts
    timed_out: float = 0  # claims
    refused: float = 0  # dequeues over the rate
    rejected: float = 0  # enqueues beyond max_pending
    silent_seconds: float | None = None  # since a job was handed out; None: not known
    silent_is_least: bool = False  # whether none was since that began to be known
    unasked_seconds: float | None = None  # since a worker asked for jobs; None: not known
    unasked_is_least: bool = False  # whether none has since that began to be known
    max_jobs_per_second: float | None = None
    max_in_progress: float | None = None
    max_pending: float | None = None
    is_paused: bool = False
    paused_by: str = ""
    paused_at: str = ""  # as it is to be shown
    pause_reason: str = ""
    top_failure: str = ""  # what most of the attempts that failed lately said
    top_failure_share: float = 0  # of them
    failed_in_hour: int = 0  # attempts
    hour_is_partial: bool = False  # whether more may have failed in it
    shards_missing: Sequence[str] = ()  # whose figures are not known
    is_readable: bool = True  # whether any shard's figures are known


class QueueVerdict(NamedTuple):
    """`word` and `detail` for a row, `text` for both in one line, `sentence` for a banner.
    `top_failure`: the words of jobs that these quote; "": none."""

    kind: VerdictKind
    level: VerdictLevel
    word: str
    detail: str
    text: str
    sentence: str
    top_failure: str = ""


class _Words(NamedTuple):
    word: str
    detail: str = ""
    sentence: str = ""
    between: str = " "  # of word and detail, in one line


def judge(view: QueueView) -> QueueVerdict:
    """Return the verdict of a queue."""
    kind, words = next((kind, w) for kind, rule in _RULES if (w := rule(view)) is not None)
    detail, sentence = words.detail, words.sentence
    if view.shards_missing and kind is not VerdictKind.UNREADABLE:
        missing = f"without shard {', '.join(view.shards_missing)}"
        detail = f"{detail}; {missing}" if detail else missing
        sentence = f"{sentence} These figures are {missing}." if sentence else ""
    text = f"{words.word}{words.between}{detail}" if detail else words.word
    sentence = sentence or text
    top = view.top_failure if kind is VerdictKind.FAILING else ""
    return QueueVerdict(kind, _LEVELS[kind], words.word, detail, text, sentence, top)


# --- the rules --------------------------------------------------------------------------------


def _unreadable(view: QueueView) -> _Words | None:
    if view.is_readable:
        return None
    missing = ", ".join(view.shards_missing)
    why = f"shard {missing} does not answer" if missing else "no shard reports it"
    return _Words("Unreadable", why, f"Its figures are not known: {why}.", ": ")


def _paused(view: QueueView) -> _Words | None:
    if not view.is_paused:
        return None
    who = f"by {view.paused_by}" if view.paused_by else ""
    detail = ", ".join(part for part in (who, view.paused_at) if part)
    if view.pause_reason:
        detail = f'{detail}: "{view.pause_reason}"' if detail else f'"{view.pause_reason}"'
    return _Words("Paused", detail, f"{_backlog(view)} Paused {detail}".rstrip() + ".")


def _limited(view: QueueView) -> _Words | None:
    found: list[str] = []
    for what, refused, name, limit in (
        ("dequeues/s refused", view.refused, "max_jobs_per_second", view.max_jobs_per_second),
        # One enqueue may be refused by several shards.
        ("refusals/s of enqueues", view.rejected, "max_pending", view.max_pending),
    ):
        by = name if limit is None else f"{name} {limit:,.10g}"
        found += [f"{_rate(refused)} {what} by {by}"] if refused > 0 else ()
    most, silent = view.max_in_progress, _silence(view)
    if silent is not None and most is not None and view.in_progress >= most:
        found.append(f"ready jobs held by max_in_progress {most:,.0f}, for {silent}")
    detail = "; ".join(found)
    told = f"{_backlog(view)} {detail[:1].upper()}{detail[1:]}."
    return _Words("Limited", detail, told, ": ") if found else None


def _stopped(view: QueueView) -> _Words | None:
    silent, unasked = _silence(view), view.unasked_seconds
    if silent is None:
        return None
    if unasked is None or (view.unasked_is_least and unasked < SILENT_SECONDS):
        why, sentence = "no job is handed out", "No job was handed out"
    elif unasked < SILENT_SECONDS:
        why, sentence = "workers ask and get no job", "Workers ask, and no job was handed out"
    else:
        why, sentence = "no worker asks", "No worker has asked"
        silent = _least_span(unasked, is_least=view.unasked_is_least)
    detail = f"{why}, for {silent}"
    return _Words("Stopped", detail, f"{_backlog(view)} {sentence} for {silent}.", ": ")


def _silence(view: QueueView) -> str | None:
    """Say for how long no job was handed out of a queue that has stopped; None if it has not, or if
    that is not known."""
    silent, is_least = view.silent_seconds, view.silent_is_least
    if is_least and (view.unasked_seconds or 0) > (silent or 0):  # none is handed out unasked
        silent = view.unasked_seconds
    if not view.ready or silent is None:
        return None
    if min(silent, view.oldest_ms / 1000) < SILENT_SECONDS:
        return None
    return _least_span(silent, is_least=is_least)


def _timing_out(view: QueueView) -> _Words | None:
    claims = round(view.timed_out * view.seconds)
    if claims < 1:
        return None
    detail = f"{claims:,} in the last minute"
    sentence = f"{claims:,} claims ended in the last minute without an ack: workers die or hang."
    return _Words("Claims time out", detail, sentence, ": ")


def _failing(view: QueueView) -> _Words | None:
    attempts = view.succeeded + view.failed
    if not view.failed or view.failed < FAILING_SHARE * attempts:
        return None
    percent = f"{view.failed / attempts:.0%}".replace("%", " %")
    top = view.top_failure
    sentence = f"{percent} of attempts in the last minute"
    if top:
        share = f"{view.top_failure_share:.0%}".replace("%", " %")
        sentence += f"; {share} of them {top}"
    return _Words(f"Failing {percent}", top, f"{sentence}.", ": ")


def _behind(view: QueueView) -> _Words | None:
    more, before = view.enqueued - view.dequeued, view.oldest_before_ms
    if not view.ready or before is None or more <= _BEHIND_PART * view.enqueued:
        return None
    if view.oldest_ms < before + _GROWN_MS:
        return None
    detail = f"+{_rate(more)} jobs/s, oldest {span(view.oldest_ms / 1000)}"
    if view.max_jobs_per_second is not None:
        detail += f", limit {view.max_jobs_per_second:g} jobs/s"
    return _Words("Behind", detail, f"{_backlog(view)} {_rate(more)} jobs/s more come than go.")


def _draining(view: QueueView) -> _Words | None:
    less = view.dequeued - view.enqueued
    if not view.ready or less <= 0 or view.ready < _DRAINING_SECONDS * less:
        return None
    detail = f"empty in about {span(view.ready / less)}"
    return _Words("Draining", detail, f"{_backlog(view)} {detail.capitalize()}.", ", ")


def _unknown(view: QueueView) -> _Words | None:
    silent, is_old = view.silent_seconds, view.oldest_ms >= 1000 * SILENT_SECONDS
    if not (view.ready and is_old and view.silent_is_least) or silent is None:
        return None
    detail = f"no job was handed out in the {span(silent)} that are known"
    return _Words("Not known yet", detail, f"{_backlog(view)} {detail.capitalize()}.", ": ")


def _well(view: QueueView) -> _Words | None:
    moves = view.enqueued + view.dequeued + view.succeeded + view.failed > 0
    return _calm("Well", view) if moves or view.ready or view.in_progress else None


def _idle(view: QueueView) -> _Words | None:
    return _calm("Idle", view)


def _calm(word: str, view: QueueView) -> _Words:
    """Return a verdict that nothing is wrong now, with what failed in the last hour if no attempt
    ended in the last minute."""
    if view.succeeded + view.failed > 0 or not view.failed_in_hour:
        return _Words(word)
    attempts = "attempt" if view.failed_in_hour == 1 else "attempts"
    least = "at least " if view.hour_is_partial else ""
    detail = f"{least}{view.failed_in_hour:,} {attempts} failed in the last hour"
    return _Words(word, detail, f"{detail[0].upper()}{detail[1:]}.", ": ")


_RULES: Sequence[tuple[VerdictKind, Callable[[QueueView], _Words | None]]] = (
    (VerdictKind.UNREADABLE, _unreadable),
    (VerdictKind.PAUSED, _paused),
    (VerdictKind.LIMITED, _limited),
    (VerdictKind.STOPPED, _stopped),
    (VerdictKind.TIMING_OUT, _timing_out),
    (VerdictKind.FAILING, _failing),
    (VerdictKind.BEHIND, _behind),
    (VerdictKind.DRAINING, _draining),
    (VerdictKind.UNKNOWN, _unknown),
    (VerdictKind.WELL, _well),
    (VerdictKind.IDLE, _idle),
)


# --- words ------------------------------------------------------------------------------------


def without_shards(names: Sequence[str]) -> str:
    """Return the sentence about shards whose jobs an answer lacks; "" if there are none."""
    if len(names) == 1:
        return f"Without shard {names[0]}, which is unavailable: its jobs are missing here."
    shown = ", ".join(names)
    all_missing = f"Without shards {shown}, which are unavailable: their jobs are missing here."
    return all_missing if names else ""


def span(seconds: float) -> str:
    """Say how long a time is, to 5 %: 12 min, 1 d 12 h, 41 s, 0.1 s."""
    for (unit, size), (smaller, part) in pairwise(_UNITS):
        whole = round(seconds / part) * part
        if whole >= _COARSE * size:
            return f"{seconds / size:.0f} {unit}"
        if whole >= size:
            more = whole % size // part
            return f"{whole // size} {unit}" + (f" {more} {smaller}" if more else "")
    if seconds >= 10 or seconds == 0:
        return f"{seconds:.0f} s"
    return f"{seconds:.1f} s"


def whole_span(seconds: float) -> str:
    """Say how long a time is that somebody has set, in all its units: 10 d 10 h."""
    shown, left = [], round(seconds, 3)
    for unit, size in _UNITS[:-1]:
        count, left = divmod(left, size)
        shown += [f"{count:,.0f} {unit}"] * (count > 0)
    return " ".join(shown + [f"{left:g} s"] * (left > 0 or not shown))


def _least_span(seconds: float, *, is_least: bool) -> str:
    return f"at least {span(seconds)}" if is_least else span(seconds)


def _rate(per_second: float) -> str:
    return f"{per_second:,.0f}" if per_second >= 10 else f"{per_second:.2g}"


def _backlog(view: QueueView) -> str:
    if not view.ready:
        return "Nothing is ready."
    return f"{view.ready:,} ready, the oldest for {span(view.oldest_ms / 1000)}."
