"""The Thrift port over real sockets: order, back-pressure, hostile and absent clients."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import re
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import uvloop

from pinlaterd.client import AckInfo, CheckpointInfo, Client
from pinlaterd.config.schema import ServerSettings
from pinlaterd.errors import RequestError
from pinlaterd.model import Method
from pinlaterd.rpc import codec, connection
from pinlaterd.rpc.connection import Answer, Connection
from pinlaterd.rpc.server import ThriftServer
from pinlaterd.stats import Stats
from tests.conftest import WaitUntil
from tests.rpc.thrift_bytes import enqueue, framed, job, queue_names, write_message

HOST = "127.0.0.1"
SECONDS = 60.0
# In which the calls of a connection that is gone end; on a busy machine, of so many tries.
ENDED_SECONDS = 5.0
TRIES = 3


Handle = Callable[[bytes, Answer], None]


def answer_at_once(message: bytes, answer: Answer) -> None:
    head = codec.peek(message).head
    answer.send(codec.encode_reply(head, frozenset({"mail"})))


class Collector:
    """A handler that keeps its calls, for the test to answer when it likes."""

    def __init__(self) -> None:
        self.calls: list[tuple[codec.Head, Answer]] = []

    def __call__(self, message: bytes, answer: Answer) -> None:
        self.calls.append((codec.peek(message).head, answer))

    def answer(self, number: int, result: frozenset[str] = frozenset()) -> bool:
        head, answer = self.calls[number]
        return answer.send(codec.encode_reply(head, result))


def answer_each(server: RunningServer, calls: Collector, count: int, wait_until: WaitUntil) -> None:
    """So many calls, each once it was begun."""
    for number in range(count):
        wait_until(lambda number=number: len(calls.calls) > number)  # type: ignore[misc]
        server.call(calls.answer, number)


class RunningServer:
    """A server on an event loop in a thread of its own."""

    def __init__(self, handler: Handle, **settings: Any) -> None:
        self.stats = Stats()
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._settings = ServerSettings(host=HOST, port=0, **settings)
        self.server = self.run(self._start(handler))

    async def _start(self, handler: Handle) -> ThriftServer:
        def handle(message: bytes, connection: Connection) -> None:
            handler(message, Answer(connection, oneway=codec.peek(message).head.oneway))

        server = ThriftServer(handle, self._settings, self.stats)
        await server.start()
        return server

    def run(self, awaitable: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(awaitable, self._loop).result(SECONDS)

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call on the loop, where handlers and answers live."""

        async def within() -> Any:
            return function(*arguments)

        return self.run(within())

    def connect(self, *, receive_bytes: int | None = None) -> socket.socket:
        client = socket.socket()
        if receive_bytes is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        client.settimeout(SECONDS)
        client.connect((HOST, self.server.port))
        return client

    def counted(self, name: str) -> int:
        return self.stats.snapshot()["counters"].get(name, 0)

    def close(self) -> None:
        self.run(self.server.stop(0.5))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(SECONDS)
        self._loop.close()


Start = Callable[..., RunningServer]


@pytest.fixture
def start() -> Iterator[Start]:
    running: list[RunningServer] = []

    def start_server(handler: Handle = answer_at_once, **settings: Any) -> RunningServer:
        running.append(RunningServer(handler, **settings))
        return running[-1]

    yield start_server
    for server in running:
        server.close()


def receive_exactly(client: socket.socket, size: int) -> bytes:
    received = b""
    while len(received) < size:
        piece = client.recv(size - len(received))
        assert piece, "the server closed the connection"
        received += piece
    return received


def receive_frame(client: socket.socket) -> bytes:
    (length,) = struct.unpack(">I", receive_exactly(client, 4))
    return receive_exactly(client, length)


def receive_seqids(client: socket.socket, count: int) -> list[int]:
    return [codec.peek_seqid(receive_frame(client)) for _ in range(count)]


def assert_closed(client: socket.socket) -> None:
    """The server closes; whether by an end or a reset depends on what it had not read."""
    try:
        while client.recv(65536):
            pass
    except ConnectionError:
        pass


def ask(client: socket.socket, seqid: int = 1) -> bytes:
    client.sendall(framed(queue_names(seqid=seqid)))
    return receive_frame(client)


