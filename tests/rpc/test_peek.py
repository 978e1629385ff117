"""What the router sees of a call without decoding it."""

from __future__ import annotations

import pytest

from pinlaterd.model import (
    AckInfo,
    AckRequest,
    CallContext,
    CheckpointInfo,
    CheckpointRequest,
    DequeueRequest,
    EnqueueRequest,
    Job,
    LookupRequest,
    Method,
    Request,
)
from pinlaterd.rpc import codec
from tests.rpc.test_codec import CONTEXT, REQUESTS
from tests.rpc.thrift_bytes import I32, LIST, STRING, STRUCT, Field, context, write_message

FIRST, SECOND = AckInfo("mail:s1:p1:1"), AckInfo("mail:s2:p1:2")

SEEN: list[tuple[Method, Request, tuple[object, ...]]] = [
    (Method.CREATE_QUEUE, REQUESTS[Method.CREATE_QUEUE], ("mail", 0, 0, None)),
    (Method.DELETE_QUEUE, REQUESTS[Method.DELETE_QUEUE], ("mail", 0, 0, None)),
    (Method.ENQUEUE, EnqueueRequest("mail", []), ("mail", 0, 0, None)),
    (Method.ENQUEUE, EnqueueRequest("mail", [Job(b"x")] * 300), ("mail", 300, 0, None)),
    (Method.DEQUEUE, DequeueRequest("mail", 7), ("mail", 0, 7, None)),
    (Method.DEQUEUE, DequeueRequest("mail", -1, AckRequest("mail", [], [])), ("mail", 0, -1, None)),
    (
        Method.DEQUEUE,
        DequeueRequest("mail", 7, AckRequest("mail", [FIRST], [SECOND]), max_wait_ms=9),
        ("mail", 1, 7, FIRST.descriptor),
    ),
    (
        Method.DEQUEUE,
        DequeueRequest("mail", 7, AckRequest("mail", [], [SECOND])),
        ("mail", 1, 7, SECOND.descriptor),
    ),
    (Method.ACK, AckRequest("mail", [FIRST], [SECOND]), ("mail", 1, 0, FIRST.descriptor)),
    (Method.ACK, AckRequest("mail", [], [SECOND]), ("mail", 1, 0, SECOND.descriptor)),
    (Method.ACK, AckRequest("mail", [], []), ("mail", 0, 0, None)),
    (
        Method.CHECKPOINT,
        CheckpointRequest("mail", [CheckpointInfo("a"), CheckpointInfo("b")]),
        ("mail", 2, 0, "a"),
    ),
    (Method.CHECKPOINT, CheckpointRequest("mail", []), ("mail", 0, 0, None)),
    (Method.LOOKUP, LookupRequest(["a", "b", "c"]), (None, 3, 0, "a")),
    (Method.LOOKUP, LookupRequest([]), (None, 0, 0, None)),
    (Method.COUNT, REQUESTS[Method.COUNT], ("mail", 0, 0, None)),
    (Method.QUEUE_NAMES, REQUESTS[Method.QUEUE_NAMES], (None, 0, 0, None)),
    (Method.SCAN, REQUESTS[Method.SCAN], ("mail", 0, 0, None)),
    (Method.RETRY_FAILED, REQUESTS[Method.RETRY_FAILED], ("mail", 0, 0, None)),
    (Method.DELETE_JOBS, REQUESTS[Method.DELETE_JOBS], ("mail", 0, 0, None)),
]


@pytest.mark.parametrize(("method", "request_", "seen"), SEEN)
@pytest.mark.parametrize("request_id", ["", "r-1"])
def test_it_sees_what_chooses_the_way(method, request_, seen, request_id):
    message = codec.encode_call(method, 7, CallContext("a:b", request_id), request_)

    peeked = codec.peek(message)

    assert peeked[1:] == (method, True, *seen)
    assert peeked.head == codec.Head(method.value, 7, oneway=False, strict=True)


@pytest.mark.parametrize(("method", "request_", "seen"), SEEN)
def test_a_call_that_is_not_strict_is_seen_as_well(method, request_, seen):
    strict = codec.encode_call(method, 7, CONTEXT, request_)
    name = method.value.encode()
    loose = strict[4 : 8 + len(name)] + b"\x01" + strict[8 + len(name) :]

    peeked = codec.peek(loose)

    assert peeked.canonical
    assert peeked[3:] == seen
    assert peeked.head == codec.Head(method.value, 7, oneway=False, strict=False)
    assert codec.decode_call(loose)[1:] == (CONTEXT, request_)


def test_a_oneway_call_is_seen_as_such():
    message = write_message("getQueueNames", [context()], kind=4)

    assert codec.peek(message).head.oneway
    assert codec.decode_call(message).head.oneway


QUEUE = Field(1, STRING, b"mail")
LIMIT = Field(2, I32, 5)
ACKS = Field(
    3,
    STRUCT,
    [Field(1, STRING, b"mail"), Field(2, LIST, (STRUCT, [[Field(1, STRING, b"d")]]))],
)


@pytest.mark.parametrize(
    "fields",
    [
        [Field(2, STRUCT, [QUEUE, LIMIT]), context()],  # the request first
        [context(), Field(2, STRUCT, [LIMIT, QUEUE])],
        [context(), Field(2, STRUCT, [QUEUE, Field(50, I32, 1), LIMIT])],
        [context(), Field(50, I32, 1), Field(2, STRUCT, [QUEUE, LIMIT])],
        [context(), Field(2, STRUCT, [QUEUE, LIMIT, Field(4, 2, 1), ACKS])],  # acks come late
        [context(), Field(2, STRUCT, [QUEUE, LIMIT, Field(101, I32, 1), ACKS])],
        [Field(1, STRUCT, [Field(9, I32, 1), Field(1, STRING, b"a")]), Field(2, STRUCT, [QUEUE])],
    ],
)
def test_another_layout_is_left_to_decoding(fields):
    peeked = codec.peek(write_message("dequeueJobs", fields))

    assert peeked.method is Method.DEQUEUE
    assert not peeked.canonical


@pytest.mark.parametrize(("method", "request_", "seen"), SEEN)
def test_a_message_that_ends_early_is_never_seen_as_more_than_it_is(method, request_, seen):
    message = codec.encode_call(method, 7, CONTEXT, request_)
    head_bytes = len(method.value) + 12

    for end in range(head_bytes, len(message)):
        peeked = codec.peek(message[:end])

        assert not peeked.canonical or peeked[3:] == seen
