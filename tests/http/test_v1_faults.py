"""Rickover's interface while processes are killed: a client that repeats what was not answered has
each job once, and each end once."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import pytest

from tests.conftest import WaitUntil
from tests.http.conftest import HttpAnswer, http_of, serving_http
from tests.http.test_v1_job_types import error
from tests.http.test_v1_jobs import OneType, new_id

pytestmark = pytest.mark.service

THREADS = 4


class Caller:
    """Enqueues jobs and reports that they succeeded, each until it is answered."""

    def __init__(self, jobs: OneType) -> None:
        self._jobs = jobs
        self.ended: list[str] = []
        self.refused: list[HttpAnswer] = []
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(THREADS)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while not self._stopping.is_set():
            job_id = new_id()
            *_, stored = self._until_answered(lambda: self._jobs.put(job_id))  # noqa: B023
            reports = list(
                self._until_answered(lambda: self._jobs.report(job_id, "succeeded", 7))  # noqa: B023
            )
            # Only one whose answer was lost may have been carried out before.
            was_lost = len(reports) > 1
            told = error(reports[-1])[1] if reports[-1].status == 400 else ""
            is_right = told in ("", "duplicate_status_request" if was_lost else "")
            if stored.status == 202 and reports[-1].status in (200, 400) and is_right:
                self.ended.append(job_id)
            else:
                self.refused += [stored, reports[-1]]

    def _until_answered(self, call) -> Iterator[HttpAnswer]:
        """Yield the answers, the last one of which is no failure of the service."""
        while True:
            try:
                answer = call()
            except (OSError, http.client.HTTPException):
                answer = HttpAnswer(503, {}, b"")
            yield answer
            if answer.status < 500:
                return


@pytest.mark.parametrize("program", ["shard-1", "router", "http"])
def test_each_job_is_stored_and_ended_once(
    tmp_path: Path, wait_until: WaitUntil, program: str
) -> None:
    with serving_http(tmp_path / "d", shards=2) as deployment:
        jobs = OneType(http_of(deployment))
        with Caller(jobs) as caller:
            for _ in range(2):
                before = len(caller.ended)
                wait_until(lambda: len(caller.ended) > before + 20)  # noqa: B023
                killed = deployment.kill(program)
                wait_until(lambda: deployment.pids().get(program, killed) != killed)  # noqa: B023
            deployment.wait_until_serving(seconds=60)
            before = len(caller.ended)
            wait_until(lambda: len(caller.ended) > before + 20)

        found, path = list[str](), f"/v1/archived-jobs?name={jobs.name}"
        while path:
            answer = jobs.api.get(path)
            found += [job["id"] for job in answer.body]
            path = answer.headers.get("Link", "").partition("<")[2].partition(">")[0]

    assert caller.refused == []
    assert sorted(found) == sorted(caller.ended)
