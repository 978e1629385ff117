"""Bytes that no client would send: each is answered with an error or closes its own connection."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import pytest

from pinlaterd.errors import PinLaterError
from pinlaterd.model import Method
from pinlaterd.rpc import codec
from pinlaterd.rpc.compact import from_binary
from tests.deployment import Deployment
from tests.hostile.calls import field, head, mutated, random_fields, text, valid_calls
from tests.hostile.conftest import MIB, QUEUE
from tests.hostile.wire import ANSWER_SECONDS, RawConnection
from tests.rpc.thrift_bytes import (
    I64,
    LIST,
    MAP,
    SET,
    STRING,
    STRUCT,
    framed,
    write_compact_message,
    write_message,
)

pytestmark = pytest.mark.service

FRAME_LIMIT = 64 * MIB
CALLS = valid_calls(QUEUE)
# That others wait, at most, for what a message costs, beside twice what they wait for otherwise:
# many times this when it is read in one go.
MOST_HELD_SECONDS = 0.2
USUAL_WORK_SECONDS = 0.05  # on a quiet machine; a slow one may hold others for as much longer
USUAL_CALLS = 50
TRIES = 10
_COMPACT_CALL = from_binary(head(Method.CREATE_QUEUE) + bytes(1))[:-1]


def _exchange_all(
    deployment: Deployment, messages: Iterable[bytes], *, compact: bool = False
) -> list[bytes]:
    """Each message is answered, or closes its connection; all answers."""
    answers: list[bytes] = []

    def connect() -> RawConnection:
        connection = RawConnection(deployment.port, compact=compact)
        connection.begin()
        return connection

    connection = connect()
    for message in messages:
        try:
            answers += connection.exchange(message)
        except TimeoutError:
            pytest.fail(f"neither answered nor closed: {message[:2000].hex()}")
        if not connection.open:
            connection.socket.close()
            connection = connect()
    connection.socket.close()
    return answers


def test_valid_calls_are_answered(deployment: Deployment):
    assert len(_exchange_all(deployment, CALLS)) == len(CALLS)


def test_random_bytes(deployment: Deployment):
    chance = random.Random(1)
    _exchange_all(deployment, (chance.randbytes(chance.randrange(1, 300)) for _ in range(300)))


def test_random_bytes_without_frames(deployment: Deployment):
    chance = random.Random(2)
    for _ in range(200):
        with RawConnection(deployment.port) as connection:
            connection.send(chance.randbytes(chance.randrange(1, 300)))


@pytest.mark.parametrize("seed", range(4))
def test_mutated_calls(deployment: Deployment, seed):
    chance = random.Random(seed)
    _exchange_all(deployment, (mutated(chance.choice(CALLS), chance) for _ in range(400)))


@pytest.mark.parametrize("seed", range(2))
def test_mutated_compact_calls(deployment: Deployment, seed):
    chance = random.Random(seed)
    calls = [from_binary(call) for call in CALLS]
    mutants = (mutated(chance.choice(calls), chance) for _ in range(400))
    assert _exchange_all(deployment, mutants, compact=True)


def test_compact_fields_of_any_type(deployment: Deployment):
    chance = random.Random(3)
    messages = [
        write_compact_message(method.value, random_fields(chance))
        for method in Method
        for _ in range(20)
    ]
    assert _exchange_all(deployment, messages, compact=True)


@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"\x1c" * 1_000_000, id="deep structs"),
        pytest.param(b"\x19" * 1_000_000, id="deep lists"),
        pytest.param(b"\x19\xfc\xff\xff\xff\xff\x0f" + bytes(1000), id="a list that lies"),
        pytest.param(b"\x19\xfc\xff\x83\x7a" + bytes(2_000_001), id="too many structs"),
        pytest.param(b"\x19\xf6\xbf\x84\x3d" + bytes(999_999), id="as many numbers as may be"),
        pytest.param(b"\x1b\xff\xff\xff\xff\x0f\x88" + bytes(1000), id="a map that lies"),
        pytest.param(b"\x18\xff\xff\xff\xff\x0f" + bytes(1000), id="a text that lies"),
        pytest.param(b"\x15" + b"\xff" * 1_000_000, id="a number without end"),
    ],
)
def test_compact_messages_that_would_be_dear(deployment: Deployment, body):
    _exchange_all(deployment, [_COMPACT_CALL + body + bytes(1)] * 3, compact=True)


def _strangers(kind: int, count: int, element: bytes) -> bytes:
    """A field that nobody knows: a list of that many values."""
    return field(LIST, 99, struct.pack(">bi", kind, count) + element * count)


def _call_with(unknown: bytes) -> bytes:
    return head(Method.QUEUE_NAMES) + _CONTEXT + unknown + bytes(1)


def _enqueue_with(unknown: bytes, jobs: int) -> bytes:
    """With the unknown field in each of its jobs."""
    each = field(STRING, 1, text(b"x")) + unknown + bytes(1)
    listed = field(LIST, 2, struct.pack(">bi", STRUCT, jobs) + each * jobs)
    request = field(STRING, 1, text(QUEUE.encode())) + listed + bytes(1)
    return head(Method.ENQUEUE) + _CONTEXT + field(STRUCT, 2, request) + bytes(1)


_CONTEXT = field(STRUCT, 1, field(STRING, 1, text(b"hostile")) + bytes(1))
_STRUCTS = _call_with(_strangers(STRUCT, 8_000_000, b"\0"))
_LISTS = _call_with(_strangers(LIST, 1_500_000, struct.pack(">bi", I64, 0)))
_TEXTS = _call_with(_strangers(STRING, 2_000_000, text(b"")))
_FLAGS = _call_with(field(2, 99, b"\1") * 2_000_000)
_IN_JOBS = _enqueue_with(_strangers(STRUCT, 9_000, b"\0"), 900)
_IN_MANY_JOBS = _enqueue_with(_strangers(STRUCT, 9, b"\0"), 9_000)
_COMPACT_STRUCTS = b"\x19\xfc" + b"\xb0\xb6\x3c" + bytes(990_000)
_COMPACT_NUMBERS = b"\x19\xf6" + b"\xb0\xb6\x3c" + b"\xff\x01" * 990_000
_DEAR = {
    "unframed structs": _STRUCTS,
    "unframed lists": _LISTS,
    "unframed texts": _TEXTS,
    "unframed flags": _FLAGS,
    "unframed jobs": _IN_JOBS,
    "unframed messages": _call_with(_strangers(STRUCT, 9_000, b"\0")) * 100,
    "structs": framed(_STRUCTS),
    "lists": framed(_LISTS),
    "texts": framed(_TEXTS),
    "flags": framed(_FLAGS),
    "jobs": framed(_IN_JOBS),
    "many jobs": framed(_IN_MANY_JOBS),
    "compact structs": framed(_COMPACT_CALL + _COMPACT_STRUCTS + bytes(1)),
    "compact numbers": framed(_COMPACT_CALL + _COMPACT_NUMBERS + bytes(1)),
    "small compact": framed(_COMPACT_CALL + b"\x19\xfc\xd8\x36" + bytes(7_001)) * 500,
}


@pytest.mark.parametrize("name", _DEAR)
def test_no_message_holds_the_router(deployment: Deployment, name):
    """Others are answered while the router reads it, and then it is refused, or carried out."""
    held: list[float] = []  # as a part of what may be
    while not held or (min(held) > 1 and len(held) < TRIES):
        slowness = max(1.0, min(_seconds_of_work() for _ in range(3)) / USUAL_WORK_SECONDS)
        with RawConnection(deployment.port) as other, RawConnection(deployment.port) as hostile:
            usual = max(_seconds_of_a_call(other) for _ in range(USUAL_CALLS))
            with ThreadPoolExecutor(1) as thread:
                ended = thread.submit(_send_and_wait, hostile, _DEAR[name])
                slowest = 0.0
                while not ended.done():
                    slowest = max(slowest, _seconds_of_a_call(other))
            ended.result()
        held.append((slowest - 2 * usual) / (MOST_HELD_SECONDS * slowness))
    assert min(held) < 1, held


def _seconds_of_a_call(connection: RawConnection) -> float:
    began = time.monotonic()
    connection.begin()
    return time.monotonic() - began


def _seconds_of_work() -> float:
    """Return what this process takes for something that needs the processor alone."""
    began = time.monotonic()
    sum(range(2_000_000))
    return time.monotonic() - began


def _send_and_wait(connection: RawConnection, data: bytes) -> None:
    """Wait for an answer, or the end of the connection."""
    connection.send(data)
    with contextlib.suppress(ConnectionResetError):
        connection.socket.recv(1)


def test_a_message_that_is_dear_is_refused_with_a_line_in_the_log(
    deployment: Deployment, wait_until
):
    with RawConnection(deployment.port) as connection:
        connection.send(_STRUCTS)
        assert connection.receive_message() is None

    line = "too many values; a message may have 1000000, 50000 of"
    wait_until(lambda: line in deployment.log_tails(200))


@pytest.mark.parametrize("method", list(Method))
def test_fields_of_any_type(deployment: Deployment, method):
    chance = random.Random(method)
    messages = [write_message(method.value, random_fields(chance)) for _ in range(60)]
    answers = _exchange_all(deployment, messages)
    assert answers, "none was even understood: the test shows nothing"


def test_a_type_that_does_not_exist(deployment: Deployment):
    _exchange_all(
        deployment, (head(Method.ENQUEUE) + field(kind, 1, bytes(20)) for kind in range(256))
    )


@pytest.mark.parametrize("method", [Method.ENQUEUE, Method.CREATE_QUEUE, "noSuchMethod"])
@pytest.mark.parametrize("depth", [100, 10_000, 1_000_000])
def test_deep_nesting(deployment: Deployment, method, depth):
    structs = field(STRUCT, 99, b"") * depth + bytes(depth)
    lists = field(LIST, 99, struct.pack(">bi", LIST, 1) * depth + struct.pack(">bi", I64, 0))
    maps = field(MAP, 99, struct.pack(">bbi", MAP, MAP, 1) * depth + struct.pack(">bbi", 8, 8, 0))
    unended = field(SET, 99, struct.pack(">bi", SET, 1) * depth)
    for body in (structs + bytes(1), lists + bytes(1), maps + bytes(1), unended):
        _exchange_all(deployment, [head(method) + body])


def test_a_list_of_many_empty_jobs_is_one_error(deployment: Deployment):
    """Three million structs that lack what is required, in one valid frame."""
    jobs = b"\x0c" + struct.pack(">i", 3_000_000) + bytes(3_000_000)
    context = field(STRUCT, 1, field(STRING, 1, text(b"hostile")) + bytes(1))
    request = field(STRING, 1, text(QUEUE.encode())) + field(LIST, 2, jobs) + bytes(1)
    message = head(Method.ENQUEUE) + context + field(STRUCT, 2, request) + bytes(1)

    [answer] = _exchange_all(deployment, [message])

    with pytest.raises(PinLaterError, match="invalid request"):
        codec.decode_reply(Method.ENQUEUE, answer)


@pytest.mark.parametrize("kind", [0, 2, 3, 5, 255], ids=lambda k: f"type{k}")
def test_a_message_that_is_no_call_closes_its_connection(deployment: Deployment, kind):
    with RawConnection(deployment.port) as connection:
        assert connection.exchange(head(Method.QUEUE_NAMES, kind) + bytes(1)) == []
        assert not connection.open


def test_connections_that_never_finish_a_frame(deployment: Deployment):
    """Each announces 60 MiB; memory is taken for what comes, not for what is announced."""
    connections = [RawConnection(deployment.port) for _ in range(200)]
    for connection in connections:
        connection.send(struct.pack(">I", 60 * MIB) + bytes(1000))

    with RawConnection(deployment.port) as other:
        other.exchange(CALLS[8])
        assert other.open
    for connection in connections:
        connection.socket.close()


def test_clients_that_hang_up_before_the_answer(deployment: Deployment):
    for call in CALLS * 10:
        with RawConnection(deployment.port) as connection:
            connection.send(framed(call))
            # Closed with a reset, as by a process that dies.
            connection.socket.setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
            )


def test_a_frame_at_the_limit_of_size(deployment: Deployment):
    """64 MiB of one call: refused in its content, not fatal to anyone."""
    context = field(STRUCT, 1, field(STRING, 1, text(b"hostile")) + bytes(1))
    start = head(Method.CREATE_QUEUE) + context
    name = text(b"a" * (FRAME_LIMIT - len(start) - 8))
    message = start + field(STRING, 2, name) + bytes(1)
    assert len(message) == FRAME_LIMIT
    with RawConnection(deployment.port) as connection:
        connection.socket.settimeout(ANSWER_SECONDS)
        [answer] = connection.exchange(message)
        assert connection.open
    assert len(answer) < 1000
