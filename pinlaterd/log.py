"""One line a record on stderr, which supervisord keeps and rotates in run/log.

2026-11-21T03:00:00.123Z INFO shard-1 message
"""

from __future__ import annotations

import logging
import sys
import time


class _OneLine(logging.Formatter):
    """UTC, and no line break from data: nobody can forge a record through a queue's name."""

    converter = staticmethod(time.gmtime)
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s %(levelname)s {process} %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        return super().formatMessage(record).replace("\n", "\\n").replace("\r", "\\r")


def set_up(process: str, level: str) -> None:
    """Log as `process` from `level` (debug, info, warning, error) up. Safe to repeat."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLine(process))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
