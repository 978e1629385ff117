"""What all parts of a shard share: calls as they arrive, and what is in memory beside the store.

The memory is cleared whenever ownership begins. What is in it, the store holds as well: losing it
costs reads, never jobs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from operator import gt
from typing import NamedTuple

from pinlaterd.config.schema import Config
from pinlaterd.engines.base import (
    AckResult,
    CheckpointResult,
    EnqueueOp,
    Expired,
    Requeued,
    StorageEngine,
)
from pinlaterd.errors import PinLaterError, QueueNotFound
from pinlaterd.model import Job, JobState, Payload, PendingKey
from pinlaterd.rpc import codec
from pinlaterd.rpc.codec import Head
from pinlaterd.shard.descriptors import ClaimDescriptors
from pinlaterd.shard.ready import ReadyIndex
from pinlaterd.shard.validation import Rules
from pinlaterd.stats import Stats
from pinlaterd.stats.registry import BODY_SIZE
from pinlaterd.wire.envelope import CallEntry, ReplyEntry, Status

# Of shard_buffer_bytes: half for fresh payloads, an eighth for keys.
_FRESH_PART, _KEYS_PART = 2, 8
# A PendingKey with its two numbers and its place in a list (CPython 3.11).
_KEY_BYTES = 136
# A Payload, the header of its body, its id and its place in a dict (CPython 3.11).
PAYLOAD_OVERHEAD_BYTES = 240
# Why a shard refuses calls, when the store does not say it better.
STORE_FAILED = "could not have its store carry it out"

_new = tuple.__new__  # half the cost of calling a NamedTuple, for each job of a batch
_GC_NAMES = {JobState.SUCCEEDED: "succeeded_gc", JobState.FAILED: "failed_gc"}


class Figures:
    """What a shard counts and measures; the names are PinLater's (see docs/metrics.md).

    Called once a call or once a batch, never once a job: sizes and delays of all jobs of a batch
    are recorded at once."""

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


class Arrival(NamedTuple):
    """A call and the router that it came from; makes the replies to it."""

    router: bytes
    entry: CallEntry

    def done(self, payload: bytes, jobs: int = 0) -> ReplyEntry:
        return _new(ReplyEntry, (self.entry.call_id, Status.DONE, payload, jobs))

    def failed(self, head: Head, error: PinLaterError) -> ReplyEntry:
        return ReplyEntry(self.entry.call_id, Status.FAILED, codec.encode_error(head, error))

    def refused(self, reason: str) -> ReplyEntry:
        """`reason`: what a caller is told of this shard if no other serves."""
        return ReplyEntry(self.entry.call_id, Status.REFUSED, reason.encode())

    def foreign(self) -> ReplyEntry:
        return ReplyEntry(self.entry.call_id, Status.FOREIGN, b"")


class FreshPayloads:
    """Payloads of jobs that were just enqueued and are due soon, by queue, priority and local id,
    so that a claim need not read them.

    Bounded in bytes: when full, newcomers are not kept, for those here are ahead of them in their
    queues. A payload here is what the store holds: a PENDING job's body and attempts don't change,
    and whatever deletes or claims the job takes it out of here."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._held_bytes = 0
        self._lines: dict[tuple[str, int], dict[int, Payload]] = {}

    @property
    def held_bytes(self) -> int:
        return self._held_bytes

    def keep(
        self, queue: str, priority: int, local_ids: Sequence[int], payloads: Sequence[Payload]
    ) -> None:
        """Keep them all, or none if there is no room."""
        size = sum([len(payload[0]) for payload in payloads])
        size += PAYLOAD_OVERHEAD_BYTES * len(payloads)
        if self._held_bytes + size > self._max_bytes:
            return
        self._held_bytes += size
        line = self._lines.setdefault((queue, priority), {})
        line.update(zip(local_ids, payloads, strict=True))

    def take(self, queue: str, priority: int, local_ids: Sequence[int]) -> Sequence[Payload | None]:
        """Take out those that are here, in the order of `local_ids`; None where there is none."""
        line = self._lines.get((queue, priority))
        if not line:
            return [None] * len(local_ids)
        pop = line.pop
        taken = [pop(local_id, None) for local_id in local_ids]
        found = [payload for payload in taken if payload] if None in taken else taken
        self._held_bytes -= sum([len(payload[0]) for payload in found if payload])
        self._held_bytes -= PAYLOAD_OVERHEAD_BYTES * len(found)
        return taken

    def drop_queue(self, queue: str) -> None:
        for name, priority in [place for place in self._lines if place[0] == queue]:
            for payload in self._lines.pop((name, priority)).values():
                self._held_bytes -= len(payload.body) + PAYLOAD_OVERHEAD_BYTES

    def clear(self) -> None:
        self._lines.clear()
        self._held_bytes = 0