def test_pipelined_calls_are_answered_in_their_order(start, wait_until):
    calls = Collector()
    server = start(calls)
    with server.connect() as client:
        client.sendall(b"".join(framed(queue_names(seqid=number)) for number in range(5)))
        wait_until(lambda: len(calls.calls) == 5)

        for number in (3, 1, 4, 0, 2):
            assert server.call(calls.answer, number)

        assert receive_seqids(client, 5) == [0, 1, 2, 3, 4]


def test_a_oneway_call_is_handled_and_gets_no_answer(start, wait_until):
    calls = Collector()
    server = start(calls)
    with server.connect() as client:
        client.sendall(framed(write_message("getQueueNames", [], kind=4, seqid=1)))
        client.sendall(framed(queue_names(seqid=2)))
        wait_until(lambda: len(calls.calls) == 2)

        # nobody gets the first, so what it would have delivered can be taken back
        assert not server.call(calls.answer, 0)
        assert server.call(calls.answer, 1)

        assert receive_seqids(client, 1) == [2]


def test_small_answers_let_further_calls_begin_behind_one_that_waits(start, wait_until):
    calls = Collector()
    server = start(calls)
    with server.connect() as client:
        client.sendall(b"".join(framed(queue_names(seqid=number)) for number in range(100)))
        wait_until(lambda: len(calls.calls) >= 2)  # not all, as their answers may be large

        for number in range(1, 100):
            wait_until(lambda number=number: len(calls.calls) > number)
            server.call(calls.answer, number)
        server.call(calls.answer, 0)

        assert receive_seqids(client, 100) == list(range(100))


@pytest.mark.parametrize("oneway", [False, True])
def test_no_more_calls_are_begun_than_a_connection_may_have(start, wait_until, oneway):
    """Oneway calls, too, count until they end."""
    calls = Collector()
    server = start(calls, max_calls_per_connection=4)
    sent = [write_message("getQueueNames", [], kind=4 if oneway else 1, seqid=n) for n in range(20)]
    with server.connect() as client, server.connect() as other:
        client.sendall(b"".join(map(framed, [*sent, queue_names(seqid=20)])))
        wait_until(lambda: len(calls.calls) == 4)
        other.sendall(framed(queue_names(seqid=99)))
        wait_until(lambda: len(calls.calls) == 5)
        assert [head.seqid for head, _ in calls.calls] == [0, 1, 2, 3, 99]

        answer_each(server, calls, 22, wait_until)

        answered = [20] if oneway else list(range(21))
        assert receive_seqids(client, len(answered)) == answered
        assert receive_seqids(other, 1) == [99]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"\xde\xad\xbe\xef", "no Thrift protocol that is spoken here (it begins de ad be ef)"),
        (b"\x16\x03\x01\x02\x00\x01", "TLS; this is pinlaterd's Thrift port"),
        (framed(b"\x82\x21\x01\x0dgetQueueNam"), "a value claims 13 bytes, more than its message"),
        (framed(b"\x82\x22\x01\x0dgetQueueNames\0"), "version 2 of TCompactProtocol; only 1"),
        (framed(b"\x80\x07\x00\x01zzzz"), "unknown version 0x8007; Thrift's is 0x8001"),
        (framed(b"\0\0\0\x63abc"), "the message ends within its head"),
        (
            b"\x00\x10\x00\x00",
            "a frame of 1048576 bytes (it begins 00 10 00 00); max_frame_bytes is 65536: send",
        ),
    ],
)
def test_hostile_bytes_close_that_connection_only_and_are_logged(start, caplog, data, reason):
    server = start(max_frame_bytes=65536)
    with caplog.at_level(logging.WARNING), server.connect() as hostile, server.connect() as good:
        address = "{}:{}".format(*hostile.getsockname())
        ask(good)

        hostile.sendall(data)

        assert_closed(hostile)
        assert codec.peek_seqid(ask(good, seqid=2)) == 2
        assert server.counted("connections_closed_on_error") == 1
        assert f"closing the connection from {address}: {reason}" in caplog.text


TOO_LONG = "invalid request: a frame of {} bytes .*; max_frame_bytes is 65536: send fewer jobs"


