"""Runs: the state of jobs with consecutive local ids, which entered it together, in one row.

Runs don't overlap, and every job is in one. A change of state replaces the runs that hold the jobs:
`holding` finds them, `split` cuts out the jobs that change, and `Transaction.replace` in `store`
writes what is there afterwards. `find_damage` looks whether every job is in one.
"""

from __future__ import annotations

import logging
import re
import sqlite3
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from pinlaterd.engines.base import EARLIEST_MS, LATEST_MS
from pinlaterd.engines.counts import Depths
from pinlaterd.engines.sqlite.options import disagreements, repair_options
from pinlaterd.model import JobState, new_record

log = logging.getLogger(__name__)

# As plain integers, which sqlite3 binds quickly.
PENDING, IN_PROGRESS, SUCCEEDED, FAILED = map(int, JobState)
_MOST_LOCAL_ID = 2**63 - 1
_STATES, _PRIORITIES = frozenset(JobState), range(1, 128)
_CLAIM = re.compile(r"(.*[^0-9])(0|[1-9][0-9]{0,17})", re.DOTALL | re.ASCII)

COLUMNS = "first_id, last_id, queue, priority, state, at, claimer, claim_number"
PUT_RUN = (
    f"INSERT INTO runs ({COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)"  # noqa: S608
    " ON CONFLICT DO UPDATE SET last_id = excluded.last_id, state = excluded.state,"
    " at = excluded.at, claimer = excluded.claimer, claim_number = excluded.claim_number"
)
# The run that `first` lies in may begin before it.
_HOLDING = (
    f"SELECT {COLUMNS} FROM runs WHERE first_id <= ?2 AND last_id >= ?1 AND first_id >="  # noqa: S608
    " coalesce((SELECT max(first_id) FROM runs WHERE first_id <= ?1), ?1)"
    " AND +queue = ?3 AND +state = ?4 ORDER BY first_id"
)
_OLDEST = (
    f"SELECT {COLUMNS} FROM runs INDEXED BY runs_by_age"  # noqa: S608
    " WHERE queue = ? AND state = ? AND priority = ? AND at BETWEEN ? AND ?"
    " ORDER BY at, last_id LIMIT ?"
)


class Span(NamedTuple):
    first_id: int
    last_id: int  # ends included


class Run(NamedTuple):
    """A row of `runs`; `at_ms` and the claim are explained in schema.sql."""

    first_id: int
    last_id: int
    queue_id: int
    priority: int
    state: int
    at_ms: int
    claimer: str | None = None
    claim_number: int | None = None

    @property
    def jobs(self) -> int:
        return self.last_id - self.first_id + 1

    @property
    def local_ids(self) -> range:
        return range(self.first_id, self.last_id + 1)

    def claim_of(self, local_id: int) -> str:
        if self.claim_number is None:
            return self.claimer or ""
        return f"{self.claimer}{self.claim_number + local_id - self.first_id}"

    def cut(self, first_id: int, last_id: int) -> Run:
        """Return the part with these ids."""
        number = self.claim_number
        if number is not None:
            number += first_id - self.first_id
        return new_record(Run, (first_id, last_id, *_in_common(self), number))

    def pending(self, run_after_ms: int) -> Run:
        """Return the same jobs without claim."""
        return self._replace(state=PENDING, at_ms=run_after_ms, claimer=None, claim_number=None)


# What jobs of one run have in common: all fields but the ids and the claims' first number.
_in_common: Callable[[Run], tuple[Any, ...]] = itemgetter(
    slice(Run._fields.index("queue_id"), Run._fields.index("claim_number"))
)


def claimed(run: Run, claim_descriptor: str) -> Run:
    """Return the same jobs, of which the first has this claim."""
    found = _CLAIM.fullmatch(claim_descriptor)
    if found is None:
        return run._replace(claimer=claim_descriptor, claim_number=None)
    return run._replace(claimer=found[1], claim_number=int(found[2]))


