"""What a shard in MySQL can hold, as the engine promises it. A table that PinLater made may hold
less, and says so (`Table.narrower`)."""

from __future__ import annotations

from pinlaterd.engines.base import Limits
from pinlaterd.engines.mysql.literals import LATEST_MS

_DATABASE_NAME_CHARS = 64
STATUS_CHARS = 5000
BODY_BYTES = 512 << 20  # as a literal at most twice that: the largest packet is 1 GiB


def database_prefix(shard: str) -> str:
    """Of the queues of a shard. A shard's name has no underscore, so it ends at the second one."""
    return f"plq_{shard}_"


def owner_database(shard: str) -> str:
    return f"plm_{shard}"


def limits_of(shard: str) -> Limits:
    return Limits(
        queue_name_chars=_DATABASE_NAME_CHARS - len(database_prefix(shard)),
        body_bytes=BODY_BYTES,
        run_after_ms=LATEST_MS,
        custom_status_chars=STATUS_CHARS,
    )
