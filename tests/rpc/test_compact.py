"""TCompactProtocol and strict binary say the same, whatever the message; hostile ones are bounded.

Held against a writer of compact bytes that knows nothing of `pinlaterd.rpc`, and against Apache
Thrift's own library.
"""

from __future__ import annotations

import struct
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pinlaterd.errors import ErrorCode, ProtocolError, QueueNotFound
from pinlaterd.model import Method
from pinlaterd.rpc import codec
from pinlaterd.rpc.compact import from_binary, to_binary
from pinlaterd.rpc.interface import MAX_VALUES
from pinlaterd.rpc.peek import read_message_head
from tests.rpc.strategies import Shape, calls
from tests.rpc.test_codec import RESULTS, head_of
from tests.rpc.test_interop import apache_calls
from tests.rpc.thrift_bytes import (
    BOOL,
    BYTE,
    DOUBLE,
    I16,
    I32,
    I64,
    LIST,
    MAP,
    PASSED_THROUGH,
    SET,
    STRING,
    STRUCT,
    Field,
    enqueue,
    job,
    queue_names,
    varint,
    write_compact_message,
    write_message,
)

MAX_BYTES = 1 << 20
expanded = partial(to_binary, max_bytes=MAX_BYTES)
ANY_CALL = calls(list(Method), Shape(in_order=False, unknown=True, wrong=True))


def without_types_of_empty_maps(code: int, value: Any) -> Any:
    """The value as it comes back: compact does not say of what type the keys would be."""
    again = without_types_of_empty_maps
    if code == STRUCT:
        return [Field(field.id, field.type, again(field.type, field.value)) for field in value]
    if code in (LIST, SET):
        element, values = value
        return element, [again(element, each) for each in values]
    if code == MAP:
        key, element, pairs = value
        kept = [(again(key, name), again(element, each)) for name, each in pairs]
        return (key, element, kept) if kept else (0, 0, [])
    return value


SEQIDS = st.integers(-(2**31), 2**31 - 1)


@given(ANY_CALL, SEQIDS, st.integers(1, 4))
def test_any_message_is_the_same_in_both(call, seqid, kind):
    compact = write_compact_message(*call, seqid=seqid, kind=kind)
    binary = write_message(*call, seqid=seqid, kind=kind)
    name, fields = call
    returned = write_message(
        name, without_types_of_empty_maps(STRUCT, fields), seqid=seqid, kind=kind
    )

    assert expanded(compact) == returned
    assert from_binary(binary) == compact


EVERY_TYPE = [
    Field(1, BOOL, 1),
    Field(2, BOOL, 0),
    Field(17, BYTE, -128),  # 15 on: the longest short distance
    Field(33, I16, -(2**15)),  # 16 on: the first long one
    Field(32767, I32, -(2**31)),
    Field(-32768, I64, -(2**63)),
    Field(5, DOUBLE, 1e-300),
    Field(6, STRING, b"\xff" * 300),
    Field(7, LIST, (BOOL, [1, 0, 1])),
    Field(8, SET, (I64, [2**63 - 1, 0, -1])),
    Field(9, LIST, (BYTE, list(range(15)))),
    Field(10, LIST, (LIST, [(STRUCT, [[Field(1, BOOL, 1)], []])] * 14)),
    Field(11, MAP, (STRING, MAP, [(b"key", (BOOL, DOUBLE, [(1, 0.5), (0, -0.0)]))])),
    Field(12, STRUCT, [Field(1, STRUCT, [])]),
]


def test_every_type_and_every_form_of_header():
    compact = write_compact_message("getQueueNames", EVERY_TYPE)
    binary = write_message("getQueueNames", EVERY_TYPE)

    assert expanded(compact) == binary
    assert from_binary(binary) == compact


def test_an_empty_map_has_no_types_in_compact():
    compact = write_compact_message("getQueueNames", [Field(1, MAP, (I32, STRUCT, []))])

    binary = expanded(compact)

    assert binary == write_message("getQueueNames", [Field(1, MAP, (0, 0, []))])
    assert from_binary(binary) == compact


@pytest.mark.parametrize("false", [0, 2])
@pytest.mark.parametrize("declared", [1, 2])
def test_booleans_within_a_collection_as_different_libraries_write_them(declared, false):
    head = write_compact_message("getQueueNames", [])[:-1]
    compact = head + bytes([0x19, 2 << 4 | declared, 1, false, 0])

    assert expanded(compact) == write_message("getQueueNames", [Field(1, LIST, (BOOL, [1, 0]))])


def test_what_an_apache_client_writes(apache):
    context = apache.types.RequestContext("mailer:web7", "r1")
    for method, arguments, expected in apache_calls(apache.types):
        compact = apache.write_compact(method, context, *arguments)

        binary = expanded(compact)

        assert codec.decode_call(binary).request == expected
        assert codec.peek(binary).canonical is (method in PASSED_THROUGH)
        assert binary == apache.write(method, context, *arguments)


def test_what_an_apache_client_reads(apache):
    for method, result in RESULTS.items():
        reply = codec.encode_reply(head_of(method), result)

        got = apache.read_compact(method.value, from_binary(reply))

        assert got == apache.read(method.value, reply)


