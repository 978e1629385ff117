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
        if self.flush_if_over():
            self._begun = self._monotonic()
            self._written = 0
        if self._written < self._lines:
            self._written += 1
            self._log.warning("%s", line)
        else:
            self._left_out += 1

    def flush_if_over(self) -> bool:
        """Flush once the `seconds` have passed; whether they have. To be called now and then: no
        other warning may ever come."""
        is_over = self._monotonic() - self._begun >= self._seconds
        if is_over:
            self.flush()
        return is_over

    def flush(self) -> None:
        """Say how many were left out."""
        if self._left_out:
            self._log.warning("... and %d more lines like these", self._left_out)
            self._left_out = 0
