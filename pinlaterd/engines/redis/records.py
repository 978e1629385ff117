"""A whole job as lookup.lua answers it, as a StoredJob.

PinLater's own jobs may lack fields; texts of theirs may be no UTF-8. Whatever a hand put
in place of a number counts as missing (common.lua).
"""

from __future__ import annotations

import math
import re
from typing import Any

from pinlaterd.engines.base import Limits, StoredJob
from pinlaterd.model import JobKey, JobState, Payload

LIMITS = Limits(
    queue_name_chars=64,
    body_bytes=256 << 20,  # a string of Redis ends at 512 MiB
    # Scores tell milliseconds and digits of ids apart up to here, the year 4147 (common.lua).
    run_after_ms=2**36 * 1000,
    custom_status_chars=3000,
    acks_replace_status=True,
)

# As ms_of in common.lua.
_EARLIEST_MS, _LATEST_MS = -(2**36) * 1000, 2**63 - 1024
_FEW: dict[bytes | None, int] = {str(number).encode(): number for number in range(100)}
_new = tuple.__new__  # half the cost of calling a NamedTuple, for each job of a batch
_LOCAL_ID = re.compile(rb"[1-9][0-9]{0,18}\Z")


_NO_HEAD = (b"", b"", b"0")
# In front of the name of a queue whose layout is ours (common.lua).
LEAN_MARK = "+"


def is_lean(stored_queue: str) -> bool:
    return stored_queue.startswith(LEAN_MARK)


def lean_head(attempts: int, status: str, now_ms: int) -> bytes:
    """What comes before the body of a job in a lean queue."""
    text = status.encode()
    return b"%d %d %d;%b" % (attempts, now_ms, len(text), text)


def lean_payload(record: bytes | None, update: bytes | None, _none: None = None) -> Payload | None:
    """Of what a lean queue holds of a job as it was enqueued, and of what has changed. What a hand
    has damaged counts as missing."""
    if record is None:
        return None
    head, _separator, rest = record.partition(b";")
    fields = head.split(b" ")
    allowed, _created, status_bytes = fields if len(fields) == 3 else _NO_HEAD
    remaining = allowed
    if update is not None and update.count(b" ") > 1:
        allowed, remaining, _rest = update.split(b" ", 2)
    body = rest if status_bytes == b"0" else rest[_whole(status_bytes, 0, len(rest), 0) :]
    return _new(Payload, (body, attempts_in(allowed, 1), attempts_in(remaining, 1)))


def stored_payload(
    body: bytes | None, allowed: bytes | None, remaining: bytes | None
) -> Payload | None:
    """None without a body. PinLater's jobs may lack the numbers."""
    if body is None:
        return None
    return _new(Payload, (body, attempts_in(allowed, 1), attempts_in(remaining, 1)))


def stored_job(key: JobKey, row: list[Any], *, with_body: bool) -> StoredJob:
    state, score, allowed, remaining, status, created, run_after, updated, claim, body = row
    job_state = JobState(int(state))
    since_ms = to_ms(score)
    if job_state is JobState.PENDING:
        # The score is where the ready index finds it.
        run_after_ms = since_ms
        updated_ms = _time_ms(updated, since_ms)
    else:
        run_after_ms = _whole(run_after, _EARLIEST_MS, _LATEST_MS, since_ms)
        updated_ms = since_ms
    return StoredJob(
        key,
        job_state,
        attempts_in(allowed, 1),
        attempts_in(remaining, 0),
        (status or b"").decode(errors="replace"),
        _time_ms(created, since_ms),
        run_after_ms,
        updated_ms,
        claim.decode(errors="replace") if claim and job_state is not JobState.PENDING else None,
        (body or b"") if with_body else None,
    )


def attempts_in(field: bytes | None, otherwise: int) -> int:
    """A number of attempts; `otherwise` if there is none in its field."""
    few = _FEW.get(field)
    return few if few is not None else _whole(field, 0, 2**31 - 1, otherwise)


def _whole(field: bytes | None, least: int, most: int, otherwise: int) -> int:
    try:
        number = int(field or b"")
    except ValueError:
        return otherwise
    return number if least <= number <= most else otherwise


def _time_ms(seconds: bytes | None, otherwise: int) -> int:
    try:
        ms = float(seconds or b"nan") * 1000
    except ValueError:
        return otherwise
    return math.floor(ms + 0.5) if _EARLIEST_MS <= ms <= _LATEST_MS else otherwise


def to_ms(seconds: bytes) -> int:
    """Of a score: a time in seconds with fraction. As common.lua rounds it."""
    return math.floor(max(_EARLIEST_MS, min(_LATEST_MS, float(seconds) * 1000 + 0.5)))


def local_id(member: bytes) -> int | None:
    """The job whose number a member of a set is; None: a hand put it there."""
    return int(member) if _LOCAL_ID.match(member) else None