def test_errors_as_an_apache_client_reads_them(apache):
    head = head_of(Method.COUNT)
    refused = from_binary(codec.encode_error(head, QueueNotFound("mail")))
    unknown = from_binary(codec.encode_unknown_method(head))

    with pytest.raises(apache.types.PinLaterException) as raised:
        apache.read_compact("getJobCount", refused)
    assert raised.value.errorCode == ErrorCode.QUEUE_NOT_FOUND
    with pytest.raises(apache.unknown_method, match="getJobCount"):
        apache.read_compact("getJobCount", unknown)


# --- hostile messages -----------------------------------------------------------------------

HEAD = write_compact_message("getQueueNames", [])[:-1]
JOB = b"\x18\x01x\x11\x11\0"  # three fields
LIST_FIELD, MAP_FIELD, STRUCT_FIELD, STRING_FIELD = b"\x19", b"\x1b", b"\x1c", b"\x18"


@given(ANY_CALL, st.data())
def test_changed_or_cut_off_bytes_are_a_message_or_an_error_of_the_protocol(call, data):
    changed = bytearray(write_compact_message(*call))
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    changed = changed[: data.draw(st.integers(1, len(changed)))]
    try:
        binary = expanded(bytes(changed))
    except ProtocolError:
        return
    is_text = "\ufffd" not in read_message_head(binary).method_name  # else the name is not kept
    assert not is_text or expanded(from_binary(binary)) == binary


@given(st.binary(min_size=1, max_size=200))
def test_any_bytes_are_a_message_or_an_error_of_the_protocol(data):
    for convert in (expanded, from_binary):
        try:
            convert(data)
            convert(b"\x82\x21\0\0" + data)
        except ProtocolError:
            pass


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (queue_names(), "a message begins with 80; on this connection"),
        (b"\x82", "ends within a value"),
        (b"\x82\x21\x80", "ends within a value"),
        (b"\x82\x21" + b"\x80" * 100, "more than 10 bytes"),
        (b"\x82\x21" + varint(2**32) + b"\0\0", "too large"),
        (HEAD + b"\0\0", "1 bytes follow the end"),
        (HEAD + b"\x1d\0\0", "no type 13"),
        (HEAD + b"\x10\0\0", "no type 0"),
        (HEAD + LIST_FIELD + b"\x2d\0\0\0", "no type 13"),
        (HEAD + b"\x15" + varint(2**33) + b"\0", "too large"),
        (HEAD + b"\x05" + varint(2 * 40_000) + b"\0\0", "too large"),
        (HEAD + STRING_FIELD + varint(2**31) + b"abc\0", "a value claims 2147483648 bytes"),
        (HEAD + LIST_FIELD + b"\xfc" + varint(2**31) + b"\0", "claims 2147483648 values"),
        (HEAD + MAP_FIELD + varint(2**31) + b"\x33\0", "claims 4294967296 values"),
        (HEAD + STRUCT_FIELD * 1000 + bytes(1001), "more than 64 levels"),
        (HEAD + LIST_FIELD + b"\x19" * 1000 + b"\0\0", "more than 64 levels"),
        (HEAD + MAP_FIELD + b"\x01\x3b\0" * 1000 + b"\0\0", "more than 64 levels"),
        (HEAD + b"\x11" * 2000 + b"\0", "more than 1000 fields"),
        (
            HEAD
            + LIST_FIELD
            + b"\xfc"
            + varint(400_000)
            + b"\x18\x01x\x11\x11\0" * 400_000
            + b"\0",
            "more than 1000000 values; send fewer",
        ),
        (
            HEAD + LIST_FIELD + b"\xfc" + varint(MAX_VALUES) + bytes(MAX_VALUES + 1),
            "more than 1000000 values; send fewer",
        ),
    ],
)
def test_what_is_no_message_is_refused(message, says):
    with pytest.raises(ProtocolError, match=says):
        expanded(message)


def test_a_message_is_not_expanded_beyond_the_limit():
    """A byte for each number becomes eight."""
    numbers = HEAD + LIST_FIELD + b"\xf6" + varint(200_000) + bytes(200_001)

    with pytest.raises(ProtocolError, match=r"as binary; max_frame_bytes is 1048576: send fewer"):
        expanded(numbers)


def test_a_call_with_the_most_jobs_is_read():
    jobs = [job(b"x", Field(2, BYTE, 1), Field(4, I32, 2), Field(5, STRING, b""))] * 100_000
    binary = enqueue(*jobs)

    assert to_binary(from_binary(binary), 64 << 20) == binary


def test_a_binary_message_that_is_cut_off_is_refused():
    whole = write_message("getQueueNames", EVERY_TYPE)
    for end in range(len(whole)):
        with pytest.raises(ProtocolError):
            from_binary(whole[:end])
    deep = struct.pack(">Bi", LIST, 1) * 100 + struct.pack(">Bi", I16, 0)
    with pytest.raises(ProtocolError, match="more than 64 levels"):
        from_binary(write_message("x", [])[:-1] + b"\x0f\0\1" + deep + b"\0")
