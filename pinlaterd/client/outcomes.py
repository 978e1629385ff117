"""How a job ended, from what its handler returned or raised. Pure."""

from __future__ import annotations

import traceback
from enum import Enum
from typing import NamedTuple

from pinlaterd.client.retries import RetryRule, policy_for
from pinlaterd.client.running_job import Discard, Later, Retry, RunningJob

_MAX_STATUS_CHARS = 500
_MAX_PLACE_CHARS = 120


class Ending(Enum):
    SUCCEEDED = "succeeded"
    RETRIED = "retried"  # the attempt failed: PENDING again, or FAILED if it was the last
    DISCARDED = "discarded"
    POSTPONED = "postponed"  # by Later
    LOST = "lost"  # the claim was gone by then; nothing is said to the service


class Outcome(NamedTuple):
    """What the service is told of a job. `later` for POSTPONED alone."""

    ending: Ending
    status: str = ""
    retry_delay_ms: int = 0
    later: Later | None = None


def outcome_of_result(result: object) -> Outcome:
    """Of a handler that returned: a text is the job's status."""
    return Outcome(Ending.SUCCEEDED, _clean(result) if isinstance(result, str) else "")


def outcome_of_error(error: BaseException, job: RunningJob, rule: RetryRule) -> Outcome:
    """Of a handler that raised."""
    match error:
        case Discard():
            return Outcome(Ending.DISCARDED, _clean(error.reason))
        case Later():
            return Outcome(Ending.POSTPONED, later=error)
        case Retry():
            status, delay_seconds = error.status, error.delay_seconds
        case _:
            status, delay_seconds = _described(error), None
    if delay_seconds is None:
        delay_seconds = policy_for(rule, error)(job.attempt, error)
    if delay_seconds is None:
        return Outcome(Ending.DISCARDED, _clean(status))
    return Outcome(Ending.RETRIED, _clean(status), max(0, round(delay_seconds * 1000)))


def _described(error: BaseException) -> str:
    """`ValueError: no such address (mail.py:12 in send); `, cut in the message."""
    frames = traceback.extract_tb(error.__traceback__)
    place = ""
    if frames:
        last = frames[-1]
        file = last.filename.rpartition("/")[2]
        place = f" ({file}:{last.lineno} in {last.name})"[:_MAX_PLACE_CHARS]
    place += "; "
    return f"{type(error).__name__}: {error}"[: _MAX_STATUS_CHARS - len(place)] + place


def _clean(text: str) -> str:
    """Messages of exceptions may hold half surrogate pairs, which UTF-8 can't express."""
    return text.encode(errors="replace").decode()
