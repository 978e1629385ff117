"""The jobs of Rickover's interface, under the ids of their clients.

A job's id is its key, which is held over all queues; `data` is its body, as it was written. The
states of Rickover are ours but for `expired`, which is FAILED for the reason that it expired.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from functools import partial
from http import HTTPStatus

from aiohttp import web

from pinlaterd.access import check
from pinlaterd.client import calls
from pinlaterd.config.schema import JobType
from pinlaterd.errors import QueueNotFound
from pinlaterd.http.job_types import JobTypes
from pinlaterd.http.problems import after
from pinlaterd.http.v1_bodies import INT16, Fields, exact_time, job_answer
from pinlaterd.http.v1_errors import (
    HEADERS,
    RestError,
    bad_request,
    json_response,
    missing,
    not_found,
    server_error,
)
from pinlaterd.http_port import body_of
from pinlaterd.model import (
    ALL_QUEUES,
    FinishInfo,
    FinishOutcome,
    Job,
    JobOptions,
    JobRecord,
    JobState,
    backoff_ms,
)
from pinlaterd.router_client import RouterClient

Names = Mapping[str, str]  # the parts of a path that differ

_PREFIX, _RANDOM_ID = "job_", "random_id"
_UUID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)
_UUID_CHARS = 36
_MOST_DATA_BYTES = 100 * 1024
_ZERO_CHARACTER = re.compile(rb"(?<!\\)(?:\\\\)*\\u0000")
_QUEUED = (JobState.PENDING, JobState.IN_PROGRESS)
_ENDS = {"succeeded": JobState.SUCCEEDED, "failed": JobState.FAILED}
_ABSENT = -(1 << 16)  # no int16

_archived_already = partial(bad_request, "job_already_archived", "Job has already been archived")
_other_name = partial(RestError, 404, "job_not_found", "Job exists, but with a different name")
_reported_already = partial(
    bad_request,
    "duplicate_status_request",
    "This job has already been archived, or was never queued under this name",
)


class JobHandlers:
    """The handlers of calls on jobs, on one service."""

    def __init__(self, client: RouterClient, job_types: JobTypes) -> None:
        self._client = client
        self._job_types = job_types

    # --- enqueue -----------------------------------------------------------------------------

    async def enqueue(self, request: web.Request, names: Names) -> web.Response:
        fields = Fields(await body_of(request))
        run_after, expires_at = fields.time("run_after"), fields.time("expires_at")
        data = fields.raw("data")
        if data is None:
            raise missing("data")
        given = names["id"]
        job_id = _new_id() if given == _RANDOM_ID else parse_id(given, may_lack_prefix=True)
        if len(data) > _MOST_DATA_BYTES:
            title = "Data parameter is too large (100KB max)"
            raise RestError(413, "entity_too_large", title, instance="")
        name = names["name"]
        job_type = await self._job_types.find(name)
        if job_type is None:
            title, path = f"Job type {name} not found", f"/v1/jobs/{name}"
            raise RestError(404, "job_type_not_found", title, instance=path)
        if _ZERO_CHARACTER.search(data):  # which counts behind an id that is archived
            held = await self._find(job_id)
            is_archived = held is not None and held.state not in _QUEUED
            title = "data holds the character \\u0000, or half a surrogate pair"
            zero = bad_request("invalid_parameter", title)
            raise _archived_already() if is_archived else zero
        run_after_ms, run_after_us = exact_time(run_after)
        expires_at_ms, expires_at_us = exact_time(expires_at)
        options = JobOptions(job_id, expires_at_ms, key_of_all_queues=True)
        options = options._replace(run_after_us=run_after_us, expires_at_us=expires_at_us)
        record = await self._store(job_type, data, run_after_ms, options)
        if queue_of(record) != job_type.queue:  # it was there, under another type
            check(request, "view", queue_of(record))
        return self._answer(record, HTTPStatus.ACCEPTED)

    async def _store(
        self, job_type: JobType, data: bytes, run_after_ms: int | None, options: JobOptions
    ) -> JobRecord:
        """Enqueue a job, and return it, or the queued one that has its id. Raises RestError."""
        job = Job(data, 1, run_after_ms, job_type.attempts, "", options)
        call = calls.enqueue_keyed(job_type.queue, [job])
        try:
            [enqueued] = await self._client.run(call)
        except QueueNotFound:  # nobody has made it yet, or somebody has deleted it
            await self._client.run(calls.create_queue(job_type.queue))
            [enqueued] = await self._client.run(call)
        descriptor = enqueued.descriptor
        look_up = calls.lookup([descriptor], include_body=enqueued.existed)
        with after("the job was there before" if enqueued.existed else "the job was stored"):
            record = (await self._client.run(look_up)).get(descriptor)
        if record is None:  # the queue was deleted by then
            raise not_found()
        if not enqueued.existed:
            return _as_stored(record)._replace(body=data)
        if record.state not in _QUEUED:
            raise _archived_already()
        return record

    # --- look-up -----------------------------------------------------------------------------

    async def show(self, request: web.Request, names: Names) -> web.Response:
        """Show a job by its id, and if it is queued under its name only, if that is given."""
        name = names.get("name")
        job_id = parse_id(names["id"], may_lack_prefix=name is not None)
        record = await self._found(request, job_id, "view")
        if (
            name is not None
            and record.state in _QUEUED
            and self._job_types.name_of(queue_of(record)) != name
        ):
            raise _other_name()
        return self._answer(record)

    async def replay(self, request: web.Request, names: Names) -> web.Response:
        name = names.get("name")
        record = await self._found(request, parse_id(names["id"]), "enqueue")
        job_type = self._job_types.of_queue(queue_of(record))
        if name is not None and self._job_types.name_of(queue_of(record)) != name:
            raise _other_name()
        if record.state is JobState.PENDING:
            title = "Cannot replay a queued job. Wait for it to start"
            raise bad_request("invalid_replay_attempt", title)
        if job_type is None:
            raise not_found()
        options = record.options or JobOptions(key_of_all_queues=True)
        options = options._replace(key=_new_id(), run_after_us=None)
        made = await self._store(job_type, record.body or b"", None, options)
        return self._answer(made, HTTPStatus.CREATED)

    # --- what became of it -------------------------------------------------------------------

    async def report(self, request: web.Request, names: Names) -> web.Response:
        """End a job, or have it tried again, as its downstream says."""
        fields = Fields(await body_of(request))
        status = fields.get("status", str, "")
        attempt = fields.get("attempt", INT16, _ABSENT)
        retryable = fields.get("retryable", bool, default=True)
        if not status:
            raise missing("status")
        if attempt == _ABSENT:
            raise missing("attempt")
        if status not in _ENDS:
            raise bad_request("invalid_status", f"Invalid job status: {status}")
        job_id = parse_id(names["id"], may_lack_prefix=True)
        job_type = await self._job_types.find(names["name"])
        if status == "succeeded":
            await self._end(job_id, job_type, JobState.SUCCEEDED, attempt, expected=attempt)
        elif job_type is None:
            raise server_error(f"There is no job type {names['name']}")
        elif attempt == 1 or not (retryable and job_type.is_retried):
            await self._end(job_id, job_type, JobState.FAILED, attempt - 1)
        else:
            await self._decrement(request, job_id, job_type, attempt)
        return web.Response(headers=HEADERS)

    async def _end(
        self,
        job_id: str,
        job_type: JobType | None,
        state: JobState,
        attempts_left: int,
        expected: int | None = None,
    ) -> None:
        """End a job with so many attempts left. While it is in progress it must have those that
        are `expected`; a queued one ends whatever it has."""
        if attempts_left < 0:
            raise server_error("A job has at least one attempt left before it fails")
        record = await self._find(job_id)
        if record is None or job_type is None or queue_of(record) != job_type.queue:
            raise _reported_already()
        end = FinishInfo(record.descriptor, state, attempts_left, expected, compares_pending=False)
        if not await self._finish(record, end):
            raise _reported_already()

    async def _decrement(
        self, request: web.Request, job_id: str, job_type: JobType, attempt: int
    ) -> None:
        """Have a job tried again that has `attempt` attempts left, whatever its type."""
        left = attempt - 1
        record = await self._find(job_id) if left > 0 else None
        is_done = False
        if record is not None:
            check(request, "work", queue_of(record))
            delay_ms = backoff_ms(job_type.attempts, left)
            again = FinishInfo(
                record.descriptor, JobState.PENDING, left, attempt, retry_delay_ms=delay_ms
            )
            is_done = await self._finish(record, again)
        if not is_done:
            title = "The job's attempts could not be decremented: it has ended, or has others left"
            raise bad_request("decrement_failed", title)

    async def _finish(self, record: JobRecord, finish: FinishInfo) -> bool:
        call = calls.finish_jobs(queue_of(record), [finish])
        [outcome] = await self._client.run(call)
        return outcome is FinishOutcome.DONE

    # --- all of these ------------------------------------------------------------------------

    async def _find(self, job_id: str, *, include_body: bool = False) -> JobRecord | None:
        call = calls.lookup_keys(ALL_QUEUES, [job_id], include_body=include_body)
        return (await self._client.run(call)).get(job_id)

    async def _found(self, request: web.Request, job_id: str, role: str) -> JobRecord:
        """Return a job with its body. Raises RestError if it is not there, or not for the user."""
        record = await self._find(job_id, include_body=True)
        if record is None:
            raise not_found()
        check(request, role, queue_of(record))
        return record

    def _answer(self, record: JobRecord, status: HTTPStatus = HTTPStatus.OK) -> web.Response:
        return json_response(job_answer(record, self._job_types.name_of(queue_of(record))), status)


# --- ids ------------------------------------------------------------------------------------


def parse_id(text: str, *, may_lack_prefix: bool = False) -> str:
    """Return a job's id as it is stored: with its prefix, in lower case. Raises RestError."""
    prefix, number = text[:-_UUID_CHARS], text[-_UUID_CHARS:]
    if _UUID.fullmatch(number) is None:
        raise bad_request("invalid_uuid", f"Invalid UUID: {text}", instance="")
    if prefix != _PREFIX and not (may_lack_prefix and not prefix):
        title = f"Please use {_PREFIX!r} for the ID prefix, not {prefix!r}"
        raise bad_request("invalid_prefix", title, instance="")
    return _PREFIX + number.lower()


def _new_id() -> str:
    return f"{_PREFIX}{uuid.uuid4()}"


def _as_stored(record: JobRecord) -> JobRecord:
    """Return a new job as it was when it was stored, though it may have been handed out since."""
    return record._replace(
        state=JobState.PENDING,
        attempts_remaining=record.attempts_allowed,
        updated_at_ms=record.created_at_ms,
    )


def queue_of(record: JobRecord) -> str:
    return record.descriptor.partition(":")[0]
