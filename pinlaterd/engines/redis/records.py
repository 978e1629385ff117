"""A whole job as lookup.lua answers it, as a StoredJob.

PinLater's own jobs may lack fields; texts of theirs may be no UTF-8.
"""

from __future__ import annotations

import math
from typing import Any

from pinlaterd.engines.base import StoredJob
from pinlaterd.model import JobKey, JobState


def stored_job(key: JobKey, row: list[Any], *, with_body: bool) -> StoredJob:
    state, score, allowed, remaining, status, created, run_after, updated, claim, body = row
    job_state = JobState(int(state))
    since_ms = to_ms(score)
    if job_state is JobState.PENDING:
        # The score is where the ready index finds it.
        run_after_ms = since_ms
        updated_ms = to_ms(updated) if updated else since_ms
    else:
        run_after_ms = int(run_after) if run_after else since_ms
        updated_ms = since_ms
    return StoredJob(
        key,
        job_state,
        int(allowed or 1),
        int(remaining or 0),
        (status or b"").decode(errors="replace"),
        to_ms(created) if created else since_ms,
        run_after_ms,
        updated_ms,
        claim.decode(errors="replace") if claim and job_state is not JobState.PENDING else None,
        (body or b"") if with_body else None,
    )


def to_ms(seconds: bytes) -> int:
    """Of a time as it is stored, in seconds with fraction; as common.lua rounds it."""
    return math.floor(float(seconds) * 1000 + 0.5)
