"""In which order acks are carried out where a job may be named twice, for engines that carry out
what all ops have in common at once. Relies on the contract in `base` only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from pinlaterd.engines.base import AckOp, AckResult, Acks

ApplyTogether = Callable[[Sequence[AckOp]], list[AckResult]]


def local_ids_of(acks: Iterable[Acks]) -> list[int]:
    return [local_id for alike in acks for local_id in alike.local_ids]


def carry_out_acks(
    ops: Sequence[AckOp],
    apply_together: ApplyTogether,
    name_no_job_twice: Callable[[Sequence[AckOp]], bool],
) -> list[AckResult]:
    """Ops that name no job twice commute, and are carried out together: successes, then failures.
    Otherwise each goes in its turn, and within it each ack where that makes a difference."""
    if name_no_job_twice(ops):
        return apply_together(ops)
    return [_carry_out(op, apply_together, name_no_job_twice) for op in ops]


def _carry_out(
    op: AckOp,
    apply_together: ApplyTogether,
    name_no_job_twice: Callable[[Sequence[AckOp]], bool],
) -> AckResult:
    once = _without_repetitions(op)
    if name_no_job_twice([once]):
        [result] = apply_together([once])
    else:
        result = _ack_by_ack(once, apply_together)
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


def _ack_by_ack(op: AckOp, apply_together: ApplyTogether) -> AckResult:
    singles = [AckOp(op.queue, [ack], ()) for ack in _one_by_one(op.succeeded)]
    singles += [AckOp(op.queue, (), [ack]) for ack in _one_by_one(op.failed)]
    results = [apply_together([single])[0] for single in singles]
    return AckResult(
        succeeded=sum(result.succeeded for result in results),
        failed=sum(result.failed for result in results),
        noop=sum(result.noop for result in results),
        requeued=[requeued for result in results for requeued in result.requeued],
    )


def _one_by_one(acks: Sequence[Acks]) -> list[Acks]:
    return [alike._replace(local_ids=(local_id,)) for alike in acks for local_id in alike.local_ids]
