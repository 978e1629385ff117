"""The JSON that /v2 reads and writes, as records.

msgspec checks a body as it decodes it, so that a mistake is found with its place. `data` stays the
bytes that the client wrote: numbers keep their digits and objects their order of keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from pinlaterd.config.schema import ServerSettings
from pinlaterd.errors import ErrorCode, InvalidEnqueue, PriorityNotSupported
from pinlaterd.model import (
    MOST_KEY_BYTES,
    QUEUE_DEFAULT,
    AckInfo,
    CheckpointInfo,
    ClaimedJob,
    Job,
    JobOptions,
    JobRecord,
)

Milliseconds = Annotated[int, Meta(ge=0, le=2**63 - 1)]
LeaseMilliseconds = Annotated[int, Meta(ge=1000, le=2**31 - 1)]
# RFC 3339 with an offset, or milliseconds since the epoch.
Time = Annotated[datetime, Meta(tz=True)] | Milliseconds
_MILLISECOND = 1000


class Mistake(Exception):
    """A body's mistake: `field` is its place, as in `jobs[3].priority`, or "" for all of it.
    `code`: of the problem; None if it is as that of most mistakes."""

    def __init__(self, field: str, message: str, code: ErrorCode | None = None) -> None:
        super().__init__(message)
        self.field = field
        self.message = message
        self.code = code


class _Request(Struct, forbid_unknown_fields=True, frozen=True): ...


class _Answer(Struct): ...


# --- requests -----------------------------------------------------------------------------


class JobBody(_Request, frozen=True, kw_only=True):
    """A job to enqueue: `data` is any JSON, `body` any bytes in base64."""

    data: Raw | UnsetType = UNSET
    body: bytes | UnsetType = UNSET
    priority: Annotated[int, Meta(ge=1, le=127)] | UnsetType = UNSET
    run_after: Time | None = None
    attempts: Annotated[int, Meta(ge=1, le=2**31 - 1)] | UnsetType = UNSET
    status: str = ""
    key: str | None = None
    expires_at: Time | None = None

    def job(self, server: ServerSettings, field: str = "") -> Job:
        """Return the job, if it is within the limits of `server`. Raises Mistake, which names
        `field`, the job's place."""
        if isinstance(self.body, bytes):
            if self.data is not UNSET:
                raise Mistake(field, "give `data` or `body`, not both")
            body = self.body
        elif isinstance(self.data, Raw):
            body = bytes(self.data)
        else:
            raise Mistake(field, "give `data` (any JSON) or `body` (bytes in base64)")
        if len(body) > server.max_job_body_bytes:
            place = _within(field, "data" if isinstance(self.data, Raw) else "body")
            text = f"has {len(body)} bytes; at most {server.max_job_body_bytes} are kept"
            raise Mistake(place, text, InvalidEnqueue.code)
        run_after_ms = since_1970(self.run_after, field, "run_after")
        priority = QUEUE_DEFAULT
        if isinstance(self.priority, int):
            priority = self.priority
            if priority > server.num_priority_levels:
                error = PriorityNotSupported(priority, server.num_priority_levels)
                raise Mistake(_within(field, "priority"), str(error), error.code)
        attempts = QUEUE_DEFAULT if isinstance(self.attempts, UnsetType) else self.attempts
        return Job(body, priority, run_after_ms, attempts, self.status, self._options(field))

    def _options(self, field: str) -> JobOptions | None:
        if self.key is not None and not 0 < len(self.key.encode()) <= MOST_KEY_BYTES:
            raise Mistake(_within(field, "key"), f"expected 1 to {MOST_KEY_BYTES} bytes of UTF-8")
        if self.key is None and self.expires_at is None:
            return None
        return JobOptions(self.key, since_1970(self.expires_at, field, "expires_at"))


class EnqueueBody(JobBody, frozen=True, kw_only=True):
    """One job, or several as `jobs`."""

    jobs: list[JobBody] | UnsetType = UNSET

    def all_jobs(self, server: ServerSettings) -> list[Job]:
        """Return the jobs, if they are within the limits of `server`. Raises Mistake."""
        if isinstance(self.jobs, UnsetType):
            return [self.job(server)]
        if self != EnqueueBody(jobs=self.jobs):
            raise Mistake("jobs", "give fields of a job in `jobs`, not beside it")
        return [job.job(server, f"jobs[{place}]") for place, job in enumerate(self.jobs)]


