"""Who has to wait when all connections together hold too much, and who makes no progress."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import cast

from pinlaterd.config.schema import ServerSettings
from pinlaterd.rpc.connection import Connection
from pinlaterd.rpc.server import BufferBudget, ThriftServer
from pinlaterd.stats import Stats
from tests.rpc.thrift_bytes import framed, queue_names

MAX_BYTES = 64_000


class Client:
    """Holds `bytes` of an unfinished message of `frame` bytes."""

    def __init__(self, held: int = 0, frame: int = 0) -> None:
        self.bytes = held
        self.frame = frame
        self.held = False

    def held_bytes(self) -> int:
        return self.bytes

    @property
    def reader(self) -> Client:
        return self

    @property
    def missing(self) -> int:
        return max(0, self.frame - self.bytes)

    def hold(self, held: bool) -> None:
        self.held = held


def budget_of(*clients: Client) -> BufferBudget:
    budget = BufferBudget(MAX_BYTES, lambda: cast("Collection[Connection]", clients))
    for client in clients:
        budget.charge(client.bytes)
    budget.count()
    return budget


def test_below_half_nobody_waits():
    clients = [Client(10_000, 60_000), Client(20_000, 60_000), Client()]

    budget_of(*clients)

    assert not any(client.held for client in clients)


def test_above_half_those_go_on_who_lack_the_least_and_fit():
    lacks_much, lacks_little, idle = Client(20_000, 60_000), Client(20_000, 24_000), Client()

    budget = budget_of(lacks_much, lacks_little, idle)

    assert [lacks_much.held, lacks_little.held, idle.held] == [True, False, False]
    assert budget.crowded


def test_once_there_is_room_all_go_on():
    clients = [Client(20_000, 60_000), Client(20_000, 60_000)]
    budget = budget_of(*clients)
    assert [client.held for client in clients] == [False, True]
    clients[0].bytes = clients[0].frame = 0

    budget.count()

    assert not any(client.held for client in clients)
    assert not budget.crowded


def test_at_the_limit_one_unfinished_message_still_goes_on():
    unread_answers, one, other = Client(60_000), Client(3000, 50_000), Client(3000, 10_000)
    idle = Client()

    budget_of(unread_answers, one, other, idle)

    assert [unread_answers.held, one.held, other.held, idle.held] == [True, True, False, True]


def test_what_was_charged_and_has_gone_is_forgiven_when_counted():
    client = Client()
    budget = budget_of(client)

    for _ in range(1000):
        budget.charge(1000)

    assert not client.held


def test_many_who_send_as_fast_as_they_may_all_finish_and_stay_within_the_limit():
    """Fifty clients with messages of 4,000 bytes each: three times the limit, in pieces of 500."""
    clients = [Client(0, 4000) for _ in range(50)]
    budget = budget_of(*clients)
    most = 0
    rounds = 0

    while any(client.frame for client in clients):
        rounds += 1
        assert rounds < 1000
        for client in clients:
            if client.frame and not client.held:
                client.bytes += 500
                budget.charge(500)
            most = max(most, sum(each.bytes for each in clients))
            if client.bytes == client.frame:
                client.bytes = client.frame = 0
        budget.count()

    assert MAX_BYTES // 2 < most <= MAX_BYTES + 4000


class Transport:
    """Of a client of whose answers so many bytes are unsent."""

    unsent = 0

    def get_write_buffer_size(self) -> int:
        return self.unsent


def connected() -> Connection:
    server = ThriftServer(lambda _message, _answer: None, ServerSettings(), Stats())
    connection = Connection(server)
    connection._transport = cast("asyncio.Transport", Transport())
    return connection


def test_a_message_that_comes_slowly_but_steadily_is_waited_for():
    connection = connected()
    connection.data_received((1 << 20).to_bytes(4, "big"))

    for second in range(10):
        assert connection.stalled(second, seconds=1.5) is None
        connection.data_received(bytes(1024))
    assert connection.stalled(10, seconds=1.5) is None
    connection.data_received(bytes(10))

    assert connection.stalled(12, seconds=1.5) is not None


def test_whole_messages_are_progress_however_small():
    connection = connected()
    call = framed(queue_names())
    connection.data_received(call[:9])

    for second in range(10):
        assert connection.stalled(second, seconds=1.5) is None
        connection.data_received(call[9:] + call[:9])
