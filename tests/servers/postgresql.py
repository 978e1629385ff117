"""Private PostgreSQL servers for tests, with the tables of a Rickover: as for MariaDB (mariadb.py).

PostgreSQL does not run for root: it is `nobody` then, who sees the folder at another place.
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


_NOBODY = 65534
_SEEN_AT = "/mnt"
_AS_NOBODY = (
    f'mount --bind "$0" {_SEEN_AT} && exec setpriv --reuid={_NOBODY} --regid={_NOBODY}'
    ' --clear-groups --pdeathsig KILL "$@"'
)


class PostgreSQL:
    """One server, on a Unix socket in `folder`, which must not exist yet."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self._is_root = os.geteuid() == 0
        seen_at = _SEEN_AT if self._is_root else str(folder)
        if self._is_root:
            os.chown(folder, _NOBODY, _NOBODY)
        self.url = f"host={folder} user={USER} dbname=postgres"
        data = ("-D", f"{seen_at}/data")
        made = subprocess.run(
            self._command("initdb", *data, "-U", USER, "-A", "trust", "--no-sync"),
            capture_output=True,
            check=False,
        )
        assert made.returncode == 0, made.stderr.decode(errors="replace")
        options = ["-c", "listen_addresses=", "-c", "fsync=off", "-k", seen_at]
        options += ["-c", "dynamic_shared_memory_type=mmap"]  # in its folder, whatever ends it
        self._process = subprocess.Popen(
            self._command("postgres", *data, *options),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        wait_until(self._answers)
        with psycopg.connect(self.url) as db:
            db.execute(_TABLES)

    def _answers(self) -> bool:
        assert self._process.poll() is None
        try:
            psycopg.connect(self.url).close()
        except psycopg.OperationalError:
            return False
        return True

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def _command(self, program: str, *arguments: str) -> list[str]:
        command = [str(PROGRAMS[-1] / program), *arguments]
        if not self._is_root:
            return ["setpriv", "--pdeathsig", "KILL", *command]
        return ["unshare", "--mount", "sh", "-c", _AS_NOBODY, str(self._folder), *command]
