"""Failed attempts by what they said, counted as they are acked, and the work of each source.

Of a queue the 64 signatures that failed last are kept, each with exact counts since it began to be
kept, by minutes for an hour; so are counts of all that failed. Acks of jobs that succeeded cost
nothing here. All is in memory: a shard that was restarted counts from 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import chain

from pinlaterd.engines.base import Acks
from pinlaterd.model import JobKey
from pinlaterd.signature import signature
from pinlaterd.wire.control import FailureCount, SourceWork

MOST_SIGNATURES = 64  # of a queue
MOST_SOURCES = 1_000
_MINUTE_MS = 60_000
_MINUTES = 60
_SPAN_MS = 150_000  # recent work is of the last one or two of them
UNSAID = "no status given"


class _Group:
    """The attempts that failed alike, or all of a queue."""

    __slots__ = ("attempts", "by_minute", "first_ms", "last_ms")

    def __init__(self, now_ms: int) -> None:
        self.attempts = 0
        self.first_ms = self.last_ms = now_ms
        self.by_minute: dict[int, int] = {}

    def add(self, attempts: int, now_ms: int) -> None:
        minute = now_ms // _MINUTE_MS
        self.attempts += attempts
        self.last_ms = now_ms
        if minute not in self.by_minute and len(self.by_minute) >= _MINUTES:
            self.by_minute = {at: n for at, n in self.by_minute.items() if at > minute - _MINUTES}
        self.by_minute[minute] = self.by_minute.get(minute, 0) + attempts

    def since(self, minute: int) -> int:
        return sum([n for at, n in self.by_minute.items() if at >= minute])


class Failures:
    """The failed attempts of a shard by what they said, and the work of sources. Used by the
    shard's thread."""

    def __init__(self) -> None:
        self._groups: dict[str, dict[str, _Group]] = {}  # by queue and signature
        self._wholes: dict[str, _Group] = {}  # by queue
        self._jobs: dict[tuple[str, str], int] = {}  # by queue and source, the first one first
        self._failed: dict[tuple[str, str], int] = {}
        # What both were at the begin of this span, and of the one before.
        self._span = 0
        self._marks: list[tuple[dict[tuple[str, str], int], ...]] = [({}, {}), ({}, {})]

    def handed_out(self, queue: str, source: str, jobs: int) -> None:
        """Count jobs that a source was handed."""
        counts, key = self._jobs, (queue, source)
        counts[key] = counts.get(key, 0) + jobs
        if len(counts) > MOST_SOURCES:
            oldest = next(iter(counts))
            del counts[oldest]
            for others in (self._failed, *chain.from_iterable(self._marks)):
                others.pop(oldest, None)

    def note(
        self,
        queue: str,
        source: str,
        failed: Sequence[Acks],
        missed: AbstractSet[JobKey],
        now_ms: int,
    ) -> None:
        """Count attempts that a source has acked as failed, without the jobs that its acks
        `missed`."""
        groups = self._groups.setdefault(queue, {})
        whole = 0
        for acks in failed:
            attempts = len(acks.local_ids)
            if missed:
                attempts -= sum([(acks.priority, one) in missed for one in acks.local_ids])
            if not attempts:
                continue
            text = signature(acks.append_custom_status).message or UNSAID
            group = groups.get(text)
            if group is None:
                if len(groups) >= MOST_SIGNATURES:
                    del groups[min(groups, key=lambda one: groups[one].last_ms)]
                group = groups[text] = _Group(now_ms)
            group.add(attempts, now_ms)
            whole += attempts
        if whole:
            self._wholes.setdefault(queue, _Group(now_ms)).add(whole, now_ms)
        key = (queue, source)
        if key in self._jobs:
            self._failed[key] = self._failed.get(key, 0) + whole

    def drop_queue(self, queue: str) -> None:
        """Forget the failed attempts of a deleted queue."""
        self._groups.pop(queue, None)
        self._wholes.pop(queue, None)

    def lately(self, now_ms: int) -> Mapping[str, Mapping[str, int]]:
        """Return how many attempts failed in this minute and the one before, by queue and
        signature."""
        minute = now_ms // _MINUTE_MS - 1
        found: dict[str, dict[str, int]] = {}
        for queue, groups in self._groups.items():
            counts = {text: n for text, group in groups.items() if (n := group.since(minute))}
            if counts:
                found[queue] = counts
        return found

    def of_hour(self, now_ms: int) -> Mapping[str, int]:
        """Return how many attempts of each queue failed in the last hour, as far as it is known."""
        minute = now_ms // _MINUTE_MS - _MINUTES + 1
        found = {queue: whole.since(minute) for queue, whole in self._wholes.items()}
        return {queue: attempts for queue, attempts in found.items() if attempts}

    def counts(self, now_ms: int) -> Sequence[FailureCount]:
        """List all signatures that are kept."""
        last = now_ms // _MINUTE_MS
        minutes = range(last - _MINUTES + 1, last + 1)
        return [
            FailureCount(
                queue,
                text,
                group.attempts,
                group.first_ms,
                group.last_ms,
                [group.by_minute.get(minute, 0) for minute in minutes],
            )
            for queue, groups in self._groups.items()
            for text, group in groups.items()
        ]

    def begin_span(self, now_ms: int) -> None:
        """Begin another span of recent work, if it is time. Call it every few seconds."""
        if self._span != now_ms // _SPAN_MS:
            self._span = now_ms // _SPAN_MS
            self._marks = [self._marks[1], (dict(self._jobs), dict(self._failed))]

    def recent_work(self) -> Sequence[SourceWork]:
        """List the work of each source in the last minutes, of those that had some. More attempts
        may have failed than jobs were handed out: those of earlier ones."""
        jobs, failed = self._marks[0]
        found = [
            SourceWork(
                *place,
                self._jobs[place] - jobs.get(place, 0),
                self._failed.get(place, 0) - failed.get(place, 0),
            )
            for place in self._jobs
        ]
        return [one for one in found if one.jobs > 0 or one.failed > 0]

    def work(self) -> Sequence[SourceWork]:
        """List how many jobs each source was handed, and how many attempts of it failed."""
        return [
            SourceWork(queue, source, jobs, self._failed.get((queue, source), 0))
            for (queue, source), jobs in self._jobs.items()
        ]
