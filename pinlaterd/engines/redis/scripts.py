"""The scripts as the server runs them, and jobs and scores as they answer them and as commands hold
them (common.lua).

A script is a file of them behind what all share, called by name. They are loaded once, with the
first engine of a process; a server knows a text by its SHA-1. PinLater's own jobs may lack fields;
texts of theirs may be no UTF-8.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence
from importlib import resources
from typing import Any, NamedTuple

from pinlaterd.engines.base import EARLIEST_MS, LATEST_MS, Limits, StoredJob
from pinlaterd.model import JobKey, JobOptions, JobState, Payload, new_record

RUN_JOBS = 1000  # that one run of a script's arguments may be of (common.lua)


class Script(NamedTuple):
    name: str
    text: bytes
    sha: str
    writes: bool


def _read(name: str) -> bytes:
    return resources.files(__package__).joinpath(f"{name}.lua").read_bytes()


_SHARED = [_read("common"), _read("runs"), _read("jobs")]


def _scripts(file: str, *names: str, writes: bool = True) -> list[Script]:
    text = b"\n".join((*_SHARED, _read(file)))
    sha = hashlib.sha1(text, usedforsecurity=False).hexdigest()
    return [Script(name, text, sha, writes) for name in names]


[APPLY] = _scripts("apply", "apply")
OPEN, CLOSE, HEARTBEAT, TRY_ENQUEUE, HOLD, RELEASE_LEASE, CREATE_QUEUE, DELETE_QUEUE, VACUUM = (
    _scripts(
        *("owner", "open", "close", "heartbeat", "try_enqueue", "hold", "release_lease"),
        *("create_queue", "delete_queue", "vacuum"),
    )
)
[RAISE_FENCE] = _scripts("owner", "raise_fence")
RESCORE, FORGET, RETRY_FAILED, DELETE_FIRST, DELETE_KEYS, RELEASE_EXPIRED, EXPIRE_JOBS = _scripts(
    *("slices", "rescore", "forget", "retry_failed", "delete_first", "delete_found"),
    *("release_expired", "expire_jobs"),
)
[RETRY_KEYS] = _scripts("slices", "retry_found")
PENDING, PAGE, RUN_STARTS, PAYLOADS, LOOKUP, FIND_KEYS, DEPTHS = _scripts(
    *("reads", "pending", "page", "run_starts", "payloads", "lookup", "find_keys", "depths"),
    writes=False,
)


# --- jobs ---------------------------------------------------------------------------------------

LIMITS = Limits(
    queue_name_chars=64,
    body_bytes=256 << 20,  # a string of Redis ends at 512 MiB
    # Scores tell milliseconds and digits of ids apart up to here, the year 4147 (common.lua).
    run_after_ms=2**36 * 1000,
    custom_status_chars=3000,
    acks_replace_status=True,
)
# In front of the name of a queue whose layout is ours.
LEAN_MARK = "+"
_LARGEST_I32 = 2**31 - 1
_HEAD_FIELDS = 4
_NUMBER = re.compile(r"-?[0-9]{1,19}\Z", re.ASCII)
_LOCAL_ID = re.compile(rb"[1-9][0-9]{0,18}\Z")


def is_lean(stored_queue: str) -> bool:
    return stored_queue.startswith(LEAN_MARK)


def lean_head(attempts: int, now_ms: int, run_after_ms: int, status: str) -> bytes:
    """Encode what comes before the body of a job in a lean queue."""
    text = status.encode()
    return b"%d %d %d %d;%b" % (attempts, now_ms, run_after_ms, len(text), text)


def lean_payloads(
    records: Sequence[bytes | None], updates: Sequence[bytes | None]
) -> list[Payload | None]:
    """Decode what a lean queue holds of jobs as they were enqueued, and what has changed since.
    What was damaged by hand counts as missing."""
    payloads: list[Payload | None] = []
    known_head: bytes | None = None
    for record, update in zip(records, updates, strict=True):
        if record is None:
            payloads.append(None)
            continue
        head, _separator, body = record.partition(b";")
        if head != known_head:  # jobs that were enqueued together have the same
            known_head, fields = head, head.split(b" ")
            is_sound = len(fields) == _HEAD_FIELDS
            allowed = remaining = _attempts(fields[0] if is_sound else b"")
            status_bytes = _whole(fields[-1], _LARGEST_I32, 0) if is_sound else 0
        if not is_sound:
            body = record
        elif status_bytes:
            body = body[status_bytes:]
        if update is not None and update.count(b" ") > 2:
            first, second, _rest = update.split(b" ", 2)
            payloads.append(Payload(body, _attempts(first), _attempts(second)))
        else:
            payloads.append(new_record(Payload, (body, allowed, remaining)))
    return payloads


def plain_payloads(
    bodies: Sequence[bytes | None], allowed: Sequence[int], remaining: Sequence[int]
) -> list[Payload | None]:
    return [
        None if body is None else new_record(Payload, (body, first, second))
        for body, first, second in zip(bodies, allowed, remaining, strict=True)
    ]


def _attempts(field: bytes) -> int:
    return _whole(field, _LARGEST_I32, 1)


def _whole(field: bytes, most: int, otherwise: int) -> int:
    try:
        number = int(field)
    except ValueError:
        return otherwise
    return number if 0 <= number <= most else otherwise


def stored_job(key: JobKey, row: list[Any], *, with_body: bool) -> StoredJob:
    number, since_ms, allowed, remaining, status, created_ms, run_after_ms, updated_ms, *rest = row
    state, (claim, body, held, expiry, exact) = JobState(number), rest
    pending = state is JobState.PENDING
    expires_at, _, end_reason = (expiry or b"").decode(errors="replace").partition(" ")
    run_after, _, expires = (exact or b"").decode(errors="replace").partition(" ")
    numbers = [int(n) if _NUMBER.match(n) else None for n in (expires_at, run_after, expires)]
    expires_at_ms, run_after_us, expires_at_us = numbers
    name = None if held is None else held[1:].decode(errors="replace")
    of_all_queues = held is not None and held.startswith(b"*")  # else it stands behind '='
    options = JobOptions(name, expires_at_ms, of_all_queues, run_after_us, expires_at_us)
    return StoredJob(
        key,
        state,
        allowed,
        remaining,
        status.decode(errors="replace"),
        created_ms,
        since_ms if pending else run_after_ms,  # where the ready index finds it
        updated_ms if pending else since_ms,
        claim.decode(errors="replace") if claim and not pending else None,
        (body or b"") if with_body else None,
        None if options == JobOptions() else options,
        end_reason or None,
    )


def local_id(member: bytes) -> int | None:
    """Return the job whose number a member of a set is; None: a hand put it there."""
    return int(member) if _LOCAL_ID.match(member) else None


# --- scores of a queue ------------------------------------------------------------------------


def first_score(stored_queue: str, ms: int) -> str:
    """Return the least score that stands for `ms`, as a bound."""
    if ms <= EARLIEST_MS:
        return "-inf"
    return str(32 * ms) if is_lean(stored_queue) else repr((ms - 0.5) / 1000)


def score_behind(stored_queue: str, ms: int) -> str:
    """Return a bound above all scores that stand for `ms`, and below others."""
    return "+inf" if ms >= LATEST_MS else f"({first_score(stored_queue, ms + 1)}"


def to_ms(stored_queue: str, score: bytes) -> int:
    number = float(score) / 32 if is_lean(stored_queue) else float(score) * 1000 + 0.5
    return math.floor(max(-LIMITS.run_after_ms, min(2**63 - 1024, number)))
