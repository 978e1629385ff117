"""The signature of a failure: what a custom status says, without what differs from job to job.

Pure. A worker appends to the custom status what each failed attempt had to say, such as
`ValueError: no address in 'x' (mail.py:12 in send < queue.py:3 in run); `, without the `; ` at its
end if no attempt follows. Of a job that was retried after its last one, what the next says follows
directly. (In a Redis store the last attempt's text takes the place of the earlier ones.) The
signature is that of the last attempt: jobs that failed alike have equal ones.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

MOST_CHARS: Final = 200  # of a message, and of a place
TIMED_OUT: Final = "claim timed out"
UNSAID: Final = "claim timed out, or no status given"
_READ_CHARS: Final = 1_000  # of the last attempt

_PLACE: Final = re.compile(r"\(([^()]*:\d+ in [^()]*)\)")
# Quotes that the cut of a long status has left open reach to its end. Digits within brackets stay.
_VARYING: Final = re.compile(
    r"0[xX][0-9a-fA-F]+"
    r"|[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}"
    r'|"[^"]*(?:"|\Z)'
    r"|(?<!\w)'[^']*(?:'(?!\w)|\Z)"
    r"|\d++(?![^()]*+\))"
)
_BETWEEN: Final = re.compile(r"(?<=\)); ")
# What may be the end of an attempt of a job that was retried after it. Where no bracket closes, a
# look for a place would cost the square of the length.
_RETRIED: Final = re.compile(r"\([^()]*+\)(?=[^\W\d_])")


class Signature(NamedTuple):
    """A message with `#` for what varies, and where it was raised: `mail.py:12 in send`, or ""."""

    message: str
    place: str = ""

    def __str__(self) -> str:
        return f"{self.message} ({self.place})" if self.place else self.message


def signature(status: str, *, failed: bool = False) -> Signature:
    """Return the signature of the last attempt in a custom status.

    `failed`: of a job that has FAILED, whose last attempt may have said nothing: its claim has
    timed out if the status ends as one does that another attempt follows."""
    said = _last_attempt(status)
    if failed and not said:
        return Signature(TIMED_OUT if status else UNSAID)
    said = (said or _last_attempt(status.removesuffix("; "))).strip("; ")
    opening = said.rfind("(")
    # A match costs the square of the length if it meets a closing bracket before the end.
    ends_there = opening >= 0 and said.find(")", opening) == len(said) - 1
    place = _PLACE.fullmatch(said, opening) if ends_there else None
    if place is not None:
        said = said[:opening].rstrip()
    message = _VARYING.sub("#", said[:_READ_CHARS])
    # Attempts of a retried job that name no place, and failed alike: nothing is between them.
    message = message[: (message + message).find(message, 1)][:MOST_CHARS]
    return Signature(message, place[1][:MOST_CHARS] if place is not None else "")


def attempts_of(status: str) -> Sequence[str]:
    """Return what each attempt had to say that named a place or was the last one, in order."""
    parts = _BETWEEN.split(_RETRIED.sub(_separated, status))
    return [said.removesuffix("; ") for said in parts if said]


def _separated(found: re.Match[str]) -> str:
    return f"{found[0]}; " if _PLACE.fullmatch(found[0]) else found[0]


def _last_attempt(status: str) -> str:
    """Return what follows the last attempt that another one follows."""
    end = len(status)
    while (close := status.rfind(")", 0, end)) >= 0:
        behind = status[close + 1 : close + 3]
        if behind != "; " and not behind[:1].isalpha():  # of a retried job, directly
            end = close
            continue
        opening = status.rfind("(", 0, close)
        if opening < 0:
            break
        first = status.find(")", opening)
        if first == close and _PLACE.fullmatch(status, opening, close + 1):
            return status[close + 3 :] if behind == "; " else status[close + 1 :]
        # No part is looked at twice: whoever acks may send megabytes.
        end = first + 1 if first < close else opening
    return status