class ShardState:
    """Of one shard. `config` is what it follows at present."""

    def __init__(self, name: str, engine: StorageEngine, config: Config, stats: Stats) -> None:
        server = config.server
        self.name = name
        self.config = config
        self.dequeue_only = False
        self.rules = Rules(engine.limits, engine.narrower, server)
        self.figures = Figures(stats)
        self.ready = ReadyIndex(
            engine,
            server.num_priority_levels,
            max_keys=server.shard_buffer_bytes // _KEYS_PART // _KEY_BYTES,
            max_run_after_ms=engine.limits.run_after_ms,
        )
        self.fresh = FreshPayloads(server.shard_buffer_bytes // _FRESH_PART)
        self.claim_descriptors = ClaimDescriptors(server, 0, position=0, shards=1)
        self.changed: set[str] = set()  # queues whose depths or figures may have changed
        self.touched: set[str] = set()  # queues whose ready counts may have changed, or are gone
        self.suspects: set[str] = set()  # queues that a foreign writer seems to change

    def follow(self, config: Config) -> None:
        """Go by `config` from the next call on, as far as it can change live."""
        self.config = config
        shard = config.shards.get(self.name)
        self.dequeue_only = shard is not None and shard.dequeue_only

    @property
    def held_bytes(self) -> int:
        return self.fresh.held_bytes + len(self.ready) * _KEY_BYTES

    def check_queue(self, queue: str) -> None:
        if queue not in self.ready:
            raise QueueNotFound(queue)

    def clear(self) -> None:
        self.ready.clear()
        self.fresh.clear()
        self.suspects.clear()

    # --- jobs become PENDING -----------------------------------------------------------------

    def index_stored(
        self, ops: Sequence[EnqueueOp], local_ids: Sequence[Sequence[int]], now_ms: int
    ) -> None:
        """Index all jobs that a commit has stored, and keep the payloads of those due soon.

        Once for all of a batch: with one job a call, this is a good part of what a call costs."""
        if len(ops) == 1:
            self._index(ops[0].queue, local_ids[0], ops[0].jobs, now_ms)
            return
        stored: dict[str, tuple[list[int], list[Job]]] = {}
        for (queue, jobs), ids in zip(ops, local_ids, strict=True):
            found = stored.get(queue)
            if found is None:
                found = stored[queue] = ([], [])
            found[0].extend(ids)
            found[1].extend(jobs)
        for queue, (all_ids, all_jobs) in stored.items():
            self._index(queue, all_ids, all_jobs, now_ms)

    def _index(
        self, queue: str, local_ids: Sequence[int], jobs: Sequence[Job], now_ms: int
    ) -> None:
        self.touched.add(queue)
        self.figures.enqueued(queue, jobs)
        priorities = {job[1] for job in jobs}
        if len(priorities) == 1:
            self._remember(queue, priorities.pop(), local_ids, jobs, now_ms)
            return
        for priority in priorities:
            chosen = [job[1] == priority for job in jobs]
            ids, of_priority = compress(local_ids, chosen), compress(jobs, chosen)
            self._remember(queue, priority, list(ids), list(of_priority), now_ms)

    def _remember(
        self, queue: str, priority: int, local_ids: Sequence[int], jobs: Sequence[Job], now_ms: int
    ) -> None:
        new = _new
        keys = [
            new(PendingKey, (now_ms if job[2] is None else job[2], local_id))
            for local_id, job in zip(local_ids, jobs, strict=True)
        ]
        if any(map(gt, keys, keys[1:])):
            # Earliest first. Keys differ, so that the jobs beside them are never compared.
            ordered = sorted(zip(keys, jobs, strict=True))
            keys = [key for key, _ in ordered]
            jobs = [job for _, job in ordered]
            local_ids = [key.local_id for key in keys]
        kept = self.ready.add(queue, priority, keys, now_ms)
        if kept:
            payloads = [new(Payload, (job[0], job[3], job[3])) for job in jobs[:kept]]
            self.fresh.keep(queue, priority, local_ids[:kept], payloads)

    def requeue(self, queue: str, requeued: Sequence[Requeued], now_ms: int) -> None:
        """Jobs became PENDING again."""
        if not requeued:
            return
        self.touched.add(queue)
        if queue not in self.ready:
            return
        by_priority: dict[int, list[PendingKey]] = {}
        for priority, key in requeued:
            by_priority.setdefault(priority, []).append(key)
        for priority, keys in by_priority.items():
            keys.sort()
            self.ready.add(queue, priority, keys, now_ms)

    def forget(self, queue: str, priority: int, local_ids: Sequence[int]) -> None:
        """Jobs were deleted."""
        self.ready.discard(queue, priority, local_ids)
        self.fresh.take(queue, priority, local_ids)
        self.touched.add(queue)