class LimitsBody(_Request, frozen=True, kw_only=True):
    """The limits of a queue that are to be set; null removes one."""

    max_jobs_per_second: Annotated[float, Meta(ge=0, le=1000000000)] | UnsetType | None = UNSET
    max_in_progress: Annotated[int, Meta(ge=0, le=1000000000)] | UnsetType | None = UNSET
    max_pending: Annotated[int, Meta(ge=0, le=1000000000000)] | UnsetType | None = UNSET
    default_attempts: Annotated[int, Meta(ge=1, le=2**31 - 1)] | UnsetType | None = UNSET
    default_priority: Annotated[int, Meta(ge=1, le=127)] | UnsetType | None = UNSET

    def given(self) -> dict[str, float | None]:
        """Return those that are to be set or removed."""
        found = msgspec.structs.asdict(self)
        return {name: value for name, value in found.items() if value is not UNSET}


class QueueBody(_Request, frozen=True, kw_only=True):
    limits: LimitsBody = LimitsBody()


class QueuesQuery(_Request, frozen=True, kw_only=True):
    """A page of the queues: `limit` of them, or all, behind the one that `cursor` names."""

    limit: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    cursor: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_]*$")] = ""


class ClaimsBody(_Request, frozen=True, kw_only=True):
    limit: Annotated[int, Meta(ge=1, le=2**31 - 1)] = 1
    wait_ms: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    lease_ms: LeaseMilliseconds | None = None


class SucceededBody(_Request, frozen=True, kw_only=True):
    descriptor: str
    claim: Annotated[str, Meta(min_length=1)]
    status: str = ""

    def info(self) -> AckInfo:
        return AckInfo(self.descriptor, self.status, claim_descriptor=self.claim)


class FailedBody(SucceededBody, frozen=True, kw_only=True):
    retry_delay_ms: Milliseconds = 0
    retryable: bool = True

    def info(self) -> AckInfo:
        retryable = None if self.retryable else False
        return AckInfo(self.descriptor, self.status, self.retry_delay_ms, self.claim, retryable)


class AcksBody(_Request, frozen=True, kw_only=True):
    succeeded: list[SucceededBody] = []
    failed: list[FailedBody] = []


class CheckpointBody(_Request, frozen=True, kw_only=True):
    """Changes to a job that runs; `status` is put in front of the one that it has."""

    descriptor: str
    claim: Annotated[str, Meta(min_length=1)]
    data: Raw | UnsetType = UNSET
    body: bytes | UnsetType = UNSET
    status: str | None = None
    attempts: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    run_after: Time | None = None
    release: bool = False

    def check(self, place: str) -> None:
        """Raise Mistake, which names `place`, if fields contradict each other or can't be."""
        if isinstance(self.body, bytes) and isinstance(self.data, Raw):
            raise Mistake(place, "give `data` or `body`, not both")
        since_1970(self.run_after, place, "run_after")

    def info(self) -> CheckpointInfo:
        body = bytes(self.data) if isinstance(self.data, Raw) else self.body
        return CheckpointInfo(
            self.descriptor,
            body if isinstance(body, bytes) else None,
            self.release,
            None if self.run_after is None else milliseconds(self.run_after),
            self.attempts,
            self.status,
            self.claim,
        )


class CheckpointsBody(_Request, frozen=True, kw_only=True):
    checkpoints: list[CheckpointBody] = []
    lease_ms: LeaseMilliseconds | None = None


# --- answers ------------------------------------------------------------------------------


class EnqueuedAnswer(_Answer, kw_only=True):
    """`existed`: whether the job was there already, under its key."""

    descriptor: str
    existed: bool


class EnqueuedManyAnswer(_Answer, kw_only=True):
    jobs: Sequence[EnqueuedAnswer]


class AckAnswer(_Answer, kw_only=True):
    """The outcome of an ack or a checkpoint: stale if the claim no longer held."""

    descriptor: str
    outcome: Literal["done", "stale"]


