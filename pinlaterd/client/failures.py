"""The jobs of a queue that failed last, in groups of those that failed alike.

A FailureWindow says which call is to be made next and takes its answer, so that blocking and
asynchronous clients fill it alike. What it keeps of a job is small, and texts are shared.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any, Final, Literal, NamedTuple

from pinlaterd.client.calls import PreparedCall, page_after, scan
from pinlaterd.model import JobChoice, JobRecord, JobState, ScanResult, claim_source
from pinlaterd.signature import signature
from pinlaterd.stats import natural

NEWEST: Final = 10_000  # jobs that are grouped
_PAGE_JOBS: Final = 2_000
_POINTS: Final = 24  # of a group's trend
_NUMBERED: Final = re.compile(r"(.*?)(\d+)\Z")

Grouping = Literal["message", "place", "worker"]


class Failure(NamedTuple):
    """One job: when it failed, what its status says, who ran it last, and whether a part of the
    status was left out."""

    at_ms: int
    message: str
    place: str
    worker: str
    is_redacted: bool


class FailureGroup(NamedTuple):
    """Jobs that have `key` in common: their message, their place or their worker. `message` and
    `place` are the most frequent ones, of `messages` and `places`; `trend` counts the jobs in equal
    parts of the window."""

    key: str
    jobs: int
    first_ms: int
    last_ms: int
    message: str
    place: str
    messages: int
    places: int
    workers: Sequence[str]
    trend: Sequence[int]


class FailureWindow:
    """The jobs of a queue that failed last: the newest NEWEST, or since a time.

        while window.call is not None:
            window.take(client.run(window.call))

    `call`: what has to be answered next; None once the window is full. `redact` leaves out of a
    status what is not to be seen; `accept_partial`, shards that are unavailable."""

    def __init__(
        self,
        queue: str,
        since_ms: int | None = None,
        redact: Callable[[str], str] | None = None,
        *,
        accept_partial: bool = False,
    ) -> None:
        self.queue = queue
        self._redact = redact
        self.since_ms = since_ms
        self.failures: list[Failure] = []
        self.failed: int | None = None  # jobs of the queue, whenever they failed; None: not known
        self.missing_shards: Sequence[str] = ()  # without which it was filled
        self.is_whole = False  # whether all are here that failed since `since_ms`
        choice = None if since_ms is None else JobChoice(ended_since_ms=since_ms)
        self.call: PreparedCall[ScanResult] | None = scan(
            *(queue, JobState.FAILED),
            page_size=_PAGE_JOBS,
            newest_end_first=True,
            accept_partial=accept_partial,
            choice=choice,
        )
        self._shared: dict[str, str] = {}

    def take(self, page: ScanResult) -> None:
        """Add the answer to `call`."""
        assert self.call is not None
        self.failed = page.in_state
        self.missing_shards = sorted({*self.missing_shards, *(page.missing_shards or ())})
        failures = [*self.failures, *map(self._failure, page.jobs)]
        self.call = page_after(self.call, page)
        self.is_whole = self.call is None and len(failures) <= NEWEST
        if len(failures) >= NEWEST:
            self.call = None
        # Another one each time: a copy of the window, which is not filled further, has its own.
        self.failures = failures[:NEWEST]

    def _failure(self, job: JobRecord) -> Failure:
        status = job.custom_status if self._redact is None else self._redact(job.custom_status)
        said = signature(status, failed=True)
        source = claim_source(job.claim_descriptor or "") or ""
        message, place, worker = (self._shared.setdefault(text, text) for text in (*said, source))
        is_redacted = status != job.custom_status
        return Failure(job.updated_at_ms, message, place, worker, is_redacted)

    @property
    def times_ms(self) -> tuple[int, int] | None:
        """Return when the first and the last of the jobs failed; None if there are none."""
        times = [failure.at_ms for failure in self.failures]
        return (min(times), max(times)) if times else None

    def groups(self, by: Grouping, now_ms: int) -> list[FailureGroup]:
        """Return the jobs in groups, the largest first."""
        key_of: Callable[[Failure], str] = attrgetter(by)
        by_key: defaultdict[str, list[Failure]] = defaultdict(list)
        for failure in self.failures:
            by_key[key_of(failure)].append(failure)
        begin_ms = self.since_ms
        if begin_ms is None:
            begin_ms = (self.times_ms or (now_ms, now_ms))[0]
        made = [_group(key, found, begin_ms, now_ms) for key, found in by_key.items()]
        return sorted(made, key=lambda group: (-group.jobs, group.key))


def _group(key: str, failures: Sequence[Failure], begin_ms: int, end_ms: int) -> FailureGroup:
    messages = Counter(failure.message for failure in failures)
    places = Counter(failure.place for failure in failures)
    times = [failure.at_ms for failure in failures]
    part_ms = max(1, (end_ms - begin_ms) / _POINTS)
    parts = Counter(min(_POINTS - 1, max(0, int((at - begin_ms) / part_ms))) for at in times)
    return FailureGroup(
        key,
        len(failures),
        min(times),
        max(times),
        messages.most_common(1)[0][0],
        places.most_common(1)[0][0],
        len(messages),
        len(places),
        sorted({failure.worker for failure in failures if failure.worker}, key=natural),
        [parts[part] for part in range(_POINTS)],
    )


def shown_workers(workers: Iterable[str], most: int = 3) -> str:
    """Return sources in few words: those that differ in a number that counts up as `mailer:web1 to
    web7`."""
    runs: list[list[str]] = []
    for worker in workers:
        if runs and _follows(runs[-1][-1], worker):
            runs[-1].append(worker)
        else:
            runs.append([worker])
    shown = [
        run[0] if len(run) == 1 else f"{run[0]} to {run[-1].rpartition(':')[2]}"
        for run in runs[:most]
    ]
    left = sum(map(len, runs[most:]))
    return ", ".join(shown) + (f" and {left} more" if left else "")


def _follows(worker: str, other: str) -> bool:
    one, two = _NUMBERED.match(worker), _NUMBERED.match(other)
    return bool(one and two and one[1] == two[1] and int(one[2]) + 1 == int(two[2]))


def facts_of(window: FailureWindow, by: Grouping, now_ms: int) -> dict[str, Any]:
    """Return the groups as JSON shows them, with the window that they are of."""
    first_ms, last_ms = window.times_ms or (None, None)
    groups = [group._asdict() for group in window.groups(by, now_ms)]
    return {
        "queue": window.queue,
        "by": by,
        "failed": window.failed,
        "grouped": len(window.failures),
        "is_whole": window.is_whole,
        "missing_shards": window.missing_shards,
        "first_ms": first_ms,
        "last_ms": last_ms,
        "groups": groups,
    }