@pytest.mark.parametrize("piece_bytes", [1000, 300_000, 100_000_000])
def test_a_call_that_is_too_long_is_answered_with_the_end_of_its_connection(start, piece_bytes):
    server = start(max_frame_bytes=65536)
    message = framed(enqueue(job(bytes(100_000 if piece_bytes == 1000 else 80_000_000)), seqid=7))
    with server.connect() as client, server.connect() as good:
        ask(client)
        for at in range(0, len(message), piece_bytes):
            client.sendall(message[at : at + piece_bytes])
            ask(good)

        answer = receive_frame(client)
        assert client.recv(1) == b""  # an end, no reset

    assert codec.peek_seqid(answer) == 7
    with pytest.raises(RequestError, match=TOO_LONG.format(len(message) - 4)):
        codec.decode_reply(Method.ENQUEUE, answer)


def test_a_call_that_is_too_long_and_ends_early_is_closed_in_time(start):
    server = start(max_frame_bytes=65536, request_timeout_ms=100)
    with server.connect() as client:
        client.sendall(framed(enqueue(job(bytes(100_000))))[:70_000])
        assert_closed(client)


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.enqueue("mail", [bytes(1000)] * 100),
        lambda client: client.ack(
            "mail", succeeded=[AckInfo(f"mail:s1:p1:{n}") for n in range(9999)]
        ),
        lambda client: client.checkpoint("mail", [CheckpointInfo("mail:s1:p1:1", bytes(70_000))]),
        lambda client: client.lookup([f"mail:s1:p1:{n}" for n in range(5000)]),
        lambda client: client.dequeue("mail", limit=1, failed=[AckInfo("m" * 70_000)]),
    ],
    ids=["enqueue", "ack", "checkpoint", "lookup", "dequeue"],
)
def test_clients_name_the_limit_and_go_on(start, call):
    server = start(max_frame_bytes=65536)
    with Client(HOST, server.server.port) as client:
        for _ in range(3):
            with pytest.raises(RequestError, match=TOO_LONG.format(r"\d+")):
                call(client)
            assert client.queue_names() == {"mail"}


@pytest.mark.parametrize(
    ("call", "answer"),
    [
        (b"GET /health HTTP/1.1\r\n\r\n", b"HTTP/1.1 400 Bad Request\r\n"),
        (b"POST / HTTP/1.1\r\n\r\n" + b"x" * 1_000_000, b"HTTP/1.1 400 Bad Request\r\n"),
    ],
    ids=["http", "http with a body"],
)
def test_http_is_answered_as_such(start, call, answer):
    server = start()
    with server.connect() as client:
        client.sendall(call)

        told = b""
        while piece := client.recv(65536):
            told += piece

        assert told.startswith(answer)
    assert server.counted("connections_closed_on_error") == 1


def test_an_http_client_that_stays_is_closed(start, monkeypatch, wait_until):
    monkeypatch.setattr(connection, "_HTTP_CLOSE_SECONDS", 0.05)
    server = start()
    with server.connect() as client:
        client.sendall(b"GET / HTTP/1.1\r\n\r\n")
        while client.recv(65536):
            pass

        wait_until(lambda: server.stats.snapshot()["gauges"]["connections"] == 0)


def test_calls_ahead_of_hostile_bytes_are_still_answered(start, wait_until):
    calls = Collector()
    server = start(calls)
    with server.connect() as client:
        client.sendall(framed(queue_names(seqid=5)) + framed(b"\xff\xff\xff\xff nonsense"))
        wait_until(lambda: server.counted("connections_closed_on_error") == 1)

        assert server.call(calls.answer, 0)

        assert receive_seqids(client, 1) == [5]
        assert_closed(client)


def test_an_unfinished_message_that_makes_no_progress_is_closed_and_an_idle_one_kept(start):
    server = start(request_timeout_ms=100)
    stalled, head_only, unframed, idle = (server.connect() for _ in range(4))
    with stalled, head_only, unframed, idle:
        ask(idle)
        stalled.sendall(framed(queue_names())[:-3])
        head_only.sendall(framed(queue_names())[:4])
        unframed.sendall(queue_names()[:-3])

        assert_closed(stalled)
        assert_closed(head_only)
        assert_closed(unframed)

        assert codec.peek_seqid(ask(idle, seqid=2)) == 2
        assert server.counted("connections_closed_on_error") == 3


