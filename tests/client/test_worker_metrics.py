"""The port of a worker's metrics: what it serves, and to whom. What the figures say is in
`test_worker`."""

from __future__ import annotations

import logging
import socket
import struct
from collections.abc import Iterator
from urllib.parse import urlsplit
from urllib.request import urlopen

import pytest

from pinlaterd.client import Client, Handlers, RunningJob, Worker
from pinlaterd.client.metrics import WorkerMetrics


@pytest.fixture
def metrics() -> WorkerMetrics:
    handlers = Handlers()

    @handlers.queue("mail")
    def work(job: RunningJob) -> None: ...

    return WorkerMetrics(Worker(Client(port=1), handlers))


@pytest.fixture
def url(metrics) -> Iterator[str]:
    with metrics.served(0) as url:
        yield url


@pytest.fixture
def peer(url) -> Iterator[socket.socket]:
    place = urlsplit(url)
    with socket.create_connection((place.hostname, place.port), timeout=60) as peer:
        yield peer


def test_single_metrics_can_be_asked_for(url):
    with urlopen(f"{url}?name[]=pinlaterd_worker_concurrency") as answer:
        lines = answer.read().decode().splitlines()

    assert [line for line in lines if line[0] != "#"] == [
        'pinlaterd_worker_concurrency{queue="mail"} 8.0'
    ]


def test_a_connection_that_keeps_silent_is_ended(monkeypatch, request):
    monkeypatch.setattr("pinlaterd.client.metrics._Handler.timeout", 0.05)

    assert request.getfixturevalue("peer").recv(1) == b""


def test_one_that_breaks_off_leaves_one_line_for_who_looks_for_it(peer, caplog, capfd, wait_until):
    caplog.set_level(logging.DEBUG, "pinlaterd.client.metrics")
    peer.sendall(b"GET /metr")
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # by a reset
    peer.close()

    wait_until(lambda: "connection of 127.0.0.1: ConnectionResetError" in caplog.text, seconds=60)
    assert "Traceback" not in capfd.readouterr().err


def test_a_host_that_can_not_be_is_an_error_of_the_system(metrics):
    with (
        pytest.raises(OSError, match=r"no host has such a name .*label empty or too long"),
        metrics.served(0, host="a..b"),
    ):
        pass