def spans(local_ids: Collection[int]) -> list[Span]:
    """Turn ids into ranges, in order, as far as the file can hold them."""
    ordered = sorted(set(local_ids))
    while ordered and ordered[-1] > _MOST_LOCAL_ID:
        ordered.pop()
    if not ordered:
        return []
    if ordered[-1] - ordered[0] == len(ordered) - 1:
        return [Span(ordered[0], ordered[-1])]
    gaps = [at for at in range(1, len(ordered)) if ordered[at] != ordered[at - 1] + 1]
    return [
        Span(ordered[first], ordered[end - 1])
        for first, end in zip([0, *gaps], [*gaps, len(ordered)], strict=True)
    ]


def holding(db: sqlite3.Connection, queue_id: int, state: int, wanted: Sequence[Span]) -> list[Run]:
    """Return the runs that hold jobs of `wanted` which are in `state`, in order."""
    held: dict[int, Run] = {}  # one may hold several of `wanted`
    for span in wanted:
        for row in db.execute(_HOLDING, (span.first_id, span.last_id, queue_id, state)):
            held[row[0]] = new_record(Run, row)
    return list(held.values())


def oldest(
    db: sqlite3.Connection,
    queue_id: int,
    state: int,
    priority: int,
    *,
    limit: int,
    from_ms: int = EARLIEST_MS,
    to_ms: int = LATEST_MS,
) -> list[Run]:
    """Return the first runs by `at_ms` within these bounds, ends included: with `limit` jobs, or
    more in the last run."""
    held: list[Run] = []
    which = (queue_id, state, priority, from_ms, to_ms, limit)
    for row in db.execute(_OLDEST, which):
        held.append(Run(*row))
        limit -= held[-1].jobs
        if limit <= 0:
            break
    return held


def first_jobs(runs: Iterable[Run], limit: int) -> list[Run]:
    """Return the first `limit` jobs of `runs`, in their order."""
    first: list[Run] = []
    for run in runs:
        if limit <= 0:
            break
        first.append(run.cut(run.first_id, min(run.last_id, run.first_id + limit - 1)))
        limit -= first[-1].jobs
    return first


def split(
    runs: Sequence[Run], wanted: Sequence[Span] | Sequence[Run]
) -> tuple[list[Run], list[Run]]:
    """Return the parts of `runs` that lie within `wanted`, which are spans or runs, and the rest.
    Both are in order."""
    inside: list[Run] = []
    outside: list[Run] = []
    at, end = 0, len(wanted)
    for run in runs:
        first_id, last_id = run.first_id, run.last_id
        while at < end and wanted[at].last_id < first_id:
            at += 1
        while at < end and wanted[at].first_id <= last_id:
            from_id = max(wanted[at].first_id, first_id)
            to_id = min(wanted[at].last_id, last_id)
            if from_id > first_id:
                outside.append(run.cut(first_id, from_id - 1))
            is_whole = to_id - from_id == last_id - run.first_id
            inside.append(run if is_whole else run.cut(from_id, to_id))
            first_id = to_id + 1
            if wanted[at].last_id > last_id:
                break
            at += 1
        if first_id <= last_id:
            outside.append(run.cut(first_id, last_id))
    return inside, outside


def merged(runs: Iterable[Run]) -> Iterator[Run]:
    """Put the same jobs into fewer runs; `runs` are in order."""
    # Of those that one run can hold.
    first: Run | None = None
    last: Run | None = None
    for run in runs:
        if first is not None and last is not None and not _follows(last, run):
            yield first.cut(first.first_id, last.last_id)
            first = None
        first, last = first or run, run
    if first is not None and last is not None:
        yield first.cut(first.first_id, last.last_id)


def _follows(run: Run, other: Run) -> bool:
    """Tell whether one run can hold the jobs of both."""
    if run.last_id + 1 != other.first_id or _in_common(run) != _in_common(other):
        return False
    if run.claim_number is None:
        return not run.claimer
    return other.claim_number == run.claim_number + run.jobs


# --- counting -------------------------------------------------------------------------------


