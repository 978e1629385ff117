"""Who has to wait when all connections together hold too much."""

from __future__ import annotations

from pinlaterd.rpc.buffers import BufferBudget

MAX_BYTES = 64_000


class Client:
    def __init__(self) -> None:
        self.bytes = 0
        self.held = False

    def held_bytes(self) -> int:
        return self.bytes

    def hold(self, held: bool) -> None:
        self.held = held


def clients_holding(*sizes: int) -> tuple[BufferBudget, list[Client]]:
    clients = [Client() for _ in sizes]
    budget = BufferBudget(MAX_BYTES, lambda: clients)
    for client, size in zip(clients, sizes, strict=True):
        client.bytes = size
        budget.charge(size)
    return budget, clients


def test_below_half_nobody_waits():
    budget, clients = clients_holding(10_000, 20_000, 1000)

    assert not any(client.held for client in clients)
    assert not budget.strained


def test_above_half_the_largest_waits():
    budget, clients = clients_holding(30_000, 100, 4000)

    assert [client.held for client in clients] == [True, False, False]
    assert budget.strained


def test_once_there_is_room_all_go_on():
    budget, clients = clients_holding(30_000, 100, 4000)
    clients[0].bytes = 0

    budget.count()

    assert not any(client.held for client in clients)
    assert not budget.strained


def test_at_the_limit_all_wait():
    budget, clients = clients_holding(20_000, 30_000, 13_500)

    budget.count()

    assert all(client.held for client in clients)


def test_what_was_charged_and_has_gone_is_forgiven_when_counted():
    budget, clients = clients_holding(0)

    for _ in range(1000):
        budget.charge(1000)

    assert not clients[0].held
    assert not budget.strained


def test_those_who_keep_sending_never_exceed_the_limit():
    """Fifty clients send as long as they may: in pieces of 500 bytes, whatever the order."""
    clients = [Client() for _ in range(50)]
    budget = BufferBudget(MAX_BYTES, lambda: clients)

    for _ in range(200):
        for client in clients:
            if not client.held:
                client.bytes += 500
                budget.charge(500)

    total = sum(client.bytes for client in clients)
    assert total <= MAX_BYTES + MAX_BYTES // 64
    assert all(client.held for client in clients)
