"""The history of queues, shards and processes: rings of figures in memory, and their file.

An hour at 5 s, and seven days at 5 min. A point of 5 min is the mean of those of 5 s, but for ages
and depths, of which the greatest counts, and for percentiles, which are those of all samples of the
5 min. What was not known at a time is a gap (NaN), never 0. The time alone says where a point
stands in a ring, so points that were never written, or have become too old, are gaps, too.

A file that can't be read is dropped: what it says is of use, but nothing depends on it.
"""

from __future__ import annotations

import logging
import math
import zlib
from array import array
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from pinlaterd.config.layout import replace_file
from pinlaterd.coordinator.events import Event, Events
from pinlaterd.stats import Histogram, percentiles

log = logging.getLogger(__name__)

STEP_MS = 5_000
LONG_STEP_MS = 300_000
_POINTS = 3_600_000 // STEP_MS
_LONG_POINTS = 7 * 86_400_000 // LONG_STEP_MS
_NAN = math.nan
_FLOAT_BYTES = 4
_MAGIC = b"pinlaterd history 1\n"
_POINTS_AHEAD = 12  # a clock that was set back by up to so many points only waits
_RESTART_MS = 60_000  # in which a coordinator is back
_RECENT = 1 / 60  # part of the newest 5 s in what a subject's activity of late is


class SubjectKind(NamedTuple):
    """A kind of subject, and its series: figures, then percentiles of its samples."""

    name: str
    figures: tuple[str, ...]
    percentiles: Mapping[str, float] = {}
    ages: Collection[str] = ()  # figures of which the greatest counts
    depths: Collection[str] = ()  # of which the greatest counts over time, of servers the sum

    @property
    def series(self) -> tuple[str, ...]:
        return (*self.figures, *self.percentiles)


QUEUE = SubjectKind(
    "queue",
    (
        *("in", "out", "ok", "failed_attempts", "refused"),
        *("ready", "scheduled", "running", "failed", "oldest_ms"),
    ),
    {"wait_p50_ms": 0.5, "wait_p95_ms": 0.95, "wait_p99_ms": 0.99},
    ("oldest_ms",),
    ("ready", "scheduled", "running", "failed"),
)
SHARD = SubjectKind(
    "shard",
    ("jobs", "commits", "ready", "scheduled", "running", "failed"),
    {"commit_p50_ms": 0.5, "commit_p99_ms": 0.99},
    depths=("ready", "scheduled", "running", "failed"),
)
PROCESS = SubjectKind("process", ("cpu_percent", "rss_bytes"))
KINDS = {kind.name: kind for kind in (QUEUE, SHARD, PROCESS)}


def is_of_hour(since_ms: int, now_ms: int) -> bool:
    """Tell whether points of 5 s go back so far."""
    return since_ms >= now_ms - (_POINTS + 1) * STEP_MS


class _Ring:
    """Points of one step, each a row of figures. `last`: the number of the newest, which is its
    time in steps."""

    __slots__ = ("last", "points", "values", "width")

    def __init__(self, points: int, width: int) -> None:
        self.points = points
        self.width = width
        self.values = array("f", [_NAN]) * (points * width)
        self.last = -1

    @property
    def size(self) -> int:
        return len(self.values) * _FLOAT_BYTES

    def put(self, number: int, row: Sequence[float]) -> None:
        """Write a point. After a clock that was set back a little, none is written until that time
        is reached again; after one that was far ahead, its points are dropped."""
        gap = (_NAN,) * self.width
        if number < self.last - _POINTS_AHEAD:
            for ahead in range(number + 1, min(self.last, number + self.points) + 1):
                self._write(ahead, gap)
            self.last = number
        if number < self.last:
            return
        for skipped in range(max(self.last + 1, number - self.points + 1), number):
            self._write(skipped, gap)
        self._write(number, row)
        self.last = number

    def _write(self, number: int, row: Sequence[float]) -> None:
        at = number % self.points * self.width
        self.values[at : at + self.width] = array("f", row)

    def row(self, number: int) -> Sequence[float]:
        """Return a point; a gap if it is not there."""
        if not self.last - self.points < number <= self.last:
            return (_NAN,) * self.width
        at = number % self.points * self.width
        return self.values[at : at + self.width]


