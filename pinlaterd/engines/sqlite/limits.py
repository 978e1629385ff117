"""What an SQLite file can hold, as the engine promises it."""

from __future__ import annotations

from pinlaterd.engines.base import Limits

LIMITS = Limits(
    queue_name_chars=64,
    body_bytes=512 << 20,  # SQLite ends at 1,000,000,000 bytes a row
    run_after_ms=2**63 - 1,
    custom_status_chars=5000,
)
