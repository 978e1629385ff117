"""In which order acks are carried out where a job may be named twice, for engines that carry out
what all ops have in common at once. Relies on the contract in `base` only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pinlaterd.engines.base import AckOp, AckResult

ApplyTogether = Callable[[Sequence[AckOp]], list[AckResult]]


def carry_out_acks(
    ops: Sequence[AckOp],
    apply_together: ApplyTogether,
    name_no_job_twice: Callable[[Sequence[AckOp]], bool],
) -> list[AckResult]:
    """Ops that name no job twice commute, and are carried out together: successes, then failures.
    Otherwise each goes in its turn, and within it each ack."""
    if name_no_job_twice(ops):
        return apply_together(ops)
    return [
        apply_together([op])[0] if name_no_job_twice([op]) else _ack_by_ack(op, apply_together)
        for op in ops
    ]


def _ack_by_ack(op: AckOp, apply_together: ApplyTogether) -> AckResult:
    single_acks = [AckOp(op.queue, [ack], ()) for ack in op.succeeded]
    single_acks += [AckOp(op.queue, (), [ack]) for ack in op.failed]
    results = [apply_together([single])[0] for single in single_acks]
    return AckResult(
        succeeded=sum(result.succeeded for result in results),
        failed=sum(result.failed for result in results),
        noop=sum(result.noop for result in results),
        requeued=[requeued for result in results for requeued in result.requeued],
    )
