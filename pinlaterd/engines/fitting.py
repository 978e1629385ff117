"""How many claims of a batch fit, for engines that read bodies before they claim.

What has to fit is said in `base.ClaimOp`; here it is carried out, beside whatever reads bodies in
an engine. Pure but for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pinlaterd.engines.base import ClaimOp, ClaimRoom, Claims
from pinlaterd.model import Payload


class ReadPayloads(Protocol):
    """As StorageEngine.payloads, within the transaction that claims."""

    def __call__(
        self, queue: str, priority: int, local_ids: Sequence[int], *, most_bytes: int
    ) -> Sequence[Payload | None]: ...


def fitting_payloads(
    ops: Sequence[ClaimOp], room: ClaimRoom, read: ReadPayloads
) -> list[Sequence[Payload | None]]:
    """Of each op, the payloads of the first claims, as many as fit; None: there is no such job.

    A job that exists counts, be it PENDING or not."""
    left, first_of_batch = room.most_bytes, True
    found: list[Sequence[Payload | None]] = []
    for op in ops:
        if left <= 0 and not first_of_batch:
            found.append(())
            continue
        payloads: Sequence[Payload | None] = op.payloads
        if None in payloads:
            payloads = _with_missing(op, min(left, op.most_bytes), read)
        sizes = [len(payload[0]) + room.job_bytes if payload else None for payload in payloads]
        used = sum([size for size in sizes if size])
        if used > min(left, op.most_bytes):
            fitting, used = _fitting(sizes, op, left, first_of_batch=first_of_batch)
            payloads, sizes = payloads[:fitting], sizes[:fitting]
        left -= used
        first_of_batch = first_of_batch and sizes.count(None) == len(sizes)
        found.append(payloads)
    return found


def first_claims(op: ClaimOp, count: int) -> Sequence[Claims]:
    """The claims on the first `count` jobs of `op`."""
    first: list[Claims] = []
    for claims in op.claims:
        priority, keys, descriptors, payloads = claims
        jobs = len(keys)
        if jobs > count:
            if count:
                columns = keys[:count], descriptors[:count], payloads[:count]
                first.append(Claims(priority, *columns))
            return first
        first.append(claims)
        count -= jobs
    return first


def _fitting(
    sizes: Sequence[int | None], op: ClaimOp, left: int, *, first_of_batch: bool
) -> tuple[int, int]:
    """How many of the first `sizes` fit, and what they take; None: there is no such job.

    `left`: of the batch's room."""
    used, first = 0, True
    for at, size in enumerate(sizes):
        if size is None:
            continue
        if used + size > op.most_bytes and not (first and op.at_least_one):
            return at, used
        if used + size > left and not (first and first_of_batch):
            return at, used
        used += size
        first = False
    return len(sizes), used


def _with_missing(op: ClaimOp, most_bytes: int, read: ReadPayloads) -> list[Payload | None]:
    """The payloads of the first claims of `op`: those given, and between them those read, up to
    about `most_bytes` of bodies, or one."""
    payloads: list[Payload | None] = []
    for priority, keys, _, given in op.claims:
        missing = [
            key.local_id for key, payload in zip(keys, given, strict=True) if payload is None
        ]
        if not missing:
            payloads += given
            continue
        rows = read(op.queue, priority, missing, most_bytes=max(0, most_bytes))
        stored = iter(rows)
        for payload in given:
            if payload is not None:
                payloads.append(payload)
                continue
            try:
                payloads.append(next(stored))
            except StopIteration:
                return payloads
        most_bytes -= sum([len(row[0]) for row in rows if row is not None])
    return payloads
