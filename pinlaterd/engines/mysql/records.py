"""How a whole job is read: a row of a job table as a StoredJob."""

from __future__ import annotations

from typing import Any

from pinlaterd.engines.base import StoredJob
from pinlaterd.engines.mysql.statements import CREATED_AT_MS, RUN_AFTER_MS, STATUS, UPDATED_AT_MS
from pinlaterd.model import JobKey, JobState

WITHOUT_BODY = (
    b"local_id, state, COALESCE(attempts_allowed, 1), COALESCE(attempts_remaining, 0), "
    + STATUS + b", " + CREATED_AT_MS + b", " + RUN_AFTER_MS + b", " + UPDATED_AT_MS
    + b", claim_descriptor, NULL"
)  # fmt: skip
# Other numbers in the column `state` are a hand's: such rows are no jobs.
STATES = frozenset(JobState)
WITH_BODY = WITHOUT_BODY.replace(b", NULL", b", COALESCE(body, '')")


def stored_job(priority: int, row: tuple[Any, ...]) -> StoredJob:
    local_id, state, *rest = row
    return StoredJob(JobKey(priority, local_id), JobState(state), *rest)
