"""The hosts that jobs may be pushed to, as `push_hosts` lists them."""

from __future__ import annotations

import ipaddress
from contextlib import suppress
from fnmatch import fnmatchcase
from urllib.parse import urlsplit

_LOCALHOST = "localhost"


class PushHosts:
    """The hosts that are listed. A name admits public addresses only: a client that can change what
    it resolves to must not lead requests into this machine or a private network."""

    def __init__(self, listed: str) -> None:
        """`listed`: names, shell patterns, addresses and networks, with commas between."""
        self.listed = listed
        self._patterns = [one for one in listed.lower().split(",") if one]
        self._networks: list[ipaddress.IPv4Network | ipaddress.IPv6Network] = []
        for one in self._patterns:
            with suppress(ValueError):
                self._networks.append(ipaddress.ip_network(one.strip("[]"), strict=False))

    def names(self, host: str) -> bool:
        """Return whether a URL may name this host, a name or an address."""
        with suppress(ValueError):
            address = ipaddress.ip_address(host)
            return any(address in network for network in self._networks)
        return any(fnmatchcase(host.lower(), pattern) for pattern in self._patterns)

    def admits(self, host: str, address: str) -> bool:
        """Return whether `host` may be reached at an address that it resolves to."""
        if not self.names(host):
            return False
        found = ipaddress.ip_address(address.partition("%")[0])
        if found.version == 6 and found.ipv4_mapped is not None:
            found = found.ipv4_mapped
        if any(found in network for network in self._networks):
            return True
        if host.lower() == _LOCALHOST and _LOCALHOST in self._patterns:
            return found.is_loopback
        return found.is_global and not found.is_multicast


def host_of(url: str) -> str:
    """Return the host of a URL; "" if it has none, or no valid port."""
    with suppress(ValueError):
        parts = urlsplit(url)
        return (parts.hostname or "") if parts.port != 0 else ""
    return ""
