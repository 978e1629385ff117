"""A log that a flood of hostile connections cannot fill."""

from __future__ import annotations

import logging
from collections.abc import Callable


class LimitedLog:
    """At most `lines` warnings in any `seconds`; how many more there were is said afterwards."""

    def __init__(
        self, log: logging.Logger, monotonic: Callable[[], float], lines: int, seconds: float
    ) -> None:
        self._log = log
        self._monotonic = monotonic
        self._lines = lines
        self._seconds = seconds
        self._begun = -seconds
        self._written = 0
        self._left_out = 0

    def warning(self, line: str) -> None:
        now = self._monotonic()
        if now - self._begun >= self._seconds:
            self.flush()
            self._begun = now
            self._written = 0
        if self._written < self._lines:
            self._written += 1
            self._log.warning("%s", line)
        else:
            self._left_out += 1

    def flush(self) -> None:
        """Say how many were left out."""
        if self._left_out:
            self._log.warning("... and %d more lines like these", self._left_out)
            self._left_out = 0
