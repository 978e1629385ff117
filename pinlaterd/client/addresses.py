"""The choice of the server for a call: the addresses that a Client was given, or that a list has
which it follows, which of them are healthy, and what DNS says that they stand for. Times are
monotonic seconds."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pinlaterd.config.layout import FileWatch, read_file
from pinlaterd.config.schema import Address

# A server that fails is left alone for so long; after each vain probe for twice as long.
FIRST_PAUSE_SECONDS = 0.25
LONGEST_PAUSE_SECONDS = 16.0
_FILE_SECONDS = 0.5

_NOT_IN_A_HOST = frozenset(" \t\r\n/,;@")


class AddressInvalid(ValueError):
    """A text that names no server; the message says what would."""


def parse_addresses(hosts: str | Sequence[str], default_port: int) -> tuple[Address, ...]:
    """Read the servers named by one or more of HOST, HOST:PORT and [IPV6]:PORT, each once.

    Raises AddressInvalid.
    """
    named = [hosts] if isinstance(hosts, str) else hosts
    if not named:
        raise AddressInvalid("no server is named; give HOST or HOST:PORT, or a list of them")
    return tuple(dict.fromkeys(_parse_address(each, default_port) for each in named))


def _parse_address(named: str, default_port: int) -> Address:
    if named.startswith("["):
        host, bracket, rest = named[1:].partition("]")
        is_whole = bool(bracket) and (not rest or rest.startswith(":"))
        port_text = rest[1:] if rest else str(default_port)
    elif named.count(":") == 1:
        host, _, port_text = named.partition(":")
        is_whole = True
    else:  # a name, an IPv4 address, or an IPv6 address without a port
        host, port_text, is_whole = named, str(default_port), True
    if not is_whole or not host or _NOT_IN_A_HOST.intersection(host):
        raise AddressInvalid(
            f"{named!r} is no server; write HOST, HOST:PORT or [IPV6]:PORT, several as a list, or "
            "as file:PATH or zk://HOSTS/PATH"
        )
    try:
        host.encode("idna")
    except UnicodeError as error:
        raise AddressInvalid(
            f"{named!r} is no server: a label of a host's name has 1 to 63 characters that DNS can "
            "hold"
        ) from error
    if not (port_text.isascii() and port_text.isdigit() and 1 <= int(port_text) <= 65535):
        raise AddressInvalid(f"{named!r}: port {port_text!r} is not a number from 1 to 65535")
    return Address(host, int(port_text))


# --- lists that change ----------------------------------------------------------------------


class ServerList:
    """The servers that were named. A subclass follows a list of them, in a file or ZooKeeper.

    `addresses`: the last list that could be read and had any; () before the first. `problem`: why
    there is none. `was_read`: done once it was looked for."""

    problem = "it was not read yet"

    def __init__(self, name: str, addresses: Sequence[Address] = ()) -> None:
        self.name = name
        self.addresses = addresses
        self.was_read: Future[None] = Future()
        self.was_read.set_running_or_notify_cancel()  # a call that gives up does not end it

    def refresh(self) -> None:
        """Look for changes, before each use, by one thread at a time. Does not wait."""

    def close(self) -> None:
        """Close the list. Safe to repeat."""

    def _take(self, addresses: Sequence[Address], problem: str) -> None:
        if addresses and addresses != self.addresses:
            self.addresses = addresses
        self.problem = problem
        if not self.was_read.done():
            self.was_read.set_result(None)


class FileList(ServerList):
    """A file of servers, a line each; what follows a `#` is a comment."""

    def __init__(self, name: str, default_port: int) -> None:
        super().__init__(name)
        self._path = Path(name.removeprefix("file:"))
        self._default_port = default_port
        self._watch = FileWatch([self._path], self._read)
        self._look_at = 0.0

    def refresh(self) -> None:
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + _FILE_SECONDS if self.addresses else 0.0
        found = self._watch.look() if self.addresses else self._read()
        if found is not None:
            self._take(*found)

    def _read(self) -> tuple[Sequence[Address], str]:
        try:
            lines = read_file(self._path).decode().splitlines()
            servers = filter(None, (line.partition("#")[0].strip() for line in lines))
            return parse_addresses(tuple(servers), self._default_port), ""
        except OSError as error:
            return (), f"can't be read: {error.strerror}"
        except ValueError as error:
            return (), str(error)


def open_list(hosts: str | Sequence[str], default_port: int) -> ServerList:
    """Open the list file:PATH or zk://HOSTS/PATH, or one of the addresses that are named.

    Raises AddressInvalid."""
    if isinstance(hosts, str) and hosts.startswith("file:"):
        return FileList(hosts, default_port)
    if isinstance(hosts, str) and hosts.startswith("zk:"):
        try:
            from pinlaterd.client.zookeeper import ZooKeeperList  # noqa: PLC0415  (is optional)
        except ImportError as error:
            raise AddressInvalid(f"{hosts!r}: {error}") from error
        return ZooKeeperList(hosts)
    addresses = parse_addresses(hosts, default_port)
    return ServerList(", ".join(map(str, addresses)), addresses)


# --- health ---------------------------------------------------------------------------------


@dataclass(slots=True)
class _Failure:
    """A server failed, and has answered no call since. It is left alone until `pause_ends_at`, then
    probed. If it answers a probe, but fails the next call, it is left alone for longer."""

    pause_seconds: float
    pause_ends_at: float
    is_away: bool = True
    is_probed: bool = False

    def pause_longer(self, now: float) -> None:
        self.pause_seconds = min(2 * self.pause_seconds, LONGEST_PAUSE_SECONDS)
        self.pause_ends_at = now + self.pause_seconds
        self.is_away = True


class Servers:
    """The servers of one service, and which of them are left alone because they failed.

                a call failed                    its pause is over
     healthy ──────────────────▶ left alone ─────────────────────────▶ probed
         ▲                          ▲  ▲                                │  │
         │                          │  └──── longer pause: no answer ───┘  │
         └────────── a call there, or a probe, was answered ───────────────┘

    Calls go to one that is left alone only if no other is left to try. Pure, without lock or clock.
    """

    def __init__(self, addresses: Sequence[Address], *, rng: random.Random) -> None:
        self._addresses: Sequence[Address] = ()
        self._rng = rng
        self._turn = 0
        self._failures: dict[Address, _Failure] = {}
        self.replace(addresses)

    def replace(self, addresses: Sequence[Address]) -> Sequence[Address]:
        """Have calls go to these from now on; returns those that are no longer among them."""
        if addresses is self._addresses:
            return ()
        gone = [address for address in self._addresses if address not in addresses]
        for address in gone:
            self._failures.pop(address, None)
        self._addresses = addresses
        # Clients that start together don't begin with the same server.
        self._turn = self._rng.randrange(len(addresses) or 1)
        return gone

    def __contains__(self, address: Address) -> bool:
        return address in self._addresses

    def order(self) -> list[Address]:
        """List all servers in the order in which a call tries them: the healthy ones take turns;
        those left alone come last, the one whose pause ends soonest before the others."""
        away = {a: f.pause_ends_at for a, f in self._failures.items() if f.is_away}
        healthy = [address for address in self._addresses if address not in away]
        if healthy:
            turn = self._turn % len(healthy)
            self._turn += 1
            healthy = healthy[turn:] + healthy[:turn]
        return healthy + sorted(away, key=away.__getitem__)

    def failed(self, address: Address, *, now: float) -> None:
        """Note that it can't be connected, or broke, or kept silent. Many calls that break at the
        same time are one failure."""
        if address not in self._addresses:
            return
        failure = self._failures.get(address)
        if failure is None:
            pause_ends_at = now + FIRST_PAUSE_SECONDS
            self._failures[address] = _Failure(FIRST_PAUSE_SECONDS, pause_ends_at)
        elif not failure.is_away:
            failure.pause_longer(now)

    def answered(self, address: Address) -> None:
        """Note that it has answered a call, be it with an error: it is healthy."""
        self._failures.pop(address, None)

    def begin_probe(self, *, now: float) -> Address | None:
        """Return a server to probe now; `end_probe` must follow. A single one is never probed:
        calls go there anyway."""
        if len(self._addresses) == 1:
            return None
        for address, failure in self._failures.items():
            if failure.is_away and not failure.is_probed and failure.pause_ends_at <= now:
                failure.is_probed = True
                return address
        return None

    def end_probe(self, address: Address, *, now: float, is_back: bool) -> None:
        failure = self._failures.get(address)
        if failure is None:  # a call was answered meanwhile
            return
        failure.is_probed = False
        if is_back:
            failure.is_away = False
        else:
            failure.pause_longer(now)


# --- names ----------------------------------------------------------------------------------


class Endpoint(NamedTuple):
    """A server by number, as a socket takes it."""

    family: socket.AddressFamily
    where: tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes]


class Names:
    """Asks DNS what the hosts of one client's servers stand for. The system's own look-up can't be
    bounded or cancelled, and often lasts longer than a call may: so it runs in a daemon thread, one
    at a time for each server, that all callers share."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: dict[Address, Future[list[Endpoint]]] = {}

    def look_up(self, server: Address) -> Future[list[Endpoint]]:
        """Ask DNS for its endpoints, in the system's order of preference; the result may be an
        OSError. Raises OSError if it can't be asked."""
        found: Future[list[Endpoint]] = Future()
        with contextlib.suppress(OSError):
            found.set_result(_endpoints(server, socket.AI_NUMERICHOST))  # no name server is asked
            return found
        with self._lock:
            if server in self._under_way:
                return self._under_way[server]
            found.set_running_or_notify_cancel()  # a caller that gives up does not end it
            asking = threading.Thread(
                target=self._ask, args=(server, found), name=f"dns-{server.host}", daemon=True
            )
            try:
                asking.start()
            except RuntimeError as error:  # no more threads: a call that fails, and is repeated
                raise OSError(str(error)) from error
            self._under_way[server] = found
            return found

    def _ask(self, server: Address, found: Future[list[Endpoint]]) -> None:
        try:
            found.set_result(_endpoints(server))
        except OSError as error:
            found.set_exception(error)
        with self._lock:  # the next caller begins another look-up
            del self._under_way[server]


def _endpoints(server: Address, flags: int = 0) -> list[Endpoint]:
    infos = socket.getaddrinfo(*server, type=socket.SOCK_STREAM, flags=flags)
    return [Endpoint(family, where) for family, _, _, _, where in infos]