def count_jobs(db: sqlite3.Connection, queue_id: int) -> Depths:
    """Count by a walk over an index, which reads no job."""
    rows = db.execute(
        "SELECT priority, state, sum(last_id - first_id + 1) FROM runs INDEXED BY runs_by_age"
        " WHERE queue = ? GROUP BY state, priority",
        (queue_id,),
    )
    depths: dict[tuple[int, JobState], int] = {}
    for priority, state, jobs in rows:
        if priority in _PRIORITIES and state in _STATES:
            depths[priority, JobState(state)] = jobs
        else:
            text = "queue number %d: jobs of priority %r in state %r; they are left alone"
            log.error(text, queue_id, priority, state)
    return depths


# --- disagreements --------------------------------------------------------------------------

# A commit never leaves the tables in disagreement; a damaged disk and `.recover` do. Of a job that
# is in several runs then, IN_PROGRESS counts before SUCCEEDED, FAILED and PENDING, in this order.

_JOBS_OF_RUN = """jobs.local_id BETWEEN runs.first_id AND runs.last_id
    AND jobs.queue = runs.queue AND jobs.priority = runs.priority
    AND (runs.state <> 0 OR jobs.run_after = runs.at)"""
_OTHER_RUN = """SELECT 1 FROM runs AS other WHERE other.first_id > runs.first_id
    AND other.first_id <= runs.last_id"""
_WRONG_RUN = f"""(SELECT count(*) FROM jobs WHERE {_JOBS_OF_RUN}) <> last_id - first_id + 1
    OR EXISTS ({_OTHER_RUN})"""  # noqa: S608
_LOST_JOB = """NOT EXISTS (SELECT 1 FROM runs WHERE runs.last_id >= jobs.local_id
    AND runs.first_id = (SELECT max(first_id) FROM runs WHERE first_id <= jobs.local_id))"""

# What is wrong, and in which rows of which table.
_DISAGREEMENTS = (
    ("states of jobs that are not there, or are in another state, too", "runs", _WRONG_RUN),
    ("jobs in no state, which are never handed out", "jobs", _LOST_JOB),
)
# Each job of a wrong run gets its own; if several had it, by the state that counts first. What is
# in none then is PENDING.
_REPAIRS = (
    f"CREATE TEMP TABLE wrong AS SELECT * FROM runs WHERE {_WRONG_RUN}",  # noqa: S608
    """INSERT INTO wrong SELECT * FROM runs WHERE first_id NOT IN (SELECT first_id FROM wrong)
        AND EXISTS (SELECT 1 FROM wrong WHERE runs.first_id > wrong.first_id
                    AND runs.first_id <= wrong.last_id)""",
    "DELETE FROM runs WHERE first_id IN (SELECT first_id FROM wrong)",
    f"""INSERT OR IGNORE INTO runs
        SELECT local_id, local_id, runs.queue, runs.priority, runs.state, runs.at, runs.claimer,
            runs.claim_number + jobs.local_id - runs.first_id
        FROM wrong AS runs CROSS JOIN jobs ON {_JOBS_OF_RUN} ORDER BY state = 0, state""",  # noqa: S608
    f"""INSERT INTO runs
        SELECT local_id, local_id, queue, priority, 0, run_after, NULL, NULL
        FROM jobs WHERE {_LOST_JOB}""",  # noqa: S608
    "DROP TABLE wrong",
)


def find_damage(db: sqlite3.Connection) -> list[tuple[int, str, int]]:
    """Walk over all jobs; return queues by their ids, problems, and how many jobs have them."""
    jobs_of = {"runs": "sum(last_id - first_id + 1)", "jobs": "count(*)", "options": "count(*)"}
    return [
        (queue_id, problem, jobs)
        for problem, table, where in (*_DISAGREEMENTS, *disagreements(db))
        for queue_id, jobs in db.execute(
            f"SELECT queue, {jobs_of[table]} FROM {table} WHERE {where} GROUP BY queue"  # noqa: S608
        )
    ]


def repair_damage(db: sqlite3.Connection) -> None:
    """Mend what `find_damage` finds, within a transaction; depths have to be counted again."""
    for statement in _REPAIRS:
        db.execute(statement)
    repair_options(db)
