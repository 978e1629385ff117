"""Import the job types and jobs of a Rickover into a running deployment.

    DATABASE_URL=postgres://rickover@db.example.com/rickover tools/import-rickover --dir DIR

reads Rickover's PostgreSQL tables (jobs, queued_jobs, archived_jobs) in one read-only transaction,
and changes nothing there. Stop Rickover's dispatcher first. Each job is enqueued under its id:
whatever is there already is left as it is, so a run that was interrupted is repeated, and goes on.
At the end it says how many of each were imported.

A job that was in progress is queued again, with the attempts that it had; one of an at_most_once
type may have run, and so becomes failed. Ended jobs come in the order in which they were archived,
without expires_at: the last 10,000 of them one after the other, earlier ones 500 at a time. Times
of creation are those of the import.

It needs psycopg: .venv/bin/pip install psycopg[binary]
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import groupby
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID

from pinlaterd.client import Client, Job, JobOptions, JobState
from pinlaterd.client.calls import EnqueuedJob
from pinlaterd.config import edit
from pinlaterd.config.load import load_config
from pinlaterd.config.schema import JobType, queue_of_type
from pinlaterd.errors import ConfigError, ConnectionFailed, PinLaterError
from pinlaterd.http.v1_bodies import exact_time
from pinlaterd.model import EXPIRED, FinishInfo

_JOBS_A_CALL = 500
_SHOWN_EVERY = 10_000
# So many ended jobs, the latest, keep their very order: each is ended in a millisecond of its own,
# since the archive shows jobs that ended in the same one by their shards and numbers.
_IN_ORDER = 10_000
_MILLISECOND = 0.001
_HIDDEN_TYPE = "meta.shutdown"  # Rickover's own
_MOST_ONCE = "at_most_once"
# An ended job is pending for a moment, and must not be handed out then.
_NOT_BEFORE_SECONDS = 10 * 365 * 86_400
_QUEUED = """
    SELECT id, name, attempts, data::text, status::text, run_after, expires_at
    FROM queued_jobs ORDER BY auto_id"""
_ARCHIVED = """
    SELECT id, name, attempts, data::text, status::text, NULL, expires_at
    FROM archived_jobs ORDER BY created_at, auto_id"""


class RickoverJob(NamedTuple):
    """A row of queued_jobs or archived_jobs."""

    id: UUID
    name: str
    attempts: int
    data: str
    status: str
    run_after: datetime | None
    expires_at: datetime | None

    @property
    def key(self) -> JobOptions:
        return JobOptions(f"job_{self.id}", key_of_all_queues=True)

    def queued(self) -> Job:
        run_after_ms, run_after_us = exact_time(self.run_after)
        expires_at_ms, expires_at_us = exact_time(self.expires_at)
        return Job(
            self.data.encode(),
            run_after_ms=run_after_ms,
            attempts_allowed=max(1, self.attempts),
            options=self.key._replace(
                expires_at_ms=expires_at_ms, run_after_us=run_after_us, expires_at_us=expires_at_us
            ),
        )


def main() -> int:
    arguments = _arguments()
    try:
        import psycopg  # noqa: PLC0415 - nothing else needs it
    except ImportError:
        return _refuse("psycopg is missing; install it: .venv/bin/pip install 'psycopg[binary]'")
    try:
        config = load_config(arguments.dir / "etc")
        with (
            psycopg.connect(os.environ.get("DATABASE_URL", "")) as database,
            Client(config.server.host, config.server.port, source="import-rickover") as client,
        ):
            database.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY")
            Import(database, client, arguments.dir / "etc").run()
    except (psycopg.Error, ConfigError, PinLaterError, ConnectionFailed, OSError) as error:
        why = " ".join(str(error).split())
        return _refuse(f"{why}; what was imported stays, and the same command goes on from there")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="tools/import-rickover",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--dir", type=Path, default=Path(), help="the deployment; the current folder if not given"
    )
    return parser.parse_args()


def _refuse(why: str) -> int:
    print(f"tools/import-rickover: {why}", file=sys.stderr)
    return 1


class Import:
    """One run over all tables."""

    def __init__(self, database: Any, client: Client, etc: Path) -> None:
        self._database = database
        self._client = client
        self._etc = etc
        self._types: dict[str, JobType] = {}
        self._archived_left = 0  # ended jobs that are still to be imported

    def run(self) -> None:
        """Import types, then queued jobs, then ended ones."""
        self._import_types()
        self._import_jobs("queued jobs", _QUEUED, self._queue)
        count = "SELECT count(*) FROM archived_jobs WHERE name <> %s"
        [self._archived_left] = self._database.execute(count, (_HIDDEN_TYPE,)).fetchone()
        self._import_jobs("archived jobs", _ARCHIVED, self._archive)

    def _import_types(self) -> None:
        rows = self._database.execute(
            "SELECT name, delivery_strategy::text, attempts, concurrency, created_at FROM jobs"
            " WHERE name <> %s ORDER BY created_at",
            (_HIDDEN_TYPE,),
        )
        new = 0
        for name, strategy, attempts, concurrency, created_at in rows.fetchall():
            queue = queue_of_type(name)
            made = JobType(name, queue, created_at.astimezone(UTC), strategy, attempts, concurrency)
            new += edit.add_job_type(self._etc, made) is not None
            self._client.create_queue(queue)
            self._types[name] = made
        print(f"job types: {new:,} imported, {len(self._types) - new:,} there already")

    def _import_jobs(self, what: str, query: str, store: Any) -> None:
        done: Counter[bool] = Counter()  # by whether the job was there already
        shown = 0
        for jobs in self._read(query):
            done.update(job.existed for job in store(jobs))
            if done.total() >= shown + _SHOWN_EVERY:
                shown = done.total()
                print(f"{what}: {shown:,} so far", flush=True)
        print(f"{what}: {done[False]:,} imported, {done[True]:,} there already", flush=True)

    def _read(self, query: str) -> Iterator[list[RickoverJob]]:
        with self._database.cursor(name="import") as cursor:  # a server's cursor: in bounded memory
            cursor.execute(query)
            while rows := cursor.fetchmany(_JOBS_A_CALL):
                yield [RickoverJob(*row) for row in rows if row[1] != _HIDDEN_TYPE]

    def _queue(self, jobs: Sequence[RickoverJob]) -> list[EnqueuedJob]:
        waiting: list[RickoverJob] = []
        has_run: list[RickoverJob] = []
        stored: list[EnqueuedJob] = []
        for job in jobs:
            is_once = self._types[job.name].delivery_strategy == _MOST_ONCE
            (has_run if is_once and job.status == "in-progress" else waiting).append(job)
        for job_type, alike in self._by_type(waiting):
            stored += self._client.enqueue_keyed(job_type.queue, [job.queued() for job in alike])
        failed = [job._replace(attempts=0, status="failed") for job in has_run]
        return [*stored, *self._archive(failed)]

    def _archive(self, jobs: Sequence[RickoverJob]) -> list[EnqueuedJob]:
        stored: dict[UUID, EnqueuedJob] = {}
        not_before_ms = round((time.time() + _NOT_BEFORE_SECONDS) * 1000)
        # Of those that end in one commit, the last one has the first number: it is shown first.
        for job_type, alike in self._by_type(jobs[::-1]):
            made = [_ended(job, job_type, not_before_ms) for job in alike]
            enqueued = self._client.enqueue_keyed(job_type.queue, made)
            stored |= zip([job.id for job in alike], enqueued, strict=True)
        finishes = [
            (
                self._types[job.name].queue,
                FinishInfo(
                    stored[job.id].descriptor,
                    JobState.SUCCEEDED if job.status == "succeeded" else JobState.FAILED,
                    job.attempts,
                ),
            )
            for job in jobs
            if job.status != EXPIRED
        ]
        self._archived_left -= len(jobs)
        if self._archived_left < _IN_ORDER:
            for queue, finish in finishes:
                self._client.finish_jobs(queue, [finish])
                time.sleep(_MILLISECOND)
        else:
            for queue, some in groupby(sorted(finishes, key=itemgetter(0)), itemgetter(0)):
                self._client.finish_jobs(queue, [finish for _, finish in some])
        return list(stored.values())

    def _by_type(self, jobs: Sequence[RickoverJob]) -> Iterator[tuple[JobType, list[RickoverJob]]]:
        for name, alike in groupby(sorted(jobs, key=attrgetter("name")), attrgetter("name")):
            yield self._types[name], list(alike)


def _ended(job: RickoverJob, job_type: JobType, not_before_ms: int) -> Job:
    """Return a job that is to be ended; one that has expired is ended by its shard, as all that
    expire, with the attempts that it is given here."""
    is_expired = job.status == EXPIRED
    return Job(
        job.data.encode(),
        run_after_ms=None if is_expired else not_before_ms,
        attempts_allowed=max(1, job.attempts, 0 if is_expired else job_type.attempts),
        options=job.key._replace(expires_at_ms=1 if is_expired else None),
    )


if __name__ == "__main__":
    sys.exit(main())
