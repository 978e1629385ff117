"""A TCP proxy in between, that a test can make slow, cut a connection or swallow everything."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from enum import Enum

HOST = "127.0.0.1"
_CHUNK = 1 << 16


class Cut(Enum):
    BEFORE = "what was said is not passed on"
    AFTER = "what was said is passed on, the answer is not"
    SILENCE = "neither is passed on, and nobody is told"


class Proxy:
    """Passes on what comes to `port`, until it is told otherwise. Ends with `close`."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._plans: list[tuple[bytes, Cut]] = []
        self._open: set[socket.socket] = set()
        self._muted: set[socket.socket] = set()  # servers whose answers are not passed on
        self._listener = socket.create_server((HOST, 0))
        self.port = int(self._listener.getsockname()[1])
        self.cuts = 0
        self.last_answer = b""  # the latest piece passed on to a client
        self.refuses = False  # whoever comes from now on; what is open goes on
        self.delay_seconds = 0.0  # of whatever passes, in each direction
        self._flow = _flowing()
        self._flows = [self._flow]
        self._start(self._accept)

    def cut_at(self, said: bytes, how: Cut, *, times: int = 1) -> None:
        """End the connections on which a client next says `said`; SILENCE holds what is open."""
        self._plans = [(said, how)] * times

    def hold(self) -> None:
        """From now on nothing comes through, in either direction, and nobody is told."""
        self._flow.clear()

    def hold_what_is_open(self) -> None:
        """The same on the connections that there are; others pass."""
        self._flow.clear()
        self._flow = _flowing()
        self._flows.append(self._flow)

    def cut_all(self) -> None:
        """End every connection that is open."""
        for each in list(self._open):
            _end(each)
        self.cuts += 1

    def go_on(self) -> None:
        for flow in self._flows:
            flow.set()

    def close(self) -> None:
        self.go_on()
        _end(self._listener)  # a close alone would let one more in
        for each in list(self._open):
            _end(each)

    def _start(self, work: Callable[..., None], *arguments: object) -> None:
        threading.Thread(target=work, args=arguments, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                if self.refuses:
                    _end(client)
                    continue
                try:
                    server = socket.create_connection((HOST, self._target_port))
                except OSError:
                    _end(client)  # there is no server now
                    continue
                self._open |= {client, server}
                self._start(self._pass_on, self._flow, client, server, True)
                self._start(self._pass_on, self._flow, server, client, False)

    def _pass_on(
        self, flow: threading.Event, source: socket.socket, to: socket.socket, is_client: bool
    ) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_CHUNK):
                time.sleep(self.delay_seconds)
                flow.wait()
                if source in self._muted:
                    continue
                if is_client and self._plans and self._plans[0][0] in data:
                    _, how = self._plans.pop(0)
                    if how is Cut.SILENCE:
                        self.hold_what_is_open()
                        flow.wait()
                        continue
                    self._cut(source, to, data, how)
                    break
                if is_last := _has_ended(source):
                    # They came as one: whoever looks for the end after the data has to find it.
                    to.setsockopt(socket.IPPROTO_TCP, socket.TCP_CORK, 1)
                to.sendall(data)
                if not is_client:
                    self.last_answer = data
                if is_last:
                    break
        _end(source)
        _end(to)
        self._open -= {source, to}

    def _cut(self, client: socket.socket, server: socket.socket, data: bytes, how: Cut) -> None:
        if how is Cut.AFTER:
            # Done before the client hears of it: it may have the server end this connection.
            self._muted.add(server)
            with contextlib.suppress(OSError):  # it may have gone by now
                server.sendall(data)
                server.shutdown(socket.SHUT_WR)
                while server.recv(_CHUNK):  # it has done what was said when it hangs up
                    pass
        _end(client)
        self.cuts += 1


def _flowing() -> threading.Event:
    flow = threading.Event()
    flow.set()
    return flow


def _has_ended(source: socket.socket) -> bool:
    """Whether nothing more will come from it, by what has arrived."""
    with contextlib.suppress(BlockingIOError):
        return not source.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    return False


def _end(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
