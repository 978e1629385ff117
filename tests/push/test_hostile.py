"""A downstream's answers are bounded, and names lead nowhere that is not listed."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop

from pinlaterd.config.push_hosts import PushHosts, host_of
from pinlaterd.push.downstream import DownstreamAnswer, Downstreams
from tests.push.downstream import downstream
from tests.servers.tls_proxy import TlsProxy, write_certificate

_HEAD = b"HTTP/1.1 200 OK\r\n"
_MB = 1024 * 1024


@contextmanager
def talking(talk: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server that reads something and then says what it likes; yields its URL."""

    def serve() -> None:
        with contextlib.suppress(OSError):
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                talk(connection)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


def post(url: str, hosts: PushHosts | None = None) -> DownstreamAnswer:
    async def posted() -> DownstreamAnswer:
        downstreams = Downstreams(hosts, ssl.create_default_context())
        try:
            return await downstreams.post(url, b"{}", {})
        finally:
            await downstreams.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(posted())


def endlessly(content: bytes) -> Callable[[socket.socket], None]:
    def talk(connection: socket.socket) -> None:
        while True:
            connection.sendall(content)

    return talk


def with_head(head: bytes, content: bytes) -> Callable[[socket.socket], None]:
    def talk(connection: socket.socket) -> None:
        connection.sendall(_HEAD + head)
        endlessly(content)(connection)

    return talk


@pytest.mark.parametrize(
    "talk",
    [
        pytest.param(with_head(b"Content-Length: 1000000000\r\n\r\n", b" " * _MB), id="gigabyte"),
        pytest.param(with_head(b"\r\n", b" " * _MB), id="endless body"),
        pytest.param(with_head(b"", b"X-More: " + b"x" * 8000 + b"\r\n"), id="endless headers"),
        pytest.param(with_head(b"X-Long: ", b"x" * _MB), id="endless header"),
        pytest.param(endlessly(b"\0" * _MB), id="no HTTP"),
    ],
)
def test_an_answer_without_an_end_is_cut(talk: Callable[[socket.socket], None]) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with talking(talk) as url:
        answer = post(url)

    assert answer.failure, "not by the time limit"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024, "KiB"


def test_an_answer_that_trickles_is_cut_by_time() -> None:
    def trickle(connection: socket.socket) -> None:
        connection.sendall(_HEAD + b"Content-Length: 1000000\r\n\r\n")
        with contextlib.suppress(OSError):
            while True:
                connection.sendall(b" ")
                time.sleep(0.1)  # what is tested is slowness

    with talking(trickle) as url:
        answer = post(url)

        assert answer == DownstreamAnswer(is_down=True), "taken as received"


def test_an_answer_has_just_so_long_as_rickover_gives_it() -> None:
    """The client's own limits end on whole seconds otherwise."""
    delays: list[float] = []

    class Loop(asyncio.SelectorEventLoop):
        def call_at(self, when: float, *arguments: Any, **named: Any) -> Any:  # type: ignore[override]
            delays.append(when - self.time())
            return super().call_at(when, *arguments, **named)

    async def posted(url: str) -> DownstreamAnswer:
        downstreams = Downstreams(None, ssl.create_default_context())
        answer = await downstreams.post(url, b"{}", {})
        await downstreams.close()
        return answer

    with downstream() as there, asyncio.Runner(loop_factory=Loop) as runner:
        assert runner.run(posted(there.url)) == DownstreamAnswer()

    assert 6.0 < max(delays) <= 6.5


def test_a_downstream_that_takes_no_connection_has_not_taken_the_job() -> None:
    with (
        socket.create_server(("127.0.0.1", 0), backlog=0) as listener,
        contextlib.ExitStack() as waiting,
    ):
        address = listener.getsockname()
        # One more than the backlog: others get no answer.
        waiting.enter_context(socket.create_connection(address))
        answer = post(f"http://127.0.0.1:{address[1]}/")

    assert answer == DownstreamAnswer("can't be connected to: no answer", is_down=True)


