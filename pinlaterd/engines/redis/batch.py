"""A Batch as the arguments of apply.lua, and its answer as a BatchResult.

Jobs that have much in common follow one another in a request, so what they have in common is sent
once for a run of them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
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
    Claims,
    Requeued,
)
from pinlaterd.engines.redis.connection import Argument
from pinlaterd.engines.redis.records import LIMITS, is_lean, lean_head, lean_payload, stored_payload
from pinlaterd.model import Job, Payload, PendingKey

T = TypeVar("T")

Places = set[tuple[str, int]]  # queues and priorities


def apply_arguments(batch: Batch, stored: Mapping[str, str], now_ms: int) -> list[Argument]:
    """`stored`: the names of queues as they are in keys."""
    places: Places = set()
    ops: list[Argument] = [len(batch.acks)]
    for op in batch.acks:
        queue = stored[op.queue]
        ops.append(queue)
        _add_acks(ops, places, queue, op.succeeded)
        _add_acks(ops, places, queue, op.failed)
    ops.append(len(batch.checkpoints))
    for checkpoints in batch.checkpoints:
        _add_checkpoints(ops, places, stored[checkpoints.queue], checkpoints, now_ms)
    ops.append(len(batch.releases))
    for releases in batch.releases:
        queue = stored[releases.queue]
        ops += (queue, len(releases.releases))
        for (priority, local_id), claim in releases.releases:
            places.add((queue, priority))
            ops += (priority, str(local_id), claim)
    jobs = {stored[queue]: enqueued for queue, enqueued in _jobs_by_queue(batch).items()}
    ops.append(len(jobs))
    for queue, enqueued in jobs.items():
        ops += (queue, len(enqueued))
        _add_jobs(ops, places, queue, enqueued, now_ms)
    ops += (*batch.claim_room, len(batch.claims))
    for claims in batch.claims:
        _add_claims(ops, places, stored[claims.queue], claims, batch.claim_room.job_bytes)
    return [
        "1" if jobs else "0",
        len(places),
        *[part for place in places for part in place],
        len(jobs),
        *jobs,
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


def _alike_acks(acks: Acks) -> tuple[int, str, int, bool]:
    priority, _, text, delay_ms, claim = acks
    return (priority, text, delay_ms, claim is not None)


def _add_acks(arguments: list[Argument], places: Places, queue: str, acks: Sequence[Acks]) -> None:
    """Those that name their claims come one by one, and go as one run."""
    runs = _runs(acks, _alike_acks)
    arguments.append(len(runs))
    for (priority, text, delay_ms, named), run in runs:
        places.add((queue, priority))
        ids = [str(local_id) for each in run for local_id in each[1]]
        arguments += (len(ids), priority, text, str(delay_ms), "1" if named else "0", *ids)
        if named:
            arguments += [each[4] or "" for each in run for _ in each[1]]


def _add_checkpoints(
    arguments: list[Argument], places: Places, queue: str, op: CheckpointOp, now_ms: int
) -> None:
    arguments += (queue, op.source, len(op.checkpoints))
    for key, run_after_ms, body, to_pending, attempts, text, claim in op.checkpoints:
        places.add((queue, key.priority))
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


def _jobs_by_queue(batch: Batch) -> dict[str, Sequence[Job]]:
    """Of all ops, in their order: each gets the ids that follow those of the ones before it."""
    if len(batch.enqueues) == 1 and batch.enqueues[0].jobs:
        return dict(batch.enqueues)
    found: dict[str, list[Job]] = {}
    for queue, jobs in batch.enqueues:
        if jobs:
            found.setdefault(queue, []).extend(jobs)
    return dict(found)


def _alike_jobs(job: Job) -> tuple[int, int | None, int, str]:
    return job[1:]


def _add_jobs(
    arguments: list[Argument], places: Places, queue: str, jobs: Sequence[Job], now_ms: int
) -> None:
    runs = _runs(jobs, _alike_jobs)
    arguments.append(len(runs))
    for (priority, run_after_ms, attempts, status), run in runs:
        places.add((queue, priority))
        run_after = now_ms if run_after_ms is None else run_after_ms
        arguments += (len(run), priority, str(run_after), str(attempts))
        text = status[: LIMITS.custom_status_chars]
        arguments.append(text)
        if is_lean(queue):
            head = lean_head(attempts, text, now_ms)
            arguments += [head + job[0] for job in run]
        else:
            arguments += [job[0] for job in run]


def _claim_runs(op: ClaimOp) -> list[Claims]:
    """Of one priority each, with payloads that all are known, or none is."""
    return [run for claims in op.claims for run in _parted_by_payload(claims)]


def _parted_by_payload(claims: Claims) -> Iterable[Claims]:
    priority, keys, descriptors, payloads = claims
    if None not in payloads:
        return (claims,)
    runs, begin = [], 0
    for _, alike in groupby(payloads, lambda payload: payload is None):
        part = slice(begin, begin := begin + len(list(alike)))
        runs.append(Claims(priority, keys[part], descriptors[part], payloads[part]))
    return runs


def _add_claims(
    arguments: list[Argument], places: Places, queue: str, op: ClaimOp, job_bytes: int
) -> None:
    runs = _claim_runs(op)
    arguments += (queue, op.most_bytes, "1" if op.at_least_one else "0", len(runs))
    for priority, keys, descriptors, payloads in runs:
        places.add((queue, priority))
        known = [len(payload[0]) for payload in payloads if payload is not None]
        known_bytes = str(sum(known) + len(known) * job_bytes) if known else ""
        arguments += (len(keys), priority, known_bytes)
        arguments += [str(key[1]) for key in keys]
        if is_lean(queue):
            arguments += [f"{key[0]} {claim}" for key, claim in zip(keys, descriptors, strict=True)]
        else:
            arguments += descriptors


# --- the answer -----------------------------------------------------------------------------


def batch_result(
    batch: Batch, stored: Mapping[str, str], answer: Sequence[Sequence[Any]]
) -> BatchResult:
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
        enqueues=_given_ids(batch, enqueues),
        claims=[
            _payloads(op, stored[op.queue], results)
            for op, results in zip(batch.claims, claims, strict=True)
        ],
    )


def _requeued(flat: Sequence[Any]) -> list[Requeued]:
    """Of priority, id, run-after in ms, and so on."""
    return [
        Requeued(int(priority), PendingKey(run_after_ms, int(local_id)))
        for priority, local_id, run_after_ms in zip(flat[::3], flat[1::3], flat[2::3], strict=True)
    ]


def _given_ids(batch: Batch, first_ids: Sequence[int]) -> list[range]:
    following = dict(zip(_jobs_by_queue(batch), first_ids, strict=True))
    given = []
    for queue, jobs in batch.enqueues:
        first = following.get(queue, 0)
        following[queue] = first + len(jobs)
        given.append(range(first, first + len(jobs)))
    return given


def _payloads(op: ClaimOp, queue: str, results: Sequence[int | list[Any]]) -> list[Payload | None]:
    payloads: list[Payload | None] = []
    read = lean_payload if is_lean(queue) else stored_payload
    for run, result in zip(_claim_runs(op), results, strict=True):
        if isinstance(result, int):
            payloads += run.payloads[:result]
        else:
            payloads += map(read, result[::3], result[1::3], result[2::3])
    return payloads
