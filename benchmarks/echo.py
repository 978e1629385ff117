"""A shard that stores nothing: it hands out ids and takes every ack at its word.

It shows what Thrift, ZeroMQ and the loop cost, and so what they leave to storage. Imported by the
sitecustomize.py of `deployment.patched`.
"""

from __future__ import annotations

import itertools
import sys

# ruff: noqa: PLC0415  every process of a service imports this, and shards alone need the rest


def install() -> None:
    """In a shard's process that starts."""
    if "pinlaterd" not in sys.orig_argv or "shard" not in sys.orig_argv:
        return
    from pinlaterd.engines.base import AckResult, Batch, BatchResult, CheckpointResult
    from pinlaterd.engines.sqlite.engine import SqliteEngine

    ids = itertools.count(1)

    def apply(_engine: SqliteEngine, batch: Batch, _now_ms: int) -> BatchResult:
        return BatchResult(
            acks=[AckResult(op.jobs, 0, 0, ()) for op in batch.acks],
            checkpoints=[CheckpointResult(len(op.checkpoints), 0, ()) for op in batch.checkpoints],
            releases=[() for _ in batch.releases],
            enqueues=[list(itertools.islice(ids, len(op.jobs))) for op in batch.enqueues],
            claims=[op.payloads for op in batch.claims],
        )

    SqliteEngine.apply = apply  # type: ignore[method-assign,assignment]
