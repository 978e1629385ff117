"""The names by which clients may call this machine over HTTP.

A web page may give an address of ours a name of its own, and read what we answer (DNS rebinding):
so a `Host` header has to be an address or a name that is ours.
"""

from __future__ import annotations

import socket
from collections.abc import Collection


def is_ours(host: str, names: Collection[str]) -> bool:
    """Return whether a Host header is an address, localhost, or one of `names`, whatever their
    ports."""
    name = name_in(host)
    is_address = ":" in name or name.replace(".", "").isdigit()
    return is_address or name in {"localhost", *map(name_in, names)}


def name_in(host: str) -> str:
    """Return the name or address in a Host header, without its port."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return name.strip().rstrip(".").lower()


def names_of_machine() -> Collection[str]:
    """Return this machine's names, also as DNS has them, for which it may have to wait."""
    own = socket.gethostname()
    try:
        name, aliases, _ = socket.gethostbyaddr(own)
    except OSError:
        return {own.lower()}
    return {found.lower() for found in (own, name, *aliases)}