def test_a_client_that_trickles_single_bytes_is_closed(start, wait_until):
    server = start(request_timeout_ms=100)
    with server.connect() as client:
        client.sendall((60_000).to_bytes(4, "big"))

        def closed_after_one_more_byte() -> bool:
            try:
                client.sendall(b"x")
            except ConnectionError:
                return True
            return False

        wait_until(closed_after_one_more_byte)


def test_a_call_that_takes_long_is_not_taken_for_a_stalled_client(start, wait_until):
    """Its next call lies unfinished in the server only because the server reads no more."""
    calls = Collector()
    # Long enough to send the rest of a message within it.
    server = start(calls, request_timeout_ms=1500, max_calls_per_connection=1)
    with server.connect() as patient, server.connect() as stalled:
        patient.sendall(framed(queue_names(seqid=1)) + framed(queue_names(seqid=2))[:-3])
        stalled.sendall(b"\0\0\0\x09partial")
        wait_until(lambda: len(calls.calls) == 1)
        assert_closed(stalled)  # so the time is over for the patient one, too

        assert server.call(calls.answer, 0)
        patient.sendall(framed(queue_names(seqid=2))[-3:])
        wait_until(lambda: len(calls.calls) == 2)
        assert server.call(calls.answer, 1)

        assert receive_seqids(patient, 2) == [1, 2]


def test_an_answer_to_a_client_that_has_gone_is_not_sent(start, wait_until):
    calls = Collector()
    server = start(calls)
    client = server.connect()
    client.sendall(framed(queue_names(seqid=1)) + framed(queue_names(seqid=2)))
    wait_until(lambda: len(calls.calls) == 2)
    assert not calls.calls[0][1].client_gone
    undelivered: list[tuple[bytes, bool]] = []
    calls.calls[1][1].on_undelivered = lambda *told: undelivered.append(told)
    assert server.call(calls.answer, 1)  # waits for the first one

    client.close()

    wait_until(lambda: calls.calls[0][1].client_gone)
    assert not server.call(calls.answer, 0)
    wait_until(lambda: undelivered)
    assert not calls.calls[0][1].is_next
    assert [(codec.peek_seqid(message), left) for message, left in undelivered] == [(2, False)]


BIG = 4 << 20
AT_ONCE = struct.pack("ii", 1, 0)  # SO_LINGER: the end is a reset


