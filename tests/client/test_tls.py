"""A Client that reaches the service through a proxy that ends TLS."""

from __future__ import annotations

import ssl

import pytest

from pinlaterd.client import Client, ConnectionFailed, Job, JobState, Worker
from tests.client.process_handlers import handle
from tests.client.working import handlers_of, have_ended, records_of, running
from tests.servers.tls_proxy import TlsProxy, write_certificate


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


def test_a_jobs_life_over_tls(proxy, trusting, queue):
    body = bytes(range(256)) * 2000  # many TLS records
    with Client(port=proxy.port, ssl=trusting) as client:
        client.enqueue(queue, [body])
        [job] = client.dequeue(queue, limit=1)
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


def test_a_certificate_that_is_not_trusted_is_refused_before_anything_is_sent(proxy):
    with (
        Client(port=proxy.port, ssl=ssl.create_default_context()) as client,
        pytest.raises(ConnectionFailed, match="its certificate was refused: self"),
    ):
        client.queue_names()


def test_tls_to_a_port_that_speaks_none_says_so(service, trusting):
    with (
        Client(port=service.port, ssl=trusting) as client,
        pytest.raises(ConnectionFailed, match=f"cannot connect .*:{service.port}: "),
    ):
        client.queue_names()


def test_a_server_that_never_finishes_the_handshake_ends_with_the_connect_timeout(
    silent_port, trusting
):
    with (
        Client(port=silent_port, ssl=trusting, connect_timeout_seconds=0.2) as client,
        pytest.raises(ConnectionFailed, match=f":{silent_port}: timed out"),
    ):
        client.queue_names()
