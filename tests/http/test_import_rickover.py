"""tools/import-rickover: what a Rickover held is in a deployment, each job once."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
import pytest

from pinlaterd.client import Client, JobState
from pinlaterd.errors import QueueNotFound
from tests.conftest import WaitUntil
from tests.deployment import COMMAND_SECONDS, Deployment
from tests.http.conftest import http_of, serving_http
from tests.servers.postgresql import PROGRAMS, PostgreSQL

TOOL = Path(__file__).parents[2] / "tools/import_rickover.py"


@pytest.fixture
def rickover(tmp_path: Path) -> Iterator[PostgreSQL]:
    if not PROGRAMS:
        pytest.skip("PostgreSQL is missing; on Debian: apt-get install postgresql")
    server = PostgreSQL(tmp_path / "pg")
    yield server
    server.kill()


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    with serving_http(tmp_path / "d", shards=2) as deployment:
        yield deployment


def start_import(rickover: PostgreSQL, deployment: Deployment) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, TOOL, "--dir", deployment.folder],
        env={**os.environ, "DATABASE_URL": rickover.url},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def imported(rickover: PostgreSQL, deployment: Deployment) -> str:
    process = start_import(rickover, deployment)
    output, errors = process.communicate(timeout=COMMAND_SECONDS)
    assert process.returncode == 0, errors
    return output


def fill(rickover: PostgreSQL, statements: str) -> None:
    with psycopg.connect(rickover.url) as db:
        db.execute(statements)


TYPES = """
    INSERT INTO jobs VALUES ('send-mail', 'at_least_once', 7, 3, '2020-01-02T03:04:05.678901Z'),
        ('charge.card', 'at_most_once', 1, 2, now()),
        ('meta.shutdown', 'at_most_once', 1, 1, now());
"""


def test_types_and_jobs_of_all_states(rickover, deployment, wait_until: WaitUntil):
    uuids = {name: UUID(int=number) for number, name in enumerate("abcdefg")}
    fill(
        rickover,
        f"""{TYPES}
        INSERT INTO queued_jobs (id, name, attempts, run_after, expires_at, status, data) VALUES
        ('{uuids["a"]}', 'send-mail', 5, '2199-01-01T00:00:00.123456Z', '2199-02-01T00:00:00Z',
         'queued', '{{"to": "ada"}}'),
        ('{uuids["b"]}', 'send-mail', 2, now(), NULL, 'in-progress', '[1, 2.50]'),
        ('{uuids["c"]}', 'charge.card', 1, now(), NULL, 'in-progress', 'null');
        INSERT INTO archived_jobs (id, name, attempts, status, created_at, data) VALUES
        ('{uuids["d"]}', 'send-mail', 3, 'succeeded', '2020-02-02T00:00:00Z', '1'),
        ('{uuids["e"]}', 'send-mail', 0, 'failed', '2020-02-01T00:00:00Z', '2'),
        ('{uuids["f"]}', 'send-mail', 4, 'expired', '2020-02-03T00:00:00Z', '3');""",
    )

    assert imported(rickover, deployment) == (
        "job types: 2 imported, 0 there already\n"
        "queued jobs: 3 imported, 0 there already\n"
        "archived jobs: 3 imported, 0 there already\n"
    )

    http = http_of(deployment)
    wait_until(lambda: http.get("/v1/jobs/send-mail").status == 200)
    made = http.get("/v1/jobs/send-mail").body
    assert made == {
        "name": "send-mail",
        "delivery_strategy": "at_least_once",
        "attempts": 7,
        "concurrency": 3,
        "created_at": "2020-01-02T03:04:05.678901Z",
    }

    def look_up(name: str, job_type: str = "send-mail") -> Any:
        answer = http.get(f"/v1/jobs/{job_type}/job_{uuids[name]}")
        assert answer.status == 200, answer
        return answer.body

    waiting = look_up("a")
    assert (waiting["status"], waiting["attempts"], waiting["data"]) == ("queued", 5, {"to": "ada"})
    assert waiting["run_after"] == "2199-01-01T00:00:00.123456Z"
    assert waiting["expires_at"] == "2199-02-01T00:00:00Z"
    again = look_up("b")
    assert (again["status"], again["attempts"], again["data"]) == ("queued", 2, [1, 2.5])
    may_have_run = look_up("c", "charge.card")
    assert (may_have_run["status"], may_have_run["attempts"]) == ("failed", 0)
    wait_until(lambda: look_up("f")["status"] == "expired")
    assert look_up("f")["attempts"] == 4
    archived = http.get("/v1/archived-jobs?name=send-mail").body
    found = {job["id"].removeprefix("job_"): (job["status"], job["data"]) for job in archived}
    assert found == {
        str(uuids["d"]): ("succeeded", 1),
        str(uuids["e"]): ("failed", 2),
        str(uuids["f"]): ("expired", 3),
    }
    assert look_up("d")["attempts"] == 3

    assert imported(rickover, deployment) == (
        "job types: 0 imported, 2 there already\n"
        "queued jobs: 0 imported, 3 there already\n"
        "archived jobs: 0 imported, 3 there already\n"
    )


def test_ended_jobs_keep_their_order(rickover, deployment):
    fill(
        rickover,
        f"""{TYPES}
        INSERT INTO archived_jobs (id, name, attempts, status, created_at, data)
        SELECT ('00000000-0000-0000-0000-' || lpad(n::text, 12, '0'))::uuid,
            CASE WHEN n % 5 = 0 THEN 'charge.card' ELSE 'send-mail' END, 0,
            CASE WHEN n % 3 = 0 THEN 'failed' ELSE 'succeeded' END::archived_job_status,
            '2020-02-01T00:00:00Z'::timestamptz + n * interval '1 microsecond', to_json(n)
        FROM generate_series(1, 100) AS n""",
    )

    imported(rickover, deployment)

    http = http_of(deployment)
    assert [job["data"] for job in http.get("/v1/archived-jobs").body] == [*range(100, 0, -1)]


def test_an_import_that_is_killed_goes_on(rickover, deployment, wait_until: WaitUntil):
    fill(
        rickover,
        f"""{TYPES}
        INSERT INTO queued_jobs (id, name, attempts, run_after, status, data)
        SELECT ('00000000-0000-0000-0000-' || lpad(n::text, 12, '0'))::uuid, 'send-mail', 7,
            now(), 'queued', '{{}}' FROM generate_series(1, 6000) AS n""",
    )

    def stored() -> int:
        with Client("127.0.0.1", deployment.port) as client, suppress(QueueNotFound):
            return sum(client.count(name, JobState.PENDING) for name in client.queue_names())
        return 0  # one is just being created

    first = start_import(rickover, deployment)
    wait_until(lambda: first.poll() is not None or stored() > 1000)
    first.kill()
    first.communicate()
    told = imported(rickover, deployment)

    counted = re.search(r"queued jobs: ([\d,]+) imported, ([\d,]+) there already", told)
    assert counted is not None
    new, old = (int(text.replace(",", "")) for text in counted.groups())
    assert new + old == 6000
    assert old >= 1000
    assert stored() == 6000


def test_a_database_that_can_not_be_reached_is_named(tmp_path, deployment):
    process = subprocess.run(
        [sys.executable, TOOL, "--dir", deployment.folder],
        env={**os.environ, "DATABASE_URL": f"host={tmp_path} user=nobody"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert process.returncode == 1
    assert process.stderr.startswith("tools/import-rickover: connection ")
    assert str(tmp_path) in process.stderr
    assert "Traceback" not in process.stderr
