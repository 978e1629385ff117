"""Import the job types and jobs of a Rickover into a running deployment.

    DATABASE_URL=postgres://rickover@db.example.com/rickover tools/import-rickover --dir DIR

reads Rickover's PostgreSQL tables (jobs, queued_jobs, archived_jobs) in one read-only transaction,
and changes nothing there. Stop Rickover's dispatcher first. Each job is enqueued under its id:
whatever is there already is left as it is, so a run that was interrupted is repeated, and goes on.
At the end it says how many of each were imported.

A job that was in progress is queued again, with the attempts that it had; one of an at_most_once
type may have run, and so becomes failed. Ended jobs come in the order in which they were archived,
without expires_at. Times of creation are those of the import.

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
from operator import attrgetter
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
from pinlaterd.model import FinishInfo

_JOBS_A_CALL = 500
_SHOWN_EVERY = 10_000
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

    def run(self) -> None:
        """Import types, then queued jobs, then ended ones."""
        self._import_types()
        self._import_jobs("queued jobs", _QUEUED, self._queue)
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
            for name, alike in groupby(sorted(jobs, key=attrgetter("name")), attrgetter("name")):
                stored = store(self._types[name], list(alike))
                done.update(job.existed for job in stored)
            if done.total() >= shown + _SHOWN_EVERY:
                shown = done.total()
                print(f"{what}: {shown:,} so far", flush=True)
        print(f"{what}: {done[False]:,} imported, {done[True]:,} there already", flush=True)

    def _read(self, query: str) -> Iterator[list[RickoverJob]]:
        with self._database.cursor(name="import") as cursor:  # a server's cursor: in bounded memory
            cursor.execute(query)
            while rows := cursor.fetchmany(_JOBS_A_CALL):
                yield [RickoverJob(*row) for row in rows if row[1] != _HIDDEN_TYPE]

    def _queue(self, job_type: JobType, jobs: Sequence[RickoverJob]) -> list[EnqueuedJob]:
        has_run = [
            job
            for job in jobs
            if job.status == "in-progress" and job_type.delivery_strategy == _MOST_ONCE
        ]
        waiting = [job for job in jobs if job not in has_run]
        stored = self._client.enqueue_keyed(job_type.queue, [job.queued() for job in waiting])
        failed = [job._replace(attempts=0, status="failed") for job in has_run]
        return [*stored, *self._archive(job_type, failed)]

    def _archive(self, job_type: JobType, jobs: Sequence[RickoverJob]) -> list[EnqueuedJob]:
        if not jobs:
            return []
        expired = [job for job in jobs if job.status == "expired"]
        ended = [job for job in jobs if job.status != "expired"]
        not_before_ms = round((time.time() + _NOT_BEFORE_SECONDS) * 1000)
        stored = self._client.enqueue_keyed(
            job_type.queue,
            [
                *(_ended(job, job_type, not_before_ms) for job in ended),
                # The shard ends them as it does all that expire.
                *(_ended(job, job_type, None, expires_at_ms=1) for job in expired),
            ],
        )
        self._client.finish_jobs(
            job_type.queue,
            [
                FinishInfo(
                    one.descriptor,
                    JobState.SUCCEEDED if job.status == "succeeded" else JobState.FAILED,
                    job.attempts,
                )
                for one, job in zip(stored, ended, strict=False)
            ],
        )
        return stored


def _ended(
    job: RickoverJob, job_type: JobType, run_after_ms: int | None, expires_at_ms: int | None = None
) -> Job:
    return Job(
        job.data.encode(),
        run_after_ms=run_after_ms,
        attempts_allowed=max(1, job_type.attempts, job.attempts),
        options=job.key._replace(expires_at_ms=expires_at_ms),
    )


if __name__ == "__main__":
    sys.exit(main())
