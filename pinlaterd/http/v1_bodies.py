"""The JSON of Rickover's interface, read as leniently as Rickover does.

The first value of a body counts, and what follows it is ignored. Keys match without regard to case,
unknown ones are ignored, and null leaves a field as it was. `data` stays the text that was written.
Half a surrogate pair is read as the zero character, since Rickover's database refuses both alike.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Annotated, TypeVar

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from pinlaterd.config.schema import DELIVERY_STRATEGIES, JobType
from pinlaterd.http.bodies import content, instant
from pinlaterd.http.v1_errors import bad_json
from pinlaterd.model import EXPIRED, JobDescriptor, JobOptions, JobRecord, JobState

T = TypeVar("T")

INT16 = Annotated[int, Meta(ge=-(2**15), le=2**15 - 1)]
Positive = Annotated[int, Meta(ge=1, le=2**15 - 1)]
Strategy = Annotated[str, Meta(extra_json_schema={"enum": list(DELIVERY_STRATEGIES)})]
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_NULL = b"null"
_first_value = json.JSONDecoder(parse_int=len, parse_float=len).raw_decode
_SPACE = " \t\r\n"
# Each escape of a text; a group has what is half a surrogate pair.
_ESCAPE = re.compile(
    r"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)", re.DOTALL
)
_fields = msgspec.json.Decoder(dict[str, Raw])
_TIME = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:[.,](\d+))?(Z|[+-]\d\d:\d\d)\Z", re.ASCII)


class Fields:
    """The fields of a body, by their names in lower case."""

    def __init__(self, body: bytes | bytearray) -> None:
        """Raises RestError if the body is no JSON object."""
        try:
            text = body.decode()
            try:
                found = _fields.decode(body)
            except msgspec.DecodeError:
                start = len(text) - len(text.lstrip(_SPACE))
                first = text[start : _first_value(text, start)[1]]
                first = _ESCAPE.sub(lambda each: r"\u0000" if each[1] else each[0], first)
                found = _fields.decode(first.encode())
        except (ValueError, RecursionError, msgspec.DecodeError):
            raise bad_json() from None
        self._found: Mapping[str, Raw] = {key.casefold(): value for key, value in found.items()}

    def raw(self, name: str) -> bytes | None:
        """Return a field as it was written; None if it is absent."""
        value = self._found.get(name)
        return None if value is None else bytes(value)

    def get(self, name: str, kind: type[T], default: T) -> T:
        """Return a field, or `default` if it is absent or null. Raises RestError."""
        value = self.raw(name)
        if value is None or value == _NULL:
            return default
        try:
            return msgspec.json.decode(value, type=kind)
        except (msgspec.DecodeError, RecursionError):
            raise bad_json() from None

    def time(self, name: str) -> datetime | None:
        """Return a time with a zone. Raises RestError."""
        text = self.get(name, str, "\0")
        if text == "\0":
            return None
        found = _TIME.fullmatch(text)
        try:
            if found is not None:
                seconds, fraction, zone = found.groups()
                return datetime.fromisoformat(f"{seconds}.{(fraction or '0')[:6]:0<6}{zone}")
        except ValueError:
            pass
        raise bad_json()


def exact_time(time: datetime | None) -> tuple[int | None, int | None]:
    """Return a time as milliseconds since 1970, and as microseconds where these say more."""
    if time is None:
        return None, None
    time_us = max(0, (time - _EPOCH) // timedelta(microseconds=1))
    return time_us // 1000, time_us if time_us % 1000 else None


def _shown_exactly(time_ms: int, time_us: int | None) -> str:
    """Write a time with its microseconds, if these are still of the same time."""
    if time_us is None or time_us // 1000 != time_ms:
        return shown(instant(time_ms))
    return shown(instant(time_ms).replace(microsecond=time_us % 1_000_000))


def shown(time: datetime) -> str:
    """Write a time in UTC, its fraction as short as it can be."""
    text = time.astimezone(UTC).replace(tzinfo=None).isoformat()
    return f"{text.rstrip('0') if '.' in text else text}Z"


_STATES = {
    JobState.PENDING: "queued",
    JobState.IN_PROGRESS: "in-progress",
    JobState.SUCCEEDED: "succeeded",
    JobState.FAILED: "failed",
}


def status_of(record: JobRecord) -> str:
    is_expired = record.state is JobState.FAILED and record.end_reason == EXPIRED
    return EXPIRED if is_expired else _STATES[record.state]


def job_answer(record: JobRecord, name: str) -> Mapping[str, object]:
    """Show a job of the type `name`; once it has ended, as an archived job."""
    options = record.options or JobOptions()
    expires_at_ms, body = options.expires_at_ms, record.body or b""
    parsed = JobDescriptor.parse(record.descriptor)
    is_queued = record.state in (JobState.PENDING, JobState.IN_PROGRESS)
    status = status_of(record)
    shown_later = {
        "expires_at": (
            None if expires_at_ms is None else _shown_exactly(expires_at_ms, options.expires_at_us)
        ),
        "data": content(body).get("data", body),
        "auto_id": parsed.local_id if parsed is not None else 0,
    }
    answer = {"id": options.key, "name": name, "attempts": record.attempts_remaining}
    updated_at = shown(instant(record.updated_at_ms))
    if not is_queued:
        return {**answer, "status": status, "created_at": updated_at, **shown_later}
    times = {
        "run_after": _shown_exactly(record.run_after_ms, options.run_after_us),
        "created_at": shown(instant(record.created_at_ms)),
        "updated_at": updated_at,
    }
    return {**answer, **times, "status": status, **shown_later}


# These structs describe job types for /v2/openapi.json; requests are read by `Fields`, which is
# more lenient.


class JobTypeNumbers(Struct):
    """The numbers of a job type, of which a change gives some."""

    attempts: Positive | UnsetType = UNSET
    concurrency: Positive | UnsetType = UNSET


class JobTypeBody(Struct):
    """A job type to create."""

    name: str
    delivery_strategy: Strategy
    attempts: Positive
    concurrency: Positive


class JobTypeAnswer(JobTypeBody):
    """A job type that there is."""

    created_at: Annotated[str, Meta(extra_json_schema={"format": "date-time"})]


def job_type_answer(job_type: JobType) -> JobTypeAnswer:
    """Return a job type as the interface shows it."""
    return JobTypeAnswer(
        name=job_type.name,
        delivery_strategy=job_type.delivery_strategy,
        attempts=job_type.attempts,
        concurrency=job_type.concurrency,
        created_at=shown(job_type.created_at),
    )
