"""What a router packs a shard unpacks, and the other way round; nonsense is called that."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pinlaterd.wire import envelope
from pinlaterd.wire.envelope import (
    CallEntry,
    MalformedEnvelope,
    Op,
    ReadyCounts,
    ReplyEntry,
    ShardCall,
    ShardFacts,
    Status,
)

CALLS = st.builds(
    CallEntry,
    call_id=st.integers(0, 2**32 - 1),
    deadline=st.floats(0, 1e9),
    message=st.binary(max_size=300),
    op=st.sampled_from(Op),
    max_jobs=st.integers(-1, 2**31 - 1),
    lowest_priority=st.integers(0, 127),
    whole=st.booleans(),
    most_bytes=st.integers(0, 2**32 - 1),
)
REPLIES = st.builds(
    ReplyEntry,
    call_id=st.integers(0, 2**32 - 1),
    status=st.sampled_from([status for status in Status if status < Status.LOST]),
    payload=st.binary(max_size=300),
    jobs=st.integers(0, 2**31),
)
COUNTS = st.builds(
    ReadyCounts,
    queue=st.from_regex(r"[A-Za-z0-9_]{1,64}", fullmatch=True),
    counts=st.lists(st.integers(0, 2**32 - 1), max_size=127).map(tuple),
)
INCARNATIONS = st.integers(0, 2**63)


@given(INCARNATIONS, st.lists(CALLS, max_size=20))
def test_calls_come_out_as_they_went_in(incarnation, calls):
    frame = envelope.pack_calls(incarnation, calls)

    assert envelope.unpack_calls(frame) == (incarnation, calls)


@given(INCARNATIONS, st.lists(REPLIES, max_size=20), st.lists(COUNTS, max_size=20))
def test_replies_and_counts_come_out_as_they_went_in(incarnation, replies, counts):
    frame = envelope.pack_replies(incarnation, replies, counts)

    assert envelope.unpack_replies(frame) == (incarnation, replies, counts)


@given(INCARNATIONS, st.lists(COUNTS, max_size=20))
def test_a_pulse_carries_counts(incarnation, counts):
    for degraded in (False, True):
        frame = envelope.pack_pulse(incarnation, counts, degraded=degraded)
        assert envelope.unpack_pulse(frame) == (counts, degraded)


def test_greetings_carry_queues_and_facts():
    facts = ShardFacts("1d2", 3, 64, ("mail", "web"), (ReadyCounts("mail", (1, 0, 2)),))

    assert envelope.unpack_hello(envelope.pack_hello(["b", "a"])) == {"a", "b"}
    assert envelope.unpack_welcome(envelope.pack_welcome(7, facts)) == facts


@given(st.binary(max_size=200))
def test_nonsense_is_malformed_or_empty_but_never_another_error(frame):
    for unpack in (
        envelope.unpack_calls,
        envelope.unpack_replies,
        envelope.unpack_pulse,
        envelope.unpack_hello,
        envelope.unpack_welcome,
        envelope.incarnation_of,
    ):
        try:
            unpack(frame)
        except MalformedEnvelope:
            continue


def test_a_cut_off_message_is_malformed():
    frame = envelope.pack_calls(1, [CallEntry(1, 1.0, b"message")])

    with pytest.raises(MalformedEnvelope):
        envelope.unpack_calls(frame[:20])
    with pytest.raises(MalformedEnvelope):
        envelope.unpack_calls(frame[:-1])


def test_a_call_that_says_nothing_else_arrives_with_the_defaults():
    call = ShardCall(b"message", 1.0)
    call.call_id = 7

    assert envelope.unpack_calls(envelope.pack_calls(3, [call])) == (
        3,
        [CallEntry(7, 1.0, b"message")],
    )
