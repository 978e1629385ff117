"""A storage engine that stores nothing: it hands out ids and takes every ack at its word.

A shard with it shows what Thrift, ZeroMQ and the loop cost, and so what they leave to storage.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence

from pinlaterd.engines.base import (
    NO_TIME_MS,
    AckResult,
    Batch,
    BatchResult,
    CheckpointResult,
    Durability,
    Expired,
    Limits,
    Ownership,
    Requeued,
    SearcherFactory,
    StorageEngine,
    StoredJob,
    TableLimits,
)
from pinlaterd.model import JobKey, JobState, Payload, PendingKey


class EchoEngine(StorageEngine):
    """Fulfils StorageEngine: queues are kept in memory, jobs are not kept at all."""

    limits = Limits(
        queue_name_chars=64, body_bytes=1 << 20, run_after_ms=1 << 62, custom_status_chars=5000
    )

    def __init__(self) -> None:
        self._ids = itertools.count(1)
        self._queues: set[str] = set()

    @property
    def trouble(self) -> str:
        return ""

    def open(self, now_ms: int) -> Ownership:
        return Ownership(start_ms=now_ms, clean=True)

    def close(self) -> None:
        self._queues.clear()

    def heartbeat(self) -> None:
        pass

    def address(self) -> str:
        return ""

    def durability(self) -> Durability:
        return Durability("none", "nothing is stored")

    def apply(self, batch: Batch, now_ms: int) -> BatchResult:
        return BatchResult(
            acks=[AckResult(op.jobs, 0, 0, ()) for op in batch.acks],
            checkpoints=[CheckpointResult(len(op.checkpoints), 0, ()) for op in batch.checkpoints],
            releases=[() for _ in batch.releases],
            enqueues=[list(itertools.islice(self._ids, len(op.jobs))) for op in batch.enqueues],
            claims=[op.payloads for op in batch.claims],
        )

    def queues(self) -> frozenset[str]:
        return frozenset(self._queues)

    def narrower(self, queue: str) -> Mapping[int, TableLimits]:
        return {}

    def create_queue(self, queue: str, now_ms: int) -> None:
        self._queues.add(queue)

    def delete_queue(self, queue: str) -> None:
        self._queues.discard(queue)

    def read_pending(
        self, queue: str, priority: int, *, after: PendingKey | None, until_ms: int, limit: int
    ) -> Sequence[PendingKey]:
        return ()

    def payloads(
        self, queue: str, priority: int, local_ids: Sequence[int], *, most_bytes: int
    ) -> Sequence[Payload | None]:
        return [None] * len(local_ids)

    def lookup(
        self, queue: str, keys: Sequence[JobKey], *, include_body: bool
    ) -> Sequence[StoredJob]:
        return ()

    def depths(
        self, queues: Collection[str] | None = None
    ) -> Mapping[str, Mapping[tuple[int, JobState], int]]:
        return {queue: {} for queue in self._queues}

    def retry_failed(
        self,
        queue: str,
        priority: int,
        *,
        attempts: int,
        run_after_ms: int,
        limit: int,
        now_ms: int,
    ) -> Sequence[Requeued]:
        return ()

    def oldest_failed(self, queue: str, priority: int, *, limit: int) -> Sequence[int]:
        return ()

    def delete_jobs(
        self, queue: str, state: JobState, priority: int, *, limit: int
    ) -> Sequence[JobKey]:
        return ()

    def delete_keys(self, queue: str, state: JobState, keys: Sequence[JobKey]) -> Sequence[JobKey]:
        return ()

    def release_expired(
        self,
        queue: str,
        *,
        claimed_before_ms: int,
        limit: int,
        now_ms: int,
        claimed_after_ms: int = NO_TIME_MS,
    ) -> Expired:
        return Expired((), 0)

    def collect_garbage(
        self, queue: str, state: JobState, *, updated_before_ms: int, limit: int
    ) -> int:
        return 0

    def vacuum(self, *, limit: int) -> bool:
        return False

    def searcher(self) -> SearcherFactory:
        raise NotImplementedError("an engine that stores nothing cannot be searched")
