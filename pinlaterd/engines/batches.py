"""What engines share in carrying out a batch: the order of acks, and how many claims fit.

Acks that commute are carried out together, one statement for all jobs of a queue and priority. What
has to fit is said in `base.ClaimOp`. Pure, but for what an engine passes in.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import takewhile
from typing import NamedTuple, Protocol

from pinlaterd.engines.base import AckOp, AckResult, Acks, ClaimOp, ClaimRoom, Claims, Requeued
from pinlaterd.model import Payload

_NOBODY: frozenset[int] = frozenset()
_Place = tuple[str, int]  # queue and priority


# --- acks -----------------------------------------------------------------------------------


class Failed(NamedTuple):
    """What failed acks came to: local ids of those that did not apply, and the jobs that have
    attempts left."""

    missed: AbstractSet[int]
    requeued: Sequence[Requeued]


class AckActions(NamedTuple):
    """How an engine ends attempts of one queue and priority, none of them named twice."""

    succeed: Callable[[str, int, Sequence[Acks]], AbstractSet[int]]
    """Returns the local ids of acks that do not apply."""
    fail: Callable[[str, int, Sequence[Acks]], Failed]


def local_ids_of(acks: Iterable[Acks]) -> list[int]:
    return [local_id for alike in acks for local_id in alike[1]]


def apply_acks(ops: Sequence[AckOp], actions: AckActions) -> list[AckResult]:
    """Ops that name no job twice commute, and are carried out together: successes, then failures.
    Otherwise each goes in its turn, and within it each ack where that makes a difference."""
    acks = _Grouped(ops)
    if acks.name_no_job_twice():
        return _together(ops, acks, actions)
    return [_alone(op, actions) for op in ops]


class _Grouped:
    """The acks of ops, by queue and priority."""

    def __init__(self, ops: Sequence[AckOp]) -> None:
        self.succeeded: defaultdict[_Place, list[Acks]] = defaultdict(list)
        self.failed: defaultdict[_Place, list[Acks]] = defaultdict(list)
        for queue, succeeded, failed in ops:
            for alike in succeeded:
                self.succeeded[queue, alike[0]].append(alike)
            for alike in failed:
                self.failed[queue, alike[0]].append(alike)

    def name_no_job_twice(self) -> bool:
        for place in self.succeeded.keys() | self.failed.keys():
            local_ids = local_ids_of((*self.succeeded.get(place, ()), *self.failed.get(place, ())))
            if len(set(local_ids)) != len(local_ids):
                return False
        return True


def _together(ops: Sequence[AckOp], grouped: _Grouped, actions: AckActions) -> list[AckResult]:
    missed: dict[_Place, AbstractSet[int]] = {}
    for place, acks in grouped.succeeded.items():
        if lost := actions.succeed(*place, acks):
            missed[place] = lost
    requeued: dict[_Place, Mapping[int, Requeued]] = {}
    for place, acks in grouped.failed.items():
        done = actions.fail(*place, acks)
        if done.missed:
            missed[place] = missed.get(place, _NOBODY) | done.missed
        requeued[place] = {job.key.local_id: job for job in done.requeued}
    return [_result(op, missed, requeued) for op in ops]


def _result(
    op: AckOp,
    missed: Mapping[_Place, AbstractSet[int]],
    requeued: Mapping[_Place, Mapping[int, Requeued]],
) -> AckResult:
    if not missed and not op.failed:
        return AckResult(op.jobs, 0, 0, [])

    def applied(acks: Sequence[Acks]) -> int:
        jobs = sum([len(alike[1]) for alike in acks])
        for priority, local_ids, *_ in acks if missed else ():
            lost = missed.get((op.queue, priority), _NOBODY)
            jobs -= sum([local_id in lost for local_id in local_ids])
        return jobs

    succeeded, failed = applied(op.succeeded), applied(op.failed)
    again = [
        job
        for priority, local_ids, *_ in op.failed
        for local_id in local_ids
        if (job := requeued[op.queue, priority].get(local_id)) is not None
    ]
    return AckResult(succeeded, failed, op.jobs - succeeded - failed, again)


def _alone(op: AckOp, actions: AckActions) -> AckResult:
    once = _without_repetitions(op)
    grouped = _Grouped([once])
    if grouped.name_no_job_twice():
        [result] = _together([once], grouped, actions)
    else:
        result = _ack_by_ack(once, actions)
    return result._replace(noop=result.noop + op.jobs - once.jobs)


def _without_repetitions(op: AckOp) -> AckOp:
    """Of the acks of one job under one claim only the first can apply: either it ends the claim, or
    that is not held."""
    seen: set[tuple[int, int, str | None]] = set()

    def first_of(acks: Sequence[Acks]) -> list[Acks]:
        firsts = []
        for alike in acks:
            local_ids = []
            for local_id in alike.local_ids:
                which = (alike.priority, local_id, alike.claim_descriptor)
                if which not in seen:
                    seen.add(which)
                    local_ids.append(local_id)
            if local_ids:
                firsts.append(alike._replace(local_ids=local_ids))
        return firsts

    return AckOp(op.queue, first_of(op.succeeded), first_of(op.failed))


def _ack_by_ack(op: AckOp, actions: AckActions) -> AckResult:
    singles = [AckOp(op.queue, [ack], ()) for ack in _one_by_one(op.succeeded)]
    singles += [AckOp(op.queue, (), [ack]) for ack in _one_by_one(op.failed)]
    results = [_together([single], _Grouped([single]), actions)[0] for single in singles]
    return AckResult(
        succeeded=sum(result.succeeded for result in results),
        failed=sum(result.failed for result in results),
        noop=sum(result.noop for result in results),
        requeued=[requeued for result in results for requeued in result.requeued],
    )


def _one_by_one(acks: Sequence[Acks]) -> list[Acks]:
    return [alike._replace(local_ids=(local_id,)) for alike in acks for local_id in alike.local_ids]


# --- claims ---------------------------------------------------------------------------------

# More than so much is not read before it is known to fit.
_MOST_AHEAD_BYTES = 1 << 20


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
    read = _reading_ahead(ops, min(room.most_bytes, _MOST_AHEAD_BYTES), read)
    found: list[Sequence[Payload | None]] = []
    for op in ops:
        if left <= 0 and not first_of_batch:
            found.append(())
            continue
        payloads: Sequence[Payload | None] = op.payloads
        if None in payloads:
            payloads = _with_missing(op, min(left, op.most_bytes), read)
        held = [payload for payload in payloads if payload]
        used = sum([len(payload[0]) for payload in held]) + room.job_bytes * len(held)
        if used > min(left, op.most_bytes):
            sizes = [len(payload[0]) + room.job_bytes if payload else None for payload in payloads]
            fitting, used = _fitting(sizes, op, left, first_of_batch=first_of_batch)
            payloads = payloads[:fitting]
        left -= used
        first_of_batch = first_of_batch and not any(payloads)
        found.append(payloads)
    return found


def _reading_ahead(ops: Sequence[ClaimOp], most_bytes: int, read: ReadPayloads) -> ReadPayloads:
    """`read` as it is, but that what several ops lack was read at once, as far as it is small."""
    missing: defaultdict[_Place, list[Sequence[int]]] = defaultdict(list)
    for op in ops:
        for priority, keys, _, given in op.claims:
            if None in given:
                pairs = zip(keys, given, strict=True)
                missing[op.queue, priority].append(
                    [key[1] for key, payload in pairs if not payload]
                )
    known: dict[_Place, dict[int, Payload | None]] = {}
    for place, of_ops in missing.items():
        if len(of_ops) > 1:
            local_ids = [local_id for of_op in of_ops for local_id in of_op]
            rows = read(*place, local_ids, most_bytes=most_bytes)
            known[place] = dict(zip(local_ids, rows, strict=False))

    def read_rest(
        queue: str, priority: int, local_ids: Sequence[int], *, most_bytes: int
    ) -> Sequence[Payload | None]:
        of_place = known.get((queue, priority), {})
        rows = [of_place[local_id] for local_id in takewhile(of_place.__contains__, local_ids)]
        most_bytes -= sum([len(payload[0]) for payload in rows if payload])
        if len(rows) < len(local_ids) and (most_bytes > 0 or not any(rows)):
            rows += read(queue, priority, local_ids[len(rows) :], most_bytes=max(0, most_bytes))
        return rows

    return read_rest if known else read


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
