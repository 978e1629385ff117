"""A Batch as the arguments of apply.lua, and its answer as a BatchResult.

Jobs that have much in common follow one another in a request, so what they have in common is sent
once for a run of them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import groupby
from typing import Any, TypeVar

from pinlaterd.engines.base import (
    AckResult,
    Acks,
    Batch,
    BatchResult,
    CheckpointOp,
    CheckpointResult,
    ClaimOp,
    EnqueueOp,
    Requeued,
)
from pinlaterd.engines.redis.connection import Argument
from pinlaterd.engines.redis.limits import LIMITS
from pinlaterd.engines.redis.records import attempts_in
from pinlaterd.model import Job, Payload, PendingKey

T = TypeVar("T")


Places = set[tuple[str, int]]  # queues and priorities


def apply_arguments(batch: Batch, now_ms: int) -> list[Argument]:
    growing = {op.queue for op in batch.enqueues if op.jobs}
    places: Places = set()
    ops: list[Argument] = [len(batch.acks)]
    for op in batch.acks:
        ops.append(op.queue)
        _add_acks(ops, places, op.queue, op.succeeded)
        _add_acks(ops, places, op.queue, op.failed)
    ops.append(len(batch.checkpoints))
    for checkpoints in batch.checkpoints:
        _add_checkpoints(ops, places, checkpoints, now_ms)
    ops.append(len(batch.releases))
    for releases in batch.releases:
        ops += (releases.queue, len(releases.releases))
        for (priority, local_id), claim in releases.releases:
            places.add((releases.queue, priority))
            ops += (priority, str(local_id), claim)
    ops.append(len(batch.enqueues))
    for enqueue in batch.enqueues:
        ops += (enqueue.queue, len(enqueue.jobs))
        _add_jobs(ops, places, enqueue, now_ms)
    ops += (*batch.claim_room, len(batch.claims))
    for claims in batch.claims:
        _add_claims(ops, places, claims)
    return [
        "1" if growing else "0",
        len(places),
        *[part for place in places for part in place],
        len(growing),
        *growing,
        now_ms,
        LIMITS.run_after_ms,
        LIMITS.custom_status_chars,
        *ops,
    ]


def _runs(items: Iterable[T], alike: Callable[[T], Hashable]) -> list[tuple[Any, list[T]]]:
    return [(head, list(run)) for head, run in groupby(items, alike)]


def _optional(value: bytes | str | int | None) -> bytes:
    if value is None:
        return b"-"
    return b"=" + (value if isinstance(value, bytes) else str(value).encode())


def _add_acks(arguments: list[Argument], places: Places, queue: str, acks: Sequence[Acks]) -> None:
    arguments.append(len(acks))
    for priority, local_ids, text, delay_ms, claim in acks:
        places.add((queue, priority))
        arguments += (len(local_ids), priority, text, str(delay_ms), _optional(claim))
        arguments += map(str, local_ids)


def _add_checkpoints(
    arguments: list[Argument], places: Places, op: CheckpointOp, now_ms: int
) -> None:
    arguments += (op.queue, op.source, len(op.checkpoints))
    for key, run_after_ms, body, to_pending, attempts, text, claim in op.checkpoints:
        places.add((op.queue, key.priority))
        arguments += (
            key.priority,
            str(key.local_id),
            str(now_ms if run_after_ms is None else run_after_ms),
            _optional(body),
            "1" if to_pending else "0",
            _optional(attempts),
            text or "",
            _optional(claim),
        )


def _alike_jobs(job: Job) -> tuple[int, int | None, int, str]:
    return job[1:]


def _add_jobs(arguments: list[Argument], places: Places, op: EnqueueOp, now_ms: int) -> None:
    runs = _runs(op.jobs, _alike_jobs)
    arguments.append(len(runs))
    for (priority, run_after_ms, attempts, status), run in runs:
        places.add((op.queue, priority))
        run_after = now_ms if run_after_ms is None else run_after_ms
        arguments += (len(run), priority, str(run_after), str(attempts))
        arguments.append(status[: LIMITS.custom_status_chars])
        arguments += [job[0] for job in run]


def _add_claims(arguments: list[Argument], places: Places, op: ClaimOp) -> None:
    arguments += (op.queue, op.most_bytes, "1" if op.at_least_one else "0", len(op.claims))
    for priority, *columns in op.claims:
        places.add((op.queue, priority))
        arguments += (len(columns[0]), priority)
        for (_, local_id), claim, payload in zip(*columns, strict=True):
            arguments += (str(local_id), claim, "" if payload is None else str(len(payload[0])))


# --- the answer -----------------------------------------------------------------------------


def batch_result(batch: Batch, answer: Sequence[Sequence[Any]]) -> BatchResult:
    acks, checkpoints, releases, enqueues, claims = answer
    return BatchResult(
        acks=[
            AckResult(succeeded, failed, noop, _requeued(requeued))
            for succeeded, failed, noop, *requeued in acks
        ],
        checkpoints=[
            CheckpointResult(done, noop, _requeued(requeued))
            for done, noop, *requeued in checkpoints
        ],
        releases=[_requeued(result) for result in releases],
        enqueues=[
            range(first, first + len(op.jobs))
            for first, op in zip(enqueues, batch.enqueues, strict=True)
        ],
        claims=[
            [_payload(given, result) for given, result in zip(op.payloads, results, strict=False)]
            for op, results in zip(batch.claims, claims, strict=True)
        ],
    )


def _requeued(flat: Sequence[Any]) -> list[Requeued]:
    """Of priority, id, run-after in ms, and so on."""
    return [
        Requeued(int(priority), PendingKey(run_after_ms, int(local_id)))
        for priority, local_id, run_after_ms in zip(flat[::3], flat[1::3], flat[2::3], strict=True)
    ]


def _payload(given: Payload | None, result: Any) -> Payload | None:
    if result == 0:
        return None
    return given if result == 1 else stored_payload(result)


def stored_payload(row: Sequence[bytes | None]) -> Payload:
    """Of body, attempts allowed and remaining. PinLater's jobs may lack the numbers."""
    body, allowed, remaining = row
    return Payload(body or b"", attempts_in(allowed, 1), attempts_in(remaining, 1))
