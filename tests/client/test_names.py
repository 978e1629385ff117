"""Hosts that are named. What DNS says, or does not say, is made up: no test asks a name server."""

from __future__ import annotations

import socket
import threading

import pytest

from pinlaterd.client import ConnectionFailed, JobState, OutcomeUnknown


@pytest.fixture
def dns(monkeypatch):
    """What the name servers say: a function of the host's name to numbers; asked names are kept."""
    system = socket.getaddrinfo

    class Dns:
        def __init__(self):
            self.asked = []
            self.answer = lambda _name: ["127.0.0.1"]

        def look_up(self, host, port, **options):
            if options["flags"] or host[0].isdigit():
                return system(host, port, **options)
            self.asked.append(host)
            return [info for n in self.answer(host) for info in system(n, port, **options)]

    dns = Dns()
    monkeypatch.setattr(socket, "getaddrinfo", dns.look_up)
    return dns


def test_each_number_that_a_name_stands_for_is_tried(server, dns, connect):
    dns.answer = lambda _: ["127.0.0.2", "127.0.0.1"]  # nobody listens at the first
    server.reply = lambda _: 7

    with connect("queue.example", server.port) as client:
        assert client.count("mail", JobState.PENDING) == 7


def test_a_number_that_swallows_packets_leaves_time_to_the_next(
    black_hole, start_server, dns, connect
):
    number, _, port = black_hole.partition(":")
    start_server(host="127.0.0.2", port=int(port)).reply = lambda _: 7
    dns.answer = lambda _: [number, "127.0.0.2"]

    with connect(f"queue.example:{port}", connect_timeout_seconds=8) as client:
        assert client.count("mail", JobState.PENDING) == 7


def test_a_name_server_that_keeps_silent_ends_with_the_time_for_connecting(server, dns, connect):
    answering = threading.Event()
    dns.answer = lambda _: answering.wait(60) and ["127.0.0.1"]
    server.reply = lambda _: 7

    with connect("queue.example", server.port, connect_timeout_seconds=0.1) as client:
        for _ in range(3):
            with pytest.raises(ConnectionFailed, match="DNS has not answered in time") as caught:
                client.count("mail", JobState.PENDING)
            assert not isinstance(caught.value, OutcomeUnknown)
        assert dns.asked == ["queue.example"]  # the calls did not pile up threads

        answering.set()
    with connect("queue.example", server.port) as client:
        assert client.count("mail", JobState.PENDING) == 7


def test_a_name_that_stands_for_nothing_says_so(dns, connect):
    def unknown(_name):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    dns.answer = unknown
    with (
        connect("queue.example") as client,
        pytest.raises(ConnectionFailed, match=": name or service not known"),
    ):
        client.queue_names()
