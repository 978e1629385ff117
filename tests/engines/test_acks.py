"""Acks that name jobs twice: one that repeats another costs the store nothing."""

from __future__ import annotations

from collections.abc import Sequence

from pinlaterd.engines.acks import carry_out_acks
from pinlaterd.engines.base import Ack, AckOp, AckResult
from pinlaterd.model import JobKey


def acks_of(ops: Sequence[AckOp]) -> list[Ack]:
    return [ack for op in ops for acks in op[1:] for ack in acks]


def test_only_the_first_of_acks_under_one_claim_reaches_the_store():
    applied: list[AckOp] = []

    def apply_together(ops: Sequence[AckOp]) -> list[AckResult]:
        applied.extend(ops)
        return [AckResult(len(op.succeeded), len(op.failed), 0, []) for op in ops]

    def name_no_job_twice(ops: Sequence[AckOp]) -> bool:
        keys = [ack.key for ack in acks_of(ops)]
        return len(set(keys)) == len(keys)

    first, other = Ack(JobKey(1, 1), "first"), Ack(JobKey(1, 2))
    again = Ack(JobKey(1, 1), "again")
    under_claim = Ack(JobKey(1, 1), claim_descriptor="h:1:2:s:3")
    ops = [
        AckOp("mail", [first, other] + [again] * 500, [again] * 500),
        AckOp("mail", [other], [first, under_claim]),
    ]

    results = carry_out_acks(ops, apply_together, name_no_job_twice)

    assert results == [AckResult(2, 0, 1000, []), AckResult(1, 2, 0, [])]
    assert acks_of(applied) == [first, other, other, first, under_claim]
