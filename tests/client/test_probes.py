"""A real service that fails and comes back, beside a scripted server that is always well.

A client is given the two as if they were one; the names of their queues tell whose answer it is.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from pinlaterd.client import Client, ConnectionFailed
from pinlaterd.client.addresses import FIRST_PAUSE_SECONDS
from pinlaterd.model import DequeueResult, Method

pytestmark = pytest.mark.service

# A router starts within a second, and pauses grow to twice what it took; machines are busy.
BACK_SECONDS = 60
HERE, THERE = "on_the_real_one", "on_the_scripted_one"


@pytest.fixture
def servers(service, server) -> list[str]:
    service.wait_until_serving()
    with service.client() as client:
        client.create_queue(HERE)
    answers = {Method.QUEUE_NAMES: frozenset({THERE}), Method.DEQUEUE: DequeueResult([])}
    server.reply = lambda call: answers[Method(call.head.method_name)]
    return [f"127.0.0.1:{port}" for port in (service.port, server.port)]


def who_answers(client: Client, calls: int = 4) -> set[str]:
    return {queue for _ in range(calls) for queue in client.queue_names() & {HERE, THERE}}


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def pauses(client: Client) -> dict[int, float]:
    """For how long servers are left alone, by port."""
    troubles = client._pool._ledger._servers._troubles
    return {address.port: each.pause_seconds for address, each in troubles.items() if each.is_away}


def test_a_killed_router_costs_no_read_and_gets_calls_again_once_it_is_back(
    service, servers, wait_until
):
    with Client(servers) as client:
        assert who_answers(client) == {HERE, THERE}
        service.kill("router")

        for _ in range(20):
            assert who_answers(client, calls=1)
        wait_until(lambda: who_answers(client) == {HERE, THERE}, seconds=BACK_SECONDS)


def test_a_frozen_router_costs_no_long_poll_its_time_and_is_found_once_it_goes_on(
    service, servers, wait_until
):
    with Client(servers, timeout_seconds=0.5, connect_timeout_seconds=0.2) as client:

        def is_found_out() -> bool:
            with suppress(ConnectionFailed):
                who_answers(client)
            return set(pauses(client)) == {service.port}

        def has_been_probed_in_vain_while_long_polls_are_answered() -> bool:
            assert client.dequeue("mail", limit=1, max_wait_ms=30_000) == []
            return pauses(client)[service.port] >= 4 * FIRST_PAUSE_SECONDS

        def both_answer() -> bool:
            with suppress(ConnectionFailed):
                return who_answers(client) == {HERE, THERE}
            return False

        with frozen(service.pid_of("router")):
            wait_until(is_found_out)
            wait_until(has_been_probed_in_vain_while_long_polls_are_answered)
        wait_until(both_answer, seconds=BACK_SECONDS)
