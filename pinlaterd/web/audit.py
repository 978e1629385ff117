"""The audit log data/audit.jsonl: who changed what by the dashboard, and how that ended.

A line each is written and fsynced before a change begins, and once its outcome is known; both bear
the change's number. Lines hold no bodies of jobs. Changes whose outcome is missing were cut short.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from pinlaterd.clock import Clock

log = logging.getLogger(__name__)

FAILED = "failed"  # how the outcome begins of a change that has changed nothing
_LATEST_MS = 253_402_300_799_999  # the end of the year 9999: pages can show no later time
_READ_BYTES = 1 << 20  # of the end of the log, in which the latest changes are


class Change(NamedTuple):
    """A change as the log has it: `facts` say what was asked for, `outcome` is "" until known."""

    number: int
    at_ms: int
    who: str
    what: str
    facts: Mapping[str, Any]
    outcome: str = ""


class _Line(msgspec.Struct):
    """A line of a change that begins, or, with its outcome, of one that ends."""

    number: int
    at_ms: Annotated[int, msgspec.Meta(ge=0, le=_LATEST_MS)]
    who: str = ""
    what: str = ""
    facts: dict[str, Any] | None = None
    outcome: str | None = None


class AuditLog:
    """The log of one deployment. Its methods block for the disk: call them beside the loop."""

    def __init__(self, path: Path, clock: Clock) -> None:
        self._path = path
        self._clock = clock
        self._last = 0
        # By the nonces of forms, so that none acts twice; one that failed may be sent again.
        self._numbers: dict[str, int] = {}
        self._is_read = False
        try:
            self._read()
        except OSError as error:  # it refuses changes then, and all pages are served
            log.error("the audit log can't be read: %s", error)

    def _read(self) -> None:
        """Read the numbers and nonces of earlier changes, unless that was done. Raises OSError."""
        if self._is_read:
            return
        changes = self.changes()
        self._last = max([self._last, *(change.number for change in changes)])
        for change in changes:
            nonce = change.facts.get("nonce")
            if isinstance(nonce, str) and not change.outcome.startswith(FAILED):
                self._numbers.setdefault(nonce, change.number)
        self._is_read = True

    def number_of(self, nonce: str) -> int | None:
        """Return the number of the change that a form with this nonce has begun; None: none.
        Raises OSError."""
        self._read()
        return self._numbers.get(nonce)

    def next_number(self, nonce: str = "") -> int:
        """Return the number of a change that is about to begin, by a form with this nonce. Raises
        OSError."""
        self._read()
        self._last += 1
        if nonce:
            self._numbers[nonce] = self._last
        return self._last

    def forget(self, nonce: str) -> None:
        """Let a form act again whose change has failed, or has not begun."""
        self._numbers.pop(nonce, None)

    def add_known(self, numbers: Mapping[str, int]) -> None:
        """Add changes that are known from elsewhere, by the nonces of their forms: none acts again,
        and no number is given again. The log may have been moved away, or be long."""
        self._numbers.update(numbers)
        self._last = max([self._last, *numbers.values()])

    def begin(self, number: int, who: str, what: str, facts: Mapping[str, Any]) -> None:
        """Store that a change is about to begin. Raises OSError."""
        self._append({"number": number, "who": who, "what": what, "facts": facts})

    def end(self, number: int, outcome: str) -> None:
        """Store how a change ended. Raises OSError."""
        self._append({"number": number, "outcome": outcome})

    def changes(self, before: int = sys.maxsize, most: int | None = None) -> Sequence[Change]:
        """Return the `most` latest changes with numbers below `before`, the newest first; by
        default those at the end of the log. Raises OSError."""
        last_bytes = _READ_BYTES
        while True:
            found = self._changes(last_bytes, before)
            if most is None or len(found) >= most or last_bytes >= self._size():
                return found[:most]
            last_bytes *= 4

    def _changes(self, last_bytes: int, before: int) -> Sequence[Change]:
        """Return the changes in the end of the log; numbers rise along it."""
        found: dict[int, Change] = {}
        for written in self._lines(last_bytes):
            with contextlib.suppress(ValueError):  # a crash may cut a line
                line = msgspec.json.decode(written, type=_Line)
                if line.outcome is not None:
                    if line.number in found:
                        found[line.number] = found[line.number]._replace(outcome=line.outcome)
                elif line.who and line.what and line.facts is not None and line.number < before:
                    fields = (line.at_ms, line.who, line.what, line.facts)
                    found[line.number] = Change(line.number, *fields)
        return sorted(found.values(), reverse=True, key=lambda change: change.number)

    def _size(self) -> int:
        try:
            return self._path.stat().st_size
        except FileNotFoundError:
            return 0

    def _lines(self, last_bytes: int) -> Iterator[bytes]:
        try:
            with self._path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - last_bytes))
                yield from file
        except FileNotFoundError:
            return

    def _append(self, entry: Mapping[str, Any]) -> None:
        line = msgspec.json.encode({"at_ms": self._clock.now_ms(), **entry})
        self._path.parent.mkdir(mode=0o700, exist_ok=True)
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        with os.fdopen(os.open(self._path, flags, 0o600), "ab") as file:
            file.write(b"\n" + line + b"\n")  # a line that a crash cut short ends before ours
            file.flush()
            os.fsync(file.fileno())
