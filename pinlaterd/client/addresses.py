"""Which server a call goes to: the addresses a Client was given, and which of them are well.

Everything here is pure: no sockets, no clock, no locks (its owner has one). Times are monotonic
seconds, given as arguments.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

# A server that fails is left alone for so long; after each vain look at it for twice as long.
FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 30.0

_NOT_IN_A_HOST = frozenset(" \t\r\n/,;@")


class AddressInvalid(ValueError):
    """What was given names no server; the message says what would."""


class Address(NamedTuple):
    """Where a server listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_addresses(hosts: str | Sequence[str], default_port: int) -> tuple[Address, ...]:
    """The servers named by one or more of HOST, HOST:PORT and [IPV6]:PORT, each once.

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
            f"{named!r} is no server; write HOST, HOST:PORT or [IPV6]:PORT, several as a list"
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


@dataclass(slots=True)
class _Pause:
    """A server that failed is left alone `until` then."""

    seconds: float
    until: float


class Servers:
    """The servers of one service, and which of them are left alone because they failed.

    well --failed--> away --its pause is over: one call looks--> well if it answers,
                                                                 else away for twice as long
    """

    def __init__(self, addresses: Sequence[Address], *, rng: random.Random) -> None:
        self.addresses = tuple(addresses)
        # Clients that start together don't begin with the same server.
        self._turn = rng.randrange(len(self.addresses))
        self._pauses: dict[Address, _Pause] = {}

    def order(self, *, now: float) -> list[Address]:
        """All servers in the order in which a call should try them.

        Those that are well come first and take turns; those that are left alone come last, the
        one that returns soonest before the others. One whose pause is over is this call's first,
        and no other call's until it has answered: if it still hangs, it costs one call only.
        """
        well = [address for address in self.addresses if address not in self._pauses]
        if well:
            turn = self._turn % len(well)
            self._turn += 1
            well = well[turn:] + well[:turn]
        away = sorted(self._pauses, key=lambda address: self._pauses[address].until)
        if away and (pause := self._pauses[away[0]]).until <= now:
            pause.seconds = min(2 * pause.seconds, LONGEST_PAUSE_SECONDS)
            pause.until = now + pause.seconds
            return [away[0], *well, *away[1:]]
        return well + away

    def failed(self, address: Address, *, now: float) -> None:
        """It can't be connected, or broke, or kept silent.

        The pause does not grow here: many calls that break at the same time are one failure.
        """
        pause = self._pauses.setdefault(address, _Pause(FIRST_PAUSE_SECONDS, now))
        pause.until = max(pause.until, now + pause.seconds)

    def answered(self, address: Address) -> None:
        """It is well."""
        self._pauses.pop(address, None)
