"""What a shard counts and measures; the names are PinLater's (see docs/metrics.md).

Called once a call or once a batch, never once a job: the sizes and delays of all jobs of a batch
are recorded at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

from pinlaterd.engines.base import AckResult, CheckpointResult, Expired
from pinlaterd.model import Job, JobState, Payload
from pinlaterd.stats import Stats
from pinlaterd.stats.registry import BODY_SIZE

_GC_NAMES = {JobState.SUCCEEDED: "succeeded_gc", JobState.FAILED: "failed_gc"}


class Figures:
    """The figures of one shard."""

    def __init__(self, stats: Stats) -> None:
        self._stats = stats
        # Of the batch that is under way: delays of all jobs, and of those at their first attempt.
        self._delays_ms: dict[str, tuple[list[int], list[int]]] = {}

    # --- calls -----------------------------------------------------------------------------

    def enqueued(self, queue: str, jobs: Sequence[Job]) -> None:
        self._stats.count(f"{queue}_enqueue", len(jobs))
        sizes = [len(job[0]) for job in jobs]
        self._stats.record_each((f"{BODY_SIZE}{queue}",), sizes)

    def dequeued(self, queue: str, delays_ms: Sequence[int], payloads: Sequence[Payload]) -> None:
        """Jobs that were claimed, and how long after each was due."""
        found = self._delays_ms.get(queue)
        if found is None:
            found = self._delays_ms[queue] = ([], [])
        found[0].extend(delays_ms)
        first_attempts = [payload[1] == payload[2] for payload in payloads]
        found[1].extend(delays_ms if all(first_attempts) else compress(delays_ms, first_attempts))

    def end_batch(self) -> None:
        """Record what was dequeued in a batch."""
        for queue, (delays_ms, of_first_attempts) in self._delays_ms.items():
            if delays_ms:
                self._stats.count(f"{queue}_dequeue", len(delays_ms))
                each, first = f"{queue}_dequeue_delay_ms", f"{queue}_first_dequeue_delay_ms"
                if len(of_first_attempts) == len(delays_ms):
                    self._stats.record_each((each, first), delays_ms)
                else:
                    self._stats.record_each((each,), delays_ms)
                    self._stats.record_each((first,), of_first_attempts)
        self._delays_ms.clear()

    def mismatched(self, queue: str, jobs: int) -> None:
        """Jobs that were PENDING, as far as we knew, and could not be claimed."""
        self._stats.count(f"{queue}_claim_mismatch", jobs)

    def acked(self, queue: str, result: AckResult) -> None:
        if result.succeeded:
            self._stats.count(f"{queue}_ack_succeeded", result.succeeded)
        if result.failed:
            self._stats.count(f"{queue}_ack_failed", result.failed)
        if result.noop:
            self._stats.count(f"{queue}_ack_noop", result.noop)

    def checkpointed(self, queue: str, result: CheckpointResult) -> None:
        if result.done:
            self._stats.count(f"{queue}_checkpoint", result.done)
        if result.noop:
            self._stats.count(f"{queue}_checkpoint_noop", result.noop)

    # --- the loop --------------------------------------------------------------------------

    def committed(self, jobs: int, seconds: float) -> None:
        self._stats.record("shard_batch_jobs", jobs)
        self._stats.record("shard_commit_ms", seconds * 1000)

    def count(self, name: str, by: int = 1) -> None:
        """Something rare: calls discarded, searches that failed, …"""
        self._stats.count(f"shard_{name}", by)

    # --- maintenance -----------------------------------------------------------------------

    def expired(self, queue: str, result: Expired) -> None:
        if result.retried:
            self._stats.count(f"{queue}_timeout_retry", len(result.retried))
        if result.failed:
            self._stats.count(f"{queue}_timeout_done", result.failed)

    def collected(self, queue: str, state: JobState, jobs: int) -> None:
        if jobs:
            self._stats.count(f"{queue}_{_GC_NAMES[state]}", jobs)

    # --- once a second ---------------------------------------------------------------------

    def gauge_health(self, *, degraded: bool) -> None:
        """Over several shards: how many are degraded."""
        self._stats.gauge("shard_ailing", int(degraded))

    def gauge_clock(self, step_ms: float) -> None:
        """How far the machine's clock was stepped, either way, as far as this is not followed."""
        self._stats.peak("shard_clock_step_ms", round(abs(step_ms)))

    def gauge_memory(self, held_bytes: int) -> None:
        """What is held in memory of ready jobs and fresh bodies."""
        self._stats.gauge("shard_buffer_bytes", held_bytes)
