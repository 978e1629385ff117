"""What the router sees of a call without decoding it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pinlaterd.model import AckRequest, DequeueRequest, Method
from pinlaterd.rpc import codec
from tests.rpc.strategies import Shape, calls
from tests.rpc.test_codec import CONTEXT, REQUESTS
from tests.rpc.thrift_bytes import (
    I32,
    LIST,
    PASSED_THROUGH,
    STRING,
    STRUCT,
    Field,
    context,
    write_message,
)

USUAL = calls(list(Method), Shape(in_order=True, unknown=False, wrong=False))
UNORDERED = calls(list(Method), Shape(in_order=False, unknown=True, wrong=False))


def what_chooses_the_way(request: Any) -> tuple[object, ...]:
    """Queue, items, limit and first descriptor of a call that was decoded."""
    queue, limit = getattr(request, "queue", None), 0
    if isinstance(request, DequeueRequest):
        limit = request.limit
        request = request.acks or AckRequest("")
    if isinstance(request, AckRequest):
        items: Any = request.succeeded or request.failed
    else:
        names = ("jobs", "checkpoints", "finishes", "descriptors")
        items = next((getattr(request, name) for name in names if hasattr(request, name)), ())
    first = items[0] if items else None
    return (
        queue,
        len(items),
        limit,
        getattr(first, "descriptor", first if isinstance(first, str) else None),
    )


@given(USUAL, st.booleans())
def test_it_sees_what_chooses_the_way(call, strict):
    message = write_message(*call, strict=strict)

    peeked = codec.peek(message)

    decoded = codec.decode_call(message)
    assert peeked.head == decoded.head
    assert peeked.method is Method(call[0])
    assert peeked.canonical is (peeked.method in PASSED_THROUGH)
    assert not peeked.canonical or peeked[3:] == what_chooses_the_way(decoded.request)


@given(UNORDERED, st.booleans())
def test_it_sees_nothing_else_in_another_layout(call, strict):
    message = write_message(*call, strict=strict)

    peeked = codec.peek(message)

    decoded = codec.decode_call(message)
    assert peeked.head == decoded.head
    assert not peeked.canonical or peeked[3:] == what_chooses_the_way(decoded.request)


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


@pytest.mark.parametrize("method", Method)
def test_a_message_that_ends_early_is_never_seen_as_more_than_it_is(method):
    message = codec.encode_call(method, 7, CONTEXT, REQUESTS[method])
    seen = what_chooses_the_way(REQUESTS[method])
    head_bytes = len(method.value) + 12

    for end in range(head_bytes, len(message)):
        peeked = codec.peek(message[:end])

        assert not peeked.canonical or peeked[3:] == seen
