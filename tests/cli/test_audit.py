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


WHOLE = claimed(0)


@given(sequence=st.integers(0, 10**15), size=st.integers(MIN_BODY_BYTES, 5000))
def test_a_stamp_is_read_back_and_the_size_is_as_asked(sequence, size):
    stamp = Stamp(new_run(), sequence)
    body = stamped_body(stamp, size)

    assert len(body) == size
    assert read_stamp(body) == stamp


@given(data=st.data())
def test_any_changed_or_missing_byte_after_the_mark_is_damage(data):
    body = bytearray(stamped_body(Stamp(RUN, 77), 100))
    at = data.draw(st.integers(len(b"pinlater-load "), 99))
    body[at] ^= data.draw(st.integers(1, 255))

    for damaged in (body, body[:-1]):
        with pytest.raises(BodyDamaged):
            read_stamp(bytes(damaged))


@pytest.mark.parametrize("body", [b"", b"to: ada", b"pinlater-loads", b"\xff\x00"])
def test_other_bodies_have_no_stamp(body):
    assert read_stamp(body) is None


@pytest.mark.parametrize(
    ("jobs", "found"),
    [
        ([claimed(2), claimed(0), claimed(1)], {"distinct": 3}),
        ([claimed(0), claimed(1), claimed(4)], {"distinct": 3, "missing": 2}),
        ([claimed(0), claimed(0, attempts_remaining=1)], {"distinct": 1, "redelivered": 1}),
        ([claimed(0), claimed(0)], {"distinct": 1, "duplicates": 1}),
        (
            [claimed(0), claimed(0, descriptor="q:s2:p1:9", attempts_remaining=1)],
            {"distinct": 1, "duplicates": 1},
        ),
        ([WHOLE._replace(body=WHOLE.body[:-1])], {"damaged": 1, "runs": 0}),
        ([WHOLE._replace(body=b"to: ada")], {"unstamped": 1, "runs": 0}),
    ],
    ids=["all once", "gaps", "failed", "claimed twice", "stored twice", "damaged", "of others"],
)
def test_faults_are_told_from_what_may_happen(jobs, found):
    audit = DeliveryAudit()
    for job in jobs:
        audit.enter(job)

    facts = vars(audit.verdict())

    examples = facts.pop("examples")
    assert facts == dict.fromkeys(facts, 0) | {"runs": 1} | found
    assert bool(examples) == any(facts[fault] for fault in ("missing", "duplicates", "damaged"))
    if "missing" in found:
        assert examples == [f"run {RUN}: 2 jobs missing, the first is number 2"]
