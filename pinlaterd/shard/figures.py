"""What a shard counts and measures; the names are PinLater's (see docs/operations.md).

Called once a call or once a batch, never once a job: what a batch's jobs have in common is
recorded as so many equal samples of their mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pinlaterd.engines.base import AckResult, CheckpointResult, Expired
from pinlaterd.model import Job, JobState, Payload
from pinlaterd.shard.ready import ReadyIndex
from pinlaterd.stats import Stats

_STATE_NAMES = {
    JobState.PENDING: "pending",
    JobState.IN_PROGRESS: "in_progress",
    JobState.SUCCEEDED: "succeeded",
    JobState.FAILED: "failed",
}
_GC_NAMES = {JobState.SUCCEEDED: "succeeded_gc", JobState.FAILED: "failed_gc"}


class Figures:
    """The figures of one shard."""

    def __init__(self, stats: Stats) -> None:
        self._stats = stats
        self._gauged: frozenset[str] = frozenset()
        # Of the batch at hand: jobs, first attempts among them, their delays added up.
        self._dequeued: dict[str, list[int]] = {}

    # --- calls -----------------------------------------------------------------------------

    def enqueued(self, queue: str, jobs: Sequence[Job]) -> None:
        count = len(jobs)
        self._stats.count(f"{queue}_enqueue", count)
        if count == 1:
            self._stats.record(f"job_body_size_{queue}", len(jobs[0][0]))
        elif count:
            mean = sum([len(job[0]) for job in jobs]) / count
            self._stats.record_many(f"job_body_size_{queue}", mean, count)

    def dequeued(self, queue: str, payloads: Sequence[Payload], delay_ms: int) -> None:
        """Jobs that were claimed together, `delay_ms` after the one in their middle was due."""
        count = len(payloads)
        first_attempts = sum([payload[1] == payload[2] for payload in payloads])
        found = self._dequeued.get(queue)
        if found is None:
            found = self._dequeued[queue] = [0, 0, 0]
        found[0] += count
        found[1] += first_attempts
        found[2] += delay_ms * count

    def end_batch(self) -> None:
        """Record what was dequeued in a batch."""
        for queue, (count, first_attempts, delays_ms) in self._dequeued.items():
            if count:
                mean_ms = delays_ms / count
                self._stats.count(f"{queue}_dequeue", count)
                self._stats.record_many(f"{queue}_dequeue_delay_ms", mean_ms, count)
                name = f"{queue}_first_dequeue_delay_ms"
                self._stats.record_many(name, mean_ms, first_attempts)
        self._dequeued.clear()

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

    # --- upkeep ----------------------------------------------------------------------------

    def expired(self, queue: str, result: Expired) -> None:
        if result.retried:
            self._stats.count(f"{queue}_timeout_retry", len(result.retried))
        if result.failed:
            self._stats.count(f"{queue}_timeout_done", result.failed)

    def collected(self, queue: str, state: JobState, jobs: int) -> None:
        if jobs:
            self._stats.count(f"{queue}_{_GC_NAMES[state]}", jobs)

    # --- once a second ---------------------------------------------------------------------

    def gauge_queues(
        self,
        depths: Mapping[str, Mapping[tuple[int, JobState], int]],
        ready: ReadyIndex,
        now_ms: int,
    ) -> None:
        """How deep the queues are, and how long the oldest ready job has waited. Those that are
        scheduled are among the pending ones."""
        for queue in self._gauged - depths.keys():
            for name in _STATE_NAMES.values():
                self._stats.drop_gauge(f"{queue}_{name}")
            self._stats.drop_gauge(f"{queue}_scheduled")
            self._stats.drop_gauge(f"{queue}_oldest_ready_age_ms")
        self._gauged = frozenset(depths)
        for queue, of_queue in depths.items():
            totals = dict.fromkeys(JobState, 0)
            for (_, state), jobs in of_queue.items():
                totals[state] += jobs
            for state, jobs in totals.items():
                self._stats.gauge(f"{queue}_{_STATE_NAMES[state]}", jobs)
            pending = {
                priority: jobs
                for (priority, state), jobs in of_queue.items()
                if state is JobState.PENDING and jobs
            }
            scheduled = ready.scheduled(queue, pending, now_ms) if queue in ready else 0
            self._stats.gauge(f"{queue}_scheduled", scheduled)
            oldest_ms = ready.oldest_ms(queue) if queue in ready else None
            age_ms = 0 if oldest_ms is None else now_ms - oldest_ms
            self._stats.peak(f"{queue}_oldest_ready_age_ms", age_ms)

    def gauge_health(self, *, ailing: bool) -> None:
        """Over several shards: how many ail."""
        self._stats.gauge("shard_ailing", ailing)

    def gauge_memory(self, held_bytes: int) -> None:
        """What is held in memory of ready jobs and fresh bodies."""
        self._stats.gauge("shard_buffer_bytes", held_bytes)
