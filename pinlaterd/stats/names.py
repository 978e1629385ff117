"""The names of a queue's figures: `<queue>_<figure>`, but for `job_body_size_<queue>`.

docs/metrics.md lists them, with the names that Prometheus has for them.
"""

from __future__ import annotations

from collections.abc import Iterator

BODY_SIZE = "job_body_size_"
STATES = ("pending", "in_progress", "succeeded", "failed")
COUNTERS = (
    "enqueue",
    "dequeue",
    "dequeue_requests_rate_limited",
    "claim_mismatch",
    "ack_succeeded",
    "ack_failed",
    "ack_noop",
    "checkpoint",
    "checkpoint_noop",
    "timeout_done",
    "timeout_retry",
    "succeeded_gc",
    "failed_gc",
)
GAUGES = ("scheduled", "oldest_ready_age_ms", "rate_limit", "rate_share", "rate_demand")
HISTOGRAMS = ("dequeue_delay_ms", "first_dequeue_delay_ms")


def names_of(queue: str) -> Iterator[str]:
    """Every name that a figure of `queue` may have."""
    yield BODY_SIZE + queue
    for figure in (*STATES, *COUNTERS, *GAUGES, *HISTOGRAMS):
        yield f"{queue}_{figure}"
