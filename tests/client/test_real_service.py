"""Both clients on the real service: a long poll, TLS, and servers that come and go."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress
from functools import partial

import pytest

from pinlaterd.client import (
    AsyncClient,
    ClaimedJob,
    Client,
    ConnectionFailed,
    Job,
    JobState,
    Worker,
)
from pinlaterd.client.addresses import FIRST_PAUSE_SECONDS
from pinlaterd.model import DequeueResult, Method
from tests.client.either_client import BlockingAsyncClient
from tests.client.process_handlers import handle
from tests.client.working import handlers_of, have_ended, records_of, running
from tests.deployment import frozen
from tests.servers.tls_proxy import TlsProxy, write_certificate

pytestmark = pytest.mark.service

# A router starts within a second, and pauses grow to twice what it took; machines are busy.
BACK_SECONDS = 60
HERE, THERE = "on_the_real_one", "on_the_scripted_one"


def test_a_long_poll_that_is_cancelled_keeps_no_job(service, queue):
    async def cancel_then_enqueue() -> list[ClaimedJob]:
        async with AsyncClient(port=service.port) as client:
            waiting = asyncio.create_task(client.dequeue(queue, limit=1, max_wait_ms=30_000))
            await client.queue_names()
            waiting.cancel()
            await asyncio.wait([waiting])
            assert waiting.cancelled()
            await client.enqueue(queue, [b"for another"])
            return await client.dequeue(queue, limit=1, max_wait_ms=30_000)

    [job] = asyncio.run(cancel_then_enqueue())
    assert job.body == b"for another"


# --- TLS ----------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def certificate(tmp_path_factory):
    return write_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture
def trusting(certificate):
    return ssl.create_default_context(cafile=str(certificate))


@pytest.fixture
def proxy(service, certificate):
    proxy = TlsProxy(service.port, certificate)
    yield proxy
    proxy.close()


def test_a_jobs_life_over_tls(proxy, trusting, queue, connect):
    body = bytes(range(256)) * 2000  # many TLS records
    with connect(port=proxy.port, ssl=trusting) as client:
        client.enqueue(queue, [body])
        [job] = client.dequeue(queue, limit=1, max_wait_ms=30_000)
        client.ack(queue, succeeded=[job])

        assert job.body == body
        assert client.dequeue(queue, limit=1) == []
    # What TLS itself says between two calls (session tickets) costs no connection.
    assert proxy.connections == 1


def test_a_handler_in_a_process_is_told_why_it_has_no_client(proxy, trusting, queue, wait_until):
    with Client(port=proxy.port, ssl=trusting) as client:
        descriptors = client.enqueue(queue, [Job(b"save", attempts_allowed=1), b"pid"])
        handlers = handlers_of(queue, handle, run_in="processes", concurrency=1)
        with running(Worker(client, handlers, max_wait_ms=100)):
            wait_until(lambda: have_ended(client, descriptors), seconds=60)
        refused, did = records_of(client, descriptors)

    assert "job.save can't be had in a process: a Client with ssl=" in refused.custom_status
    assert did.state is JobState.SUCCEEDED


def test_a_certificate_that_is_not_trusted_is_refused_before_anything_is_sent(proxy, connect):
    with (
        connect(port=proxy.port, ssl=ssl.create_default_context()) as client,
        pytest.raises(ConnectionFailed, match="its certificate was refused: self"),
    ):
        client.queue_names()


def test_tls_to_a_port_that_speaks_none_says_so(service, trusting, connect):
    with (
        connect(port=service.port, ssl=trusting) as client,
        pytest.raises(ConnectionFailed, match=f"cannot connect .*:{service.port}: "),
    ):
        client.queue_names()


def test_a_server_that_never_finishes_the_handshake_ends_with_the_connect_timeout(
    silent_port, trusting, connect
):
    with (
        connect(port=silent_port, ssl=trusting, connect_timeout_seconds=0.2) as client,
        pytest.raises(ConnectionFailed, match=f":{silent_port}: timed out"),
    ):
        client.queue_names()


# --- servers that come and go, beside a scripted one that is always well ------------------


@pytest.fixture
def servers(service, server) -> list[str]:
    service.wait_until_serving()
    with service.client() as client:
        client.create_queue(HERE)
    answers = {Method.QUEUE_NAMES: frozenset({THERE}), Method.DEQUEUE: DequeueResult([])}
    server.reply = lambda call: answers[Method(call.head.method_name)]
    return [f"127.0.0.1:{port}" for port in (service.port, server.port)]


def who_answers(client, calls: int = 4) -> set[str]:
    return {queue for _ in range(calls) for queue in client.queue_names() & {HERE, THERE}}


def both_answer(client) -> bool:
    with suppress(ConnectionFailed):
        return who_answers(client) == {HERE, THERE}
    return False


def pauses(client) -> dict[int, float]:
    """For how long servers are left alone, by port."""
    failures = client._servers._failures
    return {address.port: each.pause_seconds for address, each in failures.items() if each.is_away}


def test_a_killed_router_costs_no_read_and_gets_calls_again_once_it_is_back(
    service, servers, wait_until
):
    with Client(servers) as blocking, BlockingAsyncClient(servers) as asynchronous:
        clients = (blocking, asynchronous)
        assert all(who_answers(client) == {HERE, THERE} for client in clients)
        service.kill("router")

        for _ in range(20):
            assert all(who_answers(client, calls=1) for client in clients)
        for client in clients:
            wait_until(partial(both_answer, client), seconds=BACK_SECONDS)


def test_a_frozen_router_costs_no_long_poll_its_time_and_is_found_once_it_goes_on(
    service, servers, wait_until, connect
):
    with connect(servers, timeout_seconds=2, connect_timeout_seconds=1) as client:

        def is_found_out() -> bool:
            with suppress(ConnectionFailed):
                who_answers(client)
            return set(pauses(client)) == {service.port}

        def has_been_probed_in_vain_while_long_polls_are_answered() -> bool:
            assert client.dequeue("mail", limit=1, max_wait_ms=30_000) == []
            return pauses(client)[service.port] >= 4 * FIRST_PAUSE_SECONDS

        with frozen(service.pid_of("router")):
            wait_until(is_found_out)
            wait_until(has_been_probed_in_vain_while_long_polls_are_answered)
        wait_until(partial(both_answer, client), seconds=BACK_SECONDS)