class AcksAnswer(_Answer, kw_only=True):
    succeeded: Sequence[AckAnswer]
    failed: Sequence[AckAnswer]


class CheckpointsAnswer(_Answer, kw_only=True):
    checkpoints: Sequence[AckAnswer]


class ClaimAnswer(_Answer, kw_only=True):
    """A claimed job; its bytes are `data` where they are JSON, else `body`."""

    descriptor: str
    claim: str
    data: Raw | UnsetType = UNSET
    body: bytes | UnsetType = UNSET
    attempts_allowed: int
    attempts_remaining: int

    @classmethod
    def of(cls, job: ClaimedJob) -> ClaimAnswer:
        return cls(
            descriptor=job.descriptor,
            claim=job.claim_descriptor,
            attempts_allowed=job.attempts_allowed,
            attempts_remaining=job.attempts_remaining,
            **content(job.body),
        )


class ClaimsAnswer(_Answer, kw_only=True):
    jobs: Sequence[ClaimAnswer]


class JobAnswer(_Answer, kw_only=True):
    """A job with all its fields."""

    descriptor: str
    queue: str
    state: str
    attempts_allowed: int
    attempts_remaining: int
    status: str
    created_at: datetime
    run_after: datetime
    updated_at: datetime
    claim: str | None
    key: str | None
    expires_at: datetime | None
    end_reason: str | None
    data: Raw | UnsetType = UNSET
    body: bytes | UnsetType = UNSET

    @classmethod
    def of(cls, record: JobRecord) -> JobAnswer:
        options = record.options or JobOptions()
        return cls(
            descriptor=record.descriptor,
            queue=record.descriptor.partition(":")[0],
            state=record.state.name.lower(),
            attempts_allowed=record.attempts_allowed,
            attempts_remaining=record.attempts_remaining,
            status=record.custom_status,
            created_at=instant(record.created_at_ms),
            run_after=instant(record.run_after_ms),
            updated_at=instant(record.updated_at_ms),
            claim=record.claim_descriptor or None,
            key=options.key,
            expires_at=None if options.expires_at_ms is None else instant(options.expires_at_ms),
            end_reason=record.end_reason,
            **({} if record.body is None else content(record.body)),
        )


class QueueAnswer(_Answer, kw_only=True):
    """A queue; while it is `paused` no job is handed out."""

    name: str
    paused: bool
    counts: Mapping[str, int]
    limits: Mapping[str, float | None]


class QueueNameAnswer(_Answer, kw_only=True):
    name: str


class QueuesAnswer(_Answer, kw_only=True):
    """`cursor`: of the next page; null after the last."""

    queues: Sequence[QueueNameAnswer]
    cursor: str | None


# --- values -------------------------------------------------------------------------------


def content(body: bytes) -> dict[str, Any]:
    """Return a job's bytes as the field that shows them: `data` if they are JSON, else `body`."""
    try:
        body.decode()
        msgspec.json.decode(body, type=Raw)
    except (UnicodeDecodeError, msgspec.DecodeError, RecursionError):
        return {"body": body}
    return {"data": Raw(body)}


def milliseconds(time: datetime | int) -> int:
    """Return a time of a body as milliseconds since the epoch."""
    if isinstance(time, int):
        return time
    return round(time.timestamp() * _MILLISECOND)


def since_1970(time: datetime | int | None, field: str, name: str) -> int | None:
    """Return a time of a body as milliseconds. Raises Mistake, which names `name` in `field`."""
    if time is None:
        return None
    time_ms = milliseconds(time)
    if time_ms < 0:
        raise Mistake(_within(field, name), "expected a time from 1970 on")
    return time_ms


def _within(field: str, name: str) -> str:
    return f"{field}.{name}" if field else name


def instant(time_ms: int) -> datetime:
    """Return milliseconds since the epoch as a time in UTC; the latest there is if beyond it."""
    try:
        return datetime.fromtimestamp(time_ms / _MILLISECOND, UTC)
    except (ValueError, OverflowError):
        return datetime.max.replace(tzinfo=UTC)
