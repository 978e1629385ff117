"""Acks that name jobs twice: one that repeats another costs the store nothing."""

from __future__ import annotations

from collections.abc import Sequence

from pinlaterd.engines.acks import carry_out_acks
from pinlaterd.engines.base import AckOp, AckResult
from pinlaterd.model import JobKey
from tests.conformance.engine.harness import Ack, ack_op


def acks_of(ops: Sequence[AckOp]) -> list[Ack]:
    return [
        Ack(JobKey(priority, local_id), text, delay_ms, claim)
        for op in ops
        for priority, local_ids, text, delay_ms, claim in (*op.succeeded, *op.failed)
        for local_id in local_ids
    ]


def test_only_the_first_of_acks_under_one_claim_reaches_the_store():
    applied: list[AckOp] = []

    def apply_together(ops: Sequence[AckOp]) -> list[AckResult]:
        applied.extend(ops)
        return [AckResult(len(acks_of([op])), 0, 0, []) for op in ops]

    def name_no_job_twice(ops: Sequence[AckOp]) -> bool:
        keys = [ack.key for ack in acks_of(ops)]
        return len(set(keys)) == len(keys)

    first, other = Ack(JobKey(1, 1), "first"), Ack(JobKey(1, 2))
    again = Ack(JobKey(1, 1), "again")
    under_claim = Ack(JobKey(1, 1), claim_descriptor="h:1:2:s:3")
    ops = [
        ack_op("mail", [first, other] + [again] * 500, [again] * 500),
        ack_op("mail", [other], [first, under_claim]),
    ]

    results = carry_out_acks(ops, apply_together, name_no_job_twice)

    assert results == [AckResult(2, 0, 1000, []), AckResult(3, 0, 0, [])]
    assert acks_of(applied) == [first, other, other, first, under_claim]