class _Kept:
    """The rings of a subject, and what the 5 min that are under way have brought."""

    __slots__ = ("activity", "hour", "kind", "number", "rows", "samples", "week")

    def __init__(self, kind: SubjectKind, activity: float = 0.0) -> None:
        self.kind = kind
        self.hour: _Ring | None = _Ring(_POINTS, len(kind.series))
        self.week = _Ring(_LONG_POINTS, len(kind.series))
        self.activity = activity  # of late
        self.number = -1  # of the 5 min
        self.rows = array("f")  # one after the other
        self.samples = Histogram()

    @property
    def rings(self) -> Sequence[_Ring]:
        return (self.week,) if self.hour is None else (self.hour, self.week)

    @property
    def size(self) -> int:
        return sum([ring.size for ring in self.rings])

    def add(self, now_ms: int, row: Sequence[float], samples: Histogram | None) -> None:
        if self.hour is not None:
            self.hour.put(now_ms // STEP_MS, [*row, *self._percentiles(samples)])
        number = now_ms // LONG_STEP_MS
        if number != self.number:
            self.sum_up()
            self.number, self.rows, self.samples = number, array("f"), Histogram()
        self.rows.extend(row)
        if samples is not None and samples.count:
            self.samples.add_all(samples)

    def sum_up(self) -> None:
        """Write the point of the 5 min as far as they are known."""
        if self.rows:
            figures, greatest = self.kind.figures, {*self.kind.ages, *self.kind.depths}
            row = [
                _whole(self.rows[at :: len(figures)], greatest=name in greatest)
                for at, name in enumerate(figures)
            ]
            self.week.put(self.number, [*row, *self._percentiles(self.samples)])

    def _percentiles(self, samples: Histogram | None) -> Sequence[float]:
        fractions = tuple(self.kind.percentiles.values())
        if samples is None or not samples.count:
            return (_NAN,) * len(fractions)
        return percentiles(samples, fractions)


def _whole(column: Sequence[float], *, greatest: bool) -> float:
    """Return what a series was over all of its points that are known."""
    known = [value for value in column if value == value]  # noqa: PLR0124 - NaN differs from itself
    if not known:
        return _NAN
    return max(known) if greatest else sum(known) / len(known)


class _Subject(msgspec.Struct):
    """A subject in the file: the numbers of the newest points of its rings."""

    kind: str
    name: str
    activity: float | None  # None: it always is
    week: int
    hour: int | None = None  # None: there is no such ring


class _Head(msgspec.Struct):
    """The part of the file before the values."""

    subjects: list[_Subject]
    events: list[Event]


class Series(msgspec.Struct):
    """The history of a subject: each of its `series` has a value every `step_ms`, from `from_ms`
    on; None is a gap."""

    step_ms: int
    from_ms: int
    series: Mapping[str, Sequence[float | None]]


Outlines = dict[str, list[float | None]]  # a series of each queue, the newest point last


class History:
    """The rings of all subjects, of at most so many bytes together."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.events = Events()
        self._subjects: dict[tuple[str, str], _Kept] = {}
        self._bytes = 0
        self._least_activity = -1.0  # a new subject must have more; that of the quietest kept one

    def record(
        self,
        kind: SubjectKind,
        name: str,
        now_ms: int,
        row: Sequence[float],
        samples: Histogram | None = None,
        *,
        activity: float = math.inf,
    ) -> None:
        """Note the figures of the 5 s that end at `now_ms`, and their samples. The history of a
        subject begins with its first activity; the greater that is, the more of it is kept."""
        kept = self._subjects.get((kind.name, name))
        if kept is None:
            kept = self._begin(kind, name, activity) if activity else None
            if kept is None:
                return
        kept.activity += (activity - kept.activity) * _RECENT if activity < math.inf else 0
        kept.add(now_ms, row, samples)

    def _begin(self, kind: SubjectKind, name: str, activity: float) -> _Kept | None:
        """Begin the rings of a subject; return None if it is too quiet for the room there is."""
        if activity <= self._least_activity:
            return None
        kept = self._subjects[kind.name, name] = _Kept(kind, activity)
        self._bytes += kept.size
        if self._bytes > self.most_bytes:
            self.balance()
        return self._subjects.get((kind.name, name))

    def balance(self) -> None:
        """Divide the memory: first seven days for each, then hours; the busiest before others."""
        room = self.most_bytes
        busiest = sorted(self._subjects.items(), key=lambda item: -item[1].activity)
        self._least_activity = -1.0
        for subject, kept in busiest:
            if room < kept.week.size:
                del self._subjects[subject]
                self._least_activity = max(self._least_activity, kept.activity)
            else:
                room -= kept.week.size
        for subject, kept in busiest:
            if subject not in self._subjects:
                continue
            hour = kept.hour or _Ring(_POINTS, kept.week.width)
            kept.hour = hour if hour.size <= room else None
            room -= hour.size if kept.hour is not None else 0
        self._bytes = self.most_bytes - room

    def retain(self, kind: SubjectKind, names: Collection[str]) -> None:
        """Drop the subjects of a kind that are none of these."""
        for subject in [one for one in self._subjects if one[0] == kind.name]:
            if subject[1] not in names:
                self._bytes -= self._subjects.pop(subject).size

    def read(
        self, kind: SubjectKind, name: str, since_ms: int, now_ms: int, step_ms: int = STEP_MS
    ) -> Series:
        """Return what is known of a subject since then: at 5 s if that is within the hour and is
        asked for. It has no points if nothing is known."""
        kept = self._subjects.get((kind.name, name))
        if kept is None:
            return Series(step_ms, since_ms, {series: [] for series in kind.series})
        kept.sum_up()
        ring = kept.week
        if kept.hour is not None and step_ms < LONG_STEP_MS and is_of_hour(since_ms, now_ms):
            ring = kept.hour
        step_ms = STEP_MS if ring is kept.hour else LONG_STEP_MS
        last = now_ms // step_ms
        first = max(since_ms // step_ms, last - ring.points + 1)
        rows = [ring.row(number) for number in range(first, last + 1)]
        columns = zip(*rows, strict=True) if rows else ((),) * len(kind.series)
        series = {
            name: list(map(_shown, column))
            for name, column in zip(kind.series, columns, strict=True)
        }
        return Series(step_ms, first * step_ms, series)

    def outlines(self, kind: SubjectKind, series: str, points: int, now_ms: int) -> Outlines:
        """Return a series of each subject of a kind over the last hour, by so many of its points.
        Those of which only days are kept are left out."""
        at, last = kind.series.index(series), now_ms // STEP_MS - 1  # the newest may not be there
        numbers = range(last - (points - 1) * (_POINTS // points), last + 1, _POINTS // points)
        return {
            name: [_shown(kept.hour.row(number)[at]) for number in numbers]
            for (of, name), kept in self._subjects.items()
            if of == kind.name and kept.hour is not None
        }

    # --- the file -------------------------------------------------------------------------------

    def pack(self) -> Sequence[bytes]:
        """Return what the file is to hold, in parts, for `write_history`."""
        subjects: list[_Subject] = []
        parts: list[bytes] = [b"\n"]
        for (kind, name), kept in self._subjects.items():
            kept.sum_up()
            hour = None if kept.hour is None else kept.hour.last
            subjects.append(_Subject(kind, name, kept.activity, kept.week.last, hour))
            parts += [ring.values.tobytes() for ring in kept.rings]
        head = _Head(subjects, [*self.events.since(0)])
        return (msgspec.json.encode(head), *parts)

    def unpack(self, packed: bytes) -> None:
        """Take over what a file holds. Raises ValueError if it is damaged, or from another
        version."""
        begin = len(_MAGIC) + 9
        body = packed[begin:]
        if packed[:begin] != b"%s%08x\n" % (_MAGIC, zlib.crc32(body)):
            raise ValueError("it is damaged, or another version wrote it")
        listed, _, values = body.partition(b"\n")
        head, at = msgspec.json.decode(listed, type=_Head), 0
        self.events.restore(head.events)
        for subject in head.subjects:
            activity = math.inf if subject.activity is None else subject.activity
            kept = _Kept(KINDS[subject.kind], activity)
            kept.week.last = subject.week
            if kept.hour is not None:
                kept.hour.last = -1 if subject.hour is None else subject.hour
            if subject.hour is None:
                kept.hour = None
            for ring in kept.rings:
                size = len(ring.values) * _FLOAT_BYTES
                ring.values = array("f", values[at : at + size])
                at += size
            self._subjects[subject.kind, subject.name] = kept
            self._bytes += kept.size
        if self._bytes > self.most_bytes:
            self.balance()


def merged_series(kind: SubjectKind, parts: Sequence[Series]) -> Series:
    """Return the history of a subject on several servers, whose points are of one length: the sum,
    but of ages and percentiles the greatest. It is a gap where a server that was up does not know
    its part; one that is away has none."""
    known = [one for one in parts if one.series[kind.figures[0]]]
    if len(known) < 2:
        return known[0] if known else parts[0]
    step_ms, first = known[0].step_ms, max(part.from_ms for part in known)
    cut = [
        {name: values[(first - part.from_ms) // step_ms :] for name, values in part.series.items()}
        for part in known
    ]
    points = min(len(one[kind.figures[0]]) for one in cut)
    gaps: dict[str, set[int]] = {name: set() for name in kind.figures}
    for one in cut:
        rows = list(zip(*(one[name][:points] for name in kind.figures), strict=True))
        was_up = _was_up([any(value is not None for value in row) for row in rows], step_ms)
        for at, row in enumerate(rows):
            for name, value in zip(kind.figures, row, strict=True):
                if value is None and was_up[at]:
                    gaps[name].add(at)
    series = {
        name: [
            None if at in gaps.get(name, ()) else value
            for at, value in enumerate(_together(kind, name, [one[name] for one in cut]))
        ]
        for name in kind.series
    }
    return Series(step_ms, first, series)


def _was_up(known: Sequence[bool], step_ms: int) -> Sequence[bool]:
    """Tell for each point whether a server was up, by where it knows anything: it was also within
    the minute after a point that it knows, in which a coordinator starts again."""
    found, last = [], -math.inf
    for at, is_known in enumerate(known):
        last = at if is_known else last
        found.append((at - last) * step_ms <= _RESTART_MS)
    return found


def merged_outlines(series: str, parts: Sequence[Outlines]) -> Outlines:
    """Return a series of the queues of several servers."""
    queues = sorted({queue for part in parts for queue in part})
    return {
        queue: _together(QUEUE, series, [part[queue] for part in parts if queue in part])
        for queue in queues
    }


def _together(
    kind: SubjectKind, series: str, columns: Sequence[Sequence[float | None]]
) -> list[float | None]:
    """Return a series of several servers: the sum of what is known, or the greatest."""
    rows = [[one for one in row if one is not None] for row in zip(*columns, strict=False)]
    whole = max if series in kind.ages or series in kind.percentiles else sum
    return [whole(row) if row else None for row in rows]


def write_history(path: Path, packed: Sequence[bytes]) -> None:
    """Replace the file, durably. It takes a while: not for an event loop."""
    checksum = 0
    for part in packed:
        checksum = zlib.crc32(part, checksum)
    try:
        data = b"".join([_MAGIC, b"%08x\n" % checksum, *packed])
        replace_file(path, data, durably=True)
    except OSError as error:
        log.error("the history can't be written to %s: %s", path, error)


def load_history(path: Path, most_bytes: int) -> History:
    """Read the history that is kept in a file; none if there is no file that can be read."""
    found = History(most_bytes)
    try:
        found.unpack(path.read_bytes())
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError) as error:
        log.warning("the history in %s is dropped: %s", path, error)
        return History(most_bytes)
    return found


def _shown(value: float) -> float | None:
    """Return a value with as many digits as a float of 4 bytes has; None for a gap."""
    return None if value != value else float(f"{value:.6g}")  # noqa: PLR0124 - NaN
