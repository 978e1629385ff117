"""What a host's name stands for, asked of DNS for no longer than one cares to wait.

The system's own look-up can't be bounded or cancelled: it lasts until the name servers have been
silent for long enough, often longer than a call has. So it runs in a thread that ends by itself and
keeps no program from ending. There is one at a time for each host: who asks meanwhile waits for it.
"""

from __future__ import annotations

import ipaddress
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from pinlaterd.client.addresses import Address


class Endpoint(NamedTuple):
    """A server by number, as a socket takes it."""

    family: socket.AddressFamily
    where: tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes]


class Names:
    """Looks up the hosts of one client's servers; any number of threads may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: dict[Address, Future[list[Endpoint]]] = {}

    def look_up(self, server: Address) -> Future[list[Endpoint]]:
        """Becomes what the server's name stands for, in the system's order of preference, or an
        OSError."""
        if _is_numeric(server.host):
            known: Future[list[Endpoint]] = Future()
            _resolve(server, known)  # no name server is asked
            return known
        with self._lock:
            if server not in self._under_way:
                found: Future[list[Endpoint]] = Future()
                found.set_running_or_notify_cancel()  # who gives up does not end it for the others
                threading.Thread(
                    target=self._ask, args=(server, found), name=f"dns-{server.host}", daemon=True
                ).start()
                self._under_way[server] = found
            return self._under_way[server]

    def _ask(self, server: Address, found: Future[list[Endpoint]]) -> None:
        _resolve(server, found)
        with self._lock:  # who comes from now on asks anew
            del self._under_way[server]


def in_turn(endpoints: Sequence[Endpoint], deadline: float) -> Iterator[tuple[Endpoint, float]]:
    """Each with the time (monotonic seconds) until which it may be tried, so that the others have
    as long."""
    for number, endpoint in enumerate(endpoints):
        now = time.monotonic()
        yield endpoint, now + (deadline - now) / (len(endpoints) - number)


def _resolve(server: Address, found: Future[list[Endpoint]]) -> None:
    try:
        infos = socket.getaddrinfo(server.host, server.port, type=socket.SOCK_STREAM)
    except OSError as error:
        found.set_exception(error)
    else:
        found.set_result([Endpoint(family, where) for family, _, _, _, where in infos])


def _is_numeric(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
