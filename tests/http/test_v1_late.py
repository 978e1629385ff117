"""Rickover's interface where what it needs is late: an archive, a job type of another server."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import pytest
from aiohttp.test_utils import make_mocked_request

from pinlaterd.config.schema import Config, JobType, ServerSettings
from pinlaterd.http.job_types import JobTypes
from pinlaterd.http.v1_archive import Archive
from pinlaterd.http.v1_errors import RestError
from pinlaterd.http.v1_jobs import JobHandlers
from pinlaterd.model import FinishOutcome, JobRecord, JobState, Method, ScanKey, ScanResult


class Stalling:
    """Routers that answer the first scans, and no more."""

    seconds = 5.0

    def __init__(self, jobs: list[JobRecord]) -> None:
        self._left = jobs

    async def run(self, call: Any) -> Any:
        if call.method is Method.LOOKUP:
            return {job.descriptor: job for job in JOBS}
        if not self._left:
            await asyncio.Event().wait()
        job = self._left.pop(0)
        return ScanResult([job], ScanKey(job.updated_at_ms, "1", 1, 1).token())


JOB_ID = "job_6740b44e-13b9-475d-af06-979627e0e0d6"
JOBS = [
    JobRecord(f"t:s1:p1:{n}", JobState.SUCCEEDED, 1, 1, "", n, n, n, None, b"1") for n in (9, 8)
]


TYPE = JobType("t", "t", datetime.now(UTC), "at_least_once", 3)


async def shown(jobs: list[JobRecord], tmp_path: Path) -> Any:
    types = JobTypes(tmp_path, Config(job_types={"t": TYPE}))
    archive = Archive(cast("Any", Stalling(jobs)), types)
    request = make_mocked_request("GET", "/v1/archived-jobs?status=succeeded")
    return await archive.show(request, {})


def test_what_was_found_in_time_is_shown_with_a_cursor(tmp_path: Path) -> None:
    answer = asyncio.run(shown([*JOBS], tmp_path))

    assert [job["auto_id"] for job in json.loads(answer.body)] == [9, 8]
    assert "cursor=8.2.t:s1:p1:8" in answer.headers["Link"].replace("%3A", ":")


def test_nothing_in_time_is_no_empty_archive(tmp_path: Path) -> None:
    with pytest.raises(RestError) as raised:
        asyncio.run(shown([], tmp_path))

    answer = raised.value.response("/v1/archived-jobs")
    assert (answer.status, answer.headers["Retry-After"]) == (503, "1")


def test_a_callback_waits_for_a_type_that_another_server_has_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body_of(_request: Any) -> bytes:
        return b'{"status": "failed", "attempt": 2}'

    monkeypatch.setattr("pinlaterd.http.v1_jobs.body_of", body_of)

    class Routers:
        """Routers that know the job, which has 2 attempts left."""

        async def run(self, call: Any) -> Any:
            if call.method is Method.LOOKUP:
                record = JOBS[0]._replace(state=JobState.IN_PROGRESS, attempts_remaining=2)
                return {JOB_ID: record}
            finished.append(call.request.finishes[0])
            return [FinishOutcome.DONE]

    async def report() -> int:
        types = JobTypes(tmp_path, Config(ServerSettings(cluster="c")))
        handlers = JobHandlers(cast("Any", Routers()), types)
        asyncio.get_running_loop().call_later(0.05, types.follow, Config(job_types={"t": TYPE}))
        request = make_mocked_request("POST", f"/v1/jobs/t/{JOB_ID}")
        answer = await handlers.report(request, {"name": "t", "id": JOB_ID})
        return answer.status

    finished: list[Any] = []
    assert asyncio.run(report()) == 200
    assert [one.attempts_remaining for one in finished] == [1]
