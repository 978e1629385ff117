"""Private PostgreSQL servers for tests, with the tables of a Rickover: as for MariaDB (mariadb.py).

PostgreSQL does not run for root, who is another user of a namespace of its own then.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import psycopg

from tests.checker.site import wait_until

DEBIAN_PACKAGE = "postgresql"
USER = "rickover"
PROGRAMS = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
# As Rickover's migrations make them.
_TABLES = """
CREATE TYPE delivery_strategy AS ENUM ('at_least_once', 'at_most_once');
CREATE TYPE job_status AS ENUM ('queued', 'in-progress');
CREATE TYPE archived_job_status AS ENUM ('succeeded', 'failed', 'expired');
CREATE TABLE jobs (
    name TEXT PRIMARY KEY, delivery_strategy delivery_strategy NOT NULL,
    attempts SMALLINT NOT NULL, concurrency SMALLINT NOT NULL,
    created_at TIMESTAMP WITH TIME ZONE NOT NULL DEFAULT now());
CREATE TABLE queued_jobs (
    id UUID PRIMARY KEY, name TEXT NOT NULL REFERENCES jobs, attempts SMALLINT NOT NULL,
    run_after TIMESTAMP WITH TIME ZONE NOT NULL, expires_at TIMESTAMP WITH TIME ZONE,
    created_at TIMESTAMP WITH TIME ZONE NOT NULL DEFAULT now(),
    updated_at TIMESTAMP WITH TIME ZONE NOT NULL DEFAULT now(),
    status job_status NOT NULL, data JSONB NOT NULL, auto_id BIGSERIAL);
CREATE TABLE archived_jobs (
    id UUID PRIMARY KEY, name TEXT NOT NULL REFERENCES jobs, attempts SMALLINT NOT NULL,
    status archived_job_status NOT NULL,
    created_at TIMESTAMP WITH TIME ZONE NOT NULL DEFAULT now(),
    expires_at TIMESTAMP WITH TIME ZONE, data JSONB NOT NULL, auto_id BIGSERIAL);
"""


class PostgreSQL:
    """One server, on a Unix socket in `folder`, which must not exist yet."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.url = f"host={folder} user={USER} dbname=postgres"
        data = folder / "data"
        _run("initdb", "-D", str(data), "-U", USER, "-A", "trust", "--no-sync").check_returncode()
        options = ["-c", "listen_addresses=", "-c", "fsync=off", "-k", str(folder)]
        options += ["-c", "dynamic_shared_memory_type=mmap"]  # in its folder, whatever ends it
        self._process = subprocess.Popen(
            _command("postgres", "-D", str(data), *options),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        wait_until(self._answers)
        with psycopg.connect(self.url) as db:
            db.execute(_TABLES)

    def _answers(self) -> bool:
        assert self._process.poll() is None
        return _run("pg_isready", "-d", self.url).returncode == 0

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def _command(program: str, *arguments: str) -> list[str]:
    outside = ["unshare", "--user", "--map-user=1000", "--map-group=1000"]
    place = outside if os.geteuid() == 0 else []
    ends_with_us = ["setpriv", "--pdeathsig", "KILL"]
    return [*place, *ends_with_us, str(PROGRAMS[-1] / program), *arguments]


def _run(program: str, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(_command(program, *arguments), capture_output=True, check=False)
