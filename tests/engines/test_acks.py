"""Acks that name jobs twice: one that repeats another costs the store nothing."""

from __future__ import annotations

from collections.abc import Sequence

from pinlaterd.engines.base import AckResult, Acks
from pinlaterd.engines.batches import AckActions, Failed, apply_acks
from pinlaterd.model import JobKey
from tests.conformance.engine.harness import Ack, ack_op


def acks_of(acks: Sequence[Acks]) -> list[Ack]:
    return [
        Ack(JobKey(alike.priority, local_id), *alike[2:])
        for alike in acks
        for local_id in alike.local_ids
    ]


def test_only_the_first_of_acks_under_one_claim_reaches_the_store():
    applied: list[Acks] = []

    def succeed(_queue: str, _priority: int, acks: Sequence[Acks]) -> set[int]:
        applied.extend(acks)
        return set()

    def fail(_queue: str, _priority: int, acks: Sequence[Acks]) -> Failed:
        applied.extend(acks)
        return Failed(set(), ())

    first, other = Ack(JobKey(1, 1), "first"), Ack(JobKey(1, 2))
    again = Ack(JobKey(1, 1), "again")
    under_claim = Ack(JobKey(1, 1), claim_descriptor="h:1:2:s:3")
    ops = [
        ack_op("mail", [first, other] + [again] * 500, [again] * 500),
        ack_op("mail", [other], [first, under_claim]),
    ]

    results = apply_acks(ops, AckActions(succeed, fail))

    missed = {JobKey(1, 2)}  # the first op ended it
    assert results == [AckResult(2, 0, 1000, []), AckResult(0, 1, 2, [], missed)]
    assert acks_of(applied) == [first, other, under_claim]