@pytest.mark.parametrize("is_known", [False, True])
def test_the_certificate_of_https_is_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_known: bool
) -> None:
    certificate = write_certificate(tmp_path)
    if is_known:
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    with downstream() as there, closing(TlsProxy(there.port, certificate)) as proxy:
        answer = post(f"https://127.0.0.1:{proxy.port}/jobs", PushHosts("127.0.0.1"))

    assert [one.path for one in there.received] == (["/jobs"] if is_known else [])
    assert ("its certificate was refused" in answer.failure) is not is_known


def test_a_connection_is_used_again_until_its_server_closes_it() -> None:
    def talk(connection: socket.socket) -> None:
        for ending in (b"", b"Connection: close\r\n"):
            connection.sendall(_HEAD + ending + b"Content-Length: 0\r\n\r\n")
            received.append(connection.recv(65536))

    received: list[bytes] = []

    async def posted(url: str) -> list[DownstreamAnswer]:
        downstreams = Downstreams(None, ssl.create_default_context())
        answers = [await downstreams.post(url, b"{}", {}) for _ in range(2)]
        await downstreams.close()
        return answers

    with talking(talk) as url:
        answers = asyncio.run(posted(url))

    assert answers == [DownstreamAnswer(), DownstreamAnswer()]
    assert received[0].startswith(b"POST / HTTP/1.1\r\n")
    assert received[1] == b"", "it was closed"


@pytest.mark.parametrize(
    ("listed", "is_reached"),
    [("local*", False), ("localhost", True), ("local*,127.0.0.0/8,::1", True), ("other", False)],
)
def test_a_name_does_not_lead_into_this_machine(listed: str, *, is_reached: bool) -> None:
    with downstream() as there:
        answer = post(f"http://localhost:{there.port}/", PushHosts(listed))

    assert bool(there.received) is is_reached
    assert ("push_hosts" in answer.failure) is not is_reached


def test_a_connection_that_is_kept_ends_once_its_address_is_not_listed() -> None:
    async def posted(url: str) -> list[DownstreamAnswer]:
        hosts = PushHosts("local*,127.0.0.0/8,::1")
        downstreams = Downstreams(hosts, ssl.create_default_context())
        try:
            answers = [await downstreams.post(url, b"{}", {})]
            downstreams.follow(PushHosts("local*"))
            return [*answers, await downstreams.post(url, b"{}", {})]
        finally:
            await downstreams.close()

    with downstream() as there:
        reached, refused = asyncio.run(posted(f"http://localhost:{there.port}/"))

    assert reached == DownstreamAnswer()
    assert "push_hosts" in refused.failure
    assert len(there.received) == 1


def test_an_end_right_after_a_change_of_hosts_leaves_no_session_open() -> None:
    async def are_closed() -> list[bool]:
        downstreams = Downstreams(PushHosts("localhost"), ssl.create_default_context())
        sessions = [downstreams._session]
        downstreams.follow(PushHosts("local*"))
        sessions.append(downstreams._session)
        await downstreams.close()
        return [session.closed for session in sessions]

    assert asyncio.run(are_closed()) == [True, True]


@pytest.mark.parametrize(
    ("listed", "host", "address", "is_admitted"),
    [
        ("*.example.com", "a.example.com", "93.184.215.14", True),
        ("*.example.com", "A.EXAMPLE.com", "93.184.215.14", True),
        ("*.example.com", "example.org", "93.184.215.14", False),
        ("*", "a.example.com", "10.1.2.3", False),
        ("*", "a.example.com", "169.254.169.254", False),
        ("*", "a.example.com", "::ffff:10.1.2.3", False),
        ("*", "a.example.com", "fe80::1%eth0", False),
        ("*", "a.example.com", "0.0.0.0", False),
        ("*", "a.example.com", "224.0.0.1", False),
        ("*,10.0.0.0/8", "a.example.com", "10.1.2.3", True),
    ],
)
def test_hosts_are_what_is_listed(
    listed: str, host: str, address: str, *, is_admitted: bool
) -> None:
    assert PushHosts(listed).admits(host, address) is is_admitted


def test_an_address_in_a_url_has_to_be_listed_itself() -> None:
    assert not PushHosts("*").names("127.0.0.1")
    assert PushHosts("127.0.0.0/8").names("127.0.0.1")
    assert PushHosts("[::1]").names(host_of("https://[::1]:8443/jobs"))
