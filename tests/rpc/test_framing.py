"""The same bytes give the same messages, whatever the pieces in which they come."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pinlaterd.errors import ProtocolError
from pinlaterd.model import Method
from pinlaterd.rpc.compact import from_binary, to_binary
from pinlaterd.rpc.framing import FrameReader
from tests.rpc.strategies import Shape, calls
from tests.rpc.thrift_bytes import (
    LIST,
    STRUCT,
    Field,
    enqueue,
    framed,
    job,
    queue_names,
    write_message,
)

MAX_BYTES = 1 << 20


def read_all(
    pieces: Sequence[bytes], max_bytes: int = MAX_BYTES
) -> tuple[list[bytes], str | None, int]:
    """The messages, the failure, and what is left over."""
    frames = FrameReader(max_bytes)
    messages = []
    for piece in pieces:
        messages += frames.feed(piece)
        while frames.paused:
            messages += frames.feed(b"")
    return messages, str(frames.failure) if frames.failure else None, len(frames.buffer)


def split(data: bytes, cuts: Sequence[int]) -> list[bytes]:
    places = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[begin:end] for begin, end in pairwise(places)]


MESSAGES = st.lists(
    calls(list(Method), Shape(in_order=False, unknown=True, wrong=False)).map(
        lambda call: write_message(*call)
    ),
    min_size=1,
    max_size=4,
)
CUTS = st.lists(st.integers(0, 10_000), max_size=8)


@given(MESSAGES, CUTS, st.booleans(), st.integers(0, 20))
def test_any_split_gives_the_same_messages(messages, cuts, with_frames, missing):
    data = b"".join(map(framed, messages) if with_frames else messages)
    rest = (framed(messages[0]) if with_frames else messages[0])[:missing]

    got, failure, left = read_all(split(data + rest, cuts))

    assert got == messages
    assert failure is None
    assert left == missing


@given(st.binary(max_size=300), CUTS, st.sampled_from([b"", b"\x80\x01\x00\x01", b"\0\0\0\x09"]))
def test_any_bytes_give_the_same_messages_and_failure_in_any_split(data, cuts, start):
    data = start + data

    whole = read_all([data], max_bytes=100)

    assert read_all(split(data, cuts), max_bytes=100) == whole
    assert read_all([data[at : at + 1] for at in range(len(data))], max_bytes=100) == whole


@given(MESSAGES, st.data())
def test_changed_unframed_bytes_give_the_same_in_any_split(messages, data):
    changed = bytearray(b"".join(messages))
    at = data.draw(st.integers(2, len(changed) - 1))
    changed[at] = data.draw(st.integers(0, 255))

    whole = read_all([bytes(changed)])

    assert read_all(split(bytes(changed), data.draw(CUTS))) == whole


def test_messages_that_are_not_strict_come_in_frames_too():
    messages = [queue_names(strict=False), queue_names(strict=True)]

    assert read_all([b"".join(map(framed, messages))])[0] == messages


def test_messages_before_the_failure_are_kept():
    data = framed(queue_names()) + b"\0\0\0\0" + framed(queue_names())

    messages, failure, left = read_all([data])

    assert messages == [queue_names()]
    assert failure == "a frame of length 0; a frame holds one message"
    assert left == 0


CURE = "max_frame_bytes is 1048576: send fewer jobs a call, or raise it in etc/pinlaterd.yaml"
PORT = "this is pinlaterd's Thrift port"
USE = "set the client to framed TBinaryProtocol or TCompactProtocol"


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"GET /stats.txt HTTP/1.1\r\n", f"HTTP; {PORT}, statistics are on stats_port"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", f"HTTP; {PORT}, statistics are on stats_port"),
        (
            b"\x16\x03\x01\x02\x00\x01",
            f"TLS; {PORT}, which is not encrypted: switch TLS off in the client",
        ),
        (
            b"SSH-2.0-OpenSSH_9.2\r\n",
            f"a frame of 1397966893 bytes (it begins 53 53 48 2d); {CURE.partition(',')[0]}",
        ),
        (
            b"\x82\x21\x01\x0dgetQueueNames",
            f"no Thrift protocol that is spoken here (it begins 82 21 01 0d); {USE}",
        ),
        (
            b"\x7f\xff\xff\xff",
            f"a frame of 2147483647 bytes (it begins 7f ff ff ff); {CURE.partition(',')[0]}",
        ),
        (
            b"\xff\xff\xff\xff",
            f"no Thrift protocol that is spoken here (it begins ff ff ff ff); {USE}",
        ),
        (
            b"\x00\x20\x00\x00",
            f"a frame of 2097152 bytes (it begins 00 20 00 00); {CURE}",
        ),
    ],
)
def test_a_failure_says_what_came_and_what_to_do(data, says):
    frames = FrameReader(MAX_BYTES)

    assert frames.feed(data) == []

    assert isinstance(frames.failure, ProtocolError)
    assert str(frames.failure) == says
    assert frames.feed(framed(queue_names())) == []


def test_later_frames_are_bounded_and_nothing_follows_a_failure():
    frame = framed(queue_names())
    frames = FrameReader(len(frame) - 4)

    assert frames.feed(frame) == [queue_names()]
    assert frames.feed(framed(enqueue(job(b"x" * 100)))) == []
    assert frames.failure is not None
    assert frames.feed(frame) == []


def test_letters_where_a_later_frame_begins_are_no_other_protocol():
    _, failure, _ = read_all([framed(queue_names()) + b"INFO"])

    assert failure is not None
    assert failure.startswith(
        "a frame of 1229866575 bytes (it begins 49 4e 46 4f); max_frame_bytes"
    )


def test_an_unframed_message_is_bounded_too():
    message = enqueue(job(b"x" * 2000))
    frames = FrameReader(1000)

    assert frames.feed(message[:100]) == []

    assert str(frames.failure) == "an unframed message is too long; " + CURE.replace(
        "1048576", "1000"
    )
    assert FrameReader(len(message)).feed(message) == [message]
    assert FrameReader(len(message) - 1).feed(message) == []


def test_the_first_message_tells_that_a_connection_speaks_compact():
    frames = FrameReader(MAX_BYTES)
    sent = [queue_names(seqid=number) for number in range(3)]
    data = b"".join(framed(from_binary(message)) for message in sent)

    messages = [*frames.feed(data[:40]), *frames.feed(data[40:])]

    assert [to_binary(message, MAX_BYTES) for message in messages] == sent
    assert frames.compact


@pytest.mark.parametrize("with_frames", [True, False])
def test_a_large_message_in_small_pieces_is_copied_a_bounded_number_of_times(with_frames):
    """Copied again for each piece it would be half a terabyte: minutes, not a fraction of one."""
    message = enqueue(job(b"x" * ((64 << 20) - 1000)))
    data = framed(message) if with_frames else message
    frames = FrameReader(64 << 20)

    begin = time.process_time()
    got = [found for at in range(0, len(data), 4096) for found in frames.feed(data[at : at + 4096])]

    assert got == [message]
    assert time.process_time() - begin < 20


@given(st.integers(0, 12_000), CUTS)
def test_a_walk_through_many_values_lets_others_run_and_finds_the_same(values, cuts):
    strangers = write_message("x", [Field(9, LIST, (STRUCT, [[]] * values))])
    messages = [strangers, queue_names(), strangers, strangers]

    assert read_all(split(b"".join(messages), cuts)) == (messages, None, 0)


@pytest.mark.parametrize("first", [60_000_000, 1])
def test_no_step_of_a_walk_is_long(first):
    """A message that is refused, and many that are small enough each."""
    head = write_message("x", [])[:-1] + b"\x0f\0\x09\x0c"
    message = head + first.to_bytes(4, "big") + bytes(first + 1)
    longest = []

    for _ in range(3):  # a busy host may take time from a step
        frames = FrameReader(64 << 20)
        frames.feed(message * (200_000 // len(message) + 1))  # copies the 60 MB once
        seconds = []
        while frames.paused:
            seconds.append(_seconds(lambda: frames.feed(b"")))  # noqa: B023 - called at once
        longest.append(max(seconds))
        assert sum(seconds) < 5

    assert min(longest) < 0.1
    if first > 1:
        assert str(frames.failure).startswith(
            "too many values; a message may have 1000000, 50000 of"
        )


def _seconds(action: Callable[[], object]) -> float:
    begin = time.process_time()
    action()
    return time.process_time() - begin


def test_many_small_values_in_small_pieces_are_walked_once():
    message = enqueue(*[job(b"x")] * 5000)
    frames = FrameReader(MAX_BYTES)

    begin = time.process_time()
    got = [found for at in range(len(message)) for found in frames.feed(message[at : at + 1])]

    assert got == [message]
    assert time.process_time() - begin < 20


def test_a_claimed_length_takes_no_memory():
    frames = FrameReader(64 << 20)

    frames.feed((64 << 20).to_bytes(4, "big") + b"x")

    assert len(frames.buffer) == 5
