"""The port of a worker's metrics: what it serves, and to whom."""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import threading
import time
from collections.abc import Iterator
from urllib.error import URLError
from urllib.parse import urlsplit
from urllib.request import urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pinlaterd.client import Client, Discard, Job, Later, Retry, RunningJob, Worker
from pinlaterd.client.metrics import _MOST_CONNECTIONS, WorkerMetrics
from tests.client.working import handlers_of, have_ended, running


@pytest.fixture
def metrics() -> WorkerMetrics:
    return WorkerMetrics(Worker(Client(port=1), handlers_of("mail", lambda job: None)))


@pytest.fixture
def url(metrics) -> Iterator[str]:
    with metrics.served(0) as url:
        yield url


@pytest.fixture
def peer(url) -> Iterator[socket.socket]:
    place = urlsplit(url)
    with socket.create_connection((place.hostname, place.port), timeout=60) as peer:
        yield peer


def test_figures_are_served_to_prometheus_and_exact(client, queue, wait_until):
    other = f"{queue}_b"
    client.create_queue(other)
    release, hangs = threading.Event(), threading.Event()

    def handle(job: RunningJob) -> None:
        if job.attempt == 1 and job.body != b"fine":
            raise {
                b"retry": Retry(0),
                b"fail": ValueError(),
                b"discard": Discard(),
                b"later": Later(0, body=b"fine"),
            }[job.body]
        time.sleep(0.002)

    def hang(job: RunningJob) -> None:
        hangs.set()
        release.wait(120)

    handlers = handlers_of(queue, handle, concurrency=3)
    handlers.queue(other, concurrency=1)(hang)
    worker = Worker(client, handlers, max_wait_ms=100)
    with WorkerMetrics(worker).served(0) as url, running(worker):
        bodies = [b"fine", b"fine", b"retry", b"discard", b"later"]
        jobs = client.enqueue(queue, [*bodies, Job(b"fail", attempts_allowed=1)])
        hanging = client.enqueue(other, [b"hang"])
        wait_until(lambda: have_ended(client, jobs))
        assert hangs.wait(60)
        found = scraped(url)
        release.set()
        wait_until(lambda: have_ended(client, hanging))

    endings = {"succeeded": 4, "retried": 1, "failed": 1, "discarded": 1, "postponed": 1, "lost": 0}
    for ending, count in endings.items():
        assert found["jobs_total", queue, ending] == count
        assert found["jobs_total", other, ending] == 0
    assert found["run_seconds_count", queue] == 8
    assert found["run_seconds_bucket", queue, "+Inf"] == 8
    assert found["run_seconds_bucket", queue, "0.001"] <= 4
    assert found["run_seconds_sum", queue] >= 4 * 0.002
    assert (found["concurrency", queue], found["jobs_running", queue]) == (3, 0)
    assert (found["concurrency", other], found["jobs_running", other]) == (1, 1)
    assert found["jobs_waiting", queue] == found["jobs_waiting", other] == 0
    assert found["dequeues_total", queue] >= 2
    assert found["dequeue_errors_total", queue] == found["claims_lost_total", queue] == 0
    with pytest.raises(URLError):
        scraped(url)


def scraped(url: str) -> dict[tuple[str, ...], float]:
    """A worker's figures by name, without their prefix, by queue and by what other label it has."""
    with urlopen(url) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    found = {}
    for sample in (sample for family in families for sample in family.samples):
        labels = dict(sample.labels)
        queue = labels.pop("queue")
        found[sample.name.removeprefix("pinlaterd_worker_"), queue, *labels.values()] = sample.value
    return found


def test_single_metrics_can_be_asked_for(url):
    with urlopen(f"{url}?name[]=pinlaterd_worker_concurrency") as answer:
        lines = answer.read().decode().splitlines()

    assert [line for line in lines if line[0] != "#"] == [
        'pinlaterd_worker_concurrency{queue="mail"} 8.0'
    ]


@pytest.mark.parametrize("sent", [b"", b"GET /metr"])
def test_a_connection_without_a_whole_request_is_ended(monkeypatch, request, sent):
    monkeypatch.setattr("pinlaterd.client.metrics._CONNECTION_SECONDS", 0.05)
    peer = request.getfixturevalue("peer")
    peer.sendall(sent)

    with contextlib.suppress(ConnectionResetError):
        assert peer.recv(1) == b""


def test_a_request_that_comes_byte_by_byte_has_no_more_time(monkeypatch, request):
    monkeypatch.setattr("pinlaterd.client.metrics._CONNECTION_SECONDS", 0.2)
    peer = request.getfixturevalue("peer")
    with pytest.raises(ConnectionError):  # noqa: PT012
        while True:
            peer.sendall(b"x")
            time.sleep(0.02)


def test_who_sends_half_a_request_keeps_nobody_out(url, wait_until):
    place = urlsplit(url)
    before = threading.active_count()
    with contextlib.ExitStack() as peers:
        for _ in range(5 * _MOST_CONNECTIONS):
            peer = socket.create_connection((place.hostname, place.port), timeout=60)
            peers.enter_context(peer).sendall(b"GET /metrics HTTP/1.1\r\nHost: ")
        with urlopen(url) as answer:
            assert b"pinlaterd_worker_concurrency" in answer.read()
        # The threads of connections that were ended may live for a moment longer.
        wait_until(lambda: threading.active_count() <= before + _MOST_CONNECTIONS)


@pytest.mark.parametrize(
    ("hosts", "status"),
    [
        ([], b"200"),
        (["127.0.0.1:9108"], b"200"),
        (["[::1]:9108"], b"200"),
        (["localhost"], b"200"),
        ([f"{socket.gethostname()}:9108"], b"200"),
        (["Worker.example.:9108"], b"200"),
        (["evil.example"], b"421"),
        (["localhost", "evil.example"], b"421"),
        ([""], b"421"),
    ],
)
def test_no_web_page_reads_the_figures_under_a_name_of_its_own(metrics, hosts, status):
    head = "".join(f"Host: {host}\r\n" for host in hosts)
    with (
        metrics.served(0, names=["worker.example"]) as url,
        socket.create_connection(("127.0.0.1", urlsplit(url).port), timeout=60) as peer,
    ):
        peer.sendall(f"GET /metrics HTTP/1.1\r\n{head}\r\n".encode())
        answer = b"".join(iter(lambda: peer.recv(65536), b""))

    assert answer.split()[1] == status
    assert (b"pinlaterd_worker_" in answer) == (status == b"200")
    assert (b"no name 'evil.example': add it as --metrics-name" in answer) == (
        "evil.example" in hosts
    )


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
