"""What a router packs a shard unpacks, and the other way round; nonsense is called that."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from pinlaterd.wire import envelope
from pinlaterd.wire.envelope import (
    MALFORMED,
    CallEntry,
    Calls,
    Frame,
    Goodbye,
    GoodbyeAck,
    Hello,
    Op,
    Pulse,
    ReadyCounts,
    Replies,
    ReplyEntry,
    ShardCall,
    ShardEnd,
    ShardFacts,
    Status,
    Welcome,
    pack,
    pack_calls,
    unpack,
)

U32 = st.integers(0, 2**32 - 1)
CALLS = st.builds(
    CallEntry,
    call_id=U32,
    deadline=st.floats(0, 1e9),
    message=st.binary(max_size=300),
    op=st.sampled_from(Op),
    max_jobs=st.integers(-1, 2**31 - 1),
    lowest_priority=st.integers(0, 127),
    whole=st.booleans(),
    most_bytes=U32,
    placement=st.integers(0, 2**63),
)
REPLIES = st.builds(
    ReplyEntry,
    call_id=U32,
    status=st.sampled_from(Status),
    payload=st.binary(max_size=300),
    jobs=st.integers(0, 2**31),
)
QUEUES = st.from_regex(r"[A-Za-z0-9_]{1,64}", fullmatch=True)
COUNTS = st.lists(
    st.builds(ReadyCounts, queue=QUEUES, counts=st.lists(U32, max_size=127).map(tuple)), max_size=20
)
INCARNATIONS = st.integers(0, 2**63)
FRAMES = st.one_of(
    st.builds(Hello, st.frozensets(QUEUES)),
    st.builds(Calls, INCARNATIONS, st.lists(CALLS, max_size=20)),
    st.builds(
        Welcome,
        INCARNATIONS,
        st.builds(ShardFacts, U32, st.lists(QUEUES).map(tuple), COUNTS.map(tuple)),
    ),
    st.builds(Replies, INCARNATIONS, st.lists(REPLIES, max_size=20), COUNTS),
    st.builds(Pulse, INCARNATIONS, COUNTS, st.booleans()),
    st.builds(Goodbye, INCARNATIONS),
    st.builds(GoodbyeAck, INCARNATIONS),
)


@given(FRAMES)
def test_a_frame_comes_out_as_it_went_in(frame: Frame):
    assert unpack(pack(frame)) == frame


@given(st.binary(max_size=200))
def test_nonsense_is_malformed_and_nothing_worse(data):
    with pytest.raises(MALFORMED):
        unpack(data)


def test_a_cut_off_message_is_malformed():
    frame = pack(Calls(1, [CallEntry(1, 1.0, b"message")]))
    for end in range(len(frame)):
        with pytest.raises(MALFORMED):
            unpack(frame[:end])


def test_a_call_that_says_nothing_else_arrives_with_the_defaults():
    call = ShardCall(b"message", 1.0)
    call.call_id = 7

    assert unpack(pack_calls(3, [call])) == Calls(3, [CallEntry(7, 1.0, b"message")])


def test_what_is_watched_is_looked_at_soon_while_frames_keep_coming(monkeypatch):
    now = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(envelope, "time", SimpleNamespace(monotonic=lambda: now.seconds))
    watched, other = os.pipe()
    with zmq.Context() as context, context.socket(zmq.DEALER) as router:
        end = ShardEnd(context)
        end.bind("inproc://shard")
        end.watch(watched)
        router.connect("inproc://shard")
        router.send(b"frame")
        assert end.wait(lambda: 20.0) == frozenset()
        os.write(other, b"x")

        assert end.wait(lambda: 20.0) == frozenset()
        now.seconds += 0.02
        assert end.wait(lambda: 20.0) == {watched}
        end.close()
    for descriptor in (watched, other):
        os.close(descriptor)