@pytest.mark.parametrize(
    ("read_bytes", "resets", "arrived"),
    [(BIG, False, True), (BIG, True, True), (BIG // 4, False, False), (BIG // 4, True, False)],
)
def test_an_answer_counts_as_delivered_once_all_of_it_has_arrived(
    start, wait_until, read_bytes, resets, arrived
):
    undelivered: list[bool] = []

    def handle(message: bytes, answer: Answer) -> None:
        answer.on_undelivered = lambda _, may_have_left: undelivered.append(may_have_left)
        answer_with_much(message, answer)

    server = start(handle)
    with server.connect(receive_bytes=4096) as client:
        client.sendall(framed(queue_names(seqid=1000)))
        receive_exactly(client, read_bytes)
        if arrived:
            client.settimeout(0)
            wait_until(lambda: can_read_to_end(client))
        if resets:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, AT_ONCE)

    wait_until(lambda: server.stats.snapshot()["gauges"]["connections"] == 0)
    server.call(lambda: None)  # what the end has led to is done
    assert undelivered == [True] * (not arrived)


def can_read_to_end(client: socket.socket) -> bool:
    """Whether nothing more comes: all of the answer was read."""
    try:
        client.recv(1 << 16)
    except BlockingIOError:
        return True
    return False


def test_a_connection_has_only_so_many_calls_that_may_wait(start, wait_until):
    calls = Collector()

    def handle(message: bytes, answer: Answer) -> None:
        answer.expect_wait()
        calls(message, answer)

    server = start(handle, max_waiting_per_connection=2)
    with server.connect() as client:
        client.sendall(b"".join(framed(queue_names(seqid=number)) for number in range(5)))
        wait_until(lambda: len(calls.calls) == 2)

        server.call(calls.answer, 1)
        wait_until(lambda: len(calls.calls) == 3)
        for number in (0, 2, 3, 4):
            server.call(calls.answer, number)
        assert receive_seqids(client, 5) == [0, 1, 2, 3, 4]


def test_a_call_that_waits_ends_with_its_connection_although_that_is_not_read(start, wait_until):
    ended: list[int] = []

    def handle(message: bytes, answer: Answer) -> None:
        answer.expect_wait()
        answer.on_gone = lambda: ended.append(codec.peek_seqid(message))

    server = start(handle, max_waiting_per_connection=2)

    def end_in_time() -> bool:
        ended.clear()
        with server.connect() as client:
            client.sendall(b"".join(framed(queue_names(seqid=number)) for number in range(100)))
        gone_at = time.monotonic()
        wait_until(lambda: len(ended) >= 2)
        seconds = time.monotonic() - gone_at
        assert ended == [0, 1]
        return seconds < ENDED_SECONDS

    assert any(end_in_time() for _ in range(TRIES))


def answer_with_much(message: bytes, answer: Answer) -> None:
    head = codec.peek(message).head
    size = BIG if head.seqid >= 1000 else 1
    answer.send(codec.encode_reply(head, frozenset({"x" * size})))


def test_a_slow_reader_is_not_read_from_and_disturbs_nobody(start, wait_until):
    begun = Collector()

    def handle(message: bytes, answer: Answer) -> None:
        begun(message, answer)
        answer_with_much(message, answer)

    server = start(handle)
    with server.connect(receive_bytes=4096) as slow, server.connect() as good:
        slow.sendall(b"".join(framed(queue_names(seqid=1000 + each)) for each in range(6)))
        wait_until(lambda: begun.calls)

        for number in range(50):
            assert codec.peek_seqid(ask(good, seqid=number)) == number

        slow_begun = [head.seqid for head, _ in begun.calls if head.seqid >= 1000]
        assert len(slow_begun) <= 2
        assert receive_seqids(slow, 6) == list(range(1000, 1006))


def test_a_reader_that_takes_nothing_is_closed(start):
    server = start(answer_with_much, request_timeout_ms=100)
    with server.connect(receive_bytes=4096) as slow, server.connect() as good:
        slow.sendall(framed(queue_names(seqid=1000)))
        receive_exactly(slow, 10)

        while server.counted("connections_closed_on_error") == 0:
            ask(good)

        with pytest.raises(AssertionError, match="closed"):
            receive_exactly(slow, BIG)


def test_those_who_hold_memory_and_make_no_progress_make_room_for_others(start, wait_until, caplog):
    """Clients leave large messages unfinished, until others would have to wait for ever."""
    limit, frame = 1 << 20, 1 << 19
    server = start(max_buffered_bytes=limit, max_frame_bytes=frame, request_timeout_ms=2000)
    hoarders = [server.connect() for _ in range(10)]
    try:
        with caplog.at_level(logging.WARNING), server.connect() as good:
            for client in hoarders:
                client.setblocking(False)
                client.send(frame.to_bytes(4, "big") + b"x" * 100_000)
            wait_until(lambda: held_bytes(server) > limit // 2)

            good.sendall(framed(enqueue(job(b"x" * (frame - 1000)), seqid=3)))

            assert codec.peek_seqid(receive_frame(good)) == 3
            wait_until(lambda: held_bytes(server) <= limit // 2)
            assert "others wait for its memory: raise max_buffered_bytes" in caplog.text
            assert codec.peek_seqid(ask(good, seqid=4)) == 4
            assert server.counted("connections_closed_on_error") >= 2
    finally:
        for client in hoarders:
            client.close()


def held_bytes(server: RunningServer) -> int:
    def count() -> int:
        return sum(each.held_bytes() for each in server.server._connections)

    held = int(server.call(count))
    assert held <= (1 << 20) + (1 << 19) + (1 << 18)  # the limit, one message, and one piece
    return held


def test_too_many_connections_are_closed_with_one_line_each_up_to_a_bound(
    start, caplog, wait_until
):
    """Those before them have calls in flight."""
    calls = Collector()
    server = start(calls, max_connections=2)
    with caplog.at_level(logging.WARNING), server.connect() as one, server.connect() as two:
        for number, client in enumerate((one, two)):
            client.sendall(framed(queue_names()))
            wait_until(lambda number=number: len(calls.calls) > number)

        for _ in range(50):
            with server.connect() as third:
                assert_closed(third)

        answer_each(server, calls, 2, wait_until)
        receive_frame(one)
        receive_frame(two)
        assert server.counted("connections_refused") == 50
        lines = [line for line in caplog.messages if "max_connections" in line]
        assert len(lines) == 20
        assert lines[0].startswith("closed a connection from 127.0.0.1:")


def test_lines_that_were_left_out_are_counted_although_no_other_comes(
    start, wait_until, caplog, monkeypatch
):
    monkeypatch.setattr("pinlaterd.rpc.server._LOG_SECONDS", 0.2)
    calls = Collector()
    server = start(calls, max_connections=1, request_timeout_ms=500)
    with caplog.at_level(logging.WARNING), server.connect() as one:
        one.sendall(framed(queue_names()))
        wait_until(lambda: calls.calls)
        for _ in range(50):
            with server.connect() as other:
                assert_closed(other)

        def told() -> int:
            text: str = caplog.text
            left_out = re.findall(r"and (\d+) more lines", text)
            return text.count("max_connections") + sum(map(int, left_out))

        wait_until(lambda: told() == 50)


def answer_all_but_long_ones(message: bytes, answer: Answer) -> None:
    if codec.peek_seqid(message) != WAITS:
        answer_at_once(message, answer)


WAITS = 99


def test_the_longest_idle_makes_room_and_calls_in_flight_keep_theirs(start, wait_until, caplog):
    server = start(answer_all_but_long_ones, max_connections=4, request_timeout_ms=500)
    with ExitStack() as stack, caplog.at_level(logging.WARNING):
        waits, idle, busy, other = (stack.enter_context(server.connect()) for _ in range(4))
        waits.sendall(framed(queue_names(seqid=WAITS)))
        for client in (idle, busy, other):
            ask(client)

        def idle_alone() -> bool:
            """Whether only one has made no call between the last looks of the server."""
            ask(busy)
            ask(other)
            since = sorted(each.idle_since for each in server.server._connections)
            return bool(since[0] < since[1])

        wait_until(idle_alone)
        port = idle.getsockname()[1]
        newcomer = stack.enter_context(server.connect())

        ask(newcomer)
        assert_closed(idle)
        ask(busy)
        ask(other)
        assert f"closed the connection from 127.0.0.1:{port}, idle for " in caplog.text
        [late] = [slot for each in server.server._connections for slot in each.slots]
        server.call(late.send, b"late")
        assert receive_frame(waits) == b"late"


@pytest.mark.parametrize(
    ("name", "shown"),
    [(("::1", 9010, 0, 0), "[::1]:9010"), (("127.0.0.1", 1), "127.0.0.1:1"), ("", "?")],
)
def test_a_peer_is_named_as_in_a_url(name, shown):
    assert connection._address(name) == shown


def test_an_address_that_takes_all_makes_room_for_others_and_none_for_itself(start):
    server = start(max_connections=6)
    with ExitStack() as stack:

        def connect(host: str) -> socket.socket:
            client = socket.create_connection((HOST, server.server.port), SECONDS, (host, 0))
            return stack.enter_context(client)

        hostile = [connect("127.0.0.2") for _ in range(6)]
        for client in hostile:
            ask(client)
        mine = [connect("127.0.0.3") for _ in range(2)]
        for client in mine:
            ask(client)
        for _ in range(20):
            connect("127.0.0.2")  # which may be refused, or closed for the next

        for client in mine:
            ask(client)


def test_a_connection_that_is_cut_off_within_a_frame_is_named(start, wait_until, caplog):
    server = start()
    with caplog.at_level(logging.WARNING):
        with server.connect() as whole, server.connect() as cut:
            ask(whole)
            cut.sendall(framed(queue_names())[:-1])

        wait_until(lambda: caplog.messages)
        wait_until(lambda: not server.server._connections)
    [line] = caplog.messages
    assert line.startswith("the connection from 127.0.0.1:")
    assert line.endswith("ended within a message, of which at least 1 byte had yet to come")


def test_stopping_answers_the_calls_in_flight_and_closes(start, wait_until):
    calls = Collector()
    server = start(calls)
    with server.connect() as idle, server.connect() as busy:
        busy.sendall(framed(queue_names(seqid=1)))
        wait_until(lambda: len(calls.calls) == 1)
        port = server.server.port

        stopping = asyncio.run_coroutine_threadsafe(server.server.stop(SECONDS), server._loop)

        assert_closed(idle)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((HOST, port), timeout=SECONDS)
        assert not stopping.done()
        assert server.call(calls.answer, 0)
        assert receive_seqids(busy, 1) == [1]
        assert_closed(busy)
        stopping.result(SECONDS)
        server.run(server.server.stop())  # safe to repeat


def test_stopping_costs_a_client_that_calls_all_the_time_no_call(start):
    """Its connection ends with an answer, in the same moment, and it sees that before it calls."""
    server = start()
    asked = threading.Semaphore(0)
    unanswered: list[Exception] = []

    def call_until_closed(client: socket.socket) -> None:
        try:
            for seqid in itertools.count():
                if select.select([client], [], [], 0)[0]:
                    assert client.recv(1) == b""
                    return
                ask(client, seqid)
                asked.release()
        except (OSError, AssertionError) as error:
            unanswered.append(error)

    with contextlib.ExitStack() as clients:
        callers = [
            threading.Thread(
                target=call_until_closed, args=(clients.enter_context(server.connect()),)
            )
            for _ in range(16)
        ]
        for caller in callers:
            caller.start()
        for _ in range(100):
            assert asked.acquire(timeout=SECONDS)

        # On a busy machine a thread may take long from its look to its call.
        server.run(server.server.stop(SECONDS, retire_seconds=SECONDS / 2))

        for caller in callers:
            caller.join(SECONDS)
        assert not any(caller.is_alive() for caller in callers)
    assert unanswered == []


@pytest.mark.parametrize("most_calls", [1, 4])
def test_stopping_answers_what_it_began_although_more_has_come_in(start, wait_until, most_calls):
    """A connection that is closed over unread bytes throws away what it has not sent."""
    calls = Collector()
    server = start(calls, max_calls_per_connection=most_calls)
    with server.connect() as client:
        client.sendall(b"".join(framed(queue_names(seqid=n)) for n in range(most_calls + 3)))
        wait_until(lambda: len(calls.calls) == most_calls)
        client.sendall(framed(queue_names(seqid=99)) * 10)  # it reads no more by now
        stopping = asyncio.run_coroutine_threadsafe(
            server.server.stop(SECONDS, retire_seconds=0), server._loop
        )
        wait_until(lambda: not server.server.listeners)

        for number in range(most_calls):
            server.call(calls.answer, number)

        assert receive_seqids(client, most_calls) == list(range(most_calls))
        # An answer may let the server begin another call, until it takes no more.
        answered = most_calls
        while not stopping.done():
            wait_until(lambda: stopping.done() or len(calls.calls) > answered)  # noqa: B023
            if answered < len(calls.calls):
                server.call(calls.answer, answered)
                answered += 1
        assert_closed(client)


def test_stopping_gives_up_calls_that_are_not_answered_in_time(start, wait_until):
    calls = Collector()
    server = start(calls)
    with server.connect() as client:
        client.sendall(framed(queue_names(seqid=1)))
        wait_until(lambda: len(calls.calls) == 1)

        server.run(server.server.stop(0.05))

        assert_closed(client)
        assert calls.calls[0][1].client_gone
        assert not server.call(calls.answer, 0)


def test_an_error_in_the_handler_costs_one_connection(start):
    def handle(message: bytes, answer: Answer) -> None:
        if codec.peek(message).head.seqid == 13:
            raise KeyError(13)
        answer_at_once(message, answer)

    server = start(handle)
    with server.connect() as unlucky, server.connect() as good:
        unlucky.sendall(framed(queue_names(seqid=13)))

        assert_closed(unlucky)
        assert codec.peek_seqid(ask(good, seqid=2)) == 2
