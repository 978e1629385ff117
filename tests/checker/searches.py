"""Searches for bodies: what scans and counts answer, judged by what jobs there were.

A search may take several calls, each with a part of what it finds. The pattern is one of names, so
that a job matches it or not whatever checkpoints do to the rest of its body.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator

from tests.checker.automaton import Phase
from tests.checker.history import OK, UNKNOWN, Record, Windows
from tests.checker.run import STORED_SLACK_SECONDS, JobHistory, Run, rows


def searches_are_exact(run: Run) -> None:
    """Found is only what exists and matches; a search that has come to its end has met each job
    that was there throughout, once; a count is between what was and what may have been there."""
    for record in run.by_operation["scan"]:
        if record.outcome == OK:
            _check_what_was_found(run, record)
    ended = [record for record in run.by_operation["searched"] if record.outcome == OK]
    counted = [record for record in run.by_operation["count"] if record.outcome == OK]
    if not ended and not counted:
        return
    there = _Pending(run)
    for record in ended:
        times = Counter(record.result)
        for descriptor in there.throughout(record):
            if times[descriptor] != 1:
                text = f"{descriptor} {times[descriptor]} times: {record}"
                run.violate("searches are exact", text)
    for record in counted:
        least = sum(1 for _ in there.throughout(record))
        most = there.most(record)
        if not least <= record.result <= most:
            run.violate("searches are exact", f"{least} to {most} jobs, but: {record}")


def _check_what_was_found(run: Run, record: Record) -> None:
    matches = _matcher(record)
    for descriptor, _ in rows(record):
        name = run.named.get(descriptor)
        if name is None and not _may_be_unknown(run, record):
            run.violate("searches are exact", f"nobody knows {descriptor}: {record}")
        if name is not None and not matches(name):
            run.violate("searches are exact", f"{descriptor} is {name}: {record}")


def _may_be_unknown(run: Run, record: Record) -> bool:
    """Of a job that was stored by a call or a move without an answer, and deleted soon."""
    if any(moved.t0 <= record.t1 for moved in run.by_operation["moved"]):
        return True
    return any(
        enqueue.t0 <= record.t1
        and enqueue.outcome == UNKNOWN
        and enqueue.arguments["queue"] == record.arguments["queue"]
        for enqueue in run.by_operation["enqueue"]
    )


def _matcher(record: Record) -> Callable[[str], object]:
    pattern = re.compile(record.arguments.get("pattern") or "")
    return lambda name: pattern.search(f"{name}/")


class _Pending:
    """The jobs that were PENDING for certain, ready or scheduled, and from when to when."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._jobs = [job for job in run.jobs.values() if job.enqueued is not None]
        self._moves = Windows((r.t0, r.t1) for r in run.by_operation["moved"])

    def throughout(self, record: Record) -> Iterator[str]:
        """The descriptors of those that match, if it looks for PENDING ones."""
        given = record.arguments
        future = given.get("future", False)
        if given["state"] != Phase.PENDING or (future and self._moves.touch(record.t0, record.t1)):
            return
        matches = _matcher(record)
        for job in self._jobs:
            if job.queue == given["queue"] and matches(job.name) and len(job.descriptors) == 1:
                start, end = self._scheduled(job) if future else self._run.ready_span(job)
                if start < record.t0 and record.t1 < end:
                    yield from job.descriptors

    def most(self, record: Record) -> float:
        """How many may match; a moved job is left in its old place, too."""
        if self._run.by_operation["moved"]:
            return float("inf")
        matches, queue = _matcher(record), record.arguments["queue"]
        return sum(
            1
            for job in self._run.jobs.values()
            if job.queue == queue and job.began <= record.t1 and matches(job.name)
        )

    def _scheduled(self, job: JobHistory) -> tuple[float, float]:
        """While jobs are moved each may be held; it has gone on elsewhere, unless it is seen here
        at the end."""
        assert job.enqueued is not None
        end = min(job.due - STORED_SLACK_SECONDS, job.first_claim_at())
        if job.left or not job.rows:
            end = self._moves.first_within(job.enqueued.t0, end) or end
        return job.enqueued.t1, end
