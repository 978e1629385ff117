"""What a Redis shard can hold, as the engine promises it."""

from __future__ import annotations

from pinlaterd.engines.base import Limits

LIMITS = Limits(
    queue_name_chars=64,
    body_bytes=256 << 20,  # a string of Redis ends at 512 MiB
    # Scores tell milliseconds and digits of ids apart up to here, the year 4147 (common.lua).
    run_after_ms=2**36 * 1000,
    custom_status_chars=3000,
    acks_replace_status=True,
)
