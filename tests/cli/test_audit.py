"""What check-dequeue can tell: whole bodies, and what came twice or never."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pinlaterd.cli.callers import (
    MIN_BODY_BYTES,
    BodyDamaged,
    DeliveryAudit,
    Stamp,
    new_run,
    read_stamp,
    stamped_body,
)
from pinlaterd.model import ClaimedJob

RUN = "0a1b2c3d"


def claimed(sequence: int, *, descriptor: str = "", attempts_remaining: int = 2) -> ClaimedJob:
    body = stamped_body(Stamp(RUN, sequence), MIN_BODY_BYTES)
    name = descriptor or f"q:s1:p1:{sequence}"
    return ClaimedJob(name, body, 2, attempts_remaining, "h:1:1:me:1", 600)


@given(sequence=st.integers(0, 10**15), size=st.integers(MIN_BODY_BYTES, 5000))
def test_a_stamp_is_read_back_and_the_size_is_as_asked(sequence, size):
    stamp = Stamp(new_run(), sequence)
    body = stamped_body(stamp, size)

    assert len(body) == size
    assert read_stamp(body) == stamp


@given(data=st.data())
def test_any_changed_byte_after_the_mark_is_damage(data):
    body = bytearray(stamped_body(Stamp(RUN, 77), 100))
    at = data.draw(st.integers(len(b"pinlater-load "), 99))
    body[at] ^= data.draw(st.integers(1, 255))

    with pytest.raises(BodyDamaged):
        read_stamp(bytes(body))


def test_a_shortened_body_is_damage():
    with pytest.raises(BodyDamaged):
        read_stamp(stamped_body(Stamp(RUN, 77), 100)[:-1])


@pytest.mark.parametrize("body", [b"", b"to: ada", b"pinlater-loads", b"\xff\x00"])
def test_other_bodies_have_no_stamp(body):
    assert read_stamp(body) is None


def test_all_once_is_no_fault():
    audit = DeliveryAudit()
    for sequence in (2, 0, 1):
        audit.enter(claimed(sequence))

    verdict = audit.verdict()

    assert (verdict.distinct, verdict.runs, verdict.faults) == (3, 1, 0)


def test_a_gap_is_missing_jobs():
    audit = DeliveryAudit()
    for sequence in (0, 1, 4):
        audit.enter(claimed(sequence))

    verdict = audit.verdict()

    assert verdict.missing == 2
    assert verdict.examples == [f"run {RUN}: 2 jobs missing, the first is number 2"]


def test_the_next_attempt_of_a_job_is_no_duplicate():
    audit = DeliveryAudit()
    audit.enter(claimed(0))
    audit.enter(claimed(0, attempts_remaining=1))

    verdict = audit.verdict()

    assert (verdict.distinct, verdict.redelivered, verdict.faults) == (1, 1, 0)


@pytest.mark.parametrize(
    "again",
    [claimed(0), claimed(0, descriptor="q:s2:p1:9", attempts_remaining=1)],
    ids=["one attempt claimed twice", "stored twice"],
)
def test_the_same_job_twice_is_a_duplicate(again):
    audit = DeliveryAudit()
    audit.enter(claimed(0))
    audit.enter(again)

    verdict = audit.verdict()

    assert (verdict.distinct, verdict.duplicates, verdict.faults) == (1, 1, 1)


def test_damage_and_others_are_told_apart():
    audit = DeliveryAudit()
    whole = claimed(0)
    audit.enter(whole._replace(body=whole.body[:-1]))
    audit.enter(whole._replace(body=b"to: ada"))

    verdict = audit.verdict()

    assert (verdict.damaged, verdict.unstamped, verdict.faults) == (1, 1, 1)
