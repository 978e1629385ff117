"""The callers that a router knows: when each called last, in bounded memory."""

from __future__ import annotations

import struct

import pytest

from pinlaterd.model import CallContext, DequeueRequest, Method
from pinlaterd.router.callers import MOST_SOURCES, Callers
from pinlaterd.rpc import codec
from pinlaterd.rpc.peek import source_of


def test_sources_with_their_last_calls_and_queues_that_nobody_asks():
    callers = Callers(100.0)
    callers.dequeues("mail", b"mailer:web3", 110.0)
    callers.dequeues("mail", b"mailer:web4", 130.0)
    callers.acks("mail", b"mailer:web3", 120.0)
    callers.acks("mail", b"\xff", 140.0)

    assert callers.unasked(160.0) == (60.0, {"mail": 30.0})
    assert callers.sources(160.0) == [
        ("mail", "mailer:web3", 50.0, 40.0),
        ("mail", "mailer:web4", 30.0, None),
        ("mail", "\ufffd", None, 20.0),
    ]


def test_those_that_have_not_called_for_longest_are_forgotten():
    callers = Callers(0.0)
    for number in range(2 * MOST_SOURCES):
        callers.dequeues("mail", b"busy", number)
        callers.dequeues("mail", b"%d" % number, number)

    known = {one.source for one in callers.sources(0.0)}

    assert len(known) <= MOST_SOURCES
    assert {"busy", str(2 * MOST_SOURCES - 1)} <= known
    assert "1" not in known
    assert callers.unasked(2.0 * MOST_SOURCES)[0] < MOST_SOURCES  # since it knows of all


def test_of_long_names_no_more_is_kept_than_a_shard_would_take():
    callers = Callers(0.0)
    callers.dequeues("q" * 1_000, b"x" * 1_000, 0.0)
    callers.acks("q" * 1_000, b"x" * 1_000, 0.0)

    assert callers.sources(0.0) == [("q" * 64, "x" * 120, 0.0, 0.0)]


@pytest.mark.parametrize("source", ["", "mailer:web3", "m\u00fcller", "x" * 300])
def test_the_source_of_a_call_is_read_from_its_bytes(source):
    request = DequeueRequest("mail", 10)
    message = codec.encode_call(Method.DEQUEUE, 7, CallContext(source, "id"), request)

    name = b"dequeueJobs"
    loose = struct.pack(">I", len(name)) + name + b"\x01" + message[8 + len(name) :]
    assert source_of(message) == source_of(loose) == source.encode()
